// grpo_kernels._cpu: the CPU kernels for Python. Addresses come as integers, shapes are checked by native.py, and the
// interpreter lock is released while a kernel runs.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "cpu/api.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

template <size_t kCount>
py::tuple names(const char* const (&list)[kCount]) {
    py::tuple result(kCount);
    for (size_t i = 0; i < kCount; i++) result[i] = py::str(list[i]);
    return result;
}

// A flat sequence in the order of gk::Params, its names in PARAMS.
gk::Params params_from(const py::sequence& values) {
    using namespace gk;
    if (values.size() != kParamIntegers + kParamFloats) throw std::invalid_argument("params: wrong number of values");
    Params params;
    auto* integers = reinterpret_cast<int32_t*>(&params);
    auto* floats = reinterpret_cast<float*>(&params) + kParamIntegers;
    for (int i = 0; i < kParamIntegers; i++) integers[i] = values[i].cast<int32_t>();
    for (int i = 0; i < kParamFloats; i++) floats[i] = static_cast<float>(values[kParamIntegers + i].cast<double>());
    return params;
}

gk::RowArgs logits_of(Address logits, int dtype, int64_t pitch, int64_t rows, int64_t vocab, Address ids,
                      const py::sequence& params) {
    gk::RowArgs args = {};
    args.logits = pointer<const void>(logits);
    args.logits_dtype = dtype;
    args.logits_pitch = pitch;
    args.rows = rows;
    args.vocab = vocab;
    args.ids = pointer<const int64_t>(ids);
    args.params = params_from(params);
    return args;
}

void fused(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
           Address grad, int grad_dtype, int64_t grad_pitch, Address residual, Address table, int64_t table_pitch,
           Address logp, Address lse, Address entropy, const py::sequence& params, int threads) {
    gk::RowArgs args = logits_of(logits, logits_dtype, logits_pitch, rows, vocab, ids, params);
    args.grad = pointer<void>(grad);
    args.grad_dtype = grad_dtype;
    args.grad_pitch = grad_pitch;
    args.residual = pointer<float>(residual);
    args.table = pointer<const float>(table);
    args.table_pitch = table_pitch;
    args.logp = pointer<float>(logp);
    args.lse = pointer<double>(lse);
    args.entropy = pointer<float>(entropy);
    py::gil_scoped_release unlocked;
    gk::fused(args, threads);
}

void stats(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
           Address temperature, Address logp, Address lse, Address entropy, const py::sequence& params, int threads) {
    gk::RowArgs args = logits_of(logits, logits_dtype, logits_pitch, rows, vocab, ids, params);
    args.temperature = pointer<const float>(temperature);
    args.logp = pointer<float>(logp);
    args.lse = pointer<double>(lse);
    args.entropy = pointer<float>(entropy);
    py::gil_scoped_release unlocked;
    gk::stats(args, threads);
}

void gradient(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
              Address grad, int grad_dtype, int64_t grad_pitch, Address residual, Address temperature, Address lse,
              Address entropy, Address g_logp, Address g_entropy, const py::sequence& params, int threads) {
    gk::RowArgs args = logits_of(logits, logits_dtype, logits_pitch, rows, vocab, ids, params);
    args.grad = pointer<void>(grad);
    args.grad_dtype = grad_dtype;
    args.grad_pitch = grad_pitch;
    args.residual = pointer<float>(residual);
    args.temperature = pointer<const float>(temperature);
    args.lse = pointer<double>(lse);
    args.entropy = pointer<float>(entropy);
    args.g_logp = pointer<const float>(g_logp);
    args.g_entropy = pointer<const float>(g_entropy);
    py::gil_scoped_release unlocked;
    gk::gradient(args, threads);
}

void objective(int64_t tokens, Address log_ratio, Address logp, Address entropy, Address table, int64_t table_pitch,
               Address out, const py::sequence& params, int threads) {
    const gk::Params values = params_from(params);
    py::gil_scoped_release unlocked;
    gk::objective_tokens(tokens, pointer<const float>(log_ratio), pointer<const float>(logp),
                         pointer<const float>(entropy), pointer<const float>(table), table_pitch, values,
                         pointer<float>(out), threads);
}

void reduce(int64_t tokens, Address scored, Address log_ratio, Address logp, Address entropy, Address value, Address kl,
            Address g_logp, Address table, int64_t table_pitch, int64_t sequences, Address cu_seqlens,
            Address group_index, int64_t groups, Address sequence_sums, Address group_sums, Address totals,
            Address extrema, const py::sequence& params, int threads) {
    gk::ReduceArgs args = {};
    args.tokens = tokens;
    args.scored = pointer<const uint8_t>(scored);
    args.log_ratio = pointer<const float>(log_ratio);
    args.logp = pointer<const float>(logp);
    args.entropy = pointer<const float>(entropy);
    args.value = pointer<const float>(value);
    args.kl = pointer<const float>(kl);
    args.g_logp = pointer<const float>(g_logp);
    args.table = pointer<const float>(table);
    args.table_pitch = table_pitch;
    args.sequences = sequences;
    args.cu_seqlens = pointer<const int64_t>(cu_seqlens);
    args.group_index = pointer<const int64_t>(group_index);
    args.groups = groups;
    args.sequence_sums = pointer<float>(sequence_sums);
    args.group_sums = pointer<float>(group_sums);
    args.totals = pointer<float>(totals);
    args.extrema = pointer<float>(extrema);
    args.params = params_from(params);
    py::gil_scoped_release unlocked;
    gk::reduce(args, threads);
}

void add_rows(Address target, int target_dtype, int64_t target_pitch, int64_t target_rows, Address rows, int rows_dtype,
              int64_t rows_pitch, int64_t count, int64_t width, Address ids, Address scale) {
    gk::AddRowsArgs args = {};
    args.target = pointer<void>(target);
    args.target_dtype = target_dtype;
    args.target_pitch = target_pitch;
    args.target_rows = target_rows;
    args.rows = pointer<const void>(rows);
    args.rows_dtype = rows_dtype;
    args.rows_pitch = rows_pitch;
    args.count = count;
    args.width = width;
    args.ids = pointer<const int64_t>(ids);
    args.scale = pointer<const float>(scale);
    py::gil_scoped_release unlocked;
    gk::add_rows(args);
}

void group_statistics(Address rewards, Address group_index, int64_t count, int64_t groups, int scale, int baseline,
                      int64_t ddof, double eps, Address advantages, Address mean, Address std) {
    py::gil_scoped_release unlocked;
    gk::group_statistics(pointer<const float>(rewards), pointer<const int64_t>(group_index), count, groups, scale,
                         baseline, ddof, eps, pointer<float>(advantages), pointer<float>(mean), pointer<float>(std));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.attr("DTYPES") = names(gk::kDTypeNames);
    m.attr("TABLE_FIELDS") = names(gk::kFieldNames);
    m.attr("COLUMNS") = names(gk::kColumnNames);
    m.attr("SURROGATES") = names(gk::kSurrogateNames);
    m.attr("KL_ESTIMATORS") = names(gk::kKlEstimatorNames);
    m.attr("PARAMS") = names(gk::kParamNames);
    m.attr("SCALES") = names(gk::kScaleNames);
    m.attr("BASELINES") = names(gk::kBaselineNames);
    m.def("fused", fused);
    m.def("stats", stats);
    m.def("gradient", gradient);
    m.def("objective", objective);
    m.def("reduce", reduce);
    m.def("add_rows", add_rows);
    m.def("group_statistics", group_statistics);
    m.def("cpu_isa", gk::cpu_isa);
    m.def("set_cpu_isa", gk::set_cpu_isa);
}
