// What Python, the CPU kernels and the device kernels agree on, and how functions of both are declared. Plain C++17: no
// torch, no Python, no CUDA. tests/test_row_kernels.py compares the codes with Python's.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__)
#define GK_HD __host__ __device__ __forceinline__
#else
// Never a function of its own: rows.cpp is compiled for several instruction sets, and the linker could pick any copy.
#define GK_HD inline __attribute__((always_inline))
#endif

namespace gk {

constexpr int kInterface = 20;  // raised with every change of the functions of the compiled modules, or of the codes

enum DType : int32_t { kFloat32, kBfloat16, kFloat16 };  // of logits and gradients

}  // namespace gk
