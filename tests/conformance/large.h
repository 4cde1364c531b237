/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of the suite of large cases: a step and a backward pass, each against the oracle on
 * sampled tokens. */
#ifndef MOE_TEST_LARGE_H
#define MOE_TEST_LARGE_H

#include "check.h"
#include "large_case.h"
#include "moe/training.h"

enum { LARGE_TOGETHER = 4 /* sampled tokens with experts in the oracle at once */ };

struct large {
    struct subject s; /* without a struct test_case */
    const struct large_case *c;
    const struct large_input *in; /* of this slot */
    uint32_t samples;             /* tokens of a slot for the oracle */
    /* The routing that the step returned; in the host arena. */
    int32_t *ids;
    float *weights;
    uint64_t oracle_tokens, oracle_units; /* compared */
    double worst_dx[3];                   /* by enum moe_dtype */
};

/* Each prints its failure and returns false. Collective. */
bool large_check_step(struct large *l);
/* Needs a session with `training`, after large_check_step. */
bool large_check_backward(struct large *l);

/* ---- for the checks */

/* Token number `i` of the samples, spread over the batch: the first and the last are among them. */
uint32_t large_sample(const struct large *l, uint32_t i);
uint32_t large_samples(const struct large *l);
/* The oracle's layer with all weights that are not an expert's, and the experts in `ids`. */
bool large_oracle(struct large *l, const int32_t *ids, size_t count, struct moe_oracle_layer **out);
/* Waits for all slots: on some the oracle takes longer than a session's budget. */
bool large_await_members(struct large *l);
/* Row `from` of `rows` to row `to` of `out`, H elements of the case's dtype. */
void large_copy_row(const struct large *l, const void *rows, uint32_t from, void *out, uint32_t to);
size_t large_row_bytes(const struct large *l, uint32_t tokens);
/* Bounds of relative errors: those of small cases, and for fp32 as many times as the sums over H
 * are longer than 4096. */
double large_tolerance(const struct large_case *c);

#endif
