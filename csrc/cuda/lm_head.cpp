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

constexpr int64_t kGroupBytes = 16 << 20;  // of hidden states in the L2 cache: a third to a quarter of it
constexpr int64_t kFewestTiles = 2;        // of a part
constexpr int64_t kTileCost = 20;          // where what an item costs beyond its tiles is 1
constexpr int64_t kItemCounts = 16;        // numbers of items per cluster that are compared
constexpr int64_t kManyRowTiles = 16;      // from here on an unused one does not matter

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs of blocks share the weight's tiles, unless half of the last pair would be a noticeable part of all.
uint32_t cluster_size(int64_t row_tiles) { return row_tiles % 2 == 0 || row_tiles >= kManyRowTiles ? 2 : 1; }

// By the vocabulary and the device alone: whatever batch a row stands in, the same tiles are summed together, in the
// same order, and its statistics have the same bits. As many parts as multiprocessors are whole waves of any row
// blocks.
int64_t parts_of_any_batch(int64_t tiles) {
    return std::min<int64_t>(divide_up(tiles, kFewestTiles), current_device().multiprocessors);
}

// Of exponentials, whose sums no other batch shares: so many that all clusters have equally many items, and the longest
// has the fewest tiles. The first cluster is the longest: the parts with one tile more come first.
int64_t parts_that_end_together(int64_t row_blocks, int64_t tiles, int64_t clusters) {
    const int64_t fewest = divide_up(row_blocks, clusters);
    int64_t best = 1, least = INT64_MAX;
    for (int64_t items = fewest; items < fewest + kItemCounts; items++) {
        const int64_t parts = std::min(tiles, items * clusters / row_blocks);
        const int64_t longer = divide_up(row_blocks * (tiles % parts), clusters);
        const int64_t time = items * (tiles / parts * kTileCost + 1) + longer * kTileCost;
        if (time < least) best = parts, least = time;
    }
    return best;
}

// ---- workspace: partial results, then the sampled ids' logits and slopes --------------------------------------------
KernelArgs make_kernel_args(const RowArgs& args, const Product& product, const RowScales& scales, void* workspace) {
    KernelArgs k = {};
    k.call = {args, product, scales, 0};
    k.schedule = make_schedule(args.rows, args.vocab, product.width, scales.row_scale == nullptr);
    k.partials = static_cast<Partial*>(workspace);
    k.y_ids = reinterpret_cast<float*>(k.partials + args.rows * k.schedule.parts);
    k.slope_ids = k.y_ids + args.rows;
    const auto map = [&](const void* base, int64_t rows, int64_t columns, int64_t stride, int box_rows, TensorMap* to) {
        encode_tensor_map({base, product.dtype, rows, columns, stride, box_rows}, to);
    };
    map(product.hidden, args.rows, product.width, product.hidden_stride, kTileRows, &k.hidden);
    map(product.weight, args.vocab, product.width, product.weight_stride, kTileRows, &k.weight);
    if (scales.row_scale) map(args.grad, args.rows, args.vocab, args.grad_stride, kStoredRows, &k.exponentials);
    return k;
}

// ---- launches -------------------------------------------------------------------------------------------------------
void launch_product(const char* name, const KernelArgs& k, Stream stream) {
    const std::string kernel = std::string("gk_") + name + (k.call.product.dtype == kBfloat16 ? "_bf16" : "_f16") +
                               (k.call.rows.params.softcap != 0.f ? "_softcap" : "");
    const uint32_t clusters = std::max(1, current_device().multiprocessors / static_cast<int>(k.schedule.cluster));
    const uint32_t grid = std::min(clusters, item_count(k.schedule)) * k.schedule.cluster;
    launch(kernel.c_str(), {grid, kProductThreads, kProductShared, k.schedule.cluster, stream}, k);
}

// A warp per row.
void launch_rows(const char* kernel, const KernelArgs& k, Stream stream) {
    const auto blocks = static_cast<unsigned>(divide_up(k.call.rows.rows, kRepairThreads / 32));
    launch(kernel, {blocks, kRepairThreads, 0, 1, stream}, k);
}

}  // namespace

Schedule head::make_schedule(int64_t rows, int64_t vocab, int64_t width, bool any_batch) {
    const int64_t row_tiles = divide_up(std::max<int64_t>(rows, 1), kTileRows), tiles = divide_up(vocab, kTileColumns);
    const int64_t cluster = cluster_size(row_tiles), row_blocks = divide_up(row_tiles, cluster);
    const int64_t clusters = std::max<int64_t>(1, current_device().multiprocessors / cluster);
    const int64_t parts = any_batch ? parts_of_any_batch(tiles) : parts_that_end_together(row_blocks, tiles, clusters);
    const int64_t group = std::clamp<int64_t>(kGroupBytes / (cluster * kTileRows * width * 2), 1, row_blocks);
    const auto word = [](int64_t x) { return static_cast<uint32_t>(x); };
    return {word(cluster), word(row_blocks), word(tiles), word(parts), word(group)};
}

bool has_products() { return current_device().capability == 90 && std::strcmp(image_for(90), "sm_90a") == 0; }

size_t fused_workspace(int64_t rows, int64_t vocab, const Product& product) {
    const auto parts = [&](bool any_batch) { return make_schedule(rows, vocab, product.width, any_batch).parts; };
    return rows * (std::max(parts(true), parts(false)) * sizeof(Partial) + 2 * sizeof(float));
}

void fused_logp(const RowArgs& args, const Product& product, void* workspace, Stream stream) {
    const KernelArgs k = make_kernel_args(args, product, {}, workspace);
    launch_product("fused_logp", k, stream);
    launch_rows("gk_head_combine_statistics", k, stream);
}

void fused_exponentials(const RowArgs& args, const Product& product, const RowScales& scales, void* workspace,
                        Stream stream) {
    const KernelArgs k = make_kernel_args(args, product, scales, workspace);
    launch_rows("gk_head_sampled_logits", k, stream);
    launch_product("fused_exponentials", k, stream);
    launch_rows("gk_head_finish_rows", k, stream);
    repair_rows(k.call, stream);
}

}  // namespace gk::cuda
