/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of the conformance suite for one case of a backend: the whole step, then each part. */
#ifndef MOE_TEST_CHECK_H
#define MOE_TEST_CHECK_H

#include "cases.h"
#include "oracle/oracle.h"

/* Results for the last line of a run. */
struct tally {
    uint64_t cases, tokens, rows, refused, swaps;
    double worst[3]; /* relative Frobenius error of y, or of gradients, by enum moe_dtype */
    /* Training: tensors compared; those for which rounding allows more than the fixed bounds;
     * gradients of experts without tokens. */
    uint64_t tensors, rough, idle_experts;
    /* Cases with rows here and backward passes on tensor cores: their number, and the last of them
     * plus one. */
    uint64_t tensor_cases, last_tensor_case;
    uint64_t packed;         /* quantised matrices, of all slots */
    uint64_t w8a8;           /* those of them that multiply quantised rows */
    uint64_t quantised_rows; /* that dispatch moved so */
    uint64_t retained;       /* cases in which this slot retained steps for their backward passes */
    uint64_t bits;           /* a hash of all y of whole steps */
    /* Training: a hash of dx, gradients and aux loss of passes, and of values after steps. */
    uint64_t trained_bits;
    const char *transport;
};

/* Memory of the backend, allocated piece by piece and freed at once. */
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
    /* The routing that the step returned. */
    int32_t *ids;
    float *weights;
    uint8_t *state;
    struct tally *tally;
    void *share; /* training: memory of all members, SHARE_BYTES for each slot */
};

/* Each prints what is wrong and returns false. Collective: all slots call them in this order. */
bool check_step(struct subject *s);
bool check_parts(struct subject *s);

/* Uploads all weights of the case to s->oracle, and the local ones to s->layer; finishes it. */
bool upload_all(struct subject *s);

/* ---- for the checks */

/* Prints "slot N: ..." and returns false. */
bool wrong(const struct subject *s, const char *fmt, ...) MOE_PRINTF(2, 3);
/* True for success; prints the failure otherwise. */
bool went_well(const struct subject *s, const char *what, struct moe_status st);
/* `bytes` of the arena, aligned; aborts if it is full. */
void *take(struct arena *a, size_t bytes);
/* Relative Frobenius error of `got` against `want`; the absolute one if `want` is all zeros. */
double frobenius(size_t n, const double *got, const double *want);
/* The same relative to the size of the summands, size [n] >= |want|, instead of the sums. Rounding
 * errors have the size of the summands, and summands of both signs can cancel. */
double frobenius_of_summands(size_t n, const double *got, const double *want, const double *size);
double tolerance(enum moe_dtype dtype);
/* Of y. In W8A8, a hidden value between two of F8E4M3 may be rounded to either: 6 % of it. */
double output_tolerance(const struct test_case *c);
/* Adds to *hash, which is 0 at first. */
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

/* The expected result of dispatch on this slot, from the routing of all slots. */
struct expected_rows {
    uint32_t local;
    uint32_t expert[CASE_MAX_EXPERTS], start[CASE_MAX_EXPERTS + 1], count[CASE_MAX_EXPERTS];
    struct expected_row *list;
    uint32_t n;
};

/* From the routing on the board; the caller frees `list`. */
void expect_rows(const struct subject *s, struct expected_rows *e);

#endif
