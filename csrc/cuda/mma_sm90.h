// The instructions of sm_90a that the head kernels are made of, one function each; a comment names the PTX instruction.
// Addresses of shared memory are 32-bit numbers, those of `shared_address`.
//
// The tests have a model of the same functions (tests/emulator/sm90.h), which runs the kernels on the CPU.
#pragma once
#include "elements.cuh"
#include "fragment.h"
#include "tensor_map.h"

namespace gk::cuda::head {

// ---- shared memory --------------------------------------------------------------------------------------------------
GK_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

GK_DEVICE void store_shared(uint32_t address, uint32_t value) {  // st.shared
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// What this thread has stored to shared memory becomes visible to TMA (the async proxy), once a barrier has ordered the
// threads: fence.proxy.async
GK_DEVICE void fence_shared_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters -------------------------------------------------------------------------------------------------------
// A barrier of all threads of the cluster in two halves. What a thread wrote before it arrived, in whatever shared
// memory of the cluster, is there for every thread that has waited.
GK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
GK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- barriers in shared memory (mbarrier): a phase takes `count` arrivals and all announced bytes ------------------
// They order threads of one block (the default scope): what passes between blocks is written by TMA and read by wgmma,
// which announce their own ends. The scope of the cluster would empty the first-level cache at every wait.
GK_DEVICE void barrier_init(uint32_t barrier, uint32_t count) {  // mbarrier.init
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

GK_DEVICE void fence_barrier_init() {  // fence.mbarrier_init: before the cluster's barrier
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces bytes that TMA will bring in this phase: mbarrier.arrive.expect_tx
GK_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier at the same address of block `rank` of the cluster: mapa, mbarrier.arrive
GK_DEVICE void barrier_arrive(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Until the phase of this parity has ended; the one before the first has parity 1: mbarrier.try_wait
GK_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t ended;
    do {
        asm volatile(
            "{\n"
            ".reg .pred ended;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
            "selp.u32 %0, 1, 0, ended;\n"
            "}"
            : "=r"(ended)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!ended);
}

// ---- named barriers: a phase takes kThreads threads, arriving and waiting ones together ----------------------------
template <int kId, int kThreads>
GK_DEVICE void named_arrive() {  // barrier.arrive
    asm volatile("barrier.cta.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

template <int kId, int kThreads>
GK_DEVICE void named_sync() {  // barrier.sync
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// ---- TMA: boxes at element (column, row) of a matrix, one thread issues them ---------------------------------------
GK_DEVICE void tma_prefetch(const TensorMap* map) {  // prefetch.tensormap
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Into this block's shared memory; the bytes count at `barrier`: cp.async.bulk.tensor
GK_DEVICE void tma_load(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same into all blocks of the cluster that `blocks` names, at the same addresses: ...multicast::cluster
GK_DEVICE void tma_load_multicast(uint32_t target, const TensorMap* map, int column, int row, uint32_t barrier,
                                  uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

// Policy for what is not read again before the cache has been filled anew: createpolicy
GK_DEVICE uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// From shared memory to a box of the matrix, as a group of its own: cp.async.bulk.tensor, cp.async.bulk.commit_group
GK_DEVICE void tma_store(const TensorMap* map, int column, int row, uint32_t source, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;\n"
        "cp.async.bulk.commit_group;" ::"l"(map),
        "r"(column), "r"(row), "r"(source), "l"(policy)
        : "memory");
}

// Until all but the last kPending stores of this thread have read shared memory: cp.async.bulk.wait_group.read
template <int kPending>
GK_DEVICE void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- wgmma: 128 threads multiply from shared memory into registers --------------------------------------------------
// Operand with rows of 128 swizzled bytes, 8 rows in 1,024; a step of 16 elements adds 32 bytes to its address.
GK_DEVICE uint64_t operand(uint32_t address) {
    constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4, kUnused = 1;
    return kSwizzle128 | kEightRows << 32 | kUnused << 16 | (address & 0x3FFFF) >> 4;
}

GK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
GK_DEVICE void wgmma_wait() {  // wgmma.wait_group
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

#define GK_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GK_R16(i) GK_R4(i), GK_R4(i + 4), GK_R4(i + 8), GK_R4(i + 12)
#define GK_R64(i) GK_R16(i), GK_R16(i + 16), GK_R16(i + 32), GK_R16(i + 48)
#define GK_R128 GK_R64(0), GK_R64(64)

// Between what other instructions have done to the accumulators and the first product: wgmma.fence
GK_DEVICE void wgmma_fence(Fragment& result) {
    float (&d)[128] = result.value;
    asm volatile("wgmma.fence.sync.aligned;" : GK_R128::"memory");
}

// All products have ended; no use of their results moves before this.
GK_DEVICE void wgmma_wait_all(Fragment& result) {
    float (&d)[128] = result.value;
    asm volatile("wgmma.wait_group.sync.aligned 0;" : GK_R128::"memory");
}

// clang-format off
#define GK_WGMMA(kTypes) \
    asm volatile( \
        "{\n" \
        ".reg .pred add;\n" \
        "setp.ne.b32 add, %130, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." kTypes " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
        "}, %128, %129, add, 1, 1, 0, 0;\n" \
        "}" \
        : GK_R128 : "l"(a), "l"(b), "r"(accumulate ? 1 : 0) : "memory")
// clang-format on

// result = (64, 16) (256, 16)^T, added to what is there if `accumulate`: wgmma.mma_async
template <class Element>
GK_DEVICE void wgmma(Fragment& result, uint64_t a, uint64_t b, bool accumulate) {
    float (&d)[128] = result.value;
    if constexpr (kIsSame<Element, BFloat16>)
        GK_WGMMA("bf16.bf16");
    else
        GK_WGMMA("f16.f16");
}

#undef GK_WGMMA
#undef GK_R128
#undef GK_R64
#undef GK_R16
#undef GK_R4

// ---- registers: a warpgroup takes what another has given back (setmaxnreg) ------------------------------------------
template <int kCount>
GK_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
GK_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace gk::cuda::head
