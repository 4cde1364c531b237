/* SPDX-License-Identifier: Apache-2.0 */
/* The job machine: one Save, Load or Export of the group, as one slot sees it. Pure: no I/O, no
 * clock, no thread, no memory, no lock. Inputs are tickets, ends of parts, callers that leave, and
 * ends of views; outputs are actions, which the caller carries out in order.
 *
 * A job is a row of parts. Each slot has a share of a part. A share takes as long as a disk does,
 * and steps go on meanwhile. Slots meet at tickets only. A slot whose share has ended asks for a
 * progress ticket. At each ticket of the job every slot makes a report, and gets the reports of
 * all. All slots see the same reports, and so all decide alike: wait, start the next part, undo,
 * or settle.
 *
 *   Save     PREPARE ─▶ COPY ─▶ CREATE ─▶ WRITE ─▶ COMMIT ─▶ [REMEMBER ─▶ TIDY] ─▶ settle
 *   Export   PREPARE ─────────▶ CREATE ─▶ WRITE ─▶ COMMIT ───────────────────────▶ settle
 *   Load     PREPARE ─▶ READ ─▶ TAKE ────────────────────────────────────────────▶ settle
 *
 *   PREPARE, COPY, CREATE or READ fails on some slot     ─▶ settle with the failure
 *   WRITE or COMMIT fails, or nobody waits after CREATE  ─▶ UNDO ─▶ settle with the failure
 *   the view ends                                        ─▶ orphan ─▶ [UNDO] ─▶ forget
 *
 * PREPARE, REMEMBER and TAKE happen inside a ticket, while no step runs; the other parts run
 * beside the engine. REMEMBER and TAKE change a slot's state, so a further ticket confirms that all
 * slots have done it: only then are old checkpoints removed, and only then is a Load answered.
 *
 * Weight updates are blocked on all slots while some share reads the trainers. These are COPY, and,
 * of an Export or of a Save for which some slot has no room for a copy, CREATE and WRITE. Forward
 * and Backward go on. They are blocked and unblocked at tickets, the same ones on all slots.
 *
 * A caller may leave. Once every caller on every slot that was asked has left, the job is called
 * off: shares that run end soon, and the job settles with MOE_ABORTED. A commit that was not
 * stopped in time counts: the job settles well.
 *
 * The end of a view gives the job up. The share that still runs then is an orphan: no other job
 * begins on this slot, and with it in the group, until the orphan has ended and its files are
 * gone. While an orphan reads the trainers, nobody may replace or free them. */
#ifndef MOE_TRAINING_JOB_MACHINE_H
#define MOE_TRAINING_JOB_MACHINE_H

#include "training/ledger.h"

#include "moe/types.h"

enum moe_job_kind { MOE_JOB_SAVE = 1, MOE_JOB_LOAD, MOE_JOB_EXPORT };

enum moe_job_part {
    MOE_JOB_NONE,
    MOE_JOB_PREPARE,  /* in the ticket, all slots: nothing is in the way */
    MOE_JOB_COPY,     /* all: trainers to host memory */
    MOE_JOB_CREATE,   /* lowest slot: the directory */
    MOE_JOB_WRITE,    /* all: this slot's files, from the copy or from the trainers */
    MOE_JOB_COMMIT,   /* lowest: the checkpoint or adapter is there, whole */
    MOE_JOB_REMEMBER, /* in the ticket, all: an action, no share; recovery goes to it from now on */
    MOE_JOB_TIDY,     /* lowest: removes older checkpoints */
    MOE_JOB_READ,     /* all: checks this slot's files */
    MOE_JOB_TAKE,     /* in the ticket, all: the files' values into the trainers */
    MOE_JOB_UNDO,     /* lowest: removes what CREATE and WRITE made */
};

/* What a call asks for; the same on all slots. */
struct moe_job_description {
    enum moe_job_kind kind;
    uint64_t id; /* of the call that began it, in the sequence of all sessions */
    struct moe_content content;
    bool tidies; /* Save: older checkpoints go once it is there */
    /* State of the trainers as it began. */
    uint64_t weights_version, steps;
};

/* How a slot's share of a part has ended. */
struct moe_job_end {
    struct moe_status status;
    uint64_t bytes; /* WRITE: written */
    bool found;     /* CREATE: this very Save had been written whole before, and not recorded; of */
    uint64_t weights_version, steps; /* this state */
};

/* What one slot tells all others at a ticket of the job; exchanged as it is. */
struct moe_job_report {
    uint32_t running, code, reason;
    uint16_t unwanted, found;
    uint64_t bytes;
    uint64_t weights_version, steps; /* with `found` */
    uint64_t writer;                 /* the caller's own: not looked at here */
    char text[184];
};

enum moe_job_action_kind {
    MOE_JOB_START,  /* begin this slot's share of `part`; moe_job_on_part_ended gets its end,
                       before the ticket ends where moe_job_is_in_ticket */
    MOE_JOB_CANCEL, /* the share that runs is to end soon */
    MOE_JOB_REQUEST_TICKET, /* ask for a progress ticket; again later where that is refused, as long
                    as moe_job_wants_ticket */
    MOE_JOB_BLOCK,          /* from now on no ticket may come that updates weights ... */
    MOE_JOB_UNBLOCK,        /* ... not any more: before the end of this ticket is reported */
    MOE_JOB_KEEP,     /* the checkpoint is whole, with `steps`: recovery goes to it from now on */
    MOE_JOB_RECORD,   /* the call is done: into the ledger, with `bytes`, `weights_version` and
                         `steps`; of a Load with the state that was taken */
    MOE_JOB_SETTLE,   /* all callers that wait are answered with `status` */
    MOE_JOB_END_VIEW, /* this slot can no longer be like the others: `status` says why */
    MOE_JOB_FORGET,   /* nothing of the job is left to do on this slot: its memory may go */
};

