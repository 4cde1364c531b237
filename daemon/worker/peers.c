/* One lock and no thread: whoever brings news (a request's thread, the engine's, gRPC's) carries it
 * all the way, to the sequencer and through it to the tickets that are now due, or onto the stream.
 * The engine and the rpc room are called with the lock held and never call back from within. */
#include "worker/peers.h"

#include "base/clock.h"
#include "base/log.h"
#include "moe/v1/worker.pb-c.h"
#include "worker/control.h"
#include "worker/sequencer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ENDPOINT_BYTES = 256,
    BACKLOG_MAX = 64, /* unsent messages beyond which notices wait, and merge */
};

static const char sequence_path[] = "/moe.v1.WorkerService/Sequence";

enum phase {
    IDLE,
    EXPECTED, /* peers may join and announce */
    STARTED,  /* tickets are issued and run */
};

enum role {
    SEQUENCER, /* this worker's own sequencer decides */
    MEMBER,    /* a peer's does */
};

struct notice {
    struct moe_sequencer_key key;
    uint32_t tokens;
};

struct call_notice {
    struct moe_ticket call;
    uint32_t tokens;
};

struct moe_peers {
    struct moe_peers_config config;

    pthread_mutex_t lock; /* guards everything below */
    enum phase phase;
    enum role role;             /* meaningless while IDLE, as is what follows */
    struct moe_peers_view view; /* endpoints are not kept */
    char sequencer_endpoint[ENDPOINT_BYTES];
    uint32_t sequencer_slot;

    /* SEQUENCER */
    struct moe_sequencer *sequencer;
    uint64_t joined;                           /* bit s: slot s has said hello; own bit set */
    struct moe_rpc_call *calls[MOE_MAX_SLOTS]; /* of those that joined; one hold each */

    /* MEMBER */
    struct moe_rpc_channel *channel;
    struct moe_rpc_stream *stream;             /* set when started */
    struct notice notices[MOE_SEQUENCER_KEYS]; /* not yet sent, merged by key */
    size_t notice_count;
    struct call_notice call_notices[MOE_SEQUENCER_CALLS]; /* not yet sent, in order */
    size_t call_notice_count;
};

/* One stream of a peer to this sequencer; the call's user state. */
struct seat {
    uint32_t slot;
    uint64_t epoch;
    bool joined;
};

/* ------------------------------------------------------------------- sequencing
 *
 * All with the lock held. */

static void report_lost(struct moe_peers *p, uint64_t slots, struct moe_status why)
{
    p->config.lost(p->config.ctx, p->view.epoch, slots, why);
}

/* `to` borrows the body. */
static void describe_order(const struct moe_training_order *from, Moe__V1__TrainingOrder *to)
{
    moe__v1__training_order__init(to);
    to->origin = from->origin;
    to->number = from->number;
    to->body.data = (uint8_t *)(uintptr_t)from->body; /* packing only reads */
    to->body.len = from->length;
}

static bool read_order(const Moe__V1__TrainingOrder *from, struct moe_training_order *to)
{
    if (from->body.len > sizeof to->body)
        return false;
    to->origin = from->origin;
    to->number = from->number;
    to->length = (uint32_t)from->body.len;
    if (from->body.len > 0)
        memcpy(to->body, from->body.data, from->body.len);
    return true;
}

static void send_ticket(struct moe_peers *p, const struct moe_ticket *t)
{
    Moe__V1__Ticket ticket = MOE__V1__TICKET__INIT;
    ticket.epoch = t->epoch;
    ticket.seq = t->seq;
    ticket.layer = t->layer;
    ticket.kind = (Moe__V1__StepKind)t->kind;
    ticket.dtype = (Moe__V1__DataType)t->dtype;
    ticket.bucket = t->bucket;
    Moe__V1__TrainingOrder order;
    if (moe_step_has_order(t->kind)) {
        describe_order(&t->order, &order);
        ticket.training = &order;
    }
    Moe__V1__SequenceResponse response = MOE__V1__SEQUENCE_RESPONSE__INIT;
    response.body_case = MOE__V1__SEQUENCE_RESPONSE__BODY_TICKET;
    response.ticket = &ticket;
    struct moe_control_out packed;
    struct moe_status st = moe_control_pack(&response.base, &packed);
    if (moe_failed(&st)) {
        report_lost(p, 0, st);
        return;
    }
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (p->calls[slot] != NULL)
            moe_rpc_send(p->calls[slot], &packed.out);
    moe_control_free(&packed);
}

