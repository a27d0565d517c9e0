// The loss of single tokens in one launch: grpo_kernels/objective/loss.py in closed form for clip, CISPO's family, SAPO
// and reinforce.
//
//     value = scale * surrogate(x, logp, A) + beta * KL(ref, logp)                    x = logp - old, r = exp(clamp(x))
//     d loss / d logp = dloss_via_ratio * d value / d x + dloss_direct * d value / d logp
//
// Of a chunk's tokens the gradient alone, a thread each. Of all tokens also what is measured, a block per sequence: the
// block that ends last adds up the sequences, in their order, so that two calls have the same bits. A factor of 0
// selects 0: what it would multiply may be infinite. NaN logits stay NaN, whatever drops their token.
#pragma once
#include <math.h>

#include "device.h"
#include "kernels.h"

namespace gk::cuda {

constexpr float kMaxExponent = 80.f;  // names.EXPONENT_LIMIT

// ---- the loss of a token --------------------------------------------------------------------------------------------
struct Term {
    float value, grad_log_ratio, grad_logp;
};

struct Token {
    float x, ratio, value, kl, share, dlogp, advantage;
};

GK_DEVICE float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

GK_DEVICE Term clip(const ObjectiveNumbers& p, float r, bool clamped, float advantage) {
    const float low = 1.f - p.epsilon_low, high = 1.f + p.epsilon_high;
    const float first = -advantage * (r > p.delta ? p.delta : r), second = -advantage * clamp(r, low, high);
    const bool takes_second = first < second;
    const bool moves = takes_second ? r >= low && r <= high : !(r > p.delta);
    const float value = takes_second ? second : first;
    const float bound = advantage < 0.f ? -advantage * p.dual_clip : infinity();
    if (value > bound) return {bound, 0.f, 0.f};
    return {value, clamped || !moves ? 0.f : -advantage * r, 0.f};
}

// The ratio within its bounds is a constant weight: all gradient goes through logp.
GK_DEVICE Term weighted_logp(const ObjectiveArgs& args, float r, float logp, float advantage) {
    const float low = 1.f - args.numbers.epsilon_low, high = 1.f + args.numbers.epsilon_high;
    float weight = clamp(r, low, high);
    if (args.surrogate == kCispo) weight = r > args.numbers.epsilon_high ? args.numbers.epsilon_high : r;
    if (args.surrogate == kReinforce) weight = logp != logp ? logp : 1.f;
    const bool outward = (advantage > 0.f && r > high) || (advantage < 0.f && r < low);
    if (args.surrogate == kCispoMask && (r <= low || r >= high)) return {0.f, 0.f, 0.f};
    if (args.surrogate == kCispoUnified && outward) return {0.f, 0.f, 0.f};
    return {-weight * advantage * logp, 0.f, -weight * advantage};
}

GK_DEVICE Term sapo(const ObjectiveNumbers& p, float r, bool clamped, float advantage) {
    const float tau = advantage > 0.f ? p.sapo_temperature_pos : p.sapo_temperature_neg;
    // The gate and its complement, each without cancellation.
    const float at = tau * (r - 1.f), decay = expf(-fabsf(at));
    const float far = decay / (1.f + decay), near = 1.f / (1.f + decay);
    const float slope = -4.f * (far * near) * advantage * r;
    return {-(4.f / tau) * (at < 0.f ? far : near) * advantage, clamped ? 0.f : slope, 0.f};
}

struct Kl {
    float value, slope;  // slope: d value / d logp
};

GK_DEVICE Kl kl_estimate(const ObjectiveArgs& args, float logp, float ref) {
    const float delta = args.numbers.kl_delta_clamp, bound = args.numbers.kl_clamp, raw = ref - logp;
    const float upper = args.kl == kK3 && delta > kMaxExponent ? kMaxExponent : delta;
    const float d = clamp(raw, -delta, upper), growth = expm1f(d);
    const Kl free = args.kl == kK1 ? Kl{-d, 1.f} : args.kl == kK2 ? Kl{0.5f * d * d, -d} : Kl{growth - d, -growth};
    const float value = clamp(free.value, -bound, bound);
    const bool still = raw < -delta || raw > upper || (value != free.value && free.value == free.value);
    return {value, still ? 0.f : free.slope};
}

GK_DEVICE float weighted(float weight, float x) { return weight != 0.f ? weight * x : 0.f; }

GK_DEVICE Token evaluate(const ObjectiveArgs& args, int64_t at) {
    const ObjectiveNumbers& p = args.numbers;
    const float logp = args.logp[at], advantage = args.advantage[at], direct = args.dloss_direct[at];
    const float x = logp - (args.old ? args.old[at] : logp);
    const float upper = p.log_ratio_clamp < kMaxExponent ? p.log_ratio_clamp : kMaxExponent;
    const bool clamped = x < -p.log_ratio_clamp || x > upper;
    const float r = expf(clamp(x, -p.log_ratio_clamp, upper));
    Term term = args.surrogate == kClip   ? clip(p, r, clamped, advantage)
                : args.surrogate == kSapo ? sapo(p, r, clamped, advantage)
                                          : weighted_logp(args, r, logp, advantage);
    if (args.scale) {
        const float scale = args.scale[at];
        const bool drop = scale == 0.f && x == x;
        term =
            drop ? Term{0.f, 0.f, 0.f} : Term{scale * term.value, scale * term.grad_log_ratio, scale * term.grad_logp};
    }
    Kl kl = {0.f, 0.f};
    if (args.kl != kNone) {
        kl = kl_estimate(args, logp, args.ref[at]);
        term.value += weighted(p.beta, kl.value);
        term.grad_logp += weighted(p.beta, kl.slope);
    }
    const float dlogp = weighted(args.dloss_via_ratio[at], term.grad_log_ratio) + weighted(direct, term.grad_logp);
    return {x, r, term.value, kl.value, weighted(direct, term.value), dlogp, advantage};
}

// ---- what is measured -----------------------------------------------------------------------------------------------
// Columns of kernels/fused_objective.py, in their order; then its extrema, in which NaN stays.
// clang-format off: few to a line
enum Measure {
    kLoss, kTokens, kKl, kEntropy, kRatio, kClipLow, kClipHigh, kCispoClip, kApproxKl, kMismatch, kMismatchCount,
    kRolloutWeight, kRolloutWeightSq, kZeroGradient, kDivergence, kColumns,
    kRatioMin = kColumns, kRatioMax, kMismatchMax, kMeasures
};
// clang-format on

constexpr int kObjectiveWarps = kObjectiveThreads / kWarp;

struct Exchange {
    double warps[kObjectiveWarps][kMeasures];
    int32_t ended_before;  // blocks
};
static_assert(sizeof(Exchange) <= kObjectiveShared, "what the host reserves");

GK_DEVICE double neutral(int measure) {
    return measure < kColumns ? 0.0 : measure == kRatioMin ? infinity() : -infinity();
}

GK_DEVICE double combine(int measure, double x, double y) {
    if (measure < kColumns) return x + y;
    return (measure == kRatioMin ? y < x : y > x) || y != y ? y : x;
}

GK_DEVICE void add_token(const ObjectiveArgs& args, int64_t at, const Token& token, double (&own)[kMeasures]) {
    const ObjectiveNumbers& p = args.numbers;
    const float low = 1.f - p.epsilon_low, high = 1.f + p.epsilon_high, A = token.advantage;
    const float bounded = token.ratio > p.delta ? p.delta : token.ratio;
    const bool clips = args.surrogate < kCispo;
    own[kLoss] += token.share;
    own[kTokens] += 1.0;
    own[kKl] += token.kl;
    own[kEntropy] += args.entropy[at];
    own[kRatio] += token.ratio;
    own[kClipLow] += clips && bounded < low && A < 0.f;
    own[kClipHigh] += clips && bounded > high && A > 0.f;
    own[kCispoClip] += args.surrogate == kCispo && bounded > p.epsilon_high && A > 0.f;
    own[kApproxKl] -= token.x;
    own[kRatioMin] = combine(kRatioMin, own[kRatioMin], token.ratio);
    own[kRatioMax] = combine(kRatioMax, own[kRatioMax], token.ratio);
    if (args.rollout && args.rollout[at] == args.rollout[at]) {
        const float mismatch = fabsf((args.old ? args.old[at] : args.logp[at]) - args.rollout[at]);
        own[kMismatch] += mismatch;
        own[kMismatchCount] += 1.0;
        own[kMismatchMax] = combine(kMismatchMax, own[kMismatchMax], mismatch);
    }
    const double weight = args.rollout_weight ? args.rollout_weight[at] : 1.f;
    own[kRolloutWeight] += weight;
    own[kRolloutWeightSq] += weight * weight;
    own[kZeroGradient] += token.dlogp == 0.f;
}

// A row of exact and of sums.
GK_DEVICE void measure_sequence(const ObjectiveArgs& args, int64_t sequence, Exchange& exchange) {
    double own[kMeasures];
    GK_UNROLL for (int m = 0; m < kMeasures; m++) own[m] = neutral(m);
    const int64_t stop = args.offsets[sequence + 1];
    for (int64_t at = args.offsets[sequence] + thread_index(); at < stop; at += block_threads()) {
        const Token token = evaluate(args, at);
        args.dlogp[at] = token.dlogp;
        if (!args.scored || args.scored[at]) add_token(args, at, token, own);
    }
    GK_UNROLL for (int m = 0; m < kMeasures; m++) {
        GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) own[m] =
            combine(m, own[m], shuffle_xor(own[m], mask));
        if (lane_index() == 0) exchange.warps[warp_index()][m] = own[m];
    }
    block_sync();  // the warps have written
    const int m = thread_index();
    if (m >= kMeasures) return;
    double all = neutral(m);
    for (int warp = 0; warp < kObjectiveWarps; warp++) all = combine(m, all, exchange.warps[warp][m]);
    args.exact[sequence * kMeasures + m] = all;
    if (m < kColumns) args.sums[sequence * kColumns + m] = static_cast<float>(all);
}

