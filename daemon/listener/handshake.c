/* SPDX-License-Identifier: Apache-2.0 */
/* The TLS handshake of a new connection, in steps that never wait. A client that has not begun
 * costs no session. */
#include "daemon/log.h"
#include "listener/inside.h"
#include "tls/tls.h"

#include <string.h>

#define WARN_EVERY_NS (30 * MOE_NS_PER_S)

enum { UNREAD_BYTES = 1 << 16 };

static void count_failure(struct moe_connection *c, enum moe_tls_failure failure, const char *text)
{
    struct moe_listener *l = c->relay->listener;
    uint64_t now = moe_clock_ns(), last = atomic_load(&l->handshake_warned_ns);
    if (l->handshakes_failed[failure] != NULL)
        moe_counter_add(l->handshakes_failed[failure], 1);
    if ((last == 0 || now >= last + WARN_EVERY_NS) &&
        atomic_compare_exchange_strong(&l->handshake_warned_ns, &last, now))
        moe_log_warn("TLS: no connection with %s: %s", c->who.address, text);
}

void moe_handshake_late(struct moe_connection *c)
{
    count_failure(c, MOE_TLS_NO_FAILURE, "the handshake took too long");
}

static enum moe_handshake_outcome fail(struct moe_connection *c, enum moe_close_reason reason)
{
    c->reason = reason;
    return MOE_HANDSHAKE_FAILED;
}

/* Makes the session once the client has begun. */
static enum moe_handshake_outcome begin(struct moe_connection *c)
{
    enum moe_tls_outcome hello = moe_tls_hello(c->client.fd);
    if (hello == MOE_TLS_ENDED || (hello == MOE_TLS_WAITS_TO_READ && c->client.hung_up))
        return fail(c, MOE_CLOSE_CLIENT);
    if (hello == MOE_TLS_FAILED) {
        count_failure(c, MOE_TLS_PROTOCOL, "it does not speak TLS");
        return fail(c, MOE_CLOSE_HANDSHAKE);
    }
    if (hello != MOE_TLS_DONE)
        return MOE_HANDSHAKE_WAITS;
    c->client.tls = moe_tls_accept(c->relay->listener->config.tls, c->client.fd);
    return c->client.tls != NULL ? MOE_HANDSHAKE_DONE : fail(c, MOE_CLOSE_DESCRIPTORS);
}

/* From now on the connection counts under the name in the client's certificate. */
static bool take_name(struct moe_connection *c)
{
    struct moe_listener *l = c->relay->listener;
    const char *name = moe_tls_name(c->client.tls);
    struct moe_rpc_identity named = c->who;
    if (name[0] == '\0')
        return true;
    memcpy(named.name, name, strlen(name) + 1);
    moe_mutex_lock(&l->lock);
    bool entered = !c->replaced && moe_peers_enter(&l->peers, &named, l->config.max_per_peer);
    if (entered) {
        moe_peers_leave(&l->peers, &c->who, false);
        c->who = named;
    }
    moe_mutex_unlock(&l->lock);
    return entered;
}

enum moe_handshake_outcome moe_handshake_step(struct moe_connection *c)
{
    if (c->client.tls == NULL) {
        enum moe_handshake_outcome begun = begin(c);
        if (begun != MOE_HANDSHAKE_DONE)
            return begun;
    }
    enum moe_tls_outcome outcome = moe_tls_handshake(c->client.tls);
    if (outcome == MOE_TLS_FAILED) {
        count_failure(c, moe_tls_failure(c->client.tls), moe_tls_failure_text(c->client.tls));
        /* Unread bytes would make a reset of the end, and the client may miss the reason. */
        (void)recv(c->client.fd, NULL, UNREAD_BYTES, MSG_DONTWAIT | MSG_TRUNC);
        return fail(c, MOE_CLOSE_HANDSHAKE);
    }
    if (outcome != MOE_TLS_DONE)
        return MOE_HANDSHAKE_WAITS;
    return take_name(c) ? MOE_HANDSHAKE_DONE : fail(c, MOE_CLOSE_LIMIT);
}