/* Issues every ticket that is due. After each input of the sequencer. */
static void issue_tickets(struct moe_peers *p)
{
    if (p->phase != STARTED || p->role != SEQUENCER || p->joined != p->view.live)
        return;
    struct moe_ticket t;
    while (moe_sequencer_next(p->sequencer, &t)) {
        send_ticket(p, &t);
        p->config.run(p->config.ctx, &t);
    }
}

/* ------------------------------------------------ service: peers speak to our sequencer */

static struct moe_status stale(const struct moe_peers *p, uint64_t epoch)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                     "epoch %llu is not in force here; the current one is %llu",
                     (unsigned long long)epoch,
                     (unsigned long long)(p->phase == IDLE ? 0 : p->view.epoch));
}

static struct moe_status on_hello(struct moe_peers *p, struct moe_rpc_call *call, struct seat *seat,
                                  const Moe__V1__SequenceHello *hello)
{
    if (p->phase == IDLE || hello->epoch != p->view.epoch)
        return stale(p, hello->epoch);
    if (p->role != SEQUENCER)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "slot %u is not the sequencer of epoch %llu", p->view.slot,
                         (unsigned long long)hello->epoch);
    if (seat->joined || hello->slot >= MOE_MAX_SLOTS || hello->slot == p->view.slot ||
        (p->view.live >> hello->slot & 1) == 0 ||
        p->view.members[hello->slot].incarnation != hello->incarnation)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                         "the caller is not slot %u of epoch %llu", hello->slot,
                         (unsigned long long)hello->epoch);
    if ((p->joined >> hello->slot & 1) != 0)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE, "slot %u has already joined",
                         hello->slot);
    *seat = (struct seat){.slot = hello->slot, .epoch = hello->epoch, .joined = true};
    moe_rpc_call_hold(call);
    p->calls[seat->slot] = call;
    p->joined |= UINT64_C(1) << seat->slot;
    return moe_ok();
}

static struct moe_status on_call(struct moe_peers *p, uint32_t slot, const Moe__V1__WorkNotice *n)
{
    struct moe_ticket call = {
        .layer = n->layer, .kind = (enum moe_step_kind)n->kind, .dtype = (enum moe_dtype)n->dtype};
    if (!read_order(n->training, &call.order))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "a training call is too long");
    return moe_sequencer_call(p->sequencer, slot, &call, n->tokens);
}

static struct moe_status on_request(struct moe_peers *p, struct moe_rpc_call *call,
                                    struct seat *seat, const Moe__V1__SequenceRequest *q)
{
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_HELLO)
        return on_hello(p, call, seat, q->hello);
    if (!seat->joined)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MALFORMED,
                         "the first message of the stream must be SequenceHello");
    if (p->phase == IDLE || seat->epoch != p->view.epoch)
        return stale(p, seat->epoch);
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK && q->work->training != NULL)
        return on_call(p, seat->slot, q->work);
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK) {
        struct moe_sequencer_key key = {q->work->layer, (enum moe_step_kind)q->work->kind,
                                        (enum moe_dtype)q->work->dtype};
        return moe_sequencer_work(p->sequencer, seat->slot, &key, q->work->tokens);
    }
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_DONE) {
        struct moe_status failure = moe_control_status(q->done->error);
        MOE_TRY(moe_sequencer_done(p->sequencer, seat->slot, q->done->seq, !moe_failed(&failure)));
        if (moe_failed(&failure))
            report_lost(p, 0, moe_error_context(failure, "slot %u", seat->slot));
        return moe_ok();
    }
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "unknown kind of message");
}

static void call_started(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct seat *seat = calloc(1, sizeof *seat);
    moe_rpc_call_set_user(call, seat);
    if (seat == NULL)
        moe_rpc_fail(call, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                     "no memory for a stream"));
}

static struct moe_status read_request(struct moe_peers *p, struct moe_rpc_call *call,
                                      struct moe_rpc_msg *m)
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st =
        moe_rpc_msg_unpack(m, &moe__v1__sequence_request__descriptor, &arena, &message);
    moe_rpc_msg_free(m);
    if (moe_failed(&st))
        return st;
    const Moe__V1__SequenceRequest *q = message;
    pthread_mutex_lock(&p->lock);
    st = on_request(p, call, moe_rpc_call_user(call), q);
    if (!moe_failed(&st))
        issue_tickets(p);
    pthread_mutex_unlock(&p->lock);
    return st;
}

