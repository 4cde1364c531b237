/* SPDX-License-Identifier: Apache-2.0 */
/* A case with a trainer: its parameters, the oracle's gradients, and shared memory for tensors. */
#ifndef MOE_TEST_TRAINED_H
#define MOE_TEST_TRAINED_H

#include "check.h"
#include "moe/training.h"

/* Bytes that one slot may show to the others; pages are allocated when written. */
enum { SHARE_BYTES = 64 << 20 };

/* One parameter of the layer, on any slot. */
struct parameter {
    struct moe_train_key key; /* .tensor is unused */
    size_t rows, columns, n;
    size_t offset; /* first float in a slot's share */
    bool local;    /* this slot has it */
    bool trained;  /* has a gradient and is updated */
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
    /* This slot's input of a backward pass, in MOE_MEM_HOST; NULL if T = 0. */
    void *x, *dy;
    uint8_t *mode;
    int32_t *ids;
    float *weights;
};

/* Lists the parameters, computes loads and draws the cotangent. The caller creates the trainer. */
void trained_begin(struct trained *t, struct subject *s, const struct moe_trainer_config *config);
void trained_end(struct trained *t);

/* Reads (or writes) a tensor of a local parameter; aborts the process if the backend refuses. */
float *trained_read(const struct trained *t, const struct parameter *p,
                    enum moe_train_tensor tensor);
void trained_write(const struct trained *t, const struct parameter *p, enum moe_train_tensor tensor,
                   const float *data);
/* All local parameters, at their offsets; zeros elsewhere. */
float *trained_read_all(const struct trained *t, enum moe_train_tensor tensor);

/* Shows `mine` [floats] to all slots and returns the data of all: all[slot]. It is valid until
 * trained_shown. Both are collective. */
bool trained_show(const struct trained *t, const float *mine, const float *all[MOE_MAX_SLOTS]);
bool trained_shown(const struct trained *t);
/* Whether a slot has the parameter: for replicated ones, always. */
bool held_by(const struct trained *t, const struct parameter *p, uint32_t slot);

/* dy of a slot; every slot can compute it: [T, H] of the case's dtype. The caller frees it. */
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

/* The oracle's results for this slot: exact, and, if requested, twice with rounding errors. */
struct expected {
    struct moe_oracle_layer *gradients[3]; /* of local copies, from all slots' tokens */
    double *dx[3], *dweights[3];
    double aux_loss; /* of the group */
};
bool expect_training(struct trained *t, struct expected *e);
/* Adds the values with rounding errors, which take longer and are rarely needed. */
bool expect_rough(struct trained *t, struct expected *e);
void expected_free(struct expected *e);
struct moe_oracle_rounding rounding_of(const struct test_case *c, int lean);

/* Relative Frobenius error at most the dtype's bound, or at most the rounding error of this case.
 * `want` has the exact values and two rough ones. Without the rough ones a failure is not printed,
 * because it may be a false one. Returns the allowed error, or a negative number for a failure. */
double near_enough(const struct trained *t, const char *what, int which, size_t n,
                   const double *got, const double *const want[3]);

/* Each prints its failure and returns false; collective. */
bool check_training(struct subject *s);
bool check_training_parts(struct trained *t);
bool check_optimizer(struct trained *t);
/* Leaves gradients and counted loads as zeros. */
bool check_reading(struct trained *t);
/* W0 of each adapted weight equals its values in `base`, and is read-only. */
bool check_base(struct trained *t, const float *base);
/* Call it before weights change. Leaves the gradients of one pass over the case. */
bool check_retained(struct trained *t);
/* Retains activations, then calls trained_end, which must drop them. */
bool check_retained_to_the_end(struct trained *t);
/* From here on, the oracle computes with the values of trainers. Collective. */
bool follow_values(struct trained *t);
bool check_lora(struct subject *s);
/* Two layers in one optimizer step. Uploads the case again: no trained value is left. */
bool check_two_trainers(struct subject *s);
/* Optimizer steps give the same bits for experts at different places, and for copies on different
 * slots. Uses a separate layer of tiny sizes, drawn from the seed. */
bool check_places(struct subject *s, uint64_t seed);

#endif
