// The kernels of the head, for compute capability 9.0; lm_head.cpp launches them. Each calls the
// function of its name in lm_head_rows.cuh or, for the products, lm_head_sm90.cuh.
#include "lm_head_rows.cuh"
#include "lm_head_sm90.cuh"

using namespace gk::cuda;

#define GK_HEAD_PRODUCT(name, Element, Epilogue) \
    GK_KERNEL(name, head::KernelArgs, head::kProductThreads, 1) { head::head_product<Element, head::Epilogue>(args); }
GK_HEAD_PRODUCT(gk_fused_logp_bf16, BFloat16, Logp<false>)
GK_HEAD_PRODUCT(gk_fused_logp_bf16_softcap, BFloat16, Logp<true>)
GK_HEAD_PRODUCT(gk_fused_logp_f16, Float16, Logp<false>)
GK_HEAD_PRODUCT(gk_fused_logp_f16_softcap, Float16, Logp<true>)
GK_HEAD_PRODUCT(gk_fused_exponentials_bf16, BFloat16, Exponentials<false>)
GK_HEAD_PRODUCT(gk_fused_exponentials_bf16_softcap, BFloat16, Exponentials<true>)

GK_KERNEL(gk_head_sampled_logits, head::KernelArgs, kRepairThreads, 1) { head::sampled_logits(args); }
GK_KERNEL(gk_head_combine_statistics, head::KernelArgs, kRepairThreads, 1) { head::combine_statistics(args); }
GK_KERNEL(gk_head_finish_rows, head::KernelArgs, kRepairThreads, 1) { head::finish_rows(args); }
