// The row kernels: statistics of a row of logits, and its gradient; with a teacher (teacher.h) the divergence and its
// gradient too.
//
//     u = logit + bias
//     y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
//     S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S
//     entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
//     dz_j = dlogp (1[j = id] - p_j) - dentropy p_j (log p_j + entropy),    du_j = dz_j * dz/du
//
// A row is walked in blocks that fit the first-level cache. The running maximum is taken per block; sums run in
// independent lanes within a block and in double between blocks. An exponential is 2^t with t = (y - max) * to_z
// log2(e): its error grows with the distance from the maximum, where the term no longer counts.
//
// The gradient may overwrite the logits, in fp32 or as 16-bit values over the front of the same row. A forward sweep
// that reads each vector before it writes the one at the same index then never destroys a logit that is still needed.
//
// Compiled once per instruction set, see kernels.h. Only internal linkage and plain functions of the C library here.
#include "rows.h"

#include "teacher.h"

namespace gk {
namespace GK_ISA {

// ---- statistics -----------------------------------------------------------------------------------------------------
static Sums block_sums(const float* y, int64_t count, float max_y, float to_exponent) {
    Float exps[4] = {}, moment[4] = {};
    for (int64_t i = 0; i < count; i += kStep) {
        for (int k = 0; k < 4; k++) {
            const Float t = max(splat(kMinExponent), (Float32::load(y + i + k * kWidth) - max_y) * to_exponent);
            const Float e = exp2_bounded(t);
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

static Statistics row_statistics(const Row& row, int64_t id, Buffers& buffers) {
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
        const Sums block = block_sums(y, padded, reference, static_cast<float>(to_exponent));
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

// All entries but the sampled id's.
static void own_gradients(const RowArgs& args, const Row& row, const RowGradient& gradient, Buffers& buffers,
                          char* out) {
    const bool linear = gradient.linear;
    const SweepBlock sweep = args.grad_dtype == kFloat32    ? choose_sweep<Float32>(linear, row.capped)
                             : args.grad_dtype == kBfloat16 ? choose_sweep<BFloat16>(linear, row.capped)
                                                            : choose_sweep<Float16>(linear, row.capped);
    for (int64_t first = 0; first < row.vocab; first += kBlock) {
        const int64_t count = row.vocab - first < kBlock ? row.vocab - first : kBlock;
        sweep(gradient.sweep, load_block(row, first, count, buffers), buffers.slope, count, out, first);
    }
}

// From `lse` and the entropy, the row's own.
static void row_gradient(const RowArgs& args, int64_t i, int64_t token, Buffers& buffers, const TeacherRow& other) {
    const Row row = make_row(args, i, args.temperature[token]);
    const Shift of = shift_of(row, args.lse[token]);
    const float dlogp = args.dlogp[token], dentropy = args.dentropy[token];
    char* out = gradient_row(args, i);
    const float ddivergence = other.given ? other.given->weight[token] : 0.f;
    if (args.rounding_error) args.rounding_error[i] = 0.f;
    if (dlogp == 0.f && dentropy == 0.f && ddivergence == 0.f) {
        __builtin_memset(out, 0, row.vocab * element_size(args.grad_dtype));
        return;
    }
    RowGradient gradient =
        make_gradient(args, i, row, of.shift, of.rest, args.entropy[token], dlogp, dentropy, buffers);
    if (other.given)
        pair_gradients(args, row, buffers, of, other, ddivergence, gradient, out);
    else
        own_gradients(args, row, gradient, buffers, out);
    if (gradient.id >= 0) store_sampled(args, i, gradient);
}

// ---- kernels over rows [first, last) --------------------------------------------------------------------------------
static void stats_rows(const RowArgs& args, const TeacherArgs& teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = args.token_of[i];
        const Row row = make_row(args, i, args.temperature[token]);
        TeacherRow other = teacher_row(args, teacher, i, others);
        const Statistics found = other.given ? pair_statistics(args, token, row, buffers, other)
                                             : row_statistics(row, args.ids[token], buffers);
        args.logp[token] = found.logp;
        args.entropy[token] = found.entropy;
        args.lse[token] = found.lse;
    }
}

static void gradient_rows(const RowArgs& args, const TeacherArgs& teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = args.token_of[i];
        TeacherRow other = teacher_row(args, teacher, i, others);
        if (other.given) other.divergence = {0.0, teacher.offset[token], shift_of(other.row, teacher.lse[token])};
        row_gradient(args, i, token, buffers, other);
    }
}

RowKernels row_kernels() { return {stats_rows, gradient_rows}; }

}  // namespace GK_ISA
}  // namespace gk
