// 16-bit numbers of the emulated GPU: the conversions of its cvt instructions, in integer arithmetic.
#include <math.h>

#include "emulator.h"

namespace gk::emulator {

uint16_t float_to_bfloat(float x) {
    const uint32_t bits = cuda::to_bits(x);
    if (x != x) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t float_to_half(float x) {
    const uint16_t sign = static_cast<uint16_t>(cuda::to_bits(x) >> 16 & 0x8000u);
    if (x != x) return 0x7FFF;
    const float magnitude = fabsf(x);
    if (magnitude >= 65520.f) return sign | 0x7C00u;
    // nearbyint rounds to nearest even; in units of the last place a half has eleven significant bits.
    int exponent = magnitude == 0.f ? -14 : ilogbf(magnitude);
    if (exponent < -14) exponent = -14;
    const auto units = static_cast<uint32_t>(nearbyintf(ldexpf(magnitude, 10 - exponent)));
    return static_cast<uint16_t>(sign + (static_cast<uint32_t>(exponent + 14) << 10) + units);
}

float half_to_float(uint16_t half) {
    const float sign = half & 0x8000u ? -1.f : 1.f;
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024, exponent - 25));
}

}  // namespace gk::emulator
