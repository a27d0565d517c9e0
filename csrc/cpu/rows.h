// The row kernels of one instruction set. rows.cpp is compiled once per set, each time into its own namespace.
#pragma once
#include "api.h"

namespace gk {

using RowKernel = void (*)(const RowArgs& args, int64_t first, int64_t last);  // rows [first, last)

struct RowKernels {
    RowKernel single_pass, stats, gradient;
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

// What single_pass computes between a row's statistics and its gradient: the token's objective into its values, and
// d loss / d logp, which is returned. Compiled once, for the baseline: every instruction set takes exactly the same
// branch at a clip boundary.
float row_objective(const RowArgs& args, int64_t token, float logp, float entropy);

}  // namespace gk
