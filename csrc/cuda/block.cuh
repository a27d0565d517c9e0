// The sum of one value of each thread of a block, for all of them: in an order of its own, so that two runs give the
// same bits. The shared memory that this takes, kCombineBytes for each warp, is at the start of the block's.
#pragma once
#include "device.h"
#include "kernels.h"

namespace gk::cuda {

template <class T>
GK_DEVICE T block_sum(T mine) {
    static_assert(sizeof(T) == kCombineBytes, "what the host reserves");
    auto* const shared = reinterpret_cast<T*>(dynamic_shared());  // one per warp
    GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) mine += shuffle_xor(mine, mask);
    if (lane_index() == 0) shared[warp_index()] = mine;
    block_sync();
    T all = shared[0];
    for (int warp = 1; warp < block_threads() / kWarp; warp++) all += shared[warp];
    block_sync();  // free for the next
    return all;
}

}  // namespace gk::cuda
