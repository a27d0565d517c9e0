// Chooses the instruction set once, at the first call, and runs the row kernels on it.
// GRPO_KERNELS_CPU_ISA = avx512 | avx2 | baseline overrides the choice; setup.py defines GK_HAVE_* for what was built.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "rows.h"

namespace gk {

namespace {

struct Isa {
    const char* name;
    bool supported;
    RowKernels kernels;
};

// Best first.
const std::vector<Isa>& available() {
    static const std::vector<Isa> list = [] {
        std::vector<Isa> found;
#ifdef GK_HAVE_AVX512
        found.push_back({"avx512", cpu_features().avx512, avx512::row_kernels()});
#endif
#ifdef GK_HAVE_AVX2
        found.push_back({"avx2", cpu_features().avx2, avx2::row_kernels()});
#endif
        found.push_back({"baseline", true, baseline::row_kernels()});
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

// Enough elements in a piece to pay for handing it out; a piece is whole rows.
void run(RowKernel kernel, const RowArgs& args, int threads) {
    constexpr int64_t kPieceElements = 32768;
    check_rows(args.token_of, args.rows, args.tokens.count);
    const int64_t grain = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, args.vocab));
    parallel_for(args.rows, grain, threads, [&](int64_t first, int64_t last) { kernel(args, first, last); });
}

}  // namespace

const char* cpu_isa() { return chosen().load()->name; }

void set_cpu_isa(const char* name) {
    const Isa* isa = find(name);
    chosen().store(isa);
}

void single_pass(const RowArgs& args, int threads) { run(chosen().load()->kernels.single_pass, args, threads); }
void stats(const RowArgs& args, int threads) { run(chosen().load()->kernels.stats, args, threads); }
void gradient(const RowArgs& args, int threads) { run(chosen().load()->kernels.gradient, args, threads); }

}  // namespace gk