// Behind the rows of the sequences: those of the groups, then that of all, then the extrema. A thread per number.
GK_DEVICE void add_sequences(const ObjectiveArgs& args) {
    float* const rows = args.sums + args.sequences * kColumns;
    const int64_t count = (args.groups + 1) * kMeasures;
    for (int64_t i = thread_index(); i < count; i += block_threads()) {
        const int64_t row = i / kMeasures;
        const int m = static_cast<int>(i % kMeasures);
        if (row < args.groups && m >= kColumns) continue;
        double all = neutral(m);
        _Pragma("unroll 8") for (int64_t s = 0; s < args.sequences; s++) {
            const double one = args.exact[s * kMeasures + m];
            all = row == args.groups || args.group_index[s] == row ? combine(m, all, one) : all;
        }
        rows[row * kColumns + m] = static_cast<float>(all);
    }
}

GK_DEVICE void objective(const ObjectiveArgs& args) {
    if (!args.sums) {
        const int64_t row = static_cast<int64_t>(block_index()) * block_threads() + thread_index();
        if (row >= args.rows) return;
        const int64_t at = args.token_of[row];
        args.dlogp[at] = evaluate(args, at).dlogp;
        return;
    }
    Exchange& exchange = *reinterpret_cast<Exchange*>(dynamic_shared());
    if (block_index() < args.sequences) measure_sequence(args, block_index(), exchange);
    block_sync();  // the row is written
    if (thread_index() == 0) {
        device_fence();  // before the block counts itself, its row is seen by all
        exchange.ended_before = atomic_add(args.counter, 1);
        device_fence();  // and before the last one reads rows, those of the others
    }
    block_sync();  // all know whether theirs is the last
    if (exchange.ended_before == static_cast<int32_t>(block_count()) - 1) add_sequences(args);
}

}  // namespace gk::cuda
