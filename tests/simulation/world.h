/* SPDX-License-Identifier: Apache-2.0 */
/* The group simulator: slots made of the real sequencer, batcher, ledger and job machine, around
 * which everything else is a model: trainers, disk, links, coordinator, clients. Time is virtual
 * and every choice comes from one seed, so that a run can be replayed.
 *
 *   world.c    events, promises, one run
 *   group.c    links between slots, and the coordinator that forms views
 *   slot.c     a worker process: calls, tickets, steps
 *   jobs.c     a worker process: parts of Save, Load and Export
 *   state.c    what training is about: the fake trainers, and the disk
 *   clients.c  callers that repeat, leave and come back
 */
#ifndef MOE_SIMULATION_WORLD_H
#define MOE_SIMULATION_WORLD_H

#include "schedule/batcher.h"
#include "schedule/sequencer.h"
#include "support/random.h"
#include "training/job_machine.h"
#include "training/recovery.h"

#include <stdio.h>

enum {
    SLOTS_MAX = 4,
    CLIENTS = 5,
    OPS_MAX = 1024, /* of one run */
    CALLS_MAX = 256,
    WAITING_MAX = 8, /* training calls of one slot; more are refused */
    PROGRESS_MAX = 4,
    TICKETS_MAX = 64,
    SEQ_RING = 8,      /* tickets of which a slot keeps what others said */
    SEQS_MAX = 4096,   /* tickets of one view */
    APPLIED_MAX = 512, /* changes of one state */
    CHECKPOINTS_MAX = 96,
    PARTS_MAX = 128, /* Backward calls between two steps */
    NAMES = 8,       /* of checkpoints */
    BUCKET = 16,
    LAYER = 1,
    FAULTS_END = 1200, /* milliseconds */
    READ_LIMIT = 80,   /* training waits for a slot that reads */
    GROWS_END = 10000, /* a slot without the state may wait for ever */
    RUN_END = 60000,
};

/* --------------------------------------------------------------------------- state */

/* What the trainers of one slot hold, and all that goes with it. Slots of one view have equal
 * states after the same ticket. `applied` has every change that is in it, by the operation. */
struct state {
    uint64_t lineage, version, steps, weights, gradients;
    uint32_t backwards;
    uint32_t applied_count;
    uint16_t applied[APPLIED_MAX];
};

struct checkpoint {
    bool used, complete, adapter, explicit_load;
    uint32_t name, parent; /* 0 = none */
    uint64_t writer;       /* process */
    uint16_t op;           /* that writes it */
    struct moe_content content;
    uint64_t id, live, written; /* bits of slots */
    uint64_t weights[SLOTS_MAX];
    struct state state; /* of the lowest slot as the Save began */
    struct moe_ledger *records;
    uint64_t order; /* of completion */
};

/* ------------------------------------------------------------------------ operations */

enum op_kind { OP_FORWARD, OP_BACKWARD, OP_STEP, OP_ZERO, OP_SAVE, OP_LOAD, OP_EXPORT, OP_KINDS };

/* What a client wants done; the same however often it asks. */
struct op {
    enum op_kind kind;
    uint32_t client;
    uint64_t id, lineage; /* lineage 0 = any */
    struct moe_content content;
    uint32_t tokens, name;
    bool tidies;
    bool answered;  /* well, at least once */
    bool committed; /* SAVE, EXPORT: it is on the disk */
    uint64_t done_lineage, done_version, done_steps;
    /* BACKWARD: the processes with a part of its gradients; and they have been used, or dropped. */
    uint64_t holders[SLOTS_MAX];
    bool spent;
};

/* One asking. */
struct call {
    bool used, progress, cancelled, joined;
    uint16_t op;
    uint32_t attempt; /* of the client: an answer to an older one is ignored */
    uint64_t number, lineage;
    uint64_t id; /* progress: the job's */
    struct moe_content content;
    enum moe_step_kind kind;
    struct moe_work work; /* FORWARD; its `user` is the slot, of the others too */
    uint64_t served_by;   /* FORWARD: version that its first tokens saw */
};

/* --------------------------------------------------------------------------- events */

