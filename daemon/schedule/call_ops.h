/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on calls that the engine does not understand. The engine decides when a ticket runs;
 * the room behind this table (training) reads the ticket's descriptor, decides whether the call is
 * admissible, and makes the change. That room fills the table, daemon/worker hands it to the
 * engine, and neither room includes a header of the other.
 *
 * Threads: the engine's, without its lock, unless a function says otherwise. `ctx` is
 * moe_engine_config.calls_ctx. `x` is the execution of one ticket: `exec_bytes` of the engine's
 * memory, zeroed before `read`. At most one execution of a training kind is open; executions of
 * retained forward passes may be open at the same time. */
#ifndef MOE_SCHEDULE_CALL_OPS_H
#define MOE_SCHEDULE_CALL_OPS_H

#include "schedule/work.h"

struct moe_call_exec;

/* [any thread that holds no lock] Requests a progress ticket with this descriptor: all slots run
 * it, and no client waits for it. False when too many progress tickets wait already. */
typedef bool (*moe_call_request_fn)(void *engine, enum moe_step_kind kind,
                                    const struct moe_call_descriptor *descriptor);

/* Memory of the engine for the rows of a pass, [bucket] each. */
struct moe_call_rows {
    uint8_t *mode, *token_state;
};

/* How an execution has ended on this slot. */
struct moe_call_end {
    struct moe_status status; /* for the origin's client */
    bool passed;              /* its pass was run: `token_state` and the step's numbers are valid */
    bool waits;  /* the job that it began goes on; the call waits until a later execution settles */
    bool joined; /* an earlier execution had begun the job */
    bool settles; /* the calls that wait end with `status` */
};

struct moe_call_ops {
    size_t exec_bytes;

    /* `open`: before the engine's thread starts. `close`: after it has ended; `request` must not be
     * called afterwards. */
    void (*open)(void *ctx, moe_call_request_fn request, void *engine);
    void (*close)(void *ctx);

    /* [any thread; the engine's lock may be held] The own slot in the view; the weights' version;
     * the job that a descriptor names: calls for the same job have the same id, 0 is none. */
    uint32_t (*slot)(void *ctx);
    uint64_t (*weights_version)(void *ctx);
    uint64_t (*id_of)(enum moe_step_kind kind, const struct moe_call_descriptor *descriptor);
    /* [the engine's lock is held] Fills in length and body, for a retained Forward. */
    void (*describe)(const struct moe_work *w, struct moe_call_descriptor *descriptor);
    /* [the engine's lock is held] Reads the ticket's descriptor. Errors: MOE_INTERNAL/MALFORMED,
     * which ends the view. */
    struct moe_status (*read)(const struct moe_ticket *ticket, struct moe_call_exec *x);

    /* Training kinds: begin, then end or abandon. `w`: the call on its origin, NULL on other slots.
     * Makes the change, or starts a pass and sets `*step`, which the engine waits for. A failure
     * ends the view. */
    struct moe_status (*begin)(void *ctx, const struct moe_ticket *ticket,
                               const struct moe_train_work *w, struct moe_session *session,
                               const struct moe_call_rows *rows, struct moe_call_exec *x,
                               struct moe_step **step);
    /* All slots have refused the pass; nothing has changed. */
    void (*refuse)(struct moe_call_exec *x, struct moe_status why);
    void (*end)(void *ctx, const struct moe_ticket *ticket, struct moe_train_work *w,
                const struct moe_step_result *result, struct moe_call_exec *x,
                struct moe_call_end *out);
    /* [the engine's lock is held] The view ends before the execution. */
    void (*abandon)(void *ctx, struct moe_call_exec *x);
    /* [the engine's lock is held] Writes the answer of an ended execution to `w`, which has room
     * for one; `x` is NULL if the view ended first. */
    void (*answer)(const struct moe_call_exec *x, struct moe_train_work *w);
    /* A Save is being copied, on this slot or another: see moe_engine_config.block_weight_updates.
     */
    bool (*blocks_weight_updates)(void *ctx);
    /* [the engine's lock is held] The last client of job `id` at this slot has left. True: the
     * engine requests a progress ticket with `descriptor`, which tells the other slots. */
    bool (*is_unwanted)(void *ctx, enum moe_step_kind kind, uint64_t id,
                        struct moe_call_descriptor *descriptor);

    /* [any thread, no lock] A number that changes while a ticket of a job moves bytes on the
     * engine's thread. May be NULL. */
    uint64_t (*moved)(const void *ctx);

    /* A retained forward pass has succeeded; `tokens`: of this slot. */
    void (*retained)(void *ctx, const struct moe_ticket *ticket, uint32_t tokens,
                     const struct moe_step_result *result, const struct moe_call_exec *x);

    /* Memory retained for later calls. `view`: a view is in force; without one, memory on the
     * device must not be touched. `next_expiry`: [the engine's lock may be held] when `expire` is
     * to be called next. */
    uint64_t (*next_expiry)(void *ctx, bool view);
    void (*expire)(void *ctx, uint64_t now, bool view);
    /* [the engine's lock is held] The view is over; unfinished jobs are lost. */
    void (*end_view)(void *ctx);
};

#endif
