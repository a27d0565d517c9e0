// grpo_kernels._cpu: the CPU kernels for Python. See arguments.h; functions run in a number of threads.
#include "arguments.h"
#include "cpu/api.h"

namespace {

using namespace binding;

void run_plan(const gk::PlanArgs& args, Address, int threads) { gk::plan(args, threads); }

void run_reduce(const gk::ReduceArgs& args, Address, int threads) { gk::reduce(args, threads); }

void add_rows(Address target, int target_dtype, int64_t target_stride, int64_t target_rows, Address rows,
              int rows_dtype, int64_t rows_stride, int64_t count, int64_t width, Address ids, Address scale) {
    gk::AddRowsArgs args = {};
    args.target = pointer<void>(target);
    args.target_dtype = target_dtype;
    args.target_stride = target_stride;
    args.target_rows = target_rows;
    args.rows = pointer<const void>(rows);
    args.rows_dtype = rows_dtype;
    args.rows_stride = rows_stride;
    args.count = count;
    args.width = width;
    args.ids = pointer<const int64_t>(ids);
    args.scale = pointer<const float>(scale);
    py::gil_scoped_release unlocked;
    gk::add_rows(args);
}

void add_transposed(Address target, int target_dtype, int64_t target_row_stride, Address source,
                    int64_t source_row_stride, int64_t rows, int64_t width, bool add, int threads) {
    gk::AddTransposedArgs args = {};
    args.target = pointer<void>(target);
    args.target_dtype = target_dtype;
    args.target_row_stride = target_row_stride;
    args.source = pointer<const uint16_t>(source);
    args.source_row_stride = source_row_stride;
    args.rows = rows;
    args.width = width;
    args.add = add;
    py::gil_scoped_release unlocked;
    gk::add_transposed(args, threads);
}

void kept_logits(const py::tuple& given, Address logits, int threads) {
    const gk::KeptArgs args = kept_args(given);
    py::gil_scoped_release unlocked;
    gk::kept_logits(args, pointer<float>(logits), threads);
}

void kept_dhidden(const py::tuple& given, Address dlogits, Address target, int64_t row_stride, int dtype, int threads) {
    const gk::KeptArgs args = kept_args(given);
    py::gil_scoped_release unlocked;
    gk::kept_dhidden(args, pointer<const float>(dlogits), {pointer<void>(target), row_stride, dtype, false}, threads);
}

void kept_dweight(const py::tuple& given, Address target, int64_t row_stride, int dtype, bool add, int threads) {
    const gk::KeptPairs pairs = kept_pairs(given);
    py::gil_scoped_release unlocked;
    gk::kept_dweight(pairs, {pointer<void>(target), row_stride, dtype, add}, threads);
}

// One thread is enough for a reward per completion.
void group_statistics(Address rewards, Address group_index, int64_t count, int64_t groups, int scale, int baseline,
                      int64_t ddof, double eps, Address advantages, Address mean, Address std, int) {
    py::gil_scoped_release unlocked;
    gk::group_statistics(pointer<const float>(rewards), pointer<const int64_t>(group_index), count, groups, scale,
                         baseline, ddof, eps, pointer<float>(advantages), pointer<float>(mean), pointer<float>(std));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan", plan<int, run_plan>);
    m.def("single_pass", single_pass<int, gk::single_pass>);
    m.def("stats", stats<int, gk::stats>);
    m.def("gradient", gradient<int, gk::gradient>);
    m.def("token_objective", token_objective<int, gk::token_objective>);
    m.def("sequence_objective", sequence_objective<int, gk::sequence_objective>);
    m.def("reduce", reduce<int, run_reduce>);
    m.def("add_rows", add_rows);
    m.def("add_transposed", add_transposed);
    m.def("kept_logits", kept_logits);
    m.def("kept_dhidden", kept_dhidden);
    m.def("kept_dweight", kept_dweight);
    m.def("group_statistics", group_statistics);
    m.def("uses_openmp", gk::uses_openmp);
    m.def("has_amx", gk::has_amx);
    m.def("cpu_isa", gk::cpu_isa);
    m.def("set_cpu_isa", gk::set_cpu_isa);
}
