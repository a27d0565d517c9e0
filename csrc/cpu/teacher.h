// The divergence of a policy's distribution p and a teacher's q, for rows.cpp.
//
//     reverse_kl  D = sum p log(p/q)                  dD/dz = p (log(p/q) - D)
//     forward_kl  D = sum q log(q/p)                  dD/dz = p - q
//     jsd         D = b KL(q|m) + (1 - b) KL(p|m)     dD/dz = (1 - b) p (log(p/m) - KL(p|m)),   m = (1 - b) p + b q
//
// Only internal linkage and plain functions of the C library here.
#pragma once
#include "rows.h"

namespace gk {
namespace GK_ISA {

constexpr int32_t kNoTeacher = -1;  // beside the values of Divergence

template <int32_t kValue>
struct Kind {
    static constexpr int32_t kDivergence = kValue;
};

// body(Kind) of this teacher's divergence.
template <class Body>
static void with_divergence(const TeacherArgs& teacher, const Body& body) {
    if (!teacher.logits)
        body(Kind<kNoTeacher>{});
    else if (teacher.kind == kReverseKl)
        body(Kind<kReverseKl>{});
    else if (teacher.kind == kForwardKl)
        body(Kind<kForwardKl>{});
    else
        body(Kind<kJsd>{});
}

struct Teacher {
    Row row;
    Distribution q;
    float beta;
    float weight, policy_kl;  // for the gradient: d loss / dD times dz/du, and TeacherArgs'
};

// Probabilities, and the logarithms of their ratios to the other one's, or with JSD to the mixture.
struct Ratios {
    Float p, q, log_p, log_q;
};

static inline Float log_of(Float ratio) {  // 0 where there is no probability
    return select(ratio < 0x1p-126f, Float{}, log_positive(max(splat(0x1p-126f), ratio)));
}

template <int32_t kDivergence>
static inline Ratios ratios_of(const Distribution& policy, const Teacher& teacher, Float y1, Float y2) {
    const Float p = policy.p(y1), q = teacher.q.p(y2);
    if (kDivergence == kJsd) {
        const Float inverse = 1.f / max(splat(0x1p-126f), p * (1.f - teacher.beta) + q * teacher.beta);
        return {p, q, log_of(p * inverse), log_of(q * inverse)};
    }
    const Float difference = policy.log_p(y1) - teacher.q.log_p(y2);
    return {p, q, difference, -difference};
}

// An id that the weighing distribution excludes adds nothing, whatever the ratio is.
static inline Float weighed(Float p, Float x) { return select(p == 0.f, Float{}, p * x); }

// weight dD/dz
template <int32_t kDivergence>
static inline Float divergence_gradient(const Distribution& policy, const Teacher& teacher, Float y1, Float y2) {
    const Ratios r = ratios_of<kDivergence>(policy, teacher, y1, y2);
    if (kDivergence == kForwardKl) return (r.p - r.q) * teacher.weight;
    const float scale = kDivergence == kJsd ? (1.f - teacher.beta) * teacher.weight : teacher.weight;
    return weighed(r.p, r.log_p - teacher.policy_kl) * scale;
}

// Stores the divergence, and what its gradient needs.
template <int32_t kDivergence>
static void store_divergence(const TeacherArgs& args, int64_t token, const Row& row, const Distribution& policy,
                             Buffers& buffers, const Teacher& teacher, Buffers& others) {
    double kl_p = 0.0, kl_q = 0.0;  // sums of p log(p/.) and q log(q/.)
    for_blocks(row.vocab, [&](int64_t first, int64_t count) {
        const float* y1 = load_block(row, first, count, buffers);
        const float* y2 = load_block(teacher.row, first, count, others);
        Float sum_p = {}, sum_q = {};
        for (int64_t i = 0; i < count; i += kWidth) {
            const Ratios r = ratios_of<kDivergence>(policy, teacher, Float32::load(y1 + i), Float32::load(y2 + i));
            sum_p += weighed(r.p, r.log_p);
            sum_q += weighed(r.q, r.log_q);
        }
        kl_p += total(sum_p);
        kl_q += total(sum_q);
    });
    const double jsd = args.beta * kl_q + (1.0 - args.beta) * kl_p;
    const double divergence = kDivergence == kReverseKl ? kl_p : kDivergence == kForwardKl ? kl_q : jsd;
    args.divergence[token] = static_cast<float>(divergence);
    args.policy_kl[token] = static_cast<float>(kDivergence == kForwardKl ? 0.0 : kl_p);
}

}  // namespace GK_ISA
}  // namespace gk
