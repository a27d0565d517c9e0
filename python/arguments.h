// What the bindings of the compiled backends share: a function of their C++ APIs for Python takes its arguments one by
// one, the fields of a struct in the order of its `take`. Tensors come as they are, or as the integers of their
// addresses, and give nothing but these; shapes and types are checked in Python (grpo_kernels/kernels/compiled), and
// the interpreter lock is released while a kernel runs. The last argument says where it runs: a number of threads, or a
// stream's address.
//
// Only Python's stable ABI is used (Py_LIMITED_API, tools/kernel_build/host.py): a module serves every later Python.
#pragma once
#include <Python.h>

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "args.h"

namespace binding {

struct PythonError {};  // thrown where Python has an exception set

class Arguments {
  public:
    Arguments(PyObject* const* given, Py_ssize_t count) : given_(given), count_(count) {}

    template <class... T>
    void read(T&... targets) {
        (take(*this, targets), ...);
    }

    // What is read is all that there is.
    template <class... T>
    void read_all(T&... targets) {
        read(targets...);
        if (next_ != count_) refuse();
    }

    PyObject* next() {
        if (next_ == count_) refuse();
        return given_[next_++];
    }

  private:
    [[noreturn]] void refuse() const {
        throw std::invalid_argument("got " + std::to_string(count_) + " arguments, read " + std::to_string(next_));
    }

    PyObject* const* given_;
    Py_ssize_t count_;
    Py_ssize_t next_ = 0;
};

template <class T>
T checked(T number) {
    if (number == static_cast<T>(-1) && PyErr_Occurred()) throw PythonError();
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
        PyObject* const number = PyObject_CallMethodObjArgs(next, method, nullptr);
        if (number == nullptr) throw PythonError();
        address = PyLong_AsSize_t(number);
        Py_DECREF(number);
        checked(address);
    }
    pointer = reinterpret_cast<T*>(address);
}

// A string, valid during the call.
inline void take(Arguments& given, const char*& text) {
    text = PyUnicode_AsUTF8AndSize(given.next(), nullptr);
    if (text == nullptr) throw PythonError();
}

inline void take(Arguments& given, gk::RowTokens& a) { given.read(a.start, a.index); }
inline void take(Arguments& given, gk::Transform& a) { given.read(a.logit_scale, a.softcap); }

// Of every row kernel: each gets null for what another one reads.
inline void take(Arguments& given, gk::RowArgs& a) {
    given.read(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.ids, a.token_of, a.temperature,
               a.logp, a.lse, a.entropy, a.dlogp, a.dentropy, a.grad, a.grad_dtype, a.grad_stride, a.params);
}

inline PyObject* to_python(bool result) { return PyBool_FromLong(result); }
inline PyObject* to_python(int result) { return PyLong_FromLong(result); }
inline PyObject* to_python(size_t result) { return PyLong_FromSize_t(result); }
inline PyObject* to_python(const char* result) { return PyUnicode_FromString(result); }

// Releases the interpreter lock while it lives.
class Unlocked {
  public:
    Unlocked() : thread_(PyEval_SaveThread()) {}
    ~Unlocked() { PyEval_RestoreThread(thread_); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* const thread_;
};

template <auto kRun>
struct Bound;
template <class Result, class... T, Result (*kRun)(T...)>
struct Bound<kRun> {
    static Result run(std::tuple<std::decay_t<T>...>& values) {
        Unlocked unlocked;
        return std::apply(kRun, values);
    }

    static PyObject* call(PyObject* /* the module */, PyObject* const* given, Py_ssize_t count) noexcept {
        try {
            std::tuple<std::decay_t<T>...> values = {};
            std::apply([&](auto&... each) { Arguments(given, count).read_all(each...); }, values);
            if constexpr (std::is_void_v<Result>) {
                run(values);
                return Py_NewRef(Py_None);
            } else {
                return to_python(run(values));
            }
        } catch (const PythonError&) {
        } catch (const std::invalid_argument& error) {
            PyErr_SetString(PyExc_ValueError, error.what());
        } catch (const std::bad_alloc& error) {
            PyErr_SetString(PyExc_MemoryError, error.what());
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        return nullptr;
    }
};

// A function of the C++ API, for Python.
template <auto kRun>
PyMethodDef function(const char* name) {
    auto* const call = reinterpret_cast<void (*)()>(Bound<kRun>::call);
    return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL, nullptr};
}

inline int add_interface(PyObject* module) { return PyModule_AddIntConstant(module, "INTERFACE", gk::kInterface); }

// What PyInit_<name> returns; `functions` end with an empty one.
inline PyObject* define_module(const char* name, PyMethodDef* functions) {
    static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(add_interface)}, {0, nullptr}};
    static PyModuleDef definition = {
        PyModuleDef_HEAD_INIT, name, nullptr, 0, functions, slots, nullptr, nullptr, nullptr,
    };
    return PyModuleDef_Init(&definition);
}

}  // namespace binding
