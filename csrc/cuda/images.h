// The device code inside the module. The build generates the definitions (tools/kernel_build/images.py).
#pragma once
#include <stddef.h>

namespace gk::cuda {

struct Image {
    const char* architecture;  // "sm_90a": machine code; "compute_120": PTX, which the driver compiles
    const char* source;        // the .cu file; a device runs one image of each
    const void* code;
};

extern const Image kImages[];
extern const size_t kImageCount;
extern const int kBuiltForCuda;                // 13000 for CUDA 13.0
extern const char* const kBuiltArchitectures;  // "sm_80 sm_90a compute_120"

}  // namespace gk::cuda
