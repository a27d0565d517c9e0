// grpo_kernels._cpu: the CPU kernels for Python. See arguments.h; functions run in a number of threads.
#include "arguments.h"
#include "cpu/api.h"

namespace {

using namespace binding;

void run_plan(const gk::PlanArgs& args, void*, int threads) { gk::plan(args, threads); }

void run_reduce(const gk::ReduceArgs& args, void*, int threads) { gk::reduce(args, threads); }

template <void (*kRun)(const gk::RowArgs&, const gk::TeacherArgs&, int threads)>
void teacher_rows(const py::args& given) {
    gk::TeacherArgs teacher = {};
    int threads;
    const gk::RowArgs a = row_args(given, teacher, threads);
    py::gil_scoped_release unlocked;
    kRun(a, teacher, threads);
}

void kept_dweight(const py::args& given) {
    gk::KeptPairs pairs = {};
    gk::KeptTarget target = {};
    int threads;
    Arguments(given).read(pairs, target.data, target.dtype, target.row_stride, target.add, threads);
    py::gil_scoped_release unlocked;
    gk::kept_dweight(pairs, target, threads);
}

void add_rows(const py::args& given) {
    gk::AddRowsArgs a = {};
    Arguments(given).read(a.target, a.target_dtype, a.target_stride, a.rows, a.rows_stride, a.count, a.width, a.ids,
                          a.scale);
    py::gil_scoped_release unlocked;
    gk::add_rows(a);
}

void add_transposed(const py::args& given) {
    gk::AddTransposedArgs a = {};
    int threads;
    Arguments(given).read(a.target, a.target_dtype, a.target_row_stride, a.source, a.source_row_stride, a.rows, a.width,
                          a.add, threads);
    py::gil_scoped_release unlocked;
    gk::add_transposed(a, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan", plan<int, run_plan>);
    m.def("single_pass", rows<int, gk::single_pass>);
    m.def("stats", rows<int, gk::stats>);
    m.def("gradient", rows<int, gk::gradient>);
    m.def("teacher_single_pass", teacher_rows<gk::teacher_single_pass>);
    m.def("teacher_stats", teacher_rows<gk::teacher_stats>);
    m.def("teacher_gradient", teacher_rows<gk::teacher_gradient>);
    m.def("sparse_gradient", sparse_gradient<int, gk::sparse_gradient>);
    m.def("token_objective", token_objective<int, gk::token_objective>);
    m.def("sequence_objective", sequence_objective<int, gk::sequence_objective>);
    m.def("reduce", reduce<int, run_reduce>);
    m.def("add_rows", add_rows);
    m.def("add_transposed", add_transposed);
    m.def("kept_logits", kept_logits<int, gk::kept_logits>);
    m.def("kept_dhidden", kept_dhidden<int, gk::kept_dhidden>);
    m.def("kept_dweight", kept_dweight);
    m.def("uses_openmp", gk::uses_openmp);
    m.def("has_amx", gk::has_amx);
    m.def("cpu_isa", gk::cpu_isa);
    m.def("set_cpu_isa", gk::set_cpu_isa);
}
