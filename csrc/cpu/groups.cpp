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

void group_statistics(const float* rewards, const int64_t* group_index, int64_t count, int64_t groups, int32_t scale,
                      int32_t baseline, int64_t ddof, double eps, float* advantages, float* mean, float* std) {
    for (int64_t i = 0; i < count; i++)
        if (group_index[i] < 0 || group_index[i] >= groups)
            throw std::invalid_argument("group_index must lie in [0, num_groups)");

    std::vector<Moments> by_group(groups);
    Moments batch;
    for (int64_t i = 0; i < count; i++) {
        if (isnan(rewards[i])) continue;
        by_group[group_index[i]].add(rewards[i]);
        batch.add(rewards[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        if (isnan(rewards[i])) continue;
        by_group[group_index[i]].add_distance(rewards[i]);
        batch.add_distance(rewards[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        const Moments& group = by_group[group_index[i]];
        const double numerator = isnan(rewards[i]) ? 0.0 : centred(rewards[i], group, baseline);
        const double deviation = scale == kScaleBatch ? batch.std(ddof) : group.std(ddof);
        const double divisor = scale == kScaleNone ? 1.0 : deviation + eps;
        advantages[i] = numerator == 0.0 ? 0.f : static_cast<float>(numerator / divisor);
    }
    for (int64_t g = 0; g < groups; g++) {
        mean[g] = static_cast<float>(by_group[g].mean());
        std[g] = static_cast<float>(by_group[g].std(ddof));
    }
}

}  // namespace gk
