// Rows of logits for the kernels that read them, rows.cpp and sparse.cpp: blocks of y, and the gradient of a vector.
// Only internal linkage and plain functions of the C library here.
#pragma once
#include "../softmax.h"
#include "kernels.h"
#include "math.h"

namespace gk {
namespace GK_ISA {

constexpr int64_t kBlock = 2048;       // floats of a block: 8 KiB
constexpr int64_t kStep = 4 * kWidth;  // elements of one loop iteration
constexpr float kInfinity = __builtin_inff();
static_assert(kBlock % kStep == 0, "only the last block of a row is padded");

struct Row {
    const void* logits;
    const float* bias;  // or null
    int32_t dtype;
    int64_t vocab;
    Transform params;
    ExactScales scales;
    bool capped;
    float to_tanh;  // y = cap * tanh(to_tanh * u)
};

// Row i of the policy's logits, or of a teacher's.
template <class Args>
static Row make_row(const Args& args, int64_t i, int64_t vocab, float temperature) {
    const Transform& params = args.params;
    const bool capped = params.softcap != 0.f;
    const auto* logits =
        static_cast<const char*>(args.logits) + i * args.logits_stride * element_size(args.logits_dtype);
    return {logits,
            args.bias,
            args.logits_dtype,
            vocab,
            params,
            ExactScales(params, temperature),
            capped,
            capped ? params.logit_scale / params.softcap : 0.f};
}

// ---- blocks of y ----------------------------------------------------------------------------------------------------
struct Buffers {
    alignas(64) float y[kBlock];
    alignas(64) float slope[kBlock];  // 1 - tanh^2, with a softcap
};

// body(first, count) of each block.
template <class Body>
static inline void for_blocks(int64_t vocab, const Body& body) {
    for (int64_t first = 0; first < vocab; first += kBlock)
        body(first, vocab - first < kBlock ? vocab - first : kBlock);
}

template <class Type, bool kCapped, bool kBias>
static inline void convert_vector(const Row& row, const typename Type::Element* u, const float* bias, float* y,
                                  float* slope) {
    Float x = Type::load(u);
    if (kBias) x += Float32::load(bias);
    if (kCapped) {
        const TanhPair tanh = tanh_pair(x * row.to_tanh);
        // A logit of -inf, an id that is excluded, stays one; the slope is 0 there.
        x = select(x == -kInfinity, x, tanh.value * row.params.softcap);
        Float32::store(slope, tanh.slope);
    }
    Float32::store(y, x);
}

template <class Type, bool kCapped, bool kBias>
static void convert_block(const Row& row, int64_t first, int64_t count, Buffers& buffers) {
    const auto* u = static_cast<const typename Type::Element*>(row.logits) + first;
    const float* bias = kBias ? row.bias + first : nullptr;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth)
        convert_vector<Type, kCapped, kBias>(row, u + i, kBias ? bias + i : nullptr, buffers.y + i, buffers.slope + i);
    if (i < count) {  // neither logits nor bias may be read beyond their end
        typename Type::Element tail[kWidth] = {};
        float bias_tail[kWidth] = {};
        __builtin_memcpy(tail, u + i, (count - i) * sizeof *tail);
        if (kBias) __builtin_memcpy(bias_tail, bias + i, (count - i) * sizeof *bias_tail);
        convert_vector<Type, kCapped, kBias>(row, tail, bias_tail, buffers.y + i, buffers.slope + i);
    }
    for (i = count; i % kStep != 0; i++) {  // padding: probability 0
        buffers.y[i] = -kInfinity;
        buffers.slope[i] = 0.f;
    }
}

// y[first, first + count), padded with -inf to whole steps; fp32 logits need no conversion.
static const float* load_block(const Row& row, int64_t first, int64_t count, Buffers& buffers) {
    if (row.dtype == kFloat32 && !row.capped && !row.bias && count % kStep == 0)
        return static_cast<const float*>(row.logits) + first;
    with_type(row.dtype, [&](auto type) {
        using Type = decltype(type);
        (row.bias ? (row.capped ? convert_block<Type, true, true> : convert_block<Type, false, true>)
                  : (row.capped ? convert_block<Type, true, false> : convert_block<Type, false, false>))(
            row, first, count, buffers);
    });
    return buffers.y;
}

static Sampled sampled_of(const Row& row, int column) {
    float u = 0.f;
    if (column >= 0) {
        with_type(row.dtype, [&](auto type) {
            using Type = decltype(type);
            u = load_tail<Type>(static_cast<const typename Type::Element*>(row.logits) + column, 1)[0];
        });
        if (row.bias) u += row.bias[column];
    }
    return make_sampled(row.params, column, u);
}

static inline float block_max(const float* y, int64_t count) {
    Float m[4];
    for (Float& lane : m) lane = splat(-kInfinity);
    for (int64_t i = 0; i < count; i += kStep)
        for (int k = 0; k < 4; k++) m[k] = max(Float32::load(y + i + k * kWidth), m[k]);  // skips NaN
    const Float best = max(max(m[0], m[1]), max(m[2], m[3]));
    float result = -kInfinity;
    for (int k = 0; k < kWidth; k++) result = best[k] > result ? best[k] : result;
    return result;
}

// All lanes together.
static inline double total(Float x) {
    double sum = 0.0;
    for (int k = 0; k < kWidth; k++) sum += static_cast<double>(x[k]);
    return sum;
}

// ---- gradient -------------------------------------------------------------------------------------------------------
// log p = (y - top) to_z - log_sum, and p = 2^t scale.
struct Distribution {
    float top, to_z, log_sum, to_exponent, scale;

    Distribution(const Shift& of, const ExactScales& scales)
        : top(of.top),
          to_z(static_cast<float>(scales.to_z)),
          log_sum(static_cast<float>(of.log_sum)),
          to_exponent(static_cast<float>(scales.to_exponent())),
          scale(static_cast<float>(exp(-of.log_sum))) {}

    Float log_p(Float y) const { return (y - top) * to_z - log_sum; }
    Float exponent(Float y) const { return max(splat(kMinExponent), (y - top) * to_exponent); }
    Float p(Float y) const { return exp2_bounded(exponent(y)) * scale; }
};

struct RowGradient {
    Distribution policy;
    float constant, linear;  // GradientTerms
    Sampled sampled;
    double du_id;  // of the sampled id, where there is one

    // Of the other ids, without the slope of the softcap.
    Float operator()(Float y) const {
        const Float t = policy.exponent(y);
        return exp2_bounded(t) * (t * linear + constant);
    }
};

static RowGradient make_gradient(const RowArgs& args, int64_t token, const Row& row) {
    const Shift of = make_shift(row.scales, args.lse[token]);
    const Sampled sampled = sampled_of(row, sampled_column(args, token));
    const GradientTerms terms =
        make_terms(of, row.scales, sampled, args.entropy[token], args.dlogp[token], args.dentropy[token]);
    return {Distribution(of, row.scales), terms.constant, terms.linear, sampled, terms.du_id};
}

}  // namespace GK_ISA
}  // namespace gk
