// The ids that a sampling mask allows each token, as rows: AllowedIdRows of Python's operations.
#include "dispatch.h"

namespace gk {

namespace {

// No address depends on what an id is, or on whether the numbers of ids add up.
void write_row(const AllowedIdArgs& args, int64_t row) {
    const auto id_at = [&](int64_t place) -> int64_t {
        return args.wide ? static_cast<const int64_t*>(args.mask_ids)[place]
                         : static_cast<const int32_t*>(args.mask_ids)[place];
    };
    const auto end_of = [&](int64_t token) { return std::clamp<int64_t>(args.ends[token], 0, args.mask_count); };
    const int64_t token = args.token_of[row], last = end_of(token), first = token > 0 ? end_of(token - 1) : 0;
    const int64_t sampled = args.sampled[token], local = sampled - args.own_first;
    bool known = sampled >= 0 && sampled < args.vocab, found = false;
    int64_t column = 0, before = 0, own = 0;
    for (int64_t k = first; k < last; k++) {
        const int64_t id = id_at(k);
        known = known && id >= 0 && id < args.vocab;
        before += id < args.own_first;
        own += id >= args.own_first && id < args.own_first + args.own_count;
        if (id == sampled) found = true, column = k - first;
    }
    const bool here = known && local >= 0 && local < args.own_count;
    own = std::min(own, args.slots - 1);
    for (int64_t slot = 0; slot < args.slots; slot++) {
        int64_t id = slot == own && here && !found ? local : -1;
        if (slot < own) id = std::clamp<int64_t>(id_at(first + before + slot) - args.own_first, 0, args.own_count - 1);
        args.ids[row * args.slots + slot] = static_cast<int32_t>(id);
        args.pair_tokens[row * args.slots + slot] = static_cast<int32_t>(token);
    }
    args.columns[token] = !here ? -1 : found ? column - before : own;
    args.added[row] = !found;
}

}  // namespace

void allowed_ids(const AllowedIdArgs& args, int threads) {
    parallel_for(args.rows, gathered_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) {
                     for (int64_t row = first; row < last; row++) write_row(args, row);
                 });
}

}  // namespace gk
