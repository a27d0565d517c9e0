// What a kernel needs of its device, one function each: indices, barriers, shuffles, shared memory, and the
// few instructions that C++ has no word for. The tests' emulator supplies the same functions on the CPU; everything
// else that kernels.cu includes is plain C++.
#pragma once
#include "../layout.h"

#ifdef GK_EMULATOR
#include "emulator.h"
#else

#define GK_DEVICE __device__ __forceinline__
#define GK_UNROLL _Pragma("unroll")

// Defines a kernel: GK_KERNEL(name, Args, most threads of a block, blocks per multiprocessor) { ... args ... }
#define GK_KERNEL(name, Args, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Args args)

namespace gk::cuda {

// ---- where a thread is; grids and blocks have one dimension ---------------------------------------------------------
GK_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
GK_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
GK_DEVICE unsigned block_index() { return blockIdx.x; }
GK_DEVICE unsigned block_count() { return gridDim.x; }

// ---- blocks and warps -----------------------------------------------------------------------------------------------
GK_DEVICE char* dynamic_shared() {
    extern __shared__ __align__(16) char gk_dynamic_shared_memory[];
    return gk_dynamic_shared_memory;
}
GK_DEVICE void block_sync() { __syncthreads(); }
GK_DEVICE void warp_sync() { __syncwarp(); }

// The value of the lane whose number differs in the bits of `mask`. All 32 lanes take part.
template <class T>
GK_DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

// ---- between blocks -------------------------------------------------------------------------------------------------
GK_DEVICE int32_t atomic_add(int32_t* address, int32_t value) { return atomicAdd(address, value); }  // what was there
GK_DEVICE void device_fence() { __threadfence(); }

// ---- 16 or 8 bytes of device memory in one instruction: NVRTC splits some of the stores that are written as such ----
GK_DEVICE void load_words(const void* address, uint32_t (&words)[4]) {
    const uint4 all = *static_cast<const uint4*>(address);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
}
GK_DEVICE void store_words(void* address, const uint32_t (&w)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}
GK_DEVICE void store_words(void* address, const uint32_t (&w)[2]) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)), "r"(w[0]), "r"(w[1])
                 : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
GK_DEVICE float from_bits(uint32_t bits) { return __uint_as_float(bits); }
GK_DEVICE uint32_t to_bits(float x) { return __float_as_uint(x); }

// 2^x to 2^-22.5, one instruction; 0 where the result is below the normal numbers. exp2f would spend three more on
// numbers below 1e-38, which are far below the rounding of a softmax's gradient.
GK_DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
GK_DEVICE float reciprocal_fast(float x) {  // to 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
GK_DEVICE float max_or_nan(float x, float y) {  // fmaxf would swallow the NaN
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}
GK_DEVICE float min_or_nan(float x, float y) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
    return smaller;
}

// ---- 16-bit numbers as bits, two in a word; rounded to nearest even -------------------------------------------------
GK_DEVICE float half_to_float(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
GK_DEVICE uint32_t to_halves(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
GK_DEVICE uint32_t to_bfloats(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

}  // namespace gk::cuda
#endif

namespace gk::cuda {

constexpr int kWarp = 32;

GK_DEVICE int lane_index() { return thread_index() % kWarp; }
GK_DEVICE int warp_index() { return thread_index() / kWarp; }

GK_DEVICE float infinity() { return from_bits(0x7F800000u); }
GK_DEVICE float not_a_number() { return from_bits(0x7FC00000u); }

}  // namespace gk::cuda
