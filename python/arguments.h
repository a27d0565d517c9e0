// What the bindings of the compiled backends share: a function of the seam for Python takes its arguments one by one,
// the fields of a struct in the order of its `take`. Tensors come as they are, or as the integers of their addresses,
// and give nothing but these; shapes and types are checked in Python (grpo_kernels/backends), and the interpreter lock
// is released while a kernel runs. The last argument says where it runs: a number of threads, or a stream's address.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "args.h"

namespace binding {

namespace py = pybind11;

template <class T>
T checked(T number) {
    if (number == static_cast<T>(-1) && PyErr_Occurred()) throw py::error_already_set();
    return number;
}

class Arguments {
  public:
    explicit Arguments(const py::tuple& given) : given_(given) {}

    template <class... T>
    void read(T&... targets) {
        (take(*this, targets), ...);
    }

    // What is read is all that there is.
    template <class... T>
    void read_all(T&... targets) {
        read(targets...);
        if (next_ != PyTuple_GET_SIZE(given_.ptr())) refuse();
    }

    PyObject* next() {
        if (next_ == PyTuple_GET_SIZE(given_.ptr())) refuse();
        return PyTuple_GET_ITEM(given_.ptr(), next_++);
    }

  private:
    [[noreturn]] void refuse() const {
        throw std::invalid_argument("got " + std::to_string(given_.size()) + " arguments, read " +
                                    std::to_string(next_));
    }

    py::tuple given_;
    py::ssize_t next_ = 0;
};

// None is null, an integer itself, a tensor what its data_ptr() returns.
template <class T>
void take(Arguments& given, T*& pointer) {
    static PyObject* const method = PyUnicode_InternFromString("data_ptr");
    PyObject* const next = given.next();
    size_t address = 0;
    if (PyLong_Check(next)) {
        address = checked(PyLong_AsSize_t(next));
    } else if (next != Py_None) {
        const auto number = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(next, method));
        if (!number) throw py::error_already_set();
        address = checked(PyLong_AsSize_t(number.ptr()));
    }
    pointer = reinterpret_cast<T*>(address);
}
inline void take(Arguments& given, int64_t& number) { number = checked(PyLong_AsLongLong(given.next())); }
inline void take(Arguments& given, int32_t& number) {
    number = static_cast<int32_t>(checked(PyLong_AsLong(given.next())));
}
inline void take(Arguments& given, float& number) {
    number = static_cast<float>(checked(PyFloat_AsDouble(given.next())));
}
inline void take(Arguments& given, bool& flag) { flag = checked(PyObject_IsTrue(given.next())) != 0; }

// The values in the order of names.h, int32 and then float32.
template <class T>
void take_bytes(Arguments& given, T& values) {
    PyObject* const next = given.next();
    if (!PyBytes_Check(next) || static_cast<size_t>(PyBytes_GET_SIZE(next)) != sizeof values)
        throw std::invalid_argument("params, rules: wrong number of values");
    std::memcpy(&values, PyBytes_AS_STRING(next), sizeof values);
}
inline void take(Arguments& given, gk::Params& params) { take_bytes(given, params); }
inline void take(Arguments& given, gk::PlanRules& rules) { take_bytes(given, rules); }
inline void take(Arguments& given, gk::TeacherParams& params) { take_bytes(given, params); }

inline void take(Arguments& given, gk::TokenData& a) { given.read(a.table, a.count, a.values); }
inline void take(Arguments& given, gk::RowTokens& a) { given.read(a.start, a.index); }
inline void take(Arguments& given, gk::PlanInput& a) { given.read(a.data, a.per_what); }
inline void take(Arguments& given, gk::KeptRowArgs& a) {
    given.read(a.mask_ids, a.wide, a.mask_count, a.ends, a.sampled, a.own_first, a.own_count, a.vocab, a.token_of,
               a.rows, a.slots, a.ids, a.pair_tokens, a.columns, a.added);
}
inline void take(Arguments& given, gk::KeptTarget& a) { given.read(a.data, a.dtype, a.row_stride); }

// stats, gradient and single_pass: each gets null for what another one reads.
inline void take(Arguments& given, gk::RowArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.ids, a.token_of, a.temperature,
               a.tokens, a.lse, a.g_logp, a.g_entropy, a.grad, a.grad_dtype, a.grad_stride, a.rounding_error, a.params);
}
inline void take(Arguments& given, gk::SparseRows& a) {
    given.read(a.ids, a.values, a.counts, a.capacity, a.theta, a.first_id);
}
inline void take(Arguments& given, gk::TokenArgs& a) { given.read(a.rows, a.token_of, a.tokens, a.params); }
inline void take(Arguments& given, gk::SequenceArgs& a) {
    given.read(a.first, a.last, a.offsets, a.lengths, a.scored, a.tokens, a.params);
}
inline void take(Arguments& given, gk::ReduceArgs& a) {
    given.read(a.tokens, a.sequences, a.offsets, a.scored, a.group_index, a.groups, a.sequence_sums, a.params);
    a.group_sums = a.sequence_sums + a.sequences * gk::kColumnCount;  // one after the other, as contract.Sums has them
    a.totals = a.group_sums + a.groups * gk::kColumnCount;
    a.extrema = a.totals + gk::kColumnCount;
}
inline void take(Arguments& given, gk::PlanArgs& a) {
    given.read(a.tokens, a.sequences, a.row_length, a.cu_seqlens, a.ids, a.mask, a.mask_bytes, a.advantages, a.old,
               a.ref, a.rollout, a.rollout_weights, a.temperature, a.threshold, a.normalizer, a.rules, a.table,
               a.values, a.lse, a.offsets, a.lengths, a.scored, a.active, a.clean_ids, a.order, a.counts);
}

// Their fields come together, as a tuple.
inline Arguments nested(Arguments& given) {
    return Arguments(py::reinterpret_borrow<py::object>(given.next()).cast<py::tuple>());
}
inline void take(Arguments& given, gk::KeptArgs& a) {
    nested(given).read_all(a.hidden, a.weight, a.bias, a.ids, a.token_of, a.rows, a.slots, a.width, a.hidden_row_stride,
                           a.weight_row_stride, a.dtype);
}
inline void take(Arguments& given, gk::TeacherArgs& a) {
    nested(given).read_all(a.logits, a.logits_dtype, a.logits_stride, a.bias, a.weight, a.offset, a.lse, a.params);
}
inline void take(Arguments& given, gk::KeptPairs& a) {
    nested(given).read_all(a.hidden, a.ids, a.token_of, a.dlogits, a.count, a.vocab, a.width, a.hidden_row_stride,
                           a.dtype);
}

// A function of the seam, for Python.
template <auto kRun>
struct Bound;
template <class Result, class... T, Result (*kRun)(T...)>
struct Bound<kRun> {
    static Result call(const py::args& given) {
        std::tuple<std::decay_t<T>...> values = {};
        std::apply([&](auto&... each) { Arguments(given).read_all(each...); }, values);
        py::gil_scoped_release unlocked;
        return std::apply(kRun, values);
    }
};

}  // namespace binding
