// Prints "kernel threads shared cluster" for launches that the host code of the CUDA backend makes on a device. In
// place of the driver it has what is below; nothing is executed.
//
//     launches CAPABILITY MULTIPROCESSORS SHARED_PER_BLOCK SHARED_PER_MULTIPROCESSOR L2_BYTES
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <initializer_list>

#include "cuda/api.h"
#include "cuda/driver.h"

using namespace gk;

namespace {

cuda::Device device;

// Vocabularies in the order of interest: a common one, one that a block holds, one that no cluster holds.
constexpr int64_t kVocabularies[] = {128256, 8192, 524288};
constexpr int64_t kRows = 4096, kWidth = 4096;

void rows() {
    constexpr int32_t kPairs[][2] = {{kFloat32, kFloat32},
                                     {kFloat32, kBfloat16},
                                     {kFloat32, kFloat16},
                                     {kBfloat16, kBfloat16},
                                     {kFloat16, kFloat16}};
    for (const int64_t vocab : kVocabularies) {
        for (const auto& [logits, grad] : kPairs) {
            RowArgs args = {};
            args.rows = kRows;
            args.vocab = args.logits_stride = args.grad_stride = vocab;
            args.logits_dtype = logits;
            args.grad_dtype = grad;
            args.grad = &device;  // any address: nothing is executed
            cuda::stats(args, nullptr);
            cuda::gradient(args, nullptr);
            if (grad == logits) cuda::sparse_gradient(args, {}, nullptr);
            cuda::single_pass(args, nullptr);
        }
    }
}

void tokens() {
    PlanArgs batch = {};
    int64_t counts[2];
    batch.tokens = kRows;
    batch.sequences = 16;
    batch.row_length = kRows / batch.sequences;
    batch.counts = counts;
    cuda::plan(batch, nullptr, nullptr);
    TokenArgs chunk = {};
    chunk.rows = kRows;
    cuda::token_objective(chunk, nullptr);
    SequenceArgs all = {};
    all.last = batch.sequences;
    cuda::sequence_objective(all, nullptr);
    ReduceArgs args = {};
    args.sequences = args.groups = batch.sequences;
    cuda::reduce(args, nullptr, nullptr);
    for (const int32_t dtype : {kFloat32, kBfloat16, kFloat16})
        cuda::scale(nullptr, dtype, kVocabularies[0] * kWidth, nullptr, nullptr);
}

void kept() {
    for (const int32_t dtype : {kFloat32, kBfloat16, kFloat16}) {
        KeptArgs args = {};
        args.rows = kRows;
        args.slots = 32;
        args.width = args.hidden_row_stride = args.weight_row_stride = kWidth;
        args.dtype = dtype;
        cuda::kept_logits(args, nullptr, nullptr);
        KeptPairs pairs = {};
        pairs.vocab = kVocabularies[0];
        pairs.width = kWidth;
        pairs.dtype = dtype;
        for (const int32_t gradient : {int32_t{kFloat32}, dtype}) {
            const KeptTarget target = {nullptr, kWidth, gradient, false};
            cuda::kept_dhidden(args, nullptr, target, nullptr);
            cuda::kept_dweight(pairs, {}, target, nullptr);
        }
    }
}

void head() {
    for (const int32_t dtype : {kBfloat16, kFloat16}) {
        for (const float softcap : {0.f, 30.f}) {
            cuda::HeadArgs args = {};
            args.rows = kRows;
            args.width = args.hidden_row_stride = args.weight_row_stride = kWidth;
            args.vocab = args.exponentials_row_stride = kVocabularies[0];
            args.dtype = dtype;
            args.params.softcap = softcap;
            if (!cuda::supports_head(args)) return;
            cuda::linear_logp(args, nullptr, nullptr);
            cuda::anchored(args, nullptr, nullptr);
        }
    }
}

}  // namespace

namespace gk::cuda {

void launch(const char* kernel, const LaunchConfig& config, const void*, size_t) {
    printf("%s %u %u %u\n", kernel, config.block, config.shared, config.cluster);
}
void encode_tensor_map(const TensorTiles&, TensorMap*) {}
const Device& current_device() { return device; }
const char* image_for(int capability) { return capability == 90 ? "sm_90a" : ""; }

}  // namespace gk::cuda

int main(int, char** arguments) {
    device = {atoi(arguments[1]), atoi(arguments[2]), atoi(arguments[3]), atoi(arguments[4]), atoi(arguments[5])};
    rows();
    tokens();
    kept();
    head();
    return 0;
}
