/* SPDX-License-Identifier: Apache-2.0 */
/* The world of mask_sim: processes in slots, their windows, the notices between them,
 * and a coordinator that forms views. kernels/common/masks.c decides what a process believes. */
#ifndef MASK_SIM_WORLD_H
#define MASK_SIM_WORLD_H

#include "base/guard.h"
#include "common/masks.h"
#include "moe/window.h"

enum {
    SLOTS = 3,
    PROCESSES = 4, /* one may take the slot of another */
    SESSIONS = 3,
    FORMS = 7,   /* epochs */
    STEPS = 2,   /* most steps of an epoch */
    QUEUE = 8,   /* messages to a process */
    NOTICES = 24 /* from one process to another */
};

/* What a step does next, for each other slot of its view in turn. */
enum op {
    CLEAR, /* the first three: of the first step under a mask, in a quick world */
    STORE_CLEAR,
    READ_CLEAR,
    STORE_ROW,
    STORE_SENT,
    READ_HEAD,
    READ_SENT,
    READ_ROW,
    STORE_DONE,
    READ_DONE,
    OPS
};

/* A step that runs. Epochs are counted by `form`, from 1. */
struct run {
    bool active, other, differs, wrong;
    uint8_t op, peer, step, form, live, session;
    uint8_t member[SLOTS];
};

enum message_kind { PREPARE = 1, COMMIT, ABORT };

struct message {
    uint8_t kind, form, live, session;
    bool masks;
    uint8_t member[SLOTS]; /* process of each slot */
};

enum notice_kind { SPEAKS = 1, LEAVES, CLOSES, STORES };

struct notice {
    uint8_t kind, session, form, lost;
    uint8_t op, step, other; /* of STORES; op OPS: it has taken the mask */
};

struct process {
    bool used, dead, stopped;
    bool joined; /* has a session */
    bool meets;  /* waits for all slots of a new mask */
    bool met;
    bool clears; /* its next step does */
    bool over;   /* its view has ended here */
    uint8_t slot, session, form, live, committed, steps;
    uint8_t member[SLOTS];
    struct run run;
    uint8_t messages;
    struct message message[QUEUE];
};

/* How often each kind of event may still happen. */
struct limits {
    uint8_t kills, stops, resumes, timeouts, refills, others, drops;
};

struct world {
    uint8_t slots, steps; /* of this world */
    bool bare;            /* steps begin once all have met: there is no commit */
    bool far;             /* the numbers of epochs are far apart */
    bool narrow;          /* faults have one victim for each kind */
    bool lines;           /* stores travel over a network, on the lines of notices */
    bool quick; /* a row has no flag: it is there if it is not blank, and a read clears it */
    struct limits left;
    struct process process[PROCESSES];
    struct {
        uint64_t head[2], sent, done, met, clear;
        uint32_t row;
    } window[SESSIONS][SLOTS][SLOTS]; /* [session][owner][writer] */
    struct {
        bool forms, serves;
        bool kept; /* members may have the session still */
        uint8_t form, live, ready, sessions;
        uint8_t member[SLOTS]; /* processes that it knows */
        uint8_t lost;          /* slots without one */
        uint8_t session_live, session_member[SLOTS];
        bool masks;
    } coordinator;
    /* Observations, by epoch. */
    uint8_t outcome[FORMS + 1][STEPS + 1]; /* 0 = none */
    uint8_t live_of[FORMS + 1], blamed[FORMS + 1];
    bool committed[FORMS + 1];

    uint8_t notices[PROCESSES][PROCESSES];

    struct moe_masks masks[PROCESSES];
    struct notice notice[PROCESSES][PROCESSES][NOTICES]; /* [to][from] */
};

extern struct world w;
extern const char *broken; /* the promise; NULL = none */
extern enum moe_guard guard_off;
void check(bool holds, const char *promise);
uint64_t hash_of_world(void);

enum act {
    BEGIN, /* a step, of process a; b: it means another step than its peers */
    GO_ON,
    GIVE_UP, /* a wait has a cause to end */
    HANDLE,
    MEET,
    PART, /* the same for a wait for the others of a mask */
    DELIVER,
    SEE, /* the coordinator learns that a process is dead */
    FORM,
    FAULTS, /* the acts from here on need not happen */
    KILL = FAULTS,
    STOP,
    RESUME,
    SUSPECT,
    TIMEOUT,
    REFILL,
    DROP, /* a process without a view leaves the session that it has kept */
};
extern const char *const act_names[];

struct choice {
    uint8_t act, a, b, nth;
};
struct choices {
    size_t count;
    struct choice list[128];
};

/* What a world is like: the fields of struct world. */
struct kind {
    bool bare, far, lines, quick;
};
void create(uint8_t slots, uint8_t steps, struct kind kind, const struct limits *limits);
void find_choices(struct choices *to);
void apply(struct choice c);
/* Nothing is left to happen but faults. */
void check_rest(void);

/* process.c, for choices.c */
bool may_begin(const struct process *p);
void begin(struct process *p, bool other);
/* Whether the step's next operation can be done now, or waits. */
bool can_go_on(const struct process *p);
void go_on(struct process *p);
/* Whether a wait, in a step or for the others, has a cause to end. */
bool has_cause(const struct process *p);
void give_up(struct process *p, bool late);
bool can_meet(const struct process *p);
void meet(struct process *p, bool good);
void handle(struct process *p);
void drop_session(struct process *p);
/* `nth`: of what `from` has sent; not 0 only without LINES_KEEP_ORDER. */
void deliver(struct process *to, uint8_t from, uint8_t nth);
void die(struct process *p);
/* coordinator.c */
bool may_form(void);
void form(void);
void lose(uint8_t slot);
void report(uint8_t form, uint8_t lost);
void ready(const struct process *p, uint8_t form, bool good, bool kept);
void refill(uint8_t slot);

static inline uint8_t bit(uint8_t slot)
{
    return (uint8_t)(1u << slot);
}

static inline uint8_t number_of(const struct process *p)
{
    return (uint8_t)(p - w.process);
}

static inline uint64_t epoch_of(uint8_t form)
{
    return 1 + (uint64_t)form * (w.far ? UINT64_C(1) << MOE_WINDOW_EPOCH_BITS : 1);
}

static inline bool runs(const struct process *p)
{
    return p->used && !p->dead && !p->stopped;
}

void tell(uint8_t process, struct message m);

#endif
