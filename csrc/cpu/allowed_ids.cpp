// The ids that a sampling mask allows each token, as rows: AllowedIdRows of Python's operations.
#include "dispatch.h"

namespace gk {

namespace {

// No address depends on what an id is, or on whether the numbers of ids add up.
void write_row(const AllowedIdArgs& args, int64_t row) {
    const auto id_at = [&](int64_t position) -> int64_t {
        return args.int64_ids ? static_cast<const int64_t*>(args.mask_ids)[position]
                              : static_cast<const int32_t*>(args.mask_ids)[position];
    };
    const auto end_of = [&](int64_t token) { return std::clamp<int64_t>(args.ends[token], 0, args.mask_count); };
    const int64_t token = args.token_of[row], last = end_of(token), first = token > 0 ? end_of(token - 1) : 0;
    const int64_t sampled = args.sampled[token], local = sampled - args.local_first;
    bool known = sampled >= 0 && sampled < args.vocab, is_allowed = false;
    int64_t column = 0, before = 0, num_local = 0;
    for (int64_t k = first; k < last; k++) {
        const int64_t id = id_at(k);
        known = known && id >= 0 && id < args.vocab;
        before += id < args.local_first;
        num_local += id >= args.local_first && id < args.local_first + args.local_count;
        if (id == sampled) is_allowed = true, column = k - first;
    }
    const bool is_local = known && local >= 0 && local < args.local_count;
    num_local = std::min(num_local, args.slots - 1);
    for (int64_t slot = 0; slot < args.slots; slot++) {
        int64_t id = slot == num_local && is_local && !is_allowed ? local : -1;
        if (slot < num_local)
            id = std::clamp<int64_t>(id_at(first + before + slot) - args.local_first, 0, args.local_count - 1);
        args.ids[row * args.slots + slot] = static_cast<int32_t>(id);
        args.pair_tokens[row * args.slots + slot] = static_cast<int32_t>(token);
    }
    args.columns[token] = !is_local ? -1 : is_allowed ? column - before : num_local;
    args.added[row] = !is_allowed;
}

}  // namespace

void allowed_ids(const AllowedIdArgs& args, int threads) {
    parallel_for(args.rows, gathered_grain(args.rows, args.rows * args.slots), threads,
                 [&](int64_t first, int64_t last) {
                     for (int64_t row = first; row < last; row++) write_row(args, row);
                 });
}

}  // namespace gk
