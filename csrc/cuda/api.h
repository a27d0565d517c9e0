// The seam of the CUDA backend: device pointers in, kernels queued on a stream, nothing waited for. Everything here is
// callable without Python's lock, and throws std::exception subclasses before anything is launched.
#pragma once
#include <stddef.h>

#include "../args.h"

namespace gk::cuda {

using Stream = void*;  // a cudaStream_t

void stats(const RowArgs& args, Stream stream);
void gradient(const RowArgs& args, Stream stream);

// x *= factor, which is read on the device: count elements at any address.
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream);

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
