/* SPDX-License-Identifier: Apache-2.0 */
/* See kernels.h. One thread follows the protocol (regions/device_caller.h). */
#include "kernels.h"

namespace
{

constexpr unsigned THREADS = 512;

__device__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__global__ void submit_kernel(moe_stream_wait w)
{
    w.entry->submitted_ns = clock_ns();
    moe_ring_device_submit(&w.entry->entry, w.ring, w.number);
}

/* Bytes of 0xff are NaN in both formats. */
__device__ void fill_with_nan(void *y, size_t bytes)
{
    for (size_t i = threadIdx.x; i < bytes / sizeof(uint16_t); i += THREADS)
        static_cast<uint16_t *>(y)[i] = 0xffff;
}

__global__ void __launch_bounds__(THREADS) wait_kernel(moe_stream_wait w)
{
    __shared__ bool good;
    if (threadIdx.x == 0) {
        struct moe_ring_device_entry *e = &w.entry->entry;
        while (!moe_ring_device_poll(e, w.ring, w.number)) {
            /* the host's watchdog ends every wait */
        }
        const enum moe_code code = moe_ring_code_of(e->result);
        w.entry->status.code = static_cast<uint32_t>(code);
        w.entry->status.results = e->results;
        w.entry->status.failures = e->failures;
        w.entry->status.stream_ns = clock_ns() - w.entry->submitted_ns;
        good = code == MOE_OK;
    }
    __syncthreads();
    if (!good && w.y != nullptr)
        fill_with_nan(w.y, w.y_bytes);
}

} // namespace

extern "C" cudaError_t moe_stream_enqueue_submit(const struct moe_stream_wait *w,
                                                 cudaStream_t stream)
{
    submit_kernel<<<1, 1, 0, stream>>>(*w);
    return cudaGetLastError();
}

extern "C" cudaError_t moe_stream_enqueue_wait(const struct moe_stream_wait *w, cudaStream_t stream)
{
    wait_kernel<<<1, THREADS, 0, stream>>>(*w);
    return cudaGetLastError();
}

extern "C" cudaError_t moe_stream_load(void)
{
    cudaFuncAttributes unused;
    cudaError_t rc = cudaFuncGetAttributes(&unused, submit_kernel);
    return rc != cudaSuccess ? rc : cudaFuncGetAttributes(&unused, wait_kernel);
}
