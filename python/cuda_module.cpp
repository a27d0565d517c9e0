// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace binding {

using gk::cuda::HeadArgs;

// What describes a product with the softmax in its epilogue. Exponentials are null for log-probabilities alone.
struct Product {
    HeadArgs args;
};
void take(Arguments& given, Product& product) {
    HeadArgs& a = product.args;
    given.read(a.hidden, a.hidden_row_stride, a.weight, a.weight_row_stride, a.dtype, a.rows, a.width, a.vocab,
               a.exponentials, a.exponentials_row_stride);
}
void take(Arguments& given, HeadArgs& a) {
    Product product = {};
    take(given, product);
    a = product.args;
    given.read(a.bias, a.ids, a.temperature, a.table, a.table_row_stride, a.scale, a.logp, a.lse, a.entropy, a.params);
}

bool supports_head(const Product& product) { return gk::cuda::supports_head(product.args); }

size_t head_workspace(const Product& product) { return gk::cuda::head_workspace(product.args); }

}  // namespace binding

PYBIND11_MODULE(_cuda, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("stats", Bound<gk::cuda::stats>::call);
    m.def("gradient", Bound<gk::cuda::gradient>::call);
    m.def("scale", Bound<gk::cuda::scale>::call);
    m.def("supports_head", Bound<binding::supports_head>::call);
    m.def("head_workspace", Bound<binding::head_workspace>::call);
    m.def("linear_logp", Bound<gk::cuda::linear_logp>::call);
    m.def("anchored", Bound<gk::cuda::anchored>::call);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("image_for", gk::cuda::image_for);
}
