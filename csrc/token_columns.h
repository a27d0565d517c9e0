// What `reduce` adds up of a scored token: the columns of its sums, then its extrema. CPU and device kernels compile
// this file.
#pragma once
#include "args.h"
#include "objective.h"

namespace gk {

enum ReducedColumn : int32_t { kRatioMin = kColumnCount, kRatioMax, kMismatchMax, kReducedCount };

// Of two partial results. A column starts at 0, the minimum at infinity, the maxima at -infinity.
GK_HD double combine(int column, double x, double y) {
    if (column == kRatioMin) return y < x ? y : x;
    if (column == kRatioMax || column == kMismatchMax) return y > x ? y : x;
    return x + y;
}

// What a call returns of a token that is not scored, whose row may have been computed all the same.
GK_HD void clear_token(const TokenData& tokens, int64_t t) {
    tokens.value(kTokenLogp, t) = 0.f;
    tokens.value(kTokenEntropy, t) = 0.f;
}

// Adds token t to `columns`.
GK_HD void add_token(const Params& p, const TokenData& tokens, int64_t t, double (&columns)[kReducedCount]) {
    const auto add = [&](int column, double x) { columns[column] = combine(column, columns[column], x); };
    const float logp = tokens.value(kTokenLogp, t), entropy = tokens.value(kTokenEntropy, t);
    const float ratio = expf(clamped_log_ratio(p, tokens.value(kTokenLogRatio, t)));
    const float bounded = ratio < p.delta ? ratio : p.delta;
    const float advantage = tokens.field(kAdvantage, t);
    const float old = p.has_old && tokens.field(kOld, t) != INFINITY ? tokens.field(kOld, t) : logp;
    const float weight = tokens.field(kWeightDirect, t), weight_entropy = tokens.field(kWeightEntropy, t);
    const float rollout = tokens.field(kRollout, t);
    const bool has_rollout = rollout == rollout;  // NaN: unknown
    // Of the old policy, or where the ratio divides by the rollout of the current one.
    const float mismatch = has_rollout ? fabsf((p.divides_by_rollout ? logp : old) - rollout) : 0.f;
    const double rollout_weight = tokens.field(kRolloutWeight, t);

    if (weight != 0.f) add(kSumLoss, static_cast<double>(weight) * tokens.value(kTokenValue, t));
    if (weight_entropy != 0.f) add(kSumLoss, static_cast<double>(weight_entropy) * entropy);
    add(kSumTokens, 1.0);
    add(kSumKl, tokens.value(kTokenKl, t));
    add(kSumEntropy, entropy);
    add(kSumRatio, ratio);
    add(kSumClipLow, bounded < 1.f - p.epsilon_low && advantage < 0.f);
    add(kSumClipHigh, bounded > 1.f + p.epsilon_high && advantage > 0.f);
    add(kSumCispoClip, bounded > p.epsilon_high && advantage > 0.f);
    if (p.has_old) add(kSumApproxKl, static_cast<double>(old) - logp);
    add(kSumMismatch, mismatch);
    add(kSumMismatchCount, has_rollout);
    add(kSumRolloutWeight, rollout_weight);
    add(kSumRolloutWeightSq, rollout_weight * rollout_weight);
    add(kSumZeroGradient, tokens.value(kTokenGLogp, t) == 0.f && weight_entropy == 0.f);
    add(kSumDivergence, tokens.value(kTokenDivergence, t));
    add(kRatioMin, ratio);
    add(kRatioMax, ratio);
    if (has_rollout) add(kMismatchMax, mismatch);
}

}  // namespace gk
