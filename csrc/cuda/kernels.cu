// The kernels of rows and tokens: their names, and the types that each is compiled for. extern "C" and one
// struct by value, so that host.cpp launches them by name from whatever image NVRTC has made, or the tests' emulator
// on the CPU.
#include "kept.cuh"
#include "plan.cuh"
#include "rows.cuh"
#include "scale.cuh"
#include "sequences.cuh"
#include "sparse.cuh"
#include "tokens.cuh"

namespace gk::cuda {

using f32 = Float32;
using bf16 = BFloat16;
using f16 = Float16;

#define GK_STATS(In) \
    GK_KERNEL(gk_stats_##In, RowLaunch, kSweepThreads, 2) { stats<In>(args); }

#define GK_SPARSE(In) \
    GK_KERNEL(gk_sparse_gradient_##In, SparseLaunch, kSweepThreads, 2) { sparse_gradient<In>(args); }

#define GK_GRADIENT(In, Out) \
    GK_KERNEL(gk_gradient_##In##_##Out, RowLaunch, kSweepThreads, 2) { gradient<In, Out>(args); }

#define GK_SCALE(In) \
    GK_KERNEL(gk_scale_##In, ScaleArgs, kScaleThreads, kScaleBlocks) { scale<In>(args); }

#define GK_KEPT_LOGITS(In) \
    GK_KERNEL(gk_kept_logits_##In, KeptLaunch, kKeptThreads, 3) { kept_logits<In>(args); }

#define GK_KEPT(In, Out)                                                                                  \
    GK_KERNEL(gk_kept_dhidden_##In##_##Out, KeptLaunch, kKeptThreads, 4) { kept_dhidden<In, Out>(args); } \
    GK_KERNEL(gk_kept_dweight_##In##_##Out, KeptWeightLaunch, kKeptThreads, 4) { kept_dweight<In, Out>(args); }

GK_STATS(f32)
GK_STATS(bf16)
GK_STATS(f16)
GK_SPARSE(f32)
GK_SPARSE(bf16)
GK_SPARSE(f16)
GK_GRADIENT(f32, f32)
GK_GRADIENT(f32, bf16)
GK_GRADIENT(f32, f16)
GK_GRADIENT(bf16, bf16)
GK_GRADIENT(f16, f16)
GK_SCALE(f32)
GK_SCALE(bf16)
GK_SCALE(f16)
GK_KEPT_LOGITS(f32)
GK_KEPT_LOGITS(bf16)
GK_KEPT_LOGITS(f16)
GK_KEPT(f32, f32)
GK_KEPT(bf16, f32)
GK_KEPT(bf16, bf16)
GK_KEPT(f16, f32)
GK_KEPT(f16, f16)

GK_KERNEL(gk_kept_ids, KeptRowArgs, kKeptRowThreads, 1) { kept_ids(args); }

GK_KERNEL(gk_plan_sequences, PlanLaunch, kPlanSequenceThreads, 1) { plan_sequence(args); }
GK_KERNEL(gk_plan_tokens, PlanLaunch, kPlanThreads, 4) { plan_tile(args); }
GK_KERNEL(gk_plan_order, PlanLaunch, kPlanThreads, 4) { plan_order(args); }
GK_KERNEL(gk_token_objective, TokenArgs, kObjectiveThreads, 4) { objective_of_row(args); }
GK_KERNEL(gk_sequence_objective, SequenceArgs, kSequenceObjectiveThreads, 2) { evaluate_sequence(args); }
GK_KERNEL(gk_reduce_sequences, ReduceLaunch, kSequenceThreads, 4) { reduce_sequence(args); }
GK_KERNEL(gk_reduce_groups, ReduceLaunch, kGroupThreads, 4) { reduce_group(args); }

}  // namespace gk::cuda
