// A libcuda.so.1 for tests: two GPUs of compute capability $FAKE_CAPABILITY whose driver supports CUDA $FAKE_VERSION.
// It prints what it is asked to load and to launch. Images are text: a kernel exists if its name is in there.
//
//     FAKE_INIT       result of cuInit              FAKE_CURRENT    the device whose context is current at first
//     FAKE_CAPTURING  a stream is being captured: code is loaded in relaxed mode alone
//     FAKE_LAUNCH     result of cuLaunchKernelEx
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

namespace {

int setting(const char* name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

struct Context {
    int device;
    unsigned long long number;
};
Context contexts[] = {{0, 10}, {1, 11}};
thread_local Context* current = getenv("FAKE_CURRENT") ? &contexts[setting("FAKE_CURRENT", 0)] : nullptr;
thread_local int capture_mode = 0;
std::mutex lock;
std::map<std::string, const char*> functions;  // by name and image

struct Launch {
    unsigned grid[3], block[3], shared;
    void* stream;
    struct Attribute {
        int id, padding;
        unsigned cluster[16];
    }* attributes;
    unsigned attribute_count;
};

}  // namespace

extern "C" {

int cuInit(unsigned) { return setting("FAKE_INIT", 0); }
int cuDriverGetVersion(int* version) {
    *version = setting("FAKE_VERSION", 13000);
    return 0;
}
int cuGetErrorName(int, const char** name) {
    *name = "CUDA_ERROR_FAKE";
    return 0;
}
int cuGetErrorString(int error, const char** text) {
    static thread_local std::string said;
    said = "number " + std::to_string(error);
    *text = said.c_str();
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    const int capability = setting("FAKE_CAPABILITY", 90);
    const std::map<int, int> values = {{75, capability / 10}, {76, capability % 10}, {16, 132 - device},
                                       {97, 232448},          {81, 233472},          {38, 52428800}};
    *value = values.at(attribute);
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    printf("retain %d\n", device);
    *context = &contexts[device];
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = current;
    return 0;
}
int cuCtxSetCurrent(void* context) {
    current = static_cast<Context*>(context);
    return 0;
}
int cuCtxGetDevice(int* device) {
    *device = current->device;
    return 0;
}
int cuCtxGetId(void* context, unsigned long long* number) {
    *number = static_cast<Context*>(context)->number;
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    if (getenv("FAKE_CAPTURING") && capture_mode != 2) return 900;
    printf("load %s on %d\n", static_cast<const char*>(image), current->device);
    usleep(20000);  // in which another thread that does not wait would load it too
    *module = const_cast<void*>(image);
    return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    const char* image = static_cast<const char*>(module);
    if (!strstr(image, name)) return 500;
    const std::lock_guard<std::mutex> guard(lock);
    const auto entry = functions.emplace(std::string(name) + " of " + std::string(image, strcspn(image, ":")), image);
    *function = const_cast<char*>(entry.first->first.c_str());
    return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
    *value = attribute == 1 ? 1024 : -1;
    return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    printf("attribute %d of %s is %d\n", attribute, static_cast<const char*>(function), value);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
int cuLaunchKernelEx(const Launch* launch, void* function, void** arguments, void**) {
    const int result = setting("FAKE_LAUNCH", 0);
    if (result == 0)
        printf("launch %s on %d: %ux%ux%u %ux%ux%u shared %u stream %zu argument %d capture mode %d",
               static_cast<const char*>(function), current->device, launch->grid[0], launch->grid[1], launch->grid[2],
               launch->block[0], launch->block[1], launch->block[2], launch->shared,
               reinterpret_cast<size_t>(launch->stream), *static_cast<int*>(arguments[0]), capture_mode);
    for (unsigned i = 0; result == 0 && i < launch->attribute_count; i++)
        printf(" attribute %d %ux%ux%u", launch->attributes[i].id, launch->attributes[i].cluster[0],
               launch->attributes[i].cluster[1], launch->attributes[i].cluster[2]);
    if (result == 0) printf("\n");
    return result;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const unsigned long long* size,
                           const unsigned long long* row_stride, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
    if (row_stride[0] % 16 != 0) return 1;
    printf("map of type %d, rank %u at %zu: %llu x %llu, row_stride %llu, box %u x %u, steps %u %u, %d %d %d %d\n",
           type, rank, reinterpret_cast<size_t>(base), size[0], size[1], row_stride[0], box[0], box[1], steps[0],
           steps[1], interleave, swizzle, promotion, fill);
    memset(map, 1, 128);
    return 0;
}

// What a program does besides launching.
void fake_make_current(int device) { current = device < 0 ? nullptr : &contexts[device]; }
void fake_reset(int device) { contexts[device].number += 100; }  // the context is another one at the same address

}  // extern "C"
