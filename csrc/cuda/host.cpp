// api.h without the products: which kernel, how many blocks of which size, how much shared memory.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "api.h"
#include "driver.h"
#include "kernels.h"

namespace gk::cuda {

namespace {

constexpr int kWarpThreads = 32, kVectorBytes = 16;
constexpr int kVectorsPerThread = 8;  // that a thread should have at least: two groups of loads
constexpr const char* kSuffixes[] = {"f32", "bf16", "f16"};

int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }
int64_t round_up(int64_t x, int64_t to) { return divide_up(x, to) * to; }
int element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// ---- rows -----------------------------------------------------------------------------------------------------------
std::string kernel_name(const char* what, const RowArgs& args, bool gradient) {
    std::string name = std::string("gk_") + what + "_" + kSuffixes[args.logits_dtype];
    if (gradient) name += std::string("_") + kSuffixes[args.grad_dtype];
    return name;
}

LaunchConfig block_per_row(const RowArgs& args, Stream stream) {
    const int64_t per_vector = kVectorBytes / element_size(args.logits_dtype);
    const int64_t vectors = divide_up(args.vocab + per_vector - 1, per_vector);  // wherever between two the row starts
    const int64_t wanted = round_up(divide_up(vectors, kVectorsPerThread), kWarpThreads);
    const int64_t threads = std::clamp<int64_t>(wanted, 2 * kWarpThreads, kSweepThreads);
    return {static_cast<unsigned>(args.rows), static_cast<unsigned>(threads), kExchangeBytes, 1, stream};
}

bool overlaps(const RowArgs& args) { return args.grad == args.logits && args.grad_dtype != args.logits_dtype; }

}  // namespace

void stats(const RowArgs& args, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("stats", args, false).c_str(), block_per_row(args, stream), RowLaunch{args, 0});
}

void gradient(const RowArgs& args, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("gradient", args, true).c_str(), block_per_row(args, stream), RowLaunch{args, overlaps(args)});
}

void exponentials(const RowArgs& args, const Product& product, const RowScales& scales, Stream stream) {
    if (product.dtype != kBfloat16) throw std::invalid_argument("exponentials: hidden and weight must be bfloat16");
    if (args.rows == 0) return;
    const ExponentialLaunch call = {args, product, scales, overlaps(args)};
    launch(kernel_name("exponentials", args, false).c_str(), block_per_row(args, stream), call);
    repair_rows(call, stream);
}

void repair_rows(const ExponentialLaunch& call, Stream stream) {
    const int64_t blocks = std::min<int64_t>(call.rows.rows, int64_t{kRepairBlocks} * current_device().multiprocessors);
    launch("gk_repair_rows", {static_cast<unsigned>(blocks), kRepairThreads, kRepairShared, 1, stream}, call);
}

// ---- the loss -------------------------------------------------------------------------------------------------------
void objective(const ObjectiveArgs& args, Stream stream) {
    const int64_t tokens = divide_up(args.rows, kObjectiveThreads), sequences = std::max<int64_t>(args.sequences, 1);
    const auto blocks = static_cast<unsigned>(args.sums ? sequences : tokens);
    if (blocks > 0) launch("gk_objective", {blocks, kObjectiveThreads, kObjectiveShared, 1, stream}, args);
}

// ---- finished gradients ---------------------------------------------------------------------------------------------
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream) {
    if (count == 0) return;
    const int64_t tiles = divide_up(count * element_size(dtype), kScaleTile);
    const int64_t blocks = std::min<int64_t>(tiles, int64_t{kScaleBlocks} * current_device().multiprocessors);
    const LaunchConfig config = {static_cast<unsigned>(blocks), kScaleThreads, 0, 1, stream};
    launch((std::string("gk_scale_") + kSuffixes[dtype]).c_str(), config, ScaleArgs{x, factor, count});
}

void scale_rows(const RowArgs& args, const Product& product, const RowScales& scales, Stream stream) {
    if (args.rows == 0) return;
    const LaunchConfig config = {static_cast<unsigned>(args.rows), kScaleThreads, 0, 1, stream};
    launch(kernel_name("scale_rows", args, true).c_str(), config, ExponentialLaunch{args, product, scales, 0});
}

}  // namespace gk::cuda
