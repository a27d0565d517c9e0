// single_pass with the row held in shared memory: each logit is read from device memory once, and exponentiated once.
//
// A cluster of 1 to 8 blocks holds a row, a warp a tile of consecutive 16-byte vectors of it:
//     load      the tile into shared memory as float32, its bias added; its maximum
//     exponents e_j = 2^t relative to the tile's own maximum, stored over the logits; their sums
//     exchange  the sums of warps become those of the block and go to all blocks of the cluster, which agree on the
//               statistics; one thread of each evaluates the objective
//     gradient  du_j = e_j * constant * 2^(maximum of the tile - maximum of the row), the sampled id last
// With a softcap the tile keeps 1 - |tanh| instead, with an entropy gradient the logits, and the exponential is
// computed twice. Warps share nothing but their three numbers. The exchange is also what makes it safe to write
// gradients over logits: all of the row has been read by then.
//
// Per logit of a (C, V) float32 chunk with 16-bit gradients: 4 bytes read, 2 written, 16 through shared memory; one
// exponential and about 10 other operations. These hide behind device memory as long as three blocks of a
// multiprocessor are in different phases: hence clusters of 8 for V = 128,256, 64 KB per block. Nothing is measured.
#pragma once
#include "kernels.h"
#include "softmax.cuh"

namespace gk::cuda {

struct Exchange {  // at the start of each block's shared memory
    Sums<float> warps[kResidentThreads / kWarp];
    Sums<double> blocks[kMaxCluster];
    Sweep sweep;
};
static_assert(sizeof(Exchange) <= kExchangeBytes, "the tiles begin behind it");

// ---- what a lane keeps of its warp's tile: four floats at a time, those of a warp side by side, so that no two lanes
// meet in a bank of shared memory ----------------------------------------------------------------------------------
struct alignas(16) Four {
    float x[4];
};

template <class In>
struct Tile {
    static constexpr int kParts = kPerVector<In> / 4;

    Four* kept;
    int begin, end;  // vectors of the row

