// What the row kernels of every compiled backend receive: plain pointers and sizes. The pointers are the device's own.
// Plain C++17: no torch, no Python, no CUDA.
#pragma once
#include "layout.h"

namespace gk {

// The tokens that the rows of a chunk are: those of a list, or neighbours.
struct RowTokens {
    int64_t start;
    const int64_t* index;  // (rows,) or null

    GK_HD int64_t operator[](int64_t row) const { return index ? index[row] : start + row; }
};

// z = softcap tanh(logit_scale u / softcap) / temperature, or logit_scale u / temperature without a softcap (0).
struct Transform {
    float logit_scale, softcap;
};

// One chunk of rows of logits. The row kernels read what they need and leave the rest alone. Logits and
// gradient are addressed by row, everything else by token.
struct RowArgs {
    const void* logits;  // (rows, vocab), `logits_stride` elements between rows
    const float* bias;   // (vocab,), added to every logit as it is loaded; may be null
    void* grad;          // (rows, vocab); may start where logits starts, see rows.cpp
    const int64_t* ids;  // (tokens,) the sampled token
    const float* temperature;
    float *logp, *entropy;
    double* lse;            // float32 would cost 1e-3 near 1e4
    const float* dlogp;     // d loss / d logp; gradient only
    const float* dentropy;  // d loss / d entropy; gradient only
    RowTokens token_of;
    int64_t rows, vocab, logits_stride, grad_stride;
    int32_t logits_dtype, grad_dtype;
    Transform params;
};

}  // namespace gk
