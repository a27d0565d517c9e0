// The kernels of one instruction set. rows.cpp, sparse.cpp and kept.cpp are compiled once per set, each time into its
// own namespace.
#pragma once
#include "api.h"

namespace gk {

// Rows [first, last); `teacher` may be null.
using RowKernel = void (*)(const RowArgs& args, const TeacherArgs* teacher, int64_t first, int64_t last);

struct RowKernels {
    RowKernel single_pass, stats, gradient;
};

using SparseKernel = void (*)(const RowArgs& args, const SparseRows& out, int64_t first, int64_t last);

struct KeptKernels {
    void (*logits)(const KeptArgs& args, float* logits, int64_t first, int64_t last);  // rows [first, last)
    void (*dhidden)(const KeptArgs& args, const float* dlogits, const KeptTarget& target, int64_t first, int64_t last);
    void (*dweight)(const KeptPairs& pairs, const PairsById<int32_t>& by_id, const KeptTarget& target, int64_t first,
                    int64_t last);  // rows [first, last) of the weight
};

#define GK_DECLARE_KERNELS(isa)              \
    namespace isa {                          \
    RowKernels row_kernels();                \
    SparseKernel sparse_kernel();            \
    KeptKernels kept_kernels(int32_t dtype); \
    }
GK_DECLARE_KERNELS(avx512)
GK_DECLARE_KERNELS(avx2)
GK_DECLARE_KERNELS(baseline)

// What single_pass computes between a row's statistics and its gradient: the token's objective into its values, and
// d loss / d logp, which is returned. Compiled once, for the baseline: every instruction set takes exactly the same
// branch at a clip boundary.
float row_objective(const RowArgs& args, int64_t token, float logp, float entropy);

}  // namespace gk
