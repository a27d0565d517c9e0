// The C++ API of the CPU backend: plain pointers in, results written through them. Everything here is callable without
// Python's lock. What a caller gives is checked in Python.
#pragma once
#include "../args.h"

namespace gk {

enum Divergence : int32_t { kReverseKl, kForwardKl, kJsd };

// The teacher's logits beside those of a chunk; without a teacher `logits` is null.
struct TeacherArgs {
    const void* logits;   // (rows, vocab)
    const float* bias;    // (vocab,) or null
    const float* weight;  // (tokens,) d loss / d divergence
    float* divergence;    // (tokens,) nats
    float* policy_kl;     // (tokens,) KL of the policy to the teacher, with jsd to the mixture; forward_kl: 0
    double* lse;          // (tokens,)
    int64_t logits_stride;
    int32_t logits_dtype, kind;  // a Divergence
    float beta;                  // of jsd: the teacher's share of the mixture
    Transform params;
};

// With a teacher the divergence too, and its gradient.
void stats(const RowArgs& args, const TeacherArgs& teacher, int threads);
void gradient(const RowArgs& args, const TeacherArgs& teacher, int threads);

// The gradient of the logits of a chunk as pairs of an id and a number, `capacity` places per row.
struct SparseRows {
    int32_t* ids;  // (rows, capacity), ascending
    float* values;
    int32_t* counts;  // (rows,); capacity + 1 where there are more
    int64_t capacity;
    float theta;
    int64_t first_id;  // of a slice of the vocabulary
};
void sparse_gradient(const RowArgs& args, const SparseRows& out, int threads);

// Ids of a sampling mask, and what is written of some tokens: see AllowedIdRows of Python's operations.
struct AllowedIdArgs {
    const void* mask_ids;  // (mask_count,) int32, or int64
    const int64_t* ends;   // (tokens,) where those of each token end
    const int64_t* sampled;
    RowTokens token_of;
    int64_t mask_count, rows, slots, vocab;
    int64_t local_first, local_count;  // ids that are rows of the weight
    int32_t* ids;                      // (rows, slots)
    int32_t* pair_tokens;              // (rows, slots)
    int64_t* columns;                  // (tokens,)
    bool* added;                       // (rows,)
    bool int64_ids;                    // the ids of the mask are int64
};
void allowed_ids(const AllowedIdArgs& args, int threads);

// A few ids of some tokens: `slots` per row, those below 0 are not used. Row i is token token_of[i].
struct GatheredArgs {
    const void* hidden;  // (tokens, width)
    const void* weight;  // (vocab, width), of the same type
    const float* bias;   // (vocab,) or null
    const int32_t* ids;  // (rows, slots)
    RowTokens token_of;
    int64_t rows, slots, width, hidden_row_stride, weight_row_stride;
    int32_t dtype;
};
struct GatheredTarget {
    void* data;  // (tokens or vocab, width)
    int64_t row_stride;
    int32_t dtype;
    bool add;  // to what is there; else rows of ids that no token has become 0
};
// The same of all rows, one pair of a token and an id after another.
struct TokenIdPairs {
    const void* hidden;       // (tokens, width)
    const int32_t* ids;       // (count,) below 0: not used
    const int32_t* token_of;  // (count,)
    const float* dlogits;     // (count,)
    int64_t count, vocab, width, hidden_row_stride;
    int32_t dtype;
};
void gathered_logits(const GatheredArgs& args, float* logits, int threads);  // (rows, slots), -inf where not used
void gathered_dhidden(const GatheredArgs& args, const float* dlogits, const GatheredTarget& target, int threads);
void gathered_dweight(const TokenIdPairs& pairs, const GatheredTarget& target, int threads);

const char* cpu_isa();               // the instruction set in use: avx512, avx2 or baseline, at first the last one
bool set_cpu_isa(const char* name);  // one that the processor has; false where it was not built
bool uses_openmp();                  // whether threads are those of torch's OpenMP

}  // namespace gk
