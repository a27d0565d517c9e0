// Host side of the head kernels of compute capability 9.0: what they serve, their schedule and their launches.
#include <algorithm>
#include <cstring>
#include <string>

#include "api.h"
#include "driver.h"
#include "lm_head_schedule.h"

namespace gk::cuda {

using namespace head;

namespace {

constexpr int64_t kMaxRows = 1 << 30;      // rows, columns and items are counted in 32 bits
constexpr int64_t kGroupBytes = 16 << 20;  // of hidden states in the L2 cache: a third to a quarter of it
constexpr int64_t kFewestTiles = 2;        // of a part: what an item costs beyond its tiles is a twentieth of one
constexpr int64_t kManyRowTiles = 16;      // from here on an unused one does not matter
constexpr int kRepairsPerMultiprocessor = 4;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs of blocks share the weight's tiles, unless half of the last pair would be a noticeable part of all.
uint32_t cluster_size(int64_t row_tiles) { return row_tiles % 2 == 0 || row_tiles >= kManyRowTiles ? 2 : 1; }

// By the vocabulary and the device alone: whatever batch a row stands in, the same tiles are summed together, in the
// same order, and its statistics have the same bits. One row block fills all multiprocessors; more of them, whole waves
// but one.
int64_t tiles_per_part(int64_t tiles) {
    return std::max<int64_t>(kFewestTiles, divide_up(tiles, current_device().multiprocessors));
}

Schedule make_schedule(const HeadArgs& args) {
    const int64_t row_tiles = divide_up(args.rows, kTileRows), tiles = divide_up(args.vocab, kTileColumns);
    const int64_t cluster = cluster_size(row_tiles), row_blocks = divide_up(row_tiles, cluster);
    const int64_t per_part = tiles_per_part(tiles);
    const int64_t group = std::clamp<int64_t>(kGroupBytes / (cluster * kTileRows * args.width * 2), 1, row_blocks);
    const auto word = [](int64_t x) { return static_cast<uint32_t>(x); };
    return {word(cluster), word(row_blocks), word(tiles), word(per_part), word(divide_up(tiles, per_part)),
            word(group)};
}

// ---- workspace: partial results, then one entry per row of the others -----------------------------------------------
constexpr int64_t kPlanes = 3;
constexpr int64_t kPerRow = 3 * sizeof(float) + 1;  // y_ids, slope_ids, entropy if the caller takes none; overflowed

int64_t partial_count(const HeadArgs& args, const Schedule& schedule) { return kPlanes * schedule.parts * args.rows; }

KernelArgs make_kernel_args(const HeadArgs& args, void* workspace) {
    KernelArgs k = {};
    k.head = args;
    k.schedule = make_schedule(args);
    k.partials = static_cast<double*>(workspace);
    auto* floats = reinterpret_cast<float*>(k.partials + partial_count(args, k.schedule));
    k.y_ids = floats;
    k.slope_ids = floats + args.rows;
    if (!k.head.entropy) k.head.entropy = floats + 2 * args.rows;
    k.overflowed = reinterpret_cast<uint8_t*>(floats + 3 * args.rows);
    encode_tensor_map({args.hidden, args.dtype, args.rows, args.width, args.hidden_row_stride, kTileRows}, &k.hidden);
    encode_tensor_map({args.weight, args.dtype, args.vocab, args.width, args.weight_row_stride, kTileRows}, &k.weight);
    return k;
}

// ---- launches -------------------------------------------------------------------------------------------------------
void launch_product(const char* name, const KernelArgs& k, Stream stream) {
    const std::string kernel = std::string("gk_") + name + (k.head.dtype == kBfloat16 ? "_bfloat16" : "_float16") +
                               (k.head.params.softcap != 0.f ? "_softcap" : "");
    const uint32_t clusters = std::max(1, current_device().multiprocessors / static_cast<int>(k.schedule.cluster));
    const uint32_t grid = std::min(clusters, item_count(k.schedule)) * k.schedule.cluster;
    launch(kernel.c_str(), {grid, kProductThreads, kProductShared, k.schedule.cluster, stream}, k);
}

void launch_rows(const char* kernel, const KernelArgs& k, int64_t blocks, Stream stream) {
    launch(kernel, {static_cast<unsigned>(blocks), kRowThreads, kRowShared, 1, stream}, k);
}

// What TMA asks of a matrix; rows that lie over one another, as those of an expanded tensor do, are not tried.
bool describable(const void* base, int64_t row_stride, int64_t columns) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_stride % 8 == 0 && row_stride >= columns;
}

bool countable(int64_t x) { return x > 0 && x <= kMaxRows; }

}  // namespace

bool supports_head(const HeadArgs& args) {
    return (args.dtype == kBfloat16 || args.dtype == kFloat16) && countable(args.rows) && countable(args.width) &&
           countable(args.vocab) && describable(args.hidden, args.hidden_row_stride, args.width) &&
           describable(args.weight, args.weight_row_stride, args.width) &&
           (!args.exponentials || describable(args.exponentials, args.exponentials_row_stride, args.vocab)) &&
           current_device().capability == 90 && std::strcmp(image_for(90), "sm_90a") == 0;
}

size_t head_workspace(const HeadArgs& args) {
    return partial_count(args, make_schedule(args)) * sizeof(double) + args.rows * kPerRow;
}

void linear_logp(const HeadArgs& args, void* workspace, Stream stream) {
    const KernelArgs k = make_kernel_args(args, workspace);
    launch_product("linear_logp", k, stream);
    launch_rows("gk_head_combine_statistics", k, divide_up(args.rows, kRowsPerBlock), stream);
}

void anchored(const HeadArgs& args, void* workspace, Stream stream) {
    KernelArgs k = make_kernel_args(args, workspace);
    k.head.temperature = args.table + kTemperature * args.table_row_stride;
    encode_tensor_map({args.exponentials, kBfloat16, args.rows, args.vocab, args.exponentials_row_stride, kStoredRows},
                      &k.exponentials);
    launch_rows("gk_head_sampled_logits", k, divide_up(args.rows, kRowThreads / 32), stream);
    launch_product("exponentials", k, stream);
    launch_rows("gk_head_scale_rows", k, divide_up(args.rows, kRowsPerBlock), stream);
    const int64_t repairs = kRepairsPerMultiprocessor * current_device().multiprocessors;
    launch_rows("gk_head_repair_rows", k, std::min(args.rows, repairs), stream);
}

}  // namespace gk::cuda
