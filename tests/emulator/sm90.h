// A model of csrc/cuda/mma_sm90.h: the same functions on the CPU, so that a test runs the ring of stages, its barriers,
// the swizzled layouts and the schedule as they are.
//
// What the hardware does at a time of its own happens here either at once or as late as it may: copies when nothing
// else can go on, products at wgmma_wait, reading for a store at tma_store_wait. From 2 on the bits of
// GK_EMULATOR_ORDER choose: 1 late copies, 2 late products, 4 late stores. What the hardware leaves undefined is an
// error.
#pragma once
#include "cuda/elements.cuh"
#include "cuda/fragment.h"
#include "cuda/tensor_map.h"
#include "emulator.h"

namespace gk::emulator {

// Addresses are bytes of the running block's shared memory.
void store_shared(uint32_t address, uint32_t value, const Place& place);
void fence_shared_for_tma();
void barrier_init(uint32_t barrier, uint32_t count, const Place& place);
void barrier_expect(uint32_t barrier, uint32_t bytes, const Place& place);
void barrier_arrive(uint32_t barrier, uint32_t rank, const Place& place);
void barrier_wait(uint32_t barrier, uint32_t parity, const Place& place);
void named_barrier(int id, int threads, bool wait, const Place& place);
void tma_load(uint32_t target, const cuda::TensorMap* map, int column, int row, uint32_t barrier, uint32_t blocks,
              const Place& place);
void tma_store(const cuda::TensorMap* map, int column, int row, uint32_t source, const Place& place);
void tma_store_wait(int pending, const Place& place);

void wgmma(float* result, uint64_t a, uint64_t b, bool accumulate, bool bfloat16, const Place& place);
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace gk::emulator

namespace gk::cuda::head {

GK_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::shared_memory());
}
GK_DEVICE void store_shared(uint32_t address, uint32_t value, GK_HERE) {
    emulator::store_shared(address, value, place);
}
GK_DEVICE void fence_shared_for_tma() { emulator::fence_shared_for_tma(); }

GK_DEVICE void barrier_init(uint32_t barrier, uint32_t count, GK_HERE) {
    emulator::barrier_init(barrier, count, place);
}
GK_DEVICE void fence_barrier_init() {}
GK_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes, GK_HERE) {
    emulator::barrier_expect(barrier, bytes, place);
}
GK_DEVICE void barrier_arrive(uint32_t barrier, uint32_t rank, GK_HERE) {
    emulator::barrier_arrive(barrier, rank, place);
}
GK_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity, GK_HERE) {
    emulator::barrier_wait(barrier, parity, place);
}
template <int kId, int kThreads>
GK_DEVICE void named_arrive(GK_HERE) {
    emulator::named_barrier(kId, kThreads, false, place);
}
template <int kId, int kThreads>
GK_DEVICE void named_sync(GK_HERE) {
    emulator::named_barrier(kId, kThreads, true, place);
}

GK_DEVICE void tma_prefetch(const TensorMap*) {}
GK_DEVICE void tma_load(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier, GK_HERE) {
    emulator::tma_load(target, map, column, row, barrier, 1u << cluster_rank(), place);
}
GK_DEVICE void tma_load_multicast(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier,
                                  uint16_t blocks, GK_HERE) {
    emulator::tma_load(target, map, column, row, barrier, blocks, place);
}
GK_DEVICE uint64_t evict_first() { return 0; }
GK_DEVICE void tma_store(const TensorMap* map, int column, int row, uint32_t source, uint64_t, GK_HERE) {
    emulator::tma_store(map, column, row, source, place);
}
template <int kPending>
GK_DEVICE void tma_store_wait(GK_HERE) {
    emulator::tma_store_wait(kPending, place);
}

// The descriptor as in mma_sm90.h: 128-byte swizzle, 8 rows in 1,024 bytes.
GK_DEVICE uint64_t operand(uint32_t address) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}
GK_DEVICE void wgmma_fence(Fragment&) {}
GK_DEVICE void wgmma_commit() { emulator::wgmma_commit(); }
template <int kPending>
GK_DEVICE void wgmma_wait() {
    emulator::wgmma_wait(kPending);
}
GK_DEVICE void wgmma_wait_all(Fragment&) { emulator::wgmma_wait(0); }
template <class Element>
GK_DEVICE void wgmma(Fragment& result, uint64_t a, uint64_t b, bool accumulate, GK_HERE) {
    emulator::wgmma(result.value, a, b, accumulate, Element::kLowest == BFloat16::kLowest, place);
}

template <int kCount>
GK_DEVICE void take_registers() {}
template <int kCount>
GK_DEVICE void give_registers() {}

GK_DEVICE float min_or_nan(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }

}  // namespace gk::cuda::head
