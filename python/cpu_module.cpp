// grpo_kernels._cpu: the CPU kernels for Python. See arguments.h; functions run in a number of threads.
#include "arguments.h"
#include "cpu/api.h"

namespace binding {

void take(Arguments& given, gk::AddRowsArgs& a) {
    given.read(a.target, a.target_dtype, a.target_stride, a.rows, a.rows_stride, a.count, a.width, a.ids, a.scale);
}

void take(Arguments& given, gk::AddTransposedArgs& a) {
    given.read(a.target, a.target_dtype, a.target_row_stride, a.source, a.source_row_stride, a.rows, a.width, a.add);
}

// The workspace is the other backend's.
void plan(const gk::PlanArgs& args, void*, int threads) { gk::plan(args, threads); }

void reduce(const gk::ReduceArgs& args, void*, int threads) { gk::reduce(args, threads); }

using RowFunction = void (*)(const gk::RowArgs&, const gk::TeacherArgs*, int threads);

template <RowFunction kRun>
void rows(const gk::RowArgs& args, int threads) {
    kRun(args, nullptr, threads);
}

template <RowFunction kRun>
void teacher_rows(const gk::RowArgs& args, const gk::TeacherArgs& teacher, int threads) {
    kRun(args, &teacher, threads);
}

void kept_dweight(const gk::KeptPairs& pairs, gk::KeptTarget target, bool add, int threads) {
    target.add = add;
    gk::kept_dweight(pairs, target, threads);
}

}  // namespace binding

PYBIND11_MODULE(_cpu, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan", Bound<binding::plan>::call);
    m.def("single_pass", Bound<binding::rows<gk::single_pass>>::call);
    m.def("stats", Bound<binding::rows<gk::stats>>::call);
    m.def("gradient", Bound<binding::rows<gk::gradient>>::call);
    m.def("teacher_single_pass", Bound<binding::teacher_rows<gk::single_pass>>::call);
    m.def("teacher_stats", Bound<binding::teacher_rows<gk::stats>>::call);
    m.def("teacher_gradient", Bound<binding::teacher_rows<gk::gradient>>::call);
    m.def("sparse_gradient", Bound<gk::sparse_gradient>::call);
    m.def("token_objective", Bound<gk::token_objective>::call);
    m.def("sequence_objective", Bound<gk::sequence_objective>::call);
    m.def("reduce", Bound<binding::reduce>::call);
    m.def("add_rows", Bound<gk::add_rows>::call);
    m.def("add_transposed", Bound<gk::add_transposed>::call);
    m.def("kept_ids", Bound<gk::kept_ids>::call);
    m.def("kept_logits", Bound<gk::kept_logits>::call);
    m.def("kept_dhidden", Bound<gk::kept_dhidden>::call);
    m.def("kept_dweight", Bound<binding::kept_dweight>::call);
    m.def("uses_openmp", gk::uses_openmp);
    m.def("has_amx", gk::has_amx);
    m.def("cpu_isa", gk::cpu_isa);
    m.def("set_cpu_isa", gk::set_cpu_isa);
}
