/* SPDX-License-Identifier: Apache-2.0 */
/* The job machine: one Save, Load or Export of the group, as one slot sees it. Pure: no I/O, no
 * clock, no thread, no memory, no lock. Inputs are tickets, ends of parts, callers that leave, and
 * ends of views. Outputs are actions, which the caller carries out in order.
 *
 * A job is a row of parts. Each slot has a share of a part. A share takes as long as the disk, and
 * steps continue meanwhile. Slots meet at tickets only. When its share has ended, a slot requests a
 * progress ticket. At each ticket of the job every slot makes a report, and gets the reports of
 * all. All slots see the same reports, and so all decide alike: wait, start the next part, undo,
 * or settle.
 *
 *   Save     PREPARE ─▶ COPY ─▶ CREATE ─▶ WRITE ─▶ COMMIT ─▶ [REMEMBER ─▶ TIDY] ─▶ settle
 *   Export   PREPARE ─────────▶ CREATE ─▶ WRITE ─▶ COMMIT ───────────────────────▶ settle
 *   Load     PREPARE ─▶ READ ─▶ TAKE ────────────────────────────────────────────▶ settle
 *
 *   PREPARE, COPY, CREATE or READ fails on some slot     ─▶ settle with the failure
 *   WRITE or COMMIT fails, or no caller after CREATE     ─▶ UNDO ─▶ settle with the failure
 *   the view ends                                        ─▶ orphan ─▶ [UNDO] ─▶ forget
 *
 * PREPARE, REMEMBER and TAKE happen inside a ticket, while no step runs; the other parts run
 * at the same time as steps. REMEMBER and TAKE change a slot's state, so a further ticket confirms
 * that all slots have done it: only then are old checkpoints removed, and only then is a Load
 * answered.
 *
 * Weight updates are blocked on all slots while some share reads the trainers: in COPY, and in
 * CREATE and WRITE of an Export, or of a Save when some slot has no room for a copy. Forward and
 * Backward continue. Blocks begin and end at the same tickets on all slots.
 *
 * A caller may leave. Once every caller on every slot that was asked has left, the job is called
 * off: shares that run end soon, and the job settles with MOE_ABORTED. A commit that was not
 * stopped in time counts: the job settles well.
 *
 * The end of a view gives the job up. A share that still runs is an orphan. No other job begins on
 * this slot, and so in the group, until the orphan has ended and its files are gone. While an
 * orphan reads the trainers, they must not be replaced or freed. */
#ifndef MOE_TRAINING_JOB_MACHINE_H
#define MOE_TRAINING_JOB_MACHINE_H

#include "training/ledger.h"

#include "moe/types.h"

enum moe_job_kind { MOE_JOB_SAVE = 1, MOE_JOB_LOAD, MOE_JOB_EXPORT };

enum moe_job_part {
    MOE_JOB_NONE,
    MOE_JOB_PREPARE,  /* in the ticket, all slots: can the job begin */
    MOE_JOB_COPY,     /* all: trainers to host memory */
    MOE_JOB_CREATE,   /* lowest slot: the directory */
    MOE_JOB_WRITE,    /* all: this slot's files, from the copy or from the trainers */
    MOE_JOB_COMMIT,   /* lowest: makes the checkpoint or adapter visible, whole */
    MOE_JOB_REMEMBER, /* in the ticket, all: an action, no share; recovery goes to it now */
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
    bool found; /* CREATE: this Save was written whole before, but not recorded; of this state */
    uint64_t weights_version, steps;
};

/* The report of one slot at a ticket of the job. Slots exchange these bytes. */
struct moe_job_report {
    uint32_t running, code, reason;
    uint16_t unwanted, found;
    uint64_t bytes;
    uint64_t weights_version, steps; /* with `found` */
    uint64_t writer;                 /* for the caller only */
    char text[184];
};

