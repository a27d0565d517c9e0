#include "libcuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

#include "images.h"

namespace gk::cuda {

std::string dotted(int cuda_version) {
    return std::to_string(cuda_version / 1000) + "." + std::to_string(cuda_version % 1000 / 10);
}

std::string error_text(const Driver& d, Result error) {
    const char *name = nullptr, *text = nullptr;
    d.cuGetErrorName(error, &name);
    d.cuGetErrorString(error, &text);
    return std::string(name ? name : "error " + std::to_string(error)) + (text ? " (" + std::string(text) + ")" : "");
}

void check(const Driver& d, Result result, const std::string& what) {
    if (result != 0) throw std::runtime_error(what + ": " + error_text(d, result));
}

// Loaded, and nothing more. As all that is kept here it is never destroyed: threads may launch until the process ends.
const Driver& library() {
    static const Driver& loaded = *[] {
        const char* chosen = std::getenv("GRPO_KERNELS_LIBCUDA");
        void* handle = dlopen(chosen ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!handle) {
            const char* reason = dlerror();
            throw std::runtime_error("no NVIDIA driver was found (" + std::string(reason ? reason : "dlopen failed") +
                                     "): install one for CUDA " + dotted(kBuiltForCuda) +
                                     " or later, after which nvidia-smi lists the GPU, or use another backend");
        }
        auto* d = new Driver;
#define GK_LOAD(name, ...)                                                     \
    d->name = reinterpret_cast<Result (*)(__VA_ARGS__)>(dlsym(handle, #name)); \
    if (!d->name) d->missing = #name;
        GK_DRIVER_FUNCTIONS(GK_LOAD)
#undef GK_LOAD
        d->cuFuncLoad = reinterpret_cast<Result (*)(Handle)>(dlsym(handle, "cuFuncLoad"));
        if (d->cuDriverGetVersion) d->cuDriverGetVersion(&d->version);
        return d;
    }();
    return loaded;
}

const Driver& driver() {
    static const Driver& ready = *[] {
        const Driver& d = library();
        // Machine code runs on every driver of its CUDA major version and on later ones.
        const int oldest = d.missing.empty() ? kBuiltForCuda / 1000 * 1000 : kBuiltForCuda;
        if (d.version < oldest || !d.missing.empty())
            throw std::runtime_error("the NVIDIA driver supports CUDA " + dotted(d.version) +
                                     ", and these kernels need " + dotted(oldest) + ": update the driver");
        check(d, d.cuInit(0), "the NVIDIA driver finds no GPU that it can use, see nvidia-smi");
        return &d;
    }();
    return ready;
}

}  // namespace gk::cuda