enum event_kind {
    /* To a slot's process, over a link. */
    E_WORK,   /* tokens wait */
    E_CALL,   /* a call waits */
    E_TICKET, /* run this */
    E_DONE,   /* has been run */
    E_SHARE,  /* what another slot brings to a ticket */
    /* To a slot's process. */
    E_ASKED,  /* a client asks */
    E_LEFT,   /* a client stops waiting */
    E_PART,   /* a share of a part has ended */
    E_ASK,    /* a progress ticket is still wanted */
    E_LOST,   /* a peer has gone */
    E_STOP,   /* the coordinator ends the view */
    E_JOINER, /* whether a process waits to join the view */
    E_PREPARE,
    E_ADOPT,
    E_READY_CHECK,
    E_COMMIT,
    E_READ,     /* read the state before the view forms */
    E_READ_END, /* the time that takes is over */
    E_CRASH,
    E_RESTART,
    /* To the coordinator. */
    E_COORDINATOR_LOST, /* a slot's process, or its view */
    E_DIGEST,
    E_READY,
    E_REGISTERED,
    E_READ_DONE,
    E_GROW, /* look whether the view can have more slots */
    /* Faults. */
    E_LINK,
    /* To a client. */
    E_THINK,
    E_ANSWER,
    E_TIMEOUT,
};

struct share { /* what one slot brings to a ticket */
    uint64_t seq, version, weights;
    bool waited; /* a caller waits at this slot for the job */
    struct moe_job_report report;
};

struct answer {
    enum moe_code code;
    enum moe_reason reason;
    uint64_t lineage, version, steps;
};

struct event {
    enum event_kind kind;
    uint32_t to, from;
    uint64_t process; /* that it is meant for; 0 = any */
    uint64_t epoch;
    uint64_t number; /* seq, attempt, or job */
    uint32_t tokens, op;
    bool ok;
    struct moe_step_key key;
    union {
        struct moe_ticket ticket;
        struct share share;
        struct answer answer;
        enum moe_job_part part;
        struct moe_train_digest digest;
        struct moe_saved_training saved;
    } u;
};

/* --------------------------------------------------------------------------- slots */

enum { LANES = 2 };

struct execution { /* a ticket that has begun */
    struct moe_ticket ticket;
    bool collective, run, repeat, changes, progress, joined, failed;
    struct moe_status refusal;
    struct call *call; /* ours */
    struct moe_segment segments[BUCKET];
    size_t segment_count;
    uint64_t version; /* as it began */
    uint16_t op;
};

struct part { /* a share that runs */
    bool runs, cancelled, reads_trainers;
    uint64_t job, weights;
};

struct slot {
    uint32_t index;
    bool alive;
    uint64_t process;
    uint64_t epoch, live;           /* of the view; 0 = none */
    uint64_t forming, forming_live; /* epoch that was prepared last, and its slots */
    uint64_t last_epoch;            /* of the last view in force here; 0 = none */
    struct moe_sequencer *sequencer;
    struct moe_batcher *batcher;
    struct moe_ledger *ledger;
    struct moe_job job;
    struct state state;
    uint32_t checkpoint; /* where recovery goes; 0 = the model */
    bool checkpoint_explicit_load;
    uint64_t unsaved;
    bool inconsistent;

    /* As in struct moe_train_digest. */
    uint64_t earlier, gradient_slots, unsettled, before;
    bool undefined;
    bool lost_call;    /* `earlier` has lost more than gradients */
    bool open;         /* gradients are lost, and no step has named the lineage since */
    bool joiner;       /* one waits */
    uint64_t released; /* calls of the state in which changes are not held */
    uint64_t reading;  /* the order to read a state ahead; 0 = none */
    struct moe_saved_training ahead; /* that state, once it is read */
    struct moe_ledger_call backward, change;
    char backward_session[MOE_TRAINING_NAME_MAX + 8];
    bool only_recorded;
    uint16_t begun_op;         /* can be finished here; 0 = none */
    uint64_t saved_calls;      /* of the ledger, when `checkpoint` had this state; 0 = never */
    uint16_t parts[PARTS_MAX]; /* Backward calls with gradients here, since the last step */
    uint32_t part_count;
    uint64_t view_processes[SLOTS_MAX];

    uint64_t served_version; /* of the weights, as requests know it */

