/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of moe/regions.h: into the ring, and their ends. A request's number is its entry's
 * sequence number and the entry; so an old number finds nothing. */
#include "abi.h"
#include "base/clock.h"
#include "base/size.h"
#include "regions/packet.h"
#include "regions/wait.h"
#include "session.h"

#include <sched.h>
#include <string.h>

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

enum { DETAILS_MS = 100 }; /* for those that come after the completion */

/* -------------------------------------------------------------------- submitting */

/* The worker checks the place; this process knows the region. */
static struct moe_status place(const struct moe_client_session *s,
                               const struct moe_client_tensor *from, size_t bytes,
                               struct moe_ring_tensor *to)
{
    if (from->region == NULL)
        return moe_ok();
    if (from->region->session != s)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND,
                         "the region belongs to another session");
    *to = (struct moe_ring_tensor){
        .offset = from->offset, .bytes = bytes, .region = from->region->number};
    return moe_ok();
}

static struct moe_client_tensor token_ids_of(const struct moe_client_session_forward *f)
{
    return MOE_CLIENT_HAS(f, token_ids_in) ? f->token_ids_in : (struct moe_client_tensor){0};
}

static struct moe_status check(const struct moe_client_session *s,
                               const struct moe_client_session_forward *f,
                               const struct moe_client_layer **layer)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(f, session_forward, SESSION_FORWARD));
    MOE_TRY(moe_client_wire_layer(&s->client->info, f->layer, f->hidden, layer));
    if (moe_dtype_bytes(f->dtype) == 0)
        return invalid(DTYPE_UNSUPPORTED, "dtype must be F32 or BF16");
    if (f->weights_in.region != NULL && f->ids_in.region == NULL)
        return invalid(ROUTING_INVALID, "weights_in needs ids_in");
    if (token_ids_of(f).region != NULL && f->ids_in.region != NULL)
        return invalid(ROUTING_INVALID, "token_ids_in excludes ids_in");
    return moe_ok();
}

static enum moe_ring_routing routing_of(const struct moe_client_session_forward *f)
{
    if (token_ids_of(f).region != NULL)
        return MOE_RING_ROUTE_TOKEN_IDS;
    if (f->ids_in.region == NULL)
        return MOE_RING_ROUTE_SERVER;
    return f->weights_in.region != NULL ? MOE_RING_ROUTE_IDS_WEIGHTS : MOE_RING_ROUTE_IDS;
}

struct moe_status moe_client_session_fill(const struct moe_client_session *s,
                                          const struct moe_client_session_forward *f,
                                          struct moe_ring_request *q)
{
    const struct moe_client_layer *layer;
    size_t rows, pairs, token_ids_bytes;
    MOE_TRY(check(s, f, &layer));
    const struct moe_client_tensor token_ids = token_ids_of(f);
    if (!moe_size_mul3(f->tokens, f->hidden, moe_dtype_bytes(f->dtype), &rows) ||
        !moe_size_mul3(f->tokens, layer->top_k, sizeof(float), &pairs) ||
        !moe_size_mul(f->tokens, sizeof(int64_t), &token_ids_bytes))
        return invalid(TOO_LARGE, "%u tokens would be too large", f->tokens);
    *q = (struct moe_ring_request){
        .layer = f->layer,
        .tokens = f->tokens,
        .hidden = f->hidden,
        .timeout_ms = (uint32_t)(s->timeout_ns / MOE_NS_PER_MS),
        .epoch = f->epoch,
        .weights_version = f->weights_version,
        .dtype = (uint32_t)f->dtype,
        .routing = (uint32_t)routing_of(f),
        .trace_flags = f->trace_flags,
        .parts = (uint32_t)f->parts,
    };
    memcpy(q->trace_id, f->trace_id, sizeof q->trace_id);
    memcpy(q->parent_id, f->parent_id, sizeof q->parent_id);
    MOE_TRY(place(s, &f->x, rows, &q->tensors[MOE_RING_X]));
    MOE_TRY(place(s, &f->ids_in, pairs, &q->tensors[MOE_RING_IDS]));
    MOE_TRY(place(s, &token_ids, token_ids_bytes, &q->tensors[MOE_RING_IDS]));
    MOE_TRY(place(s, &f->weights_in, pairs, &q->tensors[MOE_RING_WEIGHTS]));
    MOE_TRY(place(s, &f->y, rows, &q->tensors[MOE_RING_Y]));
    MOE_TRY(place(s, &f->ids, pairs, &q->tensors[MOE_RING_IDS_OUT]));
    return place(s, &f->weights, pairs, &q->tensors[MOE_RING_WEIGHTS_OUT]);
}

