// x *= factor in place: backward scales the gradients that the forward pass has finished. The factor is in device
// memory; it is nearly always 1, and then nothing else is read or written, and the launch ends in microseconds instead
// of moving a (V, H) gradient twice, half a millisecond of an H200 at V = 128,256, H = 4,096.
//
// Blocks take turns over tiles, a group of vectors for each of their threads. Tiles begin at multiples of 16 bytes
// wherever x does, so that only its ends are partial vectors; a tile is a row whose columns are counted in 32 bits.
#pragma once
#include "rows.cuh"

namespace gk::cuda {

template <class Type>
GK_DEVICE void scale(const ScaleArgs& args) {
    const float factor = *args.factor;
    if (factor == 1.f) return;
    auto* const x = static_cast<typename Type::Element*>(args.x);
    const int64_t skipped = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) & 15) / kSize<Type>;
    const int64_t end = skipped + args.count, tile = kScaleTile / kSize<Type>;
    for (int64_t begin = block_index() * tile; begin < end; begin += block_count() * tile) {
        const int64_t from = begin < skipped ? 0 : begin - skipped, to = begin + tile < end ? begin + tile : end;
        const Source<Type> source(x + from, static_cast<int>(to - skipped - from));
        const Target<Type, Type> target(x + from, source);
        walk(source, 0, source.vectors(), thread_index(), block_threads(), [&](const auto& group, int vector) {
            GK_UNROLL for (const Vector& packed : group) {
                float values[kPerVector<Type>];
                unpack<Type>(packed, values);
                GK_UNROLL for (float& value : values) value *= factor;
                target.store(source, vector, values);
                vector += block_threads();
            }
        });
    }
}

// A block per row; see api.h. A token without a gradient gets 0, whatever its row holds.
template <class In, class Out>
GK_DEVICE void scale_rows(const ExponentialLaunch& call) {
    RowArgs args = call.rows;
    const int64_t row = block_index(), token = args.token_of[row];
    const float dlogp = args.dlogp[token], factor = -dlogp * call.scales.row_scale[row];
    const int id = call.scales.sampled ? sampled_column(args, token) : -1;
    const float entry = id >= 0 ? dlogp * call.scales.sampled[row] : 0.f;
    const auto* const of_id =
        static_cast<const uint16_t*>(call.product.weight) + (id < 0 ? 0 : id) * call.product.weight_stride;
    args.vocab = call.product.width;  // the columns of x
    const Source<In> source = source_of<In>(args, row);
    const Target<Out, In> target = target_of<In, Out>(args, call.scales.sampled ? token : row, source);
    walk(source, 0, source.vectors(), thread_index(), block_threads(), [&](const auto& group, int vector) {
        GK_UNROLL for (const Vector& packed : group) {
            float x[kPerVector<In>];
            unpack<In>(packed, x);
            GK_UNROLL for (int k = 0; k < kPerVector<In>; k++) {
                const int column = source.column(vector) + k;
                x[k] *= factor;
                if (id >= 0 && source.inside(column)) x[k] = fmaf(entry, BFloat16::load(of_id[column]), x[k]);
                if (dlogp == 0.f) x[k] = 0.f;
            }
            target.store(source, vector, x);
            vector += block_threads();
        }
    });
}

}  // namespace gk::cuda
