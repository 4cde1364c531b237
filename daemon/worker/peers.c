/* One lock and no thread: whoever brings news (a request's thread, the engine's, gRPC's) carries it
 * all the way, to the sequencer and through it to the tickets that are now due, or onto the stream.
 * The engine and the rpc room are called with the lock held and never call back from within. */
#include "worker/peers.h"

#include "base/log.h"
#include "worker/peers_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char moe_peers__path[] = "/moe.v1.WorkerService/Sequence";

/* One stream of a peer to this sequencer; the call's user state. */
struct seat {
    uint32_t slot;
    uint64_t epoch;
    bool joined;
};

/* ------------------------------------------------------------------- sequencing
 *
 * All with the lock held. */

void moe_peers__lost(struct moe_peers *p, uint64_t slots, struct moe_status why)
{
    p->config.lost(p->config.ctx, p->view.epoch, slots, why);
}

void moe_peers__lose_slot(struct moe_peers *p, uint32_t slot, struct moe_status why)
{
    moe_peers__lost(p, UINT64_C(1) << slot, why);
}

/* The mailbox that a peer names, to write as this slot; NULL where it cannot be seen from here,
 * which is no failure: the stream is there. */
struct moe_post *moe_peers__open_post(const struct moe_peers *p, const Moe__V1__Mailbox *named)
{
    struct moe_post *post = NULL;
    if (named == NULL || p->mailbox == NULL)
        return NULL;
    const struct moe_mail_address to = moe_wire_read_mailbox(named);
    struct moe_status st = moe_post_open(&to, p->view.slot, &post);
    if (moe_failed(&st))
        moe_log_debug("a peer is reached over gRPC: %s", st.text);
    return post;
}

/* Mailboxes first: what goes there is heard soonest. */
static void send_packed(struct moe_peers *p, const struct moe_rpc_out *out)
{
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        if (p->posts[slot] == NULL)
            continue;
        if (moe_post_room(p->posts[slot]) > 0)
            moe_post_send(p->posts[slot], out->head, out->head_length);
        else
            moe_peers__lose_slot(p, slot,
                                 moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                           "slot %u takes no tickets from its mailbox", slot));
    }
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (p->calls[slot] != NULL && p->posts[slot] == NULL)
            moe_rpc_send(p->calls[slot], out);
}

static void send_ticket(struct moe_peers *p, const struct moe_ticket *t)
{
    struct moe_control_out packed;
    struct moe_status st = moe_wire_pack_ticket(t, &packed);
    if (moe_failed(&st)) {
        moe_peers__lost(p, 0, st);
        return;
    }
    send_packed(p, &packed.out);
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

/* Tells the caller of hello where to send from now on. */
static struct moe_status welcome(struct moe_peers *p, struct moe_rpc_call *call,
                                 const Moe__V1__SequenceHello *hello)
{
    struct moe_control_out packed;
    MOE_TRY(moe_wire_pack_welcome(p->mailbox, &packed));
    moe_rpc_send(call, &packed.out);
    moe_control_free(&packed);
    p->posts[hello->slot] = moe_peers__open_post(p, hello->mailbox);
    moe_log_info("epoch %llu: slot %u hears of steps %s", (unsigned long long)p->view.epoch,
                 hello->slot, p->posts[hello->slot] != NULL ? "by shared memory" : "over gRPC");
    return moe_ok();
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
    MOE_TRY(welcome(p, call, hello));
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
    if (!moe_wire_read_order(n->training, &call.order))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "a training call is too long");
    return moe_sequencer_call(p->sequencer, slot, &call, n->tokens);
}

static struct moe_status on_done(struct moe_peers *p, uint32_t slot, const Moe__V1__StepDone *done)
{
    struct moe_status failure = moe_control_status(done->error);
    MOE_TRY(moe_sequencer_done(p->sequencer, slot, done->seq, !moe_failed(&failure)));
    if (moe_failed(&failure))
        moe_peers__lost(p, 0, moe_error_context(failure, "slot %u", slot));
    return moe_ok();
}

/* What a slot that has joined says. */
static struct moe_status on_news(struct moe_peers *p, uint32_t slot,
                                 const Moe__V1__SequenceRequest *q)
{
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK && q->work->training != NULL)
        return on_call(p, slot, q->work);
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK) {
        struct moe_sequencer_key key = {q->work->layer, (enum moe_step_kind)q->work->kind,
                                        (enum moe_dtype)q->work->dtype};
        return moe_sequencer_work(p->sequencer, slot, &key, q->work->tokens);
    }
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_DONE)
        return on_done(p, slot, q->done);
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "unknown kind of message");
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
    return on_news(p, seat->slot, q);
}

/* --------------------------------------------------------------------------- mail
 *
 * All with the lock held. */

/* One message of a member; a bad one ends its stream, as if it had come there. */
static void read_news(struct moe_peers *p, uint32_t slot, const uint8_t *bytes, size_t length,
                      struct moe_rpc_arena *arena)
{
    const Moe__V1__SequenceRequest *q =
        moe_rpc_unpack(&moe__v1__sequence_request__descriptor, bytes, length, arena);
    if (p->calls[slot] == NULL) /* its stream is over: so is the view */
        return;
    struct moe_status st =
        q == NULL ? moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "not a SequenceRequest")
                  : on_news(p, slot, q);
    if (moe_failed(&st))
        moe_rpc_fail(p->calls[slot], st);
}

