// What the bindings of the compiled backends share: each function reads its arguments in their order into the structs
// of the kernels. Tensors come as they are, or as the integers of their addresses, and give nothing but these; shapes
// and types are checked in Python (grpo_kernels/backends), and the interpreter lock is released while a kernel runs.
// The last argument is `Where` it runs: a number of threads, or the address of a stream.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "args.h"

namespace binding {

namespace py = pybind11;

class Arguments {
  public:
    explicit Arguments(const py::tuple& given) : given_(given) {}

    template <class... T>
    void read(T&... targets) {
        if (given_.size() != sizeof...(targets))
            throw std::invalid_argument("expected " + std::to_string(sizeof...(targets)) + " arguments, got " +
                                        std::to_string(given_.size()));
        (take(targets), ...);
    }

  private:
    PyObject* next() { return PyTuple_GET_ITEM(given_.ptr(), next_++); }

    // None is null, an integer itself, a tensor what its data_ptr() returns.
    template <class T>
    void take(T*& pointer) {
        static PyObject* const method = PyUnicode_InternFromString("data_ptr");
        PyObject* const given = next();
        size_t address = 0;
        if (PyLong_Check(given)) {
            address = checked(PyLong_AsSize_t(given));
        } else if (given != Py_None) {
            const auto number = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(given, method));
            if (!number) throw py::error_already_set();
            address = checked(PyLong_AsSize_t(number.ptr()));
        }
        pointer = reinterpret_cast<T*>(address);
    }
    void take(int64_t& number) { number = checked(PyLong_AsLongLong(next())); }
    void take(int32_t& number) { number = static_cast<int32_t>(checked(PyLong_AsLong(next()))); }
    void take(float& number) { number = static_cast<float>(checked(PyFloat_AsDouble(next()))); }
    void take(bool& flag) { flag = checked(PyObject_IsTrue(next())) != 0; }
    void take(gk::Params& params) { take_bytes(params); }
    void take(gk::PlanRules& rules) { take_bytes(rules); }
    void take(gk::TeacherParams& params) { take_bytes(params); }

    // Some fields of a struct come together, as a tuple.
    void take(gk::KeptArgs& kept) {
        nested().read(kept.hidden, kept.weight, kept.bias, kept.ids, kept.token_of.start, kept.token_of.index,
                      kept.rows, kept.slots, kept.width, kept.hidden_row_stride, kept.weight_row_stride, kept.dtype);
    }
    void take(gk::TeacherArgs& teacher) {
        nested().read(teacher.logits, teacher.logits_dtype, teacher.logits_stride, teacher.bias, teacher.weight,
                      teacher.offset, teacher.lse, teacher.params);
    }
    void take(gk::KeptPairs& pairs) {
        nested().read(pairs.hidden, pairs.ids, pairs.token_of, pairs.dlogits, pairs.count, pairs.vocab, pairs.width,
                      pairs.hidden_row_stride, pairs.dtype);
    }
    Arguments nested() { return Arguments(py::reinterpret_borrow<py::object>(next()).cast<py::tuple>()); }

    // The values in the order of names.h, int32 and then float32.
    template <class T>
    void take_bytes(T& values) {
        PyObject* const given = next();
        if (!PyBytes_Check(given) || static_cast<size_t>(PyBytes_GET_SIZE(given)) != sizeof values)
            throw std::invalid_argument("params, rules: wrong number of values");
        std::memcpy(&values, PyBytes_AS_STRING(given), sizeof values);
    }

    template <class T>
    static T checked(T number) {
        if (number == static_cast<T>(-1) && PyErr_Occurred()) throw py::error_already_set();
        return number;
    }

    py::tuple given_;
    py::ssize_t next_ = 0;
};

// stats, gradient and single_pass: each gets null for what another one reads. `others` come after them.
template <class... Others>
gk::RowArgs row_args(const py::args& given, Others&... others) {
    gk::RowArgs a = {};
    Arguments(given).read(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.ids, a.token_of.start,
                          a.token_of.index, a.temperature, a.tokens.table, a.tokens.count, a.tokens.values, a.lse,
                          a.g_logp, a.g_entropy, a.grad, a.grad_dtype, a.grad_stride, a.rounding_error, a.params,
                          others...);
    return a;
}

