/* SPDX-License-Identifier: Apache-2.0 */
/* Carries tickets between workers. Every worker offers moe.v1.WorkerService. In a view, the live
 * worker with the lowest slot runs the sequencer; each other worker keeps one stream to it. Work
 * notices and finished steps go to the sequencer, and tickets come back. No message waits for a
 * timer.
 *
 * Workers that see each other's processes on one host (links/shared.h) exchange the addresses of
 * their shared-memory rings when the stream opens. From then on messages go through the rings, in
 * the same order. Each direction is independent. The stream stays open: it shows that the peer
 * lives.
 *
 * The sequencer's own worker takes part without gRPC. A stream that breaks during a view is
 * reported as evidence of a lost peer; other rooms decide what follows. */
#ifndef MOE_LINKS_PEERS_H
#define MOE_LINKS_PEERS_H

#include "daemon/identity.h"
#include "links/eventcount.h"
#include "schedule/ticket.h"

struct moe_histogram;
struct moe_lease_gate;
struct moe_peers;
struct moe_rpc_client;
struct moe_rpc_method;

struct moe_peers_config {
    struct moe_rpc_client *client;     /* borrowed */
    struct moe_rpc_trust trust;        /* for the link to the sequencer; borrowed strings */
    uint64_t incarnation;              /* of this process */
    uint32_t training_permille;        /* see moe_sequencer_set_share; 0 = its default */
    struct moe_eventcount *eventcount; /* of the thread that calls moe_peers_listen; borrowed.
                                          NULL: peers reach this worker over gRPC only */
    /* Of a group that trains: without a lease no ticket is issued, and none that changes anything
     * unless all members have one for long enough. NULL: none is needed. Borrowed. */
    const struct moe_lease_gate *lease;
    /* Asked before tickets are issued: what of training waits (moe_sequencer_hold). NULL: nothing.
     * Must not call back. */
    enum moe_hold (*find_hold)(void *ctx);
    /* Of the sequencer: seconds from a ticket to the StepDone of a slot, without the time that the
     * slot had the ticket. NULL: not measured. Borrowed. */
    struct moe_histogram *ticket_seconds;
    /* Run this ticket. Called in order of seq, from any thread, one at a time; must not call back.
     */
    void (*run)(void *ctx, const struct moe_ticket *ticket);
    /* The view of `epoch` cannot go on: the peers in `slots` (bit s: slot s) are gone or broke the
     * protocol. `slots` is 0 if the step failed for another reason. Any thread; must not call back.
     */
    void (*lost)(void *ctx, uint64_t epoch, uint64_t slots, struct moe_status why);
    void *ctx;
};

struct moe_peer {
    uint64_t incarnation;
    const char *endpoint; /* "host:port" */
    bool elsewhere;       /* on another host, whatever this worker can see of its processes */
};

/* A view that the coordinator has PREPAREd. */
struct moe_peers_view {
    uint64_t epoch;
    uint64_t live;           /* bit s: slot s is a member; the own bit is set */
    uint32_t slot;           /* own */
    uint32_t max_bucket;     /* a power of two */
    uint32_t max_bucket_f32; /* of forward steps of F32 tokens: at most max_bucket; 0 = the same */
    uint8_t secret[16];      /* of the epoch; callers of Sequence show it */
    bool may_shrink; /* the group can go on without some slots: a peer that has stopped is lost soon
                        (pulse.h, beats.h). Else its return is awaited in each step */
    struct moe_peer members[MOE_MAX_SLOTS]; /* of live slots; strings are copied */
};

struct moe_status moe_peers_create(const struct moe_peers_config *config,
                                   struct moe_peers **out) MOE_CHECKED;
/* After the rpc server was stopped. NULL is ignored. */
void moe_peers_destroy(struct moe_peers *p);

/* WorkerService.Sequence for the rpc server; its ctx is `p`. */
void moe_peers_method(struct moe_peers *p, struct moe_rpc_method *out);

/* Accepts peers of this view from this call on, because a peer may commit before this worker does.
 * A member begins to connect to the sequencer. No ticket is issued or run yet. Ends the previous
 * view. */
struct moe_status moe_peers_expect(struct moe_peers *p,
                                   const struct moe_peers_view *view) MOE_CHECKED;
/* The expected view is committed. A member opens the stream to the sequencer; the sequencer issues
 * tickets as soon as all peers have joined. Call it when the engine runs tickets of the view. */
struct moe_status moe_peers_start(struct moe_peers *p) MOE_CHECKED;
/* Ends the view, if any. After it returns, no callback of the view is made. Not from `run` or
 * `lost`. */
void moe_peers_stop(struct moe_peers *p);

/* For moe_engine_config.listen: reads the messages that peers of this host have written to the
 * worker's rings, and acts on them. After each notification of the eventcount; may call `run`. */
void moe_peers_listen(struct moe_peers *p);

/* For moe_engine_config.announce. Any thread, without the engine's lock, because it may call `run`.
 * Ignored while no view is expected: the engine announces everything again when a view starts. */
void moe_peers_announce(struct moe_peers *p, uint32_t layer, enum moe_step_kind kind,
                        enum moe_dtype dtype, uint32_t tokens);
/* For moe_engine_config.heartbeat, in the same way. Only the sequencer acts on it. */
void moe_peers_beat(struct moe_peers *p, uint32_t layer);
/* [any thread] The group is to serve an added model, or not any longer: the sequencer of `epoch`
 * issues a ticket. Does nothing on a member, or in another epoch. */
void moe_peers_change_model(struct moe_peers *p, uint64_t epoch, uint32_t model, bool serve);
/* The same for the version of the placement: the sequencer issues a ticket SWAP_PLACEMENT. */
void moe_peers_swap_placement(struct moe_peers *p, uint64_t epoch, uint32_t version);
/* The same for moe_engine_config.announce_training. */
void moe_peers_announce_training(struct moe_peers *p, const struct moe_ticket *call,
                                 uint32_t tokens);
/* For moe_engine_config.block_weight_updates. */
void moe_peers_block_weight_updates(struct moe_peers *p, bool block);
/* For moe_engine_config.finished: any thread, in order of seq; may call `run`. */
void moe_peers_finished(struct moe_peers *p, const struct moe_ticket *ticket,
                        const struct moe_status *status);

#endif