static void read_box(struct moe_peers *p, uint32_t slot, struct moe_rpc_arena *arena)
{
    uint8_t bytes[MOE_MAIL_MAX];
    size_t length = 0;
    for (int i = 0; i < MOE_MAIL_CELLS; i++) /* the rest rings again */
        switch (moe_mailbox_take(p->mailbox, slot, bytes, &length)) {
        case MOE_MAIL_NONE: return;
        case MOE_MAIL_TAKEN:
            if (p->role == SEQUENCER)
                read_news(p, slot, bytes, length, arena);
            else
                moe_peers__read_order(p, bytes, length, arena);
            break;
        case MOE_MAIL_BROKEN:
            moe_peers__lose_slot(p, slot,
                                 moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                                           "slot %u broke its part of the mailbox", slot));
            return;
        }
}

/* Reads what has come by mail; on a member, only once it knows how to answer. */
void moe_peers__read_mail(struct moe_peers *p)
{
    struct moe_rpc_arena arena;
    if (p->mailbox == NULL || p->phase == IDLE)
        return;
    if (p->role == MEMBER && (!p->welcome || p->phase != STARTED))
        return;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (p->role == SEQUENCER ? p->calls[slot] != NULL : slot == p->sequencer_slot)
            read_box(p, slot, &arena);
}

/* ---------------------------------------------------------------------- its streams */

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
    moe_peers__read_mail(p); /* it was sent before */
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
        moe_peers__read_mail(p); /* may say why */
        p->calls[seat->slot] = NULL;
        moe_peers__lost(p, UINT64_C(1) << seat->slot,
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
        .path = moe_peers__path,
        .kind = MOE_RPC_STREAM,
        .started = call_started,
        .message = call_message,
        .done = call_done,
        .ctx = p,
    };
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
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (p->phase != IDLE) {
        moe_peers__add_notice(p, &key, tokens);
        moe_peers__send_notices(p);
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
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        /* The engine lets no more calls wait than there is room for. */
        MOE_INVARIANT(p->call_notice_count < MOE_SEQUENCER_CALLS);
        p->call_notices[p->call_notice_count++] = (struct call_notice){*call, tokens};
        moe_peers__send_notices(p);
    }
    pthread_mutex_unlock(&p->lock);
}

/* On a member nobody asks its sequencer, and a view that ends begins anew. */
void moe_peers_hold(struct moe_peers *p, bool hold)
{
    pthread_mutex_lock(&p->lock);
    moe_sequencer_hold(p->sequencer, hold);
    pthread_mutex_unlock(&p->lock);
}

void moe_peers_finished(struct moe_peers *p, const struct moe_ticket *ticket,
                        const struct moe_status *status)
{
    pthread_mutex_lock(&p->lock);
    bool current = p->phase == STARTED && p->view.epoch == ticket->epoch;
    if (current && p->role == SEQUENCER) {
        moe_peers__read_mail(p); /* others may be done as well */
        struct moe_status st =
            moe_sequencer_done(p->sequencer, p->view.slot, ticket->seq, !moe_failed(status));
        if (moe_failed(&st))
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        moe_peers__send_done(p, ticket->seq, status);
        moe_peers__send_notices(p);
    }
    pthread_mutex_unlock(&p->lock);
}

void moe_peers_listen(struct moe_peers *p)
{
    pthread_mutex_lock(&p->lock);
    moe_peers__read_mail(p);
    issue_tickets(p);
    if (p->phase == STARTED && p->role == MEMBER)
        moe_peers__send_notices(p); /* those that waited */
    pthread_mutex_unlock(&p->lock);
}

/* ------------------------------------------------------------------------ views */

/* A worker that can share no memory is reached over gRPC. */
static struct moe_mailbox *create_mailbox(const struct moe_peers *p)
{
    struct moe_mailbox *mailbox = NULL;
    if (p->config.bell == NULL)
        return NULL;
    struct moe_status st = moe_mailbox_create(p->config.bell, &mailbox);
    if (moe_failed(&st))
        moe_log_warn("peers reach this worker over gRPC only: %s", st.text);
    return mailbox;
}

struct moe_status moe_peers_expect(struct moe_peers *p, const struct moe_peers_view *view)
{
    MOE_INVARIANT((view->live >> view->slot & 1) != 0);
    moe_peers_stop(p);
    uint32_t lowest = (uint32_t)__builtin_ctzll(view->live);
    const char *endpoint = view->members[lowest].endpoint;
    struct moe_mailbox *mailbox = create_mailbox(p);

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
        p->mailbox = mailbox;
        p->welcome = false;
        p->phase = EXPECTED;
    }
    pthread_mutex_unlock(&p->lock);
    if (!fits)
        moe_mailbox_destroy(mailbox);
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
        st = moe_peers__open_stream(p);
    else
        issue_tickets(p);
    pthread_mutex_unlock(&p->lock);
    return st;
}

void moe_peers_stop(struct moe_peers *p)
{
    struct moe_rpc_call *calls[MOE_MAX_SLOTS];
    struct moe_post *posts[MOE_MAX_SLOTS];
    pthread_mutex_lock(&p->lock);
    p->phase = IDLE;
    memcpy(posts, p->posts, sizeof posts);
    memset(p->posts, 0, sizeof p->posts);
    struct moe_mailbox *mailbox = p->mailbox;
    p->mailbox = NULL;
    memcpy(calls, p->calls, sizeof calls);
    memset(p->calls, 0, sizeof p->calls);
    struct moe_rpc_stream *stream = p->stream;
    struct moe_rpc_channel *channel = p->channel;
    p->stream = NULL;
    p->channel = NULL;
    p->notice_count = p->call_notice_count = 0;
    pthread_mutex_unlock(&p->lock);

    moe_mailbox_destroy(mailbox);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        moe_post_close(posts[s]);
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
