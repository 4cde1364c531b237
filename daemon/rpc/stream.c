/* SPDX-License-Identifier: Apache-2.0 */
/* Bidirectional streams of the client: one message in flight each way, an unbounded send queue that
 * its owner bounds, and a handle that may be freed at any time. */
#include "rpc/calling.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <stdatomic.h>
#include <stdlib.h>

/* A queued message. */
struct queued {
    STAILQ_ENTRY(queued) link;
    grpc_byte_buffer *message;
};
STAILQ_HEAD(send_queue, queued);

struct moe_rpc_stream {
    struct moe_rpc_in_flight flight;
    struct moe_rpc_stream_events events;
    void *ctx;
    atomic_uint references; /* one of the call in flight, one of the handle */
    struct moe_rpc_tag on_opened, on_received, on_sent, on_half_closed, on_status;

    /* Written by the core. */
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *received;
    grpc_status_code code;
    grpc_slice text;

    struct moe_mutex lock; /* guards all that follows, and the starting of batches */
    pthread_cond_t quiet;  /* in_callback has become false */
    MOE_GUARDED_BY(lock) struct {
        unsigned batches; /* in flight; `closed` comes when none is left */
        struct send_queue queue;
        struct queued *sending;
        size_t backlog;   /* queued, and the one being sent */
        bool close_asked; /* half-close after the queue */
        bool half_closed; /* it has been started */
        bool ended;       /* the status has arrived: nothing can be sent */
        bool detached;    /* the handle is freed: no callback starts */
        bool in_callback;
    };
};

static void release(struct moe_rpc_stream *s)
{
    if (atomic_fetch_sub(&s->references, 1) > 1)
        return;
    pthread_cond_destroy(&s->quiet);
    moe_mutex_destroy(&s->lock);
    free(s);
}

/* ------------------------------------------------------------------ sending */

/* Starts the next send or the half-close. */
static void pump(struct moe_rpc_stream *s) MOE_REQUIRES(s->lock)
{
    if (s->ended || s->sending != NULL || s->half_closed)
        return;
    s->sending = STAILQ_FIRST(&s->queue);
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    if (s->sending != NULL) {
        STAILQ_REMOVE_HEAD(&s->queue, link);
        op = (grpc_op){.op = GRPC_OP_SEND_MESSAGE, .flags = GRPC_WRITE_NO_COMPRESS};
        op.data.send_message.send_message = s->sending->message;
    } else if (s->close_asked) {
        s->half_closed = true;
    } else {
        return;
    }
    s->batches++;
    MOE_RPC_START(s->flight.core, &op, 1, s->sending != NULL ? &s->on_sent : &s->on_half_closed);
}

static void drop(struct queued *q)
{
    grpc_byte_buffer_destroy(q->message);
    free(q);
}

/* Without the lock, as it releases parts. */
static void drop_all(struct send_queue *queue)
{
    struct queued *q;
    while ((q = STAILQ_FIRST(queue)) != NULL) {
        STAILQ_REMOVE_HEAD(queue, link);
        drop(q);
    }
}

struct moe_status moe_rpc_stream_send(struct moe_rpc_stream *s, const struct moe_rpc_out *out)
{
    struct queued *q = calloc(1, sizeof *q);
    if (q == NULL) {
        moe_rpc_out_discard(out);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory while sending");
    }
    q->message = moe_rpc_out_to_buffer(out);
    moe_mutex_lock(&s->lock);
    bool refused = s->ended || s->close_asked;
    if (!refused) {
        STAILQ_INSERT_TAIL(&s->queue, q, link);
        s->backlog++;
        pump(s);
    }
    moe_mutex_unlock(&s->lock);
    if (!refused)
        return moe_ok();
    drop(q);
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the stream is over");
}

size_t moe_rpc_stream_backlog(const struct moe_rpc_stream *s)
{
    struct moe_rpc_stream *locked = (struct moe_rpc_stream *)(uintptr_t)s;
    moe_mutex_lock(&locked->lock);
    size_t backlog = s->backlog;
    moe_mutex_unlock(&locked->lock);
    return backlog;
}

