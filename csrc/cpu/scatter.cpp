// target[ids[t]] += scale[t] * rows[t], in the order of t: what rounding took from the sampled ids' gradients goes back
// into the gradient of the weight. N H operations beside the products' N H V: one thread, so that equal ids need no
// lock.
#include <cstring>
#include <stdexcept>

#include "api.h"

namespace gk {

namespace {

struct Single {
    using Element = float;
    static float load(float x) { return x; }
    static float store(float x) { return x; }
};

struct Brain {
    using Element = uint16_t;
    static float load(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    static uint16_t store(float x) {  // round to nearest even; a NaN stays one
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40u);
        return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
};

template <class Target, class Source>
void add(const AddRowsArgs& args) {
    for (int64_t t = 0; t < args.count; t++) {
        auto* target = static_cast<typename Target::Element*>(args.target) + args.ids[t] * args.target_stride;
        const auto* row = static_cast<const typename Source::Element*>(args.rows) + t * args.rows_stride;
        const float scale = args.scale[t];
        for (int64_t j = 0; j < args.width; j++)
            target[j] = Target::store(Target::load(target[j]) + scale * Source::load(row[j]));
    }
}

}  // namespace

void add_rows(const AddRowsArgs& args) {
    for (int64_t t = 0; t < args.count; t++)
        if (args.ids[t] < 0 || args.ids[t] >= args.target_rows)
            throw std::invalid_argument("ids must name target rows");
    const bool known =
        args.rows_dtype == kBFloat16 && (args.target_dtype == kBFloat16 || args.target_dtype == kFloat32);
    if (!known) throw std::invalid_argument("add_rows takes bfloat16 rows into a bfloat16 or float32 target");
    args.target_dtype == kBFloat16 ? add<Brain, Brain>(args) : add<Single, Brain>(args);
}

}  // namespace gk
