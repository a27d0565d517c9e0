// driver.h: the embedded image of a device, loaded once per context, and its kernels launched. Nothing here waits for
// the device. What the first launch in a context has to load is loaded then, also while a CUDA graph is being captured.
#include "driver.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../layout.h"
#include "images.h"
#include "libcuda.h"

namespace gk::cuda {

namespace {

// Bytes per block. Above, the multiprocessor's memory is all to be shared memory: left to itself, the driver may split
// it so that fewer blocks fit than could.
constexpr unsigned kLargeSharedBytes = 48 << 10;

// ---- which image a device runs --------------------------------------------------------------------------------------

bool starts_with(const char* text, const char* prefix) { return std::strncmp(text, prefix, std::strlen(prefix)) == 0; }

bool is_ptx(const Image& image) { return starts_with(image.architecture, "compute_"); }

int capability_of(const Image& image) { return std::atoi(std::strchr(image.architecture, '_') + 1); }

// 0: does not run there. Best is machine code with the instructions of just this device (the "a" of sm_90a), then
// machine code of the same major version, then PTX, of both the newest.
int suitability(const Image& image, int capability, bool ptx_allowed) {
    const int built_for = capability_of(image);
    const bool specific = image.architecture[std::strlen(image.architecture) - 1] == 'a';
    if (specific) return built_for == capability && !is_ptx(image) ? 3000 : 0;
    if (built_for > capability) return 0;
    if (is_ptx(image)) return ptx_allowed ? built_for : 0;
    return built_for / 10 == capability / 10 ? 1000 + built_for : 0;
}

// The best image of each source that has one.
std::vector<const Image*> images_for(int capability, bool ptx_allowed) {
    std::map<std::string, const Image*> best;
    for (size_t i = 0; i < kImageCount; i++) {
        const int score = suitability(kImages[i], capability, ptx_allowed);
        if (score == 0) continue;
        const Image*& chosen = best[kImages[i].source];
        if (!chosen || score > suitability(*chosen, capability, ptx_allowed)) chosen = &kImages[i];
    }
    std::vector<const Image*> images;
    for (const auto& [source, image] : best) images.push_back(image);
    return images;
}

// ---- what is loaded -------------------------------------------------------------------------------------------------

// While it lives, this thread may load code although a stream is being captured.
class RelaxedCapture {
  public:
    explicit RelaxedCapture(const Driver& d) : d_(d) { d_.cuThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { d_.cuThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    const Driver& d_;
    int mode_ = kCaptureRelaxed;
};

struct Module {
    Handle handle;
    const Image* image;
};

struct Context {
    Device device;
    std::vector<Module> modules;
    std::map<std::string, Handle> functions;
};

int attribute(const Driver& d, DeviceAttribute which, int device) {
    int value = 0;
    check(d, d.cuDeviceGetAttribute(&value, which, device), "a property of the GPU cannot be read");
    return value;
}

Device describe(const Driver& d, int device) {
    return {10 * attribute(d, kCapabilityMajor, device) + attribute(d, kCapabilityMinor, device),
            attribute(d, kMultiprocessors, device), attribute(d, kSharedPerBlockOptin, device)};
}

std::mutex& lock() {
    static auto& mutex = *new std::mutex;
    return mutex;
}

// The current context, as torch leaves it; without one, the context that torch would use. Under the lock. Contexts are
// told apart by number: the address of a destroyed one may return.
Context& current_context(const Driver& d) {
    Handle handle = nullptr;
    check(d, d.cuCtxGetCurrent(&handle), "the current CUDA context cannot be had");
    int device = 0;
    if (!handle) {
        check(d, d.cuDeviceGet(&device, 0), "the NVIDIA driver finds no GPU, see nvidia-smi");
        check(d, d.cuDevicePrimaryCtxRetain(&handle, device), "no CUDA context could be made on device 0");
        check(d, d.cuCtxSetCurrent(handle), "the CUDA context of device 0 cannot be used");
    }
    unsigned long long number = 0;
    check(d, d.cuCtxGetId(handle, &number), "the current CUDA context cannot be used");
    static auto& contexts = *new std::map<unsigned long long, Context>;
    if (const auto found = contexts.find(number); found != contexts.end()) return found->second;
    check(d, d.cuCtxGetDevice(&device), "the device of the current CUDA context cannot be had");
    return contexts.emplace(number, Context{describe(d, device), {}, {}}).first->second;
}

void load_images(const Driver& d, Context& context) {
    const int capability = context.device.capability;
    const std::vector<const Image*> images = images_for(capability, d.version >= kBuiltForCuda);
    if (images.empty())
        throw std::runtime_error("no kernels for a device of compute capability " + std::to_string(capability / 10) +
                                 "." + std::to_string(capability % 10) + ": this build has " + built_architectures());
    std::vector<Module> modules;
    for (const Image* image : images) {
        Handle module = nullptr;
        check(d, d.cuModuleLoadData(&module, image->code),
              "the kernels for " + std::string(image->architecture) + " cannot be loaded");
        modules.push_back({module, image});
    }
    context.modules = modules;
}

// The function, ready for blocks of so much shared memory, which is large at each of its launches or at none.
Handle find_function(const Driver& d, Context& context, const char* kernel, unsigned shared) {
    if (const auto found = context.functions.find(kernel); found != context.functions.end()) return found->second;
    const RelaxedCapture relaxed(d);
    if (context.modules.empty()) load_images(d, context);
    Handle function = nullptr;
    for (const Module& module : context.modules) {
        if (d.cuModuleGetFunction(&function, module.handle, kernel) == 0) break;
        function = nullptr;
    }
    const std::string name = "kernel '" + std::string(kernel) + "'";
    if (!function)
        throw std::runtime_error(name + " is not among those for " + context.modules.front().image->architecture);
    // Once, and not per launch: threads share the function, and a limit that is not reached costs nothing.
    int static_shared = 0;
    check(d, d.cuFuncGetAttribute(&static_shared, kStaticShared, function), name);
    check(d, d.cuFuncSetAttribute(function, kMaxDynamicShared, context.device.shared_per_block - static_shared), name);
    constexpr int kPercent = 100;
    if (shared > kLargeSharedBytes) check(d, d.cuFuncSetAttribute(function, kPreferredSharedCarveout, kPercent), name);
    if (d.cuFuncLoad) check(d, d.cuFuncLoad(function), name);  // else the driver does so in the launch
    return context.functions[kernel] = function;
}

}  // namespace

void launch(const char* kernel, const LaunchConfig& config, const void* argument, size_t) {
    const Driver& d = driver();
    Handle function;
    {
        const std::lock_guard<std::mutex> guard(lock());
        function = find_function(d, current_context(d), kernel, config.shared);
    }
    LaunchAttribute cluster{kClusterDimension, {}, {}};
    cluster.value.cluster = {config.cluster, 1, 1};
    const FullLaunchConfig full{
        {config.grid, 1, 1},         {config.block, 1, 1}, config.shared, config.stream, &cluster,
        config.cluster > 1 ? 1u : 0u};
    void* arguments[] = {const_cast<void*>(argument)};
    if (const Result error = d.cuLaunchKernelEx(&full, function, arguments, nullptr))
        throw std::runtime_error(
            "kernel '" + std::string(kernel) + "' cannot be launched with " + std::to_string(config.grid) +
            " blocks of " + std::to_string(config.block) + " threads and " + std::to_string(config.shared) +
            " bytes of shared memory in clusters of " + std::to_string(config.cluster) + ": " + error_text(d, error));
}

void encode_tensor_map(const TensorTiles& tiles, TensorMap* map) {
    const Driver& d = driver();
    constexpr int kElementBytes = 2;
    const uint64_t size[] = {static_cast<uint64_t>(tiles.columns), static_cast<uint64_t>(tiles.rows)};
    const uint64_t row_stride[] = {static_cast<uint64_t>(tiles.row_stride * kElementBytes)};
    const uint32_t box[] = {kBoxColumns, static_cast<uint32_t>(tiles.box_rows)}, steps[] = {1, 1};
    const Result error = d.cuTensorMapEncodeTiled(map, tiles.dtype == kBfloat16 ? kMapBFloat16 : kMapFloat16, 2,
                                                  const_cast<void*>(tiles.base), size, row_stride, box, steps,
                                                  kNoInterleave, kSwizzle128, kPromote256, kFillZeros);
    check(d, error,
          "no tensor map for " + std::to_string(tiles.rows) + " rows of " + std::to_string(tiles.columns) +
              " elements, " + std::to_string(tiles.row_stride) + " apart");
}

const Device& current_device() {
    const Driver& d = driver();
    const std::lock_guard<std::mutex> guard(lock());
    return current_context(d).device;
}

int built_for_cuda() { return kBuiltForCuda; }

const char* built_architectures() { return kBuiltArchitectures; }

int driver_cuda() {
    try {
        return library().version;
    } catch (const std::exception&) {
        return 0;
    }
}

const char* image_for(int capability) {
    const int version = driver_cuda();
    const std::vector<const Image*> images = images_for(capability, version == 0 || version >= kBuiltForCuda);
    const Image* best = nullptr;
    for (const Image* image : images)
        if (!best || suitability(*image, capability, true) > suitability(*best, capability, true)) best = image;
    return best ? best->architecture : "";
}

}  // namespace gk::cuda
