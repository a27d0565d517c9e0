// What Python, the CPU kernels and the device kernels agree on: enums, their names, the per-token matrices, the
// parameters. Plain C++17: no torch, no Python, no CUDA. The order of every list is part of the interface; the module
// exports the names, so that Python looks an index up by name and never writes a number down. Each list is
// written once.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__)
#define GK_HD __host__ __device__ __forceinline__
#else
// Never a function of its own: rows.cpp is compiled for several instruction sets, and the linker could pick any copy.
#define GK_HD inline __attribute__((always_inline))
#endif

namespace gk {

// Raised with every change of the seam, so that Python never calls a module that was built for another version of it.
constexpr int kInterface = 9;

#define GK_ENUMERATOR(enumerator, name) enumerator,
#define GK_NAME(enumerator, name) name,

// ---- element types of logits and gradients -------------------------------------------------------------------------
#define GK_DTYPES(F)         \
    F(kFloat32, "float32")   \
    F(kBFloat16, "bfloat16") \
    F(kFloat16, "float16")
enum DType : int32_t { GK_DTYPES(GK_ENUMERATOR) kDTypeCount };
constexpr const char* kDTypeNames[] = {GK_DTYPES(GK_NAME)};

// ---- what is known of a token: a (kFieldCount, tokens) float32 matrix -----------------------------------------------
#define GK_TABLE_FIELDS(F)                                                                \
    F(kAdvantage, "advantage")                                                            \
    F(kOld, "old")                      /* that the ratio divides by; +inf: by itself */  \
    F(kRef, "ref")                      /* of the reference policy */                     \
    F(kMultiplier, "multiplier")        /* factor of the surrogate alone */               \
    F(kWeightRatio, "weight_ratio")     /* d loss / d value, through the ratio */         \
    F(kWeightDirect, "weight_direct")   /* d loss / d value, through logp itself */       \
    F(kWeightEntropy, "weight_entropy") /* d loss / d entropy */                          \
    F(kTemperature, "temperature")                                                        \
    F(kEntropyThreshold, "entropy_threshold") /* below it no surrogate; -inf keeps all */ \
    F(kRollout, "rollout")                    /* of the sampling engine; NaN = absent */  \
    F(kRolloutWeight, "rollout_weight")       /* 1 = absent */
enum TableField : int32_t { GK_TABLE_FIELDS(GK_ENUMERATOR) kFieldCount };
constexpr const char* kFieldNames[] = {GK_TABLE_FIELDS(GK_NAME)};

// ---- what the kernels find out about a token: a (kValueFieldCount, tokens) float32 matrix ---------------------------
#define GK_VALUE_FIELDS(F)                                                            \
    F(kTokenLogp, "logp")                                                             \
    F(kTokenEntropy, "entropy")                                                       \
    F(kTokenLogRatio, "log_ratio") /* of the token or of its sequence, not clamped */ \
    F(kTokenValue, "value")        /* its loss before the weight */                   \
    F(kTokenKl, "kl")                                                                 \
    F(kTokenGLogp, "g_logp") /* d loss / d logp */
enum ValueField : int32_t { GK_VALUE_FIELDS(GK_ENUMERATOR) kValueFieldCount };
constexpr const char* kValueFieldNames[] = {GK_VALUE_FIELDS(GK_NAME)};

// ---- the metric columns that `reduce` sums --------------------------------------------------------------------------
#define GK_COLUMNS(F)                        \
    F(kLoss, "loss")                         \
    F(kTokens, "tokens")                     \
    F(kKl, "kl")                             \
    F(kEntropy, "entropy")                   \
    F(kRatio, "ratio")                       \
    F(kClipLow, "clip_low")                  \
    F(kClipHigh, "clip_high")                \
    F(kCispoClip, "cispo_clip")              \
    F(kApproxKl, "approx_kl")                \
    F(kMismatch, "mismatch")                 \
    F(kMismatchCount, "mismatch_count")      \
    F(kRolloutWeightSum, "rollout_weight")   \
    F(kRolloutWeightSq, "rollout_weight_sq") \
    F(kZeroGradient, "zero_gradient")
enum Column : int32_t { GK_COLUMNS(GK_ENUMERATOR) kColumnCount };
constexpr const char* kColumnNames[] = {GK_COLUMNS(GK_NAME)};

// ---- the objective --------------------------------------------------------------------------------------------------
#define GK_SURROGATES(F)                 \
    F(kClip, "clip")                     \
    F(kCispo, "cispo")                   \
    F(kCispoTwoSided, "cispo_two_sided") \
    F(kSapo, "sapo")                     \
    F(kReinforce, "reinforce")           \
    F(kGmpo, "gmpo")                     \
    F(kDppoTv, "dppo_tv")                \
    F(kIpo, "ipo")
enum Surrogate : int32_t { GK_SURROGATES(GK_ENUMERATOR) kSurrogateCount };
constexpr const char* kSurrogateNames[] = {GK_SURROGATES(GK_NAME)};

#define GK_KL_ESTIMATORS(F) \
    F(kKlNone, "none")      \
    F(kK1, "k1")            \
    F(kK2, "k2")            \
    F(kK3, "k3")            \
    F(kAbs, "abs")          \
    F(kK1Plus, "k1+")       \
    F(kK3Plus, "k3+")
enum KlEstimator : int32_t { GK_KL_ESTIMATORS(GK_ENUMERATOR) kKlEstimatorCount };
constexpr const char* kKlEstimatorNames[] = {GK_KL_ESTIMATORS(GK_NAME)};

// Whose ratio a token's surrogate sees: its own, or the mean or the sum of the log ratios of its sequence.
#define GK_LEVELS(F)              \
    F(kLevelToken, "token")       \
    F(kLevelSequence, "sequence") \
    F(kLevelSequenceSum, "sequence_sum")
enum Level : int32_t { GK_LEVELS(GK_ENUMERATOR) kLevelCount };
constexpr const char* kLevelNames[] = {GK_LEVELS(GK_NAME)};

#define GK_AGGREGATIONS(F)          \
    F(kSeqMean, "seq_mean")         \
    F(kTokenMean, "token_mean")     \
    F(kFixedLength, "fixed_length") \
    F(kNumItems, "num_items")       \
    F(kSeqSum, "seq_sum")
enum Aggregation : int32_t { GK_AGGREGATIONS(GK_ENUMERATOR) kAggregationCount };
constexpr const char* kAggregationNames[] = {GK_AGGREGATIONS(GK_NAME)};

// ---- advantages from rewards ----------------------------------------------------------------------------------------
#define GK_ADVANTAGE_SCALES(F) \
    F(kScaleGroup, "group")    \
    F(kScaleBatch, "batch")    \
    F(kScaleNone, "none")
enum AdvantageScale : int32_t { GK_ADVANTAGE_SCALES(GK_ENUMERATOR) kScaleCount };
constexpr const char* kScaleNames[] = {GK_ADVANTAGE_SCALES(GK_NAME)};

#define GK_BASELINES(F)                      \
    F(kBaselineMean, "mean")                 \
    F(kBaselineLeaveOneOut, "leave_one_out") \
    F(kBaselineNone, "none")
enum Baseline : int32_t { GK_BASELINES(GK_ENUMERATOR) kBaselineCount };
constexpr const char* kBaselineNames[] = {GK_BASELINES(GK_NAME)};

// ---- structs of numbers, which arrive as their bytes: int32 members, then float32 members ---------------------------
#define GK_INTEGER(name) int32_t name;
#define GK_FLOAT(name) float name;
#define GK_MEMBER_NAME(name) #name,
#define GK_ONE_MORE(name) +1

// The scalars of the per-token objective. An infinite bound is off.
#define GK_PARAM_INTEGERS(F)                                                         \
    F(surrogate)                                                                     \
    F(kl)                                                                            \
    F(has_old)         /* 0: the ratio is logp / stop_gradient(logp), log ratio 0 */ \
    F(bias_correction) /* KL is multiplied by the ratio */                           \
    F(level)                                                                         \
    F(has_rollout) /* log-probabilities of the sampling engine were given */         \
    F(vespo)       /* the multiplier is VESPO's phi of the sequence; surrogate reinforce */
#define GK_PARAM_FLOATS(F)                                                         \
    F(beta)                                                                        \
    F(epsilon_low)                                                                 \
    F(epsilon_high)                                                                \
    F(delta)                                                                       \
    F(dual_clip)                                                                   \
    F(log_ratio_clamp)                                                             \
    F(kl_delta_clamp)                                                              \
    F(kl_clamp)                                                                    \
    F(sapo_temperature_pos)                                                        \
    F(sapo_temperature_neg)                                                        \
    F(logit_scale)                                                                 \
    F(softcap)              /* 0 is off */                                         \
    F(off_policy_threshold) /* of the mean drift from the sampling engine, nats */ \
    F(vespo_k_pos)                                                                 \
    F(vespo_k_neg)                                                                 \
    F(vespo_lambda_pos)                                                            \
    F(vespo_lambda_neg)
struct Params {
    GK_PARAM_INTEGERS(GK_INTEGER)
    GK_PARAM_FLOATS(GK_FLOAT)
};
constexpr int kParamIntegers = 0 GK_PARAM_INTEGERS(GK_ONE_MORE);
constexpr const char* kParamNames[] = {GK_PARAM_INTEGERS(GK_MEMBER_NAME) GK_PARAM_FLOATS(GK_MEMBER_NAME)};
static_assert(sizeof(Params) == 4 * (sizeof kParamNames / sizeof *kParamNames), "a list of 4-byte values");

// What a plan follows from besides the batch itself.
#define GK_PLAN_RULE_INTEGERS(F)                                                   \
    F(aggregation)                                                                 \
    F(divides_by_rollout)        /* old is the rollout where that is known */      \
    F(multiplies_rollout_weight) /* 0: VESPO's phi takes its place */              \
    F(level)                                                                       \
    F(whole_sequences) /* a token's gradient depends on those of its sequence */   \
    F(needs_advantage) /* no gradient of the surrogate where the advantage is 0 */ \
    F(kl_has_gradient) /* the KL term alone has a gradient */                      \
    F(score_inactive)
#define GK_PLAN_RULE_FLOATS(F) \
    F(max_completion_length)   \
    F(entropy_coef)            \
    F(temperature)             \
    F(entropy_threshold)
struct PlanRules {
    GK_PLAN_RULE_INTEGERS(GK_INTEGER)
    GK_PLAN_RULE_FLOATS(GK_FLOAT)
};
constexpr int kPlanRuleIntegers = 0 GK_PLAN_RULE_INTEGERS(GK_ONE_MORE);
constexpr const char* kPlanRuleNames[] = {GK_PLAN_RULE_INTEGERS(GK_MEMBER_NAME) GK_PLAN_RULE_FLOATS(GK_MEMBER_NAME)};
static_assert(sizeof(PlanRules) == 4 * (sizeof kPlanRuleNames / sizeof *kPlanRuleNames), "a list of 4-byte values");

#undef GK_ENUMERATOR
#undef GK_NAME
#undef GK_INTEGER
#undef GK_FLOAT
#undef GK_MEMBER_NAME
#undef GK_ONE_MORE

}  // namespace gk
