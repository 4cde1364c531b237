/* SPDX-License-Identifier: Apache-2.0 */
/* How the host follows the progress of an exchange: numbers in pinned memory, stored in stream
 * order. */
#include "cuda/core/load.h"
#include "cuda/plan/limits.h"
#include "cuda/session/control.h"
#include "cuda/session/net.h"

constexpr uint32_t THREADS = 512;

__global__ void begun_kernel(struct moe_cuda_net_progress *progress, uint64_t number)
{
    *const_cast<volatile uint64_t *>(&progress->begun) = number;
}

__global__ void __launch_bounds__(THREADS)
    ended_kernel(struct moe_cuda_net_progress *progress, uint64_t number,
                 struct moe_cuda_control *control, const struct moe_cuda_completion completion)
{
    for (size_t i = threadIdx.x; i < completion.words; i += THREADS)
        completion.to[i] = completion.from[i];
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    if (*const_cast<volatile uint32_t *>(&progress->broken) != 0) {
        control->stop = 1;
        control->outcome = {MOE_CUDA_PASS_BROKEN, 0, 0};
    }
    __threadfence_system();
    *const_cast<volatile uint64_t *>(&progress->ended) = number;
}

__global__ void trailers_kernel(const struct moe_cuda_trailers trailers)
{
    if (threadIdx.x < MOE_CUDA_MAX_SLOTS && trailers.at[threadIdx.x] != nullptr)
        *trailers.at[threadIdx.x] = trailers.trailer;
}

extern "C" struct moe_status moe_cuda_launch_trailers(const struct moe_cuda_trailers *trailers,
                                                      cudaStream_t stream)
{
    trailers_kernel<<<1, MOE_CUDA_MAX_SLOTS, 0, stream>>>(*trailers);
    return MOE_LAUNCHED("trailers_kernel");
}

extern "C" struct moe_status moe_cuda_launch_begun(struct moe_cuda_net_progress *progress,
                                                   uint64_t number, cudaStream_t stream)
{
    begun_kernel<<<1, 1, 0, stream>>>(progress, number);
    return MOE_LAUNCHED("begun_kernel");
}

extern "C" struct moe_status moe_cuda_launch_ended(struct moe_cuda_net_progress *progress,
                                                   uint64_t number,
                                                   struct moe_cuda_control *control,
                                                   const struct moe_cuda_completion *completion,
                                                   cudaStream_t stream)
{
    const struct moe_cuda_completion nothing = {};
    ended_kernel<<<1, THREADS, 0, stream>>>(progress, number, control,
                                            completion != nullptr ? *completion : nothing);
    return MOE_LAUNCHED("ended_kernel");
}

extern "C" struct moe_status moe_cuda_load_net(void)
{
    return moe_cuda_load(trailers_kernel, begun_kernel, ended_kernel);
}
