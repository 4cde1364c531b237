/* SPDX-License-Identifier: Apache-2.0 */
/* The state machine of moves: other copies of the default model's experts, while the view goes on.
 * Pure: no I/O, no clock, one thread at a time, no allocation after create but for a plan. Inputs
 * are calls of operators, reports of slots and the state of the group. Outputs are actions, which
 * the caller carries out in order.
 *
 *   COUNT ─▶ all slots report the rows of their experts ─▶ a plan
 *         ─▶ FETCH: slots load the experts that they lack, next to those in use ─▶ Digests:
 * compared ─▶ the placement is saved ─▶ SWAP: one ticket ─▶ the others are freed
 *
 * Rules:
 *  - a move needs a view of all slots. Until the placement is saved, a failure anywhere, a lost
 *    worker, an operator who leaves or another view undoes it: DROP goes to all slots, then the
 *    call is answered, and nothing has changed;
 *  - a placement is saved when all slots hold its experts, and before SWAP. From then on every new
 *    view forms with it;
 *  - SWAP belongs to one epoch. If that ends first, its slots take the placement as they form the
 *    next view, and the move has succeeded;
 *  - SWAP may be repeated: the sequencer issues one ticket. A write that failed may have been
 *    carried out; so a restarted coordinator waits until all slots report that they hold the saved
 *    placement;
 *  - one move at a time, and each accepted call gets one answer;
 *  - with a policy, the machine looks at the rows by itself, and moves experts as balance/
 *    rebalancer.h decides. A look keeps nothing else from beginning. */
#ifndef MOE_COORDINATOR_MOVES_H
#define MOE_COORDINATOR_MOVES_H

#include "balance/rebalancer.h"
#include "coordinator/models.h"
#include "coordinator/moves/move_plan.h"

struct moe_moves;

/* Limits. */
#define MOE_MOVES_COUNT_NS (10 * MOE_NS_PER_S)
#define MOE_MOVES_STALL_NS (300 * MOE_NS_PER_S) /* FETCH: without progress on a slot */
#define MOE_MOVES_SWAP_NS  (60 * MOE_NS_PER_S)  /* then the call is answered; the swap goes on */
#define MOE_MOVES_DROP_NS  (10 * MOE_NS_PER_S)  /* then the call is answered */

enum {
    /* A plan counts the rows since the last move if each expert has that many on average, else
     * those since the workers started. */
    MOE_MOVES_ROWS_LEAST = 8,
    MOE_MOVES_GAIN_DEFAULT = 5, /* percent */
};

struct moe_moves_config {
    uint32_t slots, replicas;
    uint32_t spare;       /* copies of each layer that a slot may have beyond a linear placement */
    uint64_t first_order; /* orders are numbered from here; above those of earlier coordinators */
    struct moe_rebalancer_policy automatic; /* moves without an operator; every_ns 0: none */
};

/* `swap_epoch`: a view from the log, with slots that may not have taken the saved placement; 0 =
 * none. Errors: OUT_OF_MEMORY. */
