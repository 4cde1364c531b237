/* SPDX-License-Identifier: Apache-2.0 */
/* One number for a layer of any model of the group: the model's number times 65536, plus the
 * model's layer index. Tickets, requests and queues have these keys. The default model is 0, so a
 * key of its layers is their index. */
#ifndef MOE_SCHEDULE_LAYER_KEY_H
#define MOE_SCHEDULE_LAYER_KEY_H

#include "moe/types.h"

#include <stdint.h>

enum {
    MOE_MODEL_NUMBER_MAX = 65535,
    MOE_LAYER_INDEX_MAX = 65535,
    MOE_ADDED_MODELS_MAX = 15,                 /* added models that a group has at a time */
    MOE_GROUP_LAYERS_MAX = 4 * MOE_MAX_LAYERS, /* MoE layers of all models of a group */
};

/* Both are at most their maximum. */
static inline uint32_t moe_layer_key(uint32_t model, uint32_t index)
{
    return model << 16 | index;
}

static inline uint32_t moe_layer_model(uint32_t key)
{
    return key >> 16;
}

static inline uint32_t moe_layer_index(uint32_t key)
{
    return key & MOE_LAYER_INDEX_MAX;
}

#endif
