/* SPDX-License-Identifier: Apache-2.0 */
/* A case with a trainer: its parameters, what the oracle expects of their gradients, and the memory
 * in which members show each other tensors. */
#ifndef MOE_TEST_TRAINED_H
#define MOE_TEST_TRAINED_H

#include "check.h"
#include "moe/training.h"

/* Bytes that one slot may show to the others; pages are taken when they are written. */
enum { SHARE_BYTES = 64 << 20 };

/* One parameter of the layer, wherever it is resident. */
struct parameter {
    struct moe_train_key key; /* .tensor is unused */
    size_t rows, columns, n;
    size_t offset; /* first float in a slot's share */
    bool local;    /* this slot holds it */
    bool trained;  /* has a gradient and moves */
};

struct trained {
    struct subject *s;
    const struct moe_training *table;
    struct moe_trainer *trainer;
    struct moe_trainer_config config;
    struct parameter *list; /* the same on all slots but for .local */
    size_t count, floats;
    uint32_t loads[CASE_MAX_EXPERTS]; /* n_e of one pass of the group */
    uint64_t group_tokens;            /* Tg */
    float aux_coeff;
    uint32_t counted; /* accumulating passes since loads were zero */
    /* What this slot gives to a backward pass, in MOE_MEM_HOST; NULL when T = 0. */
    void *x, *dy;
    uint8_t *mode;
    int32_t *ids;
    float *weights;
};

/* Lists the parameters, works out loads and draws the cotangent. The trainer is made by the caller.
 */
void trained_begin(struct trained *t, struct subject *s, const struct moe_trainer_config *config);
void trained_end(struct trained *t);

/* Reads (or writes) a tensor of a local parameter; aborts the process where the backend refuses. */
float *trained_read(const struct trained *t, const struct parameter *p,
                    enum moe_train_tensor tensor);
void trained_write(const struct trained *t, const struct parameter *p, enum moe_train_tensor tensor,
                   const float *data);
/* All local parameters, at their offsets; zeros elsewhere. */
float *trained_read_all(const struct trained *t, enum moe_train_tensor tensor);

/* Shows `mine` [floats] to all slots and gives room for everybody's: all[slot]. Ends when all have
 * shown theirs; trained_shown ends the showing. Both are collective. */
bool trained_show(const struct trained *t, const float *mine, const float *all[MOE_MAX_SLOTS]);
bool trained_shown(const struct trained *t);
/* Whether a slot holds the parameter: for replicated ones, always. */
bool held_by(const struct trained *t, const struct parameter *p, uint32_t slot);

/* dy of a slot, as every slot can work it out: [T, H] of the case's dtype. Freed by the caller. */
void *cotangent(const struct test_case *c, uint32_t slot);

/* The result of one backward pass; host memory of the backend. */
struct pass {
    void *dx;
    float *dweights;
    uint8_t *state;
    double *aux_loss;
};
struct pass blank_pass(struct trained *t);
struct moe_backward_args pass_args(struct trained *t, struct pass *p, bool accumulate);
bool run_pass(struct trained *t, struct pass *p, bool accumulate);
bool same_pass(struct trained *t, const char *what, const struct pass *a, const struct pass *b);

/* What the oracle expects on this slot: exactly, and, where asked for, twice with rounding errors.
 */
struct expected {
    struct moe_oracle_layer *gradients[3]; /* of local copies, from all slots' tokens */
    double *dx[3], *dweights[3];
    double aux_loss; /* of the group */
};
bool expect_training(struct trained *t, struct expected *e);
/* Adds the rough values, which take longer and are seldom needed. */
bool expect_rough(struct trained *t, struct expected *e);
void expected_free(struct expected *e);
struct moe_oracle_rounding rounding_of(const struct test_case *c, int lean);

/* Relative Frobenius error at most the dtype's bound, or an error of the size that rounding has for
 * this case. `want` has the exact values and two rough ones; without those a failure is not
 * printed, as it may not be one. The error that was allowed, or a negative number for a failure. */
double near_enough(const struct trained *t, const char *what, int which, size_t n,
                   const double *got, const double *const want[3]);

/* Each prints what is wrong and returns false; collective. */
bool check_training(struct subject *s);
bool check_training_parts(struct trained *t);
bool check_optimizer(struct trained *t);
/* Leaves gradients and counted loads as zeros. */
bool check_reading(struct trained *t);
/* W0 of each adapted weight is what `base` has at its place; and it is only read. */
bool check_base(struct trained *t, const float *base);
/* Before weights have moved. Leaves gradients as one pass over the case makes them. */
bool check_retained(struct trained *t);
/* trained_end, before which something is retained that must be gone with the trainer. */
bool check_retained_to_the_end(struct trained *t);
/* From here on, the oracle computes with the values that trainers hold. Collective. */
bool follow_values(struct trained *t);
bool check_lora(struct subject *s);
/* Two layers in one optimizer step. Uploads the case anew: nothing that was trained is left. */
bool check_two_trainers(struct subject *s);
/* Experts at different places, and copies on different slots, take the same optimizer steps to the
 * same bits. A layer of its own, of tiny sizes drawn from the seed. */
bool check_places(struct subject *s, uint64_t seed);

#endif
