/* SPDX-License-Identifier: Apache-2.0 */
/* The world of ring_sim: two clients, their rings and memory, and a model of the daemon. */
#ifndef RING_SIM_WORLD_H
#define RING_SIM_WORLD_H

#include "base/status.h"
#include "regions/caller.h"
#include "regions/checks.h"
#include "regions/device_caller.h"
#include "regions/registry.h"
#include "regions/server.h"
#include "schedule/completion.h"

#include "moe/types.h"

enum {
    CLIENTS = 2,
    HONEST = 0, /* this client keeps the rules, CLIENTS - 1 does not */
    ROGUE = 1,
    PARTS = 2, /* tokens of a request; each is a part where a request has several */
    STEPS = 2,
    JOBS = 4,
    CELLS = 16,   /* of a client's memory, 4 bytes each: 32 bytes of x and y for each entry */
    BAD = 1 << 30 /* a row that the daemon's checks refuse */
};

enum part_state { PART_QUEUED, PART_RUNS, PART_ENDED };

/* A request that the daemon has taken. */
struct job {
    bool used, failed, cancelled;
    uint8_t parts, client, entry;
    uint32_t use;
    enum part_state part[PARTS];
    struct moe_ring_tensor tensors[MOE_RING_ROLES];
    void *at[MOE_RING_ROLES];
    bool has_snapshot[PARTS];
    uint32_t snapshot[PARTS];  /* the rows in the lane, and in host memory when a view has ended */
    struct moe_ring_good good; /* what the device stores */
    bool completed;            /* the device has, and the daemon knows it: the receipt */
};

enum step_state { STEP_NONE, STEP_RUNS, STEP_GOOD, STEP_BAD_TOKEN, STEP_ABORTED, STEP_LATE_ROWS };

struct step {
    enum step_state state;
    bool aborting, forgotten; /* its view ended; the host does not wait for it */
    bool completes;           /* it carries the job's completion */
    uint8_t job, part;
    uint32_t order;
};

/* How often each kind of event may still happen. */
struct limits {
    uint8_t requests[CLIENTS], rogue_writes, aborts, bad_tokens, releases, deaths, kicks, closes,
        registrations;
};

struct client {
    bool dead, registered, closing, saw_end;
    uint32_t region, alias, ring; /* numbers; 0 = none */
    uint8_t made;                 /* requests */
    uint32_t value[MOE_RING_ENTRIES];
};

struct world {
    struct limits left;
    uint8_t parts;
    bool has_device, daemon_dead, view;
    bool excused; /* something has happened for which a request may fail */
    struct client clients[CLIENTS];
    struct moe_ring_caller callers[CLIENTS];
    bool by_device;  /* the honest client's device submits and waits */
    bool one_memory; /* the honest client has one x and one y for all entries, in turns */
    struct moe_ring_device_entry lanes[MOE_RING_ENTRIES];
    uint32_t memory[CLIENTS][CELLS];
    bool lent[CELLS]; /* of the honest client: the daemon may write */
    struct moe_ring rings[CLIENTS];
    /* the daemon */
    struct moe_ring_server servers[CLIENTS];
    struct moe_regions regions;
    bool mapped[CLIENTS][2]; /* the region and its alias */
    bool ring_mapped[CLIENTS], joined[CLIENTS], leaving[CLIENTS];
    uint32_t order, unmapped; /* number of the region that is being unmapped; 0 = none */
    struct job jobs[JOBS];
    struct step steps[STEPS];
};

/* The world itself. It has no pointers but those into itself, and its place is fixed. So a copy of
 * its bytes is a state to return to, and a hash of them tells a state that was seen. */
extern struct world w;
extern const char *broken; /* the first promise that did not hold */

/* The guard that is switched off; MOE_GUARD_COUNT: none. */
extern enum moe_guard guard_off;

/* ---------------------------------------------------------------------- world.c */

/* Remembers `promise` as broken unless it holds. */
void check(bool holds, const char *promise);
/* The memory of a client: CELLS cells. */
void *base_of(uint32_t client);
/* A client registers its memory, or its memory again under another name. */
void add_region(uint32_t c, bool is_alias);
/* How a world is made. */
struct kind {
    uint8_t parts;   /* of each request */
    bool has_device; /* the daemon has one, which completes requests */
    bool by_device, one_memory;
};
void create(const struct limits *limits, const struct kind *kind);

/* --------------------------------------------------------------------- daemon.c */

/* What a layer computes from a row. */
uint32_t layer_of(uint32_t x);
/* Takes the next request of a client's ring, if there is one and a job is free. */
void take(uint32_t client);
/* A part of a job goes into step `s`. A request has one part, of all its tokens, or one per token.
 */
void begin(uint32_t job, uint32_t part, struct step *s);
/* The device ends a step. */
void finish(struct step *s, enum step_state outcome);
/* The host sees the end of a step. */
void reap(struct step *s);
/* Nothing of the job is left to run, so it may be settled: its client gets the result. */
bool is_settled(const struct job *j);
void settle(struct job *j);
/* The view of the group ends, and its steps with it. A new one may form once no step is left. */
void end_view(void);
bool may_form(void);
/* The daemon lets go of a client; and unmaps one region that is not in use, in two acts. */
void leave(uint32_t client);
void unmap(void);

/* -------------------------------------------------------------------- clients.c */

/* The rogue's requests, and what it writes over them. */
enum rogue {
    ROGUE_GOOD,
    ROGUE_PAST_END,
    ROGUE_WRAPS,
    ROGUE_FOREIGN,
    ROGUE_OVERLAP,
    ROGUE_ALIAS,
    ROGUE_REQUESTS
};

/* The rows of x of an entry; those of y follow 4 cells later. */
uint32_t *x_of(uint32_t client, uint32_t entry);
/* Of the honest client: the daemon may write y of this entry, or may no longer. */
void lend(uint32_t entry, bool lent);
void submit(uint32_t entry);
bool is_free(uint32_t entry);
/* The memory of an entry is the honest client's: no request uses it. */
bool memory_is_free(uint32_t entry);
/* Checks the result of an entry, if it has come. */
void poll_result(uint32_t entry);
struct moe_ring_request rogue_request(enum rogue kind, uint32_t entry);

/* -------------------------------------------------------------------- choices.c */

enum act {
    /* of the daemon */
    TAKE,
    BEGIN,
    FINISH,
    REAP,
    SETTLE,
    FORM,
    LEAVE,
    UNMAP,
    FORGET,
    /* of the honest client */
    SUBMIT,
    POLL,
    REUSE,
    SEE_END,
    WATCH,
    REGISTER,
    FAULTS, /* those below may happen, and need not */
    END_VIEW = FAULTS,
    BAD_TOKEN,
    RELEASE,
    CLIENT_DIES,
    DAEMON_DIES,
    KICK,
    CLOSE,
    ROGUE_SUBMIT,
    ROGUE_OVERWRITE,
    ROGUE_BAD_ROW,
    ROGUE_REGISTER,
};

/* An act with its client, entry, job or step (a), and what it does there (b). */
struct choice {
    uint8_t act, a, b;
};

struct choices {
    struct choice list[96];
    size_t count;
};

extern const char *const act_names[]; /* of enum act */

/* All that may happen next. */
void find_choices(struct choices *to);
void apply(struct choice c);
/* Checks a world where nothing is left to happen but faults. */
void check_rest(void);

#endif
