// The row kernels: statistics in one read of the row, the gradient in one read and one write. A block per row.
//
// Each thread keeps the maximum and the sums of the columns that it has met and rebases them when a group of vectors
// brings a larger one: one exponential per logit.
//
// Narrower gradients may lie over the front of the float32 row that they come from. All threads then load their group
// before any of them writes; what is written lies at or before what has been loaded.
//
// Per logit of a (C, V) float32 chunk with 16-bit gradients: `stats` reads 4 bytes, `gradient` reads 4 and writes 2;
// one exponential each.
#pragma once
#include "kernels.h"
#include "softmax.cuh"

namespace gk::cuda {

// What every thread of a row needs for its gradient: du_j = 2^t (constant + linear t) (1 - tanh^2) for all but the
// sampled id, t relative to `top`.
struct Sweep {
    bool zero_gradient;  // no gradient at all: exactly 0, whatever the row holds
    int column;          // of the sampled id; -1 where it has no gradient of its own
    float sampled;
    float top, constant, linear;
};

struct BlockExchange {  // at the start of the block's shared memory
    Sums<float> warps[kSweepThreads / kWarp];
    Sweep sweep;
};
static_assert(sizeof(BlockExchange) <= kExchangeBytes, "what the host reserves");

template <class In>
GK_DEVICE Source<In> source_of(const RowArgs& args, int64_t row) {
    return {static_cast<const char*>(args.logits) + row * args.logits_stride * kSize<In>, static_cast<int>(args.vocab)};
}

template <class In, class Out>
GK_DEVICE Target<Out, In> target_of(const RowArgs& args, int64_t row, const Source<In>& source) {
    return {static_cast<char*>(args.grad) + row * args.grad_stride * kSize<Out>, source};
}

// ---- what is done to a logit before anything else, decided once per row ---------------------------------------------
template <bool value>
struct Flag {
    static constexpr bool kOn = value;
};

// body(whether there is a softcap, whether there is a bias)
template <class Body>
GK_DEVICE auto specialise(const RowArgs& args, const Body& body) {
    const Flag<true> yes;
    const Flag<false> no;
    if (args.params.softcap != 0.f) return args.bias ? body(yes, yes) : body(yes, no);
    return args.bias ? body(no, yes) : body(no, no);
}

// y of a vector, and the slopes of the softcap, which the gradient needs too; -inf outside the row.
template <bool kCapped, bool kBiased, class In>
GK_DEVICE void load_logits(const Source<In>& source, const float* bias, const Scales& scales, const Vector& packed,
                           int vector, float (&y)[kPerVector<In>], float (&slopes)[kPerVector<In>]) {
    unpack<In>(packed, y);
    if constexpr (kBiased) add_bias(source, bias, vector, y);
    if constexpr (kCapped) {
        GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) {
            const float w = complement(scales, y[k]);
            slopes[k] = slope(w);
            y[k] = source.inside(source.column(vector) + k) ? capped(scales, w) : -infinity();
        }
    }
}

// ---- statistics -----------------------------------------------------------------------------------------------------
template <bool kCapped, bool kBiased, class In, int kCount>
GK_DEVICE void add_group(Sums<float>& sums, const Source<In>& source, const float* bias, const Scales& scales,
                         int sampled, const Vector (&group)[kCount], int vector) {
    float y[kCount][kPerVector<In>], slopes[kPerVector<In>], top = -infinity();
    GK_UNROLL for (int i = 0; i < kCount; i++) {
        load_logits<kCapped, kBiased>(source, bias, scales, group[i], vector + i * block_threads(), y[i], slopes);
        const int own = sampled - source.column(vector + i * block_threads());
        if (own >= 0 && own < kPerVector<In>) {
            GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) if (k == own) y[i][k] = -infinity();
        }
        GK_UNROLL for (float x : y[i]) top = fmaxf(top, x);
    }
    if (top > sums.top) sums = rebase(sums, top, scales.to_exponent);
    const float origin = origin_of(sums.top);
    GK_UNROLL for (int i = 0; i < kCount; i++) {
        float exps = 0.f, moment = 0.f;
        GK_UNROLL for (float x : y[i]) {
            const float t = exponent(x, origin, scales.to_exponent), e = exp2_fast(t);
            exps += e;
            moment = fmaf(e, t, moment);
        }
        sums.exps += exps;
        sums.moment += moment;
    }
}

// Of the columns that this thread meets, without the sampled one, which is added last.
template <bool kCapped, bool kBiased, class In>
GK_DEVICE Sums<float> thread_sums(const Source<In>& source, const float* bias, const Scales& scales, int sampled) {
    Sums<float> sums = {-infinity(), 0.f, 0.f};
    walk(source, 0, source.vectors(), thread_index(), block_threads(), [&](const auto& group, int vector) {
        add_group<kCapped, kBiased>(sums, source, bias, scales, sampled, group, vector);
    });
    return sums;
}

