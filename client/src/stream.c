/* SPDX-License-Identifier: Apache-2.0 */
/* One long-lived stream to one worker, with many requests in flight.
 *
 * A table holds the pending requests. The id on the wire is (generation, index) of a table entry,
 * so an answer finds its request without a search. An answer to a finished request finds nothing,
 * because the entry has another generation. An answer, the deadline and the end of the stream may
 * race for a request: the first to claim it under the lock decides its status. A request is
 * finished when it is claimed AND the transport has released its tensors (see forward.c). */
#include "abi.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "internal.h"
#include "wire.h"

#include <stdlib.h>

enum {
    PENDING_MAX = 65536, /* requests in flight on one stream */
    PENDING_BITS = 32,
    CLOSE_MS = 1000, /* time for the server to end the stream from its side */
};

struct item {
    struct moe_client_stream *stream;
    struct moe_client_forward *f;
    moe_client_done done;
    void *ctx;
    struct moe_client_rows rows;
    _Atomic uint32_t refs; /* the claim, the deadline, and parts that the transport still uses */
    struct moe_client_timer deadline, end;
    uint64_t id; /* 0 = not in the table */
    struct moe_status status;
    struct moe_client_answer answer;
};

struct pending {
    struct item *item;   /* NULL = free */
    uint32_t generation; /* of the request in this entry; increases with each request */
    uint32_t next_free;
};

struct moe_client_stream {
    struct moe_client *client;
    struct moe_rpc_stream *rpc;
    struct moe_mutex lock;
    pthread_cond_t change;
    MOE_GUARDED_BY(lock) struct {
        struct pending *pending;
        uint32_t pending_capacity, first_free; /* first_free = pending_capacity: none is free */
        size_t in_flight;
        bool over;             /* takes no more requests */
        bool closed;           /* no callback of the transport runs any more */
        struct moe_status end; /* of the stream, if it is not OK */
    };
};

static void finish(struct item *it)
{
    struct moe_client_stream *s = it->stream;
    if (it->status.code == MOE_OK)
        moe_client_wire_answer(it->f, &it->answer);
    it->done(it->ctx, it->f, it->status);
    free(it);
    moe_mutex_lock(&s->lock);
    s->in_flight--;
    pthread_cond_signal(&s->change);
    moe_mutex_unlock(&s->lock);
}

static bool drop_ref(struct item *it)
{
    return atomic_fetch_sub_explicit(&it->refs, 1, memory_order_acq_rel) == 1;
}

static void on_end(struct moe_client_timer *t)
{
    finish((struct item *)((char *)t - offsetof(struct item, end)));
}

/* The transport may hold its own locks here, so the user's callback goes to another thread. */
static void part_released(void *owner)
{
    struct item *it = owner;
    if (drop_ref(it))
        moe_client_timers_set(it->stream->client->timers, &it->end, 0, on_end);
}

/* ------------------------------------------------------------------ pending requests */

static bool grow(struct moe_client_stream *s) MOE_REQUIRES(s->lock)
{
    uint32_t count = s->pending_capacity == 0 ? 16 : s->pending_capacity * 2;
    struct pending *entries =
        count <= PENDING_MAX ? realloc(s->pending, count * sizeof *entries) : NULL;
    if (entries == NULL)
        return false;
    for (uint32_t i = s->pending_capacity; i < count; i++)
        entries[i] = (struct pending){.next_free = i + 1};
    s->pending = entries;
    s->pending_capacity = count;
    return true;
}

static bool add_pending(struct moe_client_stream *s, struct item *it) MOE_REQUIRES(s->lock)
{
    if (s->first_free == s->pending_capacity && !grow(s))
        return false;
    uint32_t number = s->first_free;
    struct pending *entry = &s->pending[number];
    s->first_free = entry->next_free;
    entry->item = it;
    entry->generation = entry->generation == UINT32_MAX ? 1 : entry->generation + 1;
    it->id = (uint64_t)entry->generation << PENDING_BITS | number;
    return true;
}

