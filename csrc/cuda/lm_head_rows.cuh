// The kernels around the product, over rows: sampled logits before it, statistics from its partial results after it,
// and rows whose exponentials overflowed once more.
//
// Partial results are combined in fixed order: 32 rows by 8 threads, each with every eighth part.
#pragma once
#include "lm_head_logits.cuh"
#include "lm_head_schedule.h"

namespace gk::cuda::head {

constexpr int kRowWarps = kRowThreads / kWarp;
constexpr double kLargestRest = 0x1p80;  // a row beyond is computed again, relative to its maximum

// ---- single logits --------------------------------------------------------------------------------------------------
// h . w of one warp, the same bits in every lane. Both rows start at multiples of 16 bytes.
template <class Type>
GK_DEVICE float dot(const void* hidden, const void* weight, int width) {
    const auto* h = static_cast<const uint16_t*>(hidden);
    const auto* w = static_cast<const uint16_t*>(weight);
    constexpr int kCount = kPerVector<Type>;
    const int vectors = width / kCount;
    float sums[kCount] = {};
    for (int v = lane_index(); v < vectors; v += kWarp) {
        float x[kCount], y[kCount];
        unpack<Type>(reinterpret_cast<const Vector*>(h)[v], x);
        unpack<Type>(reinterpret_cast<const Vector*>(w)[v], y);
        GK_UNROLL for (int k = 0; k < kCount; k++) sums[k] += x[k] * y[k];
    }
    float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    const int last = vectors * kCount + lane_index();
    if (last < width) sum += Type::load(h[last]) * Type::load(w[last]);
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}

GK_DEVICE Logit logit_of(const HeadArgs& head, int64_t row, int64_t column) {
    const auto* h = static_cast<const uint16_t*>(head.hidden) + row * head.hidden_row_stride;
    const auto* w = static_cast<const uint16_t*>(head.weight) + column * head.weight_row_stride;
    const int width = static_cast<int>(head.width);
    float u = head.dtype == kBfloat16 ? dot<BFloat16>(h, w, width) : dot<Float16>(h, w, width);
    if (head.bias) u += head.bias[column];
    const Scales scales = make_scales(head.params, 1.f);
    return head.params.softcap != 0.f ? to_logit<true>(scales, u) : to_logit<false>(scales, u);
}

// A warp per row: y and slope of the sampled ids; 0 and 1 for an id outside the vocabulary.
GK_DEVICE void sampled_logits(const KernelArgs& args) {
    const HeadArgs& head = args.head;
    const int64_t row = block_index() * kRowWarps + warp_index();
    if (row >= head.rows) return;
    const int id = column_of(head.ids[row], head.vocab);
    const Logit logit = id >= 0 ? logit_of(head, row, id) : Logit{0.f, 1.f};
    if (lane_index() != 0) return;
    args.y_ids[row] = logit.y;
    args.slope_ids[row] = logit.slope;
}

// ---- combining parts ------------------------------------------------------------------------------------------------
struct Share {
    double values[kRowWarps][kWarp];
};
static_assert(sizeof(Share) == kRowShared && kRowsPerBlock == kWarp, "one lane per row");

GK_DEVICE Share& share() { return *reinterpret_cast<Share*>(dynamic_shared()); }

// Of one value per thread, those of all warps combined for each lane.
template <class Combine>
GK_DEVICE double across_warps(double mine, const Combine& combine) {
    block_sync();  // the last values have been read
    share().values[warp_index()][lane_index()] = mine;
    block_sync();
    double result = share().values[0][lane_index()];
    for (int warp = 1; warp < kRowWarps; warp++) result = combine(result, share().values[warp][lane_index()]);
    return result;
}

GK_DEVICE double sum_across_warps(double mine) {
    return across_warps(mine, [](double a, double b) { return a + b; });
}

// The plane's values of this thread's row: body(index of the part's value)
template <class Body>
GK_DEVICE void for_own_parts(const KernelArgs& args, int64_t row, const Body& body) {
    if (row >= args.head.rows) return;
    for (uint32_t part = warp_index(); part < args.schedule.parts; part += kRowWarps) body(part * args.head.rows + row);
}

GK_DEVICE int64_t own_row() { return block_index() * kWarp + lane_index(); }

GK_DEVICE void write_row(const HeadArgs& head, int64_t row, const Statistics& found) {
    head.logp[row] = found.logp;
    head.lse[row] = found.lse;
    head.entropy[row] = found.entropy;
}

// Statistics from the maxima, sums and moments of all parts.
GK_DEVICE void combine_statistics(const KernelArgs& args) {
    const HeadArgs& head = args.head;
    const int64_t row = own_row(), plane = args.schedule.parts * head.rows;
    const bool live = row < head.rows;
    const ExactScales scales(head.params, live ? head.temperature[row] : 1.f);

    double own_top = -infinity();
    for_own_parts(args, row, [&](int64_t at) { own_top = fmax(own_top, args.partials[at]); });
    const double top = across_warps(own_top, [](double a, double b) { return fmax(a, b); });
    double own_exps = 0.0, own_moment = 0.0;
    for_own_parts(args, row, [&](int64_t at) {
        // The sums of a part without a finite logit are 0, or NaN, relative to anything.
        const double part_top = args.partials[at];
        const double fall = part_top == -infinity() ? 0.0 : (top - part_top) * (scales.to_z / kLn2);
        const double factor = exp2(-fall), part_exps = args.partials[plane + at];
        own_exps += part_exps * factor;
        own_moment += (args.partials[2 * plane + at] - part_exps * fall) * factor;
    });
    const double exps = sum_across_warps(own_exps), moment = sum_across_warps(own_moment);
    if (warp_index() != 0 || !live) return;
    const Sampled sampled = {column_of(head.ids[row], head.vocab), args.y_ids[row], 1.0};
    write_row(head, row, make_statistics({static_cast<float>(top), exps, moment}, scales, sampled));
}

// ---- anchored -------------------------------------------------------------------------------------------------------
// Statistics, and v with d loss / d u_j = v E_j. `total` is the sum that belongs to the exponentials.
GK_DEVICE void write_scale(const HeadArgs& head, int64_t row, const ExactScales& scales, const Statistics& found,
                           double total) {
    write_row(head, row, found);
    const TokenData tokens = {head.table, nullptr, head.table_row_stride};
    const float g = evaluate_token(head.params, tokens, row, found.logp, found.entropy, false);
    head.scale[row] = g == 0.f ? 0.f : static_cast<float>(-g * scales.chain / total);
}

GK_DEVICE void write_exponential(const HeadArgs& head, int64_t row, int64_t column, float e) {
    static_cast<uint16_t*>(head.exponentials)[row * head.exponentials_row_stride + column] = BFloat16::round(e);
}

// Rows whose sum did not overflow are finished, the others are marked for repair_rows.
GK_DEVICE void scale_rows(const KernelArgs& args) {
    const HeadArgs& head = args.head;
    const int64_t row = own_row(), plane = args.schedule.parts * head.rows;
    double own_rest = 0.0, own_moment = 0.0;
    for_own_parts(args, row, [&](int64_t at) {
        own_rest += args.partials[at];
        own_moment += args.partials[plane + at];
    });
    const double rest = sum_across_warps(own_rest), moment = sum_across_warps(own_moment);
    if (warp_index() != 0 || row >= head.rows) return;

    const int id = column_of(head.ids[row], head.vocab);
    const float y_id = args.y_ids[row];
    // Where the anchor is NaN, so are the hidden states: there is nothing to repair.
    const bool lost = id >= 0 && !(rest <= kLargestRest) && y_id == y_id;
    args.overflowed[row] = lost;
    if (lost) return;
    const ExactScales scales(head.params, head.temperature[row]);
    Statistics found;
    found.top = y_id;
    found.log_sum = id >= 0 ? log1p(rest) : not_a_number();  // an id outside the vocabulary has no probability
    found.lse = y_id * scales.to_z + found.log_sum;
    found.logp = static_cast<float>(-found.log_sum);
    found.entropy = static_cast<float>(found.log_sum - kLn2 * (moment / (1.0 + rest)));
    write_scale(head, row, scales, found, 1.0 + rest);
    if (id >= 0) write_exponential(head, row, id, -static_cast<float>(rest) * args.slope_ids[row]);
}

// ---- repair: relative to the maximum, from logits that are computed twice ------------------------------------------
GK_DEVICE Sums<double> extend(const Sums<double>& sums, float y, float to_exponent) {
    Sums<double> result = y > sums.top ? raise(sums, y, to_exponent) : sums;
    const float t = exponent(y, origin_of(result.top), to_exponent), e = exp2_fast(t);
    result.exps += e;
    result.moment += e * t;
    return result;
}

GK_DEVICE void repair_row(const KernelArgs& args, int64_t row) {
    const HeadArgs& head = args.head;
    const float to_exponent = make_scales(head.params, head.temperature[row]).to_exponent;
    Sums<double> own = {-infinity(), 0.0, 0.0};
    for (int64_t column = warp_index(); column < head.vocab; column += kRowWarps)
        own = extend(own, logit_of(head, row, column).y, to_exponent);
    const double top = across_warps(own.top, [](double a, double b) { return fmax(a, b); });
    own = raise(own, static_cast<float>(top), to_exponent);
    const Sums<double> sums = {own.top, sum_across_warps(own.exps), sum_across_warps(own.moment)};

    const int id = column_of(head.ids[row], head.vocab);
    const Logit logit_id = logit_of(head, row, id);
    const ExactScales scales(head.params, head.temperature[row]);
    const Statistics found = make_statistics(sums, scales, {id, logit_id.y, logit_id.slope});
    if (thread_index() == 0) write_scale(head, row, scales, found, sums.exps);

    // E_id - S, without the cancellation
    const float e_id = static_cast<float>(sums.exps) * expm1f(found.logp) * logit_id.slope;
    for (int64_t column = warp_index(); column < head.vocab; column += kRowWarps) {
        const Logit logit = logit_of(head, row, column);
        const float e = exp2_fast(exponent(logit.y, origin_of(sums.top), to_exponent)) * logit.slope;
        if (lane_index() == 0) write_exponential(head, row, column, column == id ? e_id : e);
    }
}

GK_DEVICE void repair_rows(const KernelArgs& args) {
    for (int64_t row = block_index(); row < args.head.rows; row += block_count())
        if (args.overflowed[row]) repair_row(args, row);
}

}  // namespace gk::cuda::head
