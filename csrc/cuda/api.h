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

// What makes a row of exponentials d loss / d logits where no gradient goes through the entropy: -dlogp row_scale[row],
// and dlogp sampled[row] for the sampled id, at which a row is 0.
struct RowScales {
    float *row_scale, *sampled;  // (rows,)
};

// Writes statistics, and in place of a gradient exponentials relative to the sampled id, in bfloat16. Float32 or
// bfloat16 logits are read once. `product`, in bfloat16, is what they are made of: rows that overflow are computed
// again.
void exponentials(const RowArgs& args, const Product& product, const RowScales& scales, Stream stream);

// Writes -dlogp row_scale[row] times rows of x to those of `grad`, rounded once. x, (rows, product.width), takes the
// place of the logits. With `sampled` it is the product of exponentials and the weight, in float32: the sampled ids'
// entries times their rows of the weight are added, and `grad` has a row per token. Without, hidden states, and a row
// per row.
void scale_rows(const RowArgs& args, const Product& product, const RowScales& scales, Stream stream);

enum Surrogate : int32_t { kClip, kCispoTwoSided, kCispoMask, kCispoUnified, kCispo, kSapo, kReinforce };
enum Estimator : int32_t { kNone, kK1, kK2, kK3 };

// Of the configuration; a bound that it does not have is infinite.
struct ObjectiveNumbers {
    float epsilon_low, epsilon_high, delta, dual_clip, sapo_temperature_pos, sapo_temperature_neg, beta;
    float log_ratio_clamp, kl_delta_clamp, kl_clamp;
};

// A batch whose log-probabilities are known. Per token unless told; what may be null is not there.
struct ObjectiveArgs {
    const float *logp, *entropy;
    float* dlogp;  // d loss / d logp is written here
    const float *advantage, *dloss_direct, *dloss_via_ratio;
    const float *old, *ref, *scale, *rollout, *rollout_weight;  // may be null
    const uint8_t* scored;                                      // may be null: all are
    RowTokens token_of;
    int64_t rows;
    const int64_t *offsets, *group_index;  // (sequences + 1,); (sequences,), may be null where there are no groups
    int64_t sequences, groups;
    float* sums;       // null: gradients of `rows` tokens. Else of all, and rows of sums per sequence, per group and of
                       // all, in the order of objective.cuh's Measure, then the three extrema
    double* exact;     // workspace, (sequences, kMeasures)
    int32_t* counter;  // 0
    int32_t surrogate, kl;
    ObjectiveNumbers numbers;
};

// Writes d loss / d logp for losses of single tokens, and what is measured of the batch.
void objective(const ObjectiveArgs& args, Stream stream);

// x *= factor, which is read on the device: count elements at any address.
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream);

// --- products with the softmax in their epilogue: no logits; compute capability 9.0 ----------------------------------
// Rows of the hidden states, of the weight and of exponentials begin at multiples of 16 bytes.

bool has_products();  // whether the current device has them

// Bytes of device memory that either takes as its workspace.
size_t fused_workspace(int64_t rows, int64_t vocab, const Product& product);

// Writes what exponentials() does.
void fused_exponentials(const RowArgs& args, const Product& product, const RowScales& scales, void* workspace,
                        Stream stream);

// Writes statistics.
void fused_logp(const RowArgs& args, const Product& product, void* workspace, Stream stream);

}  // namespace gk::cuda
