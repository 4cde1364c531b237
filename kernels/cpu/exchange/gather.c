/* SPDX-License-Identifier: Apache-2.0 */
/* The small exchange of a session, declared in session.h. */
#include "cpu/exchange/stores.h"

#include <string.h>

static void put_exchange(struct moe_session *s, uint32_t peer, const void *data, size_t bytes)
{
    const struct moe_window_exchange *e = moe_window_exchange_of(&s->layout, moe_cpu_session_own(s),
                                                                 s->exchanges & 1, s->config.slot);
    struct moe_cpu_stores stores = moe_cpu_stores_begin(s, peer);
    void *to = bytes > 0 ? moe_cpu_stores_data(&stores, e->data, bytes) : NULL;
    if (to != NULL)
        memcpy(to, data, bytes);
    moe_cpu_stores_flag(&stores, &e->flag, moe_window_stamp(s->config.epoch, s->exchanges),
                        (uint32_t)bytes);
    moe_cpu_stores_end(&stores);
}

static struct moe_status get_exchange(struct moe_session *s, uint32_t peer, void *data,
                                      size_t bytes)
{
    const struct moe_window_exchange *e =
        moe_window_exchange_of(&s->layout, moe_cpu_session_own(s), s->exchanges & 1, peer);
    uint32_t received;
    MOE_TRY(moe_cpu_session_wait(s, &e->flag, moe_window_stamp(s->config.epoch, s->exchanges), peer,
                                 &received));
    if (received != bytes)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "slot %u exchanges %u bytes, this slot %zu", peer, received, bytes);
    if (bytes > 0)
        memcpy(data, e->data, bytes);
    return moe_ok();
}

/* Two parities are enough: to finish an exchange, a peer needs this slot's flag of it, so it is at
 * most one exchange ahead. */
static struct moe_status exchange(struct moe_session *s, const void *mine, void *all, size_t bytes)
{
    s->exchanges++;
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            put_exchange(s, p, mine, bytes);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(get_exchange(s, p, bytes > 0 ? (uint8_t *)all + p * bytes : NULL, bytes));
    return moe_ok();
}

struct moe_status moe_cpu_session_barrier(struct moe_session *s)
{
    return exchange(s, NULL, NULL, 0);
}

struct moe_status moe_cpu_session_gather(struct moe_session *s, const void *mine, void *all,
                                         size_t bytes)
{
    if (bytes > 0) {
        memset(all, 0, bytes * s->config.slots);
        memcpy((uint8_t *)all + s->config.slot * bytes, mine, bytes);
    }
    return exchange(s, mine, all, bytes);
}
