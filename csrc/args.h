// What the kernels of every compiled backend receive: plain pointers and sizes. The pointers are the device's own.
// Plain C++17: no torch, no Python, no CUDA.
#pragma once
#include "layout.h"

namespace gk {

// Whether all tokens of a sequence have a share in the gradient of its ratio.
GK_HD bool shares_ratio(int32_t level) { return level == kLevelSequence || level == kLevelSequenceSum; }

// What is known and what is found out of every token of the batch. A pass over rows that needs no table has none.
struct TokenData {
    const float* table;  // (kFieldCount, count)
    float* values;       // (kValueFieldCount, count)
    int64_t count;       // tokens of the batch, and with it the row stride of both

    GK_HD float field(Field f, int64_t token) const { return table[f * count + token]; }
    GK_HD float& value(ValueField f, int64_t token) const { return values[f * count + token]; }
};

// The tokens that the rows of a chunk are: those of a list, or neighbours.
struct RowTokens {
    int64_t start;
    const int64_t* index;  // (rows,) or null

    GK_HD int64_t operator[](int64_t row) const { return index ? index[row] : start + row; }
};

// One chunk of rows of logits. The three row kernels read what they need and leave the rest alone. Logits, gradient and
// rounding errors are addressed by row, everything else by token.
struct RowArgs {
    const void* logits;     // (rows, vocab), `logits_stride` elements between rows
    const float* bias;      // (vocab,), added to every logit as it is loaded; may be null
    void* grad;             // (rows, vocab); may start where logits starts, see rows.cpp; single_pass: may be null
    float* rounding_error;  // (rows,) what rounding took from the sampled id's gradient; may be null
    const int64_t* ids;     // (tokens,) the sampled token
    const float* temperature;
    double* lse;             // written by stats and single_pass, read by gradient; float32 would cost 1e-3 near 1e4
    const float* g_logp;     // d loss / d logp; gradient only
    const float* g_entropy;  // d loss / d entropy; gradient only
    TokenData tokens;        // the table: single_pass only
    RowTokens token_of;
    int64_t rows, vocab, logits_stride, grad_stride;
    int32_t logits_dtype, grad_dtype;
    Params params;
};

// The teacher's logits beside those of a chunk, and what its tokens have besides TokenData.
struct TeacherArgs {
    const void* logits;   // (rows, vocab)
    const float* bias;    // (vocab,) or null
    const float* weight;  // (tokens,) d loss / d divergence
    float* offset;        // (tokens,) the divergence; with jsd the KL of the policy to the mixture
    double* lse;          // (tokens,)
    int64_t logits_stride;
    int32_t logits_dtype;
    TeacherParams params;
};

// The gradient of the logits of a chunk as pairs of an id and a number, `capacity` places per row.
struct SparseRows {
    int32_t* ids;  // (rows, capacity), ascending
    float* values;
    int32_t* counts;  // (rows,); capacity + 1 where there are more
    int64_t capacity;
    float theta;
    int64_t first_id;  // of a slice of the vocabulary
};

// The objective of tokens whose log-probability and entropy are known.
struct TokenArgs {
    TokenData tokens;
    RowTokens token_of;
    int64_t rows;
    Params params;
};

// The same for the scored tokens of whole sequences [first, last), each of which depends on its sequence.
struct SequenceArgs {
    TokenData tokens;
    const int64_t* offsets;  // (sequences + 1,) first token of each sequence
    const float* lengths;    // (sequences,) scored tokens of each, where any are
    const uint8_t* scored;   // (tokens,)
    int64_t first, last;
    Params params;
};

struct ReduceArgs {
    TokenData tokens;
    const uint8_t* scored;   // (tokens,)
    const int64_t* offsets;  // (sequences + 1,)
    int64_t sequences;
    const int64_t* group_index;  // (sequences,) or null
    int64_t groups;
    float* sequence_sums;  // (sequences, kColumnCount)
    float* group_sums;     // (groups, kColumnCount)
    float* totals;         // (kColumnCount,)
    float* extrema;        // ratio min, ratio max, mismatch max
    Params params;
};

// An input of the plan: one number, one per sequence or one per token. `data` is null where it was not given.
enum PerWhat : int32_t { kOneForAll, kPerSequence, kPerToken };
struct PlanInput {
    const float* data;
    int32_t per_what;

