/* SPDX-License-Identifier: Apache-2.0 */
/* Forward calls: split into pieces, sent, retried, joined.
 *
 * A call has one piece, or with `spread` up to one per worker. A piece of many bytes is cut
 * further, for several connections to its worker: each has its threads on both sides, so the bytes
 * take several ways at once, and the worker copies one piece while the next ones arrive. Small
 * pieces of one worker name their batch, so that the worker computes them in one step; large ones
 * have a step each. A piece goes through attempts: send, answer, perhaps a pause and the next
 * worker. The call is over when every piece has its final answer AND the transport has released
 * every byte of x. `refs` counts both, because the caller may overwrite x as soon as `done` has
 * been called. */
#include "abi.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/size.h"
#include "base/wait.h"
#include "internal.h"
#include "wire.h"

#include <stdlib.h>

enum {
    BACKOFF_FIRST_MS = 10, /* pause before the second attempt; doubles from there */
    BACKOFF_MAX_MS = 1000,
    /* Least bytes of x of a piece that is cut for the bytes' sake: a connection takes about as long
     * to carry them as a second step takes that the worker may need for them. */
    LANE_BYTES = 1 << 20,
    LANES_WORTH = 4, /* fewer pieces of that size share a step instead, and may be smaller: */
    PART_BYTES = 256 << 10,
};

struct call;

struct piece {
    struct call *call;
    struct moe_client_rows rows;
    size_t connection;
    uint32_t attempt; /* 1, 2, ... */
    uint32_t refused; /* by so many workers since the last pause */
    bool limited;     /* the attempt ends before the call's time does */
    struct moe_client_timer pause;
    struct moe_status status; /* of the last attempt */
    struct moe_client_answer answer;
};

struct call {
    struct moe_client *client;
    struct moe_client_forward *f;
    moe_client_done done;
    void *ctx;
    uint64_t deadline_ns;
    uint64_t retry_end_ns; /* no attempt begins later */
    _Atomic uint32_t refs; /* pieces without a final answer + parts that the transport still uses */
    struct moe_client_timer end;
    size_t piece_count;
    struct piece pieces[];
};

/* True if it was the last one. */
static bool drop_ref(struct call *call)
{
    return atomic_fetch_sub_explicit(&call->refs, 1, memory_order_acq_rel) == 1;
}

/* The first failure of a piece. Pieces of different weights have failed too. */
static struct moe_status outcome(const struct call *call)
{
    const struct moe_client_answer *first = &call->pieces[0].answer;
    for (size_t i = 0; i < call->piece_count; i++) {
        const struct piece *p = &call->pieces[i];
        if (p->status.code != MOE_OK)
            return p->status;
        if (p->answer.weights_version != first->weights_version)
            return moe_error_retry(MOE_ABORTED, MOE_REASON_VERSION_MISMATCH, BACKOFF_FIRST_MS,
                                   "the weights changed while parts of a batch were computed");
    }
    return moe_ok();
}

/* Computes the call's status and answer from those of its pieces. */
static struct moe_status join(struct call *call)
{
    struct moe_client_answer *all = &call->pieces[0].answer;
    MOE_TRY(outcome(call));
    for (size_t i = 1; i < call->piece_count; i++) {
        const struct moe_client_answer *a = &call->pieces[i].answer;
        if (a->epoch > all->epoch)
            all->epoch = a->epoch;
        if (a->stages.server_ns > all->stages.server_ns)
            all->stages = a->stages;
        for (size_t j = 0; j < sizeof all->rehomed / sizeof *all->rehomed; j++)
            all->rehomed[j] |= a->rehomed[j];
    }
    moe_client_wire_answer(call->f, all);
    return moe_ok();
}

static void send_piece(struct piece *p, bool hand_over);

