/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of training for every backend: the parameters of a trainer, checks of configurations
 * and arguments, and the scalar formulas of optimizer and balance rule. Pure: plain data in, plain
 * data out. */
#ifndef MOE_TRAINING_RULES_H
#define MOE_TRAINING_RULES_H

#include "base/status.h"
#include "moe/training.h"

#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA kernels use the formulas per element too. */
#ifdef __CUDACC__
#define MOE_TRAINING_INLINE __host__ __device__ static inline
#else
#define MOE_TRAINING_INLINE static inline
#endif

enum {
    MOE_TRAIN_MAX_PARAMS = MOE_WEIGHT_COUNT + 3,
    MOE_TRAIN_MAX_RANK = 512, /* of an adapter */
};

/* A parameter: one tensor that is trained, or one for each expert. */
struct moe_train_param {
    enum moe_weight weight;
    enum moe_train_part part;
    uint32_t rows, columns; /* columns = 1 for a bias */
};

/* Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_trainer_check(const struct moe_layer_spec *spec,
                                    const struct moe_trainer_config *config) MOE_CHECKED;

/* Lists the parameters of a trainer with this configuration, without weights that are frozen from
 * the beginning. The order is fixed: by weight, A before B. Returns their number. */
uint32_t moe_train_params(const struct moe_layer_spec *spec,
                          const struct moe_trainer_config *config,
                          struct moe_train_param params[MOE_TRAIN_MAX_PARAMS]);

/* Whether this weight has an adapter (and is frozen itself). */
bool moe_train_is_adapted(const struct moe_trainer_config *config, enum moe_weight weight);

/* The tensor of a key. */
struct moe_train_place {
    int param; /* index into moe_train_params, or -1: the resident weight itself */
    uint32_t rows, columns;
};

/* Finds the tensor of a key. Errors: MOE_INVALID_ARGUMENT for an impossible key or size,
 * MOE_NOT_FOUND if a trainer with this configuration has no such tensor. Does not check that the
 * expert is local. */
struct moe_status moe_train_find(const struct moe_layer_spec *spec,
                                 const struct moe_trainer_config *config,
                                 const struct moe_train_key *key, size_t bytes,
                                 struct moe_train_place *place) MOE_CHECKED;

/* Errors: MOE_INVALID_ARGUMENT for a read-only tensor. */
struct moe_status moe_train_check_writable(const struct moe_train_key *key) MOE_CHECKED;

/* Checks a later set of frozen groups: known groups, and all that were frozen from the beginning.
 * Errors: MOE_INVALID_ARGUMENT, MOE_FAILED_PRECONDITION. */
struct moe_status moe_train_check_frozen(const struct moe_trainer_config *config,
                                         uint32_t frozen) MOE_CHECKED;

/* Checks pointers, modes and the coefficient; moe_session_check_step checks the rest.
 * Errors: MOE_INVALID_ARGUMENT, MOE_FAILED_PRECONDITION in a session without `training`. */
struct moe_status moe_backward_check(const struct moe_session_config *session,
                                     const struct moe_backward_args *args) MOE_CHECKED;

/* Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_optimizer_check(enum moe_optimizer optimizer,
                                      const struct moe_optimizer_args *args) MOE_CHECKED;

/* Every slot sends its vote to all others before an optimizer step changes anything. So all slots
 * take the same step, or none does. */
struct moe_optimizer_vote {
    uint64_t hash;    /* of everything that must be equal on all slots */
    uint64_t refuses; /* this slot cannot take the step */
};
/* The hash without trainers; mix these in next, in their order. */
uint64_t moe_optimizer_hash(const struct moe_optimizer_args *args, size_t trainers);
void moe_optimizer_mix_trainer(uint64_t *hash, const struct moe_layer_spec *spec,
                               const struct moe_placement *placement,
                               const struct moe_trainer_config *config, uint32_t frozen);
/* The layer's placement fits the session, and each expert has a live copy. Errors:
 * MOE_FAILED_PRECONDITION for another slot or number of slots, MOE_UNAVAILABLE/EXPERT_UNAVAILABLE.
 */
struct moe_status moe_optimizer_check_live(const struct moe_session_config *session,
                                           const struct moe_layer_spec *spec,
                                           const struct moe_placement *placement,
                                           uint32_t slot) MOE_CHECKED;
/* Whether all live slots take the same step; all [slots]. `own` is this slot's refusal, or success;
 * a refusal is returned first. Errors: own, MOE_FAILED_PRECONDITION/SHAPE_MISMATCH. */
struct moe_status moe_optimizer_check_votes(const struct moe_session_config *session,
                                            const struct moe_optimizer_vote *all,
                                            const struct moe_status *own) MOE_CHECKED;

/* The initial value of A at `element` of [r, in]: uniform in +-1 / sqrt(in). */
float moe_lora_initial(uint64_t seed, uint32_t layer, uint32_t expert, enum moe_weight weight,
                       uint64_t element, uint32_t in);

/* The factor that clips all gradients. */
double moe_clip_factor(double norm, double max_grad_norm);

/* C of the load-balance loss; 0 without tokens. */
double moe_aux_constant(const struct moe_layer_spec *spec, float aux_coeff, uint64_t group_tokens);

/* The balance rule's change of an expert's selection bias; `total` is the sum of `experts` loads.
 */
double moe_balance_change(double rate, uint64_t load, uint64_t total, uint32_t experts);

/* The scalars of an optimizer step. */
struct moe_train_update {
    enum moe_optimizer optimizer;
    float scale; /* of gradients: grad_scale times the clipping factor */
    float decay; /* 1 - learning_rate * weight_decay */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float step; /* AdamW: learning_rate / (1 - beta1^t); SGD: learning_rate */
    float root; /* sqrt(1 - beta2^t) */
    float epsilon;
    float momentum;
};
struct moe_train_update moe_train_update_of(enum moe_optimizer optimizer,
                                            const struct moe_optimizer_args *args, double clip);

/* a * b + c. The compiler must not choose which products to fuse with sums: it may choose
 * differently in a vectorised loop and in its remainder. Then an element's bits would depend on its
 * place in memory, which differs between the slots with copies. */
MOE_TRAINING_INLINE float moe_train_multiply_add(float a, float b, float c)
{
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c); /* one instruction */
#else
    return a * b + c; /* cannot be fused */
#endif
}

/* m1, m2: the element's moments; AdamW in torch's order of operations. */
MOE_TRAINING_INLINE float moe_train_adamw(const struct moe_train_update *u, float value, float grad,
                                          float *m1, float *m2)
{
    float g = grad * u->scale;
    *m1 = moe_train_multiply_add(u->beta1, *m1, u->one_minus_beta1 * g);
    *m2 = moe_train_multiply_add(u->beta2, *m2, u->one_minus_beta2 * g * g);
    float denominator = sqrtf(*m2) / u->root + u->epsilon;
    return moe_train_multiply_add(-u->step, *m1 / denominator, value * u->decay);
}

MOE_TRAINING_INLINE float moe_train_sgd(const struct moe_train_update *u, float value, float grad,
                                        float *m1)
{
    *m1 = moe_train_multiply_add(u->momentum, *m1, grad * u->scale);
    return moe_train_multiply_add(-u->step, *m1, value * u->decay);
}

#ifdef __cplusplus
}
#endif

#endif
