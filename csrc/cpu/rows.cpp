// The row kernels: statistics of a row of logits, and its gradient; with a teacher (teacher.h) the divergence and its
// gradient too. ../softmax.h has the formulas.
//
// A row is walked in blocks that fit the first-level cache. The running maximum is taken per block; sums run in
// independent lanes within a block and in double between blocks.
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
static void add_block(Sums<double>& sums, const float* y, int64_t count, float origin, float to_exponent) {
    Float exps[4] = {}, moment[4] = {};
    for (int64_t i = 0; i < count; i += kStep) {
        for (int k = 0; k < 4; k++) {
            const Float t = max(splat(kMinExponent), (Float32::load(y + i + k * kWidth) - origin) * to_exponent);
            const Float e = exp2_bounded(t);
            exps[k] += e;
            moment[k] += e * t;  // t is finite where e is 0: no 0 * inf from a masked vocabulary
        }
    }
    sums.exps += total((exps[0] + exps[1]) + (exps[2] + exps[3]));
    sums.moment += total((moment[0] + moment[1]) + (moment[2] + moment[3]));
}

// The sampled id has a logit of -inf in the blocks, and is added last.
static Statistics row_statistics(const Row& row, int column, Buffers& buffers) {
    const double to_exponent = row.scales.to_exponent();
    Sums<double> sums = {-kInfinity, 0.0, 0.0};
    for_blocks(row.vocab, [&](int64_t first, int64_t count) {
        const int64_t padded = (count + kStep - 1) / kStep * kStep;
        const float* y = load_block(row, first, count, buffers);
        if (column >= first && column - first < count) {
            if (y != buffers.y) __builtin_memcpy(buffers.y, y, count * sizeof *y);
            buffers.y[column - first] = -kInfinity;
            y = buffers.y;
        }
        const float top = block_max(y, padded);
        if (top > sums.top) {
            if (sums.top > -kInfinity) {  // every t falls by the same amount
                const double fall = (static_cast<double>(top) - sums.top) * to_exponent, factor = exp2(-fall);
                sums = {top, sums.exps * factor, (sums.moment - sums.exps * fall) * factor};
            }
            sums.top = top;
        }
        // Before the first finite logit any finite reference will do: all terms are 0, or NaN.
        const float origin = sums.top > -kInfinity ? sums.top : 0.f;
        add_block(sums, y, padded, origin, static_cast<float>(to_exponent));
    });
    return add_sampled(sums, row.scales, sampled_of(row, column));
}

// ---- gradient -------------------------------------------------------------------------------------------------------
// All entries but the sampled id's.
template <class Out, int32_t kDivergence, bool kCapped>
static void sweep_row(const Row& row, Buffers& buffers, const RowGradient& gradient, const Teacher& teacher,
                      Buffers& others, char* out) {
    for_blocks(row.vocab, [&](int64_t first, int64_t count) {
        auto* target = reinterpret_cast<typename Out::Element*>(out) + first;
        const float* y1 = load_block(row, first, count, buffers);
        const float* y2 = kDivergence == kNoTeacher ? y1 : load_block(teacher.row, first, count, others);
        const auto du_at = [&](int64_t i) {
            const Float y = Float32::load(y1 + i);
            Float du = gradient(y);
            if (kDivergence != kNoTeacher)
                du += divergence_gradient<kDivergence>(gradient.policy, teacher, y, Float32::load(y2 + i));
            if (kCapped) du *= Float32::load(buffers.slope + i);
            return du;
        };
        int64_t i = 0;
        for (; i + kWidth <= count; i += kWidth) Out::store(target + i, du_at(i));
        if (i < count) store_tail<Out>(target + i, du_at(i), count - i);
    });
}

// Behind the sweep.
template <class Out>
static void store_sampled(const RowGradient& gradient, char* out) {
    typename Out::Element lanes[kWidth];
    Out::store(lanes, splat(static_cast<float>(gradient.du_id)));
    reinterpret_cast<typename Out::Element*>(out)[gradient.sampled.column] = lanes[0];
}

