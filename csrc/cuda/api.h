// The seam of the CUDA backend: device pointers in, kernels queued on a stream, nothing waited for. Everything here is
// callable without Python's lock, and throws std::exception subclasses before anything is launched.
#pragma once
#include <stddef.h>

#include "../args.h"

namespace gk::cuda {

using Stream = void*;  // a cudaStream_t

// `workspace`: plan_workspace(tokens, sequences) bytes of device memory.
size_t plan_workspace(int64_t tokens, int64_t sequences);
void plan(const PlanArgs& args, void* workspace, Stream stream);

void single_pass(const RowArgs& args, Stream stream);
void stats(const RowArgs& args, Stream stream);
void gradient(const RowArgs& args, Stream stream);
void sparse_gradient(const RowArgs& args, const SparseRows& out, Stream stream);

void token_objective(const TokenArgs& args, Stream stream);
void sequence_objective(const SequenceArgs& args, Stream stream);

// `workspace`: reduce_workspace(sequences) bytes of device memory, for sums in double.
size_t reduce_workspace(int64_t sequences);
void reduce(const ReduceArgs& args, void* workspace, Stream stream);

// x *= factor, which is read on the device: count elements at any address.
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream);

void kept_ids(const KeptRowArgs& args, Stream stream);
// Products over kept ids: logits (rows, slots), -inf where a place is not used.
void kept_logits(const KeptArgs& args, float* logits, Stream stream);
void kept_dhidden(const KeptArgs& args, const float* dlogits, const KeptTarget& target, Stream stream);
void kept_dweight(const KeptPairs& pairs, const PairsById<int64_t>& by_id, const KeptTarget& target, Stream stream);

// --- products with the softmax in their epilogue; 16-bit hidden states and weight, compute capability 9.0 ------------

struct HeadArgs {
    const void* hidden;        // (rows, width), `hidden_row_stride` elements between rows
    const void* weight;        // (vocab, width)
    const float* bias;         // (vocab,) or null
    const int64_t* ids;        // (rows,)
    const float* temperature;  // (rows,)
    const float* table;        // (kFieldCount, rows), anchored only
    void* exponentials;        // (rows, vocab) bfloat16, anchored only, written
    float* scale;              // (rows,), anchored only, written: d loss / d logits = scale * exponentials
    float* logp;
    double* lse;
    float* entropy;  // may be null: not wanted
    int64_t rows, width, vocab, hidden_row_stride, weight_row_stride, exponentials_row_stride, table_row_stride;
    int32_t dtype;
    Params params;
};

bool supports_head(const HeadArgs& args);  // alignment, type and device allow the two functions below
size_t head_workspace(const HeadArgs& args);
void linear_logp(const HeadArgs& args, void* workspace, Stream stream);
void anchored(const HeadArgs& args, void* workspace, Stream stream);

}  // namespace gk::cuda
