/* SPDX-License-Identifier: Apache-2.0 */
/* The state that the files of the peers share, and the functions that cross from one file into
 * another (moe_peers__*). Private to this room. */
#ifndef MOE_LINKS_PEERS_STATE_H
#define MOE_LINKS_PEERS_STATE_H

#include "base/mutex.h"
#include "links/beats.h"
#include "links/peers.h"
#include "links/pulse.h"
#include "links/shm_ring.h"
#include "links/wire.h"
#include "schedule/sequencer.h"

enum {
    TICKETS_TIMED = 2 * MOE_SEQUENCER_IN_FLIGHT, /* none in flight is overwritten */
};

enum phase {
    IDLE,
    EXPECTED, /* peers may join and announce */
    STARTED,  /* tickets are issued and run */
};

enum role {
    SEQUENCER, /* this worker runs the sequencer of the view */
    MEMBER,    /* a peer runs it */
};

struct notice {
    struct moe_step_key key;
    uint32_t tokens;
};

struct call_notice {
    struct moe_ticket call;
    uint32_t tokens;
};

struct moe_peers {
    struct moe_peers_config config;
    struct moe_pulse *pulse; /* watches `writers`, reads `reader` until its end */

    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        enum phase phase;
        enum role role;             /* undefined while IDLE, like all fields below */
        struct moe_peers_view view; /* without endpoints */
        uint32_t sequencer_slot;
        /* When ticket n was sent (SEQUENCER), or came in (MEMBER): at [n % TICKETS_TIMED]. */
        uint64_t ticket_ns[TICKETS_TIMED];

        /* SEQUENCER */
        struct moe_sequencer *sequencer;
        uint64_t joined;                           /* bit s: slot s has said hello; own bit set */
        struct moe_rpc_call *calls[MOE_MAX_SLOTS]; /* of joined slots; one reference each */

        struct moe_shm_reader *reader; /* of this view; NULL: all messages come by the streams */
        /* SEQUENCER: to members; MEMBER: to the sequencer. NULL: messages go by the stream. */
        struct moe_shm_writer *writers[MOE_MAX_SLOTS];
        /* Of the same peers, those without a writer that understand beats. */
        uint64_t beating; /* bit s: slot s */
        struct moe_beats beats[MOE_MAX_SLOTS];
        uint32_t turns; /* of the pulse's thread */

        /* MEMBER */
        struct moe_rpc_channel *channel; /* to the sequencer; connects since the view is expected */
        struct moe_rpc_stream *stream;   /* set when started */
        bool welcome; /* the sequencer has answered hello: ring or stream is decided */
        struct notice notices[MOE_SEQUENCER_KEYS]; /* not yet sent, merged by key */
        size_t notice_count;
        struct call_notice call_notices[MOE_SEQUENCER_CALLS]; /* not yet sent, in order */
        size_t call_notice_count;
    };
};

extern const char moe_peers__path[]; /* of WorkerService.Sequence */

/* From peers_common.c. */

/* The view cannot go on; see moe_peers_config.lost. */
void moe_peers__lost(struct moe_peers *p, uint64_t slots, struct moe_status why)
    MOE_REQUIRES(p->lock);
void moe_peers__lose_slot(struct moe_peers *p, uint32_t slot, struct moe_status why)
    MOE_REQUIRES(p->lock);
/* Opens this slot's ring at the peer in `slot`, and watches its beats. NULL if it is not visible
 * from here; messages then use the stream. */
struct moe_shm_writer *moe_peers__open_writer(const struct moe_peers *p, uint32_t slot,
                                              const Moe__V1__ShmRings *named) MOE_REQUIRES(p->lock);
/* Calls `read` for each message in the ring of `slot`. */
typedef void (*moe_peers__read_fn)(struct moe_peers *p, uint32_t slot, const uint8_t *bytes,
                                   size_t length, struct moe_rpc_arena *arena);
void moe_peers__read_ring(struct moe_peers *p, uint32_t slot, moe_peers__read_fn read,
                          struct moe_rpc_arena *arena) MOE_REQUIRES(p->lock);

/* The peer in `slot` has answered hello, or has said it: beats go there from now on if it is on
 * another host and understands them, and if the group may do without it. */
void moe_peers__begin_beats(struct moe_peers *p, uint32_t slot, bool understands)
    MOE_REQUIRES(p->lock);
void moe_peers__receive_beat(struct moe_peers *p, uint32_t slot, const Moe__V1__Beat *beat)
    MOE_REQUIRES(p->lock);
/* For moe_pulse_create. */
void moe_peers__turn(void *ctx);

/* From peers_member.c. */
/* A connection to the sequencer. It takes up to two round trips, in which the view forms. */
struct moe_status moe_peers__connect(const struct moe_peers *p, const char *endpoint,
                                     struct moe_rpc_channel **out) MOE_CHECKED;
/* Opens the stream and says hello. A failure leaves nothing open. */
struct moe_status moe_peers__open_stream(struct moe_peers *p) MOE_REQUIRES(p->lock) MOE_CHECKED;
/* Reads tickets from the sequencer's ring. Does nothing before `welcome`, which says how to
 * answer. */
void moe_peers__read_tickets(struct moe_peers *p) MOE_REQUIRES(p->lock);
/* Queues a notice of `tokens` that wait on this slot. */
void moe_peers__add_notice(struct moe_peers *p, const struct moe_step_key *key, uint32_t tokens)
    MOE_REQUIRES(p->lock);
/* Sends queued notices while there is room. */
void moe_peers__send_notices(struct moe_peers *p) MOE_REQUIRES(p->lock);
void moe_peers__send_done(struct moe_peers *p, uint64_t seq, const struct moe_status *status)
    MOE_REQUIRES(p->lock);

#endif
