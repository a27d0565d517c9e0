// What the bindings of the compiled backends share: addresses come as integers, shapes and types are checked in Python
// (grpo_kernels/backends), and the interpreter lock is released while a kernel runs. The last argument of each function
// says where: a number of threads, or the address of a stream.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "args.h"

namespace binding {

namespace py = pybind11;
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

// The lists of layout.h, so that Python looks an index up by its name.
inline void export_names(py::module_& m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.attr("DTYPES") = names(gk::kDTypeNames);
    m.attr("TABLE_FIELDS") = names(gk::kFieldNames);
    m.attr("COLUMNS") = names(gk::kColumnNames);
    m.attr("SURROGATES") = names(gk::kSurrogateNames);
    m.attr("KL_ESTIMATORS") = names(gk::kKlEstimatorNames);
    m.attr("PARAMS") = names(gk::kParamNames);
    m.attr("SCALES") = names(gk::kScaleNames);
    m.attr("BASELINES") = names(gk::kBaselineNames);
}

// A flat sequence in the order of gk::Params, its names in PARAMS.
inline gk::Params params_from(const py::sequence& values) {
    using namespace gk;
    if (values.size() != kParamIntegers + kParamFloats) throw std::invalid_argument("params: wrong number of values");
    Params params;
    auto* integers = reinterpret_cast<int32_t*>(&params);
    auto* floats = reinterpret_cast<float*>(&params) + kParamIntegers;
    for (int i = 0; i < kParamIntegers; i++) integers[i] = values[i].cast<int32_t>();
    for (int i = 0; i < kParamFloats; i++) floats[i] = static_cast<float>(values[kParamIntegers + i].cast<double>());
    return params;
}

inline gk::RowArgs logits_of(Address logits, int dtype, int64_t pitch, int64_t rows, int64_t vocab, Address ids,
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

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void fused(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
           Address grad, int grad_dtype, int64_t grad_pitch, Address residual, Address table, int64_t table_pitch,
           Address logp, Address lse, Address entropy, const py::sequence& params, Where where) {
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
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void stats(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
           Address temperature, Address logp, Address lse, Address entropy, const py::sequence& params, Where where) {
    gk::RowArgs args = logits_of(logits, logits_dtype, logits_pitch, rows, vocab, ids, params);
    args.temperature = pointer<const float>(temperature);
    args.logp = pointer<float>(logp);
    args.lse = pointer<double>(lse);
    args.entropy = pointer<float>(entropy);
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void gradient(Address logits, int logits_dtype, int64_t logits_pitch, int64_t rows, int64_t vocab, Address ids,
              Address grad, int grad_dtype, int64_t grad_pitch, Address residual, Address temperature, Address lse,
              Address entropy, Address g_logp, Address g_entropy, const py::sequence& params, Where where) {
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
    kRun(args, where);
}

// `workspace`: the device's scratch memory, 0 where the backend needs none.
template <class Where, void (*kRun)(const gk::ReduceArgs&, Address workspace, Where)>
void reduce(int64_t tokens, Address scored, Address log_ratio, Address logp, Address entropy, Address value, Address kl,
            Address g_logp, Address table, int64_t table_pitch, int64_t sequences, Address cu_seqlens,
            Address group_index, int64_t groups, Address sequence_sums, Address group_sums, Address totals,
            Address extrema, const py::sequence& params, Address workspace, Where where) {
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
    kRun(args, workspace, where);
}

}  // namespace binding
