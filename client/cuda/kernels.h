/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of libmoeclient_cuda: a request's submit and its wait. Their arguments are constant,
 * so a captured graph can be launched again. */
#ifndef MOE_CLIENT_CUDA_KERNELS_H
#define MOE_CLIENT_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#ifdef __CUDACC__
#include <cuda/atomic>
#endif

#include "moe/client_cuda.h"
#include "regions/device_caller.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A request in device memory. */
struct moe_stream_entry {
    struct moe_ring_device_entry entry;
    uint64_t submitted_ns; /* by the device's clock */
    struct moe_stream_status status;
};

struct moe_stream_wait {
    struct moe_stream_entry *entry;
    struct moe_ring *ring; /* the device's address */
    uint32_t number;       /* of the entry in the ring */
    void *y;               /* NULL: the request has no tokens */
    size_t y_bytes;        /* a multiple of 2 */
};

cudaError_t moe_stream_enqueue_submit(const struct moe_stream_wait *w, cudaStream_t stream);
/* Polls until there is a result. Fills y with NaN unless it is good. */
cudaError_t moe_stream_enqueue_wait(const struct moe_stream_wait *w, cudaStream_t stream);
/* Loads both kernels for the current device, so that no launch does. */
cudaError_t moe_stream_load(void);

#ifdef __cplusplus
}
#endif

#endif
