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

bool values_are_valid(const PlanArgs& args, const PlanChecks& checks) {
    const auto finite = [&](const PlanInput& x) {
        return all_finite(x.data, x.per_what == kPerToken      ? args.tokens
                                  : x.per_what == kPerSequence ? args.sequences
                                                               : 1);
    };
    return ids_are_valid({args.ids, args.mask, args.tokens, checks.vocab, args.mask_bytes}) &&
           finite(args.advantages) && all_finite(args.old, args.tokens) && all_finite(args.ref, args.tokens) &&
           finite(args.rollout_weights) && all_finite(checks.padding, checks.padding_size);
}

}  // namespace gk
