// The C++ API of the CUDA kernels: device pointers in, kernels queued on a stream, nothing waited for. Functions may be
// called from any thread, and throw std::exception subclasses before anything is launched.
#pragma once
#include <stddef.h>

#include "../args.h"

namespace gk::cuda {

using Stream = void*;  // a cudaStream_t

// Writes statistics: logp, lse and entropy.
void stats(const RowArgs& args, Stream stream);

// Writes d loss / d logits, from the statistics and d loss / d logp and d loss / d entropy.
void gradient(const RowArgs& args, Stream stream);

// What logits are a product of: hidden weight^T + bias, 16-bit; the rows are those of RowArgs.
struct Product {
    const void* hidden;  // (rows, width), `hidden_stride` elements between rows
    const void* weight;  // (vocab, width)
    const float* bias;   // (vocab,) or null
    int64_t hidden_stride, weight_stride, width;
    int32_t dtype;
};

// Writes statistics, and in place of a gradient exponentials relative to the sampled id, in bfloat16: a row of them
// times -dlogp unit[row] is d loss / d logits where no gradient goes through the entropy. Float32 or bfloat16 logits
// are read once. `product`, in bfloat16, is what they are made of: rows that overflow are computed again.
void exponentials(const RowArgs& args, const Product& product, float* unit, Stream stream);

// x *= factor, which is read on the device: count elements at any address.
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream);

// --- products with the softmax in their epilogue: no logits; compute capability 9.0 ----------------------------------

// Whether alignment, types and device allow fused_exponentials of this many rows; without exponentials fused_logp.
bool supports_fused(int64_t rows, int64_t vocab, const void* exponentials, int64_t stride, const Product& product);

// Bytes of device memory that either takes as its workspace.
size_t fused_workspace(int64_t rows, int64_t vocab, const Product& product);

// Writes what exponentials() does.
void fused_exponentials(const RowArgs& args, const Product& product, float* unit, void* workspace, Stream stream);

// Writes statistics.
void fused_logp(const RowArgs& args, const Product& product, void* workspace, Stream stream);

}  // namespace gk::cuda
