/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine asks of the room that gives calls their meaning. The engine knows when a ticket
 * takes its turn; the room behind this table (training) knows what the ticket's order says, whether
 * it is admissible, and what it changes. The room fills the table, the assembly hands it to the
 * engine, and neither includes a header of the other.
 *
 * Threads: the engine's, without its lock, unless a function says otherwise. `ctx` is
 * moe_engine_config.calls_ctx. `x` is the execution of one ticket: memory of `exec_bytes` that the
 * engine holds for it, zeroed before `read`. One execution of a training kind is open at a time;
 * those of retained forward passes may be open beside it. */
#ifndef MOE_SCHEDULE_CALL_OPS_H
#define MOE_SCHEDULE_CALL_OPS_H

#include "schedule/work.h"

struct moe_call_exec;

/* [any thread that holds no lock] Asks for a ticket of this order, on which nobody waits: what it
 * brings about is wanted at all slots. False when there is no room for it at the moment. */
typedef bool (*moe_call_request_fn)(void *engine, enum moe_step_kind kind,
                                    const struct moe_call_descriptor *descriptor);

/* Memory of the engine for the rows of a pass, [bucket] each. */
struct moe_call_rows {
    uint8_t *mode, *token_state;
};

/* How an execution has ended on this slot. */
struct moe_call_end {
    struct moe_status status; /* what the origin's client is told */
    bool passed;              /* its pass was run: `token_state` and the numbers of steps count */
    bool waits;   /* what it began goes on; a later execution settles it, and the call waits */
    bool joined;  /* an earlier execution had begun it */
    bool settles; /* the calls that wait have this end */
};

struct moe_call_ops {
    size_t exec_bytes;

    /* Before the engine's thread starts, and after it has ended: no request from then on. */
    void (*open)(void *ctx, moe_call_request_fn request, void *engine);
    void (*close)(void *ctx);

    /* [any thread; the engine's lock is held or not] Own slot of the view; version of the weights;
     * what an order calls itself, the same for all that ask for the same; 0: it says none. */
    uint32_t (*slot)(void *ctx);
    uint64_t (*weights_version)(void *ctx);
    uint64_t (*id_of)(enum moe_step_kind kind, const struct moe_call_descriptor *descriptor);
    /* [the engine's lock is held] Fills in length and body, for a Forward with a step of its own.
     */
    void (*describe)(const struct moe_work *w, struct moe_call_descriptor *descriptor);
    /* [the engine's lock is held] Reads the ticket's order. Errors: MOE_INTERNAL/MALFORMED; the
     * view ends then. */
    struct moe_status (*read)(const struct moe_ticket *ticket, struct moe_call_exec *x);

    /* Training kinds: begin, then end or abandon. `w`: the call, NULL but on its origin. Runs the
     * change, or starts a pass: `*step` is it then, to be waited for. A failure ends the view. */
    struct moe_status (*begin)(void *ctx, const struct moe_ticket *ticket,
                               const struct moe_train_work *w, struct moe_session *session,
                               const struct moe_call_rows *rows, struct moe_call_exec *x,
                               struct moe_step **step);
    /* All slots have refused the pass, and nothing has happened. */
    void (*refuse)(struct moe_call_exec *x, struct moe_status why);
    void (*end)(void *ctx, const struct moe_ticket *ticket, struct moe_train_work *w,
                const struct moe_step_result *result, struct moe_call_exec *x,
                struct moe_call_end *out);
    /* [the engine's lock is held] It will not end: its view does. */
    void (*abandon)(void *ctx, struct moe_call_exec *x);
    /* [the engine's lock is held] Writes the answer of an execution that has ended to a call that
     * wants one; `x` is NULL where the view ended under it. */
    void (*answer)(const struct moe_call_exec *x, struct moe_train_work *w);
    /* A Save is being copied, on this slot or another: see moe_engine_config.hold. */
    bool (*blocks_weight_updates)(void *ctx);
    /* [the engine's lock is held] Nobody waits at this slot any more for the call of this id.
     * True: `order` is to be requested, so that the others hear of it. */
    bool (*is_unwanted)(void *ctx, enum moe_step_kind kind, uint64_t id,
                        struct moe_call_descriptor *descriptor);

    /* A forward pass with a step of its own has ended well; `tokens`: of this slot. */
    void (*retained)(void *ctx, const struct moe_ticket *ticket, uint32_t tokens,
                     const struct moe_step_result *result, const struct moe_call_exec *x);

    /* Memory that is kept for calls to come. `view`: one is in force; without, what lies on the
     * device is not to be touched. `next_expiry`: [the engine's lock is held or not] when `expire`
     * is to be called next. */
    uint64_t (*next_expiry)(void *ctx, bool view);
    void (*expire)(void *ctx, uint64_t now, bool view);
    /* [the engine's lock is held] The view is over: all that was under way is lost with it. */
    void (*end_view)(void *ctx);
};

#endif
