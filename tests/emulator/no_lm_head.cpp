// The products of csrc/cuda/api.h, which need tensor cores, are not emulated here: no device serves them. Weak, so that
// a build that has them takes its own.
#include <stdexcept>

#include "cuda/api.h"

namespace gk::cuda {

__attribute__((weak)) bool supports_head(const HeadArgs&) { return false; }
__attribute__((weak)) size_t head_workspace(const HeadArgs&) { return 0; }
__attribute__((weak)) void linear_logp(const HeadArgs&, void*, Stream) { throw std::runtime_error("not emulated"); }
__attribute__((weak)) void anchored(const HeadArgs&, void*, Stream) { throw std::runtime_error("not emulated"); }

}  // namespace gk::cuda
