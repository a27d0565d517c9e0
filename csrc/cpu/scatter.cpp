// target[ids[t]] += scale[t] * rows[t]: the sampled ids' own share of the gradient of the weight. Rows of equal ids are
// summed in float32, in the order of t, and added once: a bfloat16 target rounds once per id. N H operations beside the
// products' N H V: one thread.
#include <algorithm>
#include <numeric>
#include <vector>

#include "api.h"
#include "elements.h"

namespace gk {

namespace {

template <class Target>
void add(const AddRowsArgs& args) {
    std::vector<int64_t> order(args.count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return args.ids[a] < args.ids[b]; });
    std::vector<float> sum(args.width);
    for (int64_t first = 0; first < args.count;) {
        const int64_t id = args.ids[order[first]];
        std::fill(sum.begin(), sum.end(), 0.f);
        for (; first < args.count && args.ids[order[first]] == id; first++) {
            const int64_t t = order[first];
            const auto* row = static_cast<const uint16_t*>(args.rows) + t * args.rows_stride;
            const float scale = args.scale[t];
            for (int64_t j = 0; j < args.width; j++) sum[j] += scale * BFloat16::load(row[j]);
        }
        auto* target = static_cast<typename Target::Element*>(args.target) + id * args.target_stride;
        for (int64_t j = 0; j < args.width; j++) target[j] = Target::store(Target::load(target[j]) + sum[j]);
    }
}

}  // namespace

void add_rows(const AddRowsArgs& args) { args.target_dtype == kBfloat16 ? add<BFloat16>(args) : add<Float32>(args); }

}  // namespace gk
