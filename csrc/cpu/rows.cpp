// The row kernels: statistics of a row of logits, its gradient, and both with the objective in between; with a teacher
// (teacher.h) the divergence and its gradient too.
//
//     u = logit + bias
//     y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
//     S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S
//     entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
//     dz_j = g_logp (1[j = id] - p_j) - g_entropy p_j (log p_j + entropy),    du_j = dz_j * dz/du
//
// A row is walked in blocks that fit the first-level cache. The running maximum is taken per block; sums run in
// independent lanes within a block and in double between blocks. An exponential is 2^t with t = (y - max) * to_z
// log2(e): its error grows with the distance from the maximum, where the term no longer counts.
//
// The gradient may overwrite the logits, in fp32 or as 16-bit values over the front of the same row. A forward sweep
// that reads each vector before it writes the one at the same index then never destroys a logit that is still needed.
//
// For a 16-bit gradient, `single_pass` keeps the exponentials of its first sweep, each block relative to the maximum so
// far, and the second sweep only scales them: one exponential per logit.
//
// Compiled once per instruction set, see kernels.h. Only internal linkage and plain functions of the C library here.
#include "rows.h"

#include <stdlib.h>

#include "teacher.h"

namespace gk {
namespace GK_ISA {

// ---- statistics -----------------------------------------------------------------------------------------------------
template <bool kKeep>
static Sums block_sums(const float* y, int64_t count, float max_y, float to_exponent, float* kept) {
    Float exps[4] = {}, moment[4] = {};
    for (int64_t i = 0; i < count; i += kStep) {
        for (int k = 0; k < 4; k++) {
            const Float t = max(splat(kMinExponent), (Float32::load(y + i + k * kWidth) - max_y) * to_exponent);
            const Float e = exp2_bounded(t);
            if (kKeep) Float32::store(kept + i + k * kWidth, e);
            exps[k] += e;
            moment[k] += e * t;  // t is finite where e is 0: no 0 * inf from a masked vocabulary
        }
    }
    const Float all_exps = (exps[0] + exps[1]) + (exps[2] + exps[3]);
    const Float all_moment = (moment[0] + moment[1]) + (moment[2] + moment[3]);
    Sums sums = {0.0, 0.0};
    for (int k = 0; k < kWidth; k++) {
        sums.exps += static_cast<double>(all_exps[k]);
        sums.moment += static_cast<double>(all_moment[k]);
    }
    return sums;
}

// The exponentials of a row, for the sweep that follows. Without memory for them, or where the gradient needs more than
// the exponential (softcap, entropy), `exps` is null and they are computed again.
struct Kept {
    float* exps;       // whole blocks
    float* reference;  // per block: exps = 2^((y - reference) to_exponent)
};

static Statistics row_statistics(const Row& row, int64_t id, Buffers& buffers, const Kept& kept = {}) {
    const double to_exponent = row.to_z / kLn2;
    float max_y = -kInfinity;
    Sums sums = {0.0, 0.0};
    for (int64_t first = 0; first < row.vocab; first += kBlock) {
        const int64_t count = row.vocab - first < kBlock ? row.vocab - first : kBlock;
        const int64_t padded = (count + kStep - 1) / kStep * kStep;
        const float* y = load_block(row, first, count, buffers);
        const float top = block_max(y, padded);
        if (top > max_y) {
            if (max_y > -kInfinity) sums = rebase(sums, (static_cast<double>(top) - max_y) * to_exponent);
            max_y = top;
        }
        // Before the first finite logit any finite reference will do: all terms are 0, or NaN.
        const float reference = max_y > -kInfinity ? max_y : 0.f;
        const Sums block =
            kept.exps ? block_sums<true>(y, padded, reference, static_cast<float>(to_exponent), kept.exps + first)
                      : block_sums<false>(y, padded, reference, static_cast<float>(to_exponent), nullptr);
        if (kept.exps) kept.reference[first / kBlock] = reference;
        sums.exps += block.exps;
        sums.moment += block.moment;
    }
    return statistics_of(row, id, max_y, sums, buffers);
}

// ---- gradient -------------------------------------------------------------------------------------------------------
template <class Out, bool kLinear, bool kCapped>
static void sweep_block(const Sweep& sweep, const float* y, const float* slope, int64_t count, void* out,
                        int64_t first) {
    auto* target = static_cast<typename Out::Element*>(out) + first;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth)
        Out::store(target + i, gradient_vector<kLinear, kCapped>(sweep, y + i, slope + i));
    if (i < count) store_tail<Out>(target + i, gradient_vector<kLinear, kCapped>(sweep, y + i, slope + i), count - i);
}

using SweepBlock = void (*)(const Sweep&, const float*, const float*, int64_t, void*, int64_t);

template <class Out>
static SweepBlock choose_sweep(bool linear, bool capped) {
    if (linear) return capped ? sweep_block<Out, true, true> : sweep_block<Out, true, false>;
    return capped ? sweep_block<Out, false, true> : sweep_block<Out, false, false>;
}

template <class Out>
static void scale_block(const float* exps, float factor, int64_t count, void* out, int64_t first) {
    auto* target = static_cast<typename Out::Element*>(out) + first;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) Out::store(target + i, Float32::load(exps + i) * factor);
    if (i < count) store_tail<Out>(target + i, Float32::load(exps + i) * factor, count - i);
}

