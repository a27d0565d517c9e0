// The objective of tokens that depend on themselves alone: one for single_pass, all rows of a chunk for fp16 gradients.
#include "../token_objective.h"
#include "dispatch.h"
#include "rows.h"

namespace gk {

float row_objective(const RowArgs& args, int64_t token, float logp, float entropy) {
    return evaluate_token(args.params, args.tokens, token, logp, entropy);
}

void token_objective(const TokenArgs& args, int threads) {
    check_rows(args.token_of, args.rows, args.tokens.count);
    parallel_for(args.rows, kTokensPerPiece, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t t = args.token_of[i];
            evaluate_token(args.params, args.tokens, t, args.tokens.value(kTokenLogp, t),
                           args.tokens.value(kTokenEntropy, t));
        }
    });
}

}  // namespace gk
