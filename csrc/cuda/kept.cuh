// The three products over the ids that truncated sampling kept, K_t of them for token t:
//
//     sampled dense-dense product    logits_tj = h_t . W_j + b_j              j in K_t
//     sparse-dense product           dhidden_t = sum_j dlogits_tj W_j         j in K_t
//     its transpose                  dweight_j = sum_t dlogits_tj h_t         t with j in K_t
//
// Each reads one row of W, or of h, per pair of a token and an id, in vectors of 16 bytes; the rest is small. Logits: a
// warp takes kKeptGroup ids of a token, its lanes take columns in turn. The other two: a block takes part of a row of
// the result, a thread one vector of it, and kKeptGroup rows are on their way at a time. Sums are float32, in an order
// that depends on the ids alone.
#pragma once
#include "../kept_rules.h"
#include "elements.cuh"
#include "kernels.h"

namespace gk::cuda {

// Columns [column, column + count of a vector) of a row; 0 beyond its end.
template <class Type>
GK_DEVICE void load_columns(const typename Type::Element* row, int64_t column, int64_t width,
                            float (&x)[kPerVector<Type>]) {
    if (column + kPerVector<Type> <= width && (reinterpret_cast<uintptr_t>(row + column) & 15) == 0) {
        Vector packed;
        load_words(row + column, packed.words);
        unpack<Type>(packed, x);
    } else {
        GK_UNROLL for (int k = 0; k < kPerVector<Type>; k++) x[k] =
            column + k < width ? Type::load(row[column + k]) : 0.f;
    }
}

// The sum of kKeptGroup rows in work, of a thread's vector of columns.
template <class Type>
struct ColumnSum {
    static constexpr int kCount = kPerVector<Type>;
    float total[kCount];
    int64_t column, width;

    GK_DEVICE ColumnSum(int64_t first, int64_t columns) : column(first), width(columns) {
        GK_UNROLL for (float& x : total) x = 0.f;
    }
    // row_of(k), factor_of(k) for k in [0, count)
    template <class RowOf, class FactorOf>
    GK_DEVICE void add(int64_t count, const RowOf& row_of, const FactorOf& factor_of) {
        for (int64_t first = 0; first < count; first += kKeptGroup) {
            float rows[kKeptGroup][kCount], factors[kKeptGroup];
            GK_UNROLL for (int q = 0; q < kKeptGroup; q++) {
                const int64_t k = first + q < count ? first + q : count - 1;
                factors[q] = first + q < count ? factor_of(k) : 0.f;
                load_columns<Type>(row_of(k), column, width, rows[q]);
            }
            GK_UNROLL for (int q = 0; q < kKeptGroup; q++) GK_UNROLL for (int k = 0; k < kCount; k++) total[k] +=
                factors[q] * rows[q][k];
        }
    }
    template <class Out>
    GK_DEVICE void store(typename Out::Element* row, bool add) {
        constexpr int kWords = kCount * kSize<Out> / 4, kStep = kWords < 4 ? kWords : 4;
        if (add) {
            GK_UNROLL for (int k = 0; k < kCount; k++) if (column + k < width) total[k] += Out::load(row[column + k]);
        }
        if (column + kCount <= width && (reinterpret_cast<uintptr_t>(row + column) & (4 * kStep - 1)) == 0) {
            GK_UNROLL for (int w = 0; w < kWords; w += kStep) {
                uint32_t words[kStep];
                GK_UNROLL for (int k = 0; k < kStep; k++) words[k] = Out::pack(total + (w + k) * kPerWord<Out>);
                store_words(row + column + w * kPerWord<Out>, words);
            }
        } else {
            GK_UNROLL for (int k = 0; k < kCount; k++) if (column + k < width) row[column + k] = Out::round(total[k]);
        }
    }
};

GK_DEVICE void kept_ids(const KeptRowArgs& args) {
    const int64_t row = static_cast<int64_t>(block_index()) * kKeptRowThreads + thread_index();
    if (row < args.rows) keep_ids(args, row);
}

template <class Type>
GK_DEVICE void kept_logits(const KeptLaunch& args) {
    using Element = typename Type::Element;
    constexpr int kCount = kPerVector<Type>;
    const KeptArgs& kept = args.kept;
    const int64_t groups = kept.slots / kKeptGroup;
    const int64_t group = static_cast<int64_t>(block_index()) * (kKeptThreads / kWarp) + warp_index();
    const int64_t row = group / groups, first = row * kept.slots + group % groups * kKeptGroup;
    if (row >= kept.rows) return;  // whole warps
    const auto* const h = static_cast<const Element*>(kept.hidden) + kept.token_of[row] * kept.hidden_row_stride;
    const Element* rows[kKeptGroup];
    GK_UNROLL for (int q = 0; q < kKeptGroup; q++) {
        const int32_t id = kept.ids[first + q];
        rows[q] = static_cast<const Element*>(kept.weight) + (id < 0 ? 0 : id) * kept.weight_row_stride;
    }
    float sums[kKeptGroup] = {};
    if (kept.ids[first] >= 0) {  // used places come first
        for (int64_t column = lane_index() * kCount; column < kept.width; column += kWarp * kCount) {
            float x[kCount], w[kKeptGroup][kCount];
            load_columns<Type>(h, column, kept.width, x);
            GK_UNROLL for (int q = 0; q < kKeptGroup; q++) load_columns<Type>(rows[q], column, kept.width, w[q]);
            GK_UNROLL for (int q = 0; q < kKeptGroup; q++) GK_UNROLL for (int k = 0; k < kCount; k++) sums[q] +=
                x[k] * w[q][k];
        }
    }
    GK_UNROLL for (int q = 0; q < kKeptGroup; q++) GK_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) sums[q] +=
        shuffle_xor(sums[q], mask);
    if (lane_index() != 0) return;
    GK_UNROLL for (int q = 0; q < kKeptGroup; q++) {
        const int32_t id = kept.ids[first + q];
        args.logits[first + q] = id < 0 ? -infinity() : kept.bias ? sums[q] + kept.bias[id] : sums[q];
    }
}

