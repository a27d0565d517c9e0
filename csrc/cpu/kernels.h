// The kernels of one instruction set. rows.cpp, sparse.cpp and gathered.cpp are compiled once per set, each time into
// its own namespace.
#pragma once
#include "api.h"

namespace gk {

// Rows [first, last).
using RowKernel = void (*)(const RowArgs& args, const TeacherArgs& teacher, int64_t first, int64_t last);

struct RowKernels {
    RowKernel stats, gradient;
};

using SparseKernel = void (*)(const RowArgs& args, const SparseRows& out, int64_t first, int64_t last);

// Pairs in the order of their ids, and within an id in the order in which they came: those of id v are
// pairs[starts[v]], ..., pairs[starts[v + 1] - 1].
struct PairsById {
    const int32_t* starts;  // (vocab + 1,)
    const int32_t* pairs;
};

struct GatheredKernels {
    void (*logits)(const GatheredArgs& args, float* logits, int64_t first, int64_t last);  // rows [first, last)
    void (*dhidden)(const GatheredArgs& args, const float* dlogits, const GatheredTarget& target, int64_t first,
                    int64_t last);
    void (*dweight)(const TokenIdPairs& pairs, const PairsById& by_id, const GatheredTarget& target, int64_t first,
                    int64_t last);  // rows [first, last) of the weight
};

#define GK_DECLARE_KERNELS(isa)                      \
    namespace isa {                                  \
    RowKernels row_kernels();                        \
    SparseKernel sparse_kernel();                    \
    GatheredKernels gathered_kernels(int32_t dtype); \
    }
GK_DECLARE_KERNELS(avx512)
GK_DECLARE_KERNELS(avx2)
GK_DECLARE_KERNELS(baseline)

}  // namespace gk
