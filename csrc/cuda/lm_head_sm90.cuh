// hidden weight^T in tiles of 128 x 256 that stay in registers, with an epilogue: persistent, warp-specialised, sm_90a.
//
// Warpgroup 0 copies: one of its threads fills a ring of four stages (64 elements of 128 rows of the hidden states and
// 256 of the weight, 48 KB) through TMA. Warpgroups 1 and 2 multiply the upper and the lower 64 rows of the same tile,
// 128 accumulators per thread, and then run the epilogue on them.
//
// The two do so at different times: warpgroup 2 starts a tile when 1 has taken kLead stages of it. While one is in its
// epilogue, the other has the tensor cores alone and drains (or runs ahead into) the ring. Full ping-pong, each
// warpgroup with a tile of its own, hides the whole epilogue, but with 128 accumulators its tiles are 128 x 128 or
// 64 x 256 and need 64 or 80 bytes per cycle from L2; here it is 48, and 32 in a cluster of two, whose blocks share the
// weight: each loads half of a tile for both.
//
// Per 128 x 256 tile with H = 4,096 on one multiprocessor: 65,536 cycles of wgmma, which reads 80 of 128 bytes per
// cycle of shared memory; 2 x 1,500 to 2,000 cycles of epilogue, of which all but about 1,000 pass beside the other
// warpgroup's products.
#pragma once
#ifdef GK_EMULATOR
#include "sm90.h"
#else
#include "mma_sm90.h"
#endif
#include "lm_head_epilogue.cuh"

namespace gk::cuda::head {

constexpr int kStages = 4, kDepth = kBoxColumns, kConsumers = 2, kLead = 3;
static_assert(kLead >= 2 && kLead <= kStages, "the leader gets so far without the other");
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // together three times the 168 of the start
static_assert(kTileRows == kConsumers * Fragment::kRows && kTileColumns == Fragment::kColumns,
              "a tile is two fragments");

// Dynamic shared memory: boxes of TMA begin at multiples of 1,024 bytes.
struct Memory {
    static constexpr uint32_t kHiddenBytes = kTileRows * kBoxBytes, kWeightBytes = kTileColumns * kBoxBytes;
    static constexpr uint32_t kStageBytes = kHiddenBytes + kWeightBytes;
    static constexpr uint32_t kPatches = kStages * kStageBytes;
    static constexpr uint32_t kBarriers = kPatches + kConsumers * 4 * 2 * kPatchBytes;
    static constexpr uint32_t kBytes = kBarriers + 2 * kStages * 8 + 1024;  // what aligning may take

    uint32_t base;

    GK_DEVICE uint32_t hidden(uint32_t stage) const { return base + stage * kStageBytes; }
    GK_DEVICE uint32_t weight(uint32_t stage) const { return hidden(stage) + kHiddenBytes; }
    GK_DEVICE uint32_t patches(uint32_t warp) const { return base + kPatches + warp * 2 * kPatchBytes; }
    GK_DEVICE uint32_t full(uint32_t stage) const { return base + kBarriers + stage * 8; }
    GK_DEVICE uint32_t empty(uint32_t stage) const { return base + kBarriers + (kStages + stage) * 8; }
};
static_assert(Memory::kBytes == kProductShared && kProductShared <= 227 * 1024, "what a block may have");
static_assert(kProductThreads == kWarpgroup * (1 + kConsumers), "a producer and the consumers");

// Position in the ring; the phase of the barriers there changes with every round.
struct Ring {
    uint32_t stage = 0, phase = 0;

