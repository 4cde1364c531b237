/* Decides which step the group runs next. It knows how many tokens wait on each slot for each
 * (layer, kind, dtype), issues tickets that cover them, and never has more than two tickets in
 * flight: what arrives meanwhile is batched into the next step, so no waiting timer is needed.
 *
 * Pure: no clock, no lock, no thread, no memory after create. It never learns what a step computes
 * or how tickets travel. */
#ifndef MOE_WORKER_SEQUENCER_H
#define MOE_WORKER_SEQUENCER_H

#include "worker/engine.h"

struct moe_sequencer;

enum {
    MOE_SEQUENCER_IN_FLIGHT = 2,             /* tickets issued and not yet done on every slot */
    MOE_SEQUENCER_KEYS = 2 * MOE_MAX_LAYERS, /* (layer, kind, dtype) combinations of one view */
};

/* What may share a step. */
struct moe_sequencer_key {
    uint32_t layer; /* the model's layer index */
    enum moe_step_kind kind;
    enum moe_dtype dtype;
};

struct moe_status moe_sequencer_create(struct moe_sequencer **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_sequencer_destroy(struct moe_sequencer *s);

/* A new view: forgets everything and starts at seq 1.
 * live        bit s: slot s takes part and has to report each ticket
 * max_bucket  a power of two */
void moe_sequencer_begin(struct moe_sequencer *s, uint64_t epoch, uint64_t live,
                         uint32_t max_bucket);

/* `tokens` more wait on `slot`. Errors: MOE_INVALID_ARGUMENT (the slot is not of this view, or the
 * key is none), MOE_RESOURCE_EXHAUSTED (more keys than a view can have). */
struct moe_status moe_sequencer_work(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_sequencer_key *key,
                                     uint32_t tokens) MOE_CHECKED;

/* `slot` has run ticket `seq`; slots report every ticket once, in order. A step that failed
 * anywhere stops the sequencer until the next view. Errors: MOE_INVALID_ARGUMENT (not of this view,
 * out of order, or never issued). */
struct moe_status moe_sequencer_done(struct moe_sequencer *s, uint32_t slot, uint64_t seq,
                                     bool ok) MOE_CHECKED;

/* The next ticket, if one is due. Call until false after every input. */
bool moe_sequencer_next(struct moe_sequencer *s, struct moe_ticket *out);

/* A step has failed in this view, or there is no view. */
bool moe_sequencer_stopped(const struct moe_sequencer *s);
/* Tokens that were announced and are not yet covered by a ticket, over all slots. */
uint64_t moe_sequencer_pending(const struct moe_sequencer *s);

#endif
