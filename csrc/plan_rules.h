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

// Clamped: a GPU's offsets have not been checked, and from here on they are addresses.
GK_HD int64_t sequence_begin(const PlanArgs& args, int64_t s) {
    const int64_t begin = args.cu_seqlens ? args.cu_seqlens[s] : s * args.row_length;
    return begin < 0 ? 0 : begin < args.tokens ? begin : args.tokens;
}

struct PlanWeights {
    float direct, ratio, entropy;
};

// Weights of the unmasked tokens of a sequence, or of its padding, whose numerator is 0 and is divided like any other.
// length, total: unmasked tokens of the sequence and of the batch.
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
    if (shares_ratio(rules.level) && !rules.whole_sequences)
        weights.ratio = (rules.level == kLevelSequenceSum ? m : m / at_least_one) * (length * direct);
    if (rules.entropy_coef != 0.f) weights.entropy = -rules.entropy_coef * share / tokens * m;
    return weights;
}

// What a token's surrogate sees of the batch; of padding, neutral numbers.
struct PlanSurrogate {
    float advantage, old, multiplier, rollout_weight;

    // Whether it has a gradient.
    GK_HD bool has_gradient(const PlanRules& rules) const {
        return multiplier != 0.f && (advantage != 0.f || !rules.needs_advantage);
    }
};

GK_HD float given_to_plan(const float* x, int64_t t, bool unmasked, float fill) { return x && unmasked ? x[t] : fill; }

GK_HD float given_to_plan(const PlanInput& x, int64_t t, int64_t s, bool unmasked, float fill) {
    return x.data && unmasked ? x.at(t, s) : fill;
}

GK_HD PlanSurrogate plan_surrogate(const PlanArgs& args, int64_t t, int64_t s, bool unmasked) {
    const PlanRules& rules = args.rules;
    const float rollout_weight = given_to_plan(args.rollout_weights, t, s, unmasked, 1.f);
    float old = given_to_plan(args.old, t, unmasked, 0.f);
    float multiplier = rules.multiplies_rollout_weight ? rollout_weight : 1.f;
    if (rules.divides_by_rollout && args.rollout) {
        const float rollout = given_to_plan(args.rollout, t, unmasked, 0.f);
        if (rollout == rollout)
            old = rollout;
        else if (!args.old)  // nothing to divide by: a ratio of 1, and no surrogate
            old = INFINITY, multiplier = 0.f;
    }
    return {given_to_plan(args.advantages, t, s, unmasked, 0.f), old, multiplier, rollout_weight};
}

// Writes a token's column of the table, and its id. Returns whether the surrogate can move it.
GK_HD bool plan_token(const PlanArgs& args, int64_t t, int64_t s, bool unmasked, const PlanWeights& weights) {
    const PlanRules& rules = args.rules;
    const PlanSurrogate found = plan_surrogate(args, t, s, unmasked);
    const bool temperatures = args.temperature.data != nullptr;
    float column[kFieldCount];  // all is read before anything is written, which it could alias
    column[kAdvantage] = found.advantage;
    column[kOld] = found.old;
    column[kRef] = given_to_plan(args.ref, t, unmasked, 0.f);
    column[kMultiplier] = found.multiplier;
    column[kWeightRatio] = weights.ratio;
    column[kWeightDirect] = weights.direct;
    column[kWeightEntropy] = weights.entropy;
    column[kTemperature] = temperatures ? given_to_plan(args.temperature, t, s, unmasked, 1.f) : rules.temperature;
    column[kEntropyThreshold] = args.threshold ? *args.threshold : rules.entropy_threshold;
    column[kRollout] = given_to_plan(args.rollout, t, unmasked, nanf(""));
    column[kRolloutWeight] = found.rollout_weight;
    const int64_t id = args.clean_ids && unmasked ? args.ids[t] : 0;
    for (int f = 0; f < kFieldCount; f++) args.table[f * args.tokens + t] = column[f];
    if (args.clean_ids) args.clean_ids[t] = id;
    return found.has_gradient(rules);
}

// Whether the surrogate has a gradient at either all unmasked tokens of a sequence or none.
GK_HD bool gradient_is_shared(const PlanRules& rules) { return rules.whole_sequences || shares_ratio(rules.level); }

// `surrogate`: whether it has a gradient at the token, or where all of a sequence have one together at any unmasked
// token of it. Exact: a token that is left out has a gradient of exactly zero.
GK_HD bool is_active(const PlanRules& rules, bool unmasked, const PlanWeights& weights, bool surrogate) {
    const bool by_value = weights.direct != 0.f && (rules.kl_has_gradient || surrogate);
    return unmasked && (by_value || (rules.entropy_coef != 0.f && weights.entropy != 0.f));
}

}  // namespace gk
