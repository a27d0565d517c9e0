// Sparse gradients: what systematic sampling along a row of d loss / d logits needs besides the row
// (contract.SparseRule of Python). CPU and device kernels compile this file.
#pragma once
#include "args.h"

namespace gk {

// Of 32 bits, as murmur3 ends.
GK_HD uint32_t mixed(uint32_t x) {
    x += 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// Where the running sum of a token begins, in units of 1 / kSparseOne.
GK_HD uint32_t start_of_sum(int64_t token, float lse, int64_t first_id) {
    union {
        float number;
        uint32_t bits;
    } of_lse = {lse};
    const uint32_t place = mixed(static_cast<uint32_t>(token));
    return mixed(mixed(place + of_lse.bits) + static_cast<uint32_t>(first_id)) >> 1;
}

}  // namespace gk
