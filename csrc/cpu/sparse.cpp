// The gradient of a row of logits as pairs of an id and a number, by systematic sampling (SparseRule of
// Python's operations).
//
// Nearly all entries are far below the level theta s, and leave no pair. So a step of kStep entries adds up their
// shares of the level, in integers, which any order of adding leaves the same; where the sum stays below the next
// integer of the running sum, and no entry is large, the step is done. The others are looked at one entry after
// another.
//
// Compiled once per instruction set, see kernels.h. Only internal linkage and plain functions of the C library here.
#include "rows.h"

namespace gk {
namespace GK_ISA {

constexpr float kSparseOne = 2147483648.f;  // Python's SPARSE_ONE: one in the running sum, which is kept modulo this
// Shares below this may be added up for a whole step: the sum is at most kSparseOne.
constexpr float kSmall = kSparseOne / kStep;

// Of 32 bits, as murmur3 ends.
static inline uint32_t mixed(uint32_t x) {
    x += 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// Where the running sum of a token begins, in units of 1 / kSparseOne.
static inline uint32_t start_of_sum(int64_t token, float lse, int64_t first_id) {
    uint32_t bits;
    __builtin_memcpy(&bits, &lse, sizeof bits);
    return mixed(mixed(mixed(static_cast<uint32_t>(token)) + bits) + static_cast<uint32_t>(first_id)) >> 1;
}

struct Sampler {
    float level;     // theta s, what a sampled entry becomes
    float to_share;  // of |du|, in units of 1 / kSparseOne
    uint32_t sum;    // modulo kSparseOne
    int32_t* ids;
    float* values;
    int64_t count, capacity;

    void keep(int64_t id, float value) {
        if (count < capacity) {
            ids[count] = static_cast<int32_t>(id);
            values[count] = value;
        }
        count++;
    }

    void add(int64_t id, float du) {
        const float share = __builtin_fabsf(du) * to_share;
        if (!(share < kSparseOne)) return keep(id, du);  // NaN and infinity too
        sum += static_cast<uint32_t>(share + 0.5f);
        if (sum < static_cast<uint32_t>(kSparseOne)) return;
        sum -= static_cast<uint32_t>(kSparseOne);
        keep(id, __builtin_copysignf(level, du));
    }
};

template <bool kCapped>
static void sample_block(const RowGradient& gradient, const float* y, const float* slope, int64_t first, int64_t count,
                         Sampler& sampler) {
    for (int64_t i = 0; i < count && sampler.count <= sampler.capacity; i += kStep) {
        alignas(64) float du[kStep];
        Int large = {};
        UInt steps = {};
        for (int64_t k = 0; k < kStep; k += kWidth) {
            Float x = gradient(Float32::load(y + i + k));
            if (kCapped) x *= Float32::load(slope + i + k);
            const Float share = absolute(x) * sampler.to_share;
            large |= ~(share < kSmall);
            steps += (UInt) __builtin_convertvector(min(share + 0.5f, splat(kSmall)), Int);
            Float32::store(du + k, x);
        }
        const int64_t sampled = gradient.sampled.column - (first + i);  // its place in the step, if it is there
        const uint32_t sum = sampler.sum + sum_of(steps);
        if (sum < static_cast<uint32_t>(kSparseOne) && !any(large) && (sampled < 0 || sampled >= kStep)) {
            sampler.sum = sum;
            continue;
        }
        for (int64_t k = 0; k < kStep && i + k < count; k++) {
            if (k == sampled)
                sampler.keep(gradient.sampled.column, static_cast<float>(gradient.du_id));
            else
                sampler.add(first + i + k, du[k]);
        }
    }
}

static int64_t sparse_row(const RowArgs& args, const SparseRows& out, int64_t i, Buffers& buffers) {
    const int64_t token = args.token_of[i];
    const float dlogp = args.dlogp[token], dentropy = args.dentropy[token], temperature = args.temperature[token];
    if (dlogp == 0.f && dentropy == 0.f) return 0;
    const Row row = make_row(args, i, args.vocab, temperature);
    const RowGradient gradient = make_gradient(args, token, row);
    const float level =
        out.theta * (args.params.logit_scale / temperature * (__builtin_fabsf(dlogp) + __builtin_fabsf(dentropy)));
    Sampler sampler = {level,
                       kSparseOne / level,
                       start_of_sum(token, static_cast<float>(args.lse[token]), out.first_id),
                       out.ids + i * out.capacity,
                       out.values + i * out.capacity,
                       0,
                       out.capacity};
    const auto sample = row.capped ? sample_block<true> : sample_block<false>;
    for_blocks(row.vocab, [&](int64_t first, int64_t count) {
        sample(gradient, load_block(row, first, count, buffers), buffers.slope, first, count, sampler);
    });
    return sampler.count < out.capacity ? sampler.count : out.capacity + (sampler.count > out.capacity);
}

static void sparse_rows(const RowArgs& args, const SparseRows& out, int64_t first, int64_t last) {
    Buffers buffers;
    for (int64_t i = first; i < last; i++) out.counts[i] = static_cast<int32_t>(sparse_row(args, out, i, buffers));
}

SparseKernel sparse_kernel() { return sparse_rows; }

}  // namespace GK_ISA
}  // namespace gk
