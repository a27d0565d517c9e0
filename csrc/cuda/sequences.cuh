// The objective where a token's gradient depends on its sequence: a block per sequence, which its threads walk three
// times, always in the same places. Sums are in double and in an order of their own; tokens that are not scored are
// never read.
//
// Per token up to 76 bytes are read and 24 written, most of them from the L2 cache, where the row kernels have just
// left them: 16 sequences of 1,024 tokens take some 10 microseconds, nearly all of it waiting for loads.
#pragma once
#include "../sequence_rules.h"
#include "block.cuh"

namespace gk::cuda {

GK_DEVICE void evaluate_sequence(const SequenceArgs& args) {
    const Params& p = args.params;
    const int64_t s = args.first + block_index(), begin = args.offsets[s], end = args.offsets[s + 1];
    const auto each_scored = [&](const auto& body) {
        for (int64_t t = begin + thread_index(); t < end; t += block_threads())
            if (args.scored[t]) body(t);
    };
    SequenceSums sums = {0.0, 0.0, 0.0};
    each_scored([&](int64_t t) { add_to_sums(p, args.tokens, t, sums); });
    sums = {block_sum(sums.log_ratio), block_sum(sums.log_weight), block_sum(sums.drift)};
    const SequenceTotals totals = sequence_totals(p, sums, args.lengths[s]);
    double through_ratio = 0.0;
    each_scored([&](int64_t t) { through_ratio += evaluate_in_sequence(p, args.tokens, t, totals); });
    if (!shares_ratio(p.level)) return;
    through_ratio = block_sum(through_ratio);
    each_scored([&](int64_t t) { add_sequence_gradient(p, args.tokens, t, totals, through_ratio); });
}

}  // namespace gk::cuda
