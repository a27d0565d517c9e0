// What Python, the CPU kernels and the device kernels agree on (names.h), and how functions of both are declared. Plain
// C++17: no torch, no Python, no CUDA.
#pragma once
#include "names.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__)
#define GK_HD __host__ __device__ __forceinline__
#else
// Never a function of its own: rows.cpp is compiled for several instruction sets, and the linker could pick any copy.
#define GK_HD inline __attribute__((always_inline))
#endif
