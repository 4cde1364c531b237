/* SPDX-License-Identifier: Apache-2.0 */
/* The way into the owner thread: events of other threads, in order. Also packs messages for the
 * ways out. */
#include "coordinator/service_state.h"

#include <stdlib.h>

void moe_coordinator__post(struct moe_coordinator *c, struct event *e)
{
    moe_mutex_lock(&c->inbox_lock);
    e->next = NULL;
    e->arrived_ns = moe_clock_ns();
    if (c->inbox_last != NULL)
        c->inbox_last->next = e;
    else
        c->inbox_first = e;
    c->inbox_last = e;
    moe_mutex_unlock(&c->inbox_lock);
    (void)uv_async_send(
        &c->wake); /* fails only on a closing handle, when no thread runs the loop */
}

struct event *moe_coordinator__take_events(struct moe_coordinator *c)
{
    moe_mutex_lock(&c->inbox_lock);
    struct event *e = c->inbox_first;
    c->inbox_first = c->inbox_last = NULL;
    moe_mutex_unlock(&c->inbox_lock);
    return e;
}

uint8_t *moe_coordinator__pack(const ProtobufCMessage *m, size_t *length)
{
    *length = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = malloc(*length > 0 ? *length : 1);
    if (bytes != NULL)
        (void)protobuf_c_message_pack(m, bytes);
    return bytes;
}
