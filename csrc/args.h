// What the kernels of every compiled backend receive: plain pointers and sizes. The pointers are the device's own.
// Plain C++17: no torch, no Python, no CUDA.
#pragma once
#include "layout.h"

namespace gk {

// One chunk of rows. The three row kernels read what they need and leave the rest alone.
struct RowArgs {
    const void* logits;  // (rows, vocab), `logits_pitch` elements between rows
    void* grad;          // (rows, vocab); may start where logits starts, see rows.cpp
    const int64_t* ids;  // (rows,) the sampled token of each row
    const float* temperature;
    const float* table;      // (kFieldCount, rows), `table_pitch` between fields; fused only
    float* logp;             // written by stats and fused
    double* lse;             // written by stats and fused, read by gradient; float32 would cost 1e-3 near 1e4
    float* entropy;          // written by stats and fused, read by gradient
    float* residual;         // what rounding took from the sampled id's gradient; may be null; gradient and fused
    const float* g_logp;     // d loss / d logp; gradient only
    const float* g_entropy;  // d loss / d entropy; gradient only
    int64_t rows, vocab, logits_pitch, grad_pitch, table_pitch;
    int32_t logits_dtype, grad_dtype;
    Params params;
};

struct ReduceArgs {
    const uint8_t* scored;  // (tokens,)
    const float *log_ratio, *logp, *entropy, *value, *kl, *g_logp;
    const float* table;  // (kFieldCount, tokens)
    int64_t tokens, table_pitch;
    const int64_t* cu_seqlens;  // (sequences + 1,)
    int64_t sequences;
    const int64_t* group_index;  // (sequences,) or null
    int64_t groups;
    float* sequence_sums;  // (sequences, kColumnCount)
    float* group_sums;     // (groups, kColumnCount)
    float* totals;         // (kColumnCount,)
    float* extrema;        // ratio min, ratio max, mismatch max
    Params params;
};
enum AdvantageScale : int32_t { kScaleGroup, kScaleBatch, kScaleNone, kScaleCount };
enum Baseline : int32_t { kBaselineMean, kBaselineLeaveOneOut, kBaselineNone, kBaselineCount };
constexpr const char* kScaleNames[kScaleCount] = {"group", "batch", "none"};
constexpr const char* kBaselineNames[kBaselineCount] = {"mean", "leave_one_out", "none"};

}  // namespace gk
