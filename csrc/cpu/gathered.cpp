// The three products of the loss over a few ids of each token, K_t of token t:
//
//     sampled dense-dense product    logits_tj = h_t . W_j + b_j              j in K_t
//     sparse-dense product           dhidden_t = sum_j dlogits_tj W_j         j in K_t
//     its transpose                  dweight_j = sum_t dlogits_tj h_t         t with j in K_t
//
// O(N K H) operations where the dense products have O(N V H). Every product reads one row of W, or of h, per pair of a
// token and an id: 4 H bytes in float32. Four rows are in work at a time, so that an element of h (or of the sum) is
// loaded once for four, and the four next are fetched meanwhile, beyond the end of a token or an id too: their
// addresses follow no pattern that hardware sees. Sums are float32, in an order that depends on the ids alone.
//
// Compiled once per instruction set, see kernels.h. Only internal linkage and plain functions of the C library here.
#include <stdlib.h>

#include "kernels.h"
#include "math.h"

namespace gk {
namespace GK_ISA {

constexpr int kRows = 4;  // in work at a time
constexpr int64_t kLine = 64;

// Memory of one piece of work, in whole vectors.
struct Scratch {
    float* data;
    explicit Scratch(int64_t count) : data(nullptr) {
        const int64_t bytes = (count + kWidth) * static_cast<int64_t>(sizeof(float));
        data = static_cast<float*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (!data) abort();
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { free(data); }
};

static float sum_of(Float x) {
    float total = 0.f;
    for (int k = 0; k < kWidth; k++) total += x[k];
    return total;
}

// As many rows as are in work at a time, and what follows them.
template <class Type>
struct Group {
    const typename Type::Element* rows[kRows];
    const typename Type::Element* next[kRows];

    GK_INLINE void fetch(const Group& group, int64_t i) {
        constexpr int64_t kPerLine = kLine / static_cast<int64_t>(sizeof(typename Type::Element));
        if (i % kPerLine != 0) return;
        for (const auto* row : group.next) __builtin_prefetch(row + i);
    }
};

template <class Type>
struct Matrix {
    const typename Type::Element* data;
    int64_t row_stride;
    const typename Type::Element* row(int64_t i) const { return data + i * row_stride; }
};

// row_of(k): row k; from `count` on, those that the work after this will read.
template <class Type, class RowOf>
static Group<Type> group_at(int64_t k, int64_t count, const RowOf& row_of) {
    Group<Type> group;
    for (int q = 0; q < kRows; q++) {
        group.rows[q] = row_of(k + q < count ? k + q : count - 1);
        group.next[q] = row_of(k + kRows + q);
    }
    return group;
}

// sums[q] = x . rows[q]
template <class Type>
static void dots(const Group<Type>& group, const float* x, int64_t width, float* sums) {
    Float total[kRows] = {};
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth) {
        Group<Type>::fetch(group, i);
        const Float xs = Float32::load(x + i);
        for (int q = 0; q < kRows; q++) total[q] += xs * Type::load(group.rows[q] + i);
    }
    if (i < width) {
        const Float xs = load_tail<Float32>(x + i, width - i);
        for (int q = 0; q < kRows; q++) total[q] += xs * load_tail<Type>(group.rows[q] + i, width - i);
    }
    for (int q = 0; q < kRows; q++) sums[q] = sum_of(total[q]);
}

// sum += factors[0] * rows[0] + ..., kCount of them, or the first ones: sum = ...
template <class Type, int kCount>
static void add_rows(const Group<Type>& group, const float* factors, int64_t width, bool first, float* sum) {
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth) {
        Group<Type>::fetch(group, i);
        Float total = first ? Float{} : Float32::load(sum + i);
        for (int q = 0; q < kCount; q++) total += Type::load(group.rows[q] + i) * factors[q];
        Float32::store(sum + i, total);
    }
    if (i < width) {
        Float total = first ? Float{} : Float32::load(sum + i);  // the scratch goes on to the end of a vector
        for (int q = 0; q < kCount; q++) total += load_tail<Type>(group.rows[q] + i, width - i) * factors[q];
        Float32::store(sum + i, total);
    }
}

template <class Type, class RowOf, class FactorOf>
static void weighted_sum(int64_t count, const RowOf& row_of, const FactorOf& factor_of, int64_t width, float* sum) {
    constexpr decltype(&add_rows<Type, 1>) kAddRows[kRows] = {add_rows<Type, 1>, add_rows<Type, 2>, add_rows<Type, 3>,
                                                              add_rows<Type, 4>};
    if (count == 0) __builtin_memset(sum, 0, width * sizeof *sum);
    for (int64_t k = 0; k < count; k += kRows) {
        const int64_t num_rows = count - k < kRows ? count - k : kRows;
        float factors[kRows];
        for (int q = 0; q < num_rows; q++) factors[q] = factor_of(k + q);
        kAddRows[num_rows - 1](group_at<Type>(k, count, row_of), factors, width, k == 0, sum);
    }
}

template <class Type>
static void store_row(const float* sum, int64_t width, void* to, bool add) {
    auto* target = static_cast<typename Type::Element*>(to);
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth) {
        const Float x = Float32::load(sum + i);
        Type::store(target + i, add ? x + Type::load(target + i) : x);
    }
    if (i < width) {
        const Float x = load_tail<Float32>(sum + i, width - i);
        store_tail<Type>(target + i, add ? x + load_tail<Type>(target + i, width - i) : x, width - i);
    }
}

