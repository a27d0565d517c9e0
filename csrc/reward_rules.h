// Advantages from rewards: A = (reward - baseline) / (std + eps), two passes in double. CPU and device kernels compile
// this file.
//
// NaN rewards are left out of every statistic and get A = 0. Rewards that are all equal have exactly that mean and a
// standard deviation of exactly 0, which sums could miss by a rounding: an advantage of 1e-17 / eps is not 0.
#pragma once
#include <math.h>

#include "args.h"

namespace gk {

struct Moments {
    double count, sum, low, high;
    double squares;  // of the distances from the mean

    GK_HD void add(double reward) {
        if (reward != reward) return;
        count += 1.0;
        sum += reward;
        low = reward < low ? reward : low;
        high = reward > high ? reward : high;
    }
    // In the second pass: `mean` is that of all rewards of the first.
    GK_HD void add_distance(double reward, double mean) {
        if (reward == reward) squares += (reward - mean) * (reward - mean);
    }
    GK_HD bool equal() const { return low == high; }
    GK_HD double mean() const {
        if (count == 0.0) return nanf("");
        return equal() ? low : sum / count;
    }
    GK_HD double std(int64_t ddof) const {
        const double freedom = count - static_cast<double>(ddof);
        if (count == 0.0) return nanf("");
        return equal() || freedom <= 0.0 ? 0.0 : sqrt(squares / freedom);
    }
};

GK_HD double centred(double reward, const Moments& group, int32_t baseline) {
    if (baseline == kBaselineNone) return reward;
    if (group.equal()) return 0.0;
    const double distance = reward - group.mean();
    // reward - mean of the others = (reward - mean) n / (n - 1); n > 1, as a group of one is equal
    return baseline == kBaselineLeaveOneOut ? distance * group.count / (group.count - 1.0) : distance;
}

// The divisor is 1 where nothing is to be scaled.
GK_HD float advantage(double reward, const Moments& group, int32_t baseline, double divisor) {
    const double numerator = reward == reward ? centred(reward, group, baseline) : 0.0;
    return numerator == 0.0 ? 0.f : static_cast<float>(numerator / divisor);
}

}  // namespace gk
