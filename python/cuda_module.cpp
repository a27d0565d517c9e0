// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace binding {

void take(Arguments& given, gk::cuda::Product& a) {
    given.read(a.hidden, a.hidden_stride, a.weight, a.weight_stride, a.width, a.dtype, a.bias);
}

void take(Arguments& given, gk::cuda::ObjectiveNumbers& a) {
    given.read(a.epsilon_low, a.epsilon_high, a.delta, a.dual_clip, a.sapo_temperature_pos, a.sapo_temperature_neg,
               a.beta, a.log_ratio_clamp, a.kl_delta_clamp, a.kl_clamp);
}

void take(Arguments& given, gk::cuda::ObjectiveArgs& a) {
    given.read(a.logp, a.entropy, a.dlogp, a.advantage, a.direct, a.via_ratio, a.old, a.ref, a.scale, a.rollout,
               a.rollout_weight, a.scored, a.token_of, a.rows, a.offsets, a.group_index, a.sequences, a.groups, a.sums,
               a.exact, a.counter, a.surrogate, a.kl, a.numbers);
}

}  // namespace binding

PyMODINIT_FUNC PyInit__cuda() {
    using binding::function;
    static PyMethodDef functions[] = {
        function<gk::cuda::stats>("stats"),
        function<gk::cuda::gradient>("gradient"),
        function<gk::cuda::exponentials>("exponentials"),
        function<gk::cuda::objective>("objective"),
        function<gk::cuda::scale>("scale"),
        function<gk::cuda::has_products>("has_products"),
        function<gk::cuda::fused_workspace>("fused_workspace"),
        function<gk::cuda::fused_exponentials>("fused_exponentials"),
        function<gk::cuda::fused_logp>("fused_logp"),

        function<gk::cuda::built_for_cuda>("built_for_cuda"),
        function<gk::cuda::built_architectures>("built_architectures"),
        function<gk::cuda::driver_cuda>("driver_cuda"),
        function<gk::cuda::image_for>("image_for"),
        {},
    };
    return binding::define_module("_cuda", functions);
}
