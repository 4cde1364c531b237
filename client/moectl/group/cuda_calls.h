/* SPDX-License-Identifier: Apache-2.0 */
/* moectl bench --transport cuda: requests of a CUDA stream (moe/client_cuda.h). Its libraries are
 * opened at run time, so moectl needs no CUDA. Times are those of the GPU's clock. */
#ifndef MOECTL_CUDA_CALLS_H
#define MOECTL_CUDA_CALLS_H

#include "moe/client_cuda.h"

struct moectl_cuda;

struct moectl_cuda_config {
    const struct moe_client_config *client;
    int device; /* the client's, CUDA's ordinal */
    bool spin;  /* a kernel polls for the end */
};

/* Connects and shares `bytes` bytes of the device's memory with the worker.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED (no such library, driver or device; the worker shares
 * no memory), and those of moe_client_connect and moe_region_alloc. */
struct moe_status moectl_cuda_open(const struct moectl_cuda_config *config, size_t bytes,
                                   struct moectl_cuda **out) MOE_CHECKED;
/* Requests go with it. NULL is ignored. */
void moectl_cuda_close(struct moectl_cuda *c);

/* A request for `call`. Copies its x to `x_at` of the device's memory; y goes to `y_at`. */
struct moe_status moectl_cuda_add(struct moectl_cuda *c, const struct moe_client_forward *call,
                                  uint64_t x_at, uint64_t y_at, uint32_t *request) MOE_CHECKED;
/* One submit, then one await, in the order of submission. */
struct moe_status moectl_cuda_submit(struct moectl_cuda *c, uint32_t request) MOE_CHECKED;
struct moe_status moectl_cuda_await(struct moectl_cuda *c, uint32_t request,
                                    struct moe_client_session_answer *answer) MOE_CHECKED;

#endif
