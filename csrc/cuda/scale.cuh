// x *= factor in place: backward scales the gradients that the forward pass has finished. The factor is in device
// memory; it is nearly always 1, and then nothing else is read or written, and the launch ends in microseconds instead
// of moving a (V, H) gradient twice, half a millisecond of an H200 at V = 128,256, H = 4,096.
//
// Blocks take turns over tiles, a group of vectors for each of their threads. Tiles begin at multiples of 16 bytes
// wherever x does, so that only its ends are partial vectors; a tile is a row whose columns are counted in 32 bits.
#pragma once
#include "elements.cuh"
#include "kernels.h"

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

}  // namespace gk::cuda
