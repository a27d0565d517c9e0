// The row kernels of one instruction set. rows.cpp is compiled once per set, each time into its own namespace.
#pragma once
#include "api.h"

namespace gk {

using RowKernel = void (*)(const RowArgs& args, int64_t first, int64_t last);  // rows [first, last)

struct RowKernels {
    RowKernel fused, stats, gradient;
};

namespace avx512 {
RowKernels row_kernels();
}
namespace avx2 {
RowKernels row_kernels();
}
namespace baseline {
RowKernels row_kernels();
}

// d loss / d logp and d loss / d entropy of one row: the table's objective at the row's statistics. Compiled once, for
// the baseline: every instruction set takes exactly the same branch at a clip boundary.
struct RowGradient {
    float logp, entropy;
};
RowGradient row_objective(const RowArgs& args, int64_t row, float logp, float entropy);

}  // namespace gk
