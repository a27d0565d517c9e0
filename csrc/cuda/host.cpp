// api.h without the products: which kernel, how many blocks of which size, how much shared memory.
#include <algorithm>
#include <string>

#include "api.h"
#include "driver.h"
#include "kernels.h"

namespace gk::cuda {

namespace {

constexpr int kWarpThreads = 32, kVectorBytes = 16;
constexpr int kVectorsPerThread = 8;  // that a thread should have at least: two groups of loads
constexpr int kPlanLoads = 4;         // tokens that a thread of plan_sequence has at least, of its masks
constexpr const char* kSuffixes[kDTypeCount] = {"f32", "bf16", "f16"};

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

void sparse_gradient(const RowArgs& args, const SparseRows& out, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("sparse_gradient", args, false).c_str(), block_per_row(args, stream), SparseLaunch{args, out});
}

// The table has the temperature and the weight of the entropy.
void single_pass(const RowArgs& given, Stream stream) {
    RowArgs args = given;
    args.temperature = args.tokens.table + kTemperature * args.tokens.count;
    stats(args, stream);  // with the objective behind them
    if (!args.grad) return;
    args.g_logp = args.tokens.values + kTokenGLogp * args.tokens.count;
    args.g_entropy = args.tokens.table + kWeightEntropy * args.tokens.count;
    gradient(args, stream);
}

// ---- tokens --------------------------------------------------------------------------------------------------------
namespace {

// With the shared memory of block.cuh.
LaunchConfig combining(int64_t blocks, int threads, Stream stream) {
    const unsigned block = static_cast<unsigned>(threads);
    return {static_cast<unsigned>(blocks), block, block / kWarpThreads * kCombineBytes, 1, stream};
}

int64_t plan_tile(int64_t tokens) {
    return round_up(divide_up(std::max<int64_t>(1, tokens), kMaxPlanTiles), kPlanThreads);
}

int64_t plan_tiles(int64_t tokens) { return std::max<int64_t>(1, divide_up(tokens, plan_tile(tokens))); }

}  // namespace

// ---- the plan -------------------------------------------------------------------------------------------------------
size_t plan_workspace(int64_t tokens, int64_t sequences) {
    return static_cast<size_t>(plan_tiles(tokens)) * sizeof(uint64_t) + static_cast<size_t>(sequences);
}

// Where sequences of unequal length begin is known on the device alone, which keeps it among the tokens.
void plan(const PlanArgs& args, void* workspace, Stream stream) {
    const int64_t tile = plan_tile(args.tokens), tiles = plan_tiles(args.tokens);
    auto* const rows = static_cast<uint64_t*>(workspace);
    const PlanLaunch all = {args, tile, rows, reinterpret_cast<uint8_t*>(rows + tiles)};
    const int64_t length = divide_up(args.tokens, std::max<int64_t>(1, args.sequences));
    const int64_t threads =
        std::clamp<int64_t>(round_up(divide_up(length, kPlanLoads), kWarpThreads), kWarpThreads, kPlanSequenceThreads);
    launch("gk_plan_sequences", combining(args.sequences + 1, static_cast<int>(threads), stream), all);
    launch("gk_plan_tokens", combining(tiles, kPlanThreads, stream), all);
    if (args.order || args.counts) launch("gk_plan_order", combining(tiles, kPlanThreads, stream), all);
}

void token_objective(const TokenArgs& args, Stream stream) {
    if (args.rows == 0) return;
    launch("gk_token_objective",
           {static_cast<unsigned>(divide_up(args.rows, kObjectiveThreads)), kObjectiveThreads, 0, 1, stream}, args);
}

void sequence_objective(const SequenceArgs& args, Stream stream) {
    if (args.first == args.last) return;
    launch("gk_sequence_objective", combining(args.last - args.first, kSequenceObjectiveThreads, stream), args);
}

size_t reduce_workspace(int64_t sequences) { return static_cast<size_t>(sequences) * kReducedCount * sizeof(double); }

void reduce(const ReduceArgs& args, void* workspace, Stream stream) {
    const ReduceLaunch both = {args, static_cast<double*>(workspace)};
    const LaunchConfig sequences = {static_cast<unsigned>(args.sequences), kSequenceThreads,
                                    kSequenceThreads * kReducedCount * sizeof(double), 1, stream};
    const LaunchConfig groups = {static_cast<unsigned>(args.groups + 1), kGroupThreads,
                                 kGroupSlots * kReducedCount * sizeof(double), 1, stream};
    if (args.sequences > 0) launch("gk_reduce_sequences", sequences, both);
    launch("gk_reduce_groups", groups, both);
}

// ---- kept ids -------------------------------------------------------------------------------------------------------
namespace {

std::string kept_name(const char* what, int32_t dtype, const KeptTarget* target) {
    std::string name = std::string("gk_kept_") + what + "_" + kSuffixes[dtype];
    return target ? name + "_" + kSuffixes[target->dtype] : name;
}

// A thread per vector of columns.
LaunchConfig kept_blocks(int64_t rows, int64_t width, int32_t dtype, Stream stream) {
    const int64_t columns = int64_t{kKeptThreads} * (kVectorBytes / element_size(dtype));
    return {static_cast<unsigned>(rows * divide_up(width, columns)), kKeptThreads, 0, 1, stream};
}

}  // namespace

void kept_ids(const KeptRowArgs& args, Stream stream) {
    if (args.rows == 0) return;
    const LaunchConfig config = {static_cast<unsigned>(divide_up(args.rows, kKeptRowThreads)), kKeptRowThreads, 0, 1,
                                 stream};
    launch("gk_kept_ids", config, args);
}

void kept_logits(const KeptArgs& args, float* logits, Stream stream) {
    const std::string name = kept_name("logits", args.dtype, nullptr);
    const int64_t warps = args.rows * (args.slots / kKeptGroup);
    if (warps == 0) return;
    const LaunchConfig config = {static_cast<unsigned>(divide_up(warps, kKeptThreads / kWarpThreads)), kKeptThreads, 0,
                                 1, stream};
    launch(name.c_str(), config, KeptLaunch{args, logits, nullptr, {}});
}

void kept_dhidden(const KeptArgs& args, const float* dlogits, const KeptTarget& target, Stream stream) {
    const std::string name = kept_name("dhidden", args.dtype, &target);
    if (args.rows == 0) return;
    launch(name.c_str(), kept_blocks(args.rows, args.width, args.dtype, stream),
           KeptLaunch{args, nullptr, dlogits, target});
}

void kept_dweight(const KeptPairs& pairs, const PairsById<int64_t>& by_id, const KeptTarget& target, Stream stream) {
    const std::string name = kept_name("dweight", pairs.dtype, &target);
    launch(name.c_str(), kept_blocks(pairs.vocab, pairs.width, pairs.dtype, stream),
           KeptWeightLaunch{pairs, by_id, target});
}

// ---- finished gradients ---------------------------------------------------------------------------------------------
void scale(void* x, int32_t dtype, int64_t count, const float* factor, Stream stream) {
    if (count == 0) return;
    const int64_t tiles = divide_up(count * element_size(dtype), kScaleTile);
    const int64_t blocks = std::min<int64_t>(tiles, int64_t{kScaleBlocks} * current_device().multiprocessors);
    const LaunchConfig config = {static_cast<unsigned>(blocks), kScaleThreads, 0, 1, stream};
    launch((std::string("gk_scale_") + kSuffixes[dtype]).c_str(), config, ScaleArgs{x, factor, count});
}

}  // namespace gk::cuda
