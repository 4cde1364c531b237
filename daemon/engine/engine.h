/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: runs tickets. Requests are submitted to it from any thread and wait in the batcher; a
 * ticket from the sequencer takes the tokens that fit into its bucket, and the engine's thread runs
 * the step on the backend, at most two steps at once. The backend moves the rows.
 *
 * The engine knows nothing of gRPC, of the coordinator, or of how tickets travel. */
#ifndef MOE_ENGINE_ENGINE_H
#define MOE_ENGINE_ENGINE_H

#include "moe/backend.h"
#include "schedule/call_ops.h"
#include "schedule/layer_key.h"

struct moe_eventcount;
struct moe_engine;
struct moe_progress;
struct moe_row_metrics;
struct moe_step_metrics;

struct moe_engine_config {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_layer *const *layers; /* of the default model; borrowed, outlive the engine */
    const struct moe_layer_spec *const *specs; /* of the same; ascending by layer */
    struct moe_placement *const *placements;   /* as in moe_engine_layers */
    size_t layer_count;
    /* Widest layers of added models; 0, or less than the default model needs: those of the default
     * model. */
    uint32_t max_hidden, max_top_k;
    uint32_t max_tokens_per_step; /* largest bucket, power of two */
    uint64_t max_queued_tokens;   /* more are refused with QUEUE_FULL */
    const struct moe_call_ops
        *calls;      /* operations of tickets with a descriptor; NULL: no training */
    void *calls_ctx; /* borrowed */
    struct moe_step_metrics *metrics;    /* gets every step that succeeded; borrowed, may be NULL */
    struct moe_row_metrics *row_metrics; /* gets the default model's forward steps; the same */
    /* Work was queued while a view is in force, or waited when the view began: the sequencer needs
     * to know. Any thread, no lock held. From within, only moe_engine_run may be called. Announced
     * tokens may be gone when their ticket comes (cancelled, or taken by an earlier one); no
     * waiting token is left out. */
    void (*announce)(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                     uint32_t tokens);
    /* The same for one training call or retained Forward, each once per view. Epoch, kind, layer,
     * dtype and descriptor of `call` are filled in, but not the descriptor's origin. To be ignored
     * in another epoch. `tokens`: its rows, 0 if it has none. May be NULL without training. */
    void (*announce_training)(void *ctx, const struct moe_ticket *call, uint32_t tokens);
    /* A ticket ADD_MODEL or REMOVE_MODEL has been run under `epoch`. Engine's thread, no lock held.
     * From within, only moe_engine_run may be called. NULL: there are no added models. */
    void (*model_changed)(void *ctx, uint32_t model, bool served, uint64_t epoch);
    /* A ticket SWAP_PLACEMENT begins: steps of later tickets use the layers of this version of the
     * placement; earlier ones may run still. A failure ends the view. Engine's thread, no lock
     * held; no function of the engine may be called from within. NULL: there are no such tickets.
     */
    struct moe_status (*swap_placement)(void *ctx, uint32_t version);
    /* It is complete under `epoch`: no step uses the layers before. As model_changed. */
    void (*placement_swapped)(void *ctx, uint32_t version, uint64_t epoch);
    /* A ticket has been run, in order of seq. Engine's thread, no lock held; must not stop or start
     * a view, and may come while moe_engine_stop_view waits. On failure the engine has stopped the
     * view: tickets are ignored until the next moe_engine_start_view. Tickets that stop_view cut
     * short, or that were never begun, are not reported. */
    void (*finished)(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                     uint64_t lost_slots);
    /* Starts (ends) a block of tickets of kinds that is_weight_update. All slots call it at the
     * same ticket, before `finished` of that ticket; the end of a view ends the block without a
     * call. Engine's thread, no lock held; no function of the engine may be called from within.
     * NULL: no training. */
    void (*block_weight_updates)(void *ctx, bool block);
    /* The engine's eventcount was notified, by the engine or by another process. Engine's thread,
     * no lock held. From within, only moe_engine_run may be called. NULL: no other process
     * notifies. */
    void (*listen)(void *ctx);
    /* Gets the loops of the thread, the device and the steps of a view; borrowed. With it, an idle
     * engine calls `heartbeat` whenever a view has run no step for moe_progress_step_ns: the group
     * is to run a step without tokens, of `layer`. As `announce` in all else. NULL: neither. */
    struct moe_progress *progress;
    void (*heartbeat)(void *ctx, uint32_t layer);
    /* After a step the thread polls this long instead of sleeping: that saves the 10 to 60 us of
     * waking it for the next ticket, and keeps a processor busy. 0: it always sleeps. */
    uint64_t spin_ns;
    /* How long a part of a batch (moe_work.batch_parts) waits for the others. 0: it does not. */
    uint64_t parts_wait_ns;
    void *ctx;
};

struct moe_status moe_engine_create(const struct moe_engine_config *config,
                                    struct moe_engine **out) MOE_CHECKED;
/* Stops the view, fails queued work with UNAVAILABLE/DRAINING, joins the thread. NULL is ignored.
 */