    struct call *waiting[WAITING_MAX + PROGRESS_MAX]; /* training calls without a ticket */
    size_t waiting_count, progress_count;
    struct call *pending[CALLS_MAX]; /* callers of the job under way */
    size_t pending_count;
    uint64_t last_number, last_seq;
    uint64_t last_ordered[SLOTS_MAX]; /* numbers of calls that pass no other, by origin */
    struct moe_ticket tickets[TICKETS_MAX];
    size_t ticket_first, ticket_count;
    struct execution executions[LANES];
    size_t first_execution, execution_count;
    struct share shares[SEQ_RING][SLOTS_MAX];

    /* The job's own. */
    uint64_t job_lineage, job_calls;
    uint16_t job_op;
    struct state job_state; /* as it began */
    struct moe_ledger *job_records;
    uint64_t job_writer, job_live, copied_weights;
    bool job_met_orphan; /* an orphan ran as the job began */
    bool job_found, job_wrote;
    struct checkpoint taken; /* Load: what READ has seen */
    struct part part, orphan;
    uint64_t orphan_writer, orphan_live;
    uint16_t orphan_op;
    struct state orphan_state;
    struct moe_ledger *orphan_records;
    bool ready_waits;
    struct moe_train_recovery adopting;
};

struct client {
    uint16_t op;
    bool busy, waits, left;
    uint32_t attempt, slot;
    uint64_t lineage, next_backward, session;
    uint32_t thinking;
};

/* --------------------------------------------------------------------------- world */

struct totals {
    uint64_t inputs, crashes, links, views, restarts, answers, repeats, jobs, orphans, lost_states,
        without_copy, called_off, smaller_views, lost_gradients, joins, joins_ahead, finished;
};

struct world {
    uint64_t seed, now;
    struct rng random;
    bool quiet, trace;
    const char *broken; /* the promise that did not hold; NULL = all did */
    struct totals totals;

    uint32_t slot_count;
    struct slot slots[SLOTS_MAX];
    uint32_t slow_from, slow_to;                 /* the link of this run that is often slow */
    uint64_t link_free_at[SLOTS_MAX][SLOTS_MAX]; /* when its last message arrives */
    uint64_t link_epoch[SLOTS_MAX][SLOTS_MAX];   /* lost for messages of this epoch and before */
    uint64_t last_process;

    struct { /* the coordinator */
        uint64_t epoch;
        bool forming, in_force;
        uint64_t registered, reported, ready; /* bits of slots */
        uint64_t live;                        /* of the epoch that forms, or is in force */
        uint64_t members[SLOTS_MAX];          /* processes of the last view in force; 0 = none */
        uint64_t excluded, excluded_until;
        uint32_t copies;                           /* of each expert */
        bool grows;                                /* E_GROW is under way */
        struct {                                   /* slots that read the state before they join */
            struct moe_saved_training state;       /* of the members; "" = none is known */
            uint64_t asked, awaited, read, failed; /* bits of slots, as the coordinator has them */
            uint64_t last_order, first_order, orders[SLOTS_MAX], deadline;
        } join;
        struct moe_train_digest digests[MOE_MAX_SLOTS];
    } coordinator;

    struct checkpoint disk[CHECKPOINTS_MAX];
    uint64_t disk_order;

    struct op ops[OPS_MAX];
    uint32_t op_count;
    uint64_t last_id;
    struct client clients[CLIENTS];
    struct call calls[CALLS_MAX];

    struct { /* state of the first slot after a ticket */
        uint64_t epoch, hash;
    } after[SEQS_MAX];

    struct event *events; /* [event_capacity]; a pool */
    uint32_t *free_events;
    size_t event_capacity, free_count;
    struct timed {
        uint64_t at, order;
        uint32_t event;
    } * heap;
    size_t heap_count;
    uint64_t last_order;
};

