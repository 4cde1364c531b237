/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which step the group runs next. It knows how many tokens wait on each slot for each
 * (layer, kind, dtype), issues tickets that cover them, and has at most two tickets in flight:
 * tokens that arrive meanwhile are batched into the next step, so no timer is needed.
 *
 * Training calls and retained Forward requests wait in one queue, in order of arrival; each gets a
 * separate ticket. The rules below count retained forward passes as training: they serve it, and
 * such a ticket carries tokens of one slot only.
 *   Share       while forward work waits, at most a given share of the tickets are training's.
 *   Latency     if one of the last MOE_SEQUENCER_LATELY tickets was a forward one, at most one
 *               training ticket is in flight, so that forward work waits for one and not for two.
 *   Exclusive   after a ticket that changes the state as a whole, none is issued until all slots
 *               have run it; slots may take long for it, and different times.
 *   Blocked     while a checkpoint is copied, calls that would change the copied state wait, and
 *               so do the calls behind them, except kinds with passes_blocked.
 *   Held        while a process reads the state, training waits (enum moe_hold). Forward and
 *               retained Forward go on, and under MOE_HOLD_CHANGES the tickets of the job, too.
 *   Allowed     the caller may hold back all tickets, or those of training; they wait in order.
 *   Models      a change of models is due before all others. Work of an added model counts between
 *               its ADD_MODEL and its REMOVE_MODEL; other work of it is dropped.
 *   Placement   a swap of the placement is due before all others, once in a view for each version.
 *   Fairness    forward work that waits when an exclusive ticket is done is served before the next
 *               exclusive one, so that a request restarts at most once.
 *
 * Pure: no clock, no lock, no thread, no memory after create. It does not know what a step computes
 * or how tickets travel. */
#ifndef MOE_SCHEDULE_SEQUENCER_H
#define MOE_SCHEDULE_SEQUENCER_H

#include "base/status.h"
#include "schedule/ticket.h"

struct moe_sequencer;

enum {
    MOE_SEQUENCER_IN_FLIGHT = 2, /* tickets issued and not yet done on every slot */
#ifdef MOE_SIMULATION            /* no more than a run needs: every view clears them */
    MOE_SEQUENCER_KEYS = 4,
    MOE_SEQUENCER_CALLS = 12,
#else
    MOE_SEQUENCER_KEYS = 2 * MOE_GROUP_LAYERS_MAX, /* (layer, kind, dtype) at a time */
    MOE_SEQUENCER_CALLS =
        100, /* of one slot: 64 training calls, 4 progress tickets, 32 retained forward passes */
#endif
    MOE_SEQUENCER_LATELY = 16,                        /* tickets */
    MOE_SEQUENCER_CHANGES = 2 * MOE_ADDED_MODELS_MAX, /* of models, that wait */
};

struct moe_status moe_sequencer_create(struct moe_sequencer **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_sequencer_destroy(struct moe_sequencer *s);

/* Training's share of the tickets while forward work waits, in thousandths, 1 .. 999; 500 at first.
 * It stays over views. */
void moe_sequencer_set_share(struct moe_sequencer *s, uint32_t permille);

/* A new view: forgets everything, serves the default model alone, and starts at seq 1.
 * live        bit s: slot s takes part and has to report each ticket
 * max_bucket  a power of two */
void moe_sequencer_begin(struct moe_sequencer *s, uint64_t epoch, uint64_t live,
                         uint32_t max_bucket);

/* Forward steps of F32 tokens have at most this bucket, a power of two, in this view. */
void moe_sequencer_limit_f32(struct moe_sequencer *s, uint32_t max_bucket);

/* While `block` is set, no ticket of a kind that is_weight_update is issued. moe_sequencer_begin
 * clears it. */
void moe_sequencer_block_weight_updates(struct moe_sequencer *s, bool block);

/* No ticket of what waits is issued, so the state that a Save has written stays as it is. Kinds
 * that are not is_training pass. moe_sequencer_begin sets MOE_HOLD_NOTHING. */
void moe_sequencer_hold(struct moe_sequencer *s, enum moe_hold hold);

/* What may be issued now: any ticket at all, and those that is_training. Both at first. It stays
 * over views: set it before moe_sequencer_next wherever a lease decides. */
void moe_sequencer_allow(struct moe_sequencer *s, bool tickets, bool training);

/* `tokens` more wait on `slot`. Errors: MOE_INVALID_ARGUMENT (the slot is not of this view, or
 * there is no such key), MOE_RESOURCE_EXHAUSTED (more keys than a view can have). */
struct moe_status moe_sequencer_work(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_step_key *key, uint32_t tokens) MOE_CHECKED;

/* The group is idle: if no other ticket is due and none is in flight, one heartbeat of `layer` is.
 * Any other ticket takes its place, and so does the next view. */
void moe_sequencer_beat(struct moe_sequencer *s, uint32_t layer);

/* The group is to serve an added model, or not any longer: a ticket is due, ADD_MODEL or
 * REMOVE_MODEL. Nothing happens if that is so already. Errors: MOE_INVALID_ARGUMENT (not the number
 * of an added model), MOE_RESOURCE_EXHAUSTED (too many models, or changes that wait). */
struct moe_status moe_sequencer_change_model(struct moe_sequencer *s, uint32_t model,
                                             bool serve) MOE_CHECKED;

/* The group is to use the placement of this version from now on: a ticket SWAP_PLACEMENT is due.
 * Nothing happens if this view has had one of it or of a later one. */
void moe_sequencer_swap_placement(struct moe_sequencer *s, uint32_t version);

/* A call with a descriptor (has_descriptor) waits on `slot`. Reads kind, layer, dtype and
 * descriptor of `call`, except the descriptor's origin. `tokens`: its rows, at least 1 for kinds
 * with has_rows. Errors: MOE_INVALID_ARGUMENT, MOE_RESOURCE_EXHAUSTED (the slot has too many
 * waiting). */
struct moe_status moe_sequencer_call(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_ticket *call, uint32_t tokens) MOE_CHECKED;

/* `slot` has run ticket `seq`; slots report every ticket once, in order. A step that failed
 * anywhere stops the sequencer until the next view. Errors: MOE_INVALID_ARGUMENT (not of this view,
 * out of order, or never issued). */
struct moe_status moe_sequencer_done(struct moe_sequencer *s, uint32_t slot, uint64_t seq,
                                     bool ok) MOE_CHECKED;

/* The next ticket, if one is due. Call until false after every input. */
bool moe_sequencer_next(struct moe_sequencer *s, struct moe_ticket *out);

/* Tokens that were announced and are not yet covered by a ticket, over all slots. */
uint64_t moe_sequencer_pending(const struct moe_sequencer *s);
/* Calls with a descriptor that have no ticket yet, blocked ones included. */
size_t moe_sequencer_calls(const struct moe_sequencer *s);

#endif
