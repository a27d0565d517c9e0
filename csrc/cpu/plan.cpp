// The plan of a call: lengths of the sequences, then the table and flags of every token, then the order of the rows.
// Threads share out whole sequences, and every number is exact or of its token alone: their number changes no bit.
#include <algorithm>
#include <numeric>
#include <vector>

#include "../plan_rules.h"
#include "api.h"
#include "dispatch.h"

namespace gk {

namespace {

constexpr int64_t kMaskedPerPiece = 16 * kTokensPerPiece;  // to look at the mask alone is little work

int64_t unmasked_between(const PlanArgs& args, int64_t begin, int64_t end) {
    if (!args.mask) return end - begin;
    int64_t count = 0;
    for (int64_t t = begin; t < end; t++) count += is_unmasked(args, t);
    return count;
}

void clear_values(const PlanArgs& args, int64_t begin, int64_t end) {
    for (int f = 0; f < kValueFieldCount; f++)
        std::fill(args.values + f * args.tokens + begin, args.values + f * args.tokens + end, 0.f);
    std::fill(args.lse + begin, args.lse + end, 0.0);
}

// Rows of a sequence in the order, or where they start in it.
struct Places {
    int64_t active = 0, rest = 0;  // rest: scored, but not active
};

Places plan_sequence(const PlanArgs& args, int64_t s, float total) {
    const int64_t begin = args.offsets[s], end = args.offsets[s + 1];
    const PlanWeights padding = plan_weights(args, false, args.lengths[s], total);
    const PlanWeights weights = plan_weights(args, true, args.lengths[s], total);
    bool any = false;
    for (int64_t t = begin; t < end; t++) {
        const bool unmasked = is_unmasked(args, t);
        args.active[t] = plan_token(args, t, s, unmasked, unmasked ? weights : padding);  // for now: surrogate
        any |= unmasked && args.active[t];
    }
    const bool together = gradient_is_shared(args.rules);
    Places counts;
    for (int64_t t = begin; t < end; t++) {
        const bool unmasked = is_unmasked(args, t);
        const bool active = is_active(args.rules, unmasked, weights, together ? any : args.active[t]);
        args.active[t] = active;
        args.scored[t] = args.rules.score_inactive ? unmasked : active;
        counts.active += active;
        counts.rest += args.scored[t] && !active;
    }
    return counts;
}

void write_order(const PlanArgs& args, int64_t s, Places next) {
    for (int64_t t = args.offsets[s]; t < args.offsets[s + 1]; t++) {
        if (args.active[t])
            args.order[next.active++] = t;
        else if (args.scored[t])
            args.order[next.rest++] = t;
    }
}

}  // namespace

void plan(const PlanArgs& args, int threads) {
    for (int64_t s = 0; s <= args.sequences; s++) args.offsets[s] = sequence_begin(args, s);

    const int64_t grain = sequences_per_piece(args.tokens, args.sequences);
    parallel_for(
        args.sequences, grain * (kMaskedPerPiece / kTokensPerPiece), threads, [&](int64_t first, int64_t last) {
            for (int64_t s = first; s < last; s++)
                args.lengths[s] = static_cast<float>(unmasked_between(args, args.offsets[s], args.offsets[s + 1]));
        });
    const auto total = static_cast<float>(std::accumulate(args.lengths, args.lengths + args.sequences, 0.0));

    std::vector<Places> places(args.sequences);
    parallel_for(args.sequences, grain, threads, [&](int64_t first, int64_t last) {
        clear_values(args, args.offsets[first], args.offsets[last]);
        for (int64_t s = first; s < last; s++) places[s] = plan_sequence(args, s, total);
    });

    Places all;
    for (int64_t s = 0; s < args.sequences; s++) {
        const Places counts = places[s];
        if (args.counts && args.rules.whole_sequences) args.counts[2 + s] = counts.active;
        places[s] = all;
        all = {all.active + counts.active, all.rest + counts.rest};
    }
    if (args.counts) {
        args.counts[0] = all.active;
        args.counts[1] = all.rest;
    }
    if (!args.order) return;
    parallel_for(args.sequences, grain * (kMaskedPerPiece / kTokensPerPiece), threads,
                 [&](int64_t first, int64_t last) {
                     for (int64_t s = first; s < last; s++)
                         write_order(args, s, {places[s].active, all.active + places[s].rest});
                 });
}

}  // namespace gk
