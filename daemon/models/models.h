/* SPDX-License-Identifier: Apache-2.0 */
/* The added models of a worker: opened, loaded, served and freed by orders of the coordinator
 * (daemon/README.md, "Several models"). One thread opens, loads and frees, while views go on.
 *
 * The one idea: an order is done by the thread that can do it without waiting, and answered by one
 * report. A model's name is known to clients from its first ADD until it is quiesced or closed. */
#ifndef MOE_MODELS_MODELS_H
#define MOE_MODELS_MODELS_H

#include "daemon/metrics.h"
#include "engine/engine.h"
#include "group/group.h"
#include "model/model.h"
#include "schedule/layer_key.h"

struct moe_models;

enum {
    MOE_MODELS_NAME_BYTES = 64,   /* with the final zero */
    MOE_MODELS_DIGEST_BYTES = 65, /* hexadecimal, with the final zero */
};

/* Widest layers that a session has room for. */
struct moe_models_widths {
    uint32_t hidden, experts, top_k;
};

struct moe_models_config {
    const struct moe_backend *backend; /* all borrowed */
    struct moe_device *device;
    bool decode_weights; /* quantised experts become BF16 while they are loaded */
    bool w8a8;           /* see moe_model_keep_quantised */
    struct moe_engine *engine;
    const char *default_model; /* its name: no added model may have it */
    size_t default_layers;     /* number of its MoE layers */
    struct moe_models_widths widths;
    struct moe_metrics *metrics;         /* NULL = none */
    struct moe_row_metrics *row_metrics; /* of the default model; NULL = none */
    /* The answer to an order, or progress of a load. Any thread, no lock held. */
    void (*report)(void *ctx, const struct moe_group_model_report *report);
    void (*progress)(void *ctx, uint32_t model, uint64_t loaded_bytes, uint64_t total_bytes);
    /* ADD or REMOVE was ordered: the sequencer of `epoch` is to issue a ticket. On the thread of
     * moe_models_order. */
    void (*change)(void *ctx, uint64_t epoch, uint32_t model, bool serve);
    void *ctx;
};

struct moe_status moe_models_create(const struct moe_models_config *config,
                                    struct moe_models **out) MOE_CHECKED;
/* Cancels loads and joins the thread. No order may come any longer. NULL is ignored. */
void moe_models_stop(struct moe_models *m);
/* After moe_models_stop. No request has a reference, and the engine is gone. NULL is ignored. */
void moe_models_destroy(struct moe_models *m);

/* [one thread at a time] Never waits. Each order is answered by a report of its step. */
void moe_models_order(struct moe_models *m, const struct moe_group_model_order *order);
/* [as moe_models_order] The group has these models: closes all others. One that a view still serves
 * stays until the next call. Until CLOSE, requests that name one which this worker lacks get
 * MODEL_LOADING. More than MOE_ADDED_MODELS_MAX are ignored. */
void moe_models_keep(struct moe_models *m, const uint32_t *numbers, const char *const *names,
                     size_t count);
/* [engine's thread] See moe_engine_config.model_changed. */
void moe_models_changed(struct moe_models *m, uint32_t model, bool served, uint64_t epoch);

/* What requests read; constant while they have a reference. */
struct moe_added_model {
    uint32_t number;
    const char *name, *family, *digest;         /* digest: "" = not known */
    const struct moe_layer_spec *const *layers; /* ascending by layer */
    size_t layer_count;
    struct moe_token_tables token_tables; /* of layers that route by token id */
};

/* [any thread] For one request: a reference, until moe_models_unref. NULL `m` has no models.
 * Errors: MOE_NOT_FOUND/MODEL_NOT_FOUND (also while it is unloaded), MOE_UNAVAILABLE/MODEL_LOADING.
 */
struct moe_status moe_models_take(struct moe_models *m, const char *name,
                                  const struct moe_added_model **out) MOE_CHECKED;
/* [any thread] The request has its answer: it does not count any longer for QUIESCE. Once. */
void moe_models_finish(struct moe_models *m, const struct moe_added_model *model);
/* [any thread] After moe_models_finish. */
void moe_models_unref(struct moe_models *m, const struct moe_added_model *model);

/* [any thread] Copies the names of the models that the view of `epoch` serves here, ascending by
 * number; returns how many. */
size_t moe_models_list(struct moe_models *m, uint64_t epoch,
                       char names[MOE_ADDED_MODELS_MAX][MOE_MODELS_NAME_BYTES]);

#endif
