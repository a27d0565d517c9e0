// The plan of a call: which tokens count, their weights, their table, and the order in which their rows are computed.
//
//     plan_sequence  a block per sequence: how many of its tokens are unmasked, and whether the surrogate has a
//     gradient
//                    at any of them
//     plan_tile      a block per tile of tokens: their columns of the table, flags and zeros, and how many rows they
//                    are; all of a sequence's weights follow from its length and the sum of all lengths
//     plan_order     a block per tile: the rows of all tiles before it are where its own begin. Not with static shapes
//
// Only whole numbers are added up, so that no order of adding changes a bit. No block waits for another: what a block
// needs of the others, the lengths of all sequences or the counts of all tiles, it adds up for itself. There are at
// most kMaxPlanTiles tiles.
//
// Per token: at most 52 bytes read and 94 written. 16,384 tokens are 2.3 MB in 64 tiles: three launches of about 3
// microseconds, in which a few loads wait for one another. A million in 8 sequences take some 60 microseconds on an
// H200, of which 30 are the 8 blocks of plan_sequence; computing their logits takes a second.
#pragma once
#include "../plan_rules.h"
#include "block.cuh"

namespace gk::cuda {

// ---- rows of a stretch of tokens, as one number: active below, scored alone above, fewer than 2^32 of both ----------
GK_DEVICE uint64_t rows_of(uint32_t active, uint32_t alone) { return static_cast<uint64_t>(alone) << 32 | active; }
GK_DEVICE int64_t active_in(uint64_t rows) { return static_cast<uint32_t>(rows); }
GK_DEVICE int64_t alone_in(uint64_t rows) { return static_cast<int64_t>(rows >> 32); }

// ---- sequences ------------------------------------------------------------------------------------------------------
// Blocks 0 .. sequences - 1, and one more for the last of the offsets.
GK_DEVICE void plan_sequence(const PlanLaunch& launch) {
    const PlanArgs& args = launch.plan;
    const int64_t s = block_index(), begin = sequence_begin(args, s);
    if (thread_index() == 0) args.offsets[s] = begin;
    if (s == args.sequences) return;
    const int64_t end = sequence_begin(args, s + 1);
    const bool together = gradient_is_shared(args.rules);
    int64_t unmasked = 0, has_gradient = 0;
    for (int64_t t = begin + thread_index(); t < end; t += block_threads()) {
        if (!is_unmasked(args, t)) continue;
        unmasked++;
        if (together) has_gradient |= plan_surrogate(args, t, s, true).has_gradient(args.rules);
    }
    unmasked = block_sum(unmasked);
    if (together) has_gradient = block_sum(has_gradient);
    if (thread_index() > 0) return;
    args.lengths[s] = static_cast<float>(unmasked);
    launch.surrogate_gradient[s] = has_gradient > 0;
}

GK_DEVICE float total_length(const PlanArgs& args) {
    double sum = 0.0;  // of whole numbers: exact
    for (int64_t s = thread_index(); s < args.sequences; s += block_threads()) sum += args.lengths[s];
    return static_cast<float>(block_sum(sum));
}

// The last one that begins at or before t: of several that do, the others are empty.
GK_DEVICE int64_t sequence_of(const PlanArgs& args, int64_t t) {
    if (!args.cu_seqlens) return t / args.row_length;
    int64_t found = 0, beyond = args.sequences;
    while (beyond - found > 1) {
        const int64_t middle = found + (beyond - found) / 2;
        (args.cu_seqlens[middle] <= t ? found : beyond) = middle;
    }
    return found;
}

// ---- tokens ---------------------------------------------------------------------------------------------------------
// Returns the rows that it is.
GK_DEVICE uint64_t plan_one_token(const PlanLaunch& launch, int64_t t, float total) {
    const PlanArgs& args = launch.plan;
    const int64_t s = sequence_of(args, t);
    const bool unmasked = is_unmasked(args, t), of_sequence = launch.surrogate_gradient[s];
    const PlanWeights weights = plan_weights(args, unmasked, args.lengths[s], total);
    const bool own = plan_token(args, t, s, unmasked, weights);
    const bool active = is_active(args.rules, unmasked, weights, gradient_is_shared(args.rules) ? of_sequence : own);
    const bool scored = args.rules.score_inactive ? unmasked : active;
    args.active[t] = active;
    args.scored[t] = scored;
    GK_UNROLL for (int f = 0; f < kValueFieldCount; f++) args.values[f * args.tokens + t] = 0.f;
    args.lse[t] = 0.0;
    return rows_of(active, scored && !active);
}

// With whole_sequences: all unmasked tokens of a sequence are active, or none.
GK_DEVICE void count_sequence(const PlanLaunch& launch, int64_t s, float total) {
    const PlanArgs& args = launch.plan;
    const float length = args.lengths[s];
    const PlanWeights weights = plan_weights(args, true, length, total);
    args.counts[2 + s] =
        is_active(args.rules, true, weights, launch.surrogate_gradient[s]) ? static_cast<int64_t>(length) : 0;
}

GK_DEVICE void plan_tile(const PlanLaunch& launch) {
    const PlanArgs& args = launch.plan;
    const float total = total_length(args);
    const int64_t begin = block_index() * launch.tile, beyond = begin + launch.tile;
    const int64_t end = beyond < args.tokens ? beyond : args.tokens;
    uint64_t rows = 0;
    for (int64_t t = begin + thread_index(); t < end; t += block_threads()) rows += plan_one_token(launch, t, total);
    rows = block_sum(rows);
    if (thread_index() == 0) launch.tiles[block_index()] = rows;
    if (!args.counts || !args.rules.whole_sequences) return;
    const int64_t threads = static_cast<int64_t>(block_count()) * block_threads();
    for (int64_t s = static_cast<int64_t>(block_index()) * block_threads() + thread_index(); s < args.sequences;
         s += threads)
        count_sequence(launch, s, total);
}

// ---- order ----------------------------------------------------------------------------------------------------------
// Of the lanes of this warp, or, with `below`, of those before this one.
GK_DEVICE uint64_t rows_of_lanes(uint32_t active, uint32_t alone, bool below) {
    const uint32_t lanes = below ? (1u << lane_index()) - 1 : 0xFFFFFFFFu;
    return rows_of(count_bits(active & lanes), count_bits(alone & lanes));
}

GK_DEVICE void plan_order(const PlanLaunch& launch) {
    const PlanArgs& args = launch.plan;
    uint64_t mine = 0, mine_before = 0;
    for (int64_t tile = thread_index(); tile < block_count(); tile += block_threads()) {
        const uint64_t rows = launch.tiles[tile];
        mine += rows;
        if (tile < block_index()) mine_before += rows;
    }
    const uint64_t all = block_sum(mine);
    uint64_t before = block_sum(mine_before);
    if (args.counts && block_index() == 0 && thread_index() == 0) {
        args.counts[0] = active_in(all);
        args.counts[1] = alone_in(all);
    }
    if (!args.order) return;

    auto* const warps = reinterpret_cast<uint64_t*>(dynamic_shared());
    const int64_t begin = block_index() * launch.tile;
    for (int64_t first = begin; first < begin + launch.tile; first += block_threads()) {
        const int64_t t = first + thread_index();
        const bool inside = t < args.tokens, active = inside && args.active[t];
        const bool alone = inside && args.scored[t] && !active;
        const uint32_t actives = ballot(active), alones = ballot(alone);
        if (lane_index() == 0) warps[warp_index()] = rows_of_lanes(actives, alones, false);
        block_sync();
        uint64_t place = before + rows_of_lanes(actives, alones, true);
        for (int warp = 0; warp < block_threads() / kWarp; warp++) {
            if (warp < warp_index()) place += warps[warp];
            before += warps[warp];
        }
        if (active) args.order[active_in(place)] = t;
        if (alone) args.order[active_in(all) + alone_in(place)] = t;
        block_sync();  // free for the next
    }
}

}  // namespace gk::cuda