/* Parts with different weights: the batch goes out once more, as one piece if that is allowed. */
static bool send_whole(struct call *call)
{
    struct piece *p = &call->pieces[0];
    struct moe_client_rows all = {.f = call->f, .layer = p->rows.layer, .tokens = call->f->tokens};
    struct moe_status st = outcome(call);
    if (call->piece_count == 1 || st.reason != MOE_REASON_VERSION_MISMATCH ||
        st.code != MOE_ABORTED || moe_clock_ns() >= call->deadline_ns)
        return false;
    st = moe_client_wire_check_rows(&call->client->info, &all);
    if (moe_failed(&st))
        return false;
    call->piece_count = 1;
    p->rows = all;
    p->attempt = p->refused = 0;
    atomic_store(&call->refs, 1);
    send_piece(p, false);
    return true;
}

static void finish(struct call *call)
{
    struct moe_client *client = call->client;
    if (send_whole(call))
        return;
    struct moe_status st = join(call);
    call->done(call->ctx, call->f, st);
    free(call);
    moe_client_leave(client);
}

static void on_end(struct moe_client_timer *t)
{
    finish((struct call *)((char *)t - offsetof(struct call, end)));
}

/* The transport may hold its own locks here, so the user's callback goes to another thread. */
static void part_released(void *owner)
{
    struct call *call = owner;
    if (drop_ref(call))
        moe_client_timers_set(call->client->timers, &call->end, 0, on_end);
}

static void conclude(struct piece *p, struct moe_status st)
{
    p->status = st;
    if (drop_ref(p->call))
        finish(p->call);
}

/* splitmix64 over a shared counter. */
static uint64_t random_number(struct moe_client *c)
{
    uint64_t z =
        atomic_fetch_add_explicit(&c->jitter, UINT64_C(0x9e3779b97f4a7c15), memory_order_relaxed);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t moe_client_pause_ns(struct moe_client *c, uint32_t attempt, uint32_t retry_after_ms)
{
    uint64_t ms = BACKOFF_FIRST_MS;
    for (uint32_t i = 1; i < attempt && ms < BACKOFF_MAX_MS; i++)
        ms *= 2;
    if (ms > BACKOFF_MAX_MS)
        ms = BACKOFF_MAX_MS;
    uint64_t half = ms * MOE_NS_PER_MS / 2;
    uint64_t spread = random_number(c) % half;
    return (retry_after_ms != 0 ? retry_after_ms * MOE_NS_PER_MS : half) + spread;
}

static void on_pause_over(struct moe_client_timer *t)
{
    send_piece((struct piece *)((char *)t - offsetof(struct piece, pause)), false);
}

/* When the next attempt begins. */
static uint64_t next_attempt_ns(struct piece *p, bool stays, uint32_t retry_after_ms)
{
    struct moe_client *c = p->call->client;
    uint64_t now = moe_clock_ns();
    p->refused++;
    if (c->config.hedge && !stays && p->refused < c->worker_count)
        return now;
    p->refused = 0;
    return now + moe_client_pause_ns(c, p->attempt, retry_after_ms);
}

/* UNAVAILABLE alone guarantees that the server does not execute the request. EXPERT_UNAVAILABLE is
 * the answer that the caller asked for: other workers have the same view. A pass that is
 * retained for Backward is retried until the deadline, as its Backward is. */
static void retry_or_conclude(struct piece *p, struct moe_status st)
{
    struct moe_client *c = p->call->client;
    bool until_deadline = p->call->f->retain_session != NULL;
    bool counts = !until_deadline && c->config.retry_ms == 0;
    bool is_final = st.code != MOE_UNAVAILABLE || st.reason == MOE_REASON_EXPERT_UNAVAILABLE;
    uint64_t at = next_attempt_ns(p, until_deadline, st.retry_after_ms);
    if (is_final || (counts && p->attempt >= c->config.max_attempts) ||
        at >= p->call->retry_end_ns) {
        conclude(p, moe_client_blame_connection(&c->connections[p->connection], st));
        return;
    }
    if (!until_deadline) /* Backward asks the home worker for the pass */
        p->connection = (p->connection + 1) % c->connection_count;
    moe_client_timers_set(c->timers, &p->pause, at, on_pause_over);
}

static void on_reply(void *ctx, struct moe_status st, struct moe_rpc_msg *reply)
{
    struct piece *p = ctx;
    if (st.code == MOE_DEADLINE_EXCEEDED && p->limited)
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "no answer within attempt_ms");
    if (st.code == MOE_OK)
        st = moe_client_wire_unpack(&p->rows, reply, &p->answer);
    moe_rpc_msg_free(reply);
    retry_or_conclude(p, st);
}

