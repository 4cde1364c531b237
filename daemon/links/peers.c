/* SPDX-License-Identifier: Apache-2.0 */
/* One lock and no thread. The thread that brings an input (a request's, the engine's, gRPC's) feeds
 * the sequencer and sends the tickets that are due, or sends the message to the sequencer. The
 * engine and the rpc room are called with the lock held, and never call back from within. */
#include "links/peers.h"

#include "base/clock.h"
#include "base/secret.h"
#include "daemon/lease.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "links/peers_state.h"

#include <stdlib.h>
#include <string.h>

#define TIMED_STEP_NS MOE_NS_PER_S

/* A peer's stream to this sequencer; the call's user state. */
struct peer {
    uint32_t slot;
    uint64_t epoch;
    bool joined;
};

/* ------------------------------------------------------------------- sequencing */

/* Rings first: they are faster than streams. */
static void send_packed(struct moe_peers *p, const struct moe_rpc_out *out) MOE_REQUIRES(p->lock)
{
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        if (p->writers[slot] == NULL)
            continue;
        if (moe_shm_writer_room(p->writers[slot]) > 0)
            moe_shm_writer_write(p->writers[slot], out->head, out->head_length);
        else
            moe_peers__lose_slot(p, slot,
                                 moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                           "slot %u does not read tickets from its ring", slot));
    }
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (p->calls[slot] != NULL && p->writers[slot] == NULL)
            moe_rpc_send(p->calls[slot], out);
}

static void send_ticket(struct moe_peers *p, const struct moe_ticket *t) MOE_REQUIRES(p->lock)
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

/* Issues every due ticket. Call after each input of the sequencer. */
static void issue_tickets(struct moe_peers *p) MOE_REQUIRES(p->lock)
{
    if (p->phase != STARTED || p->role != SEQUENCER || p->joined != p->view.live)
        return;
    struct moe_ticket t;
    moe_sequencer_allow(p->sequencer, moe_lease_gate_held(p->config.lease),
                        moe_lease_gate_covers_group(p->config.lease));
    if (p->config.find_hold != NULL)
        moe_sequencer_hold(p->sequencer, p->config.find_hold(p->config.ctx));
    while (moe_sequencer_next(p->sequencer, &t)) {
        p->ticket_ns[t.seq % TICKETS_TIMED] = moe_clock_ns();
        send_ticket(p, &t);
        p->config.run(p->config.ctx, &t);
    }
}

/* ------------------------------------------------ service: peers speak to our sequencer */

static struct moe_status stale(const struct moe_peers *p, uint64_t epoch) MOE_REQUIRES(p->lock)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                     "epoch %llu is not in force here; the current one is %llu",
                     (unsigned long long)epoch,
                     (unsigned long long)(p->phase == IDLE ? 0 : p->view.epoch));
}

/* Ends the stream of a slot that has joined. The member does not miss this worker then. */
static struct moe_status view_ended(void)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the view has ended");
}

/* Answers hello with the address of this worker's rings, and opens the caller's. */
static struct moe_status welcome(struct moe_peers *p, struct moe_rpc_call *call,
                                 const Moe__V1__SequenceHello *hello) MOE_REQUIRES(p->lock)
{
    struct moe_control_out packed;
    MOE_TRY(moe_wire_pack_welcome(p->reader, &packed));
    moe_rpc_send(call, &packed.out);
    moe_control_free(&packed);
    p->writers[hello->slot] = moe_peers__open_writer(p, hello->slot, hello->rings);
    moe_log_info("epoch %llu: slot %u receives tickets %s", (unsigned long long)p->view.epoch,
                 hello->slot,
                 p->writers[hello->slot] != NULL ? "through shared memory" : "over gRPC");
    moe_peers__begin_beats(p, hello->slot, hello->beats != 0);
    return moe_ok();
}

static bool knows_secret(const struct moe_peers *p, const Moe__V1__SequenceHello *hello)
    MOE_REQUIRES(p->lock)
{
    return hello->secret.len == sizeof p->view.secret &&
           moe_secret_equal(hello->secret.data, p->view.secret, sizeof p->view.secret);
}

