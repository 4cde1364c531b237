/* SPDX-License-Identifier: Apache-2.0 */
#include "rpc_fixture.h"

#include "base/wait.h"
#include "moe/v1/expert.pb-c.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "proto/descriptors.h"

/* ------------------------------------------------------------------ parts */

/* A tensor in separate memory, which is freed when the transport is done with it. */
struct tensor {
    struct fixture *fixture;
    size_t length;
    uint8_t data[];
};

static void tensor_release(void *owner)
{
    struct tensor *t = owner;
    memset(t->data, 0xdd, t->length < 64 ? t->length : 64); /* shows a transport that still reads */
    atomic_fetch_add(&t->fixture->released, 1);
    free(t);
}

static struct tensor *tensor_create(struct fixture *f, size_t length)
{
    struct tensor *t = malloc(sizeof *t + length);
    if (t == NULL)
        abort();
    t->fixture = f;
    t->length = length;
    return t;
}

static struct moe_rpc_part lend(struct tensor *t, uint32_t field)
{
    atomic_fetch_add(&t->fixture->lent, 1);
    return (struct moe_rpc_part){.field = field,
                                 .data = t->data,
                                 .length = t->length,
                                 .release = tensor_release,
                                 .owner = t};
}

/* ------------------------------------------------------------------ echo server */

enum { X_DATA = 15 };

struct parsed {
    struct fixture *fixture;
    struct moe_rpc_arena arena;
    const Moe__V1__ForwardRequest *request;
    struct tensor *x;
};

static struct moe_status take_x(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct parsed *p = ctx;
    (void)field;
    p->x = tensor_create(p->fixture, length);
    *dst = p->x->data;
    return moe_ok();
}

/* Frees the message; p->x is the caller's. */
static struct moe_status parse(struct fixture *f, struct moe_rpc_msg *m, struct parsed *p)
{
    static const uint32_t fields[] = {X_DATA};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    p->fixture = f;
    p->x = NULL;
    struct moe_status st = moe_rpc_msg_split(m, fields, 1, head, &length, take_x, p);
    moe_rpc_msg_free(m);
    void *request = NULL;
    if (!moe_failed(&st))
        st = moe_rpc_unpack(&moe__v1__forward_request__descriptor, head, length, &p->arena,
                            &request);
    p->request = request;
    if (moe_failed(&st)) {
        free(p->x);
        p->x = NULL;
    }
    return st;
}

static struct moe_rpc_out answer_with(struct tensor *x)
{
    struct moe_rpc_out out = {.head = (const uint8_t *)"\x18\x07", .head_length = 2}; /* 7 tokens */
    if (x != NULL) {
        out.parts[0] = lend(x, X_DATA);
        out.part_count = 1;
    }
    return out;
}

static void reply(struct moe_rpc_call *call, struct tensor *x)
{
    struct moe_rpc_out out = answer_with(x);
    moe_rpc_reply(call, &out);
}

struct task {
    struct moe_rpc_call *call;
    struct tensor *x;
};

static void *run_task(void *arg)
{
    struct task *t = arg;
    reply(t->call, t->x);
    moe_rpc_call_unref(t->call);
    free(t);
    return NULL;
}

static void reply_from_a_thread(struct moe_rpc_call *call, struct tensor *x)
{
    pthread_t thread;
    struct task *t = malloc(sizeof *t);
    if (t == NULL)
        abort();
    *t = (struct task){call, x};
    moe_rpc_call_ref(call);
    if (pthread_create(&thread, NULL, run_task, t) != 0)
        abort();
    pthread_detach(thread);
}

static void hang(struct fixture *f, struct moe_rpc_call *call, struct tensor *x)
{
    moe_rpc_call_ref(call);
    moe_rpc_call_set_user(call, x);
    moe_mutex_lock(&f->lock);
    f->hanging[f->hanging_count++] = call;
    pthread_cond_broadcast(&f->changed);
    moe_mutex_unlock(&f->lock);
}

