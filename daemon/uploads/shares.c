/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of a server's messages: who may have how many, and the line of large ones. */
#include "uploads/state.h"

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
    *b = (struct moe_rpc_budget){
        .waiters = *waiters,
        .limit = {[MOE_RPC_SMALL] = bytes / SHARE, [MOE_RPC_LARGE] = bytes - bytes / SHARE},
        .max_waiting = max_waiting};
    moe_mutex_init(&b->lock);
    TAILQ_INIT(&b->line);
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
                                     .large = b->large,
                                     .waiting = b->all.waiting,
                                     .oldest_ns = oldest != NULL ? oldest->since_ns : 0};
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
    const struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    uint64_t share = b->limit[sort] / SHARE;
    return fits(up->of->account.bytes[sort], bytes, share) &&
           (payer == NULL || fits(payer->bytes[sort], bytes, share));
}

static void add(struct moe_rpc_budget *b, struct moe_rpc_upload *up, enum moe_rpc_sort sort,
                uint64_t bytes) MOE_REQUIRES(b->lock)
{
    struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    up->charged[sort] += bytes;
    b->all.bytes[sort] += bytes;
    up->of->account.bytes[sort] += bytes;
    if (payer != NULL)
        payer->bytes[sort] += bytes;
}

static void take_back(struct moe_rpc_budget *b, struct moe_rpc_upload *up, enum moe_rpc_sort sort,
                      uint64_t bytes) MOE_REQUIRES(b->lock)
{
    struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    up->charged[sort] -= bytes;
    b->all.bytes[sort] -= bytes;
    up->of->account.bytes[sort] -= bytes;
    if (payer != NULL)
        payer->bytes[sort] -= bytes;
}

bool moe_rpc__charge_small(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t bytes)
{
    if (!fits_all(b, MOE_RPC_SMALL, bytes) || !fits_owner(b, up, MOE_RPC_SMALL, bytes))
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

/* ------------------------------------------------------------------ line */

static bool has_place(uint32_t places, uint32_t taken)
{
    return taken <= (places > 0 ? places : 1);
}

static struct moe_status refuse(const struct moe_rpc_budget *b) MOE_REQUIRES(b->lock)
{
    uint32_t hint = RETRY_MS * (1 + b->all.waiting / WAITING_PER_RETRY);
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                           hint < RETRY_MAX_MS ? hint : RETRY_MAX_MS,
                           "too many requests are waiting to be read");
}

struct moe_status moe_rpc__refused_small(struct moe_rpc_budget *b)
{
    return refuse(b);
}

static void join_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t now_ns)
    MOE_REQUIRES(b->lock)
{
    struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    up->in_line = true;
    up->wanted = up->length;
    up->since_ns = now_ns;
    b->all.waiting++;
    up->of->account.waiting++;
    if (payer != NULL)
        payer->waiting++;
    TAILQ_INSERT_TAIL(&b->line, up, line);
}

void moe_rpc__leave_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up)
{
    struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    if (!up->in_line)
        return;
    up->in_line = false;
    b->all.waiting--;
    up->of->account.waiting--;
    if (payer != NULL)
        payer->waiting--;
    TAILQ_REMOVE(&b->line, up, line);
}

void moe_rpc__grant_line(struct moe_rpc_budget *b, struct moe_rpc_woken *woken)
{
    struct moe_rpc_upload *up = TAILQ_FIRST(&b->line);
    while (up != NULL && woken->count < MOE_RPC_WOKEN_MAX) {
        struct moe_rpc_upload *next = TAILQ_NEXT(up, line);
        if (fits_owner(b, up, MOE_RPC_LARGE, up->wanted)) {
            if (!fits_all(b, MOE_RPC_LARGE, up->wanted))
                return; /* those behind it must not starve it */
            moe_rpc__leave_line(b, up);
            grant(b, up);
            moe_rpc__take_waiter(b, up, woken);
        }
        up = next;
    }
}

struct moe_status moe_rpc__enter_line(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                                      uint64_t now_ns, struct moe_rpc_woken *woken)
{
    const struct moe_rpc_account *payer = moe_rpc__payer_account(up);
    join_line(b, up, now_ns);
    moe_rpc__grant_line(b, woken);
    if (up->charged[MOE_RPC_LARGE] > 0 ||
        (has_place(b->max_waiting, b->all.waiting) &&
         has_place(b->max_waiting / SHARE, up->of->account.waiting) &&
         (payer == NULL || has_place(b->max_waiting / SHARE, payer->waiting))))
        return moe_ok();
    moe_rpc__leave_line(b, up);
    return refuse(b);
}

void moe_rpc__take_waiter(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                          struct moe_rpc_woken *woken)
{
    if (up->waiter == NULL)
        return;
    b->waiters.hold(up->waiter);
    woken->waiters[woken->count++] = up->waiter;
    up->waiter = NULL;
}

void moe_rpc__wake(const struct moe_rpc_budget *b, const struct moe_rpc_woken *woken)
{
    for (uint32_t i = 0; i < woken->count; i++)
        b->waiters.wake(woken->waiters[i]);
}
