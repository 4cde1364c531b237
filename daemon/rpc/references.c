/* SPDX-License-Identifier: Apache-2.0 */
/* References to server calls; the last one frees the call. */
#include "rpc/serving.h"

#include <stdlib.h>

static void call_free(struct moe_rpc_call *c)
{
    struct moe_rpc_server *server = c->shard->server;
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_details_destroy(&c->details);
    if (c->end_message != NULL)
        grpc_byte_buffer_destroy(c->end_message);
    if (c->core != NULL)
        grpc_call_unref(c->core);
    moe_rpc_connection_unref(c->connection);
    free(c);
    moe_mutex_lock(&server->lock);
    server->allocated--;
    pthread_cond_broadcast(&server->changed);
    moe_mutex_unlock(&server->lock);
}

void moe_rpc_call_ref(struct moe_rpc_call *c)
{
    atomic_fetch_add_explicit(&c->references, 1, memory_order_relaxed);
}

void moe_rpc_call_unref(struct moe_rpc_call *c)
{
    if (atomic_fetch_sub_explicit(&c->references, 1, memory_order_acq_rel) == 1)
        call_free(c);
}
