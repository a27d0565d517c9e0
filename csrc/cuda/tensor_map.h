// A matrix that the tensor memory accelerator (TMA) copies in boxes between device and shared memory.
// Plain C++17: the host fills a map, kernels receive it by value.
#pragma once
#include <stdint.h>

namespace gk::cuda {

// CUtensorMap of the driver: opaque words.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// 16-bit elements; base and row stride are multiples of 16 bytes. A box has rows of 128 bytes, swizzled (SWIZZLE_128B):
// the 16-byte piece c of row r lies at piece c ^ (r % 8) of that row. What lies outside of the matrix is read as zeros
// and not written.
struct TensorTiles {
    const void* base;
    int32_t dtype;                      // kBfloat16 or kFloat16
    int64_t rows, columns, row_stride;  // elements
    int32_t box_rows;
};
constexpr int kBoxBytes = 128;   // a row of a box
constexpr int kBoxColumns = 64;  // elements of it

}  // namespace gk::cuda
