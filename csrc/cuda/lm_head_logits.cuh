// From a product u = h . W_j + b_j to y, and running sums of exponentials: what the epilogue and the kernels around it
// share beyond softmax.cuh.
#pragma once
#include "../args.h"
#include "softmax.cuh"

namespace gk::cuda::head {

constexpr float kHighestExponent = 100.f;  // sums of 2^t over a vocabulary stay below 2^128

// Sampled ids as 32-bit columns; -1 outside the vocabulary.
GK_DEVICE int column_of(int64_t id, int64_t vocab) { return id >= 0 && id < vocab ? static_cast<int>(id) : -1; }

struct Logit {
    float y, slope;  // slope: dy/du without the scale
};

template <bool kCapped>
GK_DEVICE Logit to_logit(const Scales& scales, float u) {
    if (!kCapped) return {u, 1.f};
    const float w = complement(scales, u);
    return {capped(scales, w), slope(w)};
}

// rebase() with a float32 factor: between tiles an exponential in double would cost as much as those of the tile.
GK_DEVICE Sums<double> raise(const Sums<double>& sums, float top, float to_exponent) {
    const float fall = sums.top > -infinity() ? (sums.top - top) * to_exponent : 0.f;
    const double factor = exp2_fast(fall);
    return {top, sums.exps * factor, (sums.moment + sums.exps * fall) * factor};
}

GK_DEVICE Sums<double> merge(const Sums<double>& a, const Sums<double>& b, float to_exponent) {
    const float top = fmaxf(a.top, b.top);
    const Sums<double> x = raise(a, top, to_exponent), y = raise(b, top, to_exponent);
    return {top, x.exps + y.exps, x.moment + y.moment};
}

}  // namespace gk::cuda::head
