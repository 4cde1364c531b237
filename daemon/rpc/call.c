/* SPDX-License-Identifier: Apache-2.0 */
/* Server calls: accepting, reading, sending, ending. Every batch of the core is started on the
 * call's shard, so no call needs a lock; inbox.c has the way there for other threads. */
#include "base/clock.h"
#include "daemon/log.h"
#include "rpc/serving.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* With the NUL. No path of ours is as long; a longer token is not one. */
enum { PATH_BYTES = 256, TOKEN_BYTES = 4096 };

/* ------------------------------------------------------------------ life */

static void op_drop(struct moe_rpc_op *op)
{
    struct moe_rpc_call *c = op->call;
    atomic_fetch_sub(&c->backlog, 1);
    grpc_byte_buffer_destroy(op->message);
    free(op);
}

static void drop_queue(struct moe_rpc_call *c)
{
    while (c->queue != NULL) {
        struct moe_rpc_op *op = c->queue;
        c->queue = op->next;
        op_drop(op);
    }
    c->queue_end = &c->queue;
}

/* Removes a posted accept or a call from the server's counts. */
static void finished(struct moe_rpc_call *c)
{
    struct moe_rpc_server *server = c->shard->server;
    moe_mutex_lock(&server->lock);
    if (c->linked_endless)
        TAILQ_REMOVE(&server->endless, c, endless);
    server->active -= c->counted;
    server->unfinished--;
    pthread_cond_broadcast(&server->changed);
    moe_mutex_unlock(&server->lock);
    moe_rpc_call_unref(c);
}

static void report_end(struct moe_rpc_call *c)
{
    const struct moe_rpc_server *server = c->shard->server;
    if (server->finished == NULL || c->entry->unknown)
        return;
    struct moe_status none = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "no answer");
    server->finished(server->authorise_ctx, &c->connection->who, &c->grant, c->entry->method.path,
                     c->end_started ? &c->end_status : &none);
}

/* Ends the call on its shard once no batch is in flight. Every event calls it last: `c` may be
 * freed then. */
static void settle(struct moe_rpc_call *c)
{
    if (!c->closed || c->batches > 0)
        return;
    MOE_INVARIANT(!c->over);
    c->over = true;
    if (c->keeps)
        atomic_fetch_sub(&c->connection->keepers, 1);
    drop_queue(c);
    if (c->upload != NULL)
        moe_rpc_upload_release(c->upload);
    c->upload = NULL;
    report_end(c);
    if (c->introduced && c->entry->method.done != NULL)
        c->entry->method.done(c, c->entry->method.ctx);
    finished(c);
}

/* ------------------------------------------------------------------ reading */

/* [any thread] Starts the read that ask() has counted. */
static void start_read(struct moe_rpc_call *c)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &c->received;
    MOE_RPC_START(c->core, &op, 1, &c->on_received);
}

void moe_rpc_start_granted(void *call)
{
    struct moe_rpc_call *c = call;
    start_read(c);
    moe_rpc_call_unref(c);
}

/* True if the connection has not had its reads of this round. */
static bool take_turn(struct moe_rpc_call *c)
{
    struct moe_rpc_connection *from = c->connection;
    if (from->round != c->shard->round) {
        from->round = c->shard->round;
        from->reads = 0;
    }
    if (from->reads == MOE_RPC_ROUND_READS)
        return false;
    from->reads++;
    return true;
}

static void start_in_turn(struct moe_rpc_call *c)
{
    c->queued = !take_turn(c);
    if (c->queued)
        TAILQ_INSERT_TAIL(&c->shard->waiting, c, turn);
    else
        start_read(c);
}

void moe_rpc_next_round(struct moe_rpc_shard *shard)
{
    struct moe_rpc_calls calls = TAILQ_HEAD_INITIALIZER(calls);
    struct moe_rpc_call *c;
    shard->round++;
    TAILQ_CONCAT(&calls, &shard->waiting, turn);
    while ((c = TAILQ_FIRST(&calls)) != NULL) {
        TAILQ_REMOVE(&calls, c, turn);
        start_in_turn(c);
    }
}

