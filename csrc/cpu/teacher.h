// Rows of logits beside a teacher's, for rows.cpp: the divergence of the policy's distribution p and the teacher's q,
// and its gradient beside that of the objective.
//
//     l = log p - log q
//     reverse_kl  D = sum p l                         dD/dz = p (l - D)
//     forward_kl  D = -sum q l                        dD/dz = p - q
//     jsd         D = b KL(q|m) + (1 - b) KL(p|m)     dD/dz = (1 - b) p (log(p / m) - KL(p|m)),   m = (1 - b) p + b q
//
// A KL divergence needs no sweep of its own. With d = z - y, the two rows' differences from fixed references, it is the
// mean of d under the one distribution plus a difference of log-sum-exps, and the mean is added up beside the
// exponentials. Nothing cancels where p and q are close: both parts vanish then. JSD takes a second sweep.
//
// Only internal linkage and plain functions of the C library here.
#pragma once
#include "rows.h"

namespace gk {
namespace GK_ISA {

// One row of logits and its statistics so far.
struct Side {
    Row row;
    float max = -kInfinity, reference = 0.f;
    Sums sums = {0.0, 0.0};
    double cross = 0.0;  // sum of e^(z - max) times the difference of the rows

    // The maximum of a block; the sums move to it. What the exponentials of the block are relative to.
    float raise(const float* y, int64_t padded, bool is_first) {
        const float top = block_max(y, padded);
        if (top > max) {
            if (max > -kInfinity) {
                const double fall = (static_cast<double>(top) - max) * row.to_z / kLn2;
                sums = rebase(sums, fall);
                cross *= exp2(-fall);
            }
            max = top;
        }
        const float now = max > -kInfinity ? max : 0.f;
        if (is_first) reference = now;
        return now;
    }
};

static inline double total(Float x) {
    double sum = 0.0;
    for (int k = 0; k < kWidth; k++) sum += static_cast<double>(x[k]);
    return sum;
}

static inline Float exponent_of(const float* y, float shift, float to_exponent) {
    return max(splat(kMinExponent), (Float32::load(y) - shift) * to_exponent);
}

// (y1 - shift1) to_z1 - (y2 - shift2) to_z2 of policy and teacher.
struct Difference {
    float shift1, to_z1, shift2, to_z2;
    Float operator()(const float* y1, const float* y2) const {
        return (Float32::load(y1) - shift1) * to_z1 - (Float32::load(y2) - shift2) * to_z2;
    }
};

template <int32_t kDivergence>
static void add_block(Side& policy, Side& teacher, const float* y1, const float* y2, int64_t padded, float top1,
                      float top2) {
    const float to1 = static_cast<float>(policy.row.to_z / kLn2), to2 = static_cast<float>(teacher.row.to_z / kLn2);
    const Difference difference = {policy.reference, static_cast<float>(policy.row.to_z), teacher.reference,
                                   static_cast<float>(teacher.row.to_z)};
    Float exps1[2] = {}, moment[2] = {}, exps2[2] = {}, cross[2] = {};
    for (int64_t i = 0; i < padded; i += 2 * kWidth) {
        for (int k = 0; k < 2; k++) {
            const float *at1 = y1 + i + k * kWidth, *at2 = y2 + i + k * kWidth;
            const Float t1 = exponent_of(at1, top1, to1);
            const Float e1 = exp2_bounded(t1), e2 = exp2_bounded(exponent_of(at2, top2, to2));
            exps1[k] += e1;
            moment[k] += e1 * t1;
            exps2[k] += e2;
            if (kDivergence == kJsd) continue;
            // An id that the weighing distribution excludes adds nothing, whatever the difference is.
            const Float weight = kDivergence == kReverseKl ? e1 : e2;
            cross[k] += select(weight == 0.f, Float{}, weight * difference(at1, at2));
        }
    }
    policy.sums.exps += total(exps1[0] + exps1[1]);
    policy.sums.moment += total(moment[0] + moment[1]);
    teacher.sums.exps += total(exps2[0] + exps2[1]);
    (kDivergence == kReverseKl ? policy : teacher).cross += total(cross[0] + cross[1]);
}

struct Mixture {
    Float p, q, log_p, log_q;  // probabilities, and the logarithms of their ratios to the mixture: 0 where they are 0
};
struct ToMixture {
    float shift1, to1, rest1, shift2, to2, rest2;  // exponents of 2
    float beta;
    Mixture operator()(const float* y1, const float* y2) const {
        const Float p = probability(y1, shift1, to1, rest1), q = probability(y2, shift2, to2, rest2);
        const Float inverse = 1.f / max(splat(0x1p-126f), p * (1.f - beta) + q * beta);
        return {p, q, log_of(p * inverse), log_of(q * inverse)};
    }
    static Float probability(const float* y, float shift, float to, float rest) {
        return exp2_bounded(max(splat(kMinExponent), (Float32::load(y) - shift) * to - rest));
    }
    static Float log_of(Float ratio) {
        return select(ratio < 0x1p-126f, Float{}, log_positive(max(splat(0x1p-126f), ratio)));
    }
};

static ToMixture to_mixture(const Row& policy, const Shift& of1, const Row& teacher, const Shift& of2, float beta) {
    return {of1.shift, static_cast<float>(policy.to_z / kLn2),  static_cast<float>(of1.rest / kLn2),
            of2.shift, static_cast<float>(teacher.to_z / kLn2), static_cast<float>(of2.rest / kLn2),
            beta};
}

struct Divergence {
    double value, offset;  // offset: see TeacherArgs
    Shift teacher;
};

// The teacher's row beside one of the policy, and the divergence once it is known. Without a teacher `given` is null.
struct TeacherRow {
    const TeacherArgs* given;
    Row row;
    Buffers& buffers;
    Divergence divergence;
};

static TeacherRow teacher_row(const RowArgs& args, const TeacherArgs& given, int64_t i, Buffers& buffers) {
    if (!given.logits) return {nullptr, {}, buffers, {}};
    RowArgs other = args;
    other.logits = given.logits, other.logits_dtype = given.logits_dtype, other.logits_stride = given.logits_stride;
    other.bias = given.bias, other.params = given.params;
    return {&given, make_row(other, i, args.temperature[args.token_of[i]]), buffers, {}};
}

static Divergence jsd(const Row& policy, Buffers& buffers1, const Shift& of1, const Row& teacher, Buffers& buffers2,
                      const Shift& of2, float beta) {
    const ToMixture mix = to_mixture(policy, of1, teacher, of2, beta);
    double kl_p = 0.0, kl_q = 0.0;
    for (int64_t first = 0; first < policy.vocab; first += kBlock) {
        const int64_t count = policy.vocab - first < kBlock ? policy.vocab - first : kBlock;
        const int64_t padded = (count + kStep - 1) / kStep * kStep;
        const float* y1 = load_block(policy, first, count, buffers1);
        const float* y2 = load_block(teacher, first, count, buffers2);
        Float sum_p = {}, sum_q = {};
        for (int64_t i = 0; i < padded; i += kWidth) {
            const Mixture m = mix(y1 + i, y2 + i);
            sum_p += m.p * m.log_p;
            sum_q += m.q * m.log_q;
        }
        kl_p += total(sum_p);
        kl_q += total(sum_q);
    }
    return {beta * kl_q + (1.0 - beta) * kl_p, kl_p, of2};
}

// Statistics of both rows and the divergence, which are stored.
static Statistics pair_statistics(const RowArgs& args, int64_t token, const Row& row1, Buffers& buffers1,
                                  TeacherRow& other) {
    const TeacherArgs& given = *other.given;
    const Row& row2 = other.row;
    Buffers& buffers2 = other.buffers;
    Divergence& divergence = other.divergence;
    Side policy, teacher;
    policy.row = row1, teacher.row = row2;
    const int32_t kind = given.kind;
    const auto add = kind == kReverseKl   ? add_block<kReverseKl>
                     : kind == kForwardKl ? add_block<kForwardKl>
                                          : add_block<kJsd>;
    for (int64_t first = 0; first < row1.vocab; first += kBlock) {
        const int64_t count = row1.vocab - first < kBlock ? row1.vocab - first : kBlock;
        const int64_t padded = (count + kStep - 1) / kStep * kStep;
        const float* y1 = load_block(row1, first, count, buffers1);
        const float* y2 = load_block(row2, first, count, buffers2);
        const float top1 = policy.raise(y1, padded, first == 0), top2 = teacher.raise(y2, padded, first == 0);
        add(policy, teacher, y1, y2, padded, top1, top2);
    }
    const Statistics found = statistics_of(row1, args.ids[token], policy.max, policy.sums, buffers1);
    const double log_sum2 = log(teacher.sums.exps), lse2 = teacher.max * row2.to_z + log_sum2;
    const Shift of1 = {found.max, found.log_sum}, of2 = {teacher.max, log_sum2};
    if (kind == kJsd) {
        divergence = jsd(row1, buffers1, of1, row2, buffers2, of2, given.beta);
    } else {
        const double between = policy.reference * row1.to_z - teacher.reference * row2.to_z - (found.lse - lse2);
        const double kl = kind == kReverseKl ? policy.cross / policy.sums.exps + between
                                             : -(teacher.cross / teacher.sums.exps + between);
        divergence = {kl, kind == kReverseKl ? kl : 0.0, of2};
    }
    given.divergence[token] = static_cast<float>(divergence.value);
    given.offset[token] = static_cast<float>(divergence.offset);
    given.lse[token] = lse2;
    return found;
}

// ---- gradient -------------------------------------------------------------------------------------------------------
// du_j = [2^t (constant + linear t + slope d) + others] (1 - tanh^2), all but the sampled id's own term. `constant` has
// what does not depend on j of the divergence's share; `others`: forward_kl's -slope q, jsd's slope p (log(p / m) -
// KL).
struct PairSweep {
    Sweep sweep;
    float slope, offset;
    Difference difference;
    float shift2, to_exponent2;
    ToMixture mix;
};

template <int32_t kDivergence, bool kCapped>
static inline Float pair_gradient(const PairSweep& s, const float* y1, const float* y2, const float* tanh_slope) {
    const Float t = exponent_of(y1, s.sweep.max, s.sweep.to_exponent);
    const Float e = exp2_bounded(t);
    Float factor = t * s.sweep.linear + s.sweep.constant;
    if (kDivergence == kReverseKl) factor += s.difference(y1, y2) * s.slope;
    Float du = select(e == 0.f, Float{}, e * factor);
    if (kDivergence == kForwardKl) du -= exp2_bounded(exponent_of(y2, s.shift2, s.to_exponent2)) * s.slope;
    if (kDivergence == kJsd) {
        const Mixture m = s.mix(y1, y2);
        du += m.p * (m.log_p - s.offset) * s.slope;
    }
    if (kCapped) du *= Float32::load(tanh_slope);
    return du;
}

template <class Out, int32_t kDivergence, bool kCapped>
static void sweep_pair(const PairSweep& s, const float* y1, const float* y2, const float* tanh_slope, int64_t count,
                       void* out, int64_t first) {
    auto* target = static_cast<typename Out::Element*>(out) + first;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth)
        Out::store(target + i, pair_gradient<kDivergence, kCapped>(s, y1 + i, y2 + i, tanh_slope + i));
    if (i < count)
        store_tail<Out>(target + i, pair_gradient<kDivergence, kCapped>(s, y1 + i, y2 + i, tanh_slope + i), count - i);
}

using SweepPair = void (*)(const PairSweep&, const float*, const float*, const float*, int64_t, void*, int64_t);

template <class Out>
static SweepPair choose_pair(int32_t divergence, bool capped) {
    if (divergence == kReverseKl)
        return capped ? sweep_pair<Out, kReverseKl, true> : sweep_pair<Out, kReverseKl, false>;
    if (divergence == kForwardKl)
        return capped ? sweep_pair<Out, kForwardKl, true> : sweep_pair<Out, kForwardKl, false>;
    return capped ? sweep_pair<Out, kJsd, true> : sweep_pair<Out, kJsd, false>;
}

// dD/dz of one id, from log p and log q.
static double slope_of(int32_t divergence, double beta, double log_p, double log_q, double offset) {
    const double p = exp(log_p), q = exp(log_q);
    if (divergence == kForwardKl) return p - q;
    if (p == 0.0) return 0.0;
    if (divergence == kReverseKl) return p * (log_p - log_q - offset);
    return (1.0 - beta) * p * (log(p / ((1.0 - beta) * p + beta * q)) - offset);
}

// All entries but the sampled id's, which gets its share of the divergence in `gradient`.
static void pair_gradients(const RowArgs& args, const Row& row1, Buffers& buffers1, const Shift& of1,
                           const TeacherRow& other, float weight, RowGradient& gradient, char* out) {
    const TeacherArgs& given = *other.given;
    const Row& row2 = other.row;
    Buffers& buffers2 = other.buffers;
    const Divergence& divergence = other.divergence;
    const int32_t kind = given.kind;
    const double beta = given.beta, slope = weight * row1.chain;
    const Shift& of2 = divergence.teacher;
    if (gradient.id >= 0) {
        const double tanh_slope = row1.capped ? (load_one(row1, gradient.id, buffers1), buffers1.slope[0]) : 1.0;
        const double log_p = (load_one(row1, gradient.id, buffers1) - of1.shift) * row1.to_z - of1.rest;
        const double log_q = (load_one(row2, gradient.id, buffers2) - of2.shift) * row2.to_z - of2.rest;
        gradient.du_id += slope * tanh_slope * slope_of(kind, beta, log_p, log_q, divergence.offset);
    }
    PairSweep s = {gradient.sweep,
                   0.f,
                   static_cast<float>(divergence.offset),
                   {of1.shift, static_cast<float>(row1.to_z), of2.shift, static_cast<float>(row2.to_z)},
                   of2.shift,
                   static_cast<float>(row2.to_z / kLn2),
                   to_mixture(row1, of1, row2, of2, given.beta)};
    const double to_p = exp(-of1.rest), to_q = exp(-of2.rest);
    if (kind == kReverseKl) {
        s.slope = static_cast<float>(slope * to_p);
        s.sweep.constant += static_cast<float>(slope * to_p * (of2.rest - of1.rest - divergence.offset));
    } else if (kind == kForwardKl) {
        s.slope = static_cast<float>(slope * to_q);
        s.sweep.constant += static_cast<float>(slope * to_p);
    } else {
        s.slope = static_cast<float>(slope * (1.0 - beta));
    }
    const SweepPair sweep = args.grad_dtype == kFloat32    ? choose_pair<Float32>(kind, row1.capped)
                            : args.grad_dtype == kBfloat16 ? choose_pair<BFloat16>(kind, row1.capped)
                                                           : choose_pair<Float16>(kind, row1.capped);
    for (int64_t first = 0; first < row1.vocab; first += kBlock) {
        const int64_t count = row1.vocab - first < kBlock ? row1.vocab - first : kBlock;
        const float* y2 = load_block(row2, first, count, buffers2);
        sweep(s, load_block(row1, first, count, buffers1), y2, buffers1.slope, count, out, first);
    }
}

}  // namespace GK_ISA
}  // namespace gk
