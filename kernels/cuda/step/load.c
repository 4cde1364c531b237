/* SPDX-License-Identifier: Apache-2.0 */
/* Loads all kernels, list by list; see load.h. */
#include "cuda/core/load.h"

enum { HOPPER = 90 };

struct moe_status moe_cuda_load_all(int arch)
{
    MOE_TRY(moe_cuda_load_exchange());
    MOE_TRY(moe_cuda_load_segments());
    MOE_TRY(moe_cuda_load_router_logits());
    MOE_TRY(moe_cuda_load_router());
    MOE_TRY(moe_cuda_load_ep_dispatch());
    MOE_TRY(moe_cuda_load_net());
    MOE_TRY(moe_cuda_load_ep_net());
    MOE_TRY(moe_cuda_load_ep_relay());
    MOE_TRY(moe_cuda_load_ffn_exact());
    MOE_TRY(moe_cuda_load_latent());
    MOE_TRY(moe_cuda_load_train_activation());
    MOE_TRY(moe_cuda_load_train_gemm());
    MOE_TRY(moe_cuda_load_train_kernels());
    MOE_TRY(moe_cuda_load_train_router());
    MOE_TRY(moe_cuda_load_train_state());
    MOE_TRY(moe_cuda_load_ggemm_cublas());
    MOE_TRY(moe_cuda_load_packed());
    MOE_TRY(moe_cuda_load_quantise());
    if (arch == HOPPER) {
        MOE_TRY(moe_cuda_load_ggemm());
        MOE_TRY(moe_cuda_load_ggemm_packed());
        MOE_TRY(moe_cuda_load_ggemm_w8a8());
        MOE_TRY(moe_cuda_load_ggemm_wgrad());
    }
    return moe_cuda_load_ep_combine();
}