// All entries but the sampled id's.
static void own_gradients(const RowArgs& args, const Row& row, const RowGradient& gradient, Buffers& buffers,
                          const Kept& kept, char* out) {
    const Sweep& sweep = gradient.sweep;
    const bool linear = gradient.linear;
    const SweepBlock sweep_any = args.grad_dtype == kFloat32    ? choose_sweep<Float32>(linear, row.capped)
                                 : args.grad_dtype == kBfloat16 ? choose_sweep<BFloat16>(linear, row.capped)
                                                                : choose_sweep<Float16>(linear, row.capped);
    const auto scale_kept = args.grad_dtype == kFloat32    ? scale_block<Float32>
                            : args.grad_dtype == kBfloat16 ? scale_block<BFloat16>
                                                           : scale_block<Float16>;
    for (int64_t first = 0; first < row.vocab; first += kBlock) {
        const int64_t count = row.vocab - first < kBlock ? row.vocab - first : kBlock;
        if (kept.exps && !linear) {
            // A reference above the maximum is that of a block without a finite logit: exponentials of 0.
            const double rise = fmin((static_cast<double>(kept.reference[first / kBlock]) - sweep.max) * row.to_z, 0.0);
            scale_kept(kept.exps + first, static_cast<float>(sweep.constant * exp(rise)), count, out, first);
        } else {
            sweep_any(sweep, load_block(row, first, count, buffers), buffers.slope, count, out, first);
        }
    }
}

// z - lse = (y - of.shift) * to_z - of.rest, from the row's own statistics or from a given lse.
static void row_gradient(const RowArgs& args, int64_t i, const Row& row, const Shift& of, float entropy, float g_logp,
                         float g_entropy, Buffers& buffers, const TeacherRow& other, const Kept& kept = {}) {
    char* out = gradient_row(args, i);
    const float g_divergence = other.given ? other.given->weight[args.token_of[i]] : 0.f;
    if (args.rounding_error) args.rounding_error[i] = 0.f;
    if (g_logp == 0.f && g_entropy == 0.f && g_divergence == 0.f) {
        __builtin_memset(out, 0, row.vocab * element_size(args.grad_dtype));
        return;
    }
    RowGradient gradient = make_gradient(args, i, row, of.shift, of.rest, entropy, g_logp, g_entropy, buffers);
    if (other.given)
        pair_gradients(args, row, buffers, of, other, g_divergence, gradient, out);
    else
        own_gradients(args, row, gradient, buffers, kept, out);
    if (gradient.id >= 0) store_sampled(args, i, gradient);
}

// ---- kernels over rows [first, last) --------------------------------------------------------------------------------
static Statistics write_statistics(const RowArgs& args, int64_t token, const Row& row, Buffers& buffers,
                                   TeacherRow& other, const Kept& kept = {}) {
    const Statistics found = other.given ? pair_statistics(args, token, row, buffers, other)
                                         : row_statistics(row, args.ids[token], buffers, kept);
    args.tokens.value(kTokenLogp, token) = found.logp;
    args.tokens.value(kTokenEntropy, token) = found.entropy;
    args.lse[token] = found.lse;
    return found;
}

static void stats_rows(const RowArgs& args, const TeacherArgs* teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = args.token_of[i];
        TeacherRow other = teacher_row(args, teacher, i, others);
        write_statistics(args, token, make_row(args, i, args.temperature[token]), buffers, other);
    }
}

static void single_pass_rows(const RowArgs& args, const TeacherArgs* teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    const int64_t blocks = (args.vocab + kBlock - 1) / kBlock;
    // Next to a float32 gradient the extra traffic costs more than an exponential, measured.
    const bool pays = args.grad && !teacher && args.params.softcap == 0 && args.grad_dtype != kFloat32;
    float* memory = pays ? static_cast<float*>(malloc(blocks * (kBlock + 1) * sizeof(float))) : nullptr;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = args.token_of[i];
        const Row row = make_row(args, i, args.temperature[token]);
        TeacherRow other = teacher_row(args, teacher, i, others);
        const float g_entropy = args.tokens.field(kWeightEntropy, token);
        const Kept kept = memory && g_entropy == 0.f ? Kept{memory, memory + blocks * kBlock} : Kept{};
        const Statistics found = write_statistics(args, token, row, buffers, other, kept);
        const float g_logp = row_objective(args, token, found.logp, found.entropy);
        if (args.grad)
            row_gradient(args, i, row, {found.max, found.log_sum}, found.entropy, g_logp, g_entropy, buffers, other,
                         kept);
    }
    free(memory);
}

static void gradient_rows(const RowArgs& args, const TeacherArgs* teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = args.token_of[i];
        const Row row = make_row(args, i, args.temperature[token]);
        TeacherRow other = teacher_row(args, teacher, i, others);
        if (teacher) other.divergence = {0.0, teacher->offset[token], shift_of(other.row, teacher->lse[token])};
        row_gradient(args, i, row, shift_of(row, args.lse[token]), args.tokens.value(kTokenEntropy, token),
                     args.g_logp[token], args.g_entropy[token], buffers, other);
    }
}

RowKernels row_kernels() { return {single_pass_rows, stats_rows, gradient_rows}; }

}  // namespace GK_ISA
}  // namespace gk