void moe_engine_destroy(struct moe_engine *e);

/* The eventcount that wakes the engine's thread; lives as long as the engine. */
struct moe_eventcount *moe_engine_eventcount(const struct moe_engine *e);

/* An added model. All is borrowed until moe_engine_remove_model. */
struct moe_engine_layers {
    uint32_t model;                            /* its number, 1 .. MOE_MODEL_NUMBER_MAX */
    struct moe_layer *const *layers;           /* [count], loaded */
    const struct moe_layer_spec *const *specs; /* [count], ascending by layer */
    /* Points to the layers' placements [count]; both change with the layers. NULL: no expert counts
     * as re-homed. */
    struct moe_placement *const *placements;
    size_t count;
    struct moe_row_metrics *row_metrics; /* as in the configuration; NULL = none */
};
/* [any thread] From now on requests for these layers are taken. They wait until a ticket ADD_MODEL
 * of a view; each view begins with the default model alone. Errors: MOE_INVALID_ARGUMENT/TOO_LARGE
 * (wider than the steps), MOE_ALREADY_EXISTS, OUT_OF_MEMORY. */
struct moe_status moe_engine_add_model(struct moe_engine *e,
                                       const struct moe_engine_layers *layers) MOE_CHECKED;
/* [any thread, not from a callback] Afterwards no step uses the layers, and requests for them get
 * LAYER_NOT_FOUND; those that wait end with `why`. Does nothing without the model. Errors:
 * MOE_FAILED_PRECONDITION/MODEL_IN_USE (the view in force serves it: a ticket REMOVE_MODEL must
 * come first); nothing has changed then. */
struct moe_status moe_engine_remove_model(struct moe_engine *e, uint32_t model,
                                          struct moe_status why) MOE_CHECKED;

/* A view of the slots `live` is in force: tickets of `epoch` may come, seq without gaps. `session`
 * is borrowed until stop_view returns. It begins with the default model alone. Its queued work is
 * announced (again), that of an added model with its ADD_MODEL. Requests pinned to another epoch
 * fail with STALE_EPOCH. A view that is still in force is stopped first. */
void moe_engine_start_view(struct moe_engine *e, struct moe_session *session, uint64_t epoch,
                           uint64_t live, uint32_t max_tokens_per_step);
/* The view is over: aborts the session's waits, waits until no step runs. Requests that were in a
 * step go back to the head of the queue and run again under the next view. Idempotent. */
void moe_engine_stop_view(struct moe_engine *e);

/* Any thread. Errors: MOE_RESOURCE_EXHAUSTED/QUEUE_FULL, MOE_NOT_FOUND/LAYER_NOT_FOUND,
 * MOE_FAILED_PRECONDITION/STALE_EPOCH, MOE_UNAVAILABLE/DRAINING; the work is not accepted then and
 * `done` is not called. On success `done` may have been called already. */
struct moe_status moe_engine_submit(struct moe_engine *e, struct moe_work *w) MOE_CHECKED;
/* Any thread, also after `done`. If some of the request is still queued, it is dropped and the
 * request ends with MOE_CANCELLED; a request that is in steps as a whole runs to its end. `w` must
 * be alive. */
void moe_engine_cancel(struct moe_engine *e, struct moe_work *w);

/* Any thread. As submit; MOE_UNIMPLEMENTED/UNSUPPORTED without training, MOE_INVALID_ARGUMENT/
 * TOKEN_LIMIT for more tokens than a step may have. */
struct moe_status moe_engine_submit_training(struct moe_engine *e,
                                             struct moe_train_work *w) MOE_CHECKED;
/* Any thread, also after `done`: the client has left. A call that has not been announced under the
 * present view ends with MOE_CANCELLED, and so does a Save or Load that has begun; other calls are
 * run. */
void moe_engine_cancel_training(struct moe_engine *e, struct moe_train_work *w);

/* Any thread. Version of the default model's weights that a step begun now would use; 1 without
 * training. Added models have version 1. */
uint64_t moe_engine_weights_version(struct moe_engine *e);

/* Any thread. Tickets come in order of seq; those of another epoch are ignored. */
void moe_engine_run(struct moe_engine *e, const struct moe_ticket *ticket);

/* Refuses new work from now on; true once nothing is queued or running, false at `deadline_ns`. */
bool moe_engine_drain(struct moe_engine *e, uint64_t deadline_ns);
/* Fails all waiting work with `reason`. A training call that the sequencer knows stays: its ticket
 * may be under way. */
void moe_engine_fail_queued(struct moe_engine *e, struct moe_status reason);
/* The same, and refuses new work with `reason` from now on, until the next call. MOE_OK: work is
 * taken again. */
void moe_engine_suspend(struct moe_engine *e, struct moe_status reason);

struct moe_engine_counters {
    uint64_t tokens, steps, requests, failed_requests; /* since start */
    uint64_t queued_tokens;                            /* now */
};
void moe_engine_read_counters(struct moe_engine *e, struct moe_engine_counters *out);

#endif
