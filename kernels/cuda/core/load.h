/* SPDX-License-Identifier: Apache-2.0 */
/* Loading of kernels. CUDA loads a kernel when it is first used, and that may wait until the device
 * is idle: for a kernel that waits for a peer, and so for the peer. Hence all are loaded when a
 * device is opened; each .cu file lists its own. */
#ifndef MOE_CUDA_LOAD_H
#define MOE_CUDA_LOAD_H

#include "cuda/core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads all kernels of this folder for the current device, of compute capability `arch` / 10. */
struct moe_status moe_cuda_load_all(int arch) MOE_CHECKED;

/* The lists, each in the file of that name. */
struct moe_status moe_cuda_load_ep_dispatch(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ep_combine(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ep_net(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ffn_exact(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ggemm(void) MOE_CHECKED;       /* Hopper only */
struct moe_status moe_cuda_load_ggemm_wgrad(void) MOE_CHECKED; /* Hopper only */
struct moe_status moe_cuda_load_ggemm_cublas(void) MOE_CHECKED;
struct moe_status moe_cuda_load_net(void) MOE_CHECKED;
struct moe_status moe_cuda_load_router(void) MOE_CHECKED;
struct moe_status moe_cuda_load_router_logits(void) MOE_CHECKED;
struct moe_status moe_cuda_load_exchange(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_activation(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_gemm(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_kernels(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_router(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_state(void) MOE_CHECKED;

#ifdef __cplusplus
}

/* Loads the kernels given as its arguments. */
template <typename... Kernel> static inline struct moe_status moe_cuda_load(Kernel... kernels)
{
    for (const void *kernel : {reinterpret_cast<const void *>(kernels)...}) {
        struct cudaFuncAttributes unused;
        MOE_TRY(MOE_CUDA(cudaFuncGetAttributes(&unused, kernel)));
    }
    return moe_ok();
}
#endif

#endif