template <class In>
GK_DEVICE void stats(const RowLaunch& launch) {
    const RowArgs& args = launch.rows;
    BlockExchange& exchange = *reinterpret_cast<BlockExchange*>(dynamic_shared());
    const int64_t row = block_index(), token = args.token_of[row];
    const Source<In> source = source_of<In>(args, row);
    const float temperature = args.temperature[token];
    const Scales scales = make_scales(args.params, temperature);
    const int column = sampled_column(args, token);
    const Sums<float> mine = specialise(args, [&](auto capped, auto biased) {
        return thread_sums<capped.kOn, biased.kOn>(source, args.bias, scales, column);
    });
    const Sums<float> of_warp = warp_sums(mine, scales.to_exponent);
    if (lane_index() == 0) exchange.warps[warp_index()] = of_warp;
    block_sync();
    if (warp_index() > 0) return;
    const ExactScales exact(args.params, temperature);
    const Sums<double> sums = merge(exchange.warps, block_threads() / kWarp, exact);
    if (thread_index() > 0) return;
    const Sampled sampled = make_sampled(args.params, column, sampled_logit(args, source, column));
    write_statistics(args, token, add_sampled(sums, exact, sampled));
}

// ---- gradient -------------------------------------------------------------------------------------------------------
template <class In, class Out>
GK_DEVICE void write_zeros(const Source<In>& source, const Target<Out, In>& target) {
    const float zeros[kPerVector<In>] = {};
    for (int vector = thread_index(); vector < source.vectors(); vector += block_threads())
        target.store(source, vector, zeros);
}

// Of the entries of a vector, whatever the sampled id.
template <bool kCapped, bool kBiased, class In>
GK_DEVICE void vector_gradient(const Source<In>& source, const float* bias, const Scales& scales, const Sweep& sweep,
                               const Vector& packed, int vector, float (&du)[kPerVector<In>]) {
    float y[kPerVector<In>], slopes[kPerVector<In>];
    load_logits<kCapped, kBiased>(source, bias, scales, packed, vector, y, slopes);
    GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) {
        const float t = exponent(y[k], sweep.top, scales.to_exponent);
        du[k] = exp2_fast(t) * fmaf(sweep.linear, t, sweep.constant);
        if constexpr (kCapped) du[k] *= slopes[k];
    }
}

template <bool kCapped, bool kBiased, class In, class Out>
GK_DEVICE void write_gradient(const Source<In>& source, const float* bias, const Target<Out, In>& target,
                              const Scales& scales, const Sweep& sweep, bool overlap) {
    walk(source, 0, source.vectors(), thread_index(), block_threads(), [&](const auto& group, int vector) {
        if (overlap) block_sync();
        GK_UNROLL for (const Vector& packed : group) {
            float du[kPerVector<In>];
            vector_gradient<kCapped, kBiased>(source, bias, scales, sweep, packed, vector, du);
            target.store(source, vector, du);
            vector += block_threads();
        }
    });
}

// A zero-gradient row is not read, whatever it holds.
template <class In>
GK_DEVICE Sweep make_sweep(const RowArgs& args, int64_t token, const Source<In>& source) {
    const float dlogp = args.dlogp[token], dentropy = args.dentropy[token];
    if (dlogp == 0.f && dentropy == 0.f) return {true, -1, 0.f, 0.f, 0.f, 0.f};
    const ExactScales scales(args.params, args.temperature[token]);
    const int column = sampled_column(args, token);
    const Sampled sampled = make_sampled(args.params, column, sampled_logit(args, source, column));
    const Shift of = make_shift(scales, args.lse[token]);
    const GradientTerms terms = make_terms(of, scales, sampled, args.entropy[token], dlogp, dentropy);
    return {false, column, static_cast<float>(terms.du_id), of.top, terms.constant, terms.linear};
}

template <class In, class Out>
GK_DEVICE void gradient(const RowLaunch& launch) {
    const RowArgs& args = launch.rows;
    BlockExchange& exchange = *reinterpret_cast<BlockExchange*>(dynamic_shared());
    const int64_t row = block_index(), token = args.token_of[row];
    const Source<In> source = source_of<In>(args, row);
    const Target<Out, In> target = target_of<In, Out>(args, row, source);
    if (thread_index() == 0) exchange.sweep = make_sweep(args, token, source);
    block_sync();
    const Sweep sweep = exchange.sweep;
    const Scales scales = make_scales(args.params, args.temperature[token]);
    if (sweep.zero_gradient)
        write_zeros(source, target);
    else
        specialise(args, [&](auto capped, auto biased) {
            write_gradient<capped.kOn, biased.kOn>(source, args.bias, target, scales, sweep, launch.overlap);
        });
    block_sync();  // all is written
    if (thread_index() == 0 && sweep.column >= 0) target.store_one(sweep.column, sweep.sampled);
}

}  // namespace gk::cuda
