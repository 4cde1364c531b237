/* SPDX-License-Identifier: Apache-2.0 */
/* A worker's part in moves of experts: the coordinator's orders about the default model
 * (MOE_MODEL_COUNT_ROWS to DROP). One thread loads and frees, while views go on. */
#ifndef MOE_MODELS_MOVER_H
#define MOE_MODELS_MOVER_H

#include "engine/row_metrics.h"
#include "group/group.h"
#include "models/loader.h"

struct moe_mover;

struct moe_mover_config {
    struct moe_loader *loader;           /* of the default model; borrowed, as all here */
    struct moe_row_metrics *row_metrics; /* the same; NULL = no rows are known */
    uint32_t share;                      /* see moe_loader_fetch */
    /* The answer to an order; before it the rows of each layer, or progress. Any thread, no lock
     * held. */
    void (*report)(void *ctx, const struct moe_group_model_report *report);
    void (*rows)(void *ctx, uint64_t order, uint32_t layer, const uint64_t *rows, size_t count);
    void (*progress)(void *ctx, uint64_t read_bytes);
    /* SWAP was ordered: the sequencer of `epoch` is to issue a ticket. On the thread of
     * moe_mover_order. */
    void (*swap)(void *ctx, uint64_t epoch, uint32_t version);
    void *ctx;
};

struct moe_status moe_mover_create(const struct moe_mover_config *config,
                                   struct moe_mover **out) MOE_CHECKED;
/* Cancels a fetch and joins the thread. NULL is ignored. */
void moe_mover_destroy(struct moe_mover *m);

/* [one thread at a time] Never waits. Each order is answered by a report of its step. */
void moe_mover_order(struct moe_mover *m, const struct moe_group_model_order *order);
/* [as moe_mover_order] See moe_group_hooks.fetched_listed. */
void moe_mover_registered(struct moe_mover *m, uint32_t version);
/* [engine's thread] The ticket of this version is complete: no step uses the layers before. */
void moe_mover_swapped(struct moe_mover *m, uint32_t version, uint64_t epoch);

#endif
