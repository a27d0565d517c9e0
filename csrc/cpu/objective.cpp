// objective() over rows of the table: one row for the fused kernel, all tokens for the staged path.
#include "../objective.h"

#include "dispatch.h"
#include "rows.h"

namespace gk {

namespace {

// The columns of the table that the objective reads.
TokenObjective evaluate(const Params& params, const float* table, int64_t pitch, int64_t i, float x, float logp,
                        float entropy) {
    const auto field = [&](TableField f) { return table[f * pitch + i]; };
    return objective(params, x, logp, entropy, field(kAdvantage), field(kRef), field(kMultiplier),
                     field(kEntropyThreshold));
}

}  // namespace

RowGradient row_objective(const RowArgs& args, int64_t row, float logp, float entropy) {
    const auto field = [&](TableField f) { return args.table[f * args.table_pitch + row]; };
    const float x = args.params.has_base ? logp - field(kBase) : 0.f;
    const TokenObjective token = evaluate(args.params, args.table, args.table_pitch, row, x, logp, entropy);
    const float weight_ratio = field(kWeightRatio), weight_direct = field(kWeightDirect);
    const float through_ratio = weight_ratio != 0.f ? weight_ratio * token.d_ratio : 0.f;
    const float through_logp = weight_direct != 0.f ? weight_direct * token.d_direct : 0.f;
    return {through_ratio + through_logp, field(kWeightEntropy)};
}

void objective_tokens(int64_t tokens, const float* log_ratio, const float* logp, const float* entropy,
                      const float* table, int64_t table_pitch, const Params& params, float* out, int threads) {
    parallel_for(tokens, 4096, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const TokenObjective token = evaluate(params, table, table_pitch, i, log_ratio[i], logp[i], entropy[i]);
            out[i] = token.value;
            out[tokens + i] = token.d_ratio;
            out[2 * tokens + i] = token.d_direct;
            out[3 * tokens + i] = token.kl;
        }
    });
}

}  // namespace gk
