// The objective of tokens: of one for single_pass, of all rows of a chunk for fp16 gradients, and of whole sequences.
//
// Where a token's gradient depends on its sequence, sums run in double and in index order, and threads share out whole
// sequences: their number changes no bit. Tokens that are not scored are never looked at.
#include "../sequence_rules.h"
#include "dispatch.h"
#include "kernels.h"

namespace gk {

float row_objective(const RowArgs& args, int64_t token, float logp, float entropy) {
    return evaluate_token(args.params, args.tokens, token, logp, entropy);
}

void token_objective(const TokenArgs& args, int threads) {
    parallel_for(args.rows, kTokensPerPiece, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t t = args.token_of[i];
            evaluate_token(args.params, args.tokens, t, args.tokens.value(kTokenLogp, t),
                           args.tokens.value(kTokenEntropy, t));
        }
    });
}

namespace {

void evaluate_sequence(const SequenceArgs& args, int64_t s) {
    const Params& p = args.params;
    const int64_t begin = args.offsets[s], end = args.offsets[s + 1];
    SequenceSums sums = {0.0, 0.0, 0.0};
    for (int64_t t = begin; t < end; t++)
        if (args.scored[t]) add_to_sums(p, args.tokens, t, sums);
    const SequenceTotals totals = sequence_totals(p, sums, args.lengths[s]);
    double through_ratio = 0.0;
    for (int64_t t = begin; t < end; t++)
        if (args.scored[t]) through_ratio += evaluate_in_sequence(p, args.tokens, t, totals);
    if (!shares_ratio(p.level)) return;
    for (int64_t t = begin; t < end; t++)
        if (args.scored[t]) add_sequence_gradient(p, args.tokens, t, totals, through_ratio);
}

}  // namespace

void sequence_objective(const SequenceArgs& args, int threads) {
    if (args.first == args.last) return;
    const int64_t tokens = args.offsets[args.last] - args.offsets[args.first];
    const int64_t grain = sequences_per_piece(tokens, args.last - args.first);
    parallel_for(args.last - args.first, grain, threads, [&](int64_t first, int64_t last) {
        for (int64_t s = args.first + first; s < args.first + last; s++) evaluate_sequence(args, s);
    });
}

}  // namespace gk
