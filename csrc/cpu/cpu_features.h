// Which instruction sets this x86-64 processor and its operating system support, from CPUID and XGETBV.
// __builtin_cpu_supports would do, but not every compiler's run-time library fills in what it reads: zig's leaves it 0.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>

namespace gk {

struct CpuFeatures {
    bool avx2;    // all of what -march=x86-64-v3 adds for vectors and bits
    bool avx512;  // of -march=x86-64-v4
};

inline CpuFeatures cpu_features() {
    const auto has = [](uint32_t word, uint32_t bits) { return (word & bits) == bits; };
    constexpr uint32_t kFma = 1u << 12, kMovbe = 1u << 22, kOsSavesState = 1u << 27, kF16c = 1u << 29;  // leaf 1, ecx
    constexpr uint32_t kBmi = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;                                // leaf 7, ebx
    constexpr uint32_t kF = 1u << 16, kDq = 1u << 17, kCd = 1u << 28, kBw = 1u << 30, kVl = 1u << 31;   // leaf 7, ebx
    constexpr uint32_t kLzcnt = 1u << 5;                    // 0x80000001, ecx
    constexpr uint32_t kYmmState = 0x06, kZmmState = 0xE6;  // XCR0
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has(ecx, kFma | kMovbe | kOsSavesState | kF16c)) return {};
    uint32_t saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) || !has(ecx, kLzcnt)) return {};
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return {};
    const bool avx2 = has(saved, kYmmState) && has(ebx, kAvx2 | kBmi | kBmi2);
    const bool avx512 = avx2 && has(saved, kZmmState) && has(ebx, kF | kDq | kCd | kBw | kVl);
    return {avx2, avx512};
}

}  // namespace gk
#endif
