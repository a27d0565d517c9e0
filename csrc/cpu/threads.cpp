// Where the threads of parallel_for come from, see dispatch.h.
#include <dlfcn.h>
#include <pthread.h>

#include "api.h"
#include "dispatch.h"

namespace gk {

static std::atomic<bool> is_forked{false};
static const int registered = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

OpenMPParallel openmp_parallel() {
    static const auto found = reinterpret_cast<OpenMPParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return is_forked || registered != 0 ? nullptr : found;
}

bool uses_openmp() { return openmp_parallel() != nullptr; }

}  // namespace gk
