// The emulated kernels for Python's ctypes: one function, which takes the name of another and its arguments as integers
// (addresses, sizes), and the objective's parameters as floats.
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

gk::Params params_from(const double* values) {
    gk::Params params = {};
    auto* integers = reinterpret_cast<int32_t*>(&params);
    auto* floats = reinterpret_cast<float*>(&params) + gk::kParamIntegers;
    for (int i = 0; i < gk::kParamIntegers; i++) integers[i] = static_cast<int32_t>(values[i]);
    for (int i = 0; i < gk::kParamFloats; i++) floats[i] = static_cast<float>(values[gk::kParamIntegers + i]);
    return params;
}

void call(const std::string& function, Arguments values, const double* numbers) {
    using namespace gk;
    const Params params = params_from(numbers);
    if (function == "fused" || function == "stats" || function == "gradient") {
        RowArgs a = {};
        a.params = params;
        values.all(a.logits, a.logits_dtype, a.logits_pitch, a.rows, a.vocab, a.grad, a.grad_dtype, a.grad_pitch, a.ids,
                   a.residual, a.table, a.table_pitch, a.temperature, a.logp, a.lse, a.entropy, a.g_logp, a.g_entropy);
        (function == "fused" ? cuda::fused : function == "stats" ? cuda::stats : cuda::gradient)(a, nullptr);
    } else if (function == "objective") {
        int64_t tokens, table_pitch;
        const float *log_ratio, *logp, *entropy, *table;
        float* out;
        values.all(tokens, log_ratio, logp, entropy, table, table_pitch, out);
        cuda::objective_tokens(tokens, log_ratio, logp, entropy, table, table_pitch, params, out, nullptr);
    } else if (function == "reduce") {
        ReduceArgs a = {};
        a.params = params;
        values.all(a.scored, a.log_ratio, a.logp, a.entropy, a.value, a.kl, a.g_logp, a.table, a.tokens, a.table_pitch,
                   a.cu_seqlens, a.sequences, a.group_index, a.groups, a.sequence_sums, a.group_sums, a.totals,
                   a.extrema);
        std::vector<char> workspace(cuda::reduce_workspace(a.sequences), '\xFF');
        cuda::reduce(a, workspace.data(), nullptr);
    } else if (function == "group_statistics") {
        const float* rewards;
        const int64_t* index;
        int64_t count, groups, ddof;
        int32_t scale, baseline;
        float *advantages, *mean, *std;
        values.all(rewards, index, count, groups, scale, baseline, ddof, advantages, mean, std);
        cuda::group_statistics(rewards, index, count, groups, scale, baseline, ddof, numbers[0], advantages, mean, std,
                               nullptr);
    } else if (function == "scale") {
        void* x;
        int32_t dtype;
        int64_t count;
        const float* factor;
        values.all(x, dtype, count, factor);
        cuda::scale(x, dtype, count, factor, nullptr);
    } else {
        throw std::invalid_argument("no function " + function);
    }
}

}  // namespace

extern "C" {

// Null, or what went wrong; valid until the next call. `numbers`: sixteen parameters, or eps for group_statistics.
const char* gk_call(const char* function, const int64_t* values, int count, const double* numbers) {
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
const char* gk_emulator_last_kernel() { return gk::emulator::settings().last_kernel.c_str(); }
unsigned gk_emulator_last_launch(int what) {  // grid, block, shared memory, cluster
    const gk::cuda::LaunchConfig& config = gk::emulator::settings().last_config;
    const unsigned values[] = {config.grid, config.block, config.shared, config.cluster};
    return values[what];
}

}  // extern "C"