/* Reads the next message as soon as the budget allows it. So the core never has a read before the
 * message is announced: it would open the window for a message of any length. */
static void ask(struct moe_rpc_call *c)
{
    bool now;
    struct moe_status st = moe_rpc_upload_next(c->upload, &now);
    if (moe_failed(&st)) {
        moe_rpc_fail(c, st);
        return;
    }
    c->reads = true;
    c->batches++;
    if (now)
        start_in_turn(c);
    else if (c->entry->method.kind == MOE_RPC_UNARY)
        moe_rpc_limit_start(&c->shard->reading, &c->reading);
}

/* The call ends: a read that has not started does not start any more. */
static void stop_asking(struct moe_rpc_call *c)
{
    if (!c->reads || (!moe_rpc_upload_forget(c->upload) && !c->queued))
        return;
    if (c->queued)
        TAILQ_REMOVE(&c->shard->waiting, c, turn);
    c->queued = false;
    moe_rpc_limit_stop(&c->shard->reading, &c->reading);
    c->reads = false;
    c->batches--;
}

/* A call that was allowed keeps its connection's place at a limit, from its first message to its
 * end. Health checks are open to all, so they do not count. */
static void keep_place(struct moe_rpc_call *c)
{
    if (c->keeps || c->entry->built_in)
        return;
    c->keeps = true;
    atomic_fetch_add(&c->connection->keepers, 1);
}

static void deliver(struct moe_rpc_call *c, struct moe_rpc_msg *m)
{
    const struct moe_rpc_method *method = &c->entry->method;
    if (atomic_load(&c->ended)) {
        moe_rpc_msg_free(m);
        return;
    }
    if (m == NULL && method->kind == MOE_RPC_UNARY) {
        moe_rpc_fail(
            c, moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED, "the request has no message"));
        return;
    }
    c->half_closed = m == NULL;
    atomic_store(&c->read_outstanding, false);
    if (m != NULL)
        keep_place(c);
    method->message(c, m, method->ctx);
}

/* The handler wants the next message. While it still gets one, that one is not delivered yet. */
static void apply_read(struct moe_rpc_call *c)
{
    if (c->closed || c->half_closed || c->end_started)
        return;
    if (c->delivers)
        c->reads_on = true;
    else
        ask(c);
}

static void on_received(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, on_received, tag);
    grpc_byte_buffer *message = c->received;
    const bool whole = ok && message != NULL;
    const uint64_t length = whole ? grpc_byte_buffer_length(message) : 0;
    c->received = NULL;
    c->reads = false;
    moe_rpc_limit_stop(&c->shard->reading, &c->reading);
    c->delivers = true;
    /* A failed read (broken connection, message over the limit) also closes the call. */
    if (ok)
        deliver(c, moe_rpc_msg_from_buffer(message));
    else if (message != NULL)
        grpc_byte_buffer_destroy(message);
    c->delivers = false;
    if (whole)
        moe_rpc_upload_delivered(c->upload, length);
    if (c->reads_on)
        apply_read(c);
    c->reads_on = false;
    c->batches--;
    settle(c);
}

void moe_rpc_reading_passed(struct moe_rpc_limit *reading)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, reading, reading);
    if (moe_rpc_upload_has_begun(c->upload))
        return; /* its rate counts */
    moe_rpc_fail(c, moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                              "no request has arrived within %llu ms",
                              (unsigned long long)(c->shard->reading.length_ns / MOE_NS_PER_MS)));
}

/* ------------------------------------------------------------------ sending */

