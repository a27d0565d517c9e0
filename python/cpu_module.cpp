// grpo_kernels._cpu: the CPU kernels for Python. See arguments.h; functions run in a number of threads.
#include "arguments.h"
#include "cpu/api.h"

namespace binding {

void take(Arguments& given, gk::TeacherArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.bias, a.kind, a.beta, a.params, a.weight, a.divergence,
               a.offset, a.lse);
}
void take(Arguments& given, gk::SparseRows& a) {
    given.read(a.ids, a.values, a.counts, a.capacity, a.theta, a.first_id);
}
void take(Arguments& given, gk::KeptRowArgs& a) {
    given.read(a.mask_ids, a.wide, a.mask_count, a.ends, a.sampled, a.own_first, a.own_count, a.vocab, a.token_of,
               a.rows, a.slots, a.ids, a.pair_tokens, a.columns, a.added);
}
void take(Arguments& given, gk::KeptArgs& a) {
    given.read(a.hidden, a.hidden_row_stride, a.weight, a.dtype, a.weight_row_stride, a.width, a.bias, a.token_of,
               a.rows, a.slots, a.ids);
}
void take(Arguments& given, gk::KeptPairs& a) {
    given.read(a.hidden, a.dtype, a.hidden_row_stride, a.ids, a.token_of, a.dlogits, a.count, a.vocab, a.width);
}
void take(Arguments& given, gk::KeptTarget& a) { given.read(a.data, a.dtype, a.row_stride, a.add); }

}  // namespace binding

PyMODINIT_FUNC PyInit__cpu() {
    using binding::function;
    static PyMethodDef functions[] = {
        function<gk::stats>("stats"),
        function<gk::gradient>("gradient"),
        function<gk::sparse_gradient>("sparse_gradient"),
        function<gk::kept_ids>("kept_ids"),
        function<gk::kept_logits>("kept_logits"),
        function<gk::kept_dhidden>("kept_dhidden"),
        function<gk::kept_dweight>("kept_dweight"),
        function<gk::uses_openmp>("uses_openmp"),
        function<gk::cpu_isa>("cpu_isa"),
        function<gk::set_cpu_isa>("set_cpu_isa"),
        {},
    };
    return binding::define_module("_cpu", functions);
}
