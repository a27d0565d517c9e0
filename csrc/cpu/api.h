// The seam of the CPU backend: plain pointers in, results written through them. Everything here is callable without
// Python's lock. Functions throw std::exception subclasses only for wrong arguments, before anything is written.
#pragma once
#include "../layout.h"

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

void fused(const RowArgs& args, int threads);
void stats(const RowArgs& args, int threads);
void gradient(const RowArgs& args, int threads);

// out is (4, tokens): value, d_ratio, d_direct, kl.
void objective_tokens(int64_t tokens, const float* log_ratio, const float* logp, const float* entropy,
                      const float* table, int64_t table_pitch, const Params& params, float* out, int threads);

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
void reduce(const ReduceArgs& args, int threads);

// target[ids[t]] += scale[t] * rows[t] for t in [0, count).
struct AddRowsArgs {
    void* target;        // (target_rows, width), bfloat16 or float32
    const void* rows;    // (count, width), bfloat16
    const int64_t* ids;  // (count,)
    const float* scale;  // (count,)
    int64_t target_rows, target_pitch, count, width, rows_pitch;
    int32_t target_dtype, rows_dtype;
};
void add_rows(const AddRowsArgs& args);

enum AdvantageScale : int32_t { kScaleGroup, kScaleBatch, kScaleNone, kScaleCount };
enum Baseline : int32_t { kBaselineMean, kBaselineLeaveOneOut, kBaselineNone, kBaselineCount };
constexpr const char* kScaleNames[kScaleCount] = {"group", "batch", "none"};
constexpr const char* kBaselineNames[kBaselineCount] = {"mean", "leave_one_out", "none"};

void group_statistics(const float* rewards, const int64_t* group_index, int64_t count, int64_t groups, int32_t scale,
                      int32_t baseline, int64_t ddof, double eps, float* advantages, float* mean, float* std);

const char* cpu_isa();               // the instruction set in use: avx512, avx2 or baseline
void set_cpu_isa(const char* name);  // throws std::invalid_argument for an unknown or unsupported one

}  // namespace gk