// From the statistics of the token.
template <int32_t kDivergence>
static void row_gradient(const RowArgs& args, const TeacherArgs& teacher_args, int64_t i, Buffers& buffers,
                         Buffers& others) {
    constexpr bool kHasTeacher = kDivergence != kNoTeacher;
    const int64_t token = args.token_of[i];
    char* out = static_cast<char*>(args.grad) + i * args.grad_stride * element_size(args.grad_dtype);
    const float weight = kHasTeacher ? teacher_args.weight[token] : 0.f, temperature = args.temperature[token];
    if (args.dlogp[token] == 0.f && args.dentropy[token] == 0.f && weight == 0.f) {
        __builtin_memset(out, 0, args.vocab * element_size(args.grad_dtype));
        return;
    }
    const Row row = make_row(args, i, args.vocab, temperature);
    RowGradient gradient = make_gradient(args, token, row);
    const int column = gradient.sampled.column;
    Teacher teacher = {row, gradient.policy, 0.f, 0.f, 0.f};
    if (kHasTeacher) {
        const Row other = make_row(teacher_args, i, args.vocab, temperature);
        const Shift teacher_shift = make_shift(other.scales, teacher_args.lse[token]);
        teacher = {other, Distribution(teacher_shift, other.scales), teacher_args.beta,
                   static_cast<float>(weight * row.scales.dz_du), teacher_args.policy_kl[token]};
        const Float y1 = splat(static_cast<float>(gradient.sampled.y));
        const Float y2 = splat(static_cast<float>(sampled_of(other, column).y));
        gradient.du_id +=
            divergence_gradient<kDivergence>(gradient.policy, teacher, y1, y2)[0] * gradient.sampled.slope;
    }
    with_type(args.grad_dtype, [&](auto type) {
        using Out = decltype(type);
        const auto sweep = row.capped ? sweep_row<Out, kDivergence, true> : sweep_row<Out, kDivergence, false>;
        sweep(row, buffers, gradient, teacher, others, out);
        if (column >= 0) store_sampled<Out>(gradient, out);
    });
}

// ---- kernels over rows [first, last) --------------------------------------------------------------------------------
static void stats_rows(const RowArgs& args, const TeacherArgs& teacher_args, int64_t first, int64_t last) {
    Buffers buffers, others;
    with_divergence(teacher_args, [&](auto kind) {
        for (int64_t i = first; i < last; i++) {
            const int64_t token = args.token_of[i];
            const Row row = make_row(args, i, args.vocab, args.temperature[token]);
            const Statistics policy_stats = row_statistics(row, sampled_column(args, token), buffers);
            write_statistics(args, token, policy_stats);
            if (!teacher_args.logits) continue;
            const Row other = make_row(teacher_args, i, args.vocab, args.temperature[token]);
            const Statistics teacher_stats = row_statistics(other, -1, others);
            teacher_args.lse[token] = teacher_stats.lse;
            const Distribution policy({policy_stats.top, policy_stats.log_sum}, row.scales),
                q({teacher_stats.top, teacher_stats.log_sum}, other.scales);
            store_divergence<decltype(kind)::kDivergence>(teacher_args, token, row, policy, buffers,
                                                          {other, q, teacher_args.beta, 0.f, 0.f}, others);
        }
    });
}

static void gradient_rows(const RowArgs& args, const TeacherArgs& teacher, int64_t first, int64_t last) {
    Buffers buffers, others;
    with_divergence(teacher, [&](auto kind) {
        for (int64_t i = first; i < last; i++)
            row_gradient<decltype(kind)::kDivergence>(args, teacher, i, buffers, others);
    });
}

RowKernels row_kernels() { return {stats_rows, gradient_rows}; }

}  // namespace GK_ISA
}  // namespace gk