static size_t put_headers(struct moe_rpc_call *c, grpc_op *op)
{
    if (c->headers_sent)
        return 0;
    c->headers_sent = true;
    *op = (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
    return 1;
}

static void put_message(grpc_op *op, grpc_byte_buffer *message)
{
    *op = (grpc_op){.op = GRPC_OP_SEND_MESSAGE, .flags = GRPC_WRITE_NO_COMPRESS};
    op->data.send_message.send_message = message;
}

/* A failure status would queue behind the unread data, so this cancels the call. The core then
 * drops the call's data, except what is already part of a write to the connection. */
void moe_rpc_taking_passed(struct moe_rpc_limit *taking)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, taking, taking);
    (void)grpc_call_cancel_with_status(c->core, GRPC_STATUS_DEADLINE_EXCEEDED,
                                       "the client did not read the answer in time", NULL);
}

/* Sends headers, the unary answer (if any) and the status in one batch. */
static void start_end(struct moe_rpc_call *c)
{
    grpc_op ops[3];
    size_t count = put_headers(c, ops);
    if (c->end_message != NULL)
        put_message(&ops[count++], c->end_message);

    uint8_t details[MOE_RPC_DETAILS_BYTES];
    grpc_slice text = grpc_empty_slice();
    grpc_metadata trailing = {0};
    grpc_op *op = &ops[count++];
    *op = (grpc_op){.op = GRPC_OP_SEND_STATUS_FROM_SERVER};
    op->data.send_status_from_server.status = (grpc_status_code)c->end_status.code;
    op->data.send_status_from_server.status_details = &text;
    if (moe_failed(&c->end_status)) {
        size_t length = moe_rpc_details_put(&c->end_status, details);
        text = grpc_slice_from_copied_string(c->end_status.text);
        trailing.key = grpc_slice_from_static_string(moe_rpc_details_key);
        trailing.value = grpc_slice_from_copied_buffer((const char *)details, length);
        op->data.send_status_from_server.trailing_metadata = &trailing;
        op->data.send_status_from_server.trailing_metadata_count = 1;
    }
    c->end_started = true;
    c->batches++;
    moe_rpc_limit_start(&c->shard->taking, &c->taking);
    MOE_RPC_START(c->core, ops, count, &c->on_ended);
    if (moe_failed(&c->end_status)) {
        grpc_slice_unref(text);
        grpc_slice_unref(trailing.value);
    }
}

/* Starts the next send, or the end when nothing is left to send. At most one is in flight. */
static void pump(struct moe_rpc_call *c)
{
    if (c->closed || c->sending != NULL || c->end_started)
        return;
    if (c->queue == NULL) {
        if (c->ending)
            start_end(c);
        return;
    }
    c->sending = c->queue;
    c->queue = c->sending->next;
    if (c->queue == NULL)
        c->queue_end = &c->queue;
    grpc_op ops[2];
    size_t count = put_headers(c, ops);
    put_message(&ops[count++], c->sending->message);
    c->batches++;
    moe_rpc_limit_start(&c->shard->taking, &c->taking);
    MOE_RPC_START(c->core, ops, count, &c->on_sent);
}

static void on_sent(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, on_sent, tag);
    moe_rpc_limit_stop(&c->shard->taking, &c->taking);
    op_drop(c->sending);
    c->sending = NULL;
    if (!ok)
        drop_queue(c);
    pump(c);
    if (c->entry->method.sent != NULL)
        c->entry->method.sent(c, c->entry->method.ctx);
    c->batches--;
    settle(c);
}

static void on_ended(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, on_ended, tag);
    (void)ok; /* on_closed reports a client that has disconnected */
    moe_rpc_limit_stop(&c->shard->taking, &c->taking);
    c->batches--;
    settle(c);
}

/* ------------------------------------------------------------------ accepting and closing */

static void on_closed(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, on_closed, tag);
    (void)ok;
    c->closed = true;
    stop_asking(c);
    if (c->core_cancelled) {
        atomic_store(&c->cancelled, true);
        if (c->introduced && c->entry->method.cancelled != NULL)
            c->entry->method.cancelled(c, c->entry->method.ctx);
    }
    c->batches--;
    settle(c);
}