static struct moe_status on_hello(struct moe_peers *p, struct moe_rpc_call *call, struct peer *peer,
                                  const Moe__V1__SequenceHello *hello) MOE_REQUIRES(p->lock)
{
    if (p->phase == IDLE || hello->epoch != p->view.epoch)
        return stale(p, hello->epoch);
    if (p->role != SEQUENCER)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "slot %u is not the sequencer of epoch %llu", p->view.slot,
                         (unsigned long long)hello->epoch);
    if (peer->joined || hello->slot >= MOE_MAX_SLOTS || hello->slot == p->view.slot ||
        (p->view.live >> hello->slot & 1) == 0 ||
        p->view.members[hello->slot].incarnation != hello->incarnation)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                         "the caller is not slot %u of epoch %llu", hello->slot,
                         (unsigned long long)hello->epoch);
    if (!knows_secret(p, hello))
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE,
                         "the caller does not know the secret of epoch %llu",
                         (unsigned long long)hello->epoch);
    if ((p->joined >> hello->slot & 1) != 0)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE, "slot %u has already joined",
                         hello->slot);
    MOE_TRY(welcome(p, call, hello));
    *peer = (struct peer){.slot = hello->slot, .epoch = hello->epoch, .joined = true};
    moe_rpc_call_ref(call);
    p->calls[peer->slot] = call;
    p->joined |= UINT64_C(1) << peer->slot;
    return moe_ok();
}

static struct moe_status on_call(struct moe_peers *p, uint32_t slot, const Moe__V1__WorkNotice *n)
    MOE_REQUIRES(p->lock)
{
    struct moe_ticket call = {
        .layer = n->layer, .kind = (enum moe_step_kind)n->kind, .dtype = (enum moe_dtype)n->dtype};
    if (!moe_wire_read_descriptor(n->training, &call.descriptor))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "a training call is too long");
    return moe_sequencer_call(p->sequencer, slot, &call, n->tokens);
}

/* The way of a ticket and of its answer. Each time is a difference on one clock, so it holds across
 * hosts; a step that takes long is left out, because two clocks do not agree on its length. */
static void observe_ticket(struct moe_peers *p, const Moe__V1__StepDone *done) MOE_REQUIRES(p->lock)
{
    if (p->config.ticket_seconds == NULL || done->held_ns == 0 || done->held_ns > TIMED_STEP_NS)
        return;
    uint64_t total_ns = moe_clock_ns() - p->ticket_ns[done->seq % TICKETS_TIMED];
    uint64_t way_ns = total_ns > done->held_ns ? total_ns - done->held_ns : 0;
    moe_histogram_observe(p->config.ticket_seconds, (double)way_ns / (double)MOE_NS_PER_S);
}

static struct moe_status on_done(struct moe_peers *p, uint32_t slot, const Moe__V1__StepDone *done)
    MOE_REQUIRES(p->lock)
{
    struct moe_status failure = moe_control_status(done->error);
    MOE_TRY(moe_sequencer_done(p->sequencer, slot, done->seq, !moe_failed(&failure)));
    observe_ticket(p, done);
    if (moe_failed(&failure))
        moe_peers__lost(p, 0, moe_error_context(failure, "slot %u", slot));
    return moe_ok();
}

/* A message of a slot that has joined. */
static struct moe_status on_notice(struct moe_peers *p, uint32_t slot,
                                   const Moe__V1__SequenceRequest *q) MOE_REQUIRES(p->lock)
{
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK && q->work->training != NULL)
        return on_call(p, slot, q->work);
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_WORK) {
        struct moe_step_key key = {q->work->layer, (enum moe_step_kind)q->work->kind,
                                   (enum moe_dtype)q->work->dtype};
        return moe_sequencer_work(p->sequencer, slot, &key, q->work->tokens);
    }
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_DONE)
        return on_done(p, slot, q->done);
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_BEAT) {
        moe_peers__receive_beat(p, slot, q->beat);
        return moe_ok();
    }
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "unknown kind of message");
}

