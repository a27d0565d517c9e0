// The mathematics of a row, shared by the kernels of rows and of the head.
//
//     u = logit + bias
//     y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
//     S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S
//     entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
//     dz_j = dlogp (1[j = id] - p_j) - dentropy p_j (log p_j + entropy),    du_j = dz_j * dz/du
//
// An exponential is 2^t with t = (y - max) * to_z log2(e): its error grows with the distance from the maximum, where
// the term no longer counts. A thread sums its columns in float32, in trees of one vector's size; what warps, blocks
// and clusters add is in double. Whatever else is done once per row is done in double too, by one thread: on most GPUs
// double precision runs at 1/64 of the rate.
#pragma once
#include "../args.h"
#include "elements.cuh"

namespace gk::cuda {

constexpr double kLn2 = 0.693147180559945309417;
constexpr float kLowestExponent = -200.f;  // 2^t is exactly 0 there, and t stays finite: a masked vocabulary gives 0

// ---- scales ---------------------------------------------------------------------------------------------------------
struct Scales {
    float to_exponent;       // to_z log2(e)
    float cap, to_exp_tanh;  // e^(-2 |scale u / cap|) = 2^(to_exp_tanh |u|)
};

// Two floats in place of a double: every thread needs this.
GK_DEVICE Scales make_scales(const Transform& params, float temperature) {
    constexpr float kHigh = 1.44269502f, kLow = 1.92596303e-8f;  // log2(e)
    const float numerator = params.softcap != 0.f ? 1.f : params.logit_scale;
    const float to_z = numerator / temperature;
    const float rest = fmaf(-to_z, temperature, numerator) / temperature;
    const float to_exponent = fmaf(to_z, kHigh, fmaf(to_z, kLow, rest * kHigh));
    return {to_exponent, params.softcap, -2.f * kHigh * (params.logit_scale / params.softcap)};
}

struct ExactScales {
    double to_z, chain;  // chain: dz/du, without 1 - tanh^2

    GK_DEVICE ExactScales(const Transform& params, float temperature) {
        chain = static_cast<double>(params.logit_scale) / temperature;
        to_z = params.softcap != 0.f ? 1.0 / temperature : chain;
    }
    GK_DEVICE double to_exponent() const { return to_z / kLn2; }
};

// ---- softcap: w = 1 - |tanh|, with the sign of u. y and the slope 1 - tanh^2 follow without loss, y to 1e-7 cap. A
// logit of -inf, an id that is excluded, stays one: w and y are -inf too, the slope is 0.
GK_DEVICE float complement(const Scales& scales, float u) {
    const float e = exp2_fast(scales.to_exp_tanh * fabsf(u));
    return u == -infinity() ? u : copysignf(2.f * e * reciprocal_fast(1.f + e), u);
}
GK_DEVICE float capped(const Scales& scales, float w) { return copysignf(scales.cap - scales.cap * fabsf(w), w); }
GK_DEVICE float slope(float w) { return fmaxf(fabsf(w) * (2.f - fabsf(w)), 0.f); }

struct Logit {
    float y, slope;  // slope: dy/du without the scale
};

template <bool kCapped>
GK_DEVICE Logit to_logit(const Scales& scales, float u) {
    if (!kCapped) return {u, 1.f};
    const float w = complement(scales, u);
    return {capped(scales, w), slope(w)};
}

// ---- sums of exponentials -------------------------------------------------------------------------------------------
// Of columns with the maximum `top`: exps = sum of 2^t, moment = sum of 2^t t, t relative to `top`, or to 0 where no
// column has been finite yet: all terms are 0 then, or NaN.
template <class Real>
struct Sums {
    float top;
    Real exps, moment;
};

GK_DEVICE float origin_of(float top) { return top > -infinity() ? top : 0.f; }

GK_DEVICE float exponent(float y, float origin, float to_exponent) {
    return max_or_nan((y - origin) * to_exponent, kLowestExponent);
}

GK_DEVICE float power_of_two(float t) { return exp2_fast(t); }
GK_DEVICE double power_of_two(double t) { return exp2(t); }

// The sums relative to another, larger maximum.
template <class Real>
GK_DEVICE Sums<Real> rebase(const Sums<Real>& sums, float top, Real to_exponent) {
    if (sums.top == top) return sums;
    Real fall = (static_cast<Real>(sums.top) - top) * to_exponent;
    if (fall < Real{-2000}) fall = Real{-2000};  // 0 * infinity is not 0
    const Real factor = power_of_two(fall);
    return {top, sums.exps * factor, (sums.moment + sums.exps * fall) * factor};
}

GK_DEVICE Sums<double> merge(const Sums<double>& a, const Sums<double>& b, double to_exponent) {
    const float top = fmaxf(a.top, b.top);
    const Sums<double> x = rebase(a, top, to_exponent), y = rebase(b, top, to_exponent);
    return {top, x.exps + y.exps, x.moment + y.moment};
}

// Of all lanes of a warp, in an order of its own: two runs give the same bits.
GK_DEVICE float warp_max(float x) {
    GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}
template <class Real>
GK_DEVICE Sums<Real> warp_sums(const Sums<Real>& mine, Real to_exponent) {
    Sums<Real> sums = rebase(mine, warp_max(mine.top), to_exponent);
    GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        sums.exps += shuffle_xor(sums.exps, mask);
        sums.moment += shuffle_xor(sums.moment, mask);
    }
    return sums;
}

