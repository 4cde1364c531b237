/* What the files of the peers share: their state, and the functions that cross from one file into
 * another (moe_peers__*). Nobody else includes this. */
#ifndef MOE_WORKER_PEERS_STATE_H
#define MOE_WORKER_PEERS_STATE_H

#include "worker/mailbox.h"
#include "worker/peers.h"
#include "worker/sequencer.h"
#include "worker/wire.h"

#include <pthread.h>

enum { ENDPOINT_BYTES = 256 };

enum phase {
    IDLE,
    EXPECTED, /* peers may join and announce */
    STARTED,  /* tickets are issued and run */
};

enum role {
    SEQUENCER, /* this worker's own sequencer decides */
    MEMBER,    /* a peer's does */
};

struct notice {
    struct moe_sequencer_key key;
    uint32_t tokens;
};

struct call_notice {
    struct moe_ticket call;
    uint32_t tokens;
};

struct moe_peers {
    struct moe_peers_config config;

    pthread_mutex_t lock; /* guards everything below */
    enum phase phase;
    enum role role;             /* meaningless while IDLE, as is what follows */
    struct moe_peers_view view; /* endpoints are not kept */
    char sequencer_endpoint[ENDPOINT_BYTES];
    uint32_t sequencer_slot;

    /* SEQUENCER */
    struct moe_sequencer *sequencer;
    uint64_t joined;                           /* bit s: slot s has said hello; own bit set */
    struct moe_rpc_call *calls[MOE_MAX_SLOTS]; /* of those that joined; one hold each */

    struct moe_mailbox *mailbox;           /* of this view; NULL: everything comes by the streams */
    struct moe_post *posts[MOE_MAX_SLOTS]; /* SEQUENCER: mailboxes of members; MEMBER: that of the
                                              sequencer; NULL: the way there is the stream */

    /* MEMBER */
    struct moe_rpc_channel *channel;
    struct moe_rpc_stream *stream; /* set when started */
    bool welcome; /* the sequencer has answered: the way to it is known, and stays */
    struct notice notices[MOE_SEQUENCER_KEYS]; /* not yet sent, merged by key */
    size_t notice_count;
    struct call_notice call_notices[MOE_SEQUENCER_CALLS]; /* not yet sent, in order */
    size_t call_notice_count;
};

extern const char moe_peers__path[]; /* of WorkerService.Sequence */

/* Everything below: lock held. */

/* The view cannot go on; see moe_peers_config.lost. */
void moe_peers__lost(struct moe_peers *p, uint64_t slots, struct moe_status why);
void moe_peers__lose_slot(struct moe_peers *p, uint32_t slot, struct moe_status why);
/* The mailbox that a peer names, to write as this slot; NULL where it cannot be seen from here,
 * which is no failure: the stream is there. */
struct moe_post *moe_peers__open_post(const struct moe_peers *p, const Moe__V1__Mailbox *named);
/* Reads what has come by mail; on a member, only once it knows how to answer. */
void moe_peers__read_mail(struct moe_peers *p);

/* From peers_member.c. */
/* Opens the stream and says hello; may fail, and nothing is left then. */
struct moe_status moe_peers__open_stream(struct moe_peers *p) MOE_CHECKED;
/* One message of the sequencer that came by mail. */
void moe_peers__read_order(struct moe_peers *p, const uint8_t *bytes, size_t length,
                           struct moe_rpc_arena *arena);
/* Tokens that wait here, to be sent when that is possible. */
void moe_peers__add_notice(struct moe_peers *p, const struct moe_sequencer_key *key,
                           uint32_t tokens);
/* Sends notices that wait, as far as there is room. */
void moe_peers__send_notices(struct moe_peers *p);
void moe_peers__send_done(struct moe_peers *p, uint64_t seq, const struct moe_status *status);

#endif
