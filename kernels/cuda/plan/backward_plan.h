/* SPDX-License-Identifier: Apache-2.0 */
/* How a backward pass shares the multiprocessors between moving rows and multiplying: a pure
 * function of what the host knows before the pass runs. Rows on their way to other slots wait for
 * the wire, which a part of the multiprocessors keeps busy; the others multiply meanwhile, as far
 * as there are products that need no rows from elsewhere:
 *
 *   dispatch   beside the shared expert, up to its part of dx
 *   combine    beside the gradients of the experts' weights
 *
 * Slots need not agree on a plan, and bits do not depend on it. */
#ifndef MOE_CUDA_BACKWARD_PLAN_H
#define MOE_CUDA_BACKWARD_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Something else that runs beside the weights' gradients on some multiprocessors for a while, and
 * leaves them the others. */
struct moe_cuda_overlap_plan {
    uint32_t processors; /* left to the weights' gradients meanwhile; 0 = there is no company */
    double share;        /* of their products, that have been computed when it is gone: 0 .. 1 */
};

struct moe_cuda_backward_params {
    uint32_t multiprocessors;
    uint32_t slots;         /* live ones */
    uint32_t bucket, top_k; /* of the pass */
    uint32_t hidden, intermediate, local_experts;
    bool shared;     /* there is a shared expert, on tensor cores */
    bool shared_pre; /* its gate and up have to be computed again */
    bool weights; /* this pass has gradients of the experts' weights, on tensor cores, and no other
                     products beside them */
    bool adds;    /* they are added to those of other passes */
};

struct moe_cuda_backward_plan {
    /* Multiprocessors; 0 = all, and nothing runs beside. The two of a line make up the device. */
    uint32_t dispatch, shared;
    uint32_t combine;
    struct moe_cuda_overlap_plan overlap; /* of the weights' gradients: combine */
};

struct moe_cuda_backward_plan moe_cuda_backward_plan(const struct moe_cuda_backward_params *params);

#ifdef __cplusplus
}
#endif

#endif
