// Vectors of 16, 8 or 4 floats (AVX-512, AVX2, SSE2 or NEON) in the vector extensions of GCC and clang: element types,
// 2^t, log and tanh. Branch-free; needs no libmvec and no -ffast-math.
//
// Only rows.cpp, sparse.cpp and gathered.cpp include this file, once per instruction set, inside a namespace of its
// own: an inline function with AVX-512 code under a shared name could be picked by the linker for every CPU.
#pragma once
#include <stdint.h>

#include "../layout.h"

namespace gk {
namespace GK_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

#define GK_INLINE static inline __attribute__((always_inline))

typedef float Float __attribute__((vector_size(4 * kWidth)));
typedef int32_t Int __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UInt __attribute__((vector_size(4 * kWidth)));
typedef uint16_t UShort __attribute__((vector_size(2 * kWidth)));

GK_INLINE Float splat(float x) { return x - Float{}; }  // x - 0 keeps every x, -0 too
GK_INLINE UInt bits(Float x) { return (UInt)x; }
GK_INLINE Float from_bits(UInt x) { return (Float)x; }

// A NaN in the second argument comes through (x86's max and min do just this).
GK_INLINE Float max(Float x, Float y) { return x > y ? x : y; }
GK_INLINE Float min(Float x, Float y) { return x < y ? x : y; }
GK_INLINE Float select(Int mask, Float yes, Float no) { return mask ? yes : no; }
GK_INLINE UInt select(Int mask, UInt yes, UInt no) { return mask ? yes : no; }
GK_INLINE Float absolute(Float x) { return from_bits(bits(x) & 0x7FFFFFFFu); }

// All lanes together, a quarter of a register at a time.
typedef uint32_t Quad __attribute__((vector_size(16)));
GK_INLINE uint32_t sum_of(UInt x) {
    Quad quads[kWidth / 4];
    __builtin_memcpy(quads, &x, sizeof x);
    for (int k = 1; k < kWidth / 4; k++) quads[0] += quads[k];
    return (quads[0][0] + quads[0][1]) + (quads[0][2] + quads[0][3]);
}
GK_INLINE bool any(Int mask) {
    Quad quads[kWidth / 4];
    __builtin_memcpy(quads, &mask, sizeof mask);
    for (int k = 1; k < kWidth / 4; k++) quads[0] |= quads[k];
    return ((quads[0][0] | quads[0][1]) | (quads[0][2] | quads[0][3])) != 0;
}

// ---- memory: the pointers may alias and need no alignment beyond their element's -----------------------------------
struct Float32 {
    using Element = float;
    GK_INLINE Float load(const float* p) {
        Float x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    GK_INLINE void store(float* p, Float x) { __builtin_memcpy(p, &x, sizeof x); }
};

// The 16-bit types differ only in how they widen and narrow.
GK_INLINE UInt load_halves(const uint16_t* p) {
    UShort x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, UInt);
}
GK_INLINE void store_halves(uint16_t* p, UInt x) {
    const UShort narrow = __builtin_convertvector(x, UShort);
    __builtin_memcpy(p, &narrow, sizeof narrow);
}

struct BFloat16 {
    using Element = uint16_t;
    GK_INLINE Float load(const uint16_t* p) { return from_bits(load_halves(p) << 16); }
    GK_INLINE void store(uint16_t* p, Float x) {
        const UInt u = bits(x);
        const UInt nearest_even = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
        store_halves(p,
                     select(x == x, nearest_even, (u >> 16) | 0x40u));  // a NaN stays one: rounding could overflow it
    }
};

struct Float16 {
    using Element = uint16_t;
    // The exponent is rebiased by a product with 2^112, exact for subnormal halves too; infinity and NaN are repaired.
    GK_INLINE Float load(const uint16_t* p) {
        const UInt half = load_halves(p);
        const UInt magnitude = (half & 0x7FFFu) << 13;
        const UInt finite = bits(from_bits(magnitude) * 0x1p112f);
        const UInt widened = select(magnitude >= (0x7C00u << 13), magnitude | 0x7F800000u, finite);
        return from_bits(widened | ((half & 0x8000u) << 16));
    }
    // Round to nearest even by adding a power of two whose last place is the half's: the sum's low bits are the half.
    GK_INLINE void store(uint16_t* p, Float x) {
        const UInt u = bits(x);
        const UInt doubled = u + u;                               // without the sign
        const Float base = (absolute(x) * 0x1p112f) * 0x1p-110f;  // overflows to infinity where a half would
        UInt exponent = doubled & 0xFF000000u;
        exponent = select(exponent < 0x71000000u, splat_bits(0x71000000u), exponent);  // subnormal halves
        const UInt sum = bits(from_bits((exponent >> 1) + 0x07800000u) + base);
        const UInt half = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
        store_halves(p, ((u >> 16) & 0x8000u) | select(doubled > 0xFF000000u, splat_bits(0x7E00u), half));
    }

