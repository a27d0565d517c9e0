// What Python, the CPU kernels and the device kernels agree on: enums, their names, the row table, the parameters.
// Plain C++17: no torch, no Python, no CUDA. The order of every list is part of the interface; the module exports the
// names, so that Python looks an index up by name and never writes a number down.
#pragma once
#include <stdint.h>

namespace gk {

// Raised with every change of the seam, so that Python never calls a module that was built for another version of it.
constexpr int kInterface = 4;

// ---- element types of logits and gradients -------------------------------------------------------------------------
enum DType : int32_t { kFloat32, kBFloat16, kFloat16, kDTypeCount };
constexpr const char* kDTypeNames[kDTypeCount] = {"float32", "bfloat16", "float16"};

// ---- the row table: a (kFieldCount, C) float32 matrix, one column per row of logits ---------------------------------
enum TableField : int32_t {
    kAdvantage,
    kBase,              // log-probability that the ratio divides by
    kRef,               // log-probability of the reference policy
    kMultiplier,        // factor of the surrogate: rollout weight, off-policy mask, ...
    kWeightRatio,       // d loss / d (d_ratio path)
    kWeightDirect,      // d loss / d (the token's value)
    kWeightEntropy,     // d loss / d entropy
    kTemperature,       //
    kEntropyThreshold,  // tokens below it lose their surrogate; -inf keeps all
    kRollout,           // log-probability of the sampling engine; NaN = absent
    kRolloutWeight,     // 1 = absent
    kFieldCount
};
constexpr const char* kFieldNames[kFieldCount] = {"advantage",      "base",          "ref",
                                                  "multiplier",     "weight_ratio",  "weight_direct",
                                                  "weight_entropy", "temperature",   "entropy_threshold",
                                                  "rollout",        "rollout_weight"};

// ---- the metric columns that `reduce` sums --------------------------------------------------------------------------
enum Column : int32_t {
    kLoss,
    kTokens,
    kKl,
    kEntropy,
    kRatio,
    kClipLow,
    kClipHigh,
    kCispoClip,
    kApproxKl,
    kMismatch,
    kMismatchCount,
    kRolloutWeightSum,
    kRolloutWeightSq,
    kZeroGradient,
    kColumnCount
};
constexpr const char* kColumnNames[kColumnCount] = {
    "loss",       "tokens",    "kl",       "entropy",        "ratio",          "clip_low",          "clip_high",
    "cispo_clip", "approx_kl", "mismatch", "mismatch_count", "rollout_weight", "rollout_weight_sq", "zero_gradient"};

// ---- the objective --------------------------------------------------------------------------------------------------
enum Surrogate : int32_t { kClip, kCispo, kCispoTwoSided, kSapo, kReinforce, kGmpo, kDppoTv, kIpo, kSurrogateCount };
constexpr const char* kSurrogateNames[kSurrogateCount] = {"clip",      "cispo", "cispo_two_sided", "sapo",
                                                          "reinforce", "gmpo",  "dppo_tv",         "ipo"};

enum KlEstimator : int32_t { kKlNone, kK1, kK2, kK3, kAbs, kK1Plus, kK3Plus, kKlEstimatorCount };
constexpr const char* kKlEstimatorNames[kKlEstimatorCount] = {"none", "k1", "k2", "k3", "abs", "k1+", "k3+"};

// Filled from a flat Python sequence in exactly this order: four integers, then the floats. An infinite bound is off.
struct Params {
    int32_t surrogate;
    int32_t kl;
    int32_t has_base;         // 0: the ratio is logp / stop_gradient(logp), log ratio 0
    int32_t bias_correction;  // KL is multiplied by the ratio
    float beta;
    float epsilon_low;
    float epsilon_high;
    float delta;
    float dual_clip;
    float log_ratio_clamp;
    float kl_delta_clamp;
    float kl_clamp;
    float sapo_temperature_pos;
    float sapo_temperature_neg;
    float logit_scale;
    float softcap;  // 0 is off
};
constexpr int kParamIntegers = 4;
constexpr int kParamFloats = 12;
constexpr const char* kParamNames[kParamIntegers + kParamFloats] = {"surrogate",
                                                                    "kl",
                                                                    "has_base",
                                                                    "bias_correction",
                                                                    "beta",
                                                                    "epsilon_low",
                                                                    "epsilon_high",
                                                                    "delta",
                                                                    "dual_clip",
                                                                    "log_ratio_clamp",
                                                                    "kl_delta_clamp",
                                                                    "kl_clamp",
                                                                    "sapo_temperature_pos",
                                                                    "sapo_temperature_neg",
                                                                    "logit_scale",
                                                                    "softcap"};
static_assert(sizeof(Params) == 4 * (kParamIntegers + kParamFloats), "Params is a list of 4-byte values");

}  // namespace gk
