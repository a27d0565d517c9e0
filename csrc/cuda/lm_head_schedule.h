// Which block computes which tiles of hidden weight^T, and what the kernels of one call receive.
// Plain C++17, for host and device.
#pragma once
#include "../layout.h"
#include "kernels.h"
#include "tensor_map.h"

namespace gk::cuda::head {

constexpr int kTileRows = 128, kTileColumns = 256;
constexpr int kStoredRows = 16;  // of a box of exponentials

constexpr int kProductThreads = 384, kProductShared = 230464;  // of a product's block; bytes

// An item is one block of rows by one part of the vocabulary. Clusters take items in turn; those at work at one time
// form a block of `group` row blocks by some parts: their hidden states stay in the L2 cache, and a tile of the weight
// is read from memory once per group.
struct Schedule {
    uint32_t cluster;     // blocks that share each tile of the weight, with kTileRows rows each
    uint32_t row_blocks;  // of cluster * kTileRows rows
    uint32_t tiles;       // of kTileColumns columns
    uint32_t parts;       // the first ones may have one tile more than the others
    uint32_t group;
};

struct Item {
    uint32_t row_block, part, first_tile, last_tile;
};

GK_HD uint32_t item_count(const Schedule& s) { return s.row_blocks * s.parts; }

GK_HD Item place(const Schedule& s, uint32_t item) {
    const uint32_t first = item / (s.group * s.parts) * s.group;
    const uint32_t left = s.row_blocks - first, blocks = left < s.group ? left : s.group;
    const uint32_t inside = item - first * s.parts, part = inside / blocks;
    const uint32_t tiles = s.tiles / s.parts, longer = s.tiles % s.parts;  // of a part; parts with one tile more
    const uint32_t first_tile = part * tiles + (part < longer ? part : longer);
    return {first + inside % blocks, part, first_tile, first_tile + tiles + (part < longer)};
}

// On the current device. any_batch: the parts do not depend on the rows.
Schedule make_schedule(int64_t rows, int64_t vocab, int64_t width, bool any_batch);

// Of a row and a part of the vocabulary: maximum, sum and moment; or sum and moment relative to the sampled id.
struct Partial {
    double top, exps, moment;
};

struct KernelArgs {
    TensorMap hidden, weight, exponentials;
    ExponentialLaunch call;  // fused_logp: without scales
    Schedule schedule;
    Partial* partials;  // (rows, parts)
    float* y_ids;       // (rows,) logits of the sampled ids under the softcap
    float* slope_ids;   // (rows,) its slope there
};

}  // namespace gk::cuda::head
