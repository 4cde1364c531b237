/* SPDX-License-Identifier: Apache-2.0 */
/* The training state of one layer on the CPU: gradients, masters and moments of its parameters, in
 * one block of memory. Between steps it also updates the layer's resident weights. */
#ifndef MOE_CPU_TRAINER_H
#define MOE_CPU_TRAINER_H

#include "common/training_rules.h"
#include "cpu/compute/layer.h"

/* One parameter: all arrays are [entries][n], an entry for each local expert or one. */
struct moe_cpu_param {
    struct moe_train_param what;
    uint32_t entries;
    size_t n;
    float *value, *grad, *moment1;
    float *moment2; /* AdamW; NULL otherwise */
};

struct moe_trainer {
    struct moe_layer *layer;
    struct moe_trainer_config config; /* `frozen`: the initial value */
    uint32_t frozen;                  /* now */
    uint32_t params;
    struct moe_cpu_param param[MOE_TRAIN_MAX_PARAMS];
    struct moe_cpu_matrix *base[MOE_WEIGHT_COUNT]; /* [local] W0 of adapted weights; or NULL */
    uint64_t *loads;                               /* [E] since the last optimizer step */
    void *block;
    size_t bytes;
};

/* Members of struct moe_training. */
struct moe_status moe_cpu_trainer_create(struct moe_layer *layer,
                                         const struct moe_trainer_config *config,
                                         struct moe_trainer **out) MOE_CHECKED;
void moe_cpu_trainer_destroy(struct moe_trainer *trainer);
struct moe_status moe_cpu_trainer_bytes(struct moe_layer *layer,
                                        const struct moe_trainer_config *config,
                                        uint64_t *bytes) MOE_CHECKED;
struct moe_status moe_cpu_trainer_read(struct moe_trainer *trainer, const struct moe_train_key *key,
                                       float *data, size_t bytes) MOE_CHECKED;
struct moe_status moe_cpu_trainer_write(struct moe_trainer *trainer,
                                        const struct moe_train_key *key, const float *data,
                                        size_t bytes) MOE_CHECKED;
struct moe_status moe_cpu_zero_grad(struct moe_trainer *trainer) MOE_CHECKED;
struct moe_status moe_cpu_set_frozen(struct moe_trainer *trainer, uint32_t frozen) MOE_CHECKED;

/* The parameter, or NULL if the trainer has none. */
struct moe_cpu_param *moe_cpu_trainer_param(struct moe_trainer *trainer, enum moe_weight weight,
                                            enum moe_train_part part);
/* The gradient of this entry; NULL if there is none, or it is frozen. */
float *moe_cpu_trainer_grad(struct moe_trainer *trainer, enum moe_weight weight,
                            enum moe_train_part part, uint32_t entry);

/* Computes the resident weight of `entry` from the masters. */
void moe_cpu_trainer_renew(struct moe_trainer *trainer, enum moe_weight weight, uint32_t entry);

/* alpha / r */
static inline float moe_cpu_trainer_lora_scale(const struct moe_trainer *trainer)
{
    return trainer->config.lora_alpha / (float)trainer->config.lora_rank;
}

#endif