bool moe_client_session_take(struct moe_client_session *s, uint32_t *entry)
{
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++) {
        if (s->taken[i] || !moe_ring_caller_is_free(&s->caller, i))
            continue;
        s->taken[i] = true;
        *entry = i;
        return true;
    }
    return false;
}

/* Submits the request in an entry that the worker is done with. False if there is none. */
static bool submit(struct moe_client_session *s, const struct moe_ring_request *q,
                   uint64_t *request)
{
    uint32_t i;
    moe_mutex_lock(&s->lock);
    bool found = moe_client_session_take(s, &i);
    if (found) {
        atomic_fetch_add(&s->in_flight, 1);
        *request = (uint64_t)moe_ring_caller_submit(&s->caller, i, q) << 32 | i;
    }
    moe_mutex_unlock(&s->lock);
    return found;
}

struct moe_status moe_session_submit(struct moe_client_session *s,
                                     const struct moe_client_session_forward *f, uint64_t *request)
{
    struct moe_ring_request q;
    MOE_TRY(moe_client_session_fill(s, f, &q));
    if (!submit(s, &q, request))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "%d requests of this session are in flight", MOE_RING_ENTRIES);
    if (moe_ring_caller_must_wake(&s->caller))
        moe_packet_wake(s->socket);
    moe_client_session_watch(s);
    return moe_ok();
}

/* -------------------------------------------------------------------- ends */

static struct moe_status find(struct moe_client_session *s, uint64_t request, uint32_t *entry)
{
    uint32_t i = (uint32_t)request;
    moe_mutex_lock(&s->lock);
    bool known =
        i < MOE_RING_ENTRIES && s->taken[i] && s->caller.sequence[i] == (uint32_t)(request >> 32);
    moe_mutex_unlock(&s->lock);
    *entry = i;
    return known ? moe_ok()
                 : invalid(VALUE_INVALID, "there is no such request, or it has ended before");
}

/* Of the watchdog, or of a device. */
static struct moe_status given_up(enum moe_code code)
{
    switch (code) {
    case MOE_DEADLINE_EXCEEDED:
        return moe_error(code, MOE_REASON_NONE, "the worker has not answered in time");
    case MOE_UNAVAILABLE:
        return moe_error(code, MOE_REASON_IO,
                         "the connection to the worker has ended, or an "
                         "earlier request of this entry was given up");
    case MOE_FAILED_PRECONDITION:
        return moe_error(code, MOE_REASON_NONE, "a wait without a submit, or the reverse");
    default: return moe_error(code, MOE_REASON_NONE, "the worker tells no more");
    }
}

static struct moe_status failure(enum moe_code code, const struct moe_ring_details *d)
{
    enum moe_reason reason =
        d->reason < MOE_REASON_COUNT ? (enum moe_reason)d->reason : MOE_REASON_NONE;
    return moe_error_retry(code, reason, d->retry_after_ms, "%s", d->text);
}

struct moe_status moe_client_session_status(enum moe_code code, const struct moe_ring_details *d)
{
    if (code == MOE_OK)
        return moe_ok();
    return d != NULL ? failure(code, d) : given_up(code);
}