template <class Where, void (*kRun)(const gk::RowArgs&, Where)>
void rows(const py::args& given) {
    Where where;
    const gk::RowArgs a = row_args(given, where);
    py::gil_scoped_release unlocked;
    kRun(a, where);
}

template <class Where, void (*kRun)(const gk::RowArgs&, const gk::SparseRows&, Where)>
void sparse_gradient(const py::args& given) {
    gk::SparseRows out = {};
    Where where;
    const gk::RowArgs a =
        row_args(given, out.ids, out.values, out.counts, out.capacity, out.theta, out.first_id, where);
    py::gil_scoped_release unlocked;
    kRun(a, out, where);
}

template <class Where, void (*kRun)(const gk::TokenArgs&, Where)>
void token_objective(const py::args& given) {
    gk::TokenArgs a = {};
    Where where;
    Arguments(given).read(a.rows, a.token_of.start, a.token_of.index, a.tokens.table, a.tokens.count, a.tokens.values,
                          a.params, where);
    py::gil_scoped_release unlocked;
    kRun(a, where);
}

template <class Where, void (*kRun)(const gk::SequenceArgs&, Where)>
void sequence_objective(const py::args& given) {
    gk::SequenceArgs a = {};
    Where where;
    Arguments(given).read(a.first, a.last, a.offsets, a.lengths, a.scored, a.tokens.table, a.tokens.count,
                          a.tokens.values, a.params, where);
    py::gil_scoped_release unlocked;
    kRun(a, where);
}

// `workspace`, here and below: the device's scratch memory, null where the backend needs none.
template <class Where, void (*kRun)(const gk::ReduceArgs&, void* workspace, Where)>
void reduce(const py::args& given) {
    gk::ReduceArgs a = {};
    void* workspace;
    Where where;
    Arguments(given).read(a.tokens.table, a.tokens.count, a.tokens.values, a.sequences, a.offsets, a.scored,
                          a.group_index, a.groups, a.sequence_sums, a.params, workspace, where);
    a.group_sums = a.sequence_sums + a.sequences * gk::kColumnCount;  // one after the other, as contract.Sums has them
    a.totals = a.group_sums + a.groups * gk::kColumnCount;
    a.extrema = a.totals + gk::kColumnCount;
    py::gil_scoped_release unlocked;
    kRun(a, workspace, where);
}

template <class Where, void (*kRun)(const gk::PlanArgs&, void* workspace, Where)>
void plan(const py::args& given) {
    gk::PlanArgs a = {};
    void* workspace;
    Where where;
    Arguments(given).read(a.tokens, a.sequences, a.row_length, a.cu_seqlens, a.ids, a.mask, a.mask_bytes,
                          a.advantages.data, a.advantages.per_what, a.old, a.ref, a.rollout, a.rollout_weights.data,
                          a.rollout_weights.per_what, a.temperature.data, a.temperature.per_what, a.threshold,
                          a.normalizer, a.rules, a.table, a.values, a.lse, a.offsets, a.lengths, a.scored, a.active,
                          a.clean_ids, a.order, a.counts, workspace, where);
    py::gil_scoped_release unlocked;
    kRun(a, workspace, where);
}

template <class Where, void (*kRun)(const gk::KeptArgs&, float* logits, Where)>
void kept_logits(const py::args& given) {
    gk::KeptArgs kept = {};
    float* logits;
    Where where;
    Arguments(given).read(kept, logits, where);
    py::gil_scoped_release unlocked;
    kRun(kept, logits, where);
}

template <class Where, void (*kRun)(const gk::KeptArgs&, const float* dlogits, const gk::KeptTarget&, Where)>
void kept_dhidden(const py::args& given) {
    gk::KeptArgs kept = {};
    gk::KeptTarget target = {};
    const float* dlogits;
    Where where;
    Arguments(given).read(kept, dlogits, target.data, target.dtype, target.row_stride, where);
    py::gil_scoped_release unlocked;
    kRun(kept, dlogits, target, where);
}

}  // namespace binding