// Blocks of a row of the result, and the first column of a thread.
template <class Type>
GK_DEVICE int64_t column_blocks(int64_t width) {
    constexpr int64_t kColumns = kKeptThreads * kPerVector<Type>;
    return (width + kColumns - 1) / kColumns;
}
template <class Type>
GK_DEVICE int64_t first_column(int64_t blocks) {
    return (block_index() % blocks * kKeptThreads + thread_index()) * kPerVector<Type>;
}

template <class Type, class Out>
GK_DEVICE void kept_dhidden(const KeptLaunch& args) {
    const KeptArgs& kept = args.kept;
    const int64_t blocks = column_blocks<Type>(kept.width), row = block_index() / blocks;
    const int32_t* const ids = kept.ids + row * kept.slots;
    const float* const factors = args.dlogits + row * kept.slots;
    int64_t count = 0, end = kept.slots;  // used places come first
    while (count < end) {
        const int64_t middle = (count + end) / 2;
        if (ids[middle] < 0)
            end = middle;
        else
            count = middle + 1;
    }
    ColumnSum<Type> sum(first_column<Type>(blocks), kept.width);
    const auto* const weight = static_cast<const typename Type::Element*>(kept.weight);
    sum.add(
        count, [&](int64_t k) { return weight + ids[k] * kept.weight_row_stride; },
        [&](int64_t k) { return factors[k]; });
    sum.template store<Out>(
        static_cast<typename Out::Element*>(args.target.data) + kept.token_of[row] * args.target.row_stride, false);
}

template <class Type, class Out>
GK_DEVICE void kept_dweight(const KeptWeightLaunch& args) {
    const KeptPairs& pairs = args.pairs;
    const int64_t blocks = column_blocks<Type>(pairs.width), id = block_index() / blocks;
    const int64_t begin = args.by_id.starts[id], count = args.by_id.starts[id + 1] - begin;
    if (count == 0 && args.target.add) return;
    const int64_t* const own = args.by_id.pairs + begin;
    ColumnSum<Type> sum(first_column<Type>(blocks), pairs.width);
    const auto* const hidden = static_cast<const typename Type::Element*>(pairs.hidden);
    sum.add(
        count, [&](int64_t k) { return hidden + pairs.token_of[own[k]] * pairs.hidden_row_stride; },
        [&](int64_t k) { return pairs.dlogits[own[k]]; });
    sum.template store<Out>(static_cast<typename Out::Element*>(args.target.data) + id * args.target.row_stride,
                            args.target.add);
}

}  // namespace gk::cuda
