// Compiles where csrc/cuda/libcuda.h declares the driver's interface as cuda.h does.
#include <cuda.h>
#include <stddef.h>

#include "cuda/libcuda.h"
#include "cuda/tensor_map.h"

namespace gk::cuda {

static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(FullLaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(FullLaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(FullLaunchConfig, shared) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(FullLaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(FullLaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(FullLaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));

static_assert(int(kClusterDimension) == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(int(kMultiprocessors) == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(int(kCapabilityMajor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(int(kCapabilityMinor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(int(kSharedPerBlockOptin) == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(int(kStaticShared) == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
static_assert(int(kMaxDynamicShared) == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(int(kMapFloat16) == CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
static_assert(int(kMapBFloat16) == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
static_assert(int(kNoInterleave) == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(int(kSwizzle128) == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(int(kPromote256) == CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
static_assert(int(kFillZeros) == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) % 64 == 0);
static_assert(int(kCaptureRelaxed) == CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace gk::cuda
