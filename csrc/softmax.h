// What is done once per row of logits, in double, for the CPU and for CUDA: scales, the sampled id, statistics from
// sums, and the terms of the gradient.
//
//     u = logit + bias
//     y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
//     S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S, -log1p(S - 1) at z_id = m
//     entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
//     dz_j = dlogp (1[j = id] - p_j) - dentropy p_j (log p_j + entropy),    du_j = dz_j * dz/du
//
// An exponential is 2^t with t = (y - max) * to_z log2(e): its error grows with the distance from the maximum, where
// the term no longer counts.
//
// Plain C++17. Only functions that are inlined everywhere: the CPU compiles them for several instruction sets.
#pragma once
#include <math.h>

#include "args.h"

namespace gk {

constexpr double kLn2 = 0.693147180559945309417;

struct ExactScales {
    double to_z, dz_du;  // dz_du: without 1 - tanh^2

    GK_HD ExactScales(const Transform& params, float temperature) {
        dz_du = static_cast<double>(params.logit_scale) / temperature;
        to_z = params.softcap != 0.f ? 1.0 / temperature : dz_du;
    }
    GK_HD double to_exponent() const { return to_z / kLn2; }
};

// Of columns with the maximum `top` of y: exps = sum of 2^t, moment = sum of 2^t t, t relative to `top`, or to 0 where
// no column has been finite yet: all terms are 0 then, or NaN.
template <class Real>
struct Sums {
    float top;
    Real exps, moment;
};

// The sampled id as a 32-bit column; -1 outside the vocabulary.
GK_HD int sampled_column(const RowArgs& args, int64_t token) {
    const int64_t id = args.ids[token];
    return id >= 0 && id < args.vocab ? static_cast<int>(id) : -1;
}

struct Sampled {
    int column;       // -1: outside the vocabulary
    double y, slope;  // slope: 1 - tanh^2, with a softcap
};

GK_HD Sampled make_sampled(const Transform& params, int column, float u) {
    if (params.softcap == 0.f) return {column, u, 1.0};
    const double tanh_id = tanh(u * static_cast<double>(params.logit_scale) / params.softcap);
    return {column, u == -INFINITY ? u : params.softcap * tanh_id, 1.0 - tanh_id * tanh_id};  // an excluded id stays so
}

struct Statistics {
    float top;  // of y; z - lse = (y - top) * to_z - log_sum
    double log_sum, lse;
    float logp, entropy;
};

GK_HD Statistics make_statistics(const Sums<double>& sums, const ExactScales& scales, const Sampled& sampled) {
    Statistics result;
    result.top = sums.top;
    result.log_sum = log(sums.exps);
    result.lse = sums.top * scales.to_z + result.log_sum;
    result.entropy = static_cast<float>(result.log_sum - kLn2 * (sums.moment / sums.exps));
    result.logp = NAN;  // an id outside the vocabulary has no probability
    if (sampled.column >= 0) result.logp = static_cast<float>((sampled.y - sums.top) * scales.to_z - result.log_sum);
    return result;
}

// From the sums over all other ids, which would be lost beside the sampled id's where p is near 1: it is added last,
// and where it is the largest, log S = log1p(sum of the others).
GK_HD Statistics add_sampled(const Sums<double>& others, const ExactScales& scales, const Sampled& sampled) {
    if (sampled.column < 0 || sampled.y == -INFINITY) return make_statistics(others, scales, sampled);
    const double ahead = (sampled.y - others.top) * scales.to_z;  // of the largest other
    if (!(ahead > 0.0)) {
        const double e = exp(ahead), moment = e > 0.0 ? e * (ahead / kLn2) : 0.0;
        return make_statistics({others.top, others.exps + e, others.moment + moment}, scales, sampled);
    }
    const double fall = exp(-ahead), rest = others.exps * fall, log_sum = log1p(rest);
    const double moment = fall > 0.0 ? fall * (kLn2 * others.moment - ahead * others.exps) : 0.0;
    Statistics result;
    result.top = static_cast<float>(sampled.y);
    const double rounded = (sampled.y - result.top) * scales.to_z;  // NaN for an infinite logit, as all else is then
    result.log_sum = rounded + log_sum;
    result.lse = result.top * scales.to_z + result.log_sum;
    result.entropy = static_cast<float>(result.log_sum - rounded - moment / (1.0 + rest));
    result.logp = static_cast<float>(rounded - result.log_sum);
    return result;
}

GK_HD void write_statistics(const RowArgs& args, int64_t token, const Statistics& found) {
    args.logp[token] = found.logp;
    args.lse[token] = found.lse;
    args.entropy[token] = found.entropy;
}

// z - lse = (y - top) * to_z - log_sum, from lse: in units of y, rounded to float, and what the rounding leaves.
struct Shift {
    float top;
    double log_sum;
};

GK_HD Shift make_shift(const ExactScales& scales, double lse) {
    const float top = static_cast<float>(lse / scales.to_z);
    return {top, lse - top * scales.to_z};
}

// du_j = 2^t (constant + linear t) (1 - tanh^2) for all but the sampled id, t relative to the top of the shift; du_id
// for that one, 0 where there is none.
struct GradientTerms {
    float constant, linear;
    double du_id;
};

GK_HD GradientTerms make_terms(const Shift& of, const ExactScales& scales, const Sampled& sampled, float entropy,
                               float dlogp, float dentropy) {
    const bool linear = dentropy != 0.f;  // elsewhere the entropy may be NaN
    const double probability_scale = -exp(-of.log_sum) * scales.dz_du;
    const double at_log_p_zero = linear ? dlogp + dentropy * (entropy - of.log_sum) : dlogp;
    GradientTerms terms = {static_cast<float>(probability_scale * at_log_p_zero),
                           static_cast<float>(probability_scale * dentropy * kLn2), 0.0};
    if (sampled.column < 0) return terms;
    // 1 - p from expm1: log p has the others' sum to all its digits, see add_sampled
    const double log_p = (sampled.y - of.top) * scales.to_z - of.log_sum;
    terms.du_id = -dlogp * expm1(log_p);
    if (linear && log_p > -1e30) terms.du_id -= dentropy * exp(log_p) * (log_p + entropy);
    terms.du_id *= scales.dz_du * sampled.slope;
    return terms;
}

}  // namespace gk