static struct moe_status on_request(struct moe_peers *p, struct moe_rpc_call *call,
                                    struct peer *peer, const Moe__V1__SequenceRequest *q)
    MOE_REQUIRES(p->lock)
{
    if (q->body_case == MOE__V1__SEQUENCE_REQUEST__BODY_HELLO)
        return on_hello(p, call, peer, q->hello);
    if (!peer->joined)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MALFORMED,
                         "the first message of the stream must be SequenceHello");
    if (p->phase == IDLE || peer->epoch != p->view.epoch) /* moe_peers_stop closes it soon */
        return view_ended();
    return on_notice(p, peer->slot, q);
}

/* ------------------------------------------------------------------- rings of peers */

/* One message of a member. A malformed one ends the member's stream. */
static void read_notice(struct moe_peers *p, uint32_t slot, const uint8_t *bytes, size_t length,
                        struct moe_rpc_arena *arena) MOE_REQUIRES(p->lock)
{
    void *message;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__sequence_request__descriptor, bytes, length, arena, &message);
    if (p->calls[slot] == NULL) /* its stream is over, and so is the view */
        return;
    if (!moe_failed(&st))
        st = on_notice(p, slot, message);
    if (moe_failed(&st))
        moe_rpc_fail(p->calls[slot], st);
}

static void read_rings(struct moe_peers *p) MOE_REQUIRES(p->lock)
{
    struct moe_rpc_arena arena;
    if (p->reader == NULL || p->phase == IDLE)
        return;
    if (p->role == MEMBER)
        moe_peers__read_tickets(p);
    else
        for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
            if (p->calls[slot] != NULL)
                moe_peers__read_ring(p, slot, read_notice, &arena);
}

/* ---------------------------------------------------------------------- its streams */

static void call_started(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    struct peer *peer = calloc(1, sizeof *peer);
    moe_rpc_call_set_user(call, peer);
    if (peer == NULL)
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
    moe_mutex_lock(&p->lock);
    read_rings(p); /* messages there were sent before this one */
    st = on_request(p, call, moe_rpc_call_user(call), q);
    if (!moe_failed(&st))
        issue_tickets(p);
    moe_mutex_unlock(&p->lock);
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
    struct peer *peer = moe_rpc_call_user(call);
    if (peer == NULL)
        return;
    moe_mutex_lock(&p->lock);
    bool ours = peer->joined && p->calls[peer->slot] == call;
    if (ours) {
        read_rings(p); /* a message there may hold the reason */
        p->calls[peer->slot] = NULL;
        moe_peers__lost(p, UINT64_C(1) << peer->slot,
                        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                  "the stream of slot %u has ended", peer->slot));
    }
    moe_mutex_unlock(&p->lock);
    if (ours)
        moe_rpc_call_unref(call);
    free(peer);
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

/* ---------------------------------------------------------------- calls of the engine */