    GK_DEVICE Tile(char* memory, const Source<In>& source, const RowLaunch& launch, int rank) {
        const int warp = warp_index(), of_block = block_threads() / kWarp * launch.tile + launch.longer;
        const int before = warp * launch.tile + (warp < launch.longer ? warp : launch.longer);
        begin = (rank * of_block + before) * kWarp;
        const int full = begin + (launch.tile + (warp < launch.longer)) * kWarp;
        end = full < source.vectors() ? full : source.vectors();
        kept = reinterpret_cast<Four*>(memory + kExchangeBytes) + before * kWarp * kParts + lane_index();
    }
    // Of a vector that this lane owns.
    GK_DEVICE Four& four(int vector, int part) const {
        return kept[(vector - begin - lane_index()) * kParts + part * kWarp];
    }
};

// Returns the maximum.
template <bool kBiased, class In>
GK_DEVICE float load_tile(const Tile<In>& tile, const Source<In>& source, const float* bias) {
    float top = -infinity();
    walk<false>(source, tile.begin, tile.end, lane_index(), kWarp, [&](const auto& group, int vector) {
        GK_UNROLL for (const Vector& packed : group) {
            float u[kPerVector<In>];
            unpack<In>(packed, u);
            if constexpr (kBiased) add_bias(source, bias, vector, u);
            GK_UNROLL for (int part = 0; part < Tile<In>::kParts; part++) {
                Four four;
                GK_UNROLL for (int k = 0; k < 4; k++) {
                    four.x[k] = u[4 * part + k];
                    top = fmaxf(top, four.x[k]);
                }
                if (vector < tile.end) tile.four(vector, part) = four;  // the next warp's memory begins there
            }
            vector += kWarp;
        }
    });
    return warp_max(top);
}

// Sums the exponentials of this lane's vectors; what is kept becomes 1 - |tanh|, or the exponentials if `replace`.
template <bool kCapped, class In>
GK_DEVICE Sums<float> exponentiate(const Tile<In>& tile, const Source<In>& source, const Scales& scales, float top,
                                   bool replace) {
    Sums<float> sums = {top, 0.f, 0.f};
    const float origin = origin_of(top);
    for (int vector = tile.begin + lane_index(); vector < tile.end; vector += kWarp) {
        GK_UNROLL for (int part = 0; part < Tile<In>::kParts; part++) {
            Four four = tile.four(vector, part);
            float exps = 0.f, moment = 0.f;
            GK_UNROLL for (int k = 0; k < 4; k++) {
                float y = four.x[k];
                if constexpr (kCapped) {
                    four.x[k] = complement(scales, y);
                    // Padding is -inf before the softcap, and a logit may be so too.
                    y = source.inside(source.column(vector) + 4 * part + k) ? capped(scales, four.x[k]) : -infinity();
                }
                const float t = exponent(y, origin, scales.to_exponent), e = exp2_fast(t);
                exps += e;
                moment = fmaf(e, t, moment);
                if (!kCapped && replace) four.x[k] = e;
            }
            sums.exps += exps;
            sums.moment += moment;
            if (kCapped || replace) tile.four(vector, part) = four;
        }
    }
    return sums;
}

template <bool kCapped, class In, class Out>
GK_DEVICE void write_tile(const Tile<In>& tile, const Source<In>& source, const Target<Out, In>& target,
                          const Scales& scales, const Sweep& sweep, float top, bool exponentials) {
    // From the tile's maximum to the row's; without a finite logit all exponentials are 0, or NaN.
    const float factor =
        top > -infinity() ? sweep.constant * exp2_fast(exponent(top, sweep.top, scales.to_exponent)) : sweep.constant;
    for (int vector = tile.begin + lane_index(); vector < tile.end; vector += kWarp) {
        float du[kPerVector<In>];
        GK_UNROLL for (int part = 0; part < Tile<In>::kParts; part++) {
            const Four four = tile.four(vector, part);
            GK_UNROLL for (int k = 0; k < 4; k++) {
                const float kept = four.x[k];
                float value;
                if (!kCapped && exponentials) {
                    value = kept * factor;
                } else {
                    const float t = exponent(kCapped ? capped(scales, kept) : kept, sweep.top, scales.to_exponent);
                    value = exp2_fast(t) * fmaf(sweep.linear, t, sweep.constant);
                    if constexpr (kCapped) value *= slope(kept);
                }
                du[4 * part + k] = sweep.zero_gradient ? 0.f : value;
            }
        }
        target.store(source, vector, du);
    }
}

template <class In, class Out>
GK_DEVICE void single_pass_resident(const RowLaunch& launch) {
    const RowArgs& args = launch.rows;
    const int rank = cluster_rank(), blocks = cluster_size();
    if (blocks > 1) cluster_arrive_relaxed();  // waited for before the first access to another block's shared memory

    const int64_t row = block_index() >> launch.shift, token = args.token_of[row];
    const Source<In> source(static_cast<const char*>(args.logits) + row * args.logits_stride * kSize<In>,
                            static_cast<int>(args.vocab));
    const Target<Out, In> target(static_cast<char*>(args.grad) + row * args.grad_stride * kSize<Out>, source);
    const float temperature = args.temperature[token], weight_entropy = args.tokens.field(kWeightEntropy, token);
    char* const memory = dynamic_shared();
    Exchange& exchange = *reinterpret_cast<Exchange*>(memory);
    const Tile<In> tile(memory, source, launch, rank);
    const bool first_thread = thread_index() == 0, first_warp = warp_index() == 0;

    // The row before anything that waits for other loads: a division, the logit behind the id.
    float top = args.bias ? load_tile<true>(tile, source, args.bias) : load_tile<false>(tile, source, args.bias);
    const Scales scales = make_scales(args.params, temperature);
    const bool is_capped = args.params.softcap != 0.f, exponentials = !is_capped && weight_entropy == 0.f;
    const float u_id = first_thread ? sampled_logit(args, source, token) : 0.f;
    if (is_capped && tile.begin < tile.end) top = capped(scales, complement(scales, top));
    const Sums<float> mine = is_capped ? exponentiate<true>(tile, source, scales, top, exponentials)
                                       : exponentiate<false>(tile, source, scales, top, exponentials);
    const Sums<float> of_warp = warp_sums(mine, scales.to_exponent);
    if (lane_index() == 0) exchange.warps[warp_index()] = of_warp;
    block_sync();

    Sums<double> sums = {};
    if (first_warp) sums = merge(exchange.warps, block_threads() / kWarp, ExactScales(args.params, temperature));
    if (blocks > 1) {
        cluster_wait();
        if (first_warp && lane_index() < blocks) store_remote(&exchange.blocks[rank], lane_index(), sums);
        cluster_arrive();
        cluster_wait();
        if (first_warp) sums = merge(exchange.blocks, blocks, ExactScales(args.params, temperature));
    }
    if (first_thread) {
        const ExactScales exact(args.params, temperature);
        const Sampled sampled = make_sampled(args, token, u_id);
        const Statistics found = make_statistics(sums, exact, sampled);
        exchange.sweep = make_sweep(found, evaluate_row(args, token, found, rank == 0), exact, sampled);
        if (rank == 0) write_statistics(args, token, found);
    }
    block_sync();

    const Sweep sweep = exchange.sweep;
    is_capped ? write_tile<true>(tile, source, target, scales, sweep, top, exponentials)
              : write_tile<false>(tile, source, target, scales, sweep, top, exponentials);
    warp_sync();
    // The warp that holds the sampled id writes it; the very first one if there is none.
    const int vector = sweep.column < 0 ? 0 : (sweep.column + source.first) / kPerVector<In>;
    if (lane_index() == 0 && tile.begin <= vector && vector < tile.end) write_sampled(args, row, target, sweep);
}

}  // namespace gk::cuda
