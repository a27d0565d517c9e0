// Exponentials relative to the sampled id, of which a gradient is one multiple. There is no maximum to wait for, so
// that a row of logits is read once and may be written over at once; the products of lm_head_epilogue.cuh never have
// logits.
//
//     E_j = e^(z_j - z_id) slope_j      E_id is stored as 0    rest = sum_{j != id} e^(z_j - z_id)    S = 1 + rest
//     logp = -log S                     entropy = log S - sum_{j != id} e^(z_j - z_id) (z_j - z_id) / S
//     d logp / d u_j = -E_j row_scale   row_scale = (scale / T) / S
//     d logp / d u_id = sampled         sampled = (scale / T) (1 - p_id) slope_id
//
// 1 - p_id = rest / S keeps its digits however close to 1 p_id is. Where it is below 2^-80 the row is left to
// repair.cuh.
//
// Per logit of a (C, V) float32 chunk: 4 bytes read, 2 written, one exponential.
#pragma once
#include "rows.cuh"

namespace gk::cuda {

constexpr float kHighestExponent = 100.f;  // sums of 2^t over a vocabulary stay below 2^128
constexpr double kLargestRest = 0x1p80;

// A sum of exponentials, and of 2^t t.
struct Rest {
    double exps, moment;
};

// ---- one thread per row, when the row's other exponentials have been written ----------------------------------------
// `total` is the sum that belongs to the exponentials; others: 1 - p of the sampled id, times its slope.
GK_DEVICE void write_scales(const ExponentialLaunch& launch, int64_t row, const ExactScales& scales,
                            const Statistics& stats, double total, double others) {
    write_statistics(launch.rows, launch.rows.token_of[row], stats);
    launch.scales.row_scale[row] = static_cast<float>(scales.dz_du / total);
    launch.scales.sampled[row] = static_cast<float>(scales.dz_du * others);
}

GK_DEVICE void finish_row(const ExponentialLaunch& launch, int64_t row, const Rest& rest, int column,
                          const Logit& sampled) {
    const RowArgs& args = launch.rows;
    // Where the sampled id's logit is NaN, so are the hidden states: there is nothing to repair.
    if (column >= 0 && !(rest.exps <= kLargestRest) && sampled.y == sampled.y) {
        launch.scales.row_scale[row] = infinity();
        return;
    }
    const ExactScales scales(args.params, args.temperature[args.token_of[row]]);
    Statistics stats;
    stats.top = sampled.y;
    stats.log_sum = log1p(rest.exps);
    if (column < 0 || sampled.y == infinity()) stats.log_sum = not_a_number();
    stats.lse = sampled.y * scales.to_z + stats.log_sum;
    stats.logp = static_cast<float>(-stats.log_sum);
    stats.entropy = static_cast<float>(stats.log_sum - kLn2 * (rest.moment / (1.0 + rest.exps)));
    const double total = 1.0 + rest.exps;
    write_scales(launch, row, scales, stats, total, column >= 0 ? rest.exps / total * sampled.slope : 0.0);
}

// ---- from logits ----------------------------------------------------------------------------------------------------
template <bool kCapped, bool kBiased, class In>
GK_DEVICE Rest write_exponentials(const Source<In>& source, const float* bias, const Target<BFloat16, In>& target,
                                  const Scales& scales, int sampled, float y_id, bool overlap) {
    float sum = 0.f, sum_moment = 0.f;
    walk(source, 0, source.vectors(), thread_index(), block_threads(), [&](const auto& group, int vector) {
        if (overlap) block_sync();
        GK_UNROLL for (const Vector& packed : group) {
            float y[kPerVector<In>], slopes[kPerVector<In>], exps = 0.f, moment = 0.f;
            load_logits<kCapped, kBiased>(source, bias, scales, packed, vector, y, slopes);
            GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) {
                if (source.column(vector) + k == sampled) y[k] = -infinity();
                const float t = min_or_nan(exponent(y[k], y_id, scales.to_exponent), kHighestExponent);
                const float e = exp2_fast(t);
                exps += e;
                moment = fmaf(e, t, moment);
                y[k] = kCapped ? e * slopes[k] : e;
            }
            sum += exps;
            sum_moment += moment;
            target.store(source, vector, y);
            vector += block_threads();
        }
    });
    return {sum, sum_moment};
}

struct RestExchange {  // at the start of the block's shared memory
    Rest warps[kSweepThreads / kWarp];
};
static_assert(sizeof(RestExchange) <= kExchangeBytes, "what the host reserves");

template <class In>
GK_DEVICE void exponentials(const ExponentialLaunch& launch) {
    const RowArgs& args = launch.rows;
    RestExchange& exchange = *reinterpret_cast<RestExchange*>(dynamic_shared());
    const int64_t row = block_index(), token = args.token_of[row];
    const Source<In> source = source_of<In>(args, row);
    const Target<BFloat16, In> target = target_of<In, BFloat16>(args, row, source);
    const Scales scales = make_scales(args.params, args.temperature[token]);
    const int column = sampled_column(args, token);
    const float u = sampled_logit(args, source, column);
    const Logit sampled = args.params.softcap != 0.f ? to_logit<true>(scales, u) : to_logit<false>(scales, u);
    block_sync();  // all have read the sampled id's logit
    Rest rest = specialise(args, [&](auto capped, auto biased) {
        return write_exponentials<capped.kOn, biased.kOn>(source, args.bias, target, scales, column, sampled.y,
                                                          launch.overlap);
    });
    rest = {warp_sum(rest.exps), warp_sum(rest.moment)};
    if (lane_index() == 0) exchange.warps[warp_index()] = rest;
    block_sync();  // all is written
    if (thread_index() > 0) return;
    for (int warp = 1; warp < block_threads() / kWarp; warp++) {
        rest.exps += exchange.warps[warp].exps;
        rest.moment += exchange.warps[warp].moment;
    }
    finish_row(launch, row, rest, column, sampled);
}

}  // namespace gk::cuda
