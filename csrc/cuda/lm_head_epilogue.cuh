// Epilogues of a finished 64 x 256 tile in the registers of a warpgroup. One is made per item, processes the tiles of
// the item in order, and at the end writes the results of its rows. A thread accumulates in its own registers: four
// threads share a row, and their results are combined once, at the end, in fixed order.
//
// Per logit: Logp 1 exponential and about 8 other instructions, Exponentials the same and 2 bytes written.
#pragma once
#include "exponentials.cuh"
#include "fragment.h"
#include "lm_head_schedule.h"

namespace gk::cuda::head {

constexpr int kPatchBytes = kStoredRows * kBoxBytes;  // the rows of a warp

GK_DEVICE bool in_tile(int id, int first_column) {
    return static_cast<uint32_t>(id) - static_cast<uint32_t>(first_column) < static_cast<uint32_t>(kTileColumns);
}

// The two rows of a thread.
struct RowPair {
    int64_t row[2];
    int id[2];  // sampled column, -1 for none
    float to_exponent[2];

    GK_DEVICE RowPair(const RowArgs& rows, int64_t first_row, int thread) {
        GK_UNROLL for (int half = 0; half < 2; half++) {
            row[half] = first_row + Fragment::row(thread, half);
            const bool live = row[half] < rows.rows;
            id[half] = live ? sampled_column(rows, rows.token_of[row[half]]) : -1;
            const float temperature = live ? rows.temperature[rows.token_of[row[half]]] : 1.f;
            to_exponent[half] = make_scales(rows.params, temperature).to_exponent;
        }
    }

    GK_DEVICE bool need_care(int first_column, int vocab) const {
        return first_column + kTileColumns > vocab || in_tile(id[0], first_column) || in_tile(id[1], first_column);
    }
};

GK_DEVICE void add_bias(Fragment& u, const float* bias, int column, int vocab) {
    GK_UNROLL for (int group = 0; group < Fragment::kGroups; group++) {
        GK_UNROLL for (int pair = 0; pair < 2; pair++) {
            const int j = column + 8 * group + pair;
            const float b = j < vocab ? bias[j] : 0.f;
            u.value[Fragment::index(group, 0, pair)] += b;
            u.value[Fragment::index(group, 1, pair)] += b;
        }
    }
}

// Few tiles hold a sampled id or the end of the vocabulary: what follows is for those.
GK_DEVICE float value_at(const Fragment& u, int half, int id, int column) {
    float found = 0.f;
    GK_UNROLL for (int group = 0; group < Fragment::kGroups; group++) {
        GK_UNROLL for (int pair = 0; pair < 2; pair++) {
            if (column + 8 * group + pair == id) found = u.value[Fragment::index(group, half, pair)];
        }
    }
    return found;
}

// The sampled column (-1 for none) and what lies past the end of the vocabulary become `absent`.
GK_DEVICE void blank(Fragment& u, int half, int id, int column, int vocab, float absent) {
    GK_UNROLL for (int group = 0; group < Fragment::kGroups; group++) {
        GK_UNROLL for (int pair = 0; pair < 2; pair++) {
            float& value = u.value[Fragment::index(group, half, pair)];
            const int j = column + 8 * group + pair;
            value = j == id || j >= vocab ? absent : value;
        }
    }
}

// What an epilogue knows of its two rows, and their sums.
class RowSums {
  public:
    // Writes the sums of a part of the vocabulary, when its last tile is added.
    GK_DEVICE void finish(uint32_t part) const {
        GK_UNROLL for (int half = 0; half < 2; half++) {
            Sums<double> sums = sums_[half];
            GK_UNROLL for (int step = 1; step <= 2; step *= 2) {
                const Sums<double> other = {shuffle_xor(sums.top, step), shuffle_xor(sums.exps, step),
                                            shuffle_xor(sums.moment, step)};
                sums = merge(sums, other, rows_.to_exponent[half]);
            }
            const int64_t row = rows_.row[half];
            if (lane_ % 4 == 0 && row < args_.call.rows.rows)
                args_.partials[row * args_.schedule.parts + part] = {sums.top, sums.exps, sums.moment};
        }
    }

  protected:
    GK_DEVICE RowSums(const KernelArgs& args, int64_t first_row, int thread, float top)
        : args_(args), rows_(args.call.rows, first_row, thread), lane_(thread % 32) {
        sums_[0] = sums_[1] = Sums<double>{top, 0.0, 0.0};
    }

    GK_DEVICE int vocab() const { return static_cast<int>(args_.call.rows.vocab); }
    GK_DEVICE int own_column(int first_column) const { return first_column + Fragment::first_column(lane_); }

    const KernelArgs& args_;
    const RowPair rows_;
    const int lane_;
    Sums<double> sums_[2];
};

// ---- statistics: running maximum, sum and moment; the sampled id's logit -------------------------------------------
template <bool kCapped>
class Logp : public RowSums {
  public:
    GK_DEVICE Logp(const KernelArgs& args, int64_t first_row, int thread, uint32_t)
        : RowSums(args, first_row, thread, -infinity()) {}

    GK_DEVICE void add(Fragment& u, int first_column) {
        const float* const bias = args_.call.product.bias;
        const int column = own_column(first_column);
        if (bias) add_bias(u, bias, column, vocab());
        if (kCapped) {
            const Scales scales = make_scales(args_.call.rows.params, 1.f);
            GK_UNROLL for (float& value : u.value) { value = to_logit<true>(scales, value).y; }
        }
        if (rows_.need_care(first_column, vocab())) {
            GK_UNROLL for (int half = 0; half < 2; half++) {
                const int id = rows_.id[half];
                const float y = value_at(u, half, id, column);
                if (in_tile(id, first_column) && id % 8 / 2 == lane_ % 4) args_.y_ids[rows_.row[half]] = y;
                blank(u, half, -1, column, vocab(), -infinity());
            }
        }
        extend(u);
    }

