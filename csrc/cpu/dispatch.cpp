// Chooses the instruction set once, at the first call, and runs the row kernels on it; and where the threads of
// parallel_for come from.
// GRPO_KERNELS_CPU_ISA = avx512 | avx2 | baseline overrides the choice; setup.py defines GK_HAVE_* for what was built.
#include "dispatch.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "kernels.h"

namespace gk {

namespace {

struct Isa {
    const char* name;
    bool supported;
    RowKernels kernels;
    SparseKernel sparse;
    KeptKernels (*kept)(int32_t dtype);
};

// Best first.
const std::vector<Isa>& available() {
    static const std::vector<Isa> list = [] {
        std::vector<Isa> found;
#ifdef GK_HAVE_AVX512
        found.push_back(
            {"avx512", cpu_features().avx512, avx512::row_kernels(), avx512::sparse_kernel(), avx512::kept_kernels});
#endif
#ifdef GK_HAVE_AVX2
        found.push_back({"avx2", cpu_features().avx2, avx2::row_kernels(), avx2::sparse_kernel(), avx2::kept_kernels});
#endif
        found.push_back({"baseline", true, baseline::row_kernels(), baseline::sparse_kernel(), baseline::kept_kernels});
        return found;
    }();
    return list;
}

const Isa* find(const char* name) {
    std::string usable;
    for (const Isa& isa : available()) {
        if (isa.supported && std::strcmp(isa.name, name) == 0) return &isa;
        if (isa.supported) usable += std::string(usable.empty() ? "" : ", ") + isa.name;
    }
    throw std::invalid_argument("instruction set '" + std::string(name) +
                                "' is unknown or not available here; usable: " + usable);
}

const Isa* first_choice() {
    const char* name = std::getenv("GRPO_KERNELS_CPU_ISA");
    if (name && *name) {
        try {
            return find(name);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string("GRPO_KERNELS_CPU_ISA: ") + error.what());
        }
    }
    const Isa* isa = available().data();
    while (!isa->supported) isa++;
    return isa;
}

std::atomic<const Isa*>& chosen() {
    static std::atomic<const Isa*> isa{first_choice()};
    return isa;
}

// Enough elements in a piece to pay for handing it out; a piece is whole rows. `other`: what the kernel takes beside.
template <class Kernel, class Other>
void run(const Kernel& kernel, const RowArgs& args, const Other& other, int threads) {
    constexpr int64_t kPieceElements = 32768;
    const int64_t grain = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, args.vocab));
    parallel_for(args.rows, grain, threads, [&](int64_t first, int64_t last) { kernel(args, other, first, last); });
}

}  // namespace

const char* cpu_isa() { return chosen().load()->name; }

void set_cpu_isa(const char* name) {
    const Isa* isa = find(name);
    chosen().store(isa);
}

void stats(const RowArgs& args, const TeacherArgs& teacher, int threads) {
    run(chosen().load()->kernels.stats, args, teacher, threads);
}
void gradient(const RowArgs& args, const TeacherArgs& teacher, int threads) {
    run(chosen().load()->kernels.gradient, args, teacher, threads);
}
void sparse_gradient(const RowArgs& args, const SparseRows& out, int threads) {
    run(chosen().load()->sparse, args, out, threads);
}

void kept_logits(const KeptArgs& args, float* logits, int threads) {
    const KeptKernels kernels = chosen().load()->kept(args.dtype);
    parallel_for(args.rows, kept_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) { kernels.logits(args, logits, first, last); });
}

void kept_dhidden(const KeptArgs& args, const float* dlogits, const KeptTarget& target, int threads) {
    const KeptKernels kernels = chosen().load()->kept(args.dtype);
    parallel_for(args.rows, kept_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) { kernels.dhidden(args, dlogits, target, first, last); });
}

void kept_dweight(const KeptPairs& pairs, const KeptTarget& target, int threads) {
    if (pairs.count > INT32_MAX) throw std::invalid_argument("2^31 kept ids and more in one call; expected fewer");
    // A counting sort, stable: the pairs of an id stay in order. Ids below 0 come first and are left out.
    // 32 bits: beside 8 kept ids per token, starts take most of the memory of a call.
    std::vector<int32_t> starts(pairs.vocab + 2);
    for (int64_t k = 0; k < pairs.count; k++) starts[std::max(pairs.ids[k], -1) + 2]++;
    std::vector<int32_t> places(pairs.count - starts[1]);
    starts[1] = 0;
    for (int64_t id = 2; id < pairs.vocab + 2; id++) starts[id] += starts[id - 1];
    for (int64_t k = 0; k < pairs.count; k++)
        if (pairs.ids[k] >= 0) places[starts[pairs.ids[k] + 1]++] = static_cast<int32_t>(k);
    const PairsById by_id = {starts.data(), places.data()};
    const KeptKernels kernels = chosen().load()->kept(pairs.dtype);
    parallel_for(pairs.vocab, kept_grain(pairs.vocab, pairs.count), threads,
                 [&](int64_t first, int64_t last) { kernels.dweight(pairs, by_id, target, first, last); });
}

// ---- threads --------------------------------------------------------------------------------------------------------
static std::atomic<bool> is_forked{false};
static const int registered = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

OpenMPParallel openmp_parallel() {
    static const auto found = reinterpret_cast<OpenMPParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return is_forked || registered != 0 ? nullptr : found;
}

bool uses_openmp() { return openmp_parallel() != nullptr; }

}  // namespace gk
