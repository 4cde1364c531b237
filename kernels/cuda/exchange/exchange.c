/* SPDX-License-Identifier: Apache-2.0 */
/* The small exchange, through windows or over the network; see exchange.h. */
#include "cuda/exchange/exchange.h"

#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/pass.h"

#include <string.h>

static struct moe_status exchange_through_windows(struct moe_session *s, const void *mine,
                                                  size_t bytes)
{
    if (bytes > 0)
        memcpy(s->host_control->mine, mine, bytes);
    MOE_TRY(moe_cuda_launch_exchange(s, (uint32_t)bytes, s->device->compute));
    return moe_cuda_session_finish(s);
}

struct network_exchange {
    struct moe_session *session;
    const void *mine;
    size_t bytes;
};

/* Over the network, with the same buffers. */
static struct moe_status exchange_control_messages(void *ctx)
{
    const struct network_exchange *x = ctx;
    return moe_cuda_ep_net_exchange(x->session->ep_net, x->mine, x->bytes,
                                    x->session->host_control);
}

static struct moe_status exchange(struct moe_session *s, const void *mine, void *all, size_t bytes)
{
    struct moe_cuda_host_control *m = s->host_control;
    struct network_exchange control = {.session = s, .mine = mine, .bytes = bytes};
    if (s->net != NULL)
        MOE_TRY(moe_cuda_session_run(s, exchange_control_messages, &control));
    else
        MOE_TRY(exchange_through_windows(s, mine, bytes));
    for (uint32_t p = 0; p < s->config.slots; p++) {
        if (p == s->config.slot || !(s->config.live >> p & 1))
            continue;
        if (m->bytes_came[p] != bytes)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                             "slot %u exchanges %u bytes, this slot %zu", p, m->bytes_came[p],
                             bytes);
        if (bytes > 0)
            memcpy((uint8_t *)all + p * bytes, m->all[p], bytes);
    }
    return moe_ok();
}

struct moe_status moe_cuda_session_exchange_inside(struct moe_session *s, const void *mine,
                                                   void *all, size_t bytes)
{
    if (bytes > MOE_WINDOW_EXCHANGE_BYTES || (bytes > 0 && (mine == NULL || all == NULL)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "an exchange carries at most %d bytes", MOE_WINDOW_EXCHANGE_BYTES);
    MOE_TRY(moe_cuda_session_usable(s));
    if (bytes > 0) {
        memset(all, 0, bytes * s->config.slots);
        memcpy((uint8_t *)all + s->config.slot * bytes, mine, bytes);
    }
    struct moe_status st = exchange(s, mine, all, bytes);
    if (moe_failed(&st))
        moe_cuda_session_fail(s);
    return st;
}
