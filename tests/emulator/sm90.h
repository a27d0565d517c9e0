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

namespace gk::cuda::head {

// Addresses are bytes of the running block's shared memory.
GK_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - dynamic_shared());
}
void store_shared(uint32_t address, uint32_t value, GK_HERE);
void fence_shared_for_tma();

void barrier_init(uint32_t barrier, uint32_t count, GK_HERE);
GK_DEVICE void fence_barrier_init() {}
void barrier_expect(uint32_t barrier, uint32_t bytes, GK_HERE);
void barrier_arrive(uint32_t barrier, uint32_t rank, GK_HERE);
void barrier_wait(uint32_t barrier, uint32_t parity, GK_HERE);
void named_barrier(int id, int threads, bool wait, const emulator::Place& place);
template <int kId, int kThreads>
GK_DEVICE void named_arrive(GK_HERE) {
    named_barrier(kId, kThreads, false, place);
}
template <int kId, int kThreads>
GK_DEVICE void named_sync(GK_HERE) {
    named_barrier(kId, kThreads, true, place);
}

GK_DEVICE void tma_prefetch(const TensorMap*) {}
void tma_load_multicast(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier, uint16_t blocks,
                        GK_HERE);
GK_DEVICE void tma_load(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier, GK_HERE) {
    tma_load_multicast(target, map, column, row, barrier, static_cast<uint16_t>(1u << cluster_rank()), place);
}
GK_DEVICE uint64_t evict_first() { return 0; }
void tma_store(const TensorMap* map, int column, int row, uint32_t source, uint64_t policy, GK_HERE);
void wait_for_stores(int pending);
template <int kPending>
GK_DEVICE void tma_store_wait() {
    wait_for_stores(kPending);
}

// The descriptor as in mma_sm90.h: 128-byte swizzle, 8 rows in 1,024 bytes.
GK_DEVICE uint64_t operand(uint32_t address) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}
GK_DEVICE void wgmma_fence(Fragment&) {}
void wgmma_commit();
void wait_for_products(int pending);
template <int kPending>
GK_DEVICE void wgmma_wait() {
    wait_for_products(kPending);
}
GK_DEVICE void wgmma_wait_all(Fragment&) { wait_for_products(0); }
void multiply(float* result, uint64_t a, uint64_t b, bool accumulate, bool bfloat16, const emulator::Place& place);
template <class Element>
GK_DEVICE void wgmma(Fragment& result, uint64_t a, uint64_t b, bool accumulate, GK_HERE) {
    multiply(result.value, a, b, accumulate, Element::kLowest == BFloat16::kLowest, place);
}

template <int kCount>
GK_DEVICE void take_registers() {}
template <int kCount>
GK_DEVICE void give_registers() {}

}  // namespace gk::cuda::head
