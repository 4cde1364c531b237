/* One long-lived stream to one worker, with many requests in flight.
 *
 * Each request has a seat in a table; its id on the wire is (turn of the seat, number of the seat),
 * so that an answer finds its request without a search, and an answer to a request that is over
 * finds nothing. An answer, the deadline and the end of the stream may race for a request: whoever
 * claims it under the lock decides its status. It is over when it is claimed AND the transport has
 * let go of its tensors (see forward.c). */
#include "base/clock.h"
#include "base/wait.h"
#include "internal.h"
#include "wire.h"

#include <stdlib.h>

enum {
    SEATS_MAX = 65536, /* requests in flight on one stream */
    SEAT_BITS = 32,
    FAREWELL_MS = 1000, /* how long the server may take to end the stream from its side */
};

struct item {
    struct moe_client_stream *stream;
    struct moe_client_forward *f;
    moe_client_done done;
    void *ctx;
    struct moe_client_rows rows;
    _Atomic uint32_t holds; /* the claim, the deadline, and parts that the transport holds */
    struct moe_client_timer deadline, end;
    uint64_t id; /* 0 = has no seat */
    struct moe_status status;
    struct moe_client_answer answer;
};

struct seat {
    struct item *item; /* NULL = free */
    uint32_t turn;     /* times that it was taken */
    uint32_t next_free;
};

struct moe_client_stream {
    struct moe_client *client;
    struct moe_rpc_stream *rpc;
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t change;
    struct seat *seats;
    uint32_t seat_count, first_free; /* first_free = seat_count: none is free */
    size_t in_flight;
    bool over;             /* takes no more requests */
    bool closed;           /* no callback of the transport runs any more */
    struct moe_status why; /* of being over, when that is not OK */
};

static void finish(struct item *it)
{
    struct moe_client_stream *s = it->stream;
    if (it->status.code == MOE_OK) {
        it->f->answered_epoch = it->answer.epoch;
        it->f->answered_weights_version = it->answer.weights_version;
        it->f->saved = it->answer.saved;
        it->f->saved_activations = it->answer.saved_activations;
        it->f->stages = it->answer.stages;
    }
    it->done(it->ctx, it->f, it->status);
    free(it);
    pthread_mutex_lock(&s->lock);
    s->in_flight--;
    pthread_cond_signal(&s->change);
    pthread_mutex_unlock(&s->lock);
}

static bool let_go(struct item *it)
{
    return atomic_fetch_sub_explicit(&it->holds, 1, memory_order_acq_rel) == 1;
}

static void on_end(struct moe_client_timer *t)
{
    finish((struct item *)((char *)t - offsetof(struct item, end)));
}

/* The transport may hold its own locks here, so the user's callback goes to another thread. */
static void part_released(void *owner)
{
    struct item *it = owner;
    if (let_go(it))
        moe_client_timers_set(it->stream->client->timers, &it->end, 0, on_end);
}

/* ------------------------------------------------------------------ seats */

static bool grow(struct moe_client_stream *s)
{
    uint32_t count = s->seat_count == 0 ? 16 : s->seat_count * 2;
    struct seat *seats = count <= SEATS_MAX ? realloc(s->seats, count * sizeof *seats) : NULL;
    if (seats == NULL)
        return false;
    for (uint32_t i = s->seat_count; i < count; i++)
        seats[i] = (struct seat){.next_free = i + 1};
    s->seats = seats;
    s->seat_count = count;
    return true;
}

/* Under the lock. */
static bool take_seat(struct moe_client_stream *s, struct item *it)
{
    if (s->first_free == s->seat_count && !grow(s))
        return false;
    uint32_t number = s->first_free;
    struct seat *seat = &s->seats[number];
    s->first_free = seat->next_free;
    seat->item = it;
    seat->turn = seat->turn == UINT32_MAX ? 1 : seat->turn + 1;
    it->id = (uint64_t)seat->turn << SEAT_BITS | number;
    return true;
}

/* The request of that id, which the caller alone may conclude from here on, or NULL. */
static struct item *claim(struct moe_client_stream *s, uint64_t id)
{
    struct item *it = NULL;
    uint32_t number = (uint32_t)id;
    pthread_mutex_lock(&s->lock);
    if (number < s->seat_count && s->seats[number].turn == id >> SEAT_BITS)
        it = s->seats[number].item;
    if (it != NULL) {
        s->seats[number].item = NULL;
        s->seats[number].next_free = s->first_free;
        s->first_free = number;
    }
    pthread_mutex_unlock(&s->lock);
    return it;
}

static void conclude(struct item *it, struct moe_status st)
{
    it->status = st;
    if (moe_client_timers_cancel(it->stream->client->timers, &it->deadline))
        (void)let_go(it); /* the deadline's; the claim's goes below */
    if (let_go(it))
        finish(it);
}

/* ------------------------------------------------------------------ events */

static void on_deadline(struct moe_client_timer *t)
{
    struct item *it = (struct item *)((char *)t - offsetof(struct item, deadline));
    if (claim(it->stream, it->id) == it) {
        it->status = moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                               "no answer on the stream within the time limit");
        (void)let_go(it); /* the claim's; the deadline's goes below */
    }
    if (let_go(it))
        finish(it);
}

