// A token's objective at its column of the table, and d loss / d logp from it; CPU and device kernels compile this
// file.
#pragma once
#include "args.h"
#include "objective.h"

namespace gk {

// A weight of 0 selects an exact 0, whatever the slope.
GK_HD float weighted(float weight, float slope) { return weight != 0.f ? weight * slope : 0.f; }

// The raw log ratio of the token alone; NaN where logp is, and where it has no ratio: -inf divided by itself.
GK_HD float token_log_ratio(const Params& p, const TokenData& tokens, int64_t t, float logp) {
    if (p.has_old && tokens.field(kOld, t) != INFINITY) return logp - tokens.field(kOld, t);
    return logp - logp;
}

GK_HD TokenObjective objective_at(const Params& p, const TokenData& tokens, int64_t t, float x, float logp,
                                  float entropy, float multiplier) {
    return objective(p, x, logp, entropy, tokens.field(kAdvantage, t), tokens.field(kRef, t), multiplier,
                     tokens.field(kEntropyThreshold, t));
}

GK_HD void store_objective(const TokenData& tokens, int64_t t, float x, const TokenObjective& found, float g_logp) {
    tokens.value(kTokenLogRatio, t) = x;
    tokens.value(kTokenValue, t) = found.value;
    tokens.value(kTokenKl, t) = found.kl;
    tokens.value(kTokenGLogp, t) = g_logp;
}

// Of a token that depends on itself alone. Returns d loss / d logp, and writes all but logp and entropy if `writes`.
GK_HD float evaluate_token(const Params& p, const TokenData& tokens, int64_t t, float logp, float entropy,
                           bool writes = true) {
    const float x = token_log_ratio(p, tokens, t, logp);
    const TokenObjective found = objective_at(p, tokens, t, x, logp, entropy, tokens.field(kMultiplier, t));
    const float g_logp = weighted(tokens.field(kWeightRatio, t), found.d_ratio) +
                         weighted(tokens.field(kWeightDirect, t), found.d_direct);
    if (writes) store_objective(tokens, t, x, found, g_logp);
    return g_logp;
}

}  // namespace gk
