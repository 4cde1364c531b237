/* SPDX-License-Identifier: Apache-2.0 */
/* Stores into mapped windows, and into messages; see stores.h. */
#include "cpu/exchange/stores.h"

static size_t offset_of(const struct moe_cpu_stores *b, const void *at)
{
    return (size_t)((const uint8_t *)at - moe_cpu_session_own(b->session));
}

/* Messages to fill, one after the other; false if there are no more. */
static bool next_message(struct moe_cpu_stores *b)
{
    if (b->message != NULL)
        moe_cpu_network_send(b->session->network, b->message);
    b->message = b->dropped ? NULL : moe_cpu_network_take(b->session->network, b->slot);
    b->dropped = b->message == NULL;
    return !b->dropped;
}

void *moe_cpu_stores_data(struct moe_cpu_stores *b, const void *at, size_t bytes)
{
    size_t offset = offset_of(b, at);
    uint8_t *window = b->session->window[b->slot].base;
    if (window != NULL)
        return window + offset;
    void *to = b->message != NULL ? moe_cpu_message_store(b->message, offset, bytes) : NULL;
    if (to == NULL && next_message(b))
        to = moe_cpu_message_store(b->message, offset, bytes);
    return to;
}

void moe_cpu_stores_flag(struct moe_cpu_stores *b, const uint64_t *at, uint64_t stamp,
                         uint32_t value)
{
    size_t offset = offset_of(b, at);
    uint64_t flag = moe_window_flag(stamp, value);
    uint8_t *window = b->session->window[b->slot].base;
    if (window != NULL)
        __atomic_store_n((uint64_t *)(void *)(window + offset), flag, __ATOMIC_RELEASE);
    else if (b->message == NULL || !moe_cpu_message_flag(b->message, offset, flag))
        if (next_message(b))
            (void)moe_cpu_message_flag(b->message, offset, flag);
}

void moe_cpu_stores_end(struct moe_cpu_stores *b)
{
    if (b->session->window[b->slot].base != NULL)
        moe_cpu_session_wake(b->session, b->slot);
    if (b->message != NULL)
        moe_cpu_network_send(b->session->network, b->message);
    b->message = NULL;
}
