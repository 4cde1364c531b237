/* SPDX-License-Identifier: Apache-2.0 */
/* config.json -> what each MoE layer computes. Owns no file; works on parsed JSON. Internal to
 * daemon/model. */
#ifndef MOE_MODEL_CONFIG_H
#define MOE_MODEL_CONFIG_H

#include "base/status.h"
#include "model/families.h"
#include "quant/modules.h"
#include "quant/scheme.h"

#include <jansson.h>

struct moe_config {
    const struct moe_family *family;
    char model_type[64];
    struct moe_layer_spec layers[MOE_MAX_LAYERS]; /* ascending by .layer */
    size_t layer_count;
};

/* Errors: MOE_INVALID_ARGUMENT with CONFIG_UNKNOWN_KEY (an unknown setting that could change
 * results, by name) or CONFIG_INVALID (missing or impossible value). */
struct moe_status moe_config_read(const json_t *root, struct moe_config *out) MOE_CHECKED;

/* ---- config_quant.c: how the weights are stored ---- */

/* What quantization_config says. Other weights of MoE layers (router, biases, gate of the shared
 * expert) are never quantised. */
struct moe_quant_config {
    struct moe_quant routed;      /* matrices of routed experts */
    struct moe_quant shared;      /* of shared experts, and projections of a latent space */
    struct moe_modules *included; /* modules that are quantised; NULL: all */
    struct moe_modules *excluded; /* of these; NULL: none */
    json_t *by_module; /* settings by the name of a module, instead of `routed` and `shared`; other
                          modules are not quantised. NULL: no such object */
};

/* Reads quantization_config (or compression_config), with which moe_config_read does not deal; no
 * such key: nothing is quantised. Free with moe_quant_config_free, also after an error.
 * Errors: MOE_INVALID_ARGUMENT with CONFIG_UNKNOWN_KEY (a scheme, key or value that is not
 * understood, by name) or CONFIG_INVALID; OUT_OF_MEMORY. */
struct moe_status moe_quant_config_read(const json_t *root, const struct moe_family *family,
                                        struct moe_quant_config *out) MOE_CHECKED;
void moe_quant_config_free(struct moe_quant_config *q);

/* How the matrix of the module `path` is stored; `routed`: of a routed expert. `out->scheme` is
 * NULL if it is not quantised. Settings for a module are also those of modules inside it, unless
 * these have their own. They are read here: those of other modules have no effect.
 * Errors: CONFIG_UNKNOWN_KEY and CONFIG_INVALID, by the name of the module; OUT_OF_MEMORY. */
struct moe_status moe_quant_config_find(const struct moe_quant_config *q, const char *path,
                                        bool routed, struct moe_quant *out) MOE_CHECKED;

/* Whether `by_module` has a name that begins with `prefix`. */
bool moe_quant_config_names(const struct moe_quant_config *q, const char *prefix);

/* ---- config_keys.c: lookups that record the keys that were read ---- */

struct moe_keys {
    const json_t *top;  /* the file */
    const json_t *text; /* its text_config, or that of its thinker_config, or NULL */
    json_t *read;       /* set of the keys that were looked up */
    bool lists;         /* a list of equal whole numbers counts as that number */
    char name[64];      /* the key that the last lookup found, or its first alias: for errors */
};

struct moe_status moe_keys_open(struct moe_keys *k, const json_t *root) MOE_CHECKED;
void moe_keys_close(struct moe_keys *k);

/* Value of the first present of the space-separated `names`, or NULL; null counts as absent. The
 * aliases, and text_config and the top level, must not contradict each other. */
struct moe_status moe_keys_get(struct moe_keys *k, const char *names,
                               const json_t **value) MOE_CHECKED;
/* If the key is absent, the typed forms do not change `*out`; preset it with the default. */
struct moe_status moe_keys_uint(struct moe_keys *k, const char *names, uint32_t min, uint32_t max,
                                uint32_t *out) MOE_CHECKED;
struct moe_status moe_keys_float(struct moe_keys *k, const char *names, float *out) MOE_CHECKED;
struct moe_status moe_keys_bool(struct moe_keys *k, const char *names, bool *out) MOE_CHECKED;
/* The value must be one of `accepted`; `*out` points into the JSON. */
struct moe_status moe_keys_word(struct moe_keys *k, const char *name, const char *accepted,
                                const char **out) MOE_CHECKED;
/* Required forms: absence is CONFIG_INVALID. */
struct moe_status moe_keys_need_uint(struct moe_keys *k, const char *names, uint32_t min,
                                     uint32_t max, uint32_t *out) MOE_CHECKED;
struct moe_status moe_keys_need_float(struct moe_keys *k, const char *names,
                                      float *out) MOE_CHECKED;

/* True when the file contains one of the keys, even as null. */
bool moe_keys_mention(const struct moe_keys *k, const char *names);

/* Refuses, by name, a key that was not looked up and could change the result of a MoE layer.
 * `ignored`: keys without effect in this family, or NULL. */
struct moe_status moe_keys_refuse_unread(const struct moe_keys *k, const char *ignored) MOE_CHECKED;

/* ---- config_layers.c: which layers are MoE layers ---- */

enum { MOE_MODEL_LAYERS_MAX = 4096 }; /* layers of any kind in one model */

/* What a layer's block is. */
enum moe_layer_kind {
    MOE_LAYER_DENSE,
    MOE_LAYER_MOE,
    MOE_LAYER_BY_TOKEN, /* a MoE layer that routes by token id */
};

/* Layers of the model, MoE layers or not. */
struct moe_status moe_config_count_layers(struct moe_keys *k, const struct moe_family *family,
                                          uint32_t *count) MOE_CHECKED;
/* Fills `kinds` [layer_count]. */
struct moe_status moe_config_select_layers(struct moe_keys *k, const struct moe_family *family,
                                           uint32_t layer_count,
                                           enum moe_layer_kind *kinds) MOE_CHECKED;

#endif