static void call_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    struct moe_status st = read_request(ctx, call, m);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
    else
        moe_rpc_read_next(call);
}

static void call_done(struct moe_rpc_call *call, void *ctx)
{
    struct moe_peers *p = ctx;
    struct seat *seat = moe_rpc_call_user(call);
    if (seat == NULL)
        return;
    pthread_mutex_lock(&p->lock);
    bool ours = seat->joined && p->calls[seat->slot] == call;
    if (ours) {
        p->calls[seat->slot] = NULL;
        report_lost(p, UINT64_C(1) << seat->slot,
                    moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                              "the stream of slot %u has ended", seat->slot));
    }
    pthread_mutex_unlock(&p->lock);
    if (ours)
        moe_rpc_call_release(call);
    free(seat);
}

void moe_peers_method(struct moe_peers *p, struct moe_rpc_method *out)
{
    *out = (struct moe_rpc_method){
        .path = sequence_path,
        .kind = MOE_RPC_STREAM,
        .started = call_started,
        .message = call_message,
        .done = call_done,
        .ctx = p,
    };
}

/* ------------------------------------------------- member: we speak to a peer's sequencer
 *
 * Sending: with the lock held. A failed send needs no answer here: the stream is over then, and
 * `closed` tells. */

static void send_request(struct moe_rpc_stream *stream, const Moe__V1__SequenceRequest *q)
{
    struct moe_status st = moe_control_send(stream, &q->base);
    if (moe_failed(&st))
        moe_log_debug("sequencer: %s", st.text);
}

static void send_hello(const struct moe_peers *p, struct moe_rpc_stream *stream)
{
    Moe__V1__SequenceHello hello = MOE__V1__SEQUENCE_HELLO__INIT;
    hello.slot = p->view.slot;
    hello.epoch = p->view.epoch;
    hello.incarnation = p->config.incarnation;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_HELLO;
    q.hello = &hello;
    send_request(stream, &q);
}

static void send_call(struct moe_rpc_stream *stream, const struct call_notice *notice)
{
    Moe__V1__TrainingOrder order;
    Moe__V1__WorkNotice work = MOE__V1__WORK_NOTICE__INIT;
    describe_order(&notice->call.order, &order);
    work.layer = notice->call.layer;
    work.kind = (Moe__V1__StepKind)notice->call.kind;
    work.dtype = (Moe__V1__DataType)notice->call.dtype;
    work.tokens = notice->tokens;
    work.training = &order;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_WORK;
    q.work = &work;
    send_request(stream, &q);
}

static void send_notices(struct moe_peers *p)
{
    if (p->stream == NULL || moe_rpc_stream_backlog(p->stream) >= BACKLOG_MAX)
        return;
    for (size_t i = 0; i < p->notice_count; i++) {
        Moe__V1__WorkNotice work = MOE__V1__WORK_NOTICE__INIT;
        work.layer = p->notices[i].key.layer;
        work.kind = (Moe__V1__StepKind)p->notices[i].key.kind;
        work.dtype = (Moe__V1__DataType)p->notices[i].key.dtype;
        work.tokens = p->notices[i].tokens;
        Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
        q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_WORK;
        q.work = &work;
        send_request(p->stream, &q);
    }
    p->notice_count = 0;
    for (size_t i = 0; i < p->call_notice_count; i++)
        send_call(p->stream, &p->call_notices[i]);
    p->call_notice_count = 0;
}

static void add_notice(struct moe_peers *p, const struct moe_sequencer_key *key, uint32_t tokens)
{
    for (size_t i = 0; i < p->notice_count; i++) {
        struct notice *n = &p->notices[i];
        if (n->key.layer == key->layer && n->key.kind == key->kind && n->key.dtype == key->dtype &&
            n->tokens <= UINT32_MAX - tokens) {
            n->tokens += tokens;
            return;
        }
    }
    if (p->notice_count == MOE_SEQUENCER_KEYS) {
        report_lost(p, 0, moe_error(MOE_INTERNAL, MOE_REASON_TOO_LARGE, "too many kinds of work"));
        return;
    }
    p->notices[p->notice_count++] = (struct notice){*key, tokens};
}