  private:
    GK_INLINE UInt splat_bits(uint32_t x) { return x + UInt{}; }
};

// The first `count` elements of a vector.
template <class Type>
GK_INLINE Float load_tail(const typename Type::Element* x, int64_t count) {
    typename Type::Element tail[kWidth] = {};
    __builtin_memcpy(tail, x, count * sizeof *tail);
    return Type::load(tail);
}

template <class Type>
GK_INLINE void store_tail(typename Type::Element* to, Float x, int64_t count) {
    typename Type::Element tail[kWidth];
    Type::store(tail, x);
    __builtin_memcpy(to, tail, count * sizeof *tail);
}

GK_INLINE int64_t element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// body(Float32{}), or with the other type of this code.
template <class Body>
GK_INLINE auto with_type(int32_t dtype, const Body& body) {
    return dtype == kFloat32 ? body(Float32{}) : dtype == kBfloat16 ? body(BFloat16{}) : body(Float16{});
}

// ---- functions ------------------------------------------------------------------------------------------------------
constexpr float kMinExponent = -127.f;  // 2^t is exactly 0 there, so -inf gives 0

// 2^t for kMinExponent <= t < 128, about 1 ulp: t = n + f with |f| <= 1/2, a polynomial for 2^f, the bits of 2^n.
// NaN gives NaN.
GK_INLINE Float exp2_bounded(Float t) {
    // Adding 1.5 * 2^23 + 127 leaves round(t) + 127, the biased exponent, in the low bits of the sum.
    constexpr float kRound = 12582912.f + 127.f;
    const Float shifted = t + kRound;
    const Float f = t - (shifted - kRound);
    Float y = splat(1.5353362e-4f);
    y = y * f + 1.3398874e-3f;
    y = y * f + 9.618437e-3f;
    y = y * f + 5.5503324e-2f;
    y = y * f + 2.4022648e-1f;
    y = y * f + 6.931472e-1f;
    y = y * f + 1.f;
    return y * from_bits(bits(shifted) << 23);
}

// The natural logarithm of a positive normal number, about 1 ulp (Cephes): x = 2^n (1 + f), 1 + f in [0.7, 1.4).
GK_INLINE Float log_positive(Float x) {
    const Int n = (Int)(bits(x) - 0x3F3504F3u) >> 23;
    const Float f = from_bits(bits(x) - ((UInt)n << 23)) - 1.f, z = f * f;
    const Float exponent = __builtin_convertvector(n, Float);
    Float y = splat(7.0376836292e-2f);
    y = y * f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * z - 2.12194440e-4f * exponent - 0.5f * z;
    return f + y + 0.693359375f * exponent;
}

// tanh(x) and its derivative 1 - tanh(x)^2, both with relative accuracy: the derivative keeps its digits where tanh has
// rounded to 1. Near 0, where (1 - e) / (1 + e) cancels, a polynomial (Cephes).
struct TanhPair {
    Float value, slope;
};
GK_INLINE TanhPair tanh_pair(Float x) {
    const Float magnitude = absolute(x);
    const Float e = exp2_bounded(max(splat(kMinExponent), magnitude * -2.88539008177792681f));  // exp(-2 |x|)
    const Float inverse = 1.f / (1.f + e);
    const Float far = from_bits(bits((1.f - e) * inverse) | (bits(x) & 0x80000000u));
    const Float z = x * x;
    Float near = splat(-5.70498872745e-3f);
    near = near * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    near = near * z * x + x;
    return {select(magnitude < 0.625f, near, far), 4.f * e * inverse * inverse};
}

}  // namespace GK_ISA
}  // namespace gk