void moe_peers_announce(struct moe_peers *p, uint32_t layer, enum moe_step_kind kind,
                        enum moe_dtype dtype, uint32_t tokens)
{
    const struct moe_step_key key = {layer, kind, dtype};
    moe_mutex_lock(&p->lock);
    if (p->phase != IDLE && p->role == SEQUENCER) {
        struct moe_status st = moe_sequencer_work(p->sequencer, p->view.slot, &key, tokens);
        if (moe_failed(&st))
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (p->phase != IDLE) {
        moe_peers__add_notice(p, &key, tokens);
        moe_peers__send_notices(p);
    }
    moe_mutex_unlock(&p->lock);
}

void moe_peers_beat(struct moe_peers *p, uint32_t layer)
{
    moe_mutex_lock(&p->lock);
    if (p->phase == STARTED && p->role == SEQUENCER) {
        moe_sequencer_beat(p->sequencer, layer);
        issue_tickets(p);
    }
    moe_mutex_unlock(&p->lock);
}

void moe_peers_change_model(struct moe_peers *p, uint64_t epoch, uint32_t model, bool serve)
{
    moe_mutex_lock(&p->lock);
    if (p->phase != IDLE && p->role == SEQUENCER && p->view.epoch == epoch) {
        struct moe_status st = moe_sequencer_change_model(p->sequencer, model, serve);
        if (moe_failed(&st))
            moe_log_error("no ticket for model %u: %s", model, st.text);
        issue_tickets(p);
    }
    moe_mutex_unlock(&p->lock);
}

void moe_peers_swap_placement(struct moe_peers *p, uint64_t epoch, uint32_t version)
{
    moe_mutex_lock(&p->lock);
    if (p->phase != IDLE && p->role == SEQUENCER && p->view.epoch == epoch) {
        moe_sequencer_swap_placement(p->sequencer, version);
        issue_tickets(p);
    }
    moe_mutex_unlock(&p->lock);
}

void moe_peers_announce_training(struct moe_peers *p, const struct moe_ticket *call,
                                 uint32_t tokens)
{
    moe_mutex_lock(&p->lock);
    bool current = p->phase != IDLE && p->view.epoch == call->epoch;
    if (current && p->role == SEQUENCER) {
        struct moe_status st = moe_sequencer_call(p->sequencer, p->view.slot, call, tokens);
        if (moe_failed(&st))
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        /* The engine limits the calls that wait to this number. */
        MOE_INVARIANT(p->call_notice_count < MOE_SEQUENCER_CALLS);
        p->call_notices[p->call_notice_count++] = (struct call_notice){*call, tokens};
        moe_peers__send_notices(p);
    }
    moe_mutex_unlock(&p->lock);
}

/* On a member the sequencer is idle, and each view resets it. */
void moe_peers_block_weight_updates(struct moe_peers *p, bool block)
{
    moe_mutex_lock(&p->lock);
    moe_sequencer_block_weight_updates(p->sequencer, block);
    moe_mutex_unlock(&p->lock);
}

void moe_peers_finished(struct moe_peers *p, const struct moe_ticket *ticket,
                        const struct moe_status *status)
{
    moe_mutex_lock(&p->lock);
    bool current = p->phase == STARTED && p->view.epoch == ticket->epoch;
    if (current && p->role == SEQUENCER) {
        read_rings(p); /* peers may have finished too */
        struct moe_status st =
            moe_sequencer_done(p->sequencer, p->view.slot, ticket->seq, !moe_failed(status));
        if (moe_failed(&st))
            moe_peers__lost(p, 0, st);
        issue_tickets(p);
    } else if (current) {
        moe_peers__send_done(p, ticket->seq, status);
        moe_peers__send_notices(p);
    }
    moe_mutex_unlock(&p->lock);
}

void moe_peers_listen(struct moe_peers *p)
{
    moe_mutex_lock(&p->lock);
    read_rings(p);
    issue_tickets(p);
    if (p->phase == STARTED && p->role == MEMBER)
        moe_peers__send_notices(p); /* those that waited */
    moe_mutex_unlock(&p->lock);
}

/* ------------------------------------------------------------------------ views */

/* NULL if this worker cannot share memory: peers then use gRPC. */
static struct moe_shm_reader *create_reader(const struct moe_peers *p)
{
    struct moe_shm_reader *reader = NULL;
    if (p->config.eventcount == NULL)
        return NULL;
    struct moe_status st = moe_shm_reader_create(p->config.eventcount, &reader);
    if (moe_failed(&st))
        moe_log_warn("peers reach this worker over gRPC only: %s", st.text);
    return reader;
}

struct moe_status moe_peers_expect(struct moe_peers *p, const struct moe_peers_view *view)
{
    MOE_INVARIANT((view->live >> view->slot & 1) != 0);
    moe_peers_stop(p);
    uint32_t lowest = (uint32_t)__builtin_ctzll(view->live);
    struct moe_rpc_channel *channel = NULL;
    if (lowest != view->slot)
        MOE_TRY(moe_peers__connect(p, view->members[lowest].endpoint, &channel));
    struct moe_shm_reader *reader = create_reader(p);

