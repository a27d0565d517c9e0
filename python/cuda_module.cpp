// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace {

using namespace binding;
using gk::cuda::HeadArgs;
using gk::cuda::Stream;

void scale(const py::args& given) {
    void* x;
    int32_t dtype;
    int64_t count;
    const float* factor;
    Stream stream;
    Arguments(given).read(x, dtype, count, factor, stream);
    py::gil_scoped_release unlocked;
    gk::cuda::scale(x, dtype, count, factor, stream);
}

void kept_dweight(const py::args& given) {
    gk::KeptPairs pairs = {};
    gk::PairsById<int64_t> by_id = {};
    gk::KeptTarget target = {};
    Stream stream;
    Arguments(given).read(pairs, by_id.starts, by_id.pairs, target.data, target.dtype, target.row_stride, target.add,
                          stream);
    py::gil_scoped_release unlocked;
    gk::cuda::kept_dweight(pairs, by_id, target, stream);
}

// --- products with the softmax in their epilogue ---------------------------------------------------------------------

// What describes a product: the first arguments of every function here. Exponentials are null for log-probabilities
// alone. `rest` are the others.
template <class... T>
HeadArgs read_head(HeadArgs& a, const py::args& given, T&... rest) {
    Arguments(given).read(a.hidden, a.hidden_row_stride, a.weight, a.weight_row_stride, a.dtype, a.rows, a.width,
                          a.vocab, a.exponentials, a.exponentials_row_stride, rest...);
    return a;
}

bool supports_head(const py::args& given) {
    HeadArgs a = {};
    return gk::cuda::supports_head(read_head(a, given));
}

size_t head_workspace(const py::args& given) {
    HeadArgs a = {};
    return gk::cuda::head_workspace(read_head(a, given));
}

template <void (*kRun)(const HeadArgs&, void* workspace, Stream)>
void head(const py::args& given) {
    HeadArgs a = {};
    void* workspace;
    Stream stream;
    read_head(a, given, a.bias, a.ids, a.temperature, a.table, a.table_row_stride, a.scale, a.logp, a.lse, a.entropy,
              a.params, workspace, stream);
    py::gil_scoped_release unlocked;
    kRun(a, workspace, stream);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan_workspace", gk::cuda::plan_workspace);
    m.def("plan", plan<Stream, gk::cuda::plan>);
    m.def("single_pass", rows<Stream, gk::cuda::single_pass>);
    m.def("stats", rows<Stream, gk::cuda::stats>);
    m.def("gradient", rows<Stream, gk::cuda::gradient>);
    m.def("sparse_gradient", sparse_gradient<Stream, gk::cuda::sparse_gradient>);
    m.def("token_objective", token_objective<Stream, gk::cuda::token_objective>);
    m.def("sequence_objective", sequence_objective<Stream, gk::cuda::sequence_objective>);
    m.def("reduce_workspace", gk::cuda::reduce_workspace);
    m.def("reduce", reduce<Stream, gk::cuda::reduce>);
    m.def("scale", scale);
    m.def("kept_logits", kept_logits<Stream, gk::cuda::kept_logits>);
    m.def("kept_dhidden", kept_dhidden<Stream, gk::cuda::kept_dhidden>);
    m.def("kept_dweight", kept_dweight);
    m.def("supports_head", supports_head);
    m.def("head_workspace", head_workspace);
    m.def("linear_logp", head<gk::cuda::linear_logp>);
    m.def("anchored", head<gk::cuda::anchored>);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("image_for", gk::cuda::image_for);
}