/* Cut where it is too long: longer than any path of ours. */
static void copy_text(grpc_slice from, char *to, size_t capacity)
{
    size_t length = GRPC_SLICE_LENGTH(from);
    length = length < capacity ? length : capacity - 1;
    memcpy(to, GRPC_SLICE_START_PTR(from), length);
    to[length] = '\0';
}

/* The text behind "authorization: Bearer ", with the scheme in any case; "" without that header.
 * NULL if there are two, or one that is no token: a caller who tries to show one has no rights by
 * other ways. */
static const char *find_token(const grpc_metadata_array *metadata, char token[TOKEN_BYTES])
{
    static const char scheme[] = "Bearer ";
    size_t found = 0;
    token[0] = '\0';
    for (size_t i = 0; i < metadata->count; i++) {
        const grpc_metadata *m = &metadata->metadata[i];
        if (grpc_slice_str_cmp(m->key, "authorization") != 0)
            continue;
        size_t length = GRPC_SLICE_LENGTH(m->value);
        const char *value = (const char *)GRPC_SLICE_START_PTR(m->value);
        if (++found > 1 || length < sizeof scheme || length - sizeof scheme + 1 >= TOKEN_BYTES ||
            strncasecmp(value, scheme, sizeof scheme - 1) != 0)
            return NULL;
        length -= sizeof scheme - 1;
        memcpy(token, value + sizeof scheme - 1, length);
        token[length] = '\0';
        for (size_t k = 0; k < length; k++)
            if (token[k] <= ' ' || token[k] > '~')
                return NULL;
    }
    return token;
}

/* The upload that the listener has made for the call's stream. The field that names it comes last:
 * no client can know its name. */
static struct moe_rpc_upload *find_upload(struct moe_rpc_call *c)
{
    const uint32_t largest = c->entry->method.largest != 0 ? c->entry->method.largest
                                                           : c->shard->server->max_message_bytes;
    for (size_t i = c->metadata.count; i-- > 0;) {
        const grpc_metadata *m = &c->metadata.metadata[i];
        if (grpc_slice_str_cmp(m->key, moe_rpc_upload_field_name()) == 0)
            return moe_rpc_upload_find(c->connection->uploads, GRPC_SLICE_START_PTR(m->value),
                                       GRPC_SLICE_LENGTH(m->value), c, largest);
    }
    return NULL;
}

/* False when the server drains. */
static bool admit(struct moe_rpc_call *c)
{
    struct moe_rpc_server *server = c->shard->server;
    const struct moe_rpc_entry *entry = c->entry;
    moe_mutex_lock(&server->lock);
    bool draining = server->draining;
    c->counted = !draining;
    c->linked_endless = !draining && entry->endless;
    server->active += c->counted;
    if (c->linked_endless)
        TAILQ_INSERT_TAIL(&server->endless, c, endless);
    moe_mutex_unlock(&server->lock);
    return !draining || (entry->built_in && !entry->endless);
}

/* Asks the server's owner whether the call may go on. */
static struct moe_status authorise(struct moe_rpc_call *c)
{
    const struct moe_rpc_server *server = c->shard->server;
    char path[PATH_BYTES], token[TOKEN_BYTES];
    if (server->authorise == NULL) {
        c->grant.roles = UINT32_MAX;
        return moe_ok();
    }
    copy_text(c->details.method, path, sizeof path);
    struct moe_status st = server->authorise(server->authorise_ctx, &c->connection->who, path,
                                             find_token(&c->metadata, token), &c->grant);
    explicit_bzero(token, sizeof token);
    return st;
}

static void started(struct moe_rpc_call *c)
{
    const struct moe_rpc_method *method = &c->entry->method;
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &c->core_cancelled;
    c->batches++;
    MOE_RPC_START(c->core, &op, 1, &c->on_closed);

    struct moe_status st = authorise(c);
    c->upload = find_upload(c);
    if (!moe_failed(&st) && c->upload == NULL)
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the client has left");
    if (!moe_failed(&st) && c->entry->unknown)
        st = moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED, "the server has no such method");
    if (!moe_failed(&st) && !admit(c))
        st = moe_rpc_draining();
    if (moe_failed(&st)) {
        moe_rpc_memory_count_refused(&c->shard->server->memory, &st);
        moe_rpc_fail(c, st);
        return;
    }
    c->introduced = true;
    if (method->started != NULL)
        method->started(c, method->ctx);
    if (!atomic_load(&c->ended))
        ask(c);
}