/* Takes no more requests from here on; the first reason given counts. */
static struct moe_rpc_stream *end_of_stream(struct moe_client_stream *s, struct moe_status why)
{
    pthread_mutex_lock(&s->lock);
    if (s->why.code == MOE_OK)
        s->why = why;
    s->over = true;
    struct moe_rpc_stream *rpc = s->rpc;
    pthread_mutex_unlock(&s->lock);
    return rpc;
}

/* Under the lock or after the end. */
static struct moe_status why_over(const struct moe_client_stream *s)
{
    if (s->why.code != MOE_OK)
        return s->why;
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the server ended the stream");
}

/* An answer without a readable id ends the stream: its request would wait for its deadline. */
static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_client_stream *s = ctx;
    uint64_t id = 0;
    struct moe_status st = moe_rpc_msg_find_uint(m, MOE_CLIENT_FIELD_REQUEST_ID, &id);
    if (st.code != MOE_OK) {
        st.code = MOE_INTERNAL;
        st = moe_error_context(st, "broken answer from the server");
        moe_rpc_stream_cancel(end_of_stream(s, st));
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
    (void)end_of_stream(s, st);
    pthread_mutex_lock(&s->lock);
    uint32_t count = s->seat_count; /* the table grows no more */
    pthread_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < count; i++) {
        pthread_mutex_lock(&s->lock);
        uint64_t id = (uint64_t)s->seats[i].turn << SEAT_BITS | i;
        pthread_mutex_unlock(&s->lock);
        struct item *it = claim(s, id);
        if (it != NULL)
            conclude(it, why_over(s));
    }
    pthread_mutex_lock(&s->lock);
    s->closed = true;
    pthread_cond_signal(&s->change);
    pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ public */

static void destroy(struct moe_client_stream *s)
{
    free(s->seats);
    pthread_cond_destroy(&s->change);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

struct moe_status moe_client_stream_open(struct moe_client *c, struct moe_client_stream **out)
{
    static const struct moe_rpc_stream_events events = {.message = on_message, .closed = on_closed};
    struct moe_client_stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "stream");
    s->client = c;
    pthread_mutex_init(&s->lock, NULL);
    moe_wait_init(&s->change);

    struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    pthread_mutex_lock(&s->lock); /* callbacks may come before the handle is stored */
    struct moe_status st =
        moe_rpc_stream_open(c->lanes[moe_client_take_lane(c)].channel,
                            "/moe.v1.ExpertService/ForwardStream", &options, &events, s, &s->rpc);
    pthread_mutex_unlock(&s->lock);
    if (st.code != MOE_OK) {
        destroy(s);
        return st;
    }
    moe_client_enter(c);
    *out = s;
    return st;
}

/* Checks `it` and gives it a seat, or says why not. */
static struct moe_status admit(struct moe_client_stream *s, struct item *it)
{
    const struct moe_client_info *info = &s->client->info;
    MOE_TRY(moe_client_wire_check(info, it->f, &it->rows.layer));
    if (it->f->save_session != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_UNSUPPORTED,
                         "a pass is kept for Backward by moe_client_forward, not on a stream");
    it->rows.f = it->f;
    it->rows.tokens = it->f->tokens;
    MOE_TRY(moe_client_wire_check_rows(info, &it->rows));
    struct moe_status st = moe_ok();
    pthread_mutex_lock(&s->lock);
    if (s->over)
        st = why_over(s);
    else if (!take_seat(s, it))
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                       "too many requests in flight on one stream");
    pthread_mutex_unlock(&s->lock);
    return st;
}

static void send_item(struct moe_client_stream *s, struct item *it)
{
    uint8_t head[MOE_CLIENT_HEAD_MAX];
    struct moe_rpc_out out;
    uint64_t id = it->id;
    moe_client_wire_pack(&it->rows, id, head, part_released, it, &out);
    /* One hold for the claim, one for the deadline, one for this function. */
    atomic_init(&it->holds, (uint32_t)out.part_count + 3);
    moe_client_timers_set(s->client->timers, &it->deadline,
                          moe_client_deadline(s->client, it->f->timeout_ms), on_deadline);
    struct moe_status st = moe_rpc_stream_send(s->rpc, &out);
    if (st.code != MOE_OK && claim(s, id) != NULL)
        conclude(it, st);
    if (let_go(it))
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
    pthread_mutex_lock(&s->lock);
    s->in_flight++;
    pthread_mutex_unlock(&s->lock);
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
    pthread_mutex_lock(&s->lock);
    while (s->in_flight > 0)
        pthread_cond_wait(&s->change, &s->lock);
    pthread_mutex_unlock(&s->lock);

    moe_rpc_stream_close_send(s->rpc);
    uint64_t until = moe_client_deadline(c, FAREWELL_MS);
    bool in_time = true;
    pthread_mutex_lock(&s->lock);
    while (!s->closed && in_time)
        in_time = moe_wait_until(&s->change, &s->lock, until);
    pthread_mutex_unlock(&s->lock);
    if (!in_time)
        moe_rpc_stream_cancel(s->rpc);
    pthread_mutex_lock(&s->lock);
    while (!s->closed)
        pthread_cond_wait(&s->change, &s->lock);
    pthread_mutex_unlock(&s->lock);
    moe_rpc_stream_free(s->rpc);
    destroy(s);
    moe_client_leave(c);
}
