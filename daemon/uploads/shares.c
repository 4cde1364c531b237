/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of a server's messages: who may have how many, and the line of large ones. */
#include "uploads/state.h"

#include <inttypes.h>
#include <string.h>

enum {
    SHARE = 4,     /* one connection or identity may have 1/SHARE */
    RETRY_MS = 50, /* hint while none waits: about the time to read a large message */
    RETRY_MAX_MS = 5000,
    WAITING_PER_RETRY = 4, /* so many in the line add another RETRY_MS */
};

void moe_rpc_budget_init(struct moe_rpc_budget *b, uint64_t bytes, uint32_t max_waiting,
                         const struct moe_rpc_waiters *waiters)
{
    const uint64_t least = (uint64_t)SHARE * SHARE * MOE_RPC_LOOKAHEAD_BYTES;
    bytes = bytes > least ? bytes : least;
    memset(b, 0, sizeof *b);
    b->waiters = *waiters;
    b->limit[MOE_RPC_SMALL] = bytes / SHARE;
    b->limit[MOE_RPC_LARGE] = bytes - bytes / SHARE;
    b->max_waiting = max_waiting;
    moe_mutex_init(&b->lock);
    TAILQ_INIT(&b->line);
    TAILQ_INIT(&b->reading);
    LIST_INIT(&b->payers);
}

void moe_rpc_budget_destroy(struct moe_rpc_budget *b)
{
    moe_mutex_destroy(&b->lock);
}

struct moe_rpc_budget_use moe_rpc_budget_use(struct moe_rpc_budget *b)
{
    moe_mutex_lock(&b->lock);
    const struct moe_rpc_upload *oldest = TAILQ_FIRST(&b->line);
    struct moe_rpc_budget_use use = {.bytes =
                                         b->all.bytes[MOE_RPC_SMALL] + b->all.bytes[MOE_RPC_LARGE],
                                     .peak = b->peak,
                                     .connections = b->connections,
                                     .open = b->open,
                                     .large = b->large,
                                     .waiting = b->all.waiting,
                                     .oldest_ns = oldest != NULL ? oldest->since_ns : 0};
    for (int i = 0; i < MOE_RPC_REFUSALS; i++)
        use.refused[i] = b->refused[i];
    moe_mutex_unlock(&b->lock);
    return use;
}

/* ------------------------------------------------------------------ bytes */

static bool fits(uint64_t used, uint64_t more, uint64_t limit)
{
    return used == 0 || (used < limit && more <= limit - used);
}

static bool fits_all(const struct moe_rpc_budget *b, enum moe_rpc_sort sort, uint64_t bytes)
    MOE_REQUIRES(b->lock)
{
    return fits(b->all.bytes[sort], bytes, b->limit[sort]);
}

static bool fits_owner(const struct moe_rpc_budget *b, const struct moe_rpc_upload *up,
                       enum moe_rpc_sort sort, uint64_t bytes)
{
    const uint64_t share = b->limit[sort] / SHARE;
    return fits(up->of->account.bytes[sort], bytes, share) &&
           fits(up->of->payer->account.bytes[sort], bytes, share);
}

static void add(struct moe_rpc_budget *b, struct moe_rpc_upload *up, enum moe_rpc_sort sort,
                uint64_t bytes) MOE_REQUIRES(b->lock)
{
    up->charged[sort] += bytes;
    b->all.bytes[sort] += bytes;
    up->of->account.bytes[sort] += bytes;
    up->of->payer->account.bytes[sort] += bytes;
    uint64_t used = b->all.bytes[MOE_RPC_SMALL] + b->all.bytes[MOE_RPC_LARGE];
    b->peak = used > b->peak ? used : b->peak;
}

static void take_back(struct moe_rpc_budget *b, struct moe_rpc_upload *up, enum moe_rpc_sort sort,
                      uint64_t bytes) MOE_REQUIRES(b->lock)
{
    up->charged[sort] -= bytes;
    b->all.bytes[sort] -= bytes;
    up->of->account.bytes[sort] -= bytes;
    up->of->payer->account.bytes[sort] -= bytes;
}

/* What a connection has may be half of what was left, at most. */
static bool leaves_room(const struct moe_rpc_budget *b, const struct moe_rpc_upload *up,
                        uint64_t bytes) MOE_REQUIRES(b->lock)
{
    uint64_t used = b->all.bytes[MOE_RPC_SMALL], limit = b->limit[MOE_RPC_SMALL];
    return used < limit && up->of->account.bytes[MOE_RPC_SMALL] + bytes <= (limit - used) / 2;
}

bool moe_rpc__charge_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
{
    if (!leaves_room(b, up, bytes) || !fits_owner(b, up, MOE_RPC_SMALL, bytes))
        return false;
    add(b, up, MOE_RPC_SMALL, bytes);
    return true;
}

void moe_rpc__give_back_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
{
    uint64_t charged = up->charged[MOE_RPC_SMALL];
    take_back(b, up, MOE_RPC_SMALL, bytes < charged ? bytes : charged);
}

static void grant(struct moe_rpc_budget *b, struct moe_rpc_upload *up) MOE_REQUIRES(b->lock)
{
    add(b, up, MOE_RPC_LARGE, up->wanted);
    b->large++;
}