struct moe_job_action {
    enum moe_job_action_kind kind;
    uint64_t job;           /* moe_job.number of the job that it is about */
    enum moe_job_part part; /* START */
    bool from_trainers;     /* START of WRITE: there is no copy, or it is not to be used */
    uint64_t bytes, weights_version, steps;
    struct moe_status status;
};

enum { MOE_JOB_ACTIONS_MAX = 16 };

/* The machine. All fields are its own; zeros at first. */
struct moe_job {
    /* Of the view. */
    uint32_t slot;
    uint64_t live; /* bit s: slot s takes part; 0 = no view is in force */

    /* The job, while `part` is not NONE. */
    enum moe_job_part part;
    uint64_t number; /* of jobs on this slot since it started */
    struct moe_job_description call;
    uint64_t asked; /* bit s: a caller asked slot s; the same on all slots */
    bool from_trainers;
    bool called_off;           /* nobody waits; the same on all slots */
    bool blocked;              /* what the last BLOCK or UNBLOCK said */
    struct moe_status failure; /* why it is undone */
    uint64_t bytes;            /* by all slots */
    uint64_t weights_version, steps;

    /* This slot's share. */
    bool running;
    bool unwanted;          /* no caller waits at this slot */
    bool unreported;        /* something has changed that no report has said yet */
    struct moe_job_end end; /* once it does not run */

    /* What is left of a job whose view ended. */
    struct {
        enum moe_job_part part; /* that still runs; NONE = there is no orphan */
        uint64_t number;
        bool reads_trainers, undo;
    } orphan;

    struct moe_job_action actions[MOE_JOB_ACTIONS_MAX]; /* a ring */
    size_t first, count;
};

/* ------------------------------------------------------------------ inputs
 *
 * After every input all actions are carried out, before the next one. */

/* A view is in force. */
void moe_job_on_view(struct moe_job *j, uint32_t slot, uint64_t live);
/* The view is over. Callers that wait are the caller's to answer. */
void moe_job_on_view_ended(struct moe_job *j);

/* The ticket of a call that begins a job: moe_job_judge has said NEW. `prepared`: whether this slot
 * can. The reports follow in the same ticket. */
void moe_job_on_begin(struct moe_job *j, const struct moe_job_description *description,
                      uint32_t origin, const struct moe_status *prepared);
/* The ticket of a call that joins the job. The reports follow in the same ticket, as in that of a
 * progress ticket. */
void moe_job_on_join(struct moe_job *j, uint32_t origin);
/* What this slot says at the ticket. */
void moe_job_report(struct moe_job *j, struct moe_job_report *out);
/* What all slots said at this ticket; entries of slots that are not live are not looked at. */
void moe_job_on_reports(struct moe_job *j, const struct moe_job_report all[MOE_MAX_SLOTS]);

/* This slot's share of `part` of job `number` has ended. `end->status` of TIDY and UNDO does not
 * count. */
void moe_job_on_part_ended(struct moe_job *j, uint64_t number, enum moe_job_part part,
                           const struct moe_job_end *end);
/* No caller waits at this slot any more for the job of this call. False where it is not the job's.
 */
bool moe_job_on_unwanted(struct moe_job *j, uint64_t id, const struct moe_content *content);

/* ----------------------------------------------------------------- outputs */

/* The oldest action not yet taken; false when there is none. */
bool moe_job_next_action(struct moe_job *j, struct moe_job_action *out);

/* ----------------------------------------------------------------- reading */

enum moe_job_verdict {
    MOE_JOB_UNKNOWN, /* no job has this id: the ledger says what the call is */
    MOE_JOB_JOINS,   /* it is the call of the job, again */
    MOE_JOB_REUSED,  /* the id is the job's, the content is not */
};
/* What a call of the sequence of all sessions is to the job. Changes nothing. */
enum moe_job_verdict moe_job_judge(const struct moe_job *j, uint64_t id,
                                   const struct moe_content *content);
/* A job is under way. */
bool moe_job_is_active(const struct moe_job *j);
/* None is: another may begin. */
bool moe_job_may_begin(const struct moe_job *j);
/* No ticket that updates weights may come. */
bool moe_job_blocks_weight_updates(const struct moe_job *j);
/* No orphan reads the trainers: between views they may be replaced or freed. */
bool moe_job_frees_trainers(const struct moe_job *j);
/* Something is unreported, and a progress ticket would tell it. */
bool moe_job_wants_ticket(const struct moe_job *j);
/* The part runs inside its ticket. */
bool moe_job_is_in_ticket(enum moe_job_part part);
const char *moe_job_part_name(enum moe_job_part part);

/* A report that says no more than how something has ended. */
struct moe_job_report moe_job_report_of(const struct moe_status *status);
/* What a group makes of the reports of a part that is over: the failure of the lowest slot that
 * failed, so that all slots say the same; `*bytes` of all. Lack of memory only where no slot has
 * another reason, for a copy less can help it. */
struct moe_status moe_job_conclude(const struct moe_job_report *all, uint64_t live,
                                   uint64_t *bytes) MOE_CHECKED;

#endif
