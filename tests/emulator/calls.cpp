// The emulated kernels for Python's ctypes: one function, which takes the name of another and its arguments as integers
// (addresses, sizes), and the address of gk::Params or gk::PlanRules.
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/api.h"
#include "settings.h"

namespace {

class Arguments {
  public:
    Arguments(const int64_t* values, int count) : next_(values), end_(values + count) {}
    template <class T>
    void take(T*& pointer) {
        pointer = reinterpret_cast<T*>(static_cast<uintptr_t>(value()));
    }
    template <class T>
    void take(T& number) {
        number = static_cast<T>(value());
    }
    template <class... T>
    void all(T&... targets) {
        (take(targets), ...);
        if (next_ != end_) throw std::invalid_argument("too many arguments");
    }

  private:
    int64_t value() {
        if (next_ == end_) throw std::invalid_argument("too few arguments");
        return *next_++;
    }
    const int64_t *next_, *end_;
};

template <class T>
T read(const void* numbers) {
    return *static_cast<const T*>(numbers);
}

gk::RowArgs take_rows(Arguments& values, const void* numbers) {
    gk::RowArgs a = {};
    a.params = read<gk::Params>(numbers);
    values.all(a.logits, a.logits_dtype, a.logits_stride, a.rows, a.vocab, a.bias, a.grad, a.grad_dtype, a.grad_stride,
               a.rounding_error, a.ids, a.token_of.start, a.token_of.index, a.temperature, a.tokens.table,
               a.tokens.count, a.tokens.values, a.lse, a.g_logp, a.g_entropy);
    return a;
}

template <class... Rest>
void take_kept(Arguments& values, gk::KeptArgs& a, Rest&... rest) {
    values.all(a.hidden, a.weight, a.bias, a.ids, a.token_of.start, a.token_of.index, a.rows, a.slots, a.tokens,
               a.vocab, a.width, a.hidden_row_stride, a.weight_row_stride, a.dtype, rest...);
}

// Of memory that holds what it must not be read as, and ends where it says.
std::vector<char> workspace_of(size_t bytes) { return std::vector<char>(bytes, '\xFF'); }

void call(const std::string& function, Arguments values, const void* numbers) {
    using namespace gk;
    if (function == "single_pass") {
        cuda::single_pass(take_rows(values, numbers), nullptr);
    } else if (function == "stats") {
        cuda::stats(take_rows(values, numbers), nullptr);
    } else if (function == "gradient") {
        cuda::gradient(take_rows(values, numbers), nullptr);
    } else if (function == "plan") {
        PlanArgs a = {};
        a.rules = read<PlanRules>(numbers);
        values.all(a.tokens, a.sequences, a.row_length, a.cu_seqlens, a.ids, a.mask, a.mask_bytes, a.advantages.data,
                   a.advantages.per_what, a.old, a.ref, a.rollout, a.rollout_weights.data, a.rollout_weights.per_what,
                   a.temperature.data, a.temperature.per_what, a.threshold, a.normalizer, a.table, a.values, a.lse,
                   a.offsets, a.lengths, a.scored, a.active, a.clean_ids, a.order, a.counts);
        cuda::plan(a, workspace_of(cuda::plan_workspace(a.tokens, a.sequences)).data(), nullptr);
    } else if (function == "token_objective") {
        TokenArgs a = {};
        a.params = read<Params>(numbers);
        values.all(a.rows, a.token_of.start, a.token_of.index, a.tokens.table, a.tokens.count, a.tokens.values);
        cuda::token_objective(a, nullptr);
    } else if (function == "sequence_objective") {
        SequenceArgs a = {};
        a.params = read<Params>(numbers);
        values.all(a.first, a.last, a.offsets, a.lengths, a.scored, a.tokens.table, a.tokens.count, a.tokens.values);
        cuda::sequence_objective(a, nullptr);
    } else if (function == "reduce") {
        ReduceArgs a = {};
        a.params = read<Params>(numbers);
        values.all(a.tokens.count, a.sequences, a.offsets, a.scored, a.tokens.table, a.tokens.values, a.group_index,
                   a.groups, a.sequence_sums, a.group_sums, a.totals, a.extrema);
        cuda::reduce(a, workspace_of(cuda::reduce_workspace(a.sequences)).data(), nullptr);
    } else if (function == "group_statistics") {
        const float* rewards;
        const int64_t* index;
        int64_t count, groups, ddof;
        int32_t scale, baseline;
        float *advantages, *mean, *std;
        values.all(rewards, index, count, groups, scale, baseline, ddof, advantages, mean, std);
        cuda::group_statistics(rewards, index, count, groups, scale, baseline, ddof, read<double>(numbers), advantages,
                               mean, std, nullptr);
    } else if (function == "scale") {
        void* x;
        int32_t dtype;
        int64_t count;
        const float* factor;
        values.all(x, dtype, count, factor);
        cuda::scale(x, dtype, count, factor, nullptr);
    } else if (function == "kept_logits") {
        KeptArgs a = {};
        float* logits;
        take_kept(values, a, logits);
        cuda::kept_logits(a, logits, nullptr);
    } else if (function == "kept_dhidden") {
        KeptArgs a = {};
        KeptTarget target = {};
        const float* dlogits;
        take_kept(values, a, dlogits, target.data, target.row_stride, target.dtype);
        cuda::kept_dhidden(a, dlogits, target, nullptr);
    } else if (function == "kept_dweight") {
        KeptPairs a = {};
        PairsById<int64_t> by_id = {};
        KeptTarget target = {};
        values.all(a.hidden, a.ids, a.token_of, a.dlogits, a.count, a.tokens, a.vocab, a.width, a.hidden_row_stride,
                   a.dtype, by_id.starts, by_id.pairs, target.data, target.row_stride, target.dtype, target.add);
        cuda::kept_dweight(a, by_id, target, nullptr);
    } else {
        throw std::invalid_argument("no function " + function);
    }
}

}  // namespace

extern "C" {

// Null, or what went wrong; valid until the next call. `numbers`: of the function, or eps for group_statistics.
const char* gk_call(const char* function, const int64_t* values, int count, const void* numbers) {
    static std::string error;
    try {
        call(function, Arguments(values, count), numbers);
    } catch (const std::exception& exception) {
        error = exception.what();
        return error.c_str();
    }
    return nullptr;
}

void gk_emulator_order(unsigned order) { gk::emulator::settings().order = order; }
void gk_emulator_device(const char* device) { gk::emulator::settings().device = gk::emulator::parse_device(device); }
int gk_emulator_launches() { return gk::emulator::settings().launches; }
const char* gk_emulator_last_kernel() { return gk::emulator::settings().last_kernel.c_str(); }
unsigned gk_emulator_last_launch(int what) {  // grid, block, shared memory, cluster
    const gk::cuda::LaunchConfig& config = gk::emulator::settings().last_config;
    const unsigned values[] = {config.grid, config.block, config.shared, config.cluster};
    return values[what];
}

}  // extern "C"
