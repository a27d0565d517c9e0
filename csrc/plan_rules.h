// A token's part of the plan: whether it counts, its weights, its column of the table. CPU and device kernels compile
// this file.
#pragma once
#include <math.h>

#include "args.h"

namespace gk {

GK_HD bool is_unmasked(const PlanArgs& args, int64_t t) {
    if (!args.mask) return true;
    if (args.mask_bytes == 1) return static_cast<const int8_t*>(args.mask)[t] != 0;
    if (args.mask_bytes == 4) return static_cast<const int32_t*>(args.mask)[t] != 0;
    return static_cast<const int64_t*>(args.mask)[t] != 0;
}

GK_HD int64_t sequence_begin(const PlanArgs& args, int64_t s) {
    return args.cu_seqlens ? args.cu_seqlens[s] : s * args.row_length;
}

struct PlanWeights {
    float direct, ratio, entropy;
};

// Of the tokens of a sequence with `length` unmasked ones, in a batch with `total`: of those, or of its padding, whose
// 0 is divided like every other numerator.
GK_HD PlanWeights plan_weights(const PlanArgs& args, bool unmasked, float length, float total) {
    const PlanRules& rules = args.rules;
    const float m = unmasked ? 1.f : 0.f, at_least_one = length > 1.f ? length : 1.f;
    const float sequences = static_cast<float>(args.sequences);
    const float tokens = total > 1.f ? total : 1.f;
    float denominator = sequences, numerator = 1.f;
    if (rules.aggregation == kSeqMean) numerator = 1.f / at_least_one;
    if (rules.aggregation == kTokenMean || rules.aggregation == kNumItems) denominator = tokens;
    if (rules.aggregation == kFixedLength)
        denominator = static_cast<float>(static_cast<double>(args.sequences) * rules.max_completion_length);
    const float divisor = args.normalizer ? *args.normalizer : denominator;
    const float direct = numerator / divisor;
    const float share = args.normalizer ? denominator / divisor : 1.f;

    PlanWeights weights = {unmasked ? direct : 0.f / divisor, 0.f, 0.f};
    weights.ratio = weights.direct;
    // Without an old policy the ratio of a sequence is 1, and its chain rule is known before any logit is.
    if (rules.level != kLevelToken && !rules.whole_sequences)
        weights.ratio = (rules.level == kLevelSequenceSum ? m : m / at_least_one) * (length * direct);
    if (rules.entropy_coef != 0.f) weights.entropy = -rules.entropy_coef * share / tokens * m;
    return weights;
}

// Writes a token's column of the table, and its id. Returns whether the surrogate can move it.
GK_HD bool plan_token(const PlanArgs& args, int64_t t, int64_t s, bool unmasked, const PlanWeights& weights) {
    const PlanRules& rules = args.rules;
    const auto given = [&](const float* x, float fill) { return x && unmasked ? x[t] : fill; };
    const auto input = [&](const PlanInput& x, float fill) { return x.data && unmasked ? x.at(t, s) : fill; };
    const float advantage = input(args.advantages, 0.f);
    const float rollout_weight = input(args.rollout_weights, 1.f);
    float base = given(args.old, 0.f), multiplier = rules.multiplies_rollout_weight ? rollout_weight : 1.f;
    if (rules.divides_by_rollout && args.rollout) {
        const float rollout = given(args.rollout, 0.f);
        if (rollout == rollout)
            base = rollout;
        else if (!args.old)  // nothing to divide by: no surrogate
            multiplier = 0.f;
    }
    const auto set = [&](TableField f, float x) { args.table[f * args.tokens + t] = x; };
    set(kAdvantage, advantage);
    set(kBase, base);
    set(kRef, given(args.ref, 0.f));
    set(kMultiplier, multiplier);
    set(kWeightRatio, weights.ratio);
    set(kWeightDirect, weights.direct);
    set(kWeightEntropy, weights.entropy);
    set(kTemperature, args.temperature.data ? input(args.temperature, 1.f) : rules.temperature);
    set(kEntropyThreshold, args.threshold ? *args.threshold : rules.entropy_threshold);
    set(kRollout, given(args.rollout, nanf("")));
    set(kRolloutWeight, rollout_weight);
    if (args.clean_ids) args.clean_ids[t] = unmasked ? args.ids[t] : 0;
    return multiplier != 0.f && (advantage != 0.f || !rules.needs_advantage);
}

// Whether the surrogate moves either all unmasked tokens of a sequence or none.
GK_HD bool moves_together(const PlanRules& rules) { return rules.whole_sequences || rules.level != kLevelToken; }

// `moved`: of the token, or where they move together of any unmasked token of its sequence. Exact: a token that is left
// out has a gradient of exactly zero.
GK_HD bool is_active(const PlanRules& rules, bool unmasked, const PlanWeights& weights, bool moved) {
    const bool by_value = weights.direct != 0.f && (rules.kl_moves || moved);
    return unmasked && (by_value || (rules.entropy_coef != 0.f && weights.entropy != 0.f));
}

}  // namespace gk