    GK_DEVICE void advance() {
        stage++;
        if (stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The block's place in its cluster, and the cluster's way through the items.
struct Walk {
    const Schedule& schedule;
    const uint32_t cluster, rank, first, clusters, items;
    const int steps;  // of kDepth, for a tile

    GK_DEVICE explicit Walk(const KernelArgs& args)
        : schedule(args.schedule),
          cluster(schedule.cluster),
          rank(static_cast<uint32_t>(block_index()) % cluster),
          first(static_cast<uint32_t>(block_index()) / cluster),
          clusters(static_cast<uint32_t>(block_count()) / cluster),
          items(item_count(schedule)),
          steps(static_cast<int>((args.call.product.width + kDepth - 1) / kDepth)) {}

    GK_DEVICE int first_row(const Item& item) const {
        return static_cast<int>(item.row_block * cluster + rank) * kTileRows;
    }
};

// For one thread. All blocks of a cluster write to a stage of each, once the consumers of all have left theirs.
GK_DEVICE void produce(const KernelArgs& args, const Memory& memory) {
    const Walk walk(args);
    constexpr uint32_t kBoxes = kTileColumns / kTileRows;  // of a tile of the weight
    tma_prefetch(&args.hidden);
    tma_prefetch(&args.weight);
    Ring ring;
    for (uint32_t i = walk.first; i < walk.items; i += walk.clusters) {
        const Item item = place(walk.schedule, i);
        for (uint32_t tile = item.first_tile; tile < item.last_tile; tile++) {
            for (int step = 0; step < walk.steps; step++) {
                barrier_wait(memory.empty(ring.stage), ring.phase ^ 1);
                const uint32_t full = memory.full(ring.stage);
                const int inner = step * kDepth;
                barrier_expect(full, Memory::kStageBytes);
                tma_load(memory.hidden(ring.stage), &args.hidden, inner, walk.first_row(item), full);
                for (uint32_t box = walk.rank; box < kBoxes; box += walk.cluster) {
                    const uint32_t target = memory.weight(ring.stage) + box * kTileRows * kBoxBytes;
                    const int column = static_cast<int>(tile * kTileColumns + box * kTileRows);
                    if (walk.cluster == 1)
                        tma_load(target, &args.weight, inner, column, full);
                    else
                        tma_load_multicast(target, &args.weight, inner, column, full,
                                           static_cast<uint16_t>((1u << walk.cluster) - 1));
                }
                ring.advance();
            }
        }
    }
}

// Called by a warp that has read a stage: arrives at the barriers of all blocks that write to it.
GK_DEVICE void release(const Memory& memory, uint32_t stage, uint32_t cluster) {
    const uint32_t lane = static_cast<uint32_t>(lane_index());
    if (lane < cluster) barrier_arrive(memory.empty(stage), lane);
}

constexpr int kLeadBarrier = 1;  // 0 is __syncthreads

// Starts the products of the next stage, when it has come.
template <bool kFirst, class Element>
GK_DEVICE void multiply_stage(Fragment& tile, const Memory& memory, const Ring& ring, int consumer) {
    barrier_wait(memory.full(ring.stage), ring.phase);
    const uint64_t a = operand(memory.hidden(ring.stage) + consumer * Fragment::kRows * kBoxBytes);
    const uint64_t b = operand(memory.weight(ring.stage));
    wgmma_fence(tile);
    GK_UNROLL for (int inner = 0; inner < kDepth / 16; inner++)  // 16 elements are 2 units of 16 bytes
        wgmma<Element>(tile, a + 2 * inner, b + 2 * inner, !kFirst || inner > 0);
    wgmma_commit();
}

template <class Element>
GK_DEVICE void multiply(Fragment& tile, const Memory& memory, Ring& ring, int steps, uint32_t cluster, int consumer) {
    // With fewer steps than stages the leader could come here a second time before the other has.
    const bool lead = steps >= kStages;
    if (lead && consumer == 1) named_sync<kLeadBarrier, 2 * kWarpgroup>();
    multiply_stage<true, Element>(tile, memory, ring, consumer);
    for (int step = 1; step < steps; step++) {
        const uint32_t last = ring.stage;
        ring.advance();
        multiply_stage<false, Element>(tile, memory, ring, consumer);
        if (lead && consumer == 0 && step == kLead - 1) named_arrive<kLeadBarrier, 2 * kWarpgroup>();
        wgmma_wait<1>();
        release(memory, last, cluster);
    }
    wgmma_wait_all(tile);
    release(memory, ring.stage, cluster);
    ring.advance();
}

template <class Element, class Epilogue>
GK_DEVICE void consume(const KernelArgs& args, const Memory& memory, int consumer) {
    const Walk walk(args);
    const int thread = thread_index() % kWarpgroup;
    const uint32_t patches = memory.patches(consumer * 4 + thread / 32);
    Ring ring;
    for (uint32_t i = walk.first; i < walk.items; i += walk.clusters) {
        const Item item = place(walk.schedule, i);
        Epilogue epilogue(args, walk.first_row(item) + consumer * Fragment::kRows, thread, patches);
        for (uint32_t tile = item.first_tile; tile < item.last_tile; tile++) {
            Fragment product;
            multiply<Element>(product, memory, ring, walk.steps, walk.cluster, consumer);
            epilogue.add(product, static_cast<int>(tile * kTileColumns));
        }
        epilogue.finish(item.part);
    }
    Epilogue::drain();
}

template <class Element, class Epilogue>
GK_DEVICE void head_product(const KernelArgs& args) {
    const Memory memory = {(shared_address(dynamic_shared()) + 1023) / 1024 * 1024};
    if (thread_index() == 0) {
        for (uint32_t stage = 0; stage < kStages; stage++) {
            barrier_init(memory.full(stage), 1);
            barrier_init(memory.empty(stage), args.schedule.cluster * kConsumers * 4);  // warps
        }
        fence_barrier_init();
    }
    cluster_arrive();
    cluster_wait();
    if (thread_index() < kWarpgroup) {
        give_registers<kProducerRegisters>();
        if (thread_index() == 0) produce(args, memory);
    } else {
        take_registers<kConsumerRegisters>();
        consume<Element, Epilogue>(args, memory, thread_index() / kWarpgroup - 1);
    }
    // No block leaves while another may write to its memory or arrive at its barriers.
    cluster_arrive();
    cluster_wait();
}

}  // namespace gk::cuda::head
