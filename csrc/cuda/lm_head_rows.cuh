// The kernels around the product, over rows: sampled logits before it, and after it statistics from its partial
// results.
//
// Partial results are combined in fixed order: 32 rows by 8 threads, each with every eighth part.
#pragma once
#include "lm_head_schedule.h"
#include "repair.cuh"

namespace gk::cuda::head {

static_assert(kRowsPerBlock == kWarp, "one lane per row");

// A warp per row: y and slope of the sampled ids; 0 and 1 for an id outside the vocabulary.
GK_DEVICE void sampled_logits(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = block_index() * kRepairWarps + warp_index();
    if (row >= rows.rows) return;
    const int column = sampled_column(rows, rows.token_of[row]);
    const Logit logit = column >= 0 ? logit_of(args.call, row, column) : Logit{0.f, 1.f};
    if (lane_index() != 0) return;
    args.y_ids[row] = logit.y;
    args.slope_ids[row] = logit.slope;
}

// The plane's values of this thread's row: body(index of the part's value)
template <class Body>
GK_DEVICE void for_own_parts(const KernelArgs& args, int64_t row, const Body& body) {
    const int64_t rows = args.call.rows.rows;
    if (row >= rows) return;
    for (uint32_t part = warp_index(); part < args.schedule.parts; part += kRepairWarps) body(part * rows + row);
}

GK_DEVICE int64_t own_row() { return block_index() * kWarp + lane_index(); }

// Statistics from the maxima, sums and moments of all parts.
GK_DEVICE void combine_statistics(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = own_row(), plane = args.schedule.parts * rows.rows;
    const bool live = row < rows.rows;
    const int64_t token = live ? rows.token_of[row] : 0;
    const ExactScales scales(rows.params, live ? rows.temperature[token] : 1.f);

    double own_top = -infinity();
    for_own_parts(args, row, [&](int64_t at) { own_top = fmax(own_top, args.partials[at]); });
    const double top = max_across_warps(own_top);
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
    const Sampled sampled = {sampled_column(rows, token), args.y_ids[row], 1.0};
    write_statistics(rows, token, make_statistics({static_cast<float>(top), exps, moment}, scales, sampled));
}

GK_DEVICE void finish_rows(const KernelArgs& args) {
    const RowArgs& rows = args.call.rows;
    const int64_t row = own_row(), plane = args.schedule.parts * rows.rows;
    double own_exps = 0.0, own_moment = 0.0;
    for_own_parts(args, row, [&](int64_t at) {
        own_exps += args.partials[at];
        own_moment += args.partials[plane + at];
    });
    const Rest rest = {sum_across_warps(own_exps), sum_across_warps(own_moment)};
    if (warp_index() != 0 || row >= rows.rows) return;
    const Logit sampled = {args.y_ids[row], args.slope_ids[row]};
    finish_row(args.call, row, rest, sampled_column(rows, rows.token_of[row]), sampled);
}

}  // namespace gk::cuda::head
