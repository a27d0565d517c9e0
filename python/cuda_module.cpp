// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace binding {

void take(Arguments& given, gk::cuda::Product& a) {
    given.read(a.hidden, a.hidden_stride, a.weight, a.weight_stride, a.width, a.dtype, a.bias);
}

}  // namespace binding

PYBIND11_MODULE(_cuda, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("stats", Bound<gk::cuda::stats>::call);
    m.def("gradient", Bound<gk::cuda::gradient>::call);
    m.def("exponentials", Bound<gk::cuda::exponentials>::call);
    m.def("scale", Bound<gk::cuda::scale>::call);
    m.def("supports_fused", Bound<gk::cuda::supports_fused>::call);
    m.def("fused_workspace", Bound<gk::cuda::fused_workspace>::call);
    m.def("fused_exponentials", Bound<gk::cuda::fused_exponentials>::call);
    m.def("fused_logp", Bound<gk::cuda::fused_logp>::call);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("image_for", gk::cuda::image_for);
}