void moe_rpc__give_back_large(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
{
    if (up->charged[MOE_RPC_LARGE] == 0)
        return;
    take_back(b, up, MOE_RPC_LARGE, up->charged[MOE_RPC_LARGE]);
    b->large--;
}

/* ------------------------------------------------------------------ refusals */

void moe_rpc__refuse(struct moe_rpc_budget *b, enum moe_rpc_refusal why)
{
    b->refused[why]++;
}

uint32_t moe_rpc__retry_ms(const struct moe_rpc_budget *b)
{
    uint32_t hint = RETRY_MS * (1 + b->all.waiting / WAITING_PER_RETRY);
    return hint < RETRY_MAX_MS ? hint : RETRY_MAX_MS;
}

struct moe_status moe_rpc__refusal(enum moe_rpc_refusal why, uint32_t retry_ms, uint64_t length,
                                   uint64_t largest)
{
    if (why == MOE_RPC_TOO_LARGE)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                         "the message has %" PRIu64 " bytes; at most %" PRIu64 " are allowed",
                         length, largest);
    if (why == MOE_RPC_TOO_SLOW)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                         "the message came in more slowly than %d KiB/s", MOE_RPC_LEAST_RATE >> 10);
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, retry_ms,
                           "too many requests are waiting to be read");
}

/* ------------------------------------------------------------------ line */

static bool has_place(uint32_t places, uint32_t taken)
{
    return taken < (places > 0 ? places : 1);
}

/* The owner with the most places gives up its newest one, if it has more than `wanted`. */
static bool give_way(struct moe_rpc_budget *b, uint32_t wanted, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock)
{
    struct moe_rpc_upload *up, *newest = NULL;
    TAILQ_FOREACH_REVERSE(up, &b->line, moe_rpc_line, line)
    if (up->of->payer->account.waiting > wanted) {
        wanted = up->of->payer->account.waiting;
        newest = up;
    }
    if (newest == NULL || woken->count >= MOE_RPC_WOKEN_MAX)
        return false;
    moe_rpc__leave_line(b, newest);
    newest->refused = true;
    if (newest->waits) {
        newest->waits = false;
        moe_rpc__refuse(b, MOE_RPC_QUEUE_FULL);
        moe_rpc__answer(b, newest, MOE_RPC_QUEUE_FULL, woken);
    }
    return true;
}

bool moe_rpc__join_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t now_ns,
                        struct moe_rpc_woken *woken)
{
    struct moe_rpc_account *payer = &up->of->payer->account;
    const uint32_t share = b->max_waiting / SHARE;
    if (!has_place(share, up->of->account.waiting) || !has_place(share, payer->waiting) ||
        (!has_place(b->max_waiting, b->all.waiting) && !give_way(b, payer->waiting + 1, woken)))
        return false;
    up->in_line = true;
    up->wanted = up->length;
    up->since_ns = now_ns;
    b->all.waiting++;
    up->of->account.waiting++;
    payer->waiting++;
    TAILQ_INSERT_TAIL(&b->line, up, line);
    return true;
}

void moe_rpc__leave_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
{
    if (!up->in_line)
        return;
    up->in_line = false;
    b->all.waiting--;
    up->of->account.waiting--;
    up->of->payer->account.waiting--;
    TAILQ_REMOVE(&b->line, up, line);
}

/* Its large message is the next one, the call asks for it, and the client goes on with it. */
static bool asks(const struct moe_rpc_upload *up)
{
    return up->waits && up->begun == up->read + 1 && moe_rpc__is_filled(up);
}

void moe_rpc__grant_line(struct moe_rpc_budget *b, struct moe_rpc_woken *woken)
{
    struct moe_rpc_upload *up = TAILQ_FIRST(&b->line);
    while (up != NULL && woken->count < MOE_RPC_WOKEN_MAX) {
        struct moe_rpc_upload *next = TAILQ_NEXT(up, line);
        if (asks(up) && fits_owner(b, up, MOE_RPC_LARGE, up->wanted)) {
            if (!fits_all(b, MOE_RPC_LARGE, up->wanted))
                return; /* those behind it must not starve it */
            moe_rpc__leave_line(b, up);
            grant(b, up);
            moe_rpc__let_read(b, up);
            moe_rpc__answer(b, up, MOE_RPC_READ, woken);
        }
        up = next;
    }
}

/* ------------------------------------------------------------------ calls */

void moe_rpc__let_read(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
{
    up->waits = false;
    up->reads = true;
    up->rate.checked_ns = 0;
    TAILQ_INSERT_TAIL(&b->reading, up, reading);
}

void moe_rpc__stop_reading(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
{
    if (!up->reads)
        return;
    up->reads = false;
    TAILQ_REMOVE(&b->reading, up, reading);
}

void moe_rpc__answer(struct moe_rpc_budget *b, const struct moe_rpc_upload *up, int answer,
                     struct moe_rpc_woken *woken)
{
    enum { PREFIX = sizeof up->prefix };
    if (up == woken->asker)
        return;
    b->waiters.hold(up->waiter);
    woken->retry_ms = moe_rpc__retry_ms(b);
    woken->list[woken->count].waiter = up->waiter;
    woken->list[woken->count].answer = answer;
    woken->list[woken->count].length = up->length - PREFIX;
    woken->list[woken->count++].largest = up->largest;
}

void moe_rpc__wake(const struct moe_rpc_budget *b, const struct moe_rpc_woken *woken)
{
    for (uint32_t i = 0; i < woken->count; i++) {
        if (woken->list[i].answer == MOE_RPC_READ)
            b->waiters.read(woken->list[i].waiter);
        else
            b->waiters.fail(woken->list[i].waiter,
                            moe_rpc__refusal((enum moe_rpc_refusal)woken->list[i].answer,
                                             woken->retry_ms, woken->list[i].length,
                                             woken->list[i].largest));
    }
}
