// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace binding {

using gk::cuda::HeadArgs;
using gk::cuda::Stream;

void take(Arguments& given, gk::PairsById<int64_t>& a) { given.read(a.starts, a.pairs); }

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

void kept_dweight(const gk::KeptPairs& pairs, const gk::PairsById<int64_t>& by_id, gk::KeptTarget target, bool add,
                  Stream stream) {
    target.add = add;
    gk::cuda::kept_dweight(pairs, by_id, target, stream);
}

}  // namespace binding

PYBIND11_MODULE(_cuda, m) {
    using binding::Bound;
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan_workspace", gk::cuda::plan_workspace);
    m.def("plan", Bound<gk::cuda::plan>::call);
    m.def("single_pass", Bound<gk::cuda::single_pass>::call);
    m.def("stats", Bound<gk::cuda::stats>::call);
    m.def("gradient", Bound<gk::cuda::gradient>::call);
    m.def("sparse_gradient", Bound<gk::cuda::sparse_gradient>::call);
    m.def("token_objective", Bound<gk::cuda::token_objective>::call);
    m.def("sequence_objective", Bound<gk::cuda::sequence_objective>::call);
    m.def("reduce_workspace", gk::cuda::reduce_workspace);
    m.def("reduce", Bound<gk::cuda::reduce>::call);
    m.def("scale", Bound<gk::cuda::scale>::call);
    m.def("kept_ids", Bound<gk::cuda::kept_ids>::call);
    m.def("kept_logits", Bound<gk::cuda::kept_logits>::call);
    m.def("kept_dhidden", Bound<gk::cuda::kept_dhidden>::call);
    m.def("kept_dweight", Bound<binding::kept_dweight>::call);
    m.def("supports_head", Bound<binding::supports_head>::call);
    m.def("head_workspace", Bound<binding::head_workspace>::call);
    m.def("linear_logp", Bound<gk::cuda::linear_logp>::call);
    m.def("anchored", Bound<gk::cuda::anchored>::call);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("image_for", gk::cuda::image_for);
}
