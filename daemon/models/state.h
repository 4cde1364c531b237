/* SPDX-License-Identifier: Apache-2.0 */
/* State that models.c and orders.c share; only they include it. */
#ifndef MOE_MODELS_STATE_H
#define MOE_MODELS_STATE_H

#include "base/mutex.h"
#include "engine/row_metrics.h"
#include "group/serial_executor.h"
#include "model/model.h"
#include "models/loader.h"
#include "models/models.h"

/* The last order of a step about an epoch, and the epoch in which its ticket has run. */
struct model_ticket {
    uint64_t order, ordered_epoch, run_epoch; /* 0 = none */
};

/* One model, from its OPEN to its CLOSE, and longer while requests have references. The lock of the
 * table guards the fields up to the blank line; the executor's thread alone uses the others. */
struct entry {
    struct moe_added_model known; /* the first member: requests point to it */
    struct entry *next;           /* ascending by number */
    uint32_t references;          /* the table's, and one of each request */
    uint32_t requests;            /* without an answer */
    bool opened;                  /* `known`, `loader` and what OPEN reports are set, and stay */
    bool loaded;                  /* the engine has the layers */
    bool served;                  /* a view has served it: clients know its name */
    bool quiesced, closing;
    uint64_t quiesce_order; /* to be reported when `requests` is 0; 0 = none, or done */
    struct model_ticket add, remove;
    struct moe_loader *loader;
    char name[MOE_MODELS_NAME_BYTES], digest[MOE_MODELS_DIGEST_BYTES];

    struct moe_models *owner;
    struct moe_model *model;
    struct moe_row_metrics *row_metrics;
    char *directory;
    char family[64];
    struct moe_layer_spec *specs;             /* copies: requests read them after CLOSE */
    const struct moe_layer_spec **spec_table; /* [layer_count] */
    struct moe_token_tables token_tables;     /* `known` has them too */
};

struct moe_models {
    struct moe_models_config config;
    struct moe_serial_executor *executor;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct entry *first;
        size_t count;
        bool stopped;
        /* The group's models, when this worker registered, without those it closed since. */
        struct listed {
            uint32_t number; /* 0 = none */
            char name[MOE_MODELS_NAME_BYTES];
        } listed[MOE_ADDED_MODELS_MAX];
    };
};

/* models.c */

struct entry *moe_models__find(const struct moe_models *m, uint32_t number) MOE_REQUIRES(m->lock);
/* Drops a reference; frees at the last one. With the table's lock. */
void moe_models__drop(struct entry *e);
void moe_models__unlink(struct moe_models *m, struct entry *e) MOE_REQUIRES(m->lock);
/* The group has unloaded this model. */
void moe_models__unlist(struct moe_models *m, uint32_t number) MOE_REQUIRES(m->lock);
/* See moe_loader_events. */
void moe_models__report_progress(void *entry, uint64_t loaded, uint64_t total);
/* Reports a step without data. Without the lock. */
void moe_models__answer(struct moe_models *m, uint32_t model, enum moe_model_step step,
                        uint64_t order, uint64_t epoch, struct moe_status status);
/* Frees weights, files and series; the engine does not have the layers. */
void moe_models__free_weights(struct entry *e);

#endif
