/* SPDX-License-Identifier: Apache-2.0 */
/* State that loader.c and loader_move.c share; only they include it. */
#ifndef MOE_MODELS_LOADER_STATE_H
#define MOE_MODELS_LOADER_STATE_H

#include "base/mutex.h"
#include "models/loader.h"

#include <pthread.h>
#include <stdatomic.h>

/* The placement in the form of layer_create. */
struct table {
    uint32_t slot, version, spare; /* own slot; of the placement; see the assignment */
    uint64_t content_hash, hash;
    size_t layer_count;
    struct moe_placement *placements; /* [layer_count] */
    uint32_t *offsets;                /* of all layers, one after the other */
    uint16_t *slots;
};

struct moe_loader {
    const struct moe_backend *backend;
    struct moe_device *device;
    const struct moe_model *model;
    struct moe_loader_events events; /* name NULL: the default model */
    size_t layer_count;
    const struct moe_layer_spec **specs; /* [layer_count] */
    struct moe_layer **layers;           /* [layer_count] */
    struct table table;                  /* of the layers; placements = NULL when none is loaded */
    struct moe_digest_table *digests;    /* of the layers */
    struct moe_digester *digester;       /* during a load */
    struct moe_model_sources sources;    /* of the layer that is loaded */
    atomic_bool cancelled;
    _Atomic uint64_t loaded_bytes, total_bytes;
    uint64_t begun_ns, logged_ns; /* of the present load: its start, its last progress line */
    uint64_t layer_base;          /* bytes read before the present layer */
    size_t current_layer;

    /* Moves (loader_move.c). `fetching` is held by a fetch, and by those who need that none runs;
     * it comes before `lock`, which guards what a swap changes: the table, and the fields below. */
    struct moe_mutex fetching;
    struct moe_mutex lock;
    _Atomic uint64_t cancels, next_cancels; /* of fetches; the latter: of those with `keep` */
    atomic_bool may_fetch_next;             /* those with `keep` */
    bool ready;                             /* `next` has all its experts */
    struct table next;
    struct moe_layer **next_layers; /* [layer_count]; NULL = none */
    struct moe_layer **previous;    /* the same: replaced by a swap, and not freed yet */
    struct moe_layer **dying;       /* the same: what settle frees; of the holder of `fetching` */
    uint64_t swaps;                 /* so far */

    /* moe_loader_settle_later; of the thread of loads. */
    pthread_t settling;
    bool is_settling;
    uint64_t settled_swaps; /* `swaps` at its start: what a later swap replaces may be in use */
    atomic_bool settle_now;
};

/* loader.c */

/* The assignment in the backend's form, checked against the model. */
struct moe_status moe_loader__make_table(const struct moe_loader *l,
                                         const struct moe_group_assignment *a,
                                         struct table *out) MOE_CHECKED;
void moe_loader__free_table(struct table *t);
/* The layers in use, or those that were fetched, are of this table. */
bool moe_loader__holds(struct moe_loader *l, const struct table *t);
/* Experts of `slot`, ascending; `experts` has room for the layer's E. */
size_t moe_loader__list_own(const struct moe_placement *p, uint32_t slot, uint32_t *experts);
/* Destroys layers [layer_count] and forgets them. */
void moe_loader__destroy_layers(const struct moe_loader *l, struct moe_layer **layers);

/* loader_move.c */

/* With `fetching`: frees what was fetched. */
void moe_loader__drop_next(struct moe_loader *l);
/* With `fetching`: frees layers that a swap has replaced. */
void moe_loader__settle(struct moe_loader *l);
/* Ends moe_loader_settle_later at once. */
void moe_loader__await_settling(struct moe_loader *l);

#endif