static void unary_started(struct moe_rpc_call *call, void *ctx)
{
    struct fixture *f = ctx;
    (void)call;
    atomic_fetch_add(&f->started, 1);
}

static void unary_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct fixture *f = ctx;
    struct parsed p;
    struct moe_status st = parse(f, m, &p);
    if (moe_failed(&st)) {
        moe_rpc_fail(call, st);
        return;
    }
    const char *model = p.request->model;
    if (strcmp(model, "thread") == 0) {
        reply_from_a_thread(call, p.x);
    } else if (strcmp(model, "hang") == 0) {
        hang(f, call, p.x);
    } else if (strcmp(model, "sink") == 0) {
        free(p.x);
        reply(call, NULL);
    } else if (strncmp(model, "zeros:", 6) == 0) {
        size_t length = strtoul(model + 6, NULL, 10);
        free(p.x);
        struct tensor *zeros = tensor_create(f, length);
        memset(zeros->data, 0, length);
        reply(call, zeros);
    } else if (strncmp(model, "fail:", 5) == 0) {
        unsigned reason = (unsigned)atoi(model + 5);
        free(p.x);
        moe_rpc_fail(call,
                     moe_error_retry((enum moe_code)(1 + reason % 16), (enum moe_reason)reason,
                                     10 * reason, "failed as asked: %u \xc3\xa4%%\n", reason));
    } else {
        reply(call, p.x);
    }
}

static void stream_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct fixture *f = ctx;
    struct parsed p;
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    struct moe_status st = parse(f, m, &p);
    if (moe_failed(&st)) {
        moe_rpc_fail(call, st);
        return;
    }
    atomic_fetch_add(&f->stream_messages, 1);
    if (strcmp(p.request->model, "stop") == 0) {
        free(p.x);
        return;
    }
    struct moe_rpc_out out = answer_with(p.x);
    moe_rpc_send(call, &out);
}

static void stream_sent(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    moe_rpc_read_next(call);
}

static void on_cancelled(struct moe_rpc_call *call, void *ctx)
{
    struct fixture *f = ctx;
    (void)call;
    atomic_fetch_add(&f->cancelled, 1);
}

static void on_done(struct moe_rpc_call *call, void *ctx)
{
    struct fixture *f = ctx;
    (void)call;
    atomic_fetch_add(&f->done, 1);
}

/* ------------------------------------------------------------------ fixture */

struct moe_rpc_server_config fixture_config(void)
{
    return (struct moe_rpc_server_config){
        .listen = "127.0.0.1:0",
        .shards = 2,
        .max_message_bytes = 64 << 20,
        .max_reading_bytes = 256 << 20,
        .max_waiting_reads = 64,
        .max_concurrent_streams = 128,
        .descriptors = moe_proto_descriptors,
        .descriptors_length = (size_t)(moe_proto_descriptors_end - moe_proto_descriptors),
    };
}

struct moe_rpc_channel *fixture_channel(struct fixture *f, uint32_t max_message_bytes)
{
    char target[64];
    struct moe_rpc_channel *ch;
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_rpc_server_port(f->server));
    assert_ok(moe_rpc_channel_open(
        f->client,
        &(struct moe_rpc_channel_config){
            .target = target, .max_message_bytes = max_message_bytes, .own_connection = true},
        &ch));
    return ch;
}

void fixture_start(struct fixture *f, const struct moe_rpc_server_config *config)
{
    memset(f, 0, sizeof *f);
    moe_mutex_init(&f->lock);
    pthread_cond_init(&f->changed, NULL);
    struct moe_rpc_method methods[] = {{.path = UNARY_PATH,
                                        .kind = MOE_RPC_UNARY,
                                        .started = unary_started,
                                        .message = unary_message,
                                        .cancelled = on_cancelled,
                                        .done = on_done,
                                        .ctx = f},
                                       {.path = STREAM_PATH,
                                        .kind = MOE_RPC_STREAM,
                                        .message = stream_message,
                                        .sent = stream_sent,
                                        .cancelled = on_cancelled,
                                        .done = on_done,
                                        .ctx = f}};
    struct moe_rpc_server_config c = config != NULL ? *config : fixture_config();
    if (c.methods == NULL) {
        c.methods = methods;
        c.method_count = sizeof methods / sizeof *methods;
    }
    assert_ok(moe_rpc_server_start(&c, &f->server));
    assert_ok(moe_rpc_client_create(&f->client));
    f->channel = fixture_channel(f, 0);
}

