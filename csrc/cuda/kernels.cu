// The kernels but the products: their names, and the types that each is compiled for. extern "C" and one struct by
// value, so that host.cpp launches them by name from whatever image NVRTC has made, or the tests' emulator on the CPU.
#include "exponentials.cuh"
#include "objective.cuh"
#include "repair.cuh"
#include "rows.cuh"
#include "scale.cuh"

namespace gk::cuda {

using f32 = Float32;
using bf16 = BFloat16;
using f16 = Float16;

#define GK_STATS(In) \
    GK_KERNEL(gk_stats_##In, RowLaunch, kSweepThreads, 2) { stats<In>(args); }

#define GK_GRADIENT(In, Out) \
    GK_KERNEL(gk_gradient_##In##_##Out, RowLaunch, kSweepThreads, 2) { gradient<In, Out>(args); }

#define GK_EXPONENTIALS(In) \
    GK_KERNEL(gk_exponentials_##In, ExponentialLaunch, kSweepThreads, 2) { exponentials<In>(args); }

#define GK_SCALE(In) \
    GK_KERNEL(gk_scale_##In, ScaleArgs, kScaleThreads, kScaleBlocks) { scale<In>(args); }

#define GK_SCALE_ROWS(In, Out) \
    GK_KERNEL(gk_scale_rows_##In##_##Out, ExponentialLaunch, kScaleThreads, kScaleBlocks) { scale_rows<In, Out>(args); }

GK_STATS(f32)
GK_STATS(bf16)
GK_STATS(f16)
GK_GRADIENT(f32, f32)
GK_GRADIENT(f32, bf16)
GK_GRADIENT(f32, f16)
GK_GRADIENT(bf16, bf16)
GK_GRADIENT(f16, f16)
GK_EXPONENTIALS(f32)
GK_EXPONENTIALS(bf16)
GK_SCALE(f32)
GK_SCALE(bf16)
GK_SCALE(f16)
GK_SCALE_ROWS(f32, bf16)
GK_SCALE_ROWS(f32, f32)
GK_SCALE_ROWS(bf16, bf16)

GK_KERNEL(gk_objective, ObjectiveArgs, kObjectiveThreads, 2) { objective(args); }
GK_KERNEL(gk_repair_rows, ExponentialLaunch, kRepairThreads, kRepairBlocks) { repair_rows(args); }

}  // namespace gk::cuda
