// Rows whose exponentials relative to the sampled id overflowed: relative to the maximum, from logits that are computed
// twice. A block per row and a warp per logit: a policy hardly samples what it finds so improbable.
#pragma once
#include "exponentials.cuh"

namespace gk::cuda {

constexpr int kRepairWarps = kRepairThreads / kWarp;

// ---- single logits --------------------------------------------------------------------------------------------------
// h . w of one warp, the same bits in every lane; in vectors where both rows start at multiples of 16 bytes.
GK_DEVICE float dot(const uint16_t* h, const uint16_t* w, int width) {
    constexpr int kCount = kPerVector<BFloat16>;
    const bool aligned = ((reinterpret_cast<uintptr_t>(h) | reinterpret_cast<uintptr_t>(w)) & 15) == 0;
    const int vectors = aligned ? width / kCount : 0;
    float sums[kCount] = {};
    for (int v = lane_index(); v < vectors; v += kWarp) {
        Vector packed[2];
        load_words(h + v * kCount, packed[0].words);
        load_words(w + v * kCount, packed[1].words);
        float x[kCount], y[kCount];
        unpack<BFloat16>(packed[0], x);
        unpack<BFloat16>(packed[1], y);
        GK_UNROLL for (int k = 0; k < kCount; k++) sums[k] += x[k] * y[k];
    }
    float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (int i = vectors * kCount + lane_index(); i < width; i += kWarp)
        sum += BFloat16::load(h[i]) * BFloat16::load(w[i]);
    return warp_sum(sum);
}

GK_DEVICE Logit logit_of(const ExponentialLaunch& launch, int64_t row, int64_t column) {
    const Product& product = launch.product;
    const auto* h = static_cast<const uint16_t*>(product.hidden) + row * product.hidden_stride;
    const auto* w = static_cast<const uint16_t*>(product.weight) + column * product.weight_stride;
    float u = dot(h, w, static_cast<int>(product.width));
    if (product.bias) u += product.bias[column];
    const Scales scales = make_scales(launch.rows.params, 1.f);
    return launch.rows.params.softcap != 0.f ? to_logit<true>(scales, u) : to_logit<false>(scales, u);
}

// ---- what the warps of a block have, combined for each lane ---------------------------------------------------------
struct Share {
    double values[kRepairWarps][kWarp];
};
static_assert(sizeof(Share) == kRepairShared, "what the host reserves");

template <class Combine>
GK_DEVICE double across_warps(double mine, const Combine& combine) {
    Share& share = *reinterpret_cast<Share*>(dynamic_shared());
    block_sync();  // the last values have been read
    share.values[warp_index()][lane_index()] = mine;
    block_sync();
    double result = share.values[0][lane_index()];
    for (int warp = 1; warp < kRepairWarps; warp++) result = combine(result, share.values[warp][lane_index()]);
    return result;
}

GK_DEVICE double max_across_warps(double mine) {
    return across_warps(mine, [](double a, double b) { return fmax(a, b); });
}
GK_DEVICE double sum_across_warps(double mine) {
    return across_warps(mine, [](double a, double b) { return a + b; });
}

// ---- a row ----------------------------------------------------------------------------------------------------------
GK_DEVICE void repair_row(const ExponentialLaunch& launch, int64_t row) {
    const RowArgs& args = launch.rows;
    const int64_t token = args.token_of[row];
    const float to_exponent = make_scales(args.params, args.temperature[token]).to_exponent;
    const int id = sampled_column(args, token);
    auto* const exponentials = static_cast<uint16_t*>(args.grad) + row * args.grad_stride;
    float own_top = -infinity();
    double own_exps = 0.0, own_moment = 0.0;
    for (int64_t column = warp_index(); column < args.vocab; column += kRepairWarps)
        own_top = fmaxf(own_top, logit_of(launch, row, column).y);
    const float top = static_cast<float>(max_across_warps(own_top));
    for (int64_t column = warp_index(); column < args.vocab; column += kRepairWarps) {
        const Logit logit = logit_of(launch, row, column);
        const float t = exponent(logit.y, origin_of(top), to_exponent), e = exp2_fast(t);
        own_exps += e;
        own_moment += e * t;
        if (lane_index() == 0) exponentials[column] = BFloat16::round(column == id ? 0.f : e * logit.slope);
    }
    const Sums<double> sums = {top, sum_across_warps(own_exps), sum_across_warps(own_moment)};
    const Logit sampled = logit_of(launch, row, id);
    if (thread_index() > 0) return;
    const ExactScales scales(args.params, args.temperature[token]);
    const Statistics stats = make_statistics(sums, scales, {id, sampled.y, sampled.slope});
    write_scales(launch, row, scales, stats, sums.exps, -expm1f(stats.logp) * sampled.slope);
}

GK_DEVICE void repair_rows(const ExponentialLaunch& launch) {
    for (int64_t row = block_index(); row < launch.rows.rows; row += block_count())
        if (launch.scales.row_scale[row] == infinity()) repair_row(launch, row);
}

}  // namespace gk::cuda
