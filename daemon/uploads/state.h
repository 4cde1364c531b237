/* SPDX-License-Identifier: Apache-2.0 */
/* What shares.c (bytes, the line) and upload.c (streams of connections) share; only these include
 * it. Functions without another mark need the budget's lock. */
#ifndef MOE_UPLOADS_STATE_H
#define MOE_UPLOADS_STATE_H

#include "uploads/upload.h"

enum { MOE_RPC_UPLOAD_BUCKETS = 64 };

/* Guarded by the budget's lock, except what never changes. */
struct moe_rpc_uploads {
    struct moe_rpc_budget *budget;
    struct moe_rpc_payer *payer; /* NULL: anonymous, or the owner of this process */
    struct moe_rpc_account account;
    uint32_t references; /* the listener, and each upload */
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

    uint64_t charged[MOE_RPC_SORTS]; /* small messages that were not delivered; the large one that
                                        is read, 0 = none */
    bool refused;                    /* a small message found no room */

    void *waiter; /* NULL = none */
    bool in_line; /* in the budget's line: the fields below */
    uint64_t since_ns;
    uint64_t wanted; /* bytes; `length` may change if the client breaks its window */
    TAILQ_ENTRY(moe_rpc_upload) line;
};

/* Waiters that are woken once the lock is released. The rest stay in the
 * line until the next message is delivered. */
enum { MOE_RPC_WOKEN_MAX = 16 };
struct moe_rpc_woken {
    uint32_t count;
    void *waiters[MOE_RPC_WOKEN_MAX + 1];
};

static inline struct moe_rpc_account *moe_rpc__payer_account(const struct moe_rpc_upload *up)
{
    return up->of->payer != NULL ? &up->of->payer->account : NULL;
}

bool moe_rpc__charge_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
    MOE_REQUIRES(b->lock);
/* At most what is charged. */
void moe_rpc__give_back_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
    MOE_REQUIRES(b->lock);
/* Nothing, if nothing is charged. */
void moe_rpc__give_back_large(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
    MOE_REQUIRES(b->lock);
struct moe_status moe_rpc__refused_small(struct moe_rpc_budget *b) MOE_CHECKED
    MOE_REQUIRES(b->lock);
/* Puts `up` at the end of the line for up->length bytes, charges those for whom there is room, then
 * refuses `up` if it waits without a place. It was charged if charged[MOE_RPC_LARGE] > 0. */
struct moe_status moe_rpc__enter_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                                      uint64_t now_ns, struct moe_rpc_woken *woken) MOE_CHECKED
    MOE_REQUIRES(b->lock);
/* Nothing, if it is not in the line. */
void moe_rpc__leave_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up) MOE_REQUIRES(b->lock);
/* Charges those in the line for whom there is room now. */
void moe_rpc__grant_line(struct moe_rpc_budget *b, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock);
/* Holds the waiter, if there is one, and adds it to `woken`. */
void moe_rpc__take_waiter(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                          struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock);
/* Without the lock. */
void moe_rpc__wake(const struct moe_rpc_budget *b, const struct moe_rpc_woken *woken);

#endif