/* The end of the attempt that begins now. A worker that is stopped keeps its connection, and
 * nothing else tells it from a slow one. */
static uint64_t attempt_end_ns(const struct piece *p)
{
    const struct call *call = p->call;
    const struct moe_client_config *config = &call->client->config;
    size_t workers = call->client->worker_count;
    if (config->attempt_ms == 0 || workers < 2 || call->f->retain_session != NULL)
        return call->deadline_ns;
    uint64_t limit_ns = moe_client_deadline(call->client, config->attempt_ms) - moe_clock_ns();
    for (size_t round = (p->attempt - 1) / workers; round > 0; round--)
        limit_ns = limit_ns < call->deadline_ns / 2 ? 2 * limit_ns : call->deadline_ns;
    uint64_t now = moe_clock_ns();
    bool last = config->retry_ms == 0 && p->attempt >= config->max_attempts;
    if (last || now >= call->retry_end_ns || limit_ns >= call->retry_end_ns - now)
        return call->deadline_ns;
    return now + limit_ns;
}

static void send_piece(struct piece *p, bool hand_over)
{
    struct call *call = p->call;
    uint8_t head[MOE_CLIENT_HEAD_MAX];
    struct moe_rpc_out out;
    if (p->attempt > 0)
        p->rows.parts = 0; /* the worker would wait for the others in vain */
    moe_client_wire_pack(&p->rows, 0, &call->client->wanted, head, part_released, call, &out);
    atomic_fetch_add_explicit(&call->refs, (uint32_t)out.part_count, memory_order_relaxed);
    p->attempt++;
    struct moe_rpc_call_options options = {.deadline_ns = attempt_end_ns(p),
                                           .hand_over = hand_over};
    p->limited = options.deadline_ns != call->deadline_ns;
    moe_rpc_call_unary(call->client->connections[p->connection].channel,
                       "/moe.v1.ExpertService/Forward", &options, &out, on_reply, p);
}

/* Workers that a batch goes to: 1, or with `spread` so many that none gets more than spread_tokens.
 */
static size_t count_workers(const struct moe_client *c, const struct moe_client_forward *f)
{
    if (!c->config.spread || f->retain_session != NULL)
        return 1;
    size_t wanted = ((size_t)f->tokens + c->config.spread_tokens - 1) / c->config.spread_tokens;
    return wanted < 1 ? 1 : wanted < c->worker_count ? wanted : c->worker_count;
}

/* Pieces for each of these workers: at most one per connection, and none with too few bytes.
 * `*joins`: they share a step. */
static size_t count_lanes(const struct moe_client *c, const struct moe_client_forward *f,
                          size_t workers, bool *joins)
{
    size_t bytes;
    *joins = false;
    if (f->retain_session != NULL ||
        !moe_size_mul3(f->tokens, f->hidden, moe_dtype_bytes(f->dtype), &bytes))
        return 1;
    bytes /= workers;
    *joins = c->joins_parts && bytes < LANES_WORTH * (size_t)LANE_BYTES;
    size_t lanes = bytes / (*joins ? PART_BYTES : LANE_BYTES);
    lanes = lanes < c->lanes ? lanes : c->lanes;
    return lanes < 1 || lanes * workers > f->tokens ? 1 : lanes;
}

/* `parts`: so many pieces of each worker share a step; less than 2: none do. */
static struct moe_status cut(struct call *call, uint32_t parts)
{
    struct moe_client *c = call->client;
    const struct moe_client_layer *layer;
    MOE_TRY(moe_client_wire_check(&c->info, call->f, &layer));
    const uint64_t tokens = call->f->tokens, batch = parts > 1 ? random_number(c) : 0;
    for (size_t i = 0; i < call->piece_count; i++) {
        uint32_t first = (uint32_t)(tokens * i / call->piece_count);
        uint32_t end = (uint32_t)(tokens * (i + 1) / call->piece_count);
        call->pieces[i].call = call;
        call->pieces[i].rows = (struct moe_client_rows){
            .f = call->f,
            .layer = layer,
            .first = first,
            .tokens = end - first,
            .parts = parts,
            .batch = batch,
        };
        MOE_TRY(moe_client_wire_check_rows(&c->info, &call->pieces[i].rows));
    }
    return moe_ok();
}

