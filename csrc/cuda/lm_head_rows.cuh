// The kernels around the product, with a warp per row: sampled logits before it, and statistics from its partial
// results after it, combined in fixed order.
#pragma once
#include "lm_head_schedule.h"
#include "repair.cuh"

namespace gk::cuda::head {

GK_DEVICE int64_t own_row() { return block_index() * kRepairWarps + warp_index(); }

// y and slope of the sampled ids; 0 and 1 for an id outside the vocabulary.
GK_DEVICE void sampled_logits(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = own_row();
    if (row >= rows.rows) return;
    const int column = sampled_column(rows, rows.token_of[row]);
    const Logit logit = column >= 0 ? logit_of(args.call, row, column) : Logit{0.f, 1.f};
    if (lane_index() != 0) return;
    args.y_ids[row] = logit.y;
    args.slope_ids[row] = logit.slope;
}

// Of all parts of a row; every lane gets the result.
GK_DEVICE Sums<double> combine_parts(const KernelArgs& args, int64_t row, float top, double to_exponent) {
    Sums<double> mine = {top, 0.0, 0.0};
    for (uint32_t part = lane_index(); part < args.schedule.parts; part += kWarp) {
        const Partial& p = args.partials[row * args.schedule.parts + part];
        mine = merge(mine, {static_cast<float>(p.top), p.exps, p.moment}, to_exponent);
    }
    return warp_sums(mine, to_exponent);
}

GK_DEVICE void combine_statistics(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = own_row();
    if (row >= rows.rows) return;
    const int64_t token = rows.token_of[row];
    const ExactScales scales(rows.params, rows.temperature[token]);
    const Sums<double> sums = combine_parts(args, row, -infinity(), scales.to_exponent());
    const Sampled sampled = {sampled_column(rows, token), args.y_ids[row], 1.0};
    if (lane_index() == 0) write_statistics(rows, token, make_statistics(sums, scales, sampled));
}

GK_DEVICE void finish_rows(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = own_row();
    if (row >= rows.rows) return;
    const Sums<double> rest = combine_parts(args, row, 0.f, 0.0);
    const Logit sampled = {args.y_ids[row], args.slope_ids[row]};
    if (lane_index() != 0) return;
    finish_row(args.call, row, {rest.exps, rest.moment}, sampled_column(rows, rows.token_of[row]), sampled);
}

}  // namespace gk::cuda::head