    GK_HD float at(int64_t token, int64_t sequence) const {
        return data[per_what == kPerToken ? token : per_what == kPerSequence ? sequence : 0];
    }
};

// Which tokens count, their weights and their table. Every input but the sequences may be null.
struct PlanArgs {
    int64_t tokens, sequences;
    const int64_t* cu_seqlens;  // (sequences + 1,), or null: sequence s is tokens [s row_length, (s + 1) row_length)
    int64_t row_length;
    const int64_t* ids;
    const void* mask;  // (tokens,) integers of mask_bytes 1, 4 or 8, not 0 where the token counts
    int32_t mask_bytes;
    PlanInput advantages, rollout_weights, temperature;
    const float *old, *ref, *rollout;     // (tokens,)
    const float *threshold, *normalizer;  // one number each
    PlanRules rules;

    float* table;              // (kFieldCount, tokens)
    float* values;             // (kValueFieldCount, tokens), zeros
    double* lse;               // (tokens,), zeros
    int64_t* offsets;          // (sequences + 1,)
    float* lengths;            // (sequences,) unmasked tokens
    uint8_t *scored, *active;  // (tokens,)
    int64_t* clean_ids;        // (tokens,) or null: ids, 0 at padding
    int64_t* order;   // (tokens,) or null: active tokens, then those scored but not active; the rest is not written
    int64_t* counts;  // or null: active; scored but not active; with whole_sequences, active of each sequence
};

// Ids of a sampling mask, and what is written of some tokens: see contract.KeptRows of Python.
struct KeptRowArgs {
    const void* mask_ids;  // (mask_count,) int32, or int64
    const int64_t* ends;   // (tokens,) where those of each token end
    const int64_t* sampled;
    RowTokens token_of;
    int64_t mask_count, rows, slots, vocab;
    int64_t own_first, own_count;  // ids that are rows of the weight
    int32_t* ids;                  // (rows, slots)
    int32_t* pair_tokens;          // (rows, slots)
    int64_t* columns;              // (tokens,)
    bool* added;                   // (rows,)
    bool wide;                     // the ids of the mask are int64

    GK_HD int64_t last_of(int64_t token) const {
        return ends[token] < 0 ? 0 : ends[token] < mask_count ? ends[token] : mask_count;
    }
    GK_HD int64_t id(int64_t place) const {
        return wide ? static_cast<const int64_t*>(mask_ids)[place] : static_cast<const int32_t*>(mask_ids)[place];
    }
};
// Ids that truncated sampling kept: `slots` per row, those below 0 are not used. Row i is token token_of[i].
struct KeptArgs {
    const void* hidden;  // (tokens, width)
    const void* weight;  // (vocab, width), of the same type
    const float* bias;   // (vocab,) or null
    const int32_t* ids;  // (rows, slots)
    RowTokens token_of;
    int64_t rows, slots, width, hidden_row_stride, weight_row_stride;
    int32_t dtype;
};
struct KeptTarget {
    void* data;  // (tokens or vocab, width)
    int64_t row_stride;
    int32_t dtype;
    bool add;  // to what is there; else rows of the weight that no token kept become 0
};
// The same of all rows, one pair of a token and an id after another.
struct KeptPairs {
    const void* hidden;       // (tokens, width)
    const int32_t* ids;       // (count,) below 0: not used
    const int32_t* token_of;  // (count,)
    const float* dlogits;     // (count,)
    int64_t count, vocab, width, hidden_row_stride;
    int32_t dtype;
};
template <class Index>
struct PairsById {
    const Index* starts;  // (vocab + 1,)
    const Index* pairs;   // in the order of their ids, and within an id in the order in which they came
};

}  // namespace gk
