// The CUDA driver, libcuda.so.1, loaded when it is first asked for. Its interface is declared here, as far as it is
// used: a build needs no CUDA header.
#pragma once
#include <stdint.h>

#include <string>

namespace gk::cuda {

using Result = int;  // 0 is success
using Handle = void*;

enum DeviceAttribute { kMultiprocessors = 16, kCapabilityMajor = 75, kCapabilityMinor = 76, kSharedPerBlockOptin = 97 };
enum FunctionAttribute { kStaticShared = 1, kMaxDynamicShared = 8, kPreferredSharedCarveout = 9 };
enum CaptureMode { kCaptureRelaxed = 2 };

struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        char size[64];
        struct {
            unsigned x, y, z;
        } cluster;
    } value;
};
constexpr int kClusterDimension = 4;

struct FullLaunchConfig {
    unsigned grid[3], block[3], shared;
    Handle stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(FullLaunchConfig) == 56, "as in cuda.h");

// Of cuTensorMapEncodeTiled.
enum MapType { kMapFloat16 = 6, kMapBFloat16 = 9 };
constexpr int kNoInterleave = 0, kSwizzle128 = 3, kPromote256 = 3, kFillZeros = 0;

#define GK_DRIVER_FUNCTIONS(F)                                                                                \
    F(cuInit, unsigned)                                                                                       \
    F(cuDriverGetVersion, int*)                                                                               \
    F(cuGetErrorName, Result, const char**)                                                                   \
    F(cuGetErrorString, Result, const char**)                                                                 \
    F(cuDeviceGet, int*, int)                                                                                 \
    F(cuDeviceGetAttribute, int*, int, int)                                                                   \
    F(cuDevicePrimaryCtxRetain, Handle*, int)                                                                 \
    F(cuCtxGetCurrent, Handle*)                                                                               \
    F(cuCtxSetCurrent, Handle)                                                                                \
    F(cuCtxGetDevice, int*)                                                                                   \
    F(cuCtxGetId, Handle, unsigned long long*)                                                                \
    F(cuModuleLoadData, Handle*, const void*)                                                                 \
    F(cuModuleGetFunction, Handle*, Handle, const char*)                                                      \
    F(cuFuncGetAttribute, int*, int, Handle)                                                                  \
    F(cuFuncSetAttribute, Handle, int, int)                                                                   \
    F(cuThreadExchangeStreamCaptureMode, int*)                                                                \
    F(cuLaunchKernelEx, const FullLaunchConfig*, Handle, void**, void**)                                      \
    F(cuTensorMapEncodeTiled, void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, \
      const uint32_t*, int, int, int, int)

struct Driver {
#define GK_MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
    GK_DRIVER_FUNCTIONS(GK_MEMBER)
#undef GK_MEMBER
    Result (*cuFuncLoad)(Handle) = nullptr;  // since CUDA 12.4
    std::string missing;                     // a function that this driver is too old to have
    int version = 0;                         // newest CUDA that it supports: 12080 for 12.8
};

// Both throw std::runtime_error with one sentence. GRPO_KERNELS_LIBCUDA names another file than libcuda.so.1, for
// tests.
const Driver& library();  // loaded, nothing more
const Driver& driver();   // initialised, and new enough for the embedded machine code

std::string dotted(int cuda_version);                                 // "12.8" for 12080
std::string error_text(const Driver& d, Result error);                // "CUDA_ERROR_INVALID_VALUE (invalid argument)"
void check(const Driver& d, Result result, const std::string& what);  // throws "what: error" where it is one

}  // namespace gk::cuda
