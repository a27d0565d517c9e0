// How the kernels that are compiled once read and write one number. The row kernels have vectors of their own (math.h).
#pragma once
#include <stdint.h>

#include <cstring>

namespace gk {

struct Float32 {
    using Element = float;
    static float load(float x) { return x; }
    static float store(float x) { return x; }
};

struct BFloat16 {
    using Element = uint16_t;
    static float load(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static uint16_t store(float x) {  // round to nearest even; a NaN stays one
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40u);
        return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
};

}  // namespace gk
