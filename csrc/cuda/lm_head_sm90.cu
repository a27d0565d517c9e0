// The kernels of the head, for compute capability 9.0; lm_head.cpp launches them. Each calls the
// function of its name in lm_head_rows.cuh or, for the products, lm_head_sm90.cuh.
#include "lm_head_rows.cuh"
#include "lm_head_sm90.cuh"

using namespace gk::cuda;

#define GK_HEAD_PRODUCT(name, Element, Epilogue) \
    GK_KERNEL(name, head::KernelArgs, head::kProductThreads, 1) { head::head_product<Element, head::Epilogue>(args); }
GK_HEAD_PRODUCT(gk_linear_logp_bfloat16, BFloat16, LinearLogp<false>)
GK_HEAD_PRODUCT(gk_linear_logp_bfloat16_softcap, BFloat16, LinearLogp<true>)
GK_HEAD_PRODUCT(gk_linear_logp_float16, Float16, LinearLogp<false>)
GK_HEAD_PRODUCT(gk_linear_logp_float16_softcap, Float16, LinearLogp<true>)
GK_HEAD_PRODUCT(gk_exponentials_bfloat16, BFloat16, Exponentials<false>)
GK_HEAD_PRODUCT(gk_exponentials_bfloat16_softcap, BFloat16, Exponentials<true>)
GK_HEAD_PRODUCT(gk_exponentials_float16, Float16, Exponentials<false>)
GK_HEAD_PRODUCT(gk_exponentials_float16_softcap, Float16, Exponentials<true>)

GK_KERNEL(gk_head_sampled_logits, head::KernelArgs, head::kRowThreads, 1) { head::sampled_logits(args); }
GK_KERNEL(gk_head_combine_statistics, head::KernelArgs, head::kRowThreads, 1) { head::combine_statistics(args); }
GK_KERNEL(gk_head_scale_rows, head::KernelArgs, head::kRowThreads, 1) { head::scale_rows(args); }
GK_KERNEL(gk_head_repair_rows, head::KernelArgs, head::kRowThreads, 1) { head::repair_rows(args); }