/* world.c */
struct event *new_event(struct world *w, enum event_kind kind, uint32_t to);
void post(struct world *w, struct event *e, uint64_t delay);
uint64_t rnd(struct world *w, uint64_t below); /* 0 .. below - 1 */
bool chance(struct world *w, uint32_t permille);
bool fault(struct world *w, uint32_t permille); /* never once the world is quiet */
/* A promise. */
void check(struct world *w, bool holds, const char *promise);
#define TRACE(w, ...)                                                                              \
    do {                                                                                           \
        if ((w)->trace) {                                                                          \
            printf("%6llu ms  ", (unsigned long long)(w)->now);                                    \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)
/* One run; false when a promise broke. */
bool run_world(uint64_t seed, bool trace, struct totals *totals, char *why, size_t capacity);

/* group.c */
void send_to(struct world *w, uint32_t from, struct event *e);
void crash_slot(struct world *w, struct slot *s);
void start_slot(struct world *w, struct slot *s);
void lose_link(struct world *w, uint32_t a, uint32_t b);
void tell_coordinator_lost(struct world *w, const struct slot *s);
void coordinator_event(struct world *w, const struct event *e);
/* The state of a slot; "" = no checkpoint has it. */
struct moe_saved_training saved_of(const struct slot *s);
/* The number of a checkpoint in a digest; 0 = the model as loaded. */
uint32_t checkpoint_named(const char *text);
void form_event(struct world *w, struct slot *s, const struct event *e);

/* slot.c */
extern const char *const op_names[OP_KINDS];
void slot_event(struct world *w, struct slot *s, const struct event *e);
void begin_view(struct world *w, struct slot *s, uint64_t epoch, uint64_t live);
void end_view(struct world *w, struct slot *s);
void announce_calls(struct world *w, struct slot *s);
struct moe_status reforming(void);
/* The call's client is answered; `outcome` may be NULL after a failure. */
void end_call(struct world *w, struct slot *s, struct call *c, const struct moe_status *status,
              const struct moe_ledger_outcome *outcome);
/* What was asked for has happened: into the state and the ledger. */
void record_op(struct world *w, struct slot *s, uint16_t op, uint32_t origin,
               const struct moe_ledger_outcome *outcome);
const char *session_of(const struct world *w, uint16_t op);
/* Others have run a call that this slot lacks. */
void finish_op(struct world *w, struct slot *s, const struct moe_train_recovery *d);
/* The changes of the state that an end of a view has cut short. */
void abandon_op(struct world *w, struct slot *s, uint16_t op, uint32_t origin);
void hold_changes(struct slot *s);
/* A call waits for its ticket. */
void add_waiting(struct world *w, struct slot *s, struct call *c);
struct call *new_call(struct world *w, struct slot *s);

/* jobs.c */
void begin_job_execution(struct world *w, struct slot *s, struct execution *t);
void end_job_execution(struct world *w, struct slot *s, struct execution *t);
void job_event(struct world *w, struct slot *s, const struct event *e);
void give_up_job(struct world *w, struct slot *s);
void carry_out(struct world *w, struct slot *s, struct execution *t);
void stop_waiting(struct world *w, struct slot *s, const struct call *c);

/* state.c */
void reset_state(struct state *s);
uint64_t hash_state(const struct slot *s);
bool has_applied(const struct state *s, uint16_t op);
void apply(struct world *w, struct slot *s, uint16_t op);
struct checkpoint *find_checkpoint(struct world *w, uint32_t name, bool adapter);
struct checkpoint *find_hidden(struct world *w, uint64_t writer, uint32_t name, bool adapter);
void remove_checkpoint(struct world *w, struct checkpoint *c);
/* A share of a part has done its work: its effect on the disk. */
struct moe_job_end disk_part(struct world *w, struct slot *s, enum moe_job_part part,
                             const struct part *p, bool orphan);
void take_checkpoint(struct world *w, struct slot *s, const struct checkpoint *c);
void restart_state(struct world *w, struct slot *s, const struct moe_train_recovery *d);
/* The state has no gradients any more. */
void forget_gradients(struct slot *s);
void lose_gradients(struct world *w, struct slot *s, const struct moe_train_recovery *d);
void join_state(struct world *w, struct slot *s, const struct moe_train_recovery *d);
/* Before the view forms: first the state is gone; false if it could not be read. */
void begin_ahead(struct slot *s, const struct moe_saved_training *state);
bool read_ahead(struct world *w, struct slot *s, const struct moe_saved_training *state);
/* `checkpoint` has all of this state. */
bool is_saved(const struct slot *s);
void check_disk_at_end(struct world *w);

/* clients.c */
void client_event(struct world *w, const struct event *e);
void start_clients(struct world *w);

#endif