static void store_row(const float* sum, int64_t width, int32_t dtype, void* to, bool add) {
    with_type(dtype, [&](auto type) { store_row<decltype(type)>(sum, width, to, add); });
}

static char* row_of(const GatheredTarget& target, int64_t row) {
    return static_cast<char*>(target.data) + row * target.row_stride * element_size(target.dtype);
}

template <class Type>
static Matrix<Type> matrix(const void* data, int64_t row_stride) {
    return {static_cast<const typename Type::Element*>(data), row_stride};
}

// Slots of a row that are used: they come first.
static int64_t used(const int32_t* ids, int64_t slots) {
    while (slots > 0 && ids[slots - 1] < 0) slots--;
    return slots;
}

// Id k of row r, which has `count`; beyond them those of the next row.
static int64_t id_at(const GatheredArgs& args, int64_t r, int64_t k, int64_t count) {
    const int32_t* ids = args.ids + r * args.slots;
    if (k < count) return ids[k];
    k += args.slots - count;
    return r + 1 < args.rows && k < 2 * args.slots && ids[k] >= 0 ? ids[k] : ids[count - 1];
}

template <class Type>
static void logits_rows(const GatheredArgs& args, float* logits, int64_t first, int64_t last) {
    const Scratch h(args.width);
    const auto hidden = matrix<Type>(args.hidden, args.hidden_row_stride);
    const auto weight = matrix<Type>(args.weight, args.weight_row_stride);
    for (int64_t r = first; r < last; r++) {
        const auto* row = hidden.row(args.token_of[r]);
        int64_t i = 0;
        for (; i + kWidth <= args.width; i += kWidth) Float32::store(h.data + i, Type::load(row + i));
        if (i < args.width) Float32::store(h.data + i, load_tail<Type>(row + i, args.width - i));
        const int32_t* ids = args.ids + r * args.slots;
        float* out = logits + r * args.slots;
        const int64_t count = used(ids, args.slots);
        const auto row_of = [&](int64_t k) { return weight.row(id_at(args, r, k, count)); };
        for (int64_t k = 0; k < count; k += kRows) {
            float sums[kRows];
            dots<Type>(group_at<Type>(k, count, row_of), h.data, args.width, sums);
            for (int64_t q = 0; q < kRows && k + q < count; q++)
                out[k + q] = args.bias ? sums[q] + args.bias[ids[k + q]] : sums[q];
        }
        for (int64_t k = count; k < args.slots; k++) out[k] = -__builtin_inff();
    }
}

template <class Type>
static void dhidden_rows(const GatheredArgs& args, const float* dlogits, const GatheredTarget& target, int64_t first,
                         int64_t last) {
    const Scratch sum(args.width);
    const auto weight = matrix<Type>(args.weight, args.weight_row_stride);
    for (int64_t r = first; r < last; r++) {
        const int64_t count = used(args.ids + r * args.slots, args.slots);
        const float* factors = dlogits + r * args.slots;
        weighted_sum<Type>(
            count, [&](int64_t k) { return weight.row(id_at(args, r, k, count)); },
            [&](int64_t k) { return factors[k]; }, args.width, sum.data);
        store_row(sum.data, args.width, target.dtype, row_of(target, args.token_of[r]), target.add);
    }
}

template <class Type>
static void dweight_rows(const TokenIdPairs& pairs, const PairsById& by_id, const GatheredTarget& target, int64_t first,
                         int64_t last) {
    const Scratch sum(pairs.width);
    const auto hidden = matrix<Type>(pairs.hidden, pairs.hidden_row_stride);
    const int64_t last_pair = by_id.starts[pairs.vocab] - 1;
    for (int64_t id = first; id < last; id++) {
        const int64_t begin = by_id.starts[id], count = by_id.starts[id + 1] - begin;
        if (count == 0) {
            if (!target.add) __builtin_memset(row_of(target, id), 0, pairs.width * element_size(target.dtype));
            continue;
        }
        const auto pair = [&](int64_t k) { return by_id.pairs[begin + k < last_pair ? begin + k : last_pair]; };
        weighted_sum<Type>(
            count, [&](int64_t k) { return hidden.row(pairs.token_of[pair(k)]); },
            [&](int64_t k) { return pairs.dlogits[pair(k)]; }, pairs.width, sum.data);
        store_row(sum.data, pairs.width, target.dtype, row_of(target, id), target.add);
    }
}

GatheredKernels gathered_kernels(int32_t dtype) {
    return with_type(dtype, [](auto type) -> GatheredKernels {
        using Type = decltype(type);
        return {logits_rows<Type>, dhidden_rows<Type>, dweight_rows<Type>};
    });
}

}  // namespace GK_ISA
}  // namespace gk