static void send_done(struct moe_peers *p, uint64_t seq, const struct moe_status *status)
{
    if (p->stream == NULL)
        return;
    Moe__V1__Error error;
    Moe__V1__StepDone done = MOE__V1__STEP_DONE__INIT;
    done.seq = seq;
    if (moe_failed(status)) {
        moe_control_error(status, &error);
        done.error = &error;
    }
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_DONE;
    q.done = &done;
    send_request(p->stream, &q);
}

static bool read_ticket(struct moe_rpc_msg *m, struct moe_ticket *out)
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st =
        moe_rpc_msg_unpack(m, &moe__v1__sequence_response__descriptor, &arena, &message);
    moe_rpc_msg_free(m);
    if (moe_failed(&st))
        return false;
    const Moe__V1__SequenceResponse *r = message;
    if (r->body_case != MOE__V1__SEQUENCE_RESPONSE__BODY_TICKET)
        return false;
    *out = (struct moe_ticket){
        .epoch = r->ticket->epoch,
        .seq = r->ticket->seq,
        .layer = r->ticket->layer,
        .kind = (enum moe_step_kind)r->ticket->kind,
        .dtype = (enum moe_dtype)r->ticket->dtype,
        .bucket = r->ticket->bucket,
    };
    if (moe_step_has_order(out->kind))
        return r->ticket->training != NULL && read_order(r->ticket->training, &out->order);
    return true;
}

static void stream_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_peers *p = ctx;
    struct moe_ticket t;
    bool good = read_ticket(m, &t);
    pthread_mutex_lock(&p->lock);
    if (p->phase == STARTED && !good)
        report_lost(p, UINT64_C(1) << p->sequencer_slot,
                    moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                              "the sequencer sent something that is no ticket"));
    else if (p->phase == STARTED && t.epoch == p->view.epoch)
        p->config.run(p->config.ctx, &t);
    send_notices(p); /* those that waited because the stream was full */
    pthread_mutex_unlock(&p->lock);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    struct moe_peers *p = ctx;
    pthread_mutex_lock(&p->lock);
    if (p->phase == STARTED)
        report_lost(p, UINT64_C(1) << p->sequencer_slot,
                    moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                              "the sequencer ended its stream: %s",
                              moe_failed(&status) ? status.text : "closed by the peer"));
    pthread_mutex_unlock(&p->lock);
}

/* With the lock held. */
static struct moe_status open_stream(struct moe_peers *p)
{
    const struct moe_rpc_channel_config channel = {
        .target = p->sequencer_endpoint,
        .own_connection = true, /* tickets must not queue behind anything */
    };
    MOE_TRY(moe_rpc_channel_open(p->config.client, &channel, &p->channel));
    /* The sequencer has been listening since before it registered: failing to connect is evidence,
     * not a reason to wait. */
    const struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    const struct moe_rpc_stream_events events = {stream_message, stream_closed};
    MOE_TRY(moe_rpc_stream_open(p->channel, sequence_path, &options, &events, p, &p->stream));
    send_hello(p, p->stream);
    send_notices(p);
    return moe_ok();
}

/* ---------------------------------------------------------------- what the engine says */

void moe_peers_announce(struct moe_peers *p, uint32_t layer, enum moe_step_kind kind,
                        enum moe_dtype dtype, uint32_t tokens)
{
    const struct moe_sequencer_key key = {layer, kind, dtype};
    pthread_mutex_lock(&p->lock);
    if (p->phase != IDLE && p->role == SEQUENCER) {
        struct moe_status st = moe_sequencer_work(p->sequencer, p->view.slot, &key, tokens);
        if (moe_failed(&st))
            report_lost(p, 0, st);
        issue_tickets(p);
    } else if (p->phase != IDLE) {
        add_notice(p, &key, tokens);
        send_notices(p);
    }
    pthread_mutex_unlock(&p->lock);
}

