// target = source^T, or target += source^T: a piece of the weight's gradient. With AMX the matrix library takes less
// time for h^T dlogits (H, columns) than to add dlogits^T h (columns, H) to a sum, see dweight.py.
//
// In squares of 8 x 8 along eight rows of the target, which are written whole: 64-byte lines of a power-of-two row
// stride would fall into few sets of a cache.
#include <algorithm>

#include "api.h"
#include "dispatch.h"
#include "elements.h"

namespace gk {

namespace {

constexpr int64_t kSquare = 8;
constexpr int64_t kGrain = 32;  // rows of the target: 64 bytes of a row of the source

typedef uint16_t Lanes __attribute__((vector_size(2 * kSquare)));
typedef uint32_t WideLanes __attribute__((vector_size(2 * kSquare)));
typedef float FloatLanes __attribute__((vector_size(2 * kSquare)));

#if defined(__clang__)
#define GK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define GK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Lanes{__VA_ARGS__})
#endif

// Two rows become the pairs (or, of pairs, the fours, ...) of their elements, in the low and in the high half.
inline void interleave_1(Lanes& a, Lanes& b) {
    const Lanes low = GK_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    b = GK_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    a = low;
}
inline void interleave_2(Lanes& a, Lanes& b) {
    const Lanes low = GK_SHUFFLE(a, b, 0, 1, 8, 9, 2, 3, 10, 11);
    b = GK_SHUFFLE(a, b, 4, 5, 12, 13, 6, 7, 14, 15);
    a = low;
}
inline void interleave_4(Lanes& a, Lanes& b) {
    const Lanes low = GK_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    b = GK_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    a = low;
}

// Column k of the square is row kPlace[k] afterwards.
inline void transpose(Lanes (&x)[kSquare]) {
    for (int i = 0; i < 8; i += 2) interleave_1(x[i], x[i + 1]);
    for (int i : {0, 1, 4, 5}) interleave_2(x[i], x[i + 2]);
    for (int i = 0; i < 4; i++) interleave_4(x[i], x[i + 4]);
}
constexpr int kPlace[kSquare] = {0, 4, 2, 6, 1, 5, 3, 7};

// Eight bfloat16 as the upper halves of two times four float32 (little-endian), which is all that SSE2 and NEON hold.
struct Floats {
    FloatLanes low, high;
};
inline Floats widen(Lanes x) {
    const Lanes zero = {};
    return {(FloatLanes)GK_SHUFFLE(zero, x, 0, 8, 1, 9, 2, 10, 3, 11),
            (FloatLanes)GK_SHUFFLE(zero, x, 4, 12, 5, 13, 6, 14, 7, 15)};
}
inline Lanes round_upper(FloatLanes x) {  // to nearest even; a NaN stays one
    const WideLanes u = (WideLanes)x;
    return (Lanes)(x == x ? u + 0x7FFFu + ((u >> 16) & 1u) : u | 0x400000u);
}
inline Lanes narrow(Floats x) { return GK_SHUFFLE(round_upper(x.low), round_upper(x.high), 1, 3, 5, 7, 9, 11, 13, 15); }

struct BFloat16Lanes {
    using Number = BFloat16;
    static void store(uint16_t* to, Lanes x) { std::memcpy(to, &x, sizeof x); }
    static void add(uint16_t* to, Lanes x) {
        Lanes old;
        std::memcpy(&old, to, sizeof old);
        const Floats a = widen(old), b = widen(x);
        store(to, narrow({a.low + b.low, a.high + b.high}));
    }
};

struct Float32Lanes {
    using Number = Float32;
    static void store(float* to, Lanes x) {
        const Floats wide = widen(x);
        std::memcpy(to, &wide, sizeof wide);
    }
    static void add(float* to, Lanes x) {
        Floats sum;
        std::memcpy(&sum, to, sizeof sum);
        const Floats wide = widen(x);
        sum.low += wide.low;
        sum.high += wide.high;
        std::memcpy(to, &sum, sizeof sum);
    }
};

template <class Target, bool kAdd>
void square(const AddTransposedArgs& args, int64_t i, int64_t j) {
    Lanes x[kSquare];
    for (int k = 0; k < kSquare; k++)
        std::memcpy(&x[k], args.source + (j + k) * args.source_row_stride + i, sizeof x[k]);
    transpose(x);
    for (int k = 0; k < kSquare; k++) {
        auto* to = static_cast<typename Target::Number::Element*>(args.target) + (i + k) * args.target_row_stride + j;
        if (kAdd)
            Target::add(to, x[kPlace[k]]);
        else
            Target::store(to, x[kPlace[k]]);
    }
}

template <class Target, bool kAdd>
void element(const AddTransposedArgs& args, int64_t i, int64_t j) {
    auto* to = static_cast<typename Target::Number::Element*>(args.target) + i * args.target_row_stride + j;
    const float x = BFloat16::load(args.source[j * args.source_row_stride + i]);
    *to = Target::Number::store(kAdd ? Target::Number::load(*to) + x : x);
}

template <class Target, bool kAdd>
void rows(const AddTransposedArgs& args, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kSquare) {
        int64_t j = 0;
        if (i + kSquare <= last)
            for (; j + kSquare <= args.width; j += kSquare) square<Target, kAdd>(args, i, j);
        for (; j < args.width; j++)
            for (int64_t k = i; k < std::min(i + kSquare, last); k++) element<Target, kAdd>(args, k, j);
    }
}

}  // namespace

void add_transposed(const AddTransposedArgs& args, int threads) {
    const auto kernel = args.target_dtype == kFloat32
                            ? (args.add ? rows<Float32Lanes, true> : rows<Float32Lanes, false>)
                            : (args.add ? rows<BFloat16Lanes, true> : rows<BFloat16Lanes, false>);
    parallel_for(args.rows, kGrain, threads, [&](int64_t first, int64_t last) { kernel(args, first, last); });
}

}  // namespace gk