/* Takes the request with that id out of the table; then only the caller may conclude it. NULL if it
 * is finished. */
static struct item *claim(struct moe_client_stream *s, uint64_t id)
{
    struct item *it = NULL;
    uint32_t number = (uint32_t)id;
    moe_mutex_lock(&s->lock);
    if (number < s->pending_capacity && s->pending[number].generation == id >> PENDING_BITS)
        it = s->pending[number].item;
    if (it != NULL) {
        s->pending[number].item = NULL;
        s->pending[number].next_free = s->first_free;
        s->first_free = number;
    }
    moe_mutex_unlock(&s->lock);
    return it;
}

static void conclude(struct item *it, struct moe_status st)
{
    it->status = st;
    if (moe_client_timers_cancel(it->stream->client->timers, &it->deadline))
        (void)drop_ref(it); /* the deadline's; the claim's ref is dropped below */
    if (drop_ref(it))
        finish(it);
}

/* ------------------------------------------------------------------ events */

static void on_deadline(struct moe_client_timer *t)
{
    struct item *it = (struct item *)((char *)t - offsetof(struct item, deadline));
    if (claim(it->stream, it->id) == it) {
        it->status = moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                               "no answer on the stream within the time limit");
        (void)drop_ref(it); /* the claim's; the deadline's ref is dropped below */
    }
    if (drop_ref(it))
        finish(it);
}

/* After this the stream takes no more requests. The first status that is not OK counts. */
static struct moe_rpc_stream *end_stream(struct moe_client_stream *s, struct moe_status end)
{
    moe_mutex_lock(&s->lock);
    if (s->end.code == MOE_OK)
        s->end = end;
    s->over = true;
    struct moe_rpc_stream *rpc = s->rpc;
    moe_mutex_unlock(&s->lock);
    return rpc;
}

static struct moe_status end_status(const struct moe_client_stream *s) MOE_REQUIRES(s->lock)
{
    if (s->end.code != MOE_OK)
        return s->end;
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the server ended the stream");
}

/* An answer without a readable id ends the stream; otherwise its request would wait until its
 * deadline. */
static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_client_stream *s = ctx;
    uint64_t id = 0;
    struct moe_status st = moe_rpc_msg_find_uint(m, MOE_CLIENT_FIELD_REQUEST_ID, &id);
    if (st.code != MOE_OK) {
        st.code = MOE_INTERNAL;
        st = moe_error_context(st, "broken answer from the server");
        moe_rpc_stream_cancel(end_stream(s, st));
        moe_rpc_msg_free(m);
        return;
    }
    struct item *it = claim(s, id);
    if (it != NULL)
        conclude(it, moe_client_wire_unpack(&it->rows, m, &it->answer));
    moe_rpc_msg_free(m);
}

static void on_closed(void *ctx, struct moe_status st)
{
    struct moe_client_stream *s = ctx;
    (void)end_stream(s, st);
    moe_mutex_lock(&s->lock);
    uint32_t count = s->pending_capacity; /* the table grows no more */
    struct moe_status end = end_status(s);
    moe_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < count; i++) {
        moe_mutex_lock(&s->lock);
        uint64_t id = (uint64_t)s->pending[i].generation << PENDING_BITS | i;
        moe_mutex_unlock(&s->lock);
        struct item *it = claim(s, id);
        if (it != NULL)
            conclude(it, end);
    }
    moe_mutex_lock(&s->lock);
    s->closed = true;
    pthread_cond_signal(&s->change);
    moe_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ public */

static void destroy(struct moe_client_stream *s)
{
    moe_mutex_not_shared(&s->lock);
    free(s->pending);
    pthread_cond_destroy(&s->change);
    moe_mutex_destroy(&s->lock);
    free(s);
}

