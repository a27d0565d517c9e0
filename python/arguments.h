// What the bindings of the compiled backends share: tensors come as they are, or as the integers of their addresses,
// and give nothing but these; shapes and types are checked in Python (grpo_kernels/backends), and the interpreter lock
// is released while a kernel runs. The last argument of each function is the number of threads, or the address of a
// stream.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>

#include "args.h"

namespace binding {

namespace py = pybind11;
struct Address {
    uintptr_t value = 0;
};

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address.value);
}

}  // namespace binding

// None is 0, an integer itself, a tensor what its data_ptr() returns.
template <>
struct pybind11::detail::type_caster<binding::Address> {
    PYBIND11_TYPE_CASTER(binding::Address, const_name("torch.Tensor | int | None"));

    bool load(handle given, bool) {
        static PyObject* const method = PyUnicode_InternFromString("data_ptr");
        value = {};
        if (given.is_none()) return true;
        object number = reinterpret_borrow<object>(given);
        if (!PyLong_Check(given.ptr()))
            number = reinterpret_steal<object>(PyObject_CallMethodNoArgs(given.ptr(), method));
        if (number) value.value = PyLong_AsSize_t(number.ptr());
        if (PyErr_Occurred()) throw error_already_set();
        return true;
    }
};

namespace binding {

// gk::Params or gk::PlanRules: the values in the order of names.h, int32 and then float32.
template <class T>
T from_bytes(const py::bytes& bytes) {
    T values;
    if (static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr())) != sizeof values)
        throw std::invalid_argument("params, rules: wrong number of values");
    std::memcpy(&values, PyBytes_AS_STRING(bytes.ptr()), sizeof values);
    return values;
}

inline gk::TokenData token_data(Address table, int64_t tokens, Address values) {
    return {pointer<const float>(table), pointer<float>(values), tokens};
}

// What the three row kernels have in common.
inline gk::RowArgs logits_of(Address logits, int dtype, int64_t stride, int64_t rows, int64_t vocab, Address bias,
                             Address ids, int64_t start, Address index, Address lse, const py::bytes& params) {
    gk::RowArgs args = {};
    args.logits = pointer<const void>(logits);
    args.logits_dtype = dtype;
    args.logits_stride = stride;
    args.rows = rows;
    args.vocab = vocab;
    args.bias = pointer<const float>(bias);
    args.ids = pointer<const int64_t>(ids);
    args.token_of = {start, pointer<const int64_t>(index)};
    args.lse = pointer<double>(lse);
    args.params = from_bytes<gk::Params>(params);
    return args;
}

