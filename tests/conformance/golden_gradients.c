/* SPDX-License-Identifier: Apache-2.0 */
/* The place of each gradient in a golden file, and the order of its numbers; see
 * golden_gradients.h.
 */
#include "golden_gradients.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *golden_weight_name(enum moe_weight w)
{
    static const char *const names[MOE_WEIGHT_COUNT] = {
        "router",      "logit bias", "select bias", "gate",        "up",        "down",
        "gate bias",   "up bias",    "down bias",   "shared gate", "shared up", "shared down",
        "gate vector", "to latent",  "from latent", "latent norm"};
    return names[w];
}

/* Element i of entry e of a weight is at first + e * entry + (i / columns) * row + (i % columns) *
 * column of the tensor. */
struct place {
    const char *name[4]; /* one of these, behind layer{l}.grad.{module}. */
    size_t first, entry, row, column;
};

/* A matrix of the shared experts. */
#define SHARED(matrix, columns)                                                                    \
    (struct place)                                                                                 \
    {                                                                                              \
        {"shared_expert." matrix ".weight", "shared_experts." matrix ".weight",                    \
         "shared_mlp." matrix ".weight", NULL},                                                    \
            0, 0, columns, 1                                                                       \
    }

/* Fused tensors: gate before up in rows, or in columns (transposed), or one by one. */
static struct place place_of(const char *family, const struct moe_layer_spec *s, enum moe_weight w)
{
    bool interleaved = strcmp(family, "gpt_oss") == 0;
    bool transposed = interleaved || strcmp(family, "llama4") == 0;
    size_t hidden = s->hidden, inner = s->intermediate, step = interleaved ? 2 : 1;
    size_t up = w == MOE_WEIGHT_UP || w == MOE_WEIGHT_UP_BIAS ? (interleaved ? 1 : inner) : 0;
    switch (w) {
    case MOE_WEIGHT_ROUTER:
        return (struct place){
            {"gate.weight", "router.weight", "gate.wg.weight", "router.classifier.weight"},
            0,
            0,
            hidden,
            1};
    case MOE_WEIGHT_LOGIT_BIAS: return (struct place){{"router.bias", "gate.bias"}, 0, 0, 1, 0};
    case MOE_WEIGHT_GATE:
    case MOE_WEIGHT_UP:
        return transposed ? (struct place){{"experts.gate_up_proj", NULL},
                                           up,
                                           2 * hidden * inner,
                                           step,
                                           2 * inner}
                          : (struct place){{"experts.gate_up_proj", NULL},
                                           up * hidden,
                                           2 * hidden * inner,
                                           hidden,
                                           1};
    case MOE_WEIGHT_DOWN:
        return transposed
                   ? (struct place){{"experts.down_proj", NULL}, 0, hidden * inner, 1, hidden}
                   : (struct place){{"experts.down_proj", NULL}, 0, hidden * inner, inner, 1};
    case MOE_WEIGHT_GATE_BIAS:
    case MOE_WEIGHT_UP_BIAS:
        return (struct place){{"experts.gate_up_proj_bias", NULL}, up, 2 * inner, step, 0};
    case MOE_WEIGHT_DOWN_BIAS:
        return (struct place){{"experts.down_proj_bias", NULL}, 0, hidden, 1, 0};
    case MOE_WEIGHT_SHARED_GATE: return SHARED("gate_proj", hidden);
    case MOE_WEIGHT_SHARED_UP: return SHARED("up_proj", hidden);
    case MOE_WEIGHT_SHARED_DOWN: return SHARED("down_proj", s->shared_intermediate);
    case MOE_WEIGHT_SHARED_GATE_VECTOR:
        return (struct place){{"shared_expert_gate.weight", NULL}, 0, 0, hidden, 1};
    case MOE_WEIGHT_TO_LATENT: /* layers with a latent space do not train */
    case MOE_WEIGHT_FROM_LATENT:
    case MOE_WEIGHT_LATENT_NORM:
    case MOE_WEIGHT_SELECT_BIAS:
    case MOE_WEIGHT_COUNT: break;
    }
    return (struct place){{NULL}, 0, 0, 0, 0};
}

static const struct moe_tensor *find(const struct moe_st_file *file, uint32_t layer,
                                     const char *const names[4])
{
    static const char *const paths[] = {"model", "model.language_model",
                                        "thinker.model.language_model"};
    static const char *const modules[] = {"mlp", "feed_forward", "block_sparse_moe"};
    for (int p = 0; p < 3; p++)
        for (int m = 0; m < 3; m++)
            for (int n = 0; n < 4 && names[n] != NULL; n++) {
                char name[160];
                snprintf(name, sizeof name, "layer%u.grad.%s.layers.%u.%s.%s", layer, paths[p],
                         layer, modules[m], names[n]);
                const struct moe_tensor *t = moe_st_find(file, name);
                if (t != NULL)
                    return t;
            }
    return NULL;
}

float *golden_gradient(const struct moe_st_file *file, const char *family,
                       const struct moe_layer_spec *spec, enum moe_weight w)
{
    struct place p = place_of(family, spec, w);
    const struct moe_tensor *t = find(file, spec->layer, p.name);
    if (t == NULL && (w == MOE_WEIGHT_SHARED_GATE || w == MOE_WEIGHT_SHARED_UP)) {
        /* MiniMax-M3 has both in one tensor, gate before up. */
        size_t half = (size_t)spec->shared_intermediate * spec->hidden;
        p.name[0] = "shared_experts.gate_up_proj.weight";
        p.first = w == MOE_WEIGHT_SHARED_UP ? half : 0;
        t = find(file, spec->layer, p.name);
    }
    size_t rows, columns, entries = moe_weight_is_expert(w) ? spec->experts : 1;
    moe_weight_shape(spec, w, &rows, &columns);
    size_t last = p.first + (entries - 1) * p.entry + (rows - 1) * p.row + (columns - 1) * p.column;
    if (t == NULL || t->dtype != MOE_ST_F32 || last >= t->bytes / sizeof(float))
        return NULL;
    float *data = malloc((size_t)t->bytes), *out = malloc(entries * rows * columns * sizeof *out);
    if (data == NULL || out == NULL) {
        free(data);
        free(out);
        return NULL;
    }
    struct moe_status st = moe_st_read(file, t, 0, t->bytes, data);
    for (size_t i = 0; i < entries * rows * columns && !moe_failed(&st); i++)
        out[i] = data[p.first + i / (rows * columns) * p.entry + i / columns % rows * p.row +
                      i % columns * p.column];
    free(data);
    if (!moe_failed(&st))
        return out;
    free(out);
    return NULL;
}
