// Loss and metrics: tokens -> sequences -> groups -> one row of totals. Every sum runs in double and in index order, so
// the number of threads, which share out whole sequences, changes no bit. Tokens that are not scored are never read,
// and show 0.
#include <math.h>

#include <vector>

#include "../token_columns.h"
#include "api.h"
#include "dispatch.h"

namespace gk {

namespace {

struct Columns {
    double sums[kReducedCount] = {};

    Columns() {
        sums[kRatioMin] = INFINITY;
        sums[kRatioMax] = sums[kMismatchMax] = -INFINITY;
    }
    void add(const Columns& other) {
        for (int c = 0; c < kReducedCount; c++) sums[c] = combine(c, sums[c], other.sums[c]);
    }
    void write(float* out) const {
        for (int c = 0; c < kColumnCount; c++) out[c] = static_cast<float>(sums[c]);
    }
};

}  // namespace

void reduce(const ReduceArgs& args, int threads) {
    std::vector<Columns> sequences(args.sequences), groups(args.groups);
    const int64_t grain = sequences_per_piece(args.tokens.count, args.sequences);
    parallel_for(args.sequences, grain, threads, [&](int64_t first, int64_t last) {
        for (int64_t s = first; s < last; s++)
            for (int64_t t = args.offsets[s]; t < args.offsets[s + 1]; t++)
                args.scored[t] ? add_token(args.params, args.tokens, t, sequences[s].sums)
                               : clear_token(args.tokens, t);
    });

    Columns all;
    for (int64_t s = 0; s < args.sequences; s++) {
        sequences[s].write(args.sequence_sums + s * kColumnCount);
        if (args.group_index) groups[args.group_index[s]].add(sequences[s]);
        all.add(sequences[s]);
    }
    for (int64_t g = 0; g < args.groups; g++) groups[g].write(args.group_sums + g * kColumnCount);
    all.write(args.totals);
    for (int c = kColumnCount; c < kReducedCount; c++) args.extrema[c - kColumnCount] = static_cast<float>(all.sums[c]);
}

}  // namespace gk
