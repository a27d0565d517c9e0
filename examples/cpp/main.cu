// The CUDA kernels from C++: log-probabilities of sampled ids and their gradients in some rows of logits, each against
// a plain loop.
//
//     python examples/cpp/build.py example && ./example        compiles it with the kernels; Python is not in it
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <vector>

#include "cuda/api.h"

#ifndef __CUDACC__  // nvcc declares CUDA's runtime by itself, and with another compiler no header of CUDA is needed
extern "C" int cudaMallocManaged(void** memory, size_t bytes, unsigned flags);
extern "C" int cudaDeviceSynchronize();
constexpr int cudaSuccess = 0, cudaMemAttachGlobal = 1;
#endif

namespace {

constexpr int kRows = 6, kVocab = 1003, kStride = 1008;  // rows of logits begin on 16 bytes

// Memory that host and device share, so that nothing has to be copied; it lives as long as the program.
template <class T>
T* shared_memory(size_t count, T value = {}) {
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, count * sizeof(T), cudaMemAttachGlobal) != cudaSuccess) {
        fprintf(stderr, "cudaMallocManaged failed: is there a GPU?\n");
        exit(2);
    }
    T* const values = static_cast<T*>(memory);
    std::fill_n(values, count, value);
    return values;
}

double log_sum_exp(const float* logits, double temperature) {
    double top = -INFINITY, sum = 0.0;
    for (int j = 0; j < kVocab; j++) top = std::max(top, logits[j] / temperature);
    for (int j = 0; j < kVocab; j++) sum += exp(logits[j] / temperature - top);
    return top + log(sum);
}

int run() {
    std::mt19937 random(0);
    std::normal_distribution<float> normal(0.f, 3.f);
    auto* const logits = shared_memory<float>(kRows * kStride);
    auto* const gradient = shared_memory<float>(kRows * kStride);
    auto* const ids = shared_memory<int64_t>(kRows);
    for (int i = 0; i < kRows * kStride; i++) logits[i] = normal(random);
    for (int row = 0; row < kRows; row++) ids[row] = random() % kVocab;

    gk::RowArgs args = {};  // rows of a batch whose tokens are these rows, in order
    args.logits = logits;
    args.ids = ids;
    args.temperature = shared_memory<float>(kRows, 0.7f);
    args.logp = shared_memory<float>(kRows);
    args.entropy = shared_memory<float>(kRows);
    args.lse = shared_memory<double>(kRows);
    args.dlogp = shared_memory<float>(kRows, -0.5f);  // d loss / d logp: loss = -sum of logp / 2
    args.dentropy = shared_memory<float>(kRows, 0.f);
    args.grad = gradient;
    args.rows = kRows;
    args.vocab = kVocab;
    args.logits_stride = args.grad_stride = kStride;
    args.logits_dtype = args.grad_dtype = gk::kFloat32;
    args.params.logit_scale = 1.f;

    gk::cuda::stats(args, nullptr);  // the default stream
    gk::cuda::gradient(args, nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) {
        fprintf(stderr, "a kernel failed\n");
        return 2;
    }

    double worst_logp = 0.0, worst_gradient = 0.0;
    for (int row = 0; row < kRows; row++) {
        const float* const own = logits + row * kStride;
        const double temperature = args.temperature[row], lse = log_sum_exp(own, temperature);
        worst_logp = std::max(worst_logp, fabs(args.logp[row] - (own[ids[row]] / temperature - lse)));
        for (int j = 0; j < kVocab; j++) {
            const double p = exp(own[j] / temperature - lse);
            const double expected = args.dlogp[row] * ((j == ids[row] ? 1.0 : 0.0) - p) / temperature;
            worst_gradient = std::max(worst_gradient, fabs(gradient[row * kStride + j] - expected));
        }
        printf("row %d  id %4lld  logp %8.4f  entropy %6.4f\n", row, static_cast<long long>(ids[row]), args.logp[row],
               args.entropy[row]);
    }
    printf("largest error: %.1e of logp, %.1e of the gradient\n", worst_logp, worst_gradient);
    return worst_logp < 1e-5 && worst_gradient < 1e-6 ? 0 : 1;
}

}  // namespace

int main() {
    try {
        return run();
    } catch (const std::exception& error) {  // its message names the cause and a remedy
        fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
