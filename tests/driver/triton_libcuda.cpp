// A libcuda.so.1 for Triton's launcher (tests/triton_launches.py): it takes any code, and runs nothing.
#include <cuda.h>

extern "C" {

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the stand-in";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
    *value = 227 * 1024;  // of an H100: bytes of shared memory
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = CUcontext(1);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = CUcontext(1);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t*, CUlimit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = CUmodule(1);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
    *function = CUfunction(1);
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
    *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int*, CUfunction, const CUlaunchConfig*) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
    *static_cast<CUdeviceptr*>(value) = pointer;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) { return CUDA_SUCCESS; }

}  // extern "C"
