// What the kernels of kernels.cu receive, and how many threads they take. Plain C++17, for host and device.
#pragma once
#include "api.h"

namespace gk::cuda {

// ---- rows -----------------------------------------------------------------------------------------------------------
struct RowLaunch {
    RowArgs rows;
    int32_t overlap;  // narrower gradients start where the logits start
};
constexpr int kSweepThreads = 512;
constexpr int kExchangeBytes = 512;  // of shared memory

// ---- exponentials relative to the sampled id ------------------------------------------------------------------------
struct ExponentialLaunch {
    RowArgs rows;
    Product product;
    RowScales scales;  // row_scale: infinite where a row waits to be repaired
    int32_t overlap;
};
constexpr int kRepairThreads = 256, kRepairShared = 2048;  // bytes
constexpr int kRepairBlocks = 3;                           // per multiprocessor

// Launched behind every kernel that writes exponentials.
void repair_rows(const ExponentialLaunch& call, Stream stream);

// ---- the loss -------------------------------------------------------------------------------------------------------
constexpr int kObjectiveThreads = 256, kObjectiveShared = 1280;  // bytes

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
