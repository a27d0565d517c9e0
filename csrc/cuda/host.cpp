// api.h without the products: which kernel, how many blocks of which size, how much shared memory.
#include <algorithm>
#include <string>

#include "api.h"
#include "driver.h"
#include "kernels.h"

namespace gk::cuda {

namespace {

constexpr int kWarpThreads = 32, kVectorBytes = 16;
constexpr int kVectorsPerThread = 8;   // that a thread should have at least: two groups of loads
constexpr int kBlocksWanted = 3;       // of a multiprocessor, in different phases of a resident row
constexpr int kPlanLoads = 4;          // tokens that a thread of plan_sequence has at least, of its masks
constexpr int kReservedShared = 1024;  // bytes that a multiprocessor takes for itself, per block
constexpr int64_t kMaxBlocks = 0x7FFFFFFF;
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

// Vectors of a row, wherever it starts between two multiples of 16 bytes.
int64_t vectors_of(const RowArgs& args) {
    const int64_t per_vector = kVectorBytes / element_size(args.logits_dtype);
    return divide_up(args.vocab + per_vector - 1, per_vector);
}

unsigned threads_for(int64_t vectors, int most) {
    const int64_t wanted = round_up(divide_up(vectors, kVectorsPerThread), kWarpThreads);
    return static_cast<unsigned>(std::clamp<int64_t>(wanted, 2 * kWarpThreads, most));
}

// How a cluster of 1 << shift blocks would hold a row.
struct Residence {
    int64_t shared;               // bytes per block
    int32_t tile, longer, shift;  // of RowLaunch
    unsigned threads;

    unsigned blocks() const { return 1u << shift; }
};

// As many threads per multiprocessor in one block as in three: each has four loads on their way at a time.
Residence reside(const RowArgs& args, const Device& device, int32_t shift) {
    const int64_t slice = divide_up(vectors_of(args), int64_t{1} << shift), tiles = divide_up(slice, kWarpThreads);
    const int64_t held_bytes = kVectorBytes / element_size(args.logits_dtype) * static_cast<int64_t>(sizeof(float));
    const int64_t shared = kExchangeBytes + tiles * kWarpThreads * held_bytes;
    const int64_t fit = device.shared_per_multiprocessor / (shared + kReservedShared);
    const int neighbours = static_cast<int>(std::clamp<int64_t>(fit, 1, kBlocksWanted));
    const unsigned threads = threads_for(slice, kResidentThreads / neighbours), warps = threads / kWarpThreads;
    return {shared, static_cast<int32_t>(tiles / warps), static_cast<int32_t>(tiles % warps), shift, threads};
}

// The smallest cluster of which a multiprocessor takes kBlocksWanted blocks; if there is none, the largest that holds
// the row: it reads each logit once, where the streamed kernel, as one block per multiprocessor, reads it twice.
// Nothing is measured. False: no cluster holds the row.
bool find_residence(const RowArgs& args, const Device& device, Residence& found) {
    const int most = device.capability >= 90 ? kMaxCluster : 1;
    bool any = false;
    for (int32_t shift = 0; 1 << shift <= most; shift++) {
        const Residence candidate = reside(args, device, shift);
        if (candidate.shared > device.shared_per_block) continue;
        found = candidate;
        any = true;
        if (kBlocksWanted * (candidate.shared + kReservedShared) <= device.shared_per_multiprocessor) break;
    }
    return any && args.rows * found.blocks() <= kMaxBlocks;
}

// As many rows at a time as three quarters of the L2 cache hold, but a quarter of the multiprocessors at least: fewer
// could not keep the memory busy.
unsigned streaming_blocks(const RowArgs& args, const Device& device) {
    const int64_t fit = device.l2_bytes * int64_t{3} / 4 / (args.vocab * element_size(args.logits_dtype));
    const int64_t blocks = std::clamp<int64_t>(fit, std::max(1, device.multiprocessors / 4), device.multiprocessors);
    return static_cast<unsigned>(std::min(args.rows, blocks));
}

LaunchConfig block_per_row(const RowArgs& args, Stream stream) {
    return {static_cast<unsigned>(args.rows), threads_for(vectors_of(args), kSweepThreads), kExchangeBytes, 1, stream};
}

bool overlaps(const RowArgs& args) { return args.grad == args.logits && args.grad_dtype != args.logits_dtype; }

}  // namespace

void stats(const RowArgs& args, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("stats", args, false).c_str(), block_per_row(args, stream), RowLaunch{args, 0, 0, 0, 0});
}

void gradient(const RowArgs& args, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("gradient", args, true).c_str(), block_per_row(args, stream),
           RowLaunch{args, 0, 0, overlaps(args), 0});
}

void sparse_gradient(const RowArgs& args, const SparseRows& out, Stream stream) {
    if (args.rows == 0) return;
    launch(kernel_name("sparse_gradient", args, false).c_str(), block_per_row(args, stream), SparseLaunch{args, out});
}

// The table has the temperature.
void single_pass(const RowArgs& given, Stream stream) {
    RowArgs args = given;
    args.temperature = args.tokens.table + kTemperature * args.tokens.count;
    if (!args.grad) return stats(args, stream);  // with the objective behind them
    if (args.rows == 0) return;
    const Device& device = current_device();
    Residence home = {};
    if (find_residence(args, device, home)) {
        const LaunchConfig config = {static_cast<unsigned>(args.rows) * home.blocks(), home.threads,
                                     static_cast<unsigned>(home.shared), home.blocks(), stream};
        launch(kernel_name("single_pass_resident", args, true).c_str(), config,
               RowLaunch{args, home.tile, home.longer, 0, home.shift});
    } else {
        const LaunchConfig config = {streaming_blocks(args, device), threads_for(vectors_of(args), kStreamedThreads),
                                     kExchangeBytes, 1, stream};
        launch(kernel_name("single_pass_streamed", args, true).c_str(), config,
               RowLaunch{args, 0, 0, overlaps(args), 0});
    }
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