enum moe_job_action_kind {
    MOE_JOB_START,  /* begin this slot's share of `part`; moe_job_on_part_ended gets its end,
                       before the ticket ends where moe_job_is_in_ticket */
    MOE_JOB_CANCEL, /* the share that runs is to end soon */
    MOE_JOB_REQUEST_TICKET, /* ask for a progress ticket; again later where that is refused, as long
                    as moe_job_wants_ticket */
    MOE_JOB_BLOCK,          /* block weight updates ... */
    MOE_JOB_UNBLOCK,        /* ... and unblock them, before the end of this ticket is reported */
    MOE_JOB_KEEP,     /* the checkpoint is whole, with `steps`: recovery goes to it from now on */
    MOE_JOB_RECORD,   /* the call is done: into the ledger, with `bytes`, `weights_version` and
                         `steps`; of a Load with the state that was taken */
    MOE_JOB_SETTLE,   /* all callers that wait are answered with `status` */
    MOE_JOB_END_VIEW, /* this slot differs from the others, for the reason `status` */
    MOE_JOB_FORGET,   /* the job has nothing left to do on this slot: free its memory */
};

struct moe_job_action {
    enum moe_job_action_kind kind;
    uint64_t job;           /* moe_job.number of the job that it is about */
    enum moe_job_part part; /* START */
    bool from_trainers;     /* START of CREATE and WRITE: write the trainers, not a copy */
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
    bool called_off;           /* all callers have left; the same on all slots */
    bool blocked;              /* weight updates, by the last BLOCK or UNBLOCK */
    struct moe_status failure; /* why it is undone */
    uint64_t bytes;            /* by all slots */
    uint64_t weights_version, steps;

    /* This slot's share. */
    bool running;
    bool unwanted;          /* no caller waits at this slot */
    bool unreported;        /* a change is in no report yet */
    struct moe_job_end end; /* once it does not run */

    /* The remains of a job when its view has ended. */
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
/* This slot's report at the ticket. */
void moe_job_report(struct moe_job *j, struct moe_job_report *out);
/* The reports of all live slots at this ticket. */
void moe_job_on_reports(struct moe_job *j, const struct moe_job_report all[MOE_MAX_SLOTS]);

/* This slot's share of `part` of job `number` has ended. `end->status` of TIDY and UNDO does not
 * count. */
void moe_job_on_part_ended(struct moe_job *j, uint64_t number, enum moe_job_part part,
                           const struct moe_job_end *end);
/* The last caller at this slot has left the job of this call. False for another call. */
bool moe_job_on_unwanted(struct moe_job *j, uint64_t id, const struct moe_content *content);

/* ----------------------------------------------------------------- outputs */

/* The oldest action not yet taken; false when there is none. */
bool moe_job_next_action(struct moe_job *j, struct moe_job_action *out);

/* ----------------------------------------------------------------- reading */

enum moe_job_outcome {
    MOE_JOB_UNKNOWN, /* no job has this id: ask the ledger */
    MOE_JOB_JOINS,   /* it is the call of the job, again */
    MOE_JOB_REUSED,  /* the id is the job's, the content is not */
};
/* How a call of the sequence of all sessions relates to the job. Changes nothing. */
enum moe_job_outcome moe_job_judge(const struct moe_job *j, uint64_t id,
                                   const struct moe_content *content);
/* A job is under way. */
bool moe_job_is_active(const struct moe_job *j);
/* None is under way: another may begin. */
bool moe_job_may_begin(const struct moe_job *j);
/* No ticket that updates weights may come. */
bool moe_job_blocks_weight_updates(const struct moe_job *j);
/* No orphan reads the trainers: between views they may be replaced or freed. */
bool moe_job_frees_trainers(const struct moe_job *j);
/* A change waits for a progress ticket. */
bool moe_job_wants_ticket(const struct moe_job *j);
/* The part runs inside its ticket. */
bool moe_job_is_in_ticket(enum moe_job_part part);

/* A report with nothing but a status. */
struct moe_job_report moe_job_report_of(const struct moe_status *status);
/* The common end of a part, from the reports of all slots: the failure of the lowest slot that
 * failed, so all slots have the same. Lack of memory counts only where no slot has another reason,
 * because a job without a copy may help. `*bytes` is the sum. */
struct moe_status moe_job_conclude(const struct moe_job_report *all, uint64_t live,
                                   uint64_t *bytes) MOE_CHECKED;

#endif
