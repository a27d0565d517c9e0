// Rows of logits for the kernels that read them, rows.cpp and sparse.cpp: blocks of y, and the gradient of a vector.
// rows.cpp has the formulas. Only internal linkage and plain functions of the C library here.
#pragma once
#include <math.h>

#include "kernels.h"
#include "math.h"

namespace gk {
namespace GK_ISA {

constexpr int64_t kBlock = 2048;       // floats of a block: 8 KiB
constexpr int64_t kStep = 4 * kWidth;  // elements of one loop iteration
constexpr float kInfinity = __builtin_inff();
constexpr double kLn2 = 0.693147180559945309417;
static_assert(kBlock % kStep == 0, "only the last block of a row is padded");

struct Row {
    const void* logits;
    const float* bias;  // or null
    int32_t dtype;
    int64_t vocab;
    bool capped;
    float cap, to_tanh;  // y = cap * tanh(to_tanh * u)
    double to_z;         // z = to_z * y
    double chain;        // dz/du, without 1 - tanh^2
};

static Row make_row(const RowArgs& args, int64_t i, float temperature) {
    const double scale = args.params.logit_scale, cap = args.params.softcap;
    Row row = {};
    row.dtype = args.logits_dtype;
    row.logits = static_cast<const char*>(args.logits) + i * args.logits_stride * element_size(row.dtype);
    row.bias = args.bias;
    row.vocab = args.vocab;
    row.capped = cap != 0;
    row.cap = args.params.softcap;
    row.to_tanh = row.capped ? static_cast<float>(scale / cap) : 0.f;
    row.chain = scale / temperature;
    row.to_z = row.capped ? 1.0 / temperature : row.chain;
    return row;
}

// ---- blocks of y ----------------------------------------------------------------------------------------------------
struct Buffers {
    alignas(64) float y[kBlock];
    alignas(64) float slope[kBlock];  // 1 - tanh^2, with a softcap
};

template <class Type, bool kCapped, bool kBias>
static inline void convert_vector(const Row& row, const typename Type::Element* u, const float* bias, float* y,
                                  float* slope) {
    Float x = Type::load(u);
    if (kBias) x += Float32::load(bias);
    if (kCapped) {
        const TanhPair tanh = tanh_pair(x * row.to_tanh);
        // A logit of -inf, an id that is excluded, stays one; the slope is 0 there.
        x = select(x == -kInfinity, x, tanh.value * row.cap);
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

template <class Type>
static void convert(const Row& row, int64_t first, int64_t count, Buffers& buffers) {
    if (row.bias)
        (row.capped ? convert_block<Type, true, true> : convert_block<Type, false, true>)(row, first, count, buffers);
    else
        (row.capped ? convert_block<Type, true, false> : convert_block<Type, false, false>)(row, first, count, buffers);
}

// The row's y where fp32 logits need no conversion, else null.
static const float* stored_y(const Row& row) {
    return row.dtype == kFloat32 && !row.capped && !row.bias ? static_cast<const float*>(row.logits) : nullptr;
}

// y[first, first + count), padded with -inf to whole steps.
static const float* load_block(const Row& row, int64_t first, int64_t count, Buffers& buffers) {
    const float* stored = stored_y(row);
    if (stored && count % kStep == 0) return stored + first;
    (row.dtype == kFloat32    ? convert<Float32>
     : row.dtype == kBfloat16 ? convert<BFloat16>
                              : convert<Float16>)(row, first, count, buffers);
    return buffers.y;
}

// One y alone, and in front of `buffers.slope` its slope.
static double load_one(const Row& row, int64_t i, Buffers& buffers) {
    const float* stored = stored_y(row);
    return stored ? stored[i] : *load_block(row, i, 1, buffers);
}

// ---- statistics -----------------------------------------------------------------------------------------------------
struct Statistics {
    float max;  // of y; z - lse = (y - max) * to_z - log_sum
    double log_sum;
    double lse;
    float logp, entropy;
};

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

struct Sums {
    double exps;    // sum of 2^t
    double moment;  // sum of 2^t t
};

// Moves the sums to a larger maximum: every t falls by the same amount.
static inline Sums rebase(const Sums& sums, double fall) {
    const double factor = exp2(-fall);
    return {sums.exps * factor, (sums.moment - sums.exps * fall) * factor};
}

static inline Statistics statistics_of(const Row& row, int64_t id, float max_y, const Sums& sums, Buffers& buffers) {
    Statistics result;
    result.max = max_y;
    result.log_sum = log(sums.exps);
    result.lse = max_y * row.to_z + result.log_sum;
    result.entropy = static_cast<float>(result.log_sum - kLn2 * sums.moment / sums.exps);
    result.logp = __builtin_nanf("");  // an id outside the vocabulary has no probability
    if (id >= 0 && id < row.vocab) {
        const double y_id = load_one(row, id, buffers);
        result.logp = static_cast<float>((y_id - max_y) * row.to_z - result.log_sum);
    }
    return result;
}

// ---- gradient -------------------------------------------------------------------------------------------------------
// du_j = 2^t (constant + linear t) * (1 - tanh^2), all but the sampled id's own term.
struct Sweep {
    float max, to_exponent, constant, linear;
};

template <bool kLinear, bool kCapped>
static inline Float gradient_vector(const Sweep& sweep, const float* y, const float* slope) {
    const Float t = max(splat(kMinExponent), (Float32::load(y) - sweep.max) * sweep.to_exponent);
    Float du = exp2_bounded(t) * (kLinear ? t * sweep.linear + sweep.constant : splat(sweep.constant));
    if (kCapped) du *= Float32::load(slope);
    return du;
}

// z - lse = (y - shift) * to_z - rest, from a given lse: in units of y, rounded to float, and what the rounding leaves.
struct Shift {
    float shift;
    double rest;
};
static inline Shift shift_of(const Row& row, double lse) {
    const float shift = static_cast<float>(lse / row.to_z);
    return {shift, lse - shift * row.to_z};
}

struct RowGradient {
    Sweep sweep;
    bool linear;
    int64_t id;  // the sampled one, whose term is du_id; -1: not in this vocabulary
    double du_id;
};

// Before a sweep may overwrite the logits. z - lse = (y - max_y) * to_z - log_sum.
static RowGradient make_gradient(const RowArgs& args, int64_t i, const Row& row, float max_y, double log_sum,
                                 float entropy, float dlogp, float dentropy, Buffers& buffers) {
    const bool linear = dentropy != 0.f;
    const double probability_scale = -exp(-log_sum) * row.chain;
    const double at_log_p_zero = linear ? dlogp + dentropy * (entropy - log_sum) : dlogp;
    const Sweep sweep = {max_y, static_cast<float>(row.to_z / kLn2),
                         static_cast<float>(probability_scale * at_log_p_zero),
                         static_cast<float>(probability_scale * dentropy * kLn2)};
    const int64_t id = args.ids[args.token_of[i]];
    if (id < 0 || id >= row.vocab) return {sweep, linear, -1, 0.0};
    // 1 - p from expm1, exact where p is close to 1.
    const double log_p = (load_one(row, id, buffers) - static_cast<double>(max_y)) * row.to_z - log_sum;
    double du_id = -dlogp * expm1(log_p);
    if (linear && log_p > -1e30) du_id -= dentropy * exp(log_p) * (log_p + entropy);
    du_id *= row.chain * (row.capped ? buffers.slope[0] : 1.f);
    return {sweep, linear, id, du_id};
}

static inline char* gradient_row(const RowArgs& args, int64_t i) {
    return static_cast<char*>(args.grad) + i * args.grad_stride * element_size(args.grad_dtype);
}

// Returns what is stored, after rounding.
template <class Out>
static float store_one(void* row, int64_t index, float value) {
    typename Out::Element lanes[kWidth];
    Out::store(lanes, splat(value));
    static_cast<typename Out::Element*>(row)[index] = lanes[0];
    return Out::load(lanes)[0];
}

// The sampled id's entry, behind the sweep, and what rounding took from it.
static inline void store_sampled(const RowArgs& args, int64_t i, const RowGradient& gradient) {
    const auto store = args.grad_dtype == kFloat32    ? store_one<Float32>
                       : args.grad_dtype == kBfloat16 ? store_one<BFloat16>
                                                      : store_one<Float16>;
    const float stored = store(gradient_row(args, i), gradient.id, static_cast<float>(gradient.du_id));
    if (args.rounding_error) args.rounding_error[i] = static_cast<float>(gradient.du_id - stored);
}

}  // namespace GK_ISA
}  // namespace gk
