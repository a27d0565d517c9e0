// grpo_kernels._cuda: the CUDA kernels for Python. See arguments.h; functions queue kernels on a stream. Importing the
// module touches neither driver nor device; what they and this build are is asked for with the functions at the end.
#include "arguments.h"
#include "cuda/api.h"
#include "cuda/driver.h"

namespace {

using namespace binding;
using gk::cuda::Stream;

template <class Args, void (*kRun)(const Args&, Stream)>
void on_stream(const Args& args, Address stream) {
    kRun(args, pointer<void>(stream));
}

void run_plan(const gk::PlanArgs& args, Address workspace, Address stream) {
    gk::cuda::plan(args, pointer<void>(workspace), pointer<void>(stream));
}

void run_reduce(const gk::ReduceArgs& args, Address workspace, Address stream) {
    gk::cuda::reduce(args, pointer<void>(workspace), pointer<void>(stream));
}

void group_statistics(Address rewards, Address group_index, int64_t count, int64_t groups, int scale, int baseline,
                      int64_t ddof, double eps, Address advantages, Address mean, Address std, Address stream) {
    py::gil_scoped_release unlocked;
    gk::cuda::group_statistics(pointer<const float>(rewards), pointer<const int64_t>(group_index), count, groups, scale,
                               baseline, ddof, eps, pointer<float>(advantages), pointer<float>(mean),
                               pointer<float>(std), pointer<void>(stream));
}

void scale(Address x, int dtype, int64_t count, Address factor, Address stream) {
    py::gil_scoped_release unlocked;
    gk::cuda::scale(pointer<void>(x), dtype, count, pointer<const float>(factor), pointer<void>(stream));
}

void kept_logits(const py::tuple& given, Address logits, Address stream) {
    const gk::KeptArgs args = kept_args(given);
    py::gil_scoped_release unlocked;
    gk::cuda::kept_logits(args, pointer<float>(logits), pointer<void>(stream));
}

void kept_dhidden(const py::tuple& given, Address dlogits, Address target, int64_t row_stride, int dtype,
                  Address stream) {
    const gk::KeptArgs args = kept_args(given);
    py::gil_scoped_release unlocked;
    gk::cuda::kept_dhidden(args, pointer<const float>(dlogits), {pointer<void>(target), row_stride, dtype, false},
                           pointer<void>(stream));
}

void kept_dweight(const py::tuple& given, Address starts, Address order, Address target, int64_t row_stride, int dtype,
                  bool add, Address stream) {
    const gk::KeptPairs pairs = kept_pairs(given);
    const gk::PairsById<int64_t> by_id = {pointer<const int64_t>(starts), pointer<const int64_t>(order)};
    py::gil_scoped_release unlocked;
    gk::cuda::kept_dweight(pairs, by_id, {pointer<void>(target), row_stride, dtype, add}, pointer<void>(stream));
}

// --- products with the softmax in their epilogue ---------------------------------------------------------------------

gk::cuda::HeadArgs head_of(Address hidden, int64_t hidden_row_stride, Address weight, int64_t weight_row_stride,
                           int dtype, int64_t rows, int64_t width, int64_t vocab, Address exponentials,
                           int64_t exponentials_row_stride) {
    gk::cuda::HeadArgs args = {};
    args.hidden = pointer<const void>(hidden);
    args.hidden_row_stride = hidden_row_stride;
    args.weight = pointer<const void>(weight);
    args.weight_row_stride = weight_row_stride;
    args.dtype = dtype;
    args.rows = rows;
    args.width = width;
    args.vocab = vocab;
    args.exponentials = pointer<void>(exponentials);
    args.exponentials_row_stride = exponentials_row_stride;
    return args;
}

void complete(gk::cuda::HeadArgs& args, Address bias, Address ids, Address temperature, Address logp, Address lse,
              Address entropy, const py::bytes& params) {
    args.bias = pointer<const float>(bias);
    args.ids = pointer<const int64_t>(ids);
    args.temperature = pointer<const float>(temperature);
    args.logp = pointer<float>(logp);
    args.lse = pointer<double>(lse);
    args.entropy = pointer<float>(entropy);
    args.params = from_bytes<gk::Params>(params);
}

// Exponentials at 0: for log-probabilities alone.
bool supports_head(Address hidden, int64_t hidden_row_stride, Address weight, int64_t weight_row_stride, int dtype,
                   int64_t rows, int64_t width, int64_t vocab, Address exponentials, int64_t exponentials_row_stride) {
    return gk::cuda::supports_head(head_of(hidden, hidden_row_stride, weight, weight_row_stride, dtype, rows, width,
                                           vocab, exponentials, exponentials_row_stride));
}

size_t head_workspace(Address hidden, int64_t hidden_row_stride, Address weight, int64_t weight_row_stride, int dtype,
                      int64_t rows, int64_t width, int64_t vocab, Address exponentials,
                      int64_t exponentials_row_stride) {
    return gk::cuda::head_workspace(head_of(hidden, hidden_row_stride, weight, weight_row_stride, dtype, rows, width,
                                            vocab, exponentials, exponentials_row_stride));
}

void linear_logp(Address hidden, int64_t hidden_row_stride, Address weight, int64_t weight_row_stride, int dtype,
                 int64_t rows, int64_t width, int64_t vocab, Address exponentials, int64_t exponentials_row_stride,
                 Address bias, Address ids, Address temperature, Address logp, Address lse, Address entropy,
                 const py::bytes& params, Address workspace, Address stream) {
    gk::cuda::HeadArgs args = head_of(hidden, hidden_row_stride, weight, weight_row_stride, dtype, rows, width, vocab,
                                      exponentials, exponentials_row_stride);
    complete(args, bias, ids, temperature, logp, lse, entropy, params);
    py::gil_scoped_release unlocked;
    gk::cuda::linear_logp(args, pointer<void>(workspace), pointer<void>(stream));
}

void anchored(Address hidden, int64_t hidden_row_stride, Address weight, int64_t weight_row_stride, int dtype,
              int64_t rows, int64_t width, int64_t vocab, Address exponentials, int64_t exponentials_row_stride,
              Address bias, Address ids, Address temperature, Address table, int64_t table_row_stride, Address scale,
              Address logp, Address lse, Address entropy, const py::bytes& params, Address workspace, Address stream) {
    gk::cuda::HeadArgs args = head_of(hidden, hidden_row_stride, weight, weight_row_stride, dtype, rows, width, vocab,
                                      exponentials, exponentials_row_stride);
    complete(args, bias, ids, temperature, logp, lse, entropy, params);
    args.table = pointer<const float>(table);
    args.table_row_stride = table_row_stride;
    args.scale = pointer<float>(scale);
    py::gil_scoped_release unlocked;
    gk::cuda::anchored(args, pointer<void>(workspace), pointer<void>(stream));
}

py::dict device() {
    const gk::cuda::Device& found = gk::cuda::current_device();
    py::dict facts;
    facts["capability"] = found.capability;
    facts["multiprocessors"] = found.multiprocessors;
    facts["shared_per_block"] = found.shared_per_block;
    facts["shared_per_multiprocessor"] = found.shared_per_multiprocessor;
    facts["l2_bytes"] = found.l2_bytes;
    return facts;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.attr("INTERFACE") = gk::kInterface;
    m.def("plan_workspace", gk::cuda::plan_workspace);
    m.def("plan", plan<Address, run_plan>);
    m.def("single_pass", single_pass<Address, on_stream<gk::RowArgs, gk::cuda::single_pass>>);
    m.def("stats", stats<Address, on_stream<gk::RowArgs, gk::cuda::stats>>);
    m.def("gradient", gradient<Address, on_stream<gk::RowArgs, gk::cuda::gradient>>);
    m.def("token_objective", token_objective<Address, on_stream<gk::TokenArgs, gk::cuda::token_objective>>);
    m.def("sequence_objective", sequence_objective<Address, on_stream<gk::SequenceArgs, gk::cuda::sequence_objective>>);
    m.def("reduce_workspace", gk::cuda::reduce_workspace);
    m.def("reduce", reduce<Address, run_reduce>);
    m.def("group_statistics", group_statistics);
    m.def("scale", scale);
    m.def("kept_logits", kept_logits);
    m.def("kept_dhidden", kept_dhidden);
    m.def("kept_dweight", kept_dweight);
    m.def("supports_head", supports_head);
    m.def("head_workspace", head_workspace);
    m.def("linear_logp", linear_logp);
    m.def("anchored", anchored);

    m.def("built_for_cuda", gk::cuda::built_for_cuda);
    m.def("built_architectures", gk::cuda::built_architectures);
    m.def("driver_cuda", gk::cuda::driver_cuda);
    m.def("device_count", gk::cuda::device_count);
    m.def("image_for", gk::cuda::image_for);
    m.def("device", device);
}
