/* SPDX-License-Identifier: Apache-2.0 */
/* What the conformance suite checks of a backend for one case: the whole step, then each part. */
#ifndef MOE_TEST_CHECK_H
#define MOE_TEST_CHECK_H

#include "cases.h"
#include "oracle/oracle.h"

/* What was seen, for the last line of a run. */
struct tally {
    uint64_t cases, tokens, rows, refused, swaps;
    double worst[3]; /* relative Frobenius error of y, or of gradients, by enum moe_dtype */
    /* Training: tensors compared; those for which rounding allows more than the fixed bounds;
     * gradients of experts without tokens. */
    uint64_t tensors, rough, idle_experts;
    /* Cases with rows here whose backward passes multiplied on tensor cores, and the last of them
     * plus one. */
    uint64_t tensor_cases, last_tensor_case;
    uint64_t retained; /* cases in which this slot retained steps for their backward passes */
    uint64_t bits;     /* a hash of all y of whole steps */
    /* Training: a hash of dx, gradients and aux loss of passes, and of values after steps. */
    uint64_t trained_bits;
    const char *transport;
};

/* Memory of the backend that is handed out piece by piece and taken back all at once. */
struct arena {
    enum moe_mem kind;
    uint8_t *base;
    size_t bytes, used;
};

/* One backend on one slot with one case. */
struct subject {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_session *session;
    struct member *member;
    struct arena host, dev;
    const struct test_case *c;
    const struct case_input *in; /* of this slot */
    struct moe_layer *layer;
    struct moe_oracle_layer *oracle;
    /* The step's routing, as the step gave it. */
    int32_t *ids;
    float *weights;
    uint8_t *state;
    struct tally *tally;
    void *share; /* training: memory of all members, SHARE_BYTES for each slot */
};

/* Each prints what is wrong and returns false. Collective: all slots call them in this order. */
bool check_step(struct subject *s);
bool check_parts(struct subject *s);

/* Gives all weights of the case to s->oracle, and the local ones to s->layer, which is finished. */
bool upload_all(struct subject *s);

/* ---- for the checks */

/* Prints "slot N: ..." and returns false. */
bool wrong(const struct subject *s, const char *fmt, ...) MOE_PRINTF(2, 3);
/* True for success; prints the failure otherwise. */
bool went_well(const struct subject *s, const char *what, struct moe_status st);
/* `bytes` of the arena, aligned; aborts when it is used up. */
void *take(struct arena *a, size_t bytes);
/* Relative Frobenius error of `got` against `want`; the absolute one when `want` is all zeros. */
double frobenius(size_t n, const double *got, const double *want);
/* The same in proportion to what was summed, size [n] >= |want|, instead of to the sums: rounding
 * is of the size of the summands, and those of both signs can cancel. */
double frobenius_of_summands(size_t n, const double *got, const double *want, const double *size);
double tolerance(enum moe_dtype dtype);
/* *hash, 0 at first, becomes a hash of what came before too. */
void add_to_hash(uint64_t *hash, const void *data, size_t bytes);
size_t tensor_bytes(const struct test_case *c, uint32_t tokens); /* of x or y */
void *must(size_t bytes);                                        /* zeroed plain memory */
/* Copies to memory of the device arena, and from the device to plain memory. */
void *put(struct subject *s, const void *data, size_t bytes);
void *get(struct subject *s, const void *data, size_t bytes);

/* One row that should arrive here. */
struct expected_row {
    uint32_t source, token, k, expert, row;
};

/* What dispatch should leave on this slot, worked out from everybody's routing. */
struct expected_rows {
    uint32_t local;
    uint32_t expert[CASE_MAX_EXPERTS], start[CASE_MAX_EXPERTS + 1], count[CASE_MAX_EXPERTS];
    struct expected_row *list;
    uint32_t n;
};

/* From the routing on the board; frees nothing, `list` is the caller's to free. */
void expect_rows(const struct subject *s, struct expected_rows *e);

#endif
