// Runs the kernels of one instruction set, which Python chooses (kernels/compiled/cpu.py), in the threads of
// parallel_for; the build defines GK_HAVE_X86 where it has those of x86-64.
#include "dispatch.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace gk {

namespace {

struct Isa {
    const char* name;
    RowKernels rows;
    SparseKernel sparse;
    GatheredKernels (*gathered)(int32_t dtype);
};

#define GK_ISA_OF(isa) {#isa, isa::row_kernels(), isa::sparse_kernel(), isa::gathered_kernels}
const Isa kBuilt[] = {
    GK_ISA_OF(baseline),
#ifdef GK_HAVE_X86
    GK_ISA_OF(avx2),
    GK_ISA_OF(avx512),
#endif
};
std::atomic<const Isa*> chosen{kBuilt};

// Enough elements in a piece to pay for handing it out; a piece is whole rows. `other`: what the kernel takes beside.
template <class Kernel, class Other>
void run(const Kernel& kernel, const RowArgs& args, const Other& other, int threads) {
    constexpr int64_t kPieceElements = 32768;
    const int64_t grain = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, args.vocab));
    parallel_for(args.rows, grain, threads, [&](int64_t first, int64_t last) { kernel(args, other, first, last); });
}

}  // namespace

const char* cpu_isa() { return chosen.load()->name; }

bool set_cpu_isa(const char* name) {
    for (const Isa& isa : kBuilt) {
        if (std::strcmp(isa.name, name) != 0) continue;
        chosen = &isa;
        return true;
    }
    return false;
}

void stats(const RowArgs& args, const TeacherArgs& teacher, int threads) {
    run(chosen.load()->rows.stats, args, teacher, threads);
}
void gradient(const RowArgs& args, const TeacherArgs& teacher, int threads) {
    run(chosen.load()->rows.gradient, args, teacher, threads);
}
void sparse_gradient(const RowArgs& args, const SparseRows& out, int threads) {
    run(chosen.load()->sparse, args, out, threads);
}

void gathered_logits(const GatheredArgs& args, float* logits, int threads) {
    const GatheredKernels kernels = chosen.load()->gathered(args.dtype);
    parallel_for(args.rows, gathered_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) { kernels.logits(args, logits, first, last); });
}

void gathered_dhidden(const GatheredArgs& args, const float* dlogits, const GatheredTarget& target, int threads) {
    const GatheredKernels kernels = chosen.load()->gathered(args.dtype);
    parallel_for(args.rows, gathered_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) { kernels.dhidden(args, dlogits, target, first, last); });
}

void gathered_dweight(const TokenIdPairs& pairs, const GatheredTarget& target, int threads) {
    if (pairs.count > INT32_MAX) throw std::invalid_argument("2^31 kept ids and more in one call; expected fewer");
    // A counting sort, stable: the pairs of an id stay in order. Ids below 0 come first and are left out.
    // 32 bits: beside 8 ids per token, starts take most of the memory of a call.
    std::vector<int32_t> starts(pairs.vocab + 2);
    for (int64_t k = 0; k < pairs.count; k++) starts[std::max(pairs.ids[k], -1) + 2]++;
    std::vector<int32_t> places(pairs.count - starts[1]);
    starts[1] = 0;
    for (int64_t id = 2; id < pairs.vocab + 2; id++) starts[id] += starts[id - 1];
    for (int64_t k = 0; k < pairs.count; k++)
        if (pairs.ids[k] >= 0) places[starts[pairs.ids[k] + 1]++] = static_cast<int32_t>(k);
    const PairsById by_id = {starts.data(), places.data()};
    const GatheredKernels kernels = chosen.load()->gathered(pairs.dtype);
    parallel_for(pairs.vocab, gathered_grain(pairs.vocab, pairs.count), threads,
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
