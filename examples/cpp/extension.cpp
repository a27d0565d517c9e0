// The CPU kernels in an extension module of your own, by pybind11: log-probabilities of sampled ids from rows of
// logits, arrays of NumPy in and out.
//
//     python examples/cpp/build.py --extension built      compiles it with the kernels into the folder `built`
//     PYTHONPATH=built python -c "import extension, numpy; print(extension.logps(numpy.zeros((1, 9)), [4]))"
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <thread>
#include <vector>

#include "cpu/api.h"

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// (N, V) float32 and (N,) int64 to (N,) float32, in nats.
static Array<float> logps(const Array<float>& logits, const Array<int64_t>& ids, float temperature) {
    if (logits.ndim() != 2 || ids.ndim() != 1 || ids.shape(0) != logits.shape(0))
        throw py::value_error("expected logits of (N, V) and N ids");
    const py::ssize_t rows = logits.shape(0), vocab = logits.shape(1);
    for (py::ssize_t row = 0; row < rows; row++)
        if (ids.at(row) < 0 || ids.at(row) >= vocab) throw py::value_error("expected ids from 0 to V - 1");
    Array<float> logp(rows), entropy(rows);
    Array<double> lse(rows);
    const std::vector<float> temperatures(rows, temperature);  // of each row
    gk::RowArgs args = {};
    args.logits = logits.data();
    args.logits_dtype = gk::kFloat32;
    args.logits_stride = args.vocab = vocab;
    args.rows = rows;
    args.ids = ids.data();
    args.temperature = temperatures.data();
    args.logp = logp.mutable_data();
    args.lse = lse.mutable_data();
    args.entropy = entropy.mutable_data();
    args.params = {1.0f, 0.0f};
    py::gil_scoped_release unlocked;
    gk::stats(args, {}, static_cast<int>(std::thread::hardware_concurrency()));
    return logp;
}

PYBIND11_MODULE(extension, m) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) gk::set_cpu_isa("avx2");
#endif
    m.def("logps", logps, py::arg("logits"), py::arg("ids"), py::arg("temperature") = 1.0f);
}
