// The objective of tokens that depend on their whole sequence: its log ratio, VESPO's phi, the off-policy mask. CPU and
// device kernels compile this file. For a sequence: add_to_sums over its scored tokens, sequence_totals, then
// evaluate_in_sequence over the tokens, whose results add up to `through_ratio`, then where they share a
// ratio add_sequence_gradient over them.
#pragma once
#include "token_objective.h"

namespace gk {

constexpr float kLowestLogWeight = -18.420680743952367f;  // log(1e-8)
constexpr float kHighestLogWeight = 20.f;
constexpr float kLargestFloat = 3.402823466e38f;

struct SequenceSums {
    double log_ratio, log_weight, drift;
};

// As the sequence counts it. GMPO clamps every token by the sign of its advantage before the mean, which only ever
// makes the objective smaller.
GK_HD float counted_log_ratio(const Params& p, const TokenData& tokens, int64_t t, float raw) {
    if (p.surrogate != kGmpo) return raw;
    const float clamped = clamp(raw, -p.epsilon_low, p.epsilon_high);
    const bool takes_raw = tokens.field(kAdvantage, t) > 0.f ? raw < clamped : raw > clamped;
    return takes_raw ? raw : clamped;
}

GK_HD bool masks_off_policy(const Params& p) { return p.off_policy_threshold <= kLargestFloat; }

GK_HD void add_to_sums(const Params& p, const TokenData& tokens, int64_t t, SequenceSums& sums) {
    const float logp = tokens.value(kTokenLogp, t), raw = token_log_ratio(p, tokens, t, logp);
    if (p.level != kLevelToken) sums.log_ratio += counted_log_ratio(p, tokens, t, raw);
    if (p.vespo) {
        const float log_weight = clamp(logf(tokens.field(kRolloutWeight, t)), kLowestLogWeight, kHighestLogWeight);
        sums.log_weight += clamp(raw, -20.f, 20.f) + log_weight;
    }
    if (masks_off_policy(p)) {
        const float rollout = tokens.field(kRollout, t);
        if (!p.has_rollout)
            sums.drift -= raw;
        else if (rollout == rollout)  // tokens that the sampling engine could not score carry no evidence
            sums.drift += rollout - logp;
    }
}

struct SequenceTotals {
    float log_ratio, log_weight, mean_drift;
    float slope;  // d log_ratio / d logp of a token
};

GK_HD SequenceTotals sequence_totals(const Params& p, const SequenceSums& sums, float length) {
    const double count = length > 1.f ? length : 1.f;
    const double divisor = p.level == kLevelSequenceSum ? 1.0 : count;
    return {static_cast<float>(sums.log_ratio / divisor),
            clamp(static_cast<float>(sums.log_weight), kLowestLogWeight, kHighestLogWeight),
            static_cast<float>(sums.drift / count), static_cast<float>(1.0 / divisor)};
}

// What the sequence contributes to the multiplier of a token with this advantage.
GK_HD float sequence_multiplier(const Params& p, const SequenceTotals& totals, float advantage) {
    const bool positive = advantage >= 0.f;
    if (masks_off_policy(p) && !positive && !(totals.mean_drift <= p.off_policy_threshold)) return 0.f;
    if (!p.vespo) return 1.f;
    // phi(w) = exp(lambda + k ln w - lambda w), w the weight of the whole sequence
    const float k = positive ? p.vespo_k_pos : p.vespo_k_neg;
    const float lambda = positive ? p.vespo_lambda_pos : p.vespo_lambda_neg;
    return expf(lambda + k * totals.log_weight - lambda * expf(totals.log_weight));
}

// Writes all but logp and entropy; of g_logp, what does not go through the ratio of the sequence. Returns the token's
// part in what does.
GK_HD float evaluate_in_sequence(const Params& p, const TokenData& tokens, int64_t t, const SequenceTotals& totals) {
    const bool own_ratio = !shares_ratio(p.level);
    const float logp = tokens.value(kTokenLogp, t), entropy = tokens.value(kTokenEntropy, t);
    const float x = p.level == kLevelToken ? token_log_ratio(p, tokens, t, logp) : totals.log_ratio;
    const float of_sequence = sequence_multiplier(p, totals, tokens.field(kAdvantage, t));
    const float multiplier = weighted(tokens.field(kMultiplier, t), of_sequence);
    const TokenObjective found = objective_at(p, tokens, t, x, logp, entropy, multiplier);
    const float direct = weighted(tokens.field(kWeightDirect, t), found.d_direct);
    const float ratio = weighted(tokens.field(own_ratio ? kWeightRatio : kWeightDirect, t), found.d_ratio);
    store_objective(tokens, t, x, found, own_ratio ? ratio + direct : direct);
    return own_ratio ? 0.f : ratio;
}

// Every token has a share in the ratio that all tokens of its sequence are weighted by; not where GMPO's clamp acts.
GK_HD void add_sequence_gradient(const Params& p, const TokenData& tokens, int64_t t, const SequenceTotals& totals,
                                 double through_ratio) {
    const float raw = token_log_ratio(p, tokens, t, tokens.value(kTokenLogp, t));
    if (counted_log_ratio(p, tokens, t, raw) == raw)
        tokens.value(kTokenGLogp, t) += static_cast<float>(totals.slope * through_ratio);
}

}  // namespace gk
