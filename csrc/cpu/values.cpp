// Whether the numbers that a caller gave can be computed with: one sweep, so that a call that is right pays
// microseconds for it. What is wrong, and where, is found by the slower checks in Python.
#include "api.h"

namespace gk {

bool ids_are_valid(const IdArgs& args) {
    for (int64_t t = 0; t < args.tokens; t++) {
        if (args.ids[t] >= 0 && args.ids[t] < args.vocab) continue;
        if (!args.mask || static_cast<const int8_t*>(args.mask)[t * args.mask_bytes] != 0) return false;
        for (int32_t byte = 1; byte < args.mask_bytes; byte++)
            if (static_cast<const int8_t*>(args.mask)[t * args.mask_bytes + byte] != 0) return false;
    }
    return true;
}

static bool all_finite(const float* x, int64_t count) {
    bool finite = true;
    for (int64_t i = 0; x && i < count; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, sizeof bits);
        finite &= (bits & 0x7F800000u) != 0x7F800000u;  // the exponent of infinity and NaN
    }
    return finite;
}

// kHighestLogp: HIGHEST_LOGP of grpo_kernels/validate.py.
constexpr float kHighestLogp = 1.f, kLargest = 3.402823466e38f;

static bool all_within(const float* x, int64_t count, float low, float high) {
    bool within = true;
    for (int64_t i = 0; x && i < count; i++) within &= low <= x[i] && x[i] <= high;
    return within;
}

static int64_t count_of(const PlanArgs& args, const PlanInput& x) {
    return x.per_what == kPerToken ? args.tokens : x.per_what == kPerSequence ? args.sequences : 1;
}

bool values_are_valid(const PlanArgs& args, const PlanChecks& checks) {
    return ids_are_valid({args.ids, args.mask, args.tokens, checks.vocab, args.mask_bytes}) &&
           all_finite(args.advantages.data, count_of(args, args.advantages)) &&
           all_within(args.old, args.tokens, -kLargest, kHighestLogp) && all_finite(args.ref, args.tokens) &&
           all_within(args.rollout_weights.data, count_of(args, args.rollout_weights), 0.f, kLargest) &&
           all_finite(checks.padding, checks.padding_size);
}

}  // namespace gk
