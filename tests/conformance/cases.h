/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers and inputs over everything that moe/layer_spec.h can express. The same seed gives
 * the same case in every process, so each slot knows the input of all slots. */
#ifndef MOE_TEST_CASES_H
#define MOE_TEST_CASES_H

#include "group.h"
#include "support/packed.h"

enum { CASE_MAX_TOKENS = 300, CASE_MAX_EXPERTS = 64, CASE_MAX_HIDDEN = 600, CASE_MAX_INNER = 128 };

/* How unevenly the tokens of a case choose experts. All but CASE_PLAIN have large batches, and some
 * slots without tokens. */
enum case_skew {
    CASE_PLAIN,      /* what chance gives */
    CASE_ONE_EXPERT, /* every token chooses the same expert, some with all their choices */
    CASE_ONE_SLOT,   /* every choice is an expert of the same slot */
    CASE_ZIPF,       /* the expert of rank r has probability 1 / (r + 1) */
    CASE_ONE_SOURCE, /* one slot brings all tokens */
    CASE_SKEWS
};

/* The input of one slot in a step. */
struct case_input {
    uint32_t tokens;
    void *x;        /* [T, H] of the case's dtype; NULL if T = 0, like all below */
    uint8_t *mode;  /* [T], or NULL: the server routes all */
    int32_t *ids;   /* [T, K] */
    float *weights; /* [T, K] */
};

struct test_case {
    uint64_t seed;
    struct moe_layer_spec spec;
    struct moe_placement placement; /* into the arrays below */
    uint32_t offset[CASE_MAX_EXPERTS + 1];
    uint16_t slot[CASE_MAX_EXPERTS * MOE_MAX_SLOTS];
    enum moe_dtype dtype;
    enum case_skew skew;
    uint32_t bucket;
    enum moe_dtype weight_dtype[MOE_WEIGHT_COUNT];
    void *weight[MOE_WEIGHT_COUNT]; /* [entries, rows, columns]; NULL if the layer has none. Of a
                                       quantised weight: its values in F32 */
    struct random_packed *packed[MOE_WEIGHT_COUNT]; /* [entries], of a quantised weight */
    struct case_input input[MOE_MAX_SLOTS];
};

struct test_case *case_draw(uint64_t seed, uint32_t slots, enum case_skew skew);
/* In some cases: makes the experts' matrices quantised, in formats that `computes` takes (NULL: in
 * none). `w8a8`: some of them quantise rows, too. The case's other draws stay as they are. */
void case_quantise(struct test_case *c, moe_computes_fn computes, const struct moe_device *device,
                   bool w8a8);
/* Whether a product of the case quantises rows. */
bool case_is_w8a8(const struct test_case *c);
void case_free(struct test_case *c);

/* The cases that --training trains with adapters. */
static inline bool adapters_alone(const struct test_case *c)
{
    return c->seed % 4 == 0;
}

/* Describes the case in one line. */
void case_describe(const struct test_case *c, uint32_t slots, char *text, size_t cap);

/* The weight of one expert (0 for others) as uploaded. */
const void *case_weight(const struct test_case *c, enum moe_weight w, uint32_t expert,
                        size_t *bytes);
/* Its element i as a number. */
double case_weight_at(const struct test_case *c, enum moe_weight w, uint32_t expert, size_t i);
/* Element i of a tensor. */
double element(enum moe_dtype dtype, const void *data, size_t i);

/* The slot of (token, k) of a source by the placement, or -1 if there is no row. */
int case_target(const struct test_case *c, uint32_t token, int32_t id);

#endif
