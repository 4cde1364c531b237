/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a request from a ring, as if it came from the network. They read the daemon's copy. */
#ifndef MOE_REGIONS_CHECKS_H
#define MOE_REGIONS_CHECKS_H

#include "base/status.h"
#include "regions/ring.h"

/* The layer that a request names, and the daemon's limit. */
struct moe_ring_layer {
    uint32_t hidden, top_k, max_tokens;
};

/* Checks formats, shapes and sizes: each tensor that the request needs is there, with exactly the
 * bytes of its shape; no other tensor is there, and no reserved byte is set. Says nothing of
 * regions. T = 0 has no tensors. Errors, all MOE_INVALID_ARGUMENT: DTYPE_UNSUPPORTED,
 * SHAPE_MISMATCH, TOKEN_LIMIT, TOO_LARGE, ROUTING_INVALID, VALUE_INVALID. */
struct moe_status moe_ring_check(const struct moe_ring_request *request,
                                 const struct moe_ring_layer *layer) MOE_CHECKED;

#endif
