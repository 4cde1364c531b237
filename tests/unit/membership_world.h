/* SPDX-License-Identifier: Apache-2.0 */
/* The world of test_membership_sim: a membership machine, the disk, streams and worker processes.
 * membership_world.c is the coordinator's side and checks each promise of the machine,
 * membership_workers.c the side of the workers. */
#ifndef MOE_TEST_MEMBERSHIP_WORLD_H
#define MOE_TEST_MEMBERSHIP_WORLD_H

#include "base/clock.h"
#include "base/guard.h"
#include "coordinator/membership.h"
#include "sim_stream.h"
#include "support/check.h"
#include "support/random.h"

enum {
    IDS_MAX = 7,
    PROCESSES_MAX = 400,
    EPOCHS_MAX = 4000,
    VERSIONS_MAX = 4000,
    STEP_MS = 5,
    LEASE_MS = 300,
    FORM_MS = 400,
    ATTEMPTS = 5,
    READ_MS = 400,  /* training waits for one that reads */
    NOTICE_MS = 30, /* peers miss a process after this long */
};

/* The guard that is switched off; MOE_GUARD_COUNT = none. */
extern enum moe_guard off;
extern const char *const guard_names[];

/* One worker process. */
struct process {
    bool alive, broken_loader;
    bool replaced; /* another process of the same worker had a slot after this one */
    uint32_t id;
    uint64_t incarnation;
    uint64_t asleep_until_ns; /* stopped by a signal */
    uint64_t gone_ns;         /* when it died or was stopped last */
    uint64_t stream;          /* 0 = none */
    bool coordinator_end;     /* the coordinator knows the stream and has not ended it */
    bool bad_stream_end;      /* the coordinator will learn of the end by the queue's last item */
    struct sim_queue up, down;
    uint64_t connect_at_ns, heartbeat_at_ns;
    bool registered, leaving;
    bool joiner;                                /* it knows that a process waits to join its view */
    uint64_t released;                          /* calls of the state that it need not hold */
    uint64_t read_done_ns, read_order, reading; /* it reads the state with these calls; 0 = none */
    uint32_t slot, loaded_slot, loaded_version;
    uint64_t load_done_ns;
    uint32_t load_version;
    uint32_t next_version, loading_next; /* the second share; 0 = none */
    uint64_t next_done_ns, load_order, next_order;
    uint64_t highest_epoch, preparing, committed;
    uint64_t session;  /* epoch in which the session was joined that it has kept; 0 = none */
    uint64_t mask;     /* of that session */
    uint64_t together; /* of it, as it was READY; 0 = it was not */
    uint64_t leave_at_ns;
};

struct world {
    uint64_t seed;
    struct rng random;
    uint64_t now_ns;
    uint32_t slots, replicas, ids, rounds; /* slots: workers that the group can have */
    bool elastic, shutting_down;
    uint64_t places; /* of the machine, as it was last seen */
    size_t scalings, scaled, undone, refused;
    uint64_t quiet_calls; /* of the state that is saved last, once the world is quiet */
    bool trains;          /* processes of a new view need the state of the last one */
    bool partial;         /* views may lack experts */
    /* By incarnation: calls of the last state that it has reported as saved, and that it has read.
     * 0 = none. */
    uint64_t saved[PROCESSES_MAX], has_read[PROCESSES_MAX];
    bool quiet, async_saves, verbose; /* verbose: the log is printed */
    bool busy;                        /* steps run in each view */
    struct moe_membership *machine;
    struct moe_membership_config config;
    struct moe_membership_saved durable;
    uint64_t pending_save, pending_save_at_ns;
    struct moe_membership_saved pending_state;
    uint64_t next_stream, next_incarnation;
    struct process *processes;
    size_t process_count;
    size_t current[IDS_MAX]; /* newest process of each id */
    uint64_t latest_of[IDS_MAX];
    uint64_t holders[MOE_PLACEMENT_SLOTS_MAX];      /* incarnation in each slot; 0 = none */
    uint64_t last_holders[MOE_PLACEMENT_SLOTS_MAX]; /* also after it is lost */
    uint64_t respawn_at_ns[IDS_MAX];
    bool exited, crash_now;
    /* Observations of each epoch. */
    struct {
        uint64_t members[MOE_PLACEMENT_SLOTS_MAX]; /* incarnations that got PREPARE */
        uint64_t ready[MOE_PLACEMENT_SLOTS_MAX];
        uint64_t committed[MOE_PLACEMENT_SLOTS_MAX];
        uint64_t live;    /* slots that got PREPARE */
        uint32_t version; /* of the placement */
        bool prepared, aborted, in_force;
        uint64_t session, mask; /* Prepare.session_epoch; of a joined one: its last mask */
    } epochs[EPOCHS_MAX];
    uint64_t contents[VERSIONS_MAX]; /* hash of each version of the placement; 0 = not seen */
    uint64_t last_live;              /* of the epoch that was committed last */
    uint64_t grown; /* views that have ended for a larger one, since the machine started */
    uint64_t last_epoch;
    bool had_view;      /* since the machine started; in the log counts too */
    uint64_t joined_ns; /* a worker took a slot, or the machine started */
    size_t masked, masks_ended, lacking;
    uint64_t round_trip_ns; /* of heartbeats, as workers say; 0: they do not answer PREPARE */
    uint32_t domain;        /* slots that masks have together; 0: sessions take no masks */
    size_t reads, joins;    /* orders to read; views with a worker that has read */
    size_t kept, unkept;    /* views that kept a session; masks that a worker could not take */
    size_t learnt;          /* views that kept one that was joined under an earlier coordinator */
    uint64_t first_epoch;   /* lowest epoch of the running machine */
    uint64_t highest_prepared;
    uint32_t tries; /* epochs prepared since a worker came or a view lasted */
    uint64_t commit_ns;
    size_t commits, crashes, restores, adoptions;
    /* Cordons as the operator knows them: bits of `cordons_known` are durable. */
    uint64_t cordoned, cordons_known;
    size_t cordons;
    uint64_t restored_epoch; /* the log held this view when the machine started; 0 = none */
};

/* Of slot `s` in the session that was joined in this epoch: Ready.together. */
uint64_t together_in(const struct world *w, uint64_t session, uint32_t s);
/* Ends the run with the promise unless it `holds`. */
void check(const struct world *w, bool holds, const char *promise);
/* A number below `below`; true once in `in` times, and never once the world is quiet. */
uint64_t rnd(struct world *w, uint64_t below);
bool chance(struct world *w, uint64_t in);
/* Sends `m` with a delay. */
void push(struct world *w, struct sim_queue *q, struct sim_message m);

/* Slots that hold experts. */
uint64_t all_slots(const struct world *w);
/* Slots that can serve after a view. */
bool suffice(const struct world *w, uint64_t live);
/* From what is durable. */
void start_machine(struct world *w);
/* After each input: carries out the machine's actions, and checks them. The machine may crash. */
void carry_out(struct world *w);
/* A message of `p` reaches the machine. */
void deliver_up(struct world *w, struct process *p, const struct sim_message *m);

/* Another process of worker `id` starts. */
void spawn(struct world *w, uint32_t id);
void end_process(struct world *w, struct process *p);
/* The number of a time in which somebody saves, if it is odd. */
uint64_t save_window(const struct world *w);
void put_to_sleep(const struct world *w, struct process *p, uint64_t ms);
bool is_running(const struct world *w, const struct process *p);
/* Messages from and to the process, its timers, and faults. */
void step_process(struct world *w, struct process *p);

#endif