    moe_mutex_lock(&p->lock);
    p->view = *view;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        p->view.members[s].endpoint = NULL;
    p->sequencer_slot = lowest;
    p->role = lowest == view->slot ? SEQUENCER : MEMBER;
    p->joined = UINT64_C(1) << view->slot;
    moe_sequencer_begin(p->sequencer, view->epoch, view->live, view->max_bucket);
    if (view->max_bucket_f32 != 0)
        moe_sequencer_limit_f32(p->sequencer, view->max_bucket_f32);
    p->channel = channel;
    p->reader = reader;
    moe_pulse_begin(p->pulse, view->epoch, reader);
    p->welcome = false;
    p->beating = 0;
    p->phase = EXPECTED;
    moe_mutex_unlock(&p->lock);
    return moe_ok();
}

struct moe_status moe_peers_start(struct moe_peers *p)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&p->lock);
    MOE_INVARIANT(p->phase == EXPECTED);
    p->phase = STARTED;
    if (p->role == MEMBER)
        st = moe_peers__open_stream(p);
    else
        issue_tickets(p);
    moe_mutex_unlock(&p->lock);
    return st;
}

void moe_peers_stop(struct moe_peers *p)
{
    struct moe_rpc_call *calls[MOE_MAX_SLOTS];
    struct moe_shm_writer *writers[MOE_MAX_SLOTS];
    moe_mutex_lock(&p->lock);
    p->phase = IDLE;
    moe_pulse_end(p->pulse);
    memcpy(writers, p->writers, sizeof writers);
    memset(p->writers, 0, sizeof p->writers);
    struct moe_shm_reader *reader = p->reader;
    p->reader = NULL;
    memcpy(calls, p->calls, sizeof calls);
    memset(p->calls, 0, sizeof p->calls);
    struct moe_rpc_stream *stream = p->stream;
    struct moe_rpc_channel *channel = p->channel;
    p->stream = NULL;
    p->channel = NULL;
    p->notice_count = p->call_notice_count = 0;
    moe_mutex_unlock(&p->lock);

    moe_shm_reader_destroy(reader);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        moe_shm_writer_close(writers[s]);
        if (calls[s] == NULL)
            continue;
        moe_rpc_fail(calls[s], view_ended());
        moe_rpc_call_unref(calls[s]);
    }
    if (stream != NULL)
        moe_rpc_stream_free(stream);
    moe_rpc_channel_close(channel);
}

/* ---------------------------------------------------------------------- lifetime */

/* The thread of the pulse. */
static void peers_stopped(void *ctx, uint64_t epoch, uint64_t slots, const char *why)
{
    struct moe_peers *p = ctx;
    moe_mutex_lock(&p->lock);
    if (p->phase != IDLE && p->view.epoch == epoch)
        moe_peers__lost(p, slots,
                        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                  "slot %u%s: its process %s", (uint32_t)__builtin_ctzll(slots),
                                  (slots & (slots - 1)) != 0 ? ", and others" : "", why));
    moe_mutex_unlock(&p->lock);
}

struct moe_status moe_peers_create(const struct moe_peers_config *config, struct moe_peers **out)
{
    struct moe_peers *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the peers");
    moe_mutex_init(&p->lock);
    moe_mutex_not_shared(&p->lock);
    p->config = *config;
    struct moe_status st = moe_sequencer_create(&p->sequencer);
    if (!moe_failed(&st))
        st = moe_pulse_create(peers_stopped, moe_peers__turn, p, &p->pulse);
    if (moe_failed(&st)) {
        moe_sequencer_destroy(p->sequencer);
        moe_mutex_destroy(&p->lock);
        free(p);
        return st;
    }
    if (config->training_permille != 0)
        moe_sequencer_set_share(p->sequencer, config->training_permille);
    *out = p;
    return moe_ok();
}

void moe_peers_destroy(struct moe_peers *p)
{
    if (p == NULL)
        return;
    moe_peers_stop(p);
    moe_pulse_destroy(p->pulse);
    moe_mutex_not_shared(&p->lock);
    moe_sequencer_destroy(p->sequencer);
    moe_mutex_destroy(&p->lock);
    free(p);
}
