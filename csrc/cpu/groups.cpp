// Advantages from rewards: A = (reward - baseline) / (std + eps), two passes in double.
//
// NaN rewards are left out of every statistic and get A = 0. Rewards that are all equal have exactly that mean and a
// standard deviation of exactly 0, which sums could miss by a rounding: an advantage of 1e-17 / eps is not 0.
#include <math.h>

#include <stdexcept>
#include <vector>

#include "api.h"

namespace gk {

namespace {

struct Moments {
    int64_t count = 0;
    double sum = 0.0, squares = 0.0;  // squares: of the distances from the mean
    float low = INFINITY, high = -INFINITY;

    void add(float reward) {
        count++;
        sum += reward;
        low = reward < low ? reward : low;
        high = reward > high ? reward : high;
    }
    void add_distance(float reward) { squares += (reward - mean()) * (reward - mean()); }
    bool equal() const { return low == high; }
    double mean() const {
        if (count == 0) return NAN;
        return equal() ? low : sum / static_cast<double>(count);
    }
    double std(int64_t ddof) const {
        if (count == 0) return NAN;
        return equal() || count <= ddof ? 0.0 : sqrt(squares / static_cast<double>(count - ddof));
    }
};

double centred(double reward, const Moments& group, int32_t baseline) {
    if (baseline == kBaselineNone) return reward;
    if (group.equal()) return 0.0;
    const double distance = reward - group.mean(), n = static_cast<double>(group.count);
    // reward - mean of the others = (reward - mean) n / (n - 1); n > 1, as a group of one is equal
    return baseline == kBaselineLeaveOneOut ? distance * n / (n - 1.0) : distance;
}

}  // namespace

void group_statistics(const RewardArgs& args) {
    for (int64_t i = 0; i < args.count; i++)
        if (args.group_index[i] < 0 || args.group_index[i] >= args.groups)
            throw std::invalid_argument("group_index must lie in [0, num_groups)");

    std::vector<Moments> groups(args.groups);
    Moments batch;
    const auto each_valid = [&](void (Moments::*add)(float)) {
        for (int64_t i = 0; i < args.count; i++) {
            if (isnan(args.rewards[i])) continue;
            (groups[args.group_index[i]].*add)(args.rewards[i]);
            (batch.*add)(args.rewards[i]);
        }
    };
    each_valid(&Moments::add);
    each_valid(&Moments::add_distance);
    for (int64_t i = 0; i < args.count; i++) {
        const Moments& group = groups[args.group_index[i]];
        const double numerator = isnan(args.rewards[i]) ? 0.0 : centred(args.rewards[i], group, args.baseline);
        const double deviation = args.scale == kScaleBatch ? batch.std(args.ddof) : group.std(args.ddof);
        const double divisor = args.scale == kScaleNone ? 1.0 : deviation + args.eps;
        args.advantages[i] = numerator == 0.0 ? 0.f : static_cast<float>(numerator / divisor);
    }
    for (int64_t g = 0; g < args.groups; g++) {
        args.mean[g] = static_cast<float>(groups[g].mean());
        args.std[g] = static_cast<float>(groups[g].std(args.ddof));
    }
}

}  // namespace gk
