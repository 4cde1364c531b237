/* SPDX-License-Identifier: Apache-2.0 */
/* What shares.c (bytes, the line), places.c (number of streams) and upload.c (what they bring)
 * share; only these include it. Functions without another mark need the budget's lock. */
#ifndef MOE_UPLOADS_STATE_H
#define MOE_UPLOADS_STATE_H

#include "uploads/upload.h"

enum {
    MOE_RPC_UPLOAD_BUCKETS = 64,
    MOE_RPC_FILLED_BYTES = MOE_RPC_LOOKAHEAD_BYTES / 2, /* of a large message, before its turn */
};

/* Guarded by the budget's lock, except what never changes. */
struct moe_rpc_uploads {
    struct moe_rpc_budget *budget;
    struct moe_rpc_payer *payer;
    LIST_ENTRY(moe_rpc_uploads) member; /* of the payer */
    struct moe_rpc_account account;
    void *connection;
    uint32_t references; /* the connection, and each upload */
    uint32_t open;       /* uploads in `streams`; 0 of one that ends */
    bool ends;           /* it has given way */
    LIST_HEAD(, moe_rpc_upload) streams[MOE_RPC_UPLOAD_BUCKETS];
};

struct moe_rpc_upload {
    struct moe_rpc_uploads *of;
    LIST_ENTRY(moe_rpc_upload) link; /* in `of->streams` while `listed` */
    uint32_t stream;
    uint32_t references; /* listed; the call */
    bool listed, half_closed;

    /* The stream as a row of messages: a prefix of 5 bytes, then its bytes. */
    uint8_t prefix[5];
    uint32_t prefix_length; /* bytes of the next prefix that are here */
    uint64_t left;          /* bytes of the current message that are not */
    uint64_t bytes;         /* of all messages and prefixes */
    uint64_t begun, read;   /* prefixes that are here; messages delivered */
    uint64_t length;        /* of the last one that has begun, with its prefix */
    uint64_t longest;       /* of all that have begun, with its prefix */
    uint64_t too_large_at;  /* the first message over the limit, counted from 1; 0 = none */

    uint64_t charged[MOE_RPC_SORTS]; /* small messages that were not delivered; the large one that
                                        is read, 0 = none */
    bool refused;                    /* a message found no room, or the call is over */

    void *waiter;     /* the call; NULL before it has begun, and when it is over */
    uint64_t largest; /* message of the call */
    bool waits;       /* the call has asked, and has no answer */
    bool slow;        /* it was failed for its rate */
    bool reads;       /* it may read its message, which was not delivered: in `reading` */
    TAILQ_ENTRY(moe_rpc_upload) reading;
    struct {                        /* of the message that is read */
        uint64_t checked_ns, bytes; /* 0 = not checked yet */
        int64_t credit_ns;
    } rate;

    bool in_line; /* in the budget's line: the fields below */
    uint64_t since_ns;
    uint64_t wanted; /* bytes */
    TAILQ_ENTRY(moe_rpc_upload) line;
};

/* Answers that are given once the lock is released. The rest stay as they are until the next
 * message is delivered, or the next check. */
enum { MOE_RPC_WOKEN_MAX = 16, MOE_RPC_READ = MOE_RPC_REFUSALS };
struct moe_rpc_woken {
    const struct moe_rpc_upload *asker; /* its call is on the way: it gets no answer */
    uint32_t count, retry_ms;
    struct {
        void *waiter;
        int answer; /* MOE_RPC_READ, or a refusal */
        uint64_t length, largest;
    } list[MOE_RPC_WOKEN_MAX + 1];
};

/* Its client has sent what it may before the message is read. */
static inline bool moe_rpc__is_filled(const struct moe_rpc_upload *up)
{
    return up->wanted - up->left >= MOE_RPC_FILLED_BYTES;
}

bool moe_rpc__charge_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
    MOE_REQUIRES(b->lock);
/* At most what is charged. */
void moe_rpc__give_back_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
    MOE_REQUIRES(b->lock);
/* Nothing, if nothing is charged. */
void moe_rpc__give_back_large(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
    MOE_REQUIRES(b->lock);
/* Puts `up` at the end of the line for up->length bytes. False if there is no place. Another owner
 * may lose one for it. */
bool moe_rpc__join_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t now_ns,
                        struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock);
/* Nothing, if it is not in the line. */
void moe_rpc__leave_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up) MOE_REQUIRES(b->lock);
/* Charges those in the line that are asked for and find room now, and lets their calls read. */
void moe_rpc__grant_line(struct moe_rpc_budget *b, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock);
/* The call of `up` may read its message from now on; it reads no more. */
void moe_rpc__let_read(struct moe_rpc_budget *b, struct moe_rpc_upload *up) MOE_REQUIRES(b->lock);
void moe_rpc__stop_reading(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
    MOE_REQUIRES(b->lock);
/* A stream of `u` begins or is over. */
void moe_rpc__add_stream(struct moe_rpc_budget *b, struct moe_rpc_uploads *u) MOE_REQUIRES(b->lock);
void moe_rpc__remove_stream(struct moe_rpc_budget *b, struct moe_rpc_uploads *u)
    MOE_REQUIRES(b->lock);
/* Counts a refusal. */
void moe_rpc__refuse(struct moe_rpc_budget *b, enum moe_rpc_refusal why) MOE_REQUIRES(b->lock);
/* How long a refused client should wait. */
uint32_t moe_rpc__retry_ms(const struct moe_rpc_budget *b) MOE_REQUIRES(b->lock);
/* The message of `up`, in words. */
struct moe_status moe_rpc__refusal(enum moe_rpc_refusal why, uint32_t retry_ms, uint64_t length,
                                   uint64_t largest) MOE_CHECKED;
/* Holds the call of `up` and adds its answer to `woken`. */
void moe_rpc__answer(struct moe_rpc_budget *b, const struct moe_rpc_upload *up, int answer,
                     struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock);
/* Gives the answers, without the lock. */
void moe_rpc__wake(const struct moe_rpc_budget *b, const struct moe_rpc_woken *woken);

#endif
