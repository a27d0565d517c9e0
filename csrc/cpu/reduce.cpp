// Loss and metrics: tokens -> sequences -> groups -> one row of totals. Every sum runs in double and in index order, so
// the number of threads, which share out whole sequences, changes no bit. Unscored tokens are never looked at.
#include <math.h>

#include <stdexcept>
#include <vector>

#include "../objective.h"
#include "api.h"
#include "dispatch.h"

namespace gk {

namespace {

struct Extrema {
    float ratio_min = INFINITY;
    float ratio_max = -INFINITY;
    float mismatch_max = -INFINITY;

    void add(float ratio_low, float ratio_high, float mismatch) {
        ratio_min = ratio_low < ratio_min ? ratio_low : ratio_min;
        ratio_max = ratio_high > ratio_max ? ratio_high : ratio_max;
        mismatch_max = mismatch > mismatch_max ? mismatch : mismatch_max;
    }
};

// Adds one token's columns to its sequence.
void add_token(const ReduceArgs& args, int64_t i, double* sums, Extrema& extrema) {
    const Params& p = args.params;
    const auto field = [&](TableField f) { return args.table[f * args.table_pitch + i]; };
    const float ratio = expf(clamped_log_ratio(p, args.log_ratio[i]));
    const float bounded = ratio < p.delta ? ratio : p.delta;
    const float advantage = field(kAdvantage), base = p.has_base ? field(kBase) : args.logp[i];
    const float weight = field(kWeightDirect), weight_entropy = field(kWeightEntropy);
    const bool has_rollout = !isnan(field(kRollout));
    // DPPO and IPO divide by the rollout itself: there the current policy is compared with it.
    const float trained = p.surrogate == kDppoTv || p.surrogate == kIpo ? args.logp[i] : base;
    const float mismatch = has_rollout ? fabsf(trained - field(kRollout)) : 0.f;
    const double rollout_weight = field(kRolloutWeight);

    if (weight != 0.f) sums[kLoss] += static_cast<double>(weight) * args.value[i];
    if (weight_entropy != 0.f) sums[kLoss] += static_cast<double>(weight_entropy) * args.entropy[i];
    sums[kTokens] += 1.0;
    sums[kKl] += args.kl[i];
    sums[kEntropy] += args.entropy[i];
    sums[kRatio] += ratio;
    sums[kClipLow] += bounded < 1.f - p.epsilon_low && advantage < 0.f;
    sums[kClipHigh] += bounded > 1.f + p.epsilon_high && advantage > 0.f;
    sums[kCispoClip] += bounded > p.epsilon_high && advantage > 0.f;
    if (p.has_base) sums[kApproxKl] += static_cast<double>(base) - args.logp[i];
    sums[kMismatch] += mismatch;
    sums[kMismatchCount] += has_rollout;
    sums[kRolloutWeightSum] += rollout_weight;
    sums[kRolloutWeightSq] += rollout_weight * rollout_weight;
    sums[kZeroGradient] += args.g_logp[i] == 0.f && weight_entropy == 0.f;
    extrema.add(ratio, ratio, has_rollout ? mismatch : -INFINITY);
}

void add_row(const double* row, double* sums) {
    for (int c = 0; c < kColumnCount; c++) sums[c] += row[c];
}

void write(const std::vector<double>& sums, float* out) {
    for (size_t i = 0; i < sums.size(); i++) out[i] = static_cast<float>(sums[i]);
}

void check(const ReduceArgs& args) {
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t begin = args.cu_seqlens[s], end = args.cu_seqlens[s + 1];
        if (begin < 0 || end < begin || end > args.tokens)
            throw std::invalid_argument("cu_seqlens must rise from 0 to the number of tokens");
        if (args.group_index && (args.group_index[s] < 0 || args.group_index[s] >= args.groups))
            throw std::invalid_argument("group_index must lie in [0, num_groups)");
    }
}

}  // namespace

void reduce(const ReduceArgs& args, int threads) {
    check(args);
    std::vector<double> sequences(args.sequences * kColumnCount), groups(args.groups * kColumnCount),
        totals(kColumnCount);
    std::vector<Extrema> extrema(args.sequences);
    parallel_for(args.sequences, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t s = first; s < last; s++)
            for (int64_t i = args.cu_seqlens[s]; i < args.cu_seqlens[s + 1]; i++)
                if (args.scored[i]) add_token(args, i, &sequences[s * kColumnCount], extrema[s]);
    });

    Extrema all;
    for (int64_t s = 0; s < args.sequences; s++) {
        const double* row = &sequences[s * kColumnCount];
        if (args.group_index) add_row(row, &groups[args.group_index[s] * kColumnCount]);
        add_row(row, totals.data());
        all.add(extrema[s].ratio_min, extrema[s].ratio_max, extrema[s].mismatch_max);
    }
    write(sequences, args.sequence_sums);
    write(groups, args.group_sums);
    write(totals, args.totals);
    args.extrema[0] = all.ratio_min;
    args.extrema[1] = all.ratio_max;
    args.extrema[2] = all.mismatch_max;
}

}  // namespace gk