void moe_rpc_stream_close_send(struct moe_rpc_stream *s)
{
    moe_mutex_lock(&s->lock);
    s->close_asked = true;
    pump(s);
    moe_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ events */

/* False when the handle is freed. */
static bool callback_begin(struct moe_rpc_stream *s)
{
    moe_mutex_lock(&s->lock);
    bool wanted = !s->detached;
    s->in_callback = wanted;
    moe_mutex_unlock(&s->lock);
    return wanted;
}

static void callback_end(struct moe_rpc_stream *s)
{
    moe_mutex_lock(&s->lock);
    s->in_callback = false;
    pthread_cond_broadcast(&s->quiet);
    moe_mutex_unlock(&s->lock);
}

/* Every event calls it last: `s` may be freed then. */
static void settle(struct moe_rpc_stream *s)
{
    struct send_queue unsent = STAILQ_HEAD_INITIALIZER(unsent);
    moe_mutex_lock(&s->lock);
    bool over = --s->batches == 0 && s->ended;
    if (over) {
        STAILQ_CONCAT(&unsent, &s->queue);
        s->backlog = 0;
    }
    moe_mutex_unlock(&s->lock);
    if (!over)
        return;
    drop_all(&unsent);
    struct moe_status status = moe_rpc_in_flight_status(&s->flight, s->code, s->text, &s->trailing);
    grpc_metadata_array_destroy(&s->initial);
    grpc_metadata_array_destroy(&s->trailing);
    grpc_slice_unref(s->text);
    if (callback_begin(s)) {
        s->events.closed(s->ctx, status);
        callback_end(s);
    }
    moe_rpc_in_flight_end(&s->flight);
    release(s);
}

static void on_opened(struct moe_rpc_tag *tag, bool ok)
{
    (void)ok;
    settle(MOE_RPC_OWNER(struct moe_rpc_stream, on_opened, tag));
}

static void on_half_closed(struct moe_rpc_tag *tag, bool ok)
{
    (void)ok;
    settle(MOE_RPC_OWNER(struct moe_rpc_stream, on_half_closed, tag));
}

static void on_status(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_stream *s = MOE_RPC_OWNER(struct moe_rpc_stream, on_status, tag);
    (void)ok;
    moe_mutex_lock(&s->lock);
    s->ended = true;
    moe_mutex_unlock(&s->lock);
    settle(s);
}

static void on_sent(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_stream *s = MOE_RPC_OWNER(struct moe_rpc_stream, on_sent, tag);
    (void)ok; /* a broken stream shows in on_status */
    moe_mutex_lock(&s->lock);
    struct queued *sent = s->sending;
    s->sending = NULL;
    s->backlog--;
    pump(s);
    moe_mutex_unlock(&s->lock);
    drop(sent);
    settle(s);
}

static void start_read(struct moe_rpc_stream *s) MOE_REQUIRES(s->lock)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &s->received;
    s->batches++;
    MOE_RPC_START(s->flight.core, &op, 1, &s->on_received);
}

static void on_received(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_stream *s = MOE_RPC_OWNER(struct moe_rpc_stream, on_received, tag);
    grpc_byte_buffer *message = s->received;
    (void)ok;
    s->received = NULL;
    if (message != NULL) {
        if (callback_begin(s)) {
            s->events.message(s->ctx, moe_rpc_msg_from_buffer(message));
            callback_end(s);
        } else {
            grpc_byte_buffer_destroy(message);
        }
        moe_mutex_lock(&s->lock);
        start_read(s);
        moe_mutex_unlock(&s->lock);
    }
    settle(s);
}

/* ------------------------------------------------------------------ life */

static void start(struct moe_rpc_stream *s, struct moe_rpc_channel *ch,
                  const struct moe_rpc_call_options *options)
{
    grpc_metadata header;
    grpc_op open[] = {moe_rpc_open_op(ch, options, &header), {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    grpc_op status = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    open[1].data.recv_initial_metadata.recv_initial_metadata = &s->initial;
    status.data.recv_status_on_client.trailing_metadata = &s->trailing;
    status.data.recv_status_on_client.status = &s->code;
    status.data.recv_status_on_client.status_details = &s->text;
    moe_mutex_lock(&s->lock);
    s->batches = 2;
    MOE_RPC_START(s->flight.core, open, 2, &s->on_opened);
    moe_rpc_open_done(&header);
    MOE_RPC_START(s->flight.core, &status, 1, &s->on_status);
    start_read(s);
    moe_mutex_unlock(&s->lock);
}

struct moe_status moe_rpc_stream_open(struct moe_rpc_channel *ch, const char *path,
                                      const struct moe_rpc_call_options *options,
                                      const struct moe_rpc_stream_events *events, void *ctx,
                                      struct moe_rpc_stream **out)
{
    struct moe_rpc_stream *s = calloc(1, sizeof *s);
    *out = s;
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a stream");
    s->events = *events;
    s->ctx = ctx;
    s->on_opened.fn = on_opened;
    s->on_received.fn = on_received;
    s->on_sent.fn = on_sent;
    s->on_half_closed.fn = on_half_closed;
    s->on_status.fn = on_status;
    /* One for this function: the call may end at any time, and a callback may free the handle. */
    atomic_init(&s->references, 3);
    grpc_metadata_array_init(&s->initial);
    grpc_metadata_array_init(&s->trailing);
    moe_mutex_init(&s->lock);
    pthread_cond_init(&s->quiet, NULL);
    STAILQ_INIT(&s->queue);
    moe_rpc_in_flight_begin(&s->flight, ch, path, options->deadline_ns);
    start(s, ch, options);
    moe_rpc_in_flight_started(&s->flight);
    release(s);
    return moe_ok();
}

void moe_rpc_stream_cancel(struct moe_rpc_stream *s)
{
    moe_mutex_lock(&s->lock);
    bool ended = s->ended;
    moe_mutex_unlock(&s->lock);
    if (!ended) /* after the end the client may be freed */
        moe_rpc_in_flight_cancel(&s->flight);
}

void moe_rpc_stream_free(struct moe_rpc_stream *s)
{
    if (s == NULL)
        return;
    moe_rpc_stream_cancel(s);
    moe_mutex_lock(&s->lock);
    s->detached = true;
    while (s->in_callback && !moe_rpc_client_is_this_thread(s->flight.client))
        moe_wait(&s->quiet, &s->lock);
    moe_mutex_unlock(&s->lock);
    release(s);
}
