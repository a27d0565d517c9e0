// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace binding {

void take(Arguments& given, gk::cuda::Product& a) {
    given.read(a.hidden, a.hidden_stride, a.weight, a.weight_stride, a.width, a.dtype, a.bias);
}

void take(Arguments& given, gk::cuda::RowScales& a) { given.read(a.row_scale, a.sampled); }

void take(Arguments& given, gk::cuda::ObjectiveNumbers& a) {
    given.read(a.epsilon_low, a.epsilon_high, a.delta, a.dual_clip, a.sapo_temperature_pos, a.sapo_temperature_neg,
               a.beta, a.log_ratio_clamp, a.kl_delta_clamp, a.kl_clamp);
}

void take(Arguments& given, gk::cuda::ObjectiveArgs& a) {
    given.read(a.logp, a.entropy, a.dlogp, a.advantage, a.dloss_direct, a.dloss_via_ratio, a.old, a.ref, a.scale,
               a.rollout, a.rollout_weight, a.scored, a.token_of, a.rows, a.offsets, a.group_index, a.sequences,
               a.groups, a.sums, a.exact, a.counter, a.surrogate, a.kl, a.numbers);
}

}  // namespace binding

PYBIND11_MODULE(_cuda, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("stats", Bound<gk::cuda::stats>::call);
    m.def("gradient", Bound<gk::cuda::gradient>::call);
    m.def("exponentials", Bound<gk::cuda::exponentials>::call);
    m.def("objective", Bound<gk::cuda::objective>::call);
    m.def("scale", Bound<gk::cuda::scale>::call);
    m.def("scale_rows", Bound<gk::cuda::scale_rows>::call);
    m.def("has_products", gk::cuda::has_products);
    m.def("fused_workspace", Bound<gk::cuda::fused_workspace>::call);
    m.def("fused_exponentials", Bound<gk::cuda::fused_exponentials>::call);
    m.def("fused_logp", Bound<gk::cuda::fused_logp>::call);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("image_for", gk::cuda::image_for);
}
