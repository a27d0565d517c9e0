// Launches kernels of the embedded device code through the CUDA driver, which is loaded when it is first needed: the
// module links neither libcuda nor a CUDA runtime, and imports on a machine without a GPU.
//
// Device code is embedded as one image per architecture (cubins, and PTX for architectures to come); all kernels are
// extern "C" and take one struct by value. In the tests' emulator these same functions run the kernels on the CPU.
#pragma once
#include <stddef.h>

#include "tensor_map.h"

namespace gk::cuda {

struct LaunchConfig {
    unsigned grid;     // blocks, a multiple of `cluster`
    unsigned block;    // threads
    unsigned shared;   // bytes of dynamic shared memory; more than 48 KB is allowed where the device has it
    unsigned cluster;  // blocks per cluster, 1 for none; more needs compute capability 9.0
    void* stream;      // a CUstream, as an address
};

// Launches `kernel` with its one argument of `size` bytes on the current context, the primary one of device 0 if there
// is none. Throws std::runtime_error; its message names the cause and a remedy.
void launch(const char* kernel, const LaunchConfig& config, const void* argument, size_t size);

template <class Args>
void launch(const char* kernel, const LaunchConfig& config, const Args& args) {
    launch(kernel, config, &args, sizeof args);
}

// Fills a map with the driver's cuTensorMapEncodeTiled: zeros outside of the matrix, 256 bytes at a time fetched into
// the L2 cache. Throws as launch() does.
void encode_tensor_map(const TensorTiles& tiles, TensorMap* map);

struct Device {
    int capability;  // 10 * major + minor
    int multiprocessors;
    int shared_per_block;  // bytes, with the opt-in
};
const Device& current_device();  // of the current context; throws as launch() does

// For `grpo-kernels env`: nothing here throws.
int built_for_cuda();                   // 13000 for CUDA 13.0
const char* built_architectures();      // "sm_80 sm_90a compute_120"
int driver_cuda();                      // newest CUDA that the driver supports, 0 without a driver
const char* image_for(int capability);  // the embedded image that such a device would run, "" for none

}  // namespace gk::cuda
