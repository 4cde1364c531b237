/* How tickets travel: every worker offers moe.v1.WorkerService; in a view, the live worker with the
 * lowest slot runs the sequencer, and the others keep one stream each to it. Work notices and
 * finished steps go to the sequencer, tickets come back, each at once; nothing waits for a timer.
 *
 * Workers that see each other's processes on one host (worker/shared.h) tell each other of their
 * mailboxes when the stream opens, and send by mail from then on, each way for itself: the same
 * messages, in the same order, without a socket and its threads in between. The stream stays, as
 * the evidence that the peer lives.
 *
 * The sequencer's own worker takes part without gRPC. A stream that breaks during a view is
 * reported as evidence of a lost peer; what follows from it is decided elsewhere. */
#ifndef MOE_WORKER_PEERS_H
#define MOE_WORKER_PEERS_H

#include "rpc/client.h"
#include "rpc/server.h"
#include "worker/bell.h"
#include "worker/engine.h"

struct moe_peers;

struct moe_peers_config {
    struct moe_rpc_client *client; /* borrowed */
    uint64_t incarnation;          /* of this process */
    uint32_t training_permille;    /* see moe_sequencer_set_share; 0 = its default */
    struct moe_bell *bell; /* of the thread that calls moe_peers_listen; borrowed. NULL: peers
                              reach this worker over gRPC only */
    /* Run this ticket. Called in order of seq, from any thread, one at a time; must not call back.
     */
    void (*run)(void *ctx, const struct moe_ticket *ticket);
    /* The view of `epoch` cannot go on: these peers (bit s: slot s; may be none, where the step
     * failed for another reason) are gone or broke the protocol. Any thread; must not call back. */
    void (*lost)(void *ctx, uint64_t epoch, uint64_t slots, struct moe_status why);
    void *ctx;
};

struct moe_peer {
    uint64_t incarnation;
    const char *endpoint; /* "host:port" */
};

/* What the coordinator has PREPAREd. */
struct moe_peers_view {
    uint64_t epoch;
    uint64_t live;                          /* bit s: slot s is a member; the own bit is set */
    uint32_t slot;                          /* own */
    uint32_t max_bucket;                    /* a power of two */
    struct moe_peer members[MOE_MAX_SLOTS]; /* of live slots; strings are copied */
};

struct moe_status moe_peers_create(const struct moe_peers_config *config,
                                   struct moe_peers **out) MOE_CHECKED;
/* After the rpc server was stopped. NULL is ignored. */
void moe_peers_destroy(struct moe_peers *p);

/* WorkerService.Sequence for the rpc server; its ctx is `p`. */
void moe_peers_method(struct moe_peers *p, struct moe_rpc_method *out);

/* From now on peers of this view are welcome, because theirs may be committed before ours; no
 * ticket is issued or run yet. Ends the previous view. */
struct moe_status moe_peers_expect(struct moe_peers *p,
                                   const struct moe_peers_view *view) MOE_CHECKED;
/* The expected view is committed: opens the stream to the sequencer, or, on the sequencer, issues
 * tickets as soon as all peers have joined. Call it when the engine runs tickets of the view. */
struct moe_status moe_peers_start(struct moe_peers *p) MOE_CHECKED;
/* Ends the view, if any: no ticket is run and nothing is reported once this has returned. Not from
 * `run` or `lost`. */
void moe_peers_stop(struct moe_peers *p);

/* For moe_engine_config.listen: reads what peers of this host have put into the worker's mailbox,
 * and does what follows from it. After each ring of the bell; may call `run`. */
void moe_peers_listen(struct moe_peers *p);

/* For moe_engine_config.announce: any thread, with the engine's locks held. Ignored while no view
 * is expected: the engine announces everything again when a view starts. */
void moe_peers_announce(struct moe_peers *p, uint32_t layer, enum moe_step_kind kind,
                        enum moe_dtype dtype, uint32_t tokens);
/* The same for moe_engine_config.announce_training. */
void moe_peers_announce_training(struct moe_peers *p, const struct moe_ticket *call,
                                 uint32_t tokens);
/* For moe_engine_config.hold. */
void moe_peers_hold(struct moe_peers *p, bool hold);
/* For moe_engine_config.finished: any thread, in order of seq; may call `run`. */
void moe_peers_finished(struct moe_peers *p, const struct moe_ticket *ticket,
                        const struct moe_status *status);

#endif
