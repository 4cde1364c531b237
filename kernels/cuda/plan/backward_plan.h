/* SPDX-License-Identifier: Apache-2.0 */
/* How a backward pass shares the multiprocessors between moving rows and multiplying: a pure
 * function of what the host knows before the pass. Rows for other slots wait for the wire. A part
 * of the multiprocessors keeps the wire busy, and the others multiply meanwhile, as long as there
 * are products that need no rows from peers:
 *
 *   dispatch   overlaps the shared expert, up to its part of dx
 *   combine    overlaps the gradients of the experts' weights
 *
 * Slots need not agree on a plan, and the bits of the result do not depend on it. */
#ifndef MOE_CUDA_BACKWARD_PLAN_H
#define MOE_CUDA_BACKWARD_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* While other work runs, the weights' gradients get only some multiprocessors. */
struct moe_cuda_overlap_plan {
    uint32_t processors; /* for the weights' gradients during the overlap; 0 = no overlap */
    double share;        /* of their products that are computed when the other work ends: 0 .. 1 */
};

struct moe_cuda_backward_params {
    uint32_t multiprocessors;
    uint32_t slots;         /* live ones */
    uint32_t bucket, top_k; /* of the pass */
    uint32_t hidden, intermediate, local_experts;
    bool shared;     /* the layer has a shared expert, on tensor cores */
    bool shared_pre; /* its gate and up must be computed again */
    bool weights; /* this pass has gradients of the experts' weights, on tensor cores, and no other
                     products run at the same time */
    bool adds;    /* they are added to those of earlier passes */
};

struct moe_cuda_backward_plan {
    /* Multiprocessors; 0 = all, and nothing overlaps. The two on a line add up to the device. */
    uint32_t dispatch, shared;
    uint32_t combine;
    struct moe_cuda_overlap_plan overlap; /* combine, while the weights' gradients run */
};

struct moe_cuda_backward_plan moe_cuda_backward_plan(const struct moe_cuda_backward_params *params);

#ifdef __cplusplus
}
#endif

#endif