static const struct moe_rpc_entry *find_entry(const struct moe_rpc_server *server, grpc_slice path)
{
    const struct moe_rpc_entry *e = server->entries;
    while (!e->unknown && grpc_slice_str_cmp(path, e->method.path) != 0)
        e++;
    return e;
}

static void on_accepted(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_call *c = MOE_RPC_OWNER(struct moe_rpc_call, on_accepted, tag);
    atomic_fetch_sub(&c->connection->accepting, 1);
    if (!ok) { /* the connection is closed */
        c->core = NULL;
        c->over = true;
        finished(c);
        return;
    }
    moe_rpc_accept(c->connection);
    c->entry = find_entry(c->shard->server, c->details.method);
    c->deadline_ns = moe_rpc_time_from_core(c->details.deadline);
    started(c);
}

static struct moe_rpc_call *call_create(struct moe_rpc_connection *connection)
{
    struct moe_rpc_server *server = connection->shard->server;
    struct moe_rpc_call *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->shard = connection->shard;
    c->connection = connection;
    atomic_fetch_add(&connection->references, 1);
    c->end_op = (struct moe_rpc_op){.kind = MOE_RPC_OP_END, .call = c};
    c->read_op = (struct moe_rpc_op){.kind = MOE_RPC_OP_READ, .call = c};
    c->queue_end = &c->queue;
    c->on_accepted.fn = on_accepted;
    c->on_closed.fn = on_closed;
    c->on_received.fn = on_received;
    c->on_sent.fn = on_sent;
    c->on_ended.fn = on_ended;
    atomic_init(&c->references, 1);
    atomic_init(&c->read_outstanding, true);
    grpc_metadata_array_init(&c->metadata);
    grpc_call_details_init(&c->details);
    moe_mutex_lock(&server->lock);
    server->unfinished++;
    server->allocated++;
    moe_mutex_unlock(&server->lock);
    return c;
}

void moe_rpc_accept(struct moe_rpc_connection *connection)
{
    grpc_completion_queue *queue = connection->shard->queue;
    moe_mutex_lock(&connection->requesting);
    while (!connection->shutting && atomic_load(&connection->accepting) < MOE_RPC_ACCEPT_DEPTH) {
        struct moe_rpc_call *c = call_create(connection);
        if (c == NULL) {
            /* Later accepts of this connection fill the gap. */
            moe_log_error("out of memory: a connection accepts fewer calls at once");
            break;
        }
        atomic_fetch_add(&connection->accepting, 1);
        MOE_RPC_HAND_OVER(&c->on_accepted);
        grpc_call_error error = grpc_server_request_call(
            connection->core, &c->core, &c->details, &c->metadata, queue, queue, &c->on_accepted);
        MOE_INVARIANT(error == GRPC_CALL_OK);
    }
    moe_mutex_unlock(&connection->requesting);
}

struct moe_status moe_rpc_draining(void)
{
    enum { RETRY_MS = 100 };
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, RETRY_MS,
                           "the server is shutting down: use another one");
}

/* ------------------------------------------------------------------ operations */

static void apply_send(struct moe_rpc_call *c, struct moe_rpc_op *op)
{
    if (c->closed || c->end_started) {
        op_drop(op);
        return;
    }
    op->next = NULL;
    *c->queue_end = op;
    c->queue_end = &op->next;
    pump(c);
}

