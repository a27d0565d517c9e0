// Per-token kernels, O(N): the objective at given log-probabilities, and sums over everything.
//
// The sums go tokens -> sequences -> groups and the batch, in double and in an order of their own: no atomics, and two
// runs give the same bits. A block adds up the tokens of a sequence; then one block per group, and one for the batch,
// adds up rows of sequence sums. Tokens that are not scored are never read, and show 0.
//
// Per token the objective reads 9 floats and writes 4, the sums read 13 floats and a byte: 16,384 tokens are 1 MB, two
// launches of a few microseconds on an H200.
#pragma once
#include "../token_objective.h"
#include "device.h"
#include "kernels.h"

namespace gk::cuda {

GK_DEVICE void objective_of_row(const TokenArgs& args) {
    const int64_t row = static_cast<int64_t>(block_index()) * block_threads() + thread_index();
    if (row >= args.rows) return;
    const int64_t t = args.token_of[row];
    evaluate_token(args.params, args.tokens, t, args.tokens.value(kTokenLogp, t), args.tokens.value(kTokenEntropy, t));
}

GK_DEVICE double empty_column(int column) {
    if (column == kRatioMin) return infinity();
    return column == kRatioMax || column == kMismatchMax ? -infinity() : 0.0;
}

GK_DEVICE void reduce_sequence(const ReduceLaunch& launch) {
    const ReduceArgs& args = launch.reduce;
    const int64_t sequence = block_index();
    const int thread = thread_index();
    double columns[kReducedCount];
    GK_UNROLL for (int c = 0; c < kReducedCount; c++) columns[c] = empty_column(c);
    for (int64_t t = args.offsets[sequence] + thread; t < args.offsets[sequence + 1]; t += block_threads())
        args.scored[t] ? add_token(args.params, args.tokens, t, columns) : clear_token(args.tokens, t);

    auto* const shared = reinterpret_cast<double*>(dynamic_shared());  // (threads, kReducedCount)
    GK_UNROLL for (int c = 0; c < kReducedCount; c++) shared[thread * kReducedCount + c] = columns[c];
    block_sync();
    if (thread >= kReducedCount) return;
    double total = empty_column(thread);
    for (int other = 0; other < block_threads(); other++)
        total = combine(thread, total, shared[other * kReducedCount + thread]);
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
