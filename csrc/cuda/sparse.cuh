// The gradient of rows of logits as pairs of an id and a number, by systematic sampling (contract.SparseRule of
// Python).
//
// Shares of the level theta s are integers in units of 1 / kSparseOne. An entry that is kept as it is has a share of
// exactly 1: it passes one integer wherever the running sum stands, and leaves the sum's fraction alone. So one sum
// says everything: its whole part behind an entry is the number of pairs up to there, and an entry has a pair where
// that grows.
//
// A block walks a row, each warp a run of neighbouring vectors at a time. A warp leaves the shares of its run in shared
// memory; behind one barrier each warp knows the sum before its run, and whether the run has a pair. Only then it looks
// for the place: a prefix sum over its lanes, and each lane's entries one after another.
//
// Per logit of a (C, V) float32 chunk: 4 bytes read, an exponential, and about 15 other operations.
#pragma once
#include "../sparse_rules.h"
#include "rows.cuh"

namespace gk::cuda {

constexpr int kSparseEntries = 16;  // of a thread at a time, in registers
constexpr int kShareBits = 31;
static_assert(kSparseOne == static_cast<float>(1u << kShareBits), "the shift below");

struct SparseExchange {                         // at the start of the block's shared memory
    uint64_t shares[2][kSweepThreads / kWarp];  // of warps, for one run after another in turns
    Sweep sweep;
};
static_assert(sizeof(SparseExchange) <= kExchangeBytes, "what the host reserves");

// The vectors first + lane, a warp apart; -inf outside the row.
template <class In, int kCount>
GK_DEVICE void load_run(const Source<In>& source, int first, Vector (&run)[kCount]) {
    if (source.whole(first, first + kCount * kWarp)) {
        GK_UNROLL for (int i = 0; i < kCount; i++) run[i] = source.load(first + i * kWarp + lane_index());
    } else {
        GK_UNROLL for (int i = 0; i < kCount; i++) {
            const int vector = first + i * kWarp + lane_index();
            GK_UNROLL for (uint32_t& word : run[i].words) word = In::kLowest;
            if (vector < source.vectors()) run[i] = source.load_partial(vector);
        }
    }
}

struct Sampler {
    float level;     // theta s, what a sampled entry becomes
    float to_share;  // of |du|, in units of 1 / kSparseOne
    int sampled;     // column that is kept as it is

    GK_DEVICE bool is_kept_as_it_is(float du, int column) const {
        return !(fabsf(du) * to_share < kSparseOne) || column == sampled;  // NaN and infinity too
    }
    // fmaf, so that whoever asks gets the same bits.
    GK_DEVICE uint32_t share(float du, int column) const {
        return static_cast<uint32_t>(is_kept_as_it_is(du, column) ? kSparseOne : fmaf(fabsf(du), to_share, 0.5f));
    }
};

template <class In>
GK_DEVICE uint64_t vector_share(const Source<In>& source, const Sampler& sampler, const float (&du)[kPerVector<In>],
                                int vector) {
    uint64_t sum = 0;
    GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) {
        const int column = source.column(vector) + k;
        sum += source.inside(column) ? sampler.share(du[k], column) : 0;
    }
    return sum;
}

// The sum behind the row, or behind the first entry of which there is no room.
template <bool kCapped, bool kBiased, class In>
GK_DEVICE uint64_t write_pairs(const Source<In>& source, const RowArgs& args, const Scales& scales,
                               const Sampler& sampler, uint64_t sum, int32_t* ids, float* values, int64_t capacity,
                               SparseExchange& exchange) {
    constexpr int kPer = kPerVector<In>, kCount = kSparseEntries / kPer, kRun = kCount * kWarp;
    const Sweep sweep = exchange.sweep;
    const int warps = block_threads() / kWarp;
    int turn = 0;
    for (int begin = 0; begin < source.vectors(); begin += warps * kRun) {
        const int first = begin + warp_index() * kRun;
        Vector run[kCount];
        load_run(source, first, run);
        float du[kCount][kPer];
        uint64_t of_warp = 0;
        GK_UNROLL for (int i = 0; i < kCount; i++) {
            const int vector = first + i * kWarp + lane_index();
            vector_gradient<kCapped, kBiased>(source, args.bias, scales, sweep, run[i], vector, du[i]);
            GK_UNROLL for (int k = 0; k < kPer; k++) if (source.column(vector) + k == sampler.sampled) du[i][k] =
                sweep.sampled;
            of_warp += vector_share(source, sampler, du[i], vector);
        }
        GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) of_warp += shuffle_xor(of_warp, mask);
        if (lane_index() == 0) exchange.shares[turn][warp_index()] = of_warp;
        block_sync();
        uint64_t before = sum;
        for (int warp = 0; warp < warps; warp++) {
            if (warp == warp_index()) before = sum;
            sum += exchange.shares[turn][warp];
        }
        turn ^= 1;
        const auto room = static_cast<uint64_t>(capacity);
        if ((before + of_warp) >> kShareBits != before >> kShareBits && before >> kShareBits < room) {
            GK_UNROLL for (int i = 0; i < kCount; i++) {
                const int vector = first + i * kWarp + lane_index();
                uint64_t at = before, all = vector_share(source, sampler, du[i], vector);
                GK_UNROLL for (int mask = 1; mask < kWarp; mask *= 2) {
                    const uint64_t other = shuffle_xor(all, mask);
                    if (lane_index() & mask) at += other;
                    all += other;
                }
                before += all;
                GK_UNROLL for (int k = 0; k < kPer; k++) {
                    const int column = source.column(vector) + k;
                    const uint64_t place = at >> kShareBits;
                    at += source.inside(column) ? sampler.share(du[i][k], column) : 0;
                    if (at >> kShareBits == place || place >= room) continue;
                    const bool exact = sampler.is_kept_as_it_is(du[i][k], column);
                    ids[place] = column;
                    values[place] = exact ? du[i][k] : copysignf(sampler.level, du[i][k]);
                }
            }
        }
        if (sum >> kShareBits > room) break;
    }
    return sum;
}

template <class In>
GK_DEVICE void sparse_gradient(const SparseLaunch& launch) {
    const RowArgs& args = launch.rows;
    const SparseRows& out = launch.out;
    SparseExchange& exchange = *reinterpret_cast<SparseExchange*>(dynamic_shared());
    const int64_t row = block_index(), token = args.token_of[row];
    const Source<In> source = source_of<In>(args, row);
    if (thread_index() == 0) exchange.sweep = given_sweep(args, token, source);
    block_sync();
    uint64_t sum = 0;
    if (!exchange.sweep.zero_gradient) {
        const float temperature = args.temperature[token],
                    size = fabsf(args.g_logp[token]) + fabsf(args.g_entropy[token]);
        const float level = out.theta * (args.params.logit_scale / temperature * size);
        const Sampler sampler = {level, kSparseOne / level, exchange.sweep.column};
        const Scales scales = make_scales(args.params, temperature);
        sum = start_of_sum(token, static_cast<float>(args.lse[token]), out.first_id);
        sum = specialise(args, [&](auto capped, auto biased) {
            return write_pairs<capped.kOn, biased.kOn>(source, args, scales, sampler, sum, out.ids + row * out.capacity,
                                                       out.values + row * out.capacity, out.capacity, exchange);
        });
    }
    const auto pairs = static_cast<int64_t>(sum >> kShareBits);
    if (thread_index() == 0)
        out.counts[row] = static_cast<int32_t>(pairs < out.capacity ? pairs : out.capacity + (pairs > out.capacity));
}

}  // namespace gk::cuda