void moe_client_session_answer_of(const struct moe_ring_details *d,
                                  struct moe_client_session_answer *to)
{
    to->epoch = d->epoch;
    to->weights_version = d->weights_version;
    to->queue_ns = d->queue_ns;
    to->layer_ns = d->layer_ns;
    to->step_ns = d->step_ns;
    to->server_ns = d->server_ns;
    to->copy_in_ns = d->copy_in_ns;
    to->copy_out_ns = d->copy_out_ns;
    to->step_tokens = d->step_tokens;
    to->steps = d->steps;
}

bool moe_client_session_details(const struct moe_client_session *s, uint32_t entry,
                                uint32_t sequence, enum moe_code code, struct moe_ring_details *out)
{
    const struct moe_ring_caller *c = &s->caller;
    const uint64_t until = moe_clock_ns() + DETAILS_MS * MOE_NS_PER_MS;
    while (!moe_ring_caller_details_of(c, entry, sequence, out)) {
        const bool later =
            __atomic_load_n(&c->ring->submitted[entry], __ATOMIC_ACQUIRE) != sequence;
        if (code != MOE_OK || later || __atomic_load_n(&c->ended, __ATOMIC_ACQUIRE) ||
            moe_clock_ns() >= until)
            return false;
        (void)sched_yield();
    }
    return true;
}

/* The request has ended with `code`: gives its entry back. */
static struct moe_status conclude(struct moe_client_session *s, uint32_t entry, enum moe_code code,
                                  struct moe_client_session_answer *answer)
{
    struct moe_ring_details d = {0};
    struct moe_status st = moe_ok();
    const uint32_t sequence = s->caller.sequence[entry];
    if (s->caller.abandoned[entry])
        st = given_up(code);
    else if (code != MOE_OK)
        st = moe_client_session_details(s, entry, sequence, code, &d)
                 ? failure(code, &d)
                 : moe_error(code, MOE_REASON_NONE, "the worker tells no more");
    else if (answer != NULL) {
        (void)moe_client_session_details(s, entry, sequence, code, &d);
        moe_client_session_answer_of(&d, answer);
    }
    moe_mutex_lock(&s->lock);
    s->taken[entry] = false;
    moe_mutex_unlock(&s->lock);
    atomic_fetch_sub(&s->in_flight, 1);
    return st;
}

static struct moe_status check_answer(const struct moe_client_session_answer *answer)
{
    return answer != NULL ? MOE_CLIENT_CHECK_SIZE(answer, session_answer, SESSION_ANSWER)
                          : moe_ok();
}

struct moe_status moe_session_wait(struct moe_client_session *s, uint64_t request,
                                   struct moe_client_session_answer *answer)
{
    uint32_t entry;
    enum moe_code code;
    MOE_TRY(check_answer(answer));
    MOE_TRY(find(s, request, &entry));
    while (!moe_ring_wait(&s->caller, entry, s->spin_ns, MOE_NEVER, &code)) {
        /* The watchdog ends every wait. */
    }
    return conclude(s, entry, code, answer);
}

struct moe_status moe_session_wait_for(struct moe_client_session *s, uint64_t request,
                                       uint64_t limit_ms, bool *done,
                                       struct moe_client_session_answer *answer)
{
    uint32_t entry;
    enum moe_code code;
    *done = false;
    MOE_TRY(check_answer(answer));
    MOE_TRY(find(s, request, &entry));
    const uint64_t now = moe_clock_ns();
    const uint64_t deadline =
        limit_ms < (MOE_NEVER - now) / MOE_NS_PER_MS ? now + limit_ms * MOE_NS_PER_MS : MOE_NEVER;
    if (!moe_ring_wait(&s->caller, entry, s->spin_ns, deadline, &code))
        return moe_ok();
    *done = true;
    return conclude(s, entry, code, answer);
}

struct moe_status moe_session_poll(struct moe_client_session *s, uint64_t request, bool *done,
                                   struct moe_client_session_answer *answer)
{
    uint32_t entry;
    enum moe_code code;
    *done = false;
    MOE_TRY(check_answer(answer));
    MOE_TRY(find(s, request, &entry));
    if (!moe_ring_caller_poll(&s->caller, entry, &code))
        return moe_ok();
    *done = true;
    return conclude(s, entry, code, answer);
}