inline void add_gradient(gk::RowArgs& args, Address grad, int dtype, int64_t stride, Address rounding_error) {
    args.grad = pointer<void>(grad);
    args.grad_dtype = dtype;
    args.grad_stride = stride;
    args.rounding_error = pointer<float>(rounding_error);
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void single_pass(Address logits, int dtype, int64_t stride, int64_t rows, int64_t vocab, Address bias, Address ids,
                 int64_t start, Address index, Address table, int64_t tokens, Address values, Address lse, Address grad,
                 int grad_dtype, int64_t grad_stride, Address rounding_error, const py::bytes& params, Where where) {
    gk::RowArgs args = logits_of(logits, dtype, stride, rows, vocab, bias, ids, start, index, lse, params);
    args.tokens = token_data(table, tokens, values);
    add_gradient(args, grad, grad_dtype, grad_stride, rounding_error);
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void stats(Address logits, int dtype, int64_t stride, int64_t rows, int64_t vocab, Address bias, Address ids,
           int64_t start, Address index, Address temperature, int64_t tokens, Address values, Address lse,
           const py::bytes& params, Where where) {
    gk::RowArgs args = logits_of(logits, dtype, stride, rows, vocab, bias, ids, start, index, lse, params);
    args.tokens = token_data({}, tokens, values);
    args.temperature = pointer<const float>(temperature);
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void gradient(Address logits, int dtype, int64_t stride, int64_t rows, int64_t vocab, Address bias, Address ids,
              int64_t start, Address index, Address temperature, int64_t tokens, Address values, Address lse,
              Address g_logp, Address g_entropy, Address grad, int grad_dtype, int64_t grad_stride,
              Address rounding_error, const py::bytes& params, Where where) {
    gk::RowArgs args = logits_of(logits, dtype, stride, rows, vocab, bias, ids, start, index, lse, params);
    args.tokens = token_data({}, tokens, values);
    args.temperature = pointer<const float>(temperature);
    args.g_logp = pointer<const float>(g_logp);
    args.g_entropy = pointer<const float>(g_entropy);
    add_gradient(args, grad, grad_dtype, grad_stride, rounding_error);
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::TokenArgs&, Where)>
void token_objective(int64_t rows, int64_t start, Address index, Address table, int64_t tokens, Address values,
                     const py::bytes& params, Where where) {
    const gk::TokenArgs args = {token_data(table, tokens, values),
                                {start, pointer<const int64_t>(index)},
                                rows,
                                from_bytes<gk::Params>(params)};
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

template <class Where, void (*kRun)(const gk::SequenceArgs&, Where)>
void sequence_objective(int64_t first, int64_t last, Address offsets, Address lengths, Address scored, Address table,
                        int64_t tokens, Address values, const py::bytes& params, Where where) {
    gk::SequenceArgs args = {};
    args.tokens = token_data(table, tokens, values);
    args.offsets = pointer<const int64_t>(offsets);
    args.lengths = pointer<const float>(lengths);
    args.scored = pointer<const uint8_t>(scored);
    args.first = first;
    args.last = last;
    args.params = from_bytes<gk::Params>(params);
    py::gil_scoped_release unlocked;
    kRun(args, where);
}

// `workspace`, here and below: the device's scratch memory, 0 where the backend needs none.
template <class Where, void (*kRun)(const gk::ReduceArgs&, Address workspace, Where)>
void reduce(int64_t tokens, Address values, int64_t sequences, Address offsets, Address scored, Address table,
            Address group_index, int64_t groups, Address numbers, const py::bytes& params, Address workspace,
            Where where) {
    gk::ReduceArgs args = {};
    args.tokens = token_data(table, tokens, values);
    args.scored = pointer<const uint8_t>(scored);
    args.offsets = pointer<const int64_t>(offsets);
    args.sequences = sequences;
    args.group_index = pointer<const int64_t>(group_index);
    args.groups = groups;
    args.sequence_sums = pointer<float>(numbers);  // one after the other, as contract.Sums has them
    args.group_sums = args.sequence_sums + sequences * gk::kColumnCount;
    args.totals = args.group_sums + groups * gk::kColumnCount;
    args.extrema = args.totals + gk::kColumnCount;
    args.params = from_bytes<gk::Params>(params);
    py::gil_scoped_release unlocked;
    kRun(args, workspace, where);
}

inline gk::PlanInput plan_input(Address data, int mode) {
    if (mode < 0 || mode >= gk::kPerWhatCount)
        throw std::invalid_argument("mode: 0 scalar, 1 per sequence, 2 per token");
    return {pointer<const float>(data), mode};
}

template <class Where, void (*kRun)(const gk::PlanArgs&, Address workspace, Where)>
void plan(int64_t tokens, int64_t sequences, int64_t row_length, Address cu_seqlens, Address ids, Address mask,
          int mask_bytes, Address advantages, int advantages_mode, Address old, Address ref, Address rollout,
          Address rollout_weights, int rollout_weights_mode, Address temperature, int temperature_mode,
          Address threshold, Address normalizer, const py::bytes& rules, Address table, Address values, Address lse,
          Address offsets, Address lengths, Address scored, Address active, Address clean_ids, Address order,
          Address counts, Address workspace, Where where) {
    gk::PlanArgs args = {};
    args.tokens = tokens;
    args.sequences = sequences;
    args.row_length = row_length;
    args.cu_seqlens = pointer<const int64_t>(cu_seqlens);
    args.ids = pointer<const int64_t>(ids);
    args.mask = pointer<const void>(mask);
    args.mask_bytes = mask_bytes;
    args.advantages = plan_input(advantages, advantages_mode);
    args.old = pointer<const float>(old);
    args.ref = pointer<const float>(ref);
    args.rollout = pointer<const float>(rollout);
    args.rollout_weights = plan_input(rollout_weights, rollout_weights_mode);
    args.temperature = plan_input(temperature, temperature_mode);
    args.threshold = pointer<const float>(threshold);
    args.normalizer = pointer<const float>(normalizer);
    args.rules = from_bytes<gk::PlanRules>(rules);
    args.table = pointer<float>(table);
    args.values = pointer<float>(values);
    args.lse = pointer<double>(lse);
    args.offsets = pointer<int64_t>(offsets);
    args.lengths = pointer<float>(lengths);
    args.scored = pointer<uint8_t>(scored);
    args.active = pointer<uint8_t>(active);
    args.clean_ids = pointer<int64_t>(clean_ids);
    args.order = pointer<int64_t>(order);
    args.counts = pointer<int64_t>(counts);
    if (args.mask && mask_bytes != 1 && mask_bytes != 4 && mask_bytes != 8)
        throw std::invalid_argument("a mask has elements of 1, 4 or 8 bytes");
    if (args.rules.aggregation < 0 || args.rules.aggregation >= gk::kAggregationCount)
        throw std::invalid_argument("rules: unknown aggregation");
    py::gil_scoped_release unlocked;
    kRun(args, workspace, where);
}

// The products over kept ids get the fields of KeptArgs or KeptPairs as one tuple, in their order.
inline gk::KeptArgs kept_args(const py::tuple& given) {
    const auto address = [&](int i) { return given[i].cast<Address>(); };
    const auto number = [&](int i) { return given[i].cast<int64_t>(); };
    gk::KeptArgs args = {};
    args.hidden = pointer<const void>(address(0));
    args.weight = pointer<const void>(address(1));
    args.bias = pointer<const float>(address(2));
    args.ids = pointer<const int32_t>(address(3));
    args.token_of = {number(4), pointer<const int64_t>(address(5))};
    args.rows = number(6);
    args.slots = number(7);
    args.tokens = number(8);
    args.vocab = number(9);
    args.width = number(10);
    args.hidden_row_stride = number(11);
    args.weight_row_stride = number(12);
    args.dtype = static_cast<int32_t>(number(13));
    return args;
}

inline gk::KeptPairs kept_pairs(const py::tuple& given) {
    const auto address = [&](int i) { return given[i].cast<Address>(); };
    const auto number = [&](int i) { return given[i].cast<int64_t>(); };
    gk::KeptPairs pairs = {};
    pairs.hidden = pointer<const void>(address(0));
    pairs.ids = pointer<const int32_t>(address(1));
    pairs.token_of = pointer<const int32_t>(address(2));
    pairs.dlogits = pointer<const float>(address(3));
    pairs.count = number(4);
    pairs.tokens = number(5);
    pairs.vocab = number(6);
    pairs.width = number(7);
    pairs.hidden_row_stride = number(8);
    pairs.dtype = static_cast<int32_t>(number(9));
    return pairs;
}

}  // namespace binding
