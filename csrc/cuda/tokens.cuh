// Tokens after the vocabulary is gone: the objective at given log-probabilities, and sums over everything.
//
// The sums go tokens -> sequences -> groups and the batch, in double and in an order of their own: no atomics, and two
// runs give the same bits. A block adds up the tokens of a sequence; then one block per group, and one for the batch,
// adds up rows of sequence sums. Unscored tokens are never looked at.
//
// Per token the objective reads 7 floats and writes 4, the sums read 13 floats and a byte: 16,384 tokens are 1 MB, two
// launches of a few microseconds on an H200.
#pragma once
#include "device.h"
#include "kernels.h"

namespace gk::cuda {

GK_DEVICE void objective_token(const ObjectiveArgs& args) {
    const int64_t i = static_cast<int64_t>(block_index()) * block_threads() + thread_index();
    if (i >= args.tokens) return;
    const auto field = [&](TableField f) { return args.table[f * args.table_pitch + i]; };
    const TokenObjective token =
        objective(args.params, args.log_ratio[i], args.logp[i], args.entropy[i], field(kAdvantage), field(kRef),
                  field(kMultiplier), field(kEntropyThreshold));
    args.out[i] = token.value;
    args.out[args.tokens + i] = token.d_ratio;
    args.out[2 * args.tokens + i] = token.d_direct;
    args.out[3 * args.tokens + i] = token.kl;
}

// ---- columns: kColumnCount sums, then the extrema -------------------------------------------------------------------
GK_DEVICE double empty_column(int column) {
    if (column == kRatioMin) return infinity();
    return column == kRatioMax || column == kMismatchMax ? -infinity() : 0.0;
}
GK_DEVICE double combine(int column, double x, double y) {
    if (column == kRatioMin) return y < x ? y : x;
    if (column == kRatioMax || column == kMismatchMax) return y > x ? y : x;
    return x + y;
}

// Adds one token's columns to those of its thread.
GK_DEVICE void add_token(const ReduceArgs& args, int64_t i, double (&columns)[kReducedCount]) {
    const Params& p = args.params;
    const auto field = [&](TableField f) { return args.table[f * args.table_pitch + i]; };
    const float ratio = expf(clamped_log_ratio(p, args.log_ratio[i]));
    const float bounded = ratio < p.delta ? ratio : p.delta;
    const float logp = args.logp[i], entropy = args.entropy[i];
    const float advantage = field(kAdvantage), base = p.has_base ? field(kBase) : logp;
    const float weight = field(kWeightDirect), weight_entropy = field(kWeightEntropy);
    const float rollout = field(kRollout);
    const bool has_rollout = rollout == rollout;
    // DPPO and IPO divide by the rollout itself: there the current policy is compared with it.
    const float trained = p.surrogate == kDppoTv || p.surrogate == kIpo ? logp : base;
    const float mismatch = has_rollout ? fabsf(trained - rollout) : 0.f;
    const double rollout_weight = field(kRolloutWeight);
    const auto add = [&](int column, double x) { columns[column] = combine(column, columns[column], x); };

    if (weight != 0.f) add(kLoss, static_cast<double>(weight) * args.value[i]);
    if (weight_entropy != 0.f) add(kLoss, static_cast<double>(weight_entropy) * entropy);
    add(kTokens, 1.0);
    add(kKl, args.kl[i]);
    add(kEntropy, entropy);
    add(kRatio, ratio);
    add(kClipLow, bounded < 1.f - p.epsilon_low && advantage < 0.f);
    add(kClipHigh, bounded > 1.f + p.epsilon_high && advantage > 0.f);
    add(kCispoClip, bounded > p.epsilon_high && advantage > 0.f);
    add(kApproxKl, static_cast<double>(base) - logp);
    add(kMismatch, mismatch);
    add(kMismatchCount, has_rollout);
    add(kRolloutWeightSum, rollout_weight);
    add(kRolloutWeightSq, rollout_weight * rollout_weight);
    add(kZeroGradient, args.g_logp[i] == 0.f && weight_entropy == 0.f);
    add(kRatioMin, ratio);
    add(kRatioMax, ratio);
    if (has_rollout) add(kMismatchMax, mismatch);
}

GK_DEVICE void reduce_sequence(const ReduceLaunch& launch) {
    const ReduceArgs& args = launch.reduce;
    const int64_t sequence = block_index();
    const int thread = thread_index();
    double columns[kReducedCount];
    GK_UNROLL for (int c = 0; c < kReducedCount; c++) columns[c] = empty_column(c);
    for (int64_t i = args.cu_seqlens[sequence] + thread; i < args.cu_seqlens[sequence + 1]; i += block_threads())
        if (args.scored[i]) add_token(args, i, columns);

    auto* const shared = reinterpret_cast<double*>(dynamic_shared());  // (threads, kReducedCount)
    GK_UNROLL for (int c = 0; c < kReducedCount; c++) shared[thread * kReducedCount + c] = columns[c];
    block_sync();
    if (thread >= kReducedCount) return;
    double total = empty_column(thread);
    for (int t = 0; t < block_threads(); t++) total = combine(thread, total, shared[t * kReducedCount + thread]);
    launch.workspace[sequence * kReducedCount + thread] = total;
    if (thread < kColumnCount) args.sequence_sums[sequence * kColumnCount + thread] = static_cast<float>(total);
}

// Blocks 0 .. groups - 1 add up the sequences of their group, the last block all of them.
GK_DEVICE void reduce_group(const ReduceLaunch& launch) {
    const ReduceArgs& args = launch.reduce;
    const int64_t group = block_index();
    const bool everything = group == args.groups;
    const int thread = thread_index(), slot = thread / kReducedCount, column = thread % kReducedCount;
    auto* const shared = reinterpret_cast<double*>(dynamic_shared());  // (kGroupSlots, kReducedCount)
    double total = empty_column(column);
    for (int64_t s = slot; slot < kGroupSlots && s < args.sequences; s += kGroupSlots)
        if (everything || args.group_index[s] == group)
            total = combine(column, total, launch.workspace[s * kReducedCount + column]);
    if (slot < kGroupSlots) shared[thread] = total;
    block_sync();
    if (thread >= kReducedCount) return;
    for (int other = 1; other < kGroupSlots; other++)
        total = combine(column, total, shared[other * kReducedCount + column]);
    if (column < kColumnCount)
        (everything ? args.totals : args.group_sums + group * kColumnCount)[column] = static_cast<float>(total);
    else if (everything)
        args.extrema[column - kColumnCount] = static_cast<float>(total);
}

}  // namespace gk::cuda
