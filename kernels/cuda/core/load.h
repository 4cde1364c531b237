/* SPDX-License-Identifier: Apache-2.0 */
/* Loads kernels. CUDA loads a kernel at its first use, and this may wait until the device is idle.
 * If a running kernel waits for a peer, the load would wait for that peer. So all kernels are
 * loaded when a device is opened; each .cu file lists its kernels. */
#ifndef MOE_CUDA_LOAD_H
#define MOE_CUDA_LOAD_H

#include "cuda/core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads all kernels of this folder for the current device, with compute capability `arch` / 10. */
struct moe_status moe_cuda_load_all(int arch) MOE_CHECKED;

/* One list per .cu file, named after the file. */
struct moe_status moe_cuda_load_ep_dispatch(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ep_combine(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ep_net(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ep_relay(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ffn_exact(void) MOE_CHECKED;
struct moe_status moe_cuda_load_latent(void) MOE_CHECKED;
struct moe_status moe_cuda_load_ggemm(void) MOE_CHECKED;        /* Hopper only */
struct moe_status moe_cuda_load_ggemm_packed(void) MOE_CHECKED; /* Hopper only */
struct moe_status moe_cuda_load_ggemm_w8a8(void) MOE_CHECKED;   /* Hopper only */
struct moe_status moe_cuda_load_ggemm_wgrad(void) MOE_CHECKED;  /* Hopper only */
struct moe_status moe_cuda_load_ggemm_cublas(void) MOE_CHECKED;
struct moe_status moe_cuda_load_packed(void) MOE_CHECKED;
struct moe_status moe_cuda_load_quantise(void) MOE_CHECKED;
struct moe_status moe_cuda_load_net(void) MOE_CHECKED;
struct moe_status moe_cuda_load_router(void) MOE_CHECKED;
struct moe_status moe_cuda_load_router_logits(void) MOE_CHECKED;
struct moe_status moe_cuda_load_segments(void) MOE_CHECKED;
struct moe_status moe_cuda_load_exchange(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_activation(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_gemm(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_kernels(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_router(void) MOE_CHECKED;
struct moe_status moe_cuda_load_train_state(void) MOE_CHECKED;

#ifdef __cplusplus
}

/* Loads the given kernels. */
template <typename... Kernel> static inline struct moe_status moe_cuda_load(Kernel... kernels)
{
    for (const void *kernel : {reinterpret_cast<const void *>(kernels)...}) {
        struct cudaFuncAttributes unused;
        MOE_TRY(MOE_CUDA(cudaFuncGetAttributes(&unused, kernel)));
    }
    return moe_ok();
}

/* Loads a kernel, and allows its launches up to `bytes` of dynamic shared memory. A launch takes
 * only what it asks for. */
template <typename Kernel>
static inline struct moe_status moe_cuda_allow_shared(Kernel kernel, size_t bytes)
{
    return MOE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
}
#endif

#endif
