// What the bindings of the compiled backends share: a function of their C++ APIs for Python takes its arguments one by
// one, the fields of a struct in the order of its `take`. Tensors come as they are, or as the integers of their
// addresses, and give nothing but these; shapes and types are checked in Python (grpo_kernels/kernels/compiled), and
// the interpreter lock is released while a kernel runs. The last argument says where it runs: a number of threads, or a
// stream's address.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "args.h"

namespace binding {

namespace py = pybind11;

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

template <class T>
T checked(T number) {
    if (number == static_cast<T>(-1) && PyErr_Occurred()) throw py::error_already_set();
    return number;
}

template <class T>
std::enable_if_t<std::is_arithmetic_v<T>> take(Arguments& given, T& number) {
    PyObject* const next = given.next();
    if constexpr (std::is_same_v<T, bool>)
        number = checked(PyObject_IsTrue(next)) != 0;
    else if constexpr (std::is_floating_point_v<T>)
        number = static_cast<T>(checked(PyFloat_AsDouble(next)));
    else
        number = static_cast<T>(checked(PyLong_AsLongLong(next)));
}

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

inline void take(Arguments& given, gk::RowTokens& a) { given.read(a.start, a.index); }
inline void take(Arguments& given, gk::Transform& a) { given.read(a.logit_scale, a.softcap); }

// Of every row kernel: each gets null for what another one reads.
inline void take(Arguments& given, gk::RowArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.ids, a.token_of, a.temperature,
               a.logp, a.lse, a.entropy, a.dlogp, a.dentropy, a.grad, a.grad_dtype, a.grad_stride, a.rounding_error,
               a.params);
}

// A function of the C++ API, for Python.
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
