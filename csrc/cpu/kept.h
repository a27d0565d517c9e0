// The products over kept ids of one instruction set. kept.cpp is compiled once per set, each time into its own
// namespace.
#pragma once
#include "api.h"

namespace gk {

struct KeptKernels {
    void (*logits)(const KeptArgs& args, float* logits, int64_t first, int64_t last);  // rows [first, last)
    void (*dhidden)(const KeptArgs& args, const float* dlogits, const KeptTarget& target, int64_t first, int64_t last);
    void (*dweight)(const KeptPairs& pairs, const PairsById<int32_t>& by_id, const KeptTarget& target, int64_t first,
                    int64_t last);  // rows [first, last) of the weight
};

namespace avx512 {
KeptKernels kept_kernels(int32_t dtype);
}
namespace avx2 {
KeptKernels kept_kernels(int32_t dtype);
}
namespace baseline {
KeptKernels kept_kernels(int32_t dtype);
}

}  // namespace gk