    GK_DEVICE static void drain() {}

  private:
    GK_DEVICE void extend(const Fragment& y) {
        float top[2][2] = {{-infinity(), -infinity()}, {-infinity(), -infinity()}};
        GK_UNROLL for (int i = 0; i < Fragment::kGroups * 4; i++) {
            float& highest = top[i / 2 % 2][i % 2];
            highest = fmaxf(highest, y.value[i]);  // skips NaN
        }
        float exps[2][2] = {}, moment[2][2] = {}, origin[2];
        GK_UNROLL for (int half = 0; half < 2; half++) {
            const float rising = fmaxf(sums_[half].top, fmaxf(top[half][0], top[half][1]));
            // rebase() with a float32 factor: between tiles one in double would cost as much as those of the tile.
            Sums<double>& sums = sums_[half];
            const float fall = sums.top > -infinity() ? (sums.top - rising) * rows_.to_exponent[half] : 0.f;
            const double factor = exp2_fast(fall);
            sums = {rising, sums.exps * factor, (sums.moment + sums.exps * fall) * factor};
            origin[half] = origin_of(rising);
        }
        GK_UNROLL for (int i = 0; i < Fragment::kGroups * 4; i++) {
            const int half = i / 2 % 2, pair = i % 2;
            const float t = exponent(y.value[i], origin[half], rows_.to_exponent[half]);
            const float e = exp2_fast(t);
            exps[half][pair] += e;
            moment[half][pair] += e * t;
        }
        GK_UNROLL for (int half = 0; half < 2; half++) {
            sums_[half].exps += exps[half][0] + exps[half][1];
            sums_[half].moment += moment[half][0] + moment[half][1];
        }
    }
};

// ---- exponentials relative to the sampled token; their sum and moment without it -----------------------------------
// Stands for a logit that adds nothing: far below every other, and not -inf, which a logit may be.
constexpr float kAbsent = -3.4e38f;

template <bool kCapped>
class Exponentials : public RowSums {
  public:
    GK_DEVICE Exponentials(const KernelArgs& args, int64_t first_row, int thread, uint32_t patches)
        : RowSums(args, first_row, thread, 0.f),
          warp_row_(static_cast<int>(first_row) + thread / 32 * kStoredRows),
          patches_(patches),
          policy_(evict_first()) {
        GK_UNROLL for (int half = 0; half < 2; half++) y_id_[half] =
            rows_.row[half] < args.call.rows.rows ? args.y_ids[rows_.row[half]] : 0.f;
    }

    GK_DEVICE void add(Fragment& u, int first_column) {
        const float* const bias = args_.call.product.bias;
        const int column = own_column(first_column);
        if (bias) add_bias(u, bias, column, vocab());
        if (rows_.need_care(first_column, vocab())) {
            blank(u, 0, rows_.id[0], column, vocab(), kAbsent);
            blank(u, 1, rows_.id[1], column, vocab(), kAbsent);
        }
        float exps[2][2] = {}, moment[2][2] = {};
        GK_UNROLL for (int patch = 0; patch < kTileColumns / kBoxColumns; patch++) {
            const uint32_t source = patches_ + patch % 2 * kPatchBytes;
            if (lane_ == 0) tma_store_wait<1>();  // the store of the last patch but one has read this memory
            warp_sync();
            fill(u, patch, source, exps, moment);
            fence_shared_for_tma();
            warp_sync();
            // Also where all of it lies outside of the matrix, or tma_store_wait would count wrong.
            if (lane_ == 0)
                tma_store(&args_.exponentials, first_column + patch * kBoxColumns, warp_row_, source, policy_);
        }
        GK_UNROLL for (int half = 0; half < 2; half++) {
            sums_[half].exps += exps[half][0] + exps[half][1];
            sums_[half].moment += moment[half][0] + moment[half][1];
        }
    }

    GK_DEVICE static void drain() {  // shared memory has to live until the stores have read it
        if (lane_index() == 0) tma_store_wait<0>();
    }

  private:
    GK_DEVICE void fill(const Fragment& u, int patch, uint32_t source, float (&exps)[2][2], float (&moment)[2][2]) {
        const Scales scales = make_scales(args_.call.rows.params, 1.f);
        // The swizzle of a box: piece `group` of row r lies at piece group ^ (r % 8).
        const uint32_t at = source + lane_ / 4 * (kBoxBytes + 16) + lane_ % 4 * 4;
        GK_UNROLL for (int group = 0; group < kBoxColumns / 8; group++) {
            GK_UNROLL for (int half = 0; half < 2; half++) {
                float stored[2];
                GK_UNROLL for (int pair = 0; pair < 2; pair++) {
                    const float value = u.value[Fragment::index(patch * (kBoxColumns / 8) + group, half, pair)];
                    Logit logit = to_logit<kCapped>(scales, value);
                    if (kCapped && value == kAbsent) logit.y = kAbsent;
                    const float t = exponent(logit.y, y_id_[half], rows_.to_exponent[half]);
                    const float bounded = min_or_nan(t, kHighestExponent);
                    const float e = exp2_fast(bounded);
                    exps[half][pair] += e;
                    moment[half][pair] += e * bounded;
                    stored[pair] = kCapped ? e * logit.slope : e;
                }
                store_shared((at ^ group << 4) + half * 8 * kBoxBytes, to_bfloats(stored[0], stored[1]));
            }
        }
    }

    const int warp_row_;
    const uint32_t patches_;
    const uint64_t policy_;
    float y_id_[2];
};

}  // namespace gk::cuda::head