void moe_peers_announce_training(struct moe_peers *p, const struct moe_ticket *call,
                                 uint32_t tokens)
{
    pthread_mutex_lock(&p->lock);
    bool current = p->phase != IDLE && p->view.epoch == call->epoch;
    if (current && p->role == SEQUENCER) {
        struct moe_status st = moe_sequencer_call(p->sequencer, p->view.slot, call, tokens);
        if (moe_failed(&st))
            report_lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        /* The engine lets no more calls wait than there is room for. */
        MOE_INVARIANT(p->call_notice_count < MOE_SEQUENCER_CALLS);
        p->call_notices[p->call_notice_count++] = (struct call_notice){*call, tokens};
        send_notices(p);
    }
    pthread_mutex_unlock(&p->lock);
}

void moe_peers_finished(struct moe_peers *p, const struct moe_ticket *ticket,
                        const struct moe_status *status)
{
    pthread_mutex_lock(&p->lock);
    bool current = p->phase == STARTED && p->view.epoch == ticket->epoch;
    if (current && p->role == SEQUENCER) {
        struct moe_status st =
            moe_sequencer_done(p->sequencer, p->view.slot, ticket->seq, !moe_failed(status));
        if (moe_failed(&st))
            report_lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        send_done(p, ticket->seq, status);
        send_notices(p);
    }
    pthread_mutex_unlock(&p->lock);
}

/* ------------------------------------------------------------------------ views */

struct moe_status moe_peers_expect(struct moe_peers *p, const struct moe_peers_view *view)
{
    MOE_INVARIANT((view->live >> view->slot & 1) != 0);
    moe_peers_stop(p);
    uint32_t lowest = (uint32_t)__builtin_ctzll(view->live);
    const char *endpoint = view->members[lowest].endpoint;

    pthread_mutex_lock(&p->lock);
    int n = snprintf(p->sequencer_endpoint, sizeof p->sequencer_endpoint, "%s",
                     endpoint == NULL ? "" : endpoint);
    bool fits = n >= 0 && (size_t)n < sizeof p->sequencer_endpoint;
    if (fits) {
        p->view = *view;
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
            p->view.members[s].endpoint = NULL;
        p->sequencer_slot = lowest;
        p->role = lowest == view->slot ? SEQUENCER : MEMBER;
        p->joined = UINT64_C(1) << view->slot;
        moe_sequencer_begin(p->sequencer, view->epoch, view->live, view->max_bucket);
        p->phase = EXPECTED;
    }
    pthread_mutex_unlock(&p->lock);
    return fits ? moe_ok()
                : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                            "the endpoint of slot %u is too long", lowest);
}

struct moe_status moe_peers_start(struct moe_peers *p)
{
    struct moe_status st = moe_ok();
    pthread_mutex_lock(&p->lock);
    MOE_INVARIANT(p->phase == EXPECTED);
    p->phase = STARTED;
    if (p->role == MEMBER)
        st = open_stream(p);
    else
        issue_tickets(p);
    pthread_mutex_unlock(&p->lock);
    return st;
}

void moe_peers_stop(struct moe_peers *p)
{
    struct moe_rpc_call *calls[MOE_MAX_SLOTS];
    pthread_mutex_lock(&p->lock);
    p->phase = IDLE;
    memcpy(calls, p->calls, sizeof calls);
    memset(p->calls, 0, sizeof p->calls);
    struct moe_rpc_stream *stream = p->stream;
    struct moe_rpc_channel *channel = p->channel;
    p->stream = NULL;
    p->channel = NULL;
    p->notice_count = p->call_notice_count = 0;
    pthread_mutex_unlock(&p->lock);

    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        if (calls[s] == NULL)
            continue;
        moe_rpc_fail(calls[s],
                     moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the view has ended"));
        moe_rpc_call_release(calls[s]);
    }
    if (stream != NULL)
        moe_rpc_stream_free(stream);
    moe_rpc_channel_close(channel);
}

/* ---------------------------------------------------------------------- lifetime */

struct moe_status moe_peers_create(const struct moe_peers_config *config, struct moe_peers **out)
{
    struct moe_peers *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the peers");
    p->config = *config;
    struct moe_status st = moe_sequencer_create(&p->sequencer);
    if (moe_failed(&st)) {
        free(p);
        return st;
    }
    if (config->training_permille != 0)
        moe_sequencer_set_share(p->sequencer, config->training_permille);
    pthread_mutex_init(&p->lock, NULL);
    *out = p;
    return moe_ok();
}

void moe_peers_destroy(struct moe_peers *p)
{
    if (p == NULL)
        return;
    moe_peers_stop(p);
    moe_sequencer_destroy(p->sequencer);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