// What up to a warp of warps have left in `parts`. For one warp; every lane gets the result.
GK_DEVICE Sums<double> merge(const Sums<float>* parts, int count, const ExactScales& scales) {
    Sums<double> mine = {-infinity(), 0.0, 0.0};
    const int lane = lane_index();
    if (lane < count) mine = {parts[lane].top, parts[lane].exps, parts[lane].moment};
    return warp_sums(mine, scales.to_exponent());
}

// ---- one thread per row ---------------------------------------------------------------------------------------------
struct Statistics {
    float top;  // of y; z - lse = (y - top) * to_z - log_sum
    double log_sum, lse;
    float logp, entropy;
};

struct Sampled {
    int column;       // -1: outside the vocabulary
    double y, slope;  // slope: 1 - tanh^2, with a softcap
};

// The sampled id as a 32-bit column; -1 outside the vocabulary.
GK_DEVICE int sampled_column(const RowArgs& args, int64_t token) {
    const int64_t id = args.ids[token];
    return id >= 0 && id < args.vocab ? static_cast<int>(id) : -1;
}

// u of the sampled id, read before any thread may overwrite the row; `absent` where there is none.
template <class Type>
GK_DEVICE float sampled_logit(const RowArgs& args, const Source<Type>& source, int column, float absent) {
    if (column < 0) return absent;
    const float logit = source.at(column);
    return args.bias ? logit + args.bias[column] : logit;
}

GK_DEVICE Sampled make_sampled(const RowArgs& args, int column, float u) {
    Sampled sampled = {column, u, 1.0};
    if (args.params.softcap != 0.f) {
        const double tanh_id = tanh(u * static_cast<double>(args.params.logit_scale) / args.params.softcap);
        sampled.y = args.params.softcap * tanh_id;
        sampled.slope = 1.0 - tanh_id * tanh_id;
    }
    return sampled;
}

GK_DEVICE Statistics make_statistics(const Sums<double>& sums, const ExactScales& scales, const Sampled& sampled) {
    Statistics result;
    result.top = sums.top;
    result.log_sum = log(sums.exps);
    result.lse = sums.top * scales.to_z + result.log_sum;
    result.entropy = static_cast<float>(result.log_sum - kLn2 * (sums.moment / sums.exps));
    result.logp = not_a_number();  // an id outside the vocabulary has no probability
    if (sampled.column >= 0) result.logp = static_cast<float>((sampled.y - sums.top) * scales.to_z - result.log_sum);
    return result;
}

GK_DEVICE void write_statistics(const RowArgs& args, int64_t token, const Statistics& found) {
    args.logp[token] = found.logp;
    args.lse[token] = found.lse;
    args.entropy[token] = found.entropy;
}

}  // namespace gk::cuda