void fixture_stop(struct fixture *f)
{
    fixture_answer_hanging(f);
    moe_rpc_channel_close(f->channel);
    moe_rpc_client_destroy(f->client);
    if (f->server != NULL)
        moe_rpc_server_drain(f->server, moe_clock_ns() + 2 * MOE_NS_PER_S);
    moe_rpc_server_stop(f->server);
    print_message("  parts lent %u, released %u; calls started %u, done %u, cancelled %u\n",
                  f->lent, f->released, f->started, f->done, f->cancelled);
    assert_int_equal(f->lent, f->released);
    pthread_cond_destroy(&f->changed);
    moe_mutex_destroy(&f->lock);
}

void fixture_await(const char *what, const atomic_uint *counter, unsigned at_least)
{
    uint64_t give_up = moe_clock_ns() + 20 * MOE_NS_PER_S;
    while (atomic_load(counter) < at_least) {
        if (moe_clock_ns() > give_up)
            fail_msg("waited in vain for %s: %u of %u", what, atomic_load(counter), at_least);
        usleep(500);
    }
}

void fixture_await_hanging(struct fixture *f, unsigned count)
{
    moe_mutex_lock(&f->lock);
    while (f->hanging_count < count)
        moe_wait(&f->changed, &f->lock);
    moe_mutex_unlock(&f->lock);
}

void fixture_answer_hanging(struct fixture *f)
{
    moe_mutex_lock(&f->lock);
    for (unsigned i = 0; i < f->hanging_count; i++) {
        reply(f->hanging[i], moe_rpc_call_user(f->hanging[i]));
        moe_rpc_call_unref(f->hanging[i]);
    }
    f->hanging_count = 0;
    moe_mutex_unlock(&f->lock);
}

struct moe_rpc_call_options fixture_options(uint64_t ms)
{
    return (struct moe_rpc_call_options){
        .deadline_ns = ms == 0 ? MOE_NEVER : moe_clock_ns() + ms * MOE_NS_PER_MS};
}

struct moe_rpc_out fixture_request(struct fixture *f, const char *model, const void *x,
                                   size_t length, uint8_t head[256])
{
    Moe__V1__ForwardRequest q = MOE__V1__FORWARD_REQUEST__INIT;
    q.model = (char *)(uintptr_t)model;
    q.layer = 3;
    struct moe_rpc_out out = {.head = head,
                              .head_length = moe__v1__forward_request__pack(&q, head)};
    struct tensor *t = tensor_create(f, length);
    if (length > 0)
        memcpy(t->data, x, length);
    out.parts[0] = lend(t, X_DATA);
    out.part_count = 1;
    return out;
}

struct moe_status fixture_call(struct fixture *f, struct moe_rpc_channel *ch, const char *model,
                               const void *x, size_t length, uint64_t ms, const void *y,
                               size_t y_length)
{
    uint8_t head[256];
    struct moe_rpc_msg *m;
    struct parsed p;
    struct moe_rpc_call_options options = fixture_options(ms);
    struct moe_rpc_out out = fixture_request(f, model, x, length, head);
    MOE_TRY(moe_rpc_call_wait(ch, UNARY_PATH, &options, &out, &m));
    assert_non_null(m);
    if (y == NULL) {
        moe_rpc_msg_free(m);
        return moe_ok();
    }
    /* ForwardResponse has its tensor in the same field. */
    MOE_TRY(parse(f, m, &p));
    assert_non_null(p.x);
    assert_int_equal(p.x->length, y_length);
    assert_memory_equal(p.x->data, y, y_length);
    free(p.x);
    return moe_ok();
}
