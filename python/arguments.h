// What the bindings of the compiled backends share: a function of their C++ APIs for Python takes its arguments one by
// one, the fields of a struct in the order of its `take`. Tensors come as they are, or as the integers of their
// addresses, and give nothing but these; shapes and types are checked in Python (grpo_kernels/kernels/compiled), and
// the interpreter lock is released while a kernel runs. The last argument says where it runs: a number of threads, or a
// stream's address.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <tuple>

#include "args.h"

namespace binding {

namespace py = pybind11;

class Arguments {
  public:
    explicit Arguments(const py::args& values) : values_(values) {}

    template <class... T>
    void read(T&... targets) {
        (take(*this, targets), ...);
    }

    // What is read is all that there is.
    template <class... T>
    void read_all(T&... targets) {
        read(targets...);
        if (next_ != values_.size()) refuse_count();
    }

    py::handle next() {
        if (next_ == values_.size()) refuse_count();
        return PyTuple_GET_ITEM(values_.ptr(), next_++);
    }

    // Converts what `next` returned last as pybind11 does, which refuses fractions for integers, and integers beyond T.
    template <class T>
    T convert(py::handle value) const {
        py::detail::make_caster<T> caster;
        if (caster.load(value, true)) return caster;
        const std::string shown = py::str(py::repr(value));
        throw py::type_error("argument " + std::to_string(next_) + ": " + shown + " does not fit a C++ " +
                             py::type_id<T>());
    }

  private:
    [[noreturn]] void refuse_count() const {
        throw py::value_error("got " + std::to_string(values_.size()) + " arguments, read " + std::to_string(next_));
    }

    const py::args& values_;
    size_t next_ = 0;
};

template <class T>
void take(Arguments& given, T& number) {
    number = given.convert<T>(given.next());
}

// None is null, an integer itself, a tensor what its data_ptr() returns.
template <class T>
void take(Arguments& given, T*& pointer) {
    auto value = py::reinterpret_borrow<py::object>(given.next());
    if (!value.is_none() && !PyLong_Check(value.ptr())) value = value.attr("data_ptr")();
    pointer = value.is_none() ? nullptr : reinterpret_cast<T*>(given.convert<uintptr_t>(value));
}

inline void take(Arguments& given, gk::RowTokens& a) { given.read(a.start, a.index); }
inline void take(Arguments& given, gk::Transform& a) { given.read(a.logit_scale, a.softcap); }

// Of every row kernel: each gets null for what another one reads.
inline void take(Arguments& given, gk::RowArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.ids, a.token_of, a.temperature,
               a.logp, a.lse, a.entropy, a.dlogp, a.dentropy, a.grad, a.grad_dtype, a.grad_stride, a.params);
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