/* The threads of the connections send the pieces, so that none waits while others are copied to
 * their sockets. This thread sends that of its connection, or the first one. */
static void send_pieces(struct call *call)
{
    const size_t count = call->piece_count;
    const struct moe_client_connection *connections = call->client->connections;
    size_t own = 0;
    for (size_t i = 1; i < count && own == 0; i++)
        if (moe_rpc_client_is_this_thread(connections[call->pieces[i].connection].rpc))
            own = i;
    for (size_t i = 0; i < count; i++)
        if (i != own)
            send_piece(&call->pieces[i], true);
    send_piece(&call->pieces[own], false); /* with its answer, the call may be over */
}

void moe_client_forward_async(struct moe_client *c, struct moe_client_forward *f,
                              moe_client_done done, void *ctx)
{
    struct moe_status st = MOE_CLIENT_CHECK_SIZE(f, forward, FORWARD);
    const size_t workers = moe_failed(&st) ? 1 : count_workers(c, f);
    bool joins = false;
    const size_t lanes = moe_failed(&st) ? 1 : count_lanes(c, f, workers, &joins);
    const size_t count = workers * lanes;
    struct call *call = calloc(1, sizeof *call + count * sizeof call->pieces[0]);
    if (call == NULL) {
        done(ctx, f, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "forward"));
        return;
    }
    moe_client_enter(c);
    call->client = c;
    call->f = f;
    call->done = done;
    call->ctx = ctx;
    call->piece_count = count;
    if (!moe_failed(&st))
        st = cut(call, joins ? (uint32_t)lanes : 0);
    if (st.code != MOE_OK) {
        call->pieces[0].status = st;
        moe_client_timers_set(c->timers, &call->end, 0, on_end);
        return;
    }
    call->deadline_ns = call->retry_end_ns = moe_client_deadline(c, f->timeout_ms);
    if (c->config.retry_ms != 0 && f->retain_session == NULL)
        call->retry_end_ns =
            moe_earlier(call->deadline_ns, moe_client_deadline(c, c->config.retry_ms));
    atomic_init(&call->refs, (uint32_t)count);
    size_t connection = f->retain_session != NULL ? MOE_CLIENT_HOME : moe_client_take_connection(c);
    for (size_t i = 0; i < count; i++)
        call->pieces[i].connection =
            count == workers ? (connection + i) % c->connection_count
                             : moe_client_take_lane(c, (connection + i % workers) % c->worker_count,
                                                    i / workers);
    send_pieces(call);
}

/* The end of a blocking call. */
struct waiter {
    struct moe_mutex lock;
    pthread_cond_t over;
    MOE_GUARDED_BY(lock) struct {
        bool is_over;
        struct moe_status status;
    };
};

static void on_done(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct waiter *w = ctx;
    (void)f;
    moe_mutex_lock(&w->lock);
    w->status = st;
    w->is_over = true;
    pthread_cond_signal(&w->over);
    moe_mutex_unlock(&w->lock);
}

struct moe_status moe_client_forward(struct moe_client *c, struct moe_client_forward *f)
{
    struct waiter w = {.lock = MOE_MUTEX_INITIALIZER, .over = PTHREAD_COND_INITIALIZER};
    moe_client_forward_async(c, f, on_done, &w);
    moe_mutex_lock(&w.lock);
    while (!w.is_over)
        moe_wait(&w.over, &w.lock);
    struct moe_status st = w.status;
    moe_mutex_unlock(&w.lock);
    pthread_cond_destroy(&w.over);
    moe_mutex_destroy(&w.lock);
    return st;
}
