// The loss of one token and its derivatives; CPU and device kernels compile this same file.
//
//     value = keep * multiplier * surrogate(x, logp, A) + beta * KL(logp, ref) * (bias_correction ? r : 1)
//     r     = exp(clamp(x)),   keep = not entropy < entropy_threshold
//
// x is the raw log ratio: logp - old for a token, a mean or sum of those for a sequence, 0 without old. The total
// derivative with respect to logp is d_ratio * dx/dlogp + d_direct; the caller computes dx/dlogp. Where a clamp acts,
// the derivative is 0. A factor that is 0 selects an exact 0 and is never multiplied with something that may be
// infinite. NaN logits make value and d_direct NaN, even where a clip, a threshold or a factor of 0 would have dropped
// them.
#pragma once
#include <math.h>

#include "args.h"

namespace gk {

struct TokenObjective {
    float value;     // the token's loss before its weight
    float d_ratio;   // partial derivative with respect to x
    float d_direct;  // partial derivative with respect to logp at fixed x
    float kl;        // the KL term without beta
};

// A term of the loss: its value and the same two partial derivatives.
struct Term {
    float value, d_ratio, d_direct;
};

GK_HD float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

// ---- surrogates: r is the clamped ratio, its derivatives ignore the clamp of x (objective() applies it) -------------
GK_HD Term surrogate_clip(const Params& p, float r, float advantage) {
    const float low = 1.f - p.epsilon_low, high = 1.f + p.epsilon_high;
    const float unclipped = (r < p.delta ? r : p.delta) * advantage;
    const float clipped = clamp(r, low, high) * advantage;
    const bool active = unclipped <= clipped ? r <= p.delta : (low <= r && r <= high);
    const Term term = {-(unclipped <= clipped ? unclipped : clipped), active ? -advantage * r : 0.f, 0.f};
    const bool dual = advantage < 0.f && term.value > -p.dual_clip * advantage;
    return dual ? Term{-p.dual_clip * advantage, 0.f, 0.f} : term;
}

// The ratio within bounds is a constant weight here: all gradient goes through logp.
GK_HD Term surrogate_weighted(const Params& p, float r, float logp, float advantage) {
    const float low = p.weight_low, high = p.weight_high;
    const bool outward = advantage > 0.f ? r > high : advantage < 0.f && r < low;
    const bool drop = p.outside == kOutsideDrop ? !(low < r && r < high) : p.outside == kOutsideDropOutward && outward;
    const float coefficient = clamp(r, low, high) * advantage;
    return drop ? Term{0.f, 0.f, 0.f} : Term{-coefficient * logp, 0.f, -coefficient};
}

GK_HD Term surrogate_sapo(const Params& p, float r, float advantage) {
    const float tau = advantage > 0.f ? p.sapo_temperature_pos : p.sapo_temperature_neg;
    // sigmoid and its complement, each without cancellation: s (1 - s) stays exact far away from r = 1
    const float decay = expf(-fabsf(tau * (r - 1.f)));
    const float far_side = decay / (1.f + decay), near_side = 1.f / (1.f + decay);
    const float s = tau * (r - 1.f) >= 0.f ? near_side : far_side;
    return {-(4.f / tau) * s * advantage, -4.f * (far_side * near_side) * advantage * r, 0.f};
}

GK_HD Term surrogate_gmpo(float r, float advantage) { return {-advantage * r, -advantage * r, 0.f}; }

// p - q is the change of the token's probability since it was sampled. x is raw: the quadratic has no clamp.
GK_HD float probability_change(float x, float logp) { return expf(logp) - expf(logp - x); }

GK_HD bool is_in_trust_region(const Params& p, float x, float logp, float advantage) {
    if (p.surrogate == kDppoKl) {  // of the sampled id against all others
        const float now = expf(logp), before = expf(logp - x);
        const float kl = -before * x + (1.f - before) * logf((1.f - before + 1e-8f) / (1.f - now + 1e-8f));
        return advantage > 0.f ? !(x > 0.f && kl > p.epsilon_high) : !(x < 0.f && kl > p.epsilon_low);
    }
    const float change = probability_change(x, logp);
    if (p.surrogate == kIpo) return fabsf(change) <= p.epsilon_high;
    return advantage > 0.f ? !(change > p.epsilon_high) : !(change < -p.epsilon_low);
}

GK_HD Term surrogate_trust_region(const Params& p, bool clamped, float r, float x, float logp, float advantage) {
    const bool keep = is_in_trust_region(p, x, logp, advantage);
    const float quadratic = p.dppo_kl_tau * x * x, slope = 2.f * p.dppo_kl_tau * x;
    if (p.ratio_cap < INFINITY) {
        const float coefficient = (r < p.ratio_cap ? r : p.ratio_cap) * advantage;
        return keep ? Term{-coefficient * logp + quadratic, slope, -coefficient} : Term{quadratic, slope, 0.f};
    }
    const float policy = keep ? -r * advantage : 0.f;
    return {policy + quadratic, (clamped ? 0.f : policy) + slope, 0.f};
}

GK_HD Term surrogate(const Params& p, bool clamped, float r, float x, float logp, float advantage) {
    Term term;
    switch (p.surrogate) {
        case kDppoTv:
        case kDppoKl:
        case kIpo:  // these treat the clamp of x themselves
            return surrogate_trust_region(p, clamped, r, x, logp, advantage);
        case kWeighted:
            term = surrogate_weighted(p, r, logp, advantage);
            break;
        case kSapo:
            term = surrogate_sapo(p, r, advantage);
            break;
        case kGmpo:
            term = surrogate_gmpo(r, advantage);
            break;
        default:
            term = surrogate_clip(p, r, advantage);
    }
    if (clamped) term.d_ratio = 0.f;
    return term;
}

// ---- KL estimators of d = ref - logp: value and derivative with respect to logp ------------------------------------
struct Kl {
    float value, d_logp;
    float d_product;  // of its product with a factor that is 1 and grows like the probability: the sum of the two, of
                      // which in k3, where both are some exp(d), nothing would be left
};

GK_HD Kl kl_k1(float d) { return {-d, 1.f, 1.f - d}; }

GK_HD Kl kl_k2(float d) { return {0.5f * d * d, -d, d * (0.5f * d - 1.f)}; }

GK_HD Kl kl_k3(float d) {  // exp(d) - 1 - d; expm1 keeps the digits of a small d
    const float growth = expm1f(d);
    return {growth - d, -growth, -d};
}

GK_HD Kl kl_abs(float d) {
    const float slope = d > 0.f ? -1.f : (d < 0.f ? 1.f : 0.f);
    return {fabsf(d), slope, fabsf(d) + slope};
}

// Straight-through: the value of one estimator, the gradient of k2 without a clamp.
GK_HD Kl kl_plus(const Params& p, float value, float raw) {
    const float bounded = clamp(value, -p.kl_clamp, p.kl_clamp);
    return {bounded, -raw, bounded - raw};
}

GK_HD Kl kl_divergence(const Params& p, float logp, float ref) {
    const float raw = ref - logp;
    const bool exponential = p.kl == kKlK3 || p.kl == kKlK3Plus;
    const float upper = exponential && p.kl_delta_clamp > kMaxExponent ? kMaxExponent : p.kl_delta_clamp;
    const float d = clamp(raw, -p.kl_delta_clamp, upper);
    Kl kl = {0.f, 0.f, 0.f};
    switch (p.kl) {
        case kKlK1:
            kl = kl_k1(d);
            break;
        case kKlK2:
            kl = kl_k2(d);
            break;
        case kKlK3:
            kl = kl_k3(d);
            break;
        case kKlAbs:
            kl = kl_abs(d);
            break;
        case kKlK1Plus:
            return kl_plus(p, kl_k1(d).value, raw);
        case kKlK3Plus:
            return kl_plus(p, kl_k3(d).value, raw);
        default:
            return kl;
    }
    const float value = clamp(kl.value, -p.kl_clamp, p.kl_clamp);
    const bool clamped = raw < -p.kl_delta_clamp || raw > upper || value != kl.value;
    return clamped ? Kl{value, 0.f, value} : Kl{value, p.score_term ? kl.d_product : kl.d_logp, kl.d_product};
}

// ---- the token ------------------------------------------------------------------------------------------------------
// The log ratio that is exponentiated: at most 80 even without a clamp.
GK_HD float clamped_log_ratio(const Params& p, float x) {
    return clamp(x, -p.log_ratio_clamp, p.log_ratio_clamp < kMaxExponent ? p.log_ratio_clamp : kMaxExponent);
}

GK_HD TokenObjective objective(const Params& p, float x, float logp, float entropy, float advantage, float ref,
                               float multiplier, float entropy_threshold) {
    const float nan = x + logp + entropy;
    if (x != x || logp != logp || entropy != entropy) return {nan, 0.f, nan, nan};
    const float exponent = clamped_log_ratio(p, x);
    const bool clamped = exponent != x;
    const float r = expf(exponent);
    TokenObjective out = {0.f, 0.f, 0.f, 0.f};

    if (!(entropy < entropy_threshold) && multiplier != 0.f) {
        const Term term = surrogate(p, clamped, r, x, logp, advantage);
        out.value = multiplier * term.value;
        out.d_ratio = multiplier * term.d_ratio;
        out.d_direct = multiplier * term.d_direct;
    }
    if (p.kl != kKlNone) {
        const Kl kl = kl_divergence(p, logp, ref);
        const float factor = p.bias_correction ? r : 1.f, product = kl.value * factor;
        const bool beyond = p.bias_correction && fabsf(product) > kMaxProduct;
        out.kl = beyond ? copysignf(kMaxProduct, product) : product;
        if (p.beta != 0.f) {
            out.value += p.beta * out.kl;
            // The factor moves with the token's own logp, or with those of its sequence.
            const bool moves = p.bias_correction && !clamped;
            const bool own = moves && !shares_ratio(p.level);
            if (!beyond) out.d_direct += p.beta * (own ? kl.d_product : kl.d_logp) * factor;
            if (moves && !own && !beyond) out.d_ratio += p.beta * out.kl;
        }
    }
    return out;
}

}  // namespace gk
