// The seam of the CPU backend: plain pointers in, results written through them. Everything here is callable without
// Python's lock. What a caller gives is checked in Python.
#pragma once
#include "../args.h"

namespace gk {

void plan(const PlanArgs& args, int threads);

// With a teacher the divergence too, and its gradient; else `teacher` is null.
void single_pass(const RowArgs& args, const TeacherArgs* teacher, int threads);
void stats(const RowArgs& args, const TeacherArgs* teacher, int threads);
void gradient(const RowArgs& args, const TeacherArgs* teacher, int threads);
void sparse_gradient(const RowArgs& args, const SparseRows& out, int threads);

void kept_ids(const KeptRowArgs& args, int threads);
void kept_logits(const KeptArgs& args, float* logits, int threads);  // (rows, slots), -inf where not used
void kept_dhidden(const KeptArgs& args, const float* dlogits, const KeptTarget& target, int threads);
void kept_dweight(const KeptPairs& pairs, const KeptTarget& target, int threads);

void token_objective(const TokenArgs& args, int threads);
void sequence_objective(const SequenceArgs& args, int threads);
void reduce(const ReduceArgs& args, int threads);

// target[ids[t]] += scale[t] * rows[t] for t in [0, count).
struct AddRowsArgs {
    void* target;        // (rows, width), bfloat16 or float32
    const void* rows;    // (count, width), bfloat16
    const int64_t* ids;  // (count,)
    const float* scale;  // (count,)
    int64_t target_stride, count, width, rows_stride;
    int32_t target_dtype;
};
void add_rows(const AddRowsArgs& args);

// target = source^T, or target += source^T.
struct AddTransposedArgs {
    void* target;            // (rows, width), bfloat16 or float32
    const uint16_t* source;  // (width, rows), bfloat16
    int64_t rows, width, target_row_stride, source_row_stride;
    int32_t target_dtype;
    bool add;
};
void add_transposed(const AddTransposedArgs& args, int threads);

const char* cpu_isa();               // the instruction set in use: avx512, avx2 or baseline
void set_cpu_isa(const char* name);  // throws std::invalid_argument for an unknown or unsupported one
bool uses_openmp();                  // whether threads are those of torch's OpenMP
bool has_amx();                      // whether the processor multiplies tiles of bfloat16

}  // namespace gk
