// grpo_kernels._cpu: the CPU kernels for Python. See arguments.h; functions run in a number of threads.
#include "arguments.h"
#include "cpu/api.h"

namespace binding {

void take(Arguments& given, gk::TeacherArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.bias, a.kind, a.beta, a.params, a.weight, a.divergence,
               a.policy_kl, a.lse);
}
void take(Arguments& given, gk::SparseRows& a) {
    given.read(a.ids, a.values, a.counts, a.capacity, a.theta, a.first_id);
}
void take(Arguments& given, gk::AllowedIdArgs& a) {
    given.read(a.mask_ids, a.int64_ids, a.mask_count, a.ends, a.sampled, a.local_first, a.local_count, a.vocab,
               a.token_of, a.rows, a.slots, a.ids, a.pair_tokens, a.columns, a.added);
}
void take(Arguments& given, gk::GatheredArgs& a) {
    given.read(a.hidden, a.hidden_row_stride, a.weight, a.dtype, a.weight_row_stride, a.width, a.bias, a.token_of,
               a.rows, a.slots, a.ids);
}
void take(Arguments& given, gk::TokenIdPairs& a) {
    given.read(a.hidden, a.dtype, a.hidden_row_stride, a.ids, a.token_of, a.dlogits, a.count, a.vocab, a.width);
}
void take(Arguments& given, gk::GatheredTarget& a) { given.read(a.data, a.dtype, a.row_stride, a.add); }

}  // namespace binding

PYBIND11_MODULE(_cpu, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("stats", Bound<gk::stats>::call);
    m.def("gradient", Bound<gk::gradient>::call);
    m.def("sparse_gradient", Bound<gk::sparse_gradient>::call);
    m.def("allowed_ids", Bound<gk::allowed_ids>::call);
    m.def("gathered_logits", Bound<gk::gathered_logits>::call);
    m.def("gathered_dhidden", Bound<gk::gathered_dhidden>::call);
    m.def("gathered_dweight", Bound<gk::gathered_dweight>::call);
    m.def("uses_openmp", gk::uses_openmp);
    m.def("cpu_isa", gk::cpu_isa);
    m.def("set_cpu_isa", gk::set_cpu_isa);
}
