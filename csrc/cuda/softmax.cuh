// The mathematics of a row, shared by the kernels of rows and of the head: what is done for each logit. ../softmax.h
// has the formulas, and what one thread does once per row, in double: on most GPUs double precision runs at 1/64 of the
// rate.
//
// A thread sums its columns in float32, in trees of one vector's size; what warps, blocks and clusters add is in
// double.
#pragma once
#include "../softmax.h"
#include "elements.cuh"

namespace gk::cuda {

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
GK_DEVICE Real warp_sum(Real x) {
    GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
template <class Real>
GK_DEVICE Sums<Real> warp_sums(const Sums<Real>& mine, Real to_exponent) {
    const Sums<Real> sums = rebase(mine, warp_max(mine.top), to_exponent);
    return {sums.top, warp_sum(sums.exps), warp_sum(sums.moment)};
}

// What up to a warp of warps have left in `parts`. For one warp; every lane gets the result.
GK_DEVICE Sums<double> merge(const Sums<float>* parts, int count, const ExactScales& scales) {
    Sums<double> mine = {-infinity(), 0.0, 0.0};
    const int lane = lane_index();
    if (lane < count) mine = {parts[lane].top, parts[lane].exps, parts[lane].moment};
    return warp_sums(mine, scales.to_exponent());
}

// ---- one thread per row ---------------------------------------------------------------------------------------------
// u of the sampled id, read before any thread may overwrite the row; 0 where there is none.
template <class Type>
GK_DEVICE float sampled_logit(const RowArgs& args, const Source<Type>& source, int column) {
    if (column < 0) return 0.f;
    const float logit = source.at(column);
    return args.bias ? logit + args.bias[column] : logit;
}

}  // namespace gk::cuda
