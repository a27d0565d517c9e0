// A token's row of kept ids (contract.KeptRows of Python) from those of its sampling mask. CPU and device kernels
// compile this file.
#pragma once
#include "args.h"

namespace gk {

// No address depends on what an id is, or on whether the numbers of ids add up.
GK_HD void keep_ids(const KeptRowArgs& args, int64_t row) {
    const int64_t token = args.token_of[row], last = args.last_of(token);
    const int64_t first = token > 0 ? args.last_of(token - 1) : 0;
    const int64_t sampled = args.sampled[token], local = sampled - args.own_first;
    bool known = sampled >= 0 && sampled < args.vocab, found = false;
    int64_t column = 0, before = 0, own = 0;
    for (int64_t k = first; k < last; k++) {
        const int64_t id = args.id(k);
        known = known && id >= 0 && id < args.vocab;
        before += id < args.own_first;
        own += id >= args.own_first && id < args.own_first + args.own_count;
        if (id == sampled) found = true, column = k - first;
    }
    const bool here = known && local >= 0 && local < args.own_count;
    if (own >= args.slots) own = args.slots - 1;
    for (int64_t slot = 0; slot < args.slots; slot++) {
        int64_t id = slot == own && here && !found ? local : -1;
        if (slot < own) {
            id = args.id(first + before + slot) - args.own_first;
            id = id < 0 ? 0 : id < args.own_count ? id : args.own_count - 1;
        }
        args.ids[row * args.slots + slot] = static_cast<int32_t>(id);
        args.pair_tokens[row * args.slots + slot] = static_cast<int32_t>(token);
    }
    args.columns[token] = !here ? -1 : found ? column - before : own;
    args.added[row] = !found;
}

}  // namespace gk