struct moe_status moe_moves_create(const struct moe_moves_config *config, uint64_t swap_epoch,
                                   struct moe_moves **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_moves_destroy(struct moe_moves *m);

/* ------------------------------------------------------------------ inputs
 *
 * As for coordinator/models.h. */

/* After every input of the membership machine. `view`, `live`, `slots` as in moe_added_on_group.
 * `loaded`: all slots have reported that they hold the experts of the saved placement. */
void moe_moves_on_group(struct moe_moves *m, uint64_t now_ns, uint64_t view, uint64_t live,
                        bool loaded, const struct moe_added_slot *slots);

struct moe_moves_request {
    uint64_t call;                   /* above 0, and no call that is not answered; 0: automatic */
    const struct moe_placement *now; /* saved; copied */
    uint64_t places;                 /* bit s: slot s holds experts in it */
    bool dry_run;                    /* the plan is the answer */
    uint32_t spare;                  /* of a dry run */
    uint32_t least_gain;             /* percent: no move for less */
    uint32_t version;                /* that `now` must have; 0 = any */
    uint32_t new_version;            /* of the plan: see moe_saved_next_version */
    bool trains;                     /* the group does */
};

/* A failure is the answer. Otherwise MOE_MOVES_ANSWER follows. Errors: MOE_FAILED_PRECONDITION
 * with REFORMING (no view of all places, or one of them loads), UNSUPPORTED (no spare places; the
 * group trains), VERSION_MISMATCH; MOE_UNAVAILABLE (another move is under way). */
struct moe_status moe_moves_begin(struct moe_moves *m, uint64_t now_ns,
                                  const struct moe_moves_request *request) MOE_CHECKED;
/* The operator does not wait any more, and gets no answer. Nothing for an unknown call. */
void moe_moves_cancel(struct moe_moves *m, uint64_t now_ns, uint64_t call);

enum moe_moves_step { /* values of moe.v1.ModelStep */
                      MOE_MOVES_COUNT = 7,
                      MOE_MOVES_FETCH = 8,
                      MOE_MOVES_SWAP = 9,
                      MOE_MOVES_DROP = 10,
};

/* COUNT: rows [count] of the experts of one layer on one slot, before its report. Ignored unless
 * the order is the present one. Errors: MOE_INVALID_ARGUMENT/MALFORMED (no such layer, or another
 * number of experts). */
struct moe_status moe_moves_on_rows(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                                    uint64_t order, uint32_t layer, const uint64_t *rows,
                                    size_t count) MOE_CHECKED;

struct moe_moves_report {
    enum moe_moves_step step;
    uint64_t order, epoch;
    const struct moe_status *error; /* of FETCH: also that digests differ */
};
void moe_moves_on_report(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                         const struct moe_moves_report *r);
/* A FETCH goes on. */
void moe_moves_on_progress(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                           uint64_t loaded_bytes);
/* Answer to MOE_MOVES_SAVE; allowed while actions are being carried out. */
void moe_moves_on_saved(struct moe_moves *m, uint64_t now_ns, uint64_t sequence,
                        const struct moe_status *status);
void moe_moves_on_tick(struct moe_moves *m, uint64_t now_ns);
/* Latest time of the next tick; MOE_NEVER when nothing is under way. */
uint64_t moe_moves_deadline(const struct moe_moves *m);

/* ------------------------------------------------------------------ actions */

enum moe_moves_action_kind {
    MOE_MOVES_ORDER,  /* `step`, to `stream` */
    MOE_MOVES_SAVE,   /* make moe_moves_plan() the group's placement, durably; then on_saved */
    MOE_MOVES_ANSWER, /* `call` ends with `status`; on success see moe_moves_outcome */
    MOE_MOVES_LOG,    /* status.text at `level`; `event` */
};

struct moe_moves_action {
    enum moe_moves_action_kind kind;
    enum moe_moves_step step;
    enum moe_membership_event event;
    enum moe_log_level level;
    uint32_t slot;
    uint64_t stream, order, epoch, sequence, call;
    struct moe_status status;
};

/* Removes the oldest action; false when there is none. */
bool moe_moves_next_action(struct moe_moves *m, struct moe_moves_action *out);

/* ------------------------------------------------------------------ reading
 *
 * Pointers are valid until the next input. */

/* Of the last plan. */
struct moe_moves_outcome {
    bool moved;      /* slots have its experts, or take them as they form the next view */
    uint64_t places; /* bit s: slot s has a share of it */
    const struct moe_placement *plan;
    const struct moe_move_gain *gain;
};
void moe_moves_outcome(const struct moe_moves *m, struct moe_moves_outcome *out);
/* With the version that it gets, from the FETCH on. */
const struct moe_placement *moe_moves_plan(const struct moe_moves *m);
/* The slot was asked by this order to fetch experts of the plan. */
bool moe_moves_awaits_fetch(const struct moe_moves *m, uint32_t slot, uint64_t order);
/* Version of the placement that slots fetch, or have fetched; 0 = none. A worker that
 * registers frees what it has fetched for any other, except for the saved one. */
uint32_t moe_moves_fetched_version(const struct moe_moves *m);
/* A look is due: call moe_moves_begin with an automatic request. If it fails, the next look has its
 * turn. */
bool moe_moves_wants_look(const struct moe_moves *m);
/* How many moves of the rebalancer's have ended: experts have moved, or the move was undone. */
uint64_t moe_moves_automatic(const struct moe_moves *m, bool moved);
/* For tests: a move is under way. */
bool moe_moves_busy(const struct moe_moves *m);

#endif
