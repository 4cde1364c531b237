/* SPDX-License-Identifier: Apache-2.0 */
/* The options of this backend. The table is also there without CUDA, so that a worker's command
 * line is the same in every build. */
#ifndef MOE_CUDA_OPTIONS_H
#define MOE_CUDA_OPTIONS_H

#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_CUDA_OPTION_TRANSPORT, MOE_CUDA_OPTION_GEMM, MOE_CUDA_OPTION_COUNT };

/* Indexed by MOE_CUDA_OPTION_*; the last entry ends it. */
extern const struct moe_backend_option moe_cuda_options[MOE_CUDA_OPTION_COUNT + 1];

/* How rows travel between slots. The order of values is that of the table, also below. */
enum moe_cuda_transport {
    MOE_CUDA_TRANSPORT_AUTO,    /* windows where slots reach each other, else network */
    MOE_CUDA_TRANSPORT_NVLINK,  /* windows, or the session is refused */
    MOE_CUDA_TRANSPORT_NETWORK, /* NCCL's sends and receives, on any topology */
};

/* What multiplies bf16 by bf16 in the experts. Everything else in a forward pass is exact fp32. */
enum moe_cuda_gemm {
    MOE_CUDA_GEMM_AUTO,   /* HOPPER on Hopper, CUBLAS on other GPUs */
    MOE_CUDA_GEMM_HOPPER, /* our own kernels; device_open refuses it on other GPUs */
    MOE_CUDA_GEMM_CUBLAS, /* needs libcublas at run time */
};

#ifdef __cplusplus
}
#endif

#endif
