// What the kernels of kernels.cu receive, and how many threads they take. Plain C++17, for host and device.
#pragma once
#include "../args.h"

namespace gk::cuda {

// ---- rows -----------------------------------------------------------------------------------------------------------
struct RowLaunch {
    RowArgs rows;
    int32_t overlap;  // narrower gradients start where the logits start
};
constexpr int kSweepThreads = 512;
constexpr int kExchangeBytes = 512;  // of shared memory

// ---- finished gradients ---------------------------------------------------------------------------------------------
struct ScaleArgs {
    void* x;
    const float* factor;
    int64_t count;
};
constexpr int kScaleThreads = 256;
constexpr int kScaleTile = 16384;  // bytes that a block loads at once, 64 per thread
constexpr int kScaleBlocks = 4;    // per multiprocessor

}  // namespace gk::cuda