struct moe_status moe_client_stream_open(struct moe_client *c, struct moe_client_stream **out)
{
    static const struct moe_rpc_stream_events events = {.message = on_message, .closed = on_closed};
    struct moe_client_stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "stream");
    s->client = c;
    moe_mutex_init(&s->lock);
    moe_wait_init(&s->change);

    struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    moe_mutex_lock(&s->lock); /* callbacks may come before the handle is stored */
    struct moe_status st =
        moe_rpc_stream_open(c->connections[moe_client_take_connection(c)].channel,
                            "/moe.v1.ExpertService/ForwardStream", &options, &events, s, &s->rpc);
    moe_mutex_unlock(&s->lock);
    if (st.code != MOE_OK) {
        destroy(s);
        return st;
    }
    moe_client_enter(c);
    *out = s;
    return st;
}

/* Checks `it` and adds it to the table of pending requests. */
static struct moe_status admit(struct moe_client_stream *s, struct item *it)
{
    const struct moe_client_info *info = &s->client->info;
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(it->f, forward, FORWARD));
    MOE_TRY(moe_client_wire_check(info, it->f, &it->rows.layer));
    if (it->f->retain_session != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_UNSUPPORTED,
                         "retain_session: a stream cannot retain a pass, use moe_client_forward");
    it->rows.f = it->f;
    it->rows.tokens = it->f->tokens;
    MOE_TRY(moe_client_wire_check_rows(info, &it->rows));
    struct moe_status st = moe_ok();
    moe_mutex_lock(&s->lock);
    if (s->over)
        st = end_status(s);
    else if (!add_pending(s, it))
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                       "too many requests in flight on one stream");
    moe_mutex_unlock(&s->lock);
    return st;
}

static void send_item(struct moe_client_stream *s, struct item *it)
{
    uint8_t head[MOE_CLIENT_HEAD_MAX];
    struct moe_rpc_out out;
    uint64_t id = it->id;
    moe_client_wire_pack(&it->rows, id, &s->client->wanted, head, part_released, it, &out);
    /* One ref for the claim, one for the deadline, one for this function. */
    atomic_init(&it->refs, (uint32_t)out.part_count + 3);
    moe_client_timers_set(s->client->timers, &it->deadline,
                          moe_client_deadline(s->client, it->f->timeout_ms), on_deadline);
    struct moe_status st = moe_rpc_stream_send(s->rpc, &out);
    if (st.code != MOE_OK && claim(s, id) != NULL)
        conclude(it, st);
    if (drop_ref(it))
        moe_client_timers_set(s->client->timers, &it->end, 0, on_end);
}

void moe_client_stream_forward(struct moe_client_stream *s, struct moe_client_forward *f,
                               moe_client_done done, void *ctx)
{
    struct item *it = calloc(1, sizeof *it);
    if (it == NULL) {
        done(ctx, f, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "forward"));
        return;
    }
    it->stream = s;
    it->f = f;
    it->done = done;
    it->ctx = ctx;
    moe_mutex_lock(&s->lock);
    s->in_flight++;
    moe_mutex_unlock(&s->lock);
    it->status = admit(s, it);
    if (it->status.code == MOE_OK)
        send_item(s, it);
    else
        moe_client_timers_set(s->client->timers, &it->end, 0, on_end);
}

void moe_client_stream_close(struct moe_client_stream *s)
{
    if (s == NULL)
        return;
    struct moe_client *c = s->client;
    moe_mutex_lock(&s->lock);
    while (s->in_flight > 0)
        moe_wait(&s->change, &s->lock);
    moe_mutex_unlock(&s->lock);

    moe_rpc_stream_close_send(s->rpc);
    uint64_t until = moe_client_deadline(c, CLOSE_MS);
    bool in_time = true;
    moe_mutex_lock(&s->lock);
    while (!s->closed && in_time)
        in_time = moe_wait_until(&s->change, &s->lock, until);
    moe_mutex_unlock(&s->lock);
    if (!in_time)
        moe_rpc_stream_cancel(s->rpc);
    moe_mutex_lock(&s->lock);
    while (!s->closed)
        moe_wait(&s->change, &s->lock);
    moe_mutex_unlock(&s->lock);
    moe_rpc_stream_free(s->rpc);
    destroy(s);
    moe_client_leave(c);
}
