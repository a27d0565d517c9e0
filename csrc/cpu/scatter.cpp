// target[ids[t]] += scale[t] * rows[t]: the sampled ids' own share of the gradient of the weight. Rows of equal ids are
// summed in float32, in the order of t, and added once: a bfloat16 target rounds once per id. N H operations beside the
// products' N H V: one thread.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "api.h"
#include "elements.h"

namespace gk {

namespace {

template <class Target, class Source>
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
            const auto* row = static_cast<const typename Source::Element*>(args.rows) + t * args.rows_stride;
            const float scale = args.scale[t];
            for (int64_t j = 0; j < args.width; j++) sum[j] += scale * Source::load(row[j]);
        }
        auto* target = static_cast<typename Target::Element*>(args.target) + id * args.target_stride;
        for (int64_t j = 0; j < args.width; j++) target[j] = Target::store(Target::load(target[j]) + sum[j]);
    }
}

}  // namespace

void add_rows(const AddRowsArgs& args) {
    for (int64_t t = 0; t < args.count; t++)
        if (args.ids[t] < 0 || args.ids[t] >= args.target_rows)
            throw std::invalid_argument("ids must name target rows");
    const bool known =
        args.rows_dtype == kBfloat16 && (args.target_dtype == kBfloat16 || args.target_dtype == kFloat32);
    if (!known) throw std::invalid_argument("add_rows takes bfloat16 rows into a bfloat16 or float32 target");
    args.target_dtype == kBfloat16 ? add<BFloat16, BFloat16>(args) : add<Float32, BFloat16>(args);
}

}  // namespace gk
