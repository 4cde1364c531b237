/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/plan/options.h"

const struct moe_backend_option moe_cuda_options[MOE_CUDA_OPTION_COUNT + 1] = {
    [MOE_CUDA_OPTION_TRANSPORT] = {"transport", "auto|nvlink|network",
                                   "How rows travel between slots; nvlink needs GPUs. The same on "
                                   "all workers",
                                   MOE_SCOPE_SESSION},
    [MOE_CUDA_OPTION_GEMM] = {"gemm", "auto|hopper|cublas",
                              "Kernels for bf16 products of the experts on a GPU",
                              MOE_SCOPE_DEVICE},
};