void moe_rpc_apply(struct moe_rpc_op *op)
{
    struct moe_rpc_call *c = op->call;
    switch (op->kind) {
    case MOE_RPC_OP_SEND: apply_send(c, op); break;
    case MOE_RPC_OP_END:
        c->ending = true;
        stop_asking(c);
        pump(c);
        break;
    case MOE_RPC_OP_READ: apply_read(c); break;
    }
    moe_rpc_call_unref(c);
}

/* ------------------------------------------------------------------ for handlers */

void moe_rpc_call_set_user(struct moe_rpc_call *c, void *user)
{
    c->user = user;
}

void *moe_rpc_call_user(const struct moe_rpc_call *c)
{
    return c->user;
}

uint64_t moe_rpc_call_deadline(const struct moe_rpc_call *c)
{
    return c->deadline_ns;
}

const struct moe_rpc_grant *moe_rpc_call_grant(const struct moe_rpc_call *c)
{
    return &c->grant;
}

const char *moe_rpc_call_header(const struct moe_rpc_call *c, const char *name, size_t *length)
{
    const grpc_metadata *found = NULL;
    *length = 0;
    for (size_t i = 0; i < c->metadata.count; i++) {
        const grpc_metadata *m = &c->metadata.metadata[i];
        if (grpc_slice_str_cmp(m->key, name) != 0)
            continue;
        if (found != NULL)
            return NULL;
        found = m;
    }
    if (found == NULL)
        return NULL;
    *length = GRPC_SLICE_LENGTH(found->value);
    return (const char *)GRPC_SLICE_START_PTR(found->value);
}

const struct moe_rpc_identity *moe_rpc_call_identity(const struct moe_rpc_call *c)
{
    return &c->connection->who;
}

uint32_t moe_rpc_call_connection(const struct moe_rpc_call *c)
{
    return c->connection->number;
}

/* Ends the call unless it has ended. Takes `message` over. */
static void end(struct moe_rpc_call *c, struct moe_status status, grpc_byte_buffer *message)
{
    if (atomic_exchange(&c->ended, true)) {
        if (message != NULL)
            grpc_byte_buffer_destroy(message);
        return;
    }
    c->end_status = status;
    c->end_message = message;
    moe_rpc_call_ref(c);
    moe_rpc_post(&c->end_op);
}

void moe_rpc_reply(struct moe_rpc_call *c, const struct moe_rpc_out *out)
{
    MOE_INVARIANT(c->entry->method.kind == MOE_RPC_UNARY);
    end(c, moe_ok(), moe_rpc_out_to_buffer(out));
}

void moe_rpc_fail(struct moe_rpc_call *c, struct moe_status error)
{
    MOE_INVARIANT(moe_failed(&error));
    end(c, error, NULL);
}

void moe_rpc_finish(struct moe_rpc_call *c)
{
    MOE_INVARIANT(c->entry->method.kind == MOE_RPC_STREAM);
    end(c, moe_ok(), NULL);
}

void moe_rpc_send(struct moe_rpc_call *c, const struct moe_rpc_out *out)
{
    MOE_INVARIANT(c->entry->method.kind == MOE_RPC_STREAM);
    if (atomic_load(&c->ended)) {
        moe_rpc_out_discard(out);
        return;
    }
    struct moe_rpc_op *op = calloc(1, sizeof *op);
    if (op == NULL) {
        moe_rpc_out_discard(out);
        moe_rpc_fail(c, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                  "out of memory while sending"));
        return;
    }
    *op = (struct moe_rpc_op){
        .kind = MOE_RPC_OP_SEND, .call = c, .message = moe_rpc_out_to_buffer(out)};
    atomic_fetch_add(&c->backlog, 1);
    moe_rpc_call_ref(c);
    moe_rpc_post(op);
}

size_t moe_rpc_send_backlog(const struct moe_rpc_call *c)
{
    return atomic_load(&c->backlog);
}

void moe_rpc_read_next(struct moe_rpc_call *c)
{
    MOE_INVARIANT(!atomic_exchange(&c->read_outstanding, true));
    moe_rpc_call_ref(c);
    moe_rpc_post(&c->read_op);
}
