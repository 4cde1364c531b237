/* SPDX-License-Identifier: Apache-2.0 */
/* Which steps can share a captured graph: a pure function of what the launches of a step depend on.
 * Steps with equal keys have the same launches, except for the session's memory. */
#ifndef MOE_CUDA_GRAPH_KEY_H
#define MOE_CUDA_GRAPH_KEY_H

#include "moe/layer_spec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CUDA_KEY_MATRICES = 9, /* of a layer: enum moe_cuda_matrices */
    /* The key's words: of the step, the spec, its router, its two formats, and the matrices. */
    MOE_CUDA_KEY_WORDS = 5 + 12 + 12 + 2 * 5 + MOE_CUDA_KEY_MATRICES,
};

/* Compared as a whole. */
struct moe_cuda_graph_key {
    uint32_t word[MOE_CUDA_KEY_WORDS];
};

/* A step of one layer. */
struct moe_cuda_graph_shape {
    const struct moe_layer_spec *spec;            /* all but the layer's index belongs to the key */
    uint32_t local_experts;                       /* on this slot */
    uint32_t copies;                              /* of all experts, on all slots */
    enum moe_dtype matrix[MOE_CUDA_KEY_MATRICES]; /* as stored on the device */
    enum moe_dtype dtype;                         /* of tokens and answers */
    uint32_t bucket;                              /* tokens that one slot may bring */
    bool retains; /* the step leaves gate and up for a backward pass */
};

void moe_cuda_graph_key_of(const struct moe_cuda_graph_shape *shape,
                           struct moe_cuda_graph_key *out);

#ifdef __cplusplus
}
#endif

#endif
