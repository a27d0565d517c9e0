// Advantages from rewards, see reward_rules.h.
#include <stdexcept>
#include <vector>

#include "../reward_rules.h"
#include "api.h"

namespace gk {

void group_statistics(const RewardArgs& args) {
    for (int64_t i = 0; i < args.count; i++)
        if (args.group_index[i] < 0 || args.group_index[i] >= args.groups)
            throw std::invalid_argument("group_index must lie in [0, num_groups)");

    Moments batch = {0.0, 0.0, INFINITY, -INFINITY, 0.0};
    std::vector<Moments> groups(args.groups, batch);
    for (int64_t i = 0; i < args.count; i++) {
        groups[args.group_index[i]].add(args.rewards[i]);
        batch.add(args.rewards[i]);
    }
    for (int64_t i = 0; i < args.count; i++) {
        Moments& group = groups[args.group_index[i]];
        group.add_distance(args.rewards[i], group.mean());
        batch.add_distance(args.rewards[i], batch.mean());
    }
    for (int64_t i = 0; i < args.count; i++) {
        const Moments& group = groups[args.group_index[i]];
        const double deviation = args.scale == kScaleBatch ? batch.std(args.ddof) : group.std(args.ddof);
        const double divisor = args.scale == kScaleNone ? 1.0 : deviation + args.eps;
        args.advantages[i] = advantage(args.rewards[i], group, args.baseline, divisor);
    }
    for (int64_t g = 0; g < args.groups; g++) {
        args.mean[g] = static_cast<float>(groups[g].mean());
        args.std[g] = static_cast<float>(groups[g].std(args.ddof));
    }
}

}  // namespace gk
