/* SPDX-License-Identifier: Apache-2.0 */
/* Cases with the sizes of models: hidden sizes to 16384, 1024 experts, 16 experts a token, some
 * hundred tokens. The same seed and limits give the same case in every process.
 *
 * Weights are views into one pool of random numbers, so gigabytes of them cost no time. A layer's
 * inner size and its number of experts shrink until they are within the limits. */
#ifndef MOE_TEST_LARGE_CASE_H
#define MOE_TEST_LARGE_CASE_H

#include "group.h"

enum { LARGE_MAX_TOKENS = 700 };

/* What a run allows. */
struct large_limits {
    uint64_t weight_bytes; /* of all experts of a layer */
    uint64_t products;     /* multiplications of one token */
    uint32_t tokens;       /* of one slot, at most LARGE_MAX_TOKENS */
    const uint16_t *pool;  /* bf16, uniform in +-1/32 */
};

struct large_input {
    uint32_t tokens;
    void *x;        /* [T, H] of the case's dtype; NULL if T = 0, like all below */
    void *dy;       /* [T, H], a cotangent of y */
    uint8_t *mode;  /* [T] */
    int32_t *ids;   /* [T, K] */
    float *weights; /* [T, K] */
};

struct large_case {
    uint64_t seed;
    struct moe_layer_spec spec;
    struct moe_placement placement; /* into the arrays below */
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[2 * MOE_MAX_EXPERTS];
    enum moe_dtype dtype, weight_dtype;
    uint32_t bucket;
    const uint16_t *pool;
    struct large_input input[MOE_MAX_SLOTS];
};

/* The pool of all cases; made before processes fork, never freed. */
const uint16_t *large_pool(void);

/* Case `number` of a run with this seed. */
struct large_case *large_draw(uint64_t seed, uint64_t number, uint32_t slots,
                              const struct large_limits *limits);
void large_free(struct large_case *c);
/* Describes the case in one line. */
void large_describe(const struct large_case *c, uint32_t slots, char *text, size_t cap);

/* A weight of one expert (0 for others) as uploaded, *bytes long; 0 bytes if the layer has none.
 * The caller frees it. */
void *large_weight(const struct large_case *c, enum moe_weight w, uint32_t expert, size_t *bytes);
bool large_holds(const struct large_case *c, uint32_t expert, uint32_t slot);
/* The slot of (token, k) of a source by the placement, or -1 if there is no row. */
int large_target(const struct large_case *c, uint32_t token, int32_t id);

#endif
