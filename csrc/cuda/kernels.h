// What the kernels of kernels.cu receive, and how many threads they take. Plain C++17, for host and device.
#pragma once
#include "../args.h"
#include "../token_columns.h"

namespace gk::cuda {

// ---- rows -----------------------------------------------------------------------------------------------------------
struct RowLaunch {
    RowArgs rows;
    int32_t overlap;  // narrower gradients start where the logits start
};

struct SparseLaunch {
    RowArgs rows;
    SparseRows out;
};

constexpr int kSweepThreads = 512;
constexpr int kExchangeBytes = 512;  // of shared memory

// ---- the plan -------------------------------------------------------------------------------------------------------
struct PlanLaunch {
    PlanArgs plan;
    int64_t tile;                 // tokens, a multiple of kPlanThreads
    uint64_t* tiles;              // rows of each tile, see plan.cuh
    uint8_t* surrogate_gradient;  // (sequences,) whether the surrogate has one at any token, where all have it together
};
constexpr int kPlanThreads = 256;
constexpr int kPlanSequenceThreads = 1024;  // at most
constexpr int kMaxPlanTiles = 2048;         // each adds up the rows of all
constexpr int kCombineBytes = 8;            // of shared memory per warp, see block.cuh

// ---- tokens ---------------------------------------------------------------------------------------------------------
constexpr int kObjectiveThreads = 256;
constexpr int kSequenceObjectiveThreads = 512;

struct ReduceLaunch {
    ReduceArgs reduce;
    double* workspace;  // (sequences, kReducedCount)
};
constexpr int kSequenceThreads = 128;
constexpr int kGroupThreads = 256;
constexpr int kGroupSlots = kGroupThreads / kReducedCount;  // that share the sequences of a group: a thread per column

// ---- finished gradients ---------------------------------------------------------------------------------------------
struct ScaleArgs {
    void* x;
    const float* factor;
    int64_t count;
};
constexpr int kScaleThreads = 256;
constexpr int kScaleTile = 16384;  // bytes that a block loads at once, 64 per thread
constexpr int kScaleBlocks = 4;    // per multiprocessor

// ---- kept ids -------------------------------------------------------------------------------------------------------
struct KeptLaunch {
    KeptArgs kept;
    float* logits;         // (rows, slots) written, or
    const float* dlogits;  // (rows, slots) read
    KeptTarget target;
};
struct KeptWeightLaunch {
    KeptPairs pairs;
    PairsById<int64_t> by_id;
    KeptTarget target;
};
constexpr int kKeptRowThreads = 64;  // a row each: few, so that all multiprocessors have some
constexpr int kKeptThreads = 256;
constexpr int kKeptGroup = 4;  // rows of the weight, or of the hidden states, in work at a time

}  // namespace gk::cuda
