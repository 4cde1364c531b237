/* SPDX-License-Identifier: Apache-2.0 */
/* A member's side: messages to and from the sequencer. The lock is held while it sends. A failed
 * send is not handled here: the stream is over then, and stream_closed reports it. */
#include "links/peers_state.h"

#include "base/clock.h"
#include "daemon/log.h"

#include <string.h>

enum {
    BACKLOG_MAX = 64,  /* with this many unsent messages, notices wait and merge */
    ROOM_RESERVED = 8, /* cells of a ring that notices leave to finished steps */
};

static struct moe_status not_a_ticket(void)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                     "the sequencer sent a message that is no ticket");
}

static void run_ticket(struct moe_peers *p, const struct moe_ticket *t) MOE_REQUIRES(p->lock)
{
    p->ticket_ns[t->seq % TICKETS_TIMED] = moe_clock_ns();
    p->config.run(p->config.ctx, t);
}

/* One message of the sequencer. */
static void read_ticket(struct moe_peers *p, uint32_t slot, const uint8_t *bytes, size_t length,
                        struct moe_rpc_arena *arena) MOE_REQUIRES(p->lock)
{
    struct moe_ticket t;
    void *message;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__sequence_response__descriptor, bytes, length, arena, &message);
    if (moe_failed(&st) || !moe_wire_read_ticket(message, &t))
        moe_peers__lose_slot(p, slot, not_a_ticket());
    else if (t.epoch == p->view.epoch)
        run_ticket(p, &t);
}

void moe_peers__read_tickets(struct moe_peers *p)
{
    struct moe_rpc_arena arena;
    if (p->reader != NULL && p->welcome && p->phase == STARTED)
        moe_peers__read_ring(p, p->sequencer_slot, read_ticket, &arena);
}

/* Sends through the sequencer's ring if this worker can see it, else by the stream. */
static void send_request(struct moe_peers *p, const Moe__V1__SequenceRequest *q)
    MOE_REQUIRES(p->lock)
{
    struct moe_control_out packed;
    struct moe_shm_writer *writer = p->writers[p->sequencer_slot];
    struct moe_status st = moe_control_pack(&q->base, &packed);
    if (moe_failed(&st)) {
        moe_peers__lost(p, 0, st);
        return;
    }
    if (writer == NULL)
        st = moe_rpc_stream_send(p->stream, &packed.out);
    else if (moe_shm_writer_room(writer) > 0 && packed.out.head_length <= MOE_SHM_MESSAGE_MAX)
        moe_shm_writer_write(writer, packed.out.head, packed.out.head_length);
    else
        moe_peers__lose_slot(p, p->sequencer_slot,
                             moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                       "the sequencer does not read its ring"));
    moe_control_free(&packed);
    if (moe_failed(&st))
        moe_log_debug("sequencer: %s", st.text);
}

/* Notices may be sent: ring or stream is decided, and room remains for finished steps. */
static bool may_notify(const struct moe_peers *p) MOE_REQUIRES(p->lock)
{
    const struct moe_shm_writer *writer = p->writers[p->sequencer_slot];
    if (p->stream == NULL || !p->welcome)
        return false;
    return writer != NULL ? moe_shm_writer_room(writer) > ROOM_RESERVED
                          : moe_rpc_stream_backlog(p->stream) < BACKLOG_MAX;
}

static void send_hello(struct moe_peers *p) MOE_REQUIRES(p->lock)
{
    Moe__V1__SequenceHello hello = MOE__V1__SEQUENCE_HELLO__INIT;
    hello.slot = p->view.slot;
    hello.epoch = p->view.epoch;
    hello.incarnation = p->config.incarnation;
    hello.secret.data = p->view.secret;
    hello.secret.len = sizeof p->view.secret;
    hello.beats = true;
    Moe__V1__ShmRings rings;
    if (p->reader != NULL)
        hello.rings = moe_wire_rings(p->reader, &rings);
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_HELLO;
    q.hello = &hello;
    send_request(p, &q);
}

static void send_call(struct moe_peers *p, const struct call_notice *notice) MOE_REQUIRES(p->lock)
{
    Moe__V1__CallDescriptor descriptor;
    Moe__V1__WorkNotice work = MOE__V1__WORK_NOTICE__INIT;
    moe_wire_descriptor(&notice->call.descriptor, &descriptor);
    work.layer = notice->call.layer;
    work.kind = (Moe__V1__StepKind)notice->call.kind;
    work.dtype = (Moe__V1__DataType)notice->call.dtype;
    work.tokens = notice->tokens;
    work.training = &descriptor;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_WORK;
    q.work = &work;
    send_request(p, &q);
}

static void send_work(struct moe_peers *p, const struct notice *notice) MOE_REQUIRES(p->lock)
{
    Moe__V1__WorkNotice work = MOE__V1__WORK_NOTICE__INIT;
    work.layer = notice->key.layer;
    work.kind = (Moe__V1__StepKind)notice->key.kind;
    work.dtype = (Moe__V1__DataType)notice->key.dtype;
    work.tokens = notice->tokens;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_WORK;
    q.work = &work;
    send_request(p, &q);
}

void moe_peers__send_notices(struct moe_peers *p)
{
    size_t sent = 0, calls = 0;
    for (; sent < p->notice_count && may_notify(p); sent++)
        send_work(p, &p->notices[sent]);
    p->notice_count -= sent;
    memmove(p->notices, p->notices + sent, p->notice_count * sizeof *p->notices);
    for (; calls < p->call_notice_count && may_notify(p); calls++)
        send_call(p, &p->call_notices[calls]);
    p->call_notice_count -= calls;
    memmove(p->call_notices, p->call_notices + calls,
            p->call_notice_count * sizeof *p->call_notices);
}

void moe_peers__add_notice(struct moe_peers *p, const struct moe_step_key *key, uint32_t tokens)
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
        moe_peers__lost(p, 0,
                        moe_error(MOE_INTERNAL, MOE_REASON_TOO_LARGE, "too many kinds of work"));
        return;
    }
    p->notices[p->notice_count++] = (struct notice){*key, tokens};
}

void moe_peers__send_done(struct moe_peers *p, uint64_t seq, const struct moe_status *status)
{
    if (p->stream == NULL)
        return;
    Moe__V1__Error error;
    Moe__V1__StepDone done = MOE__V1__STEP_DONE__INIT;
    done.seq = seq;
    done.held_ns = moe_clock_ns() - p->ticket_ns[seq % TICKETS_TIMED];
    if (moe_failed(status)) {
        moe_control_error(status, &error);
        done.error = &error;
    }
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_DONE;
    q.done = &done;
    send_request(p, &q);
}

/* The sequencer's answer to hello, and tickets of a sequencer that has no writer to this member. */
static void on_response(struct moe_peers *p, const Moe__V1__SequenceResponse *r)
    MOE_REQUIRES(p->lock)
{
    struct moe_ticket t;
    if (r->body_case == MOE__V1__SEQUENCE_RESPONSE__BODY_WELCOME && !p->welcome) {
        p->writers[p->sequencer_slot] =
            moe_peers__open_writer(p, p->sequencer_slot, r->welcome->rings);
        p->welcome = true;
        moe_peers__begin_beats(p, p->sequencer_slot, r->welcome->beats != 0);
        moe_peers__read_tickets(p);
    } else if (r->body_case == MOE__V1__SEQUENCE_RESPONSE__BODY_BEAT) {
        moe_peers__receive_beat(p, p->sequencer_slot, r->beat);
    } else if (!moe_wire_read_ticket(r, &t)) {
        moe_peers__lose_slot(p, p->sequencer_slot, not_a_ticket());
    } else if (t.epoch == p->view.epoch) {
        run_ticket(p, &t);
    }
}

static void stream_message(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_peers *p = ctx;
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st =
        moe_rpc_msg_unpack(m, &moe__v1__sequence_response__descriptor, &arena, &message);
    moe_rpc_msg_free(m);
    moe_mutex_lock(&p->lock);
    if (p->phase == STARTED && moe_failed(&st))
        moe_peers__lose_slot(p, p->sequencer_slot, not_a_ticket());
    else if (p->phase == STARTED)
        on_response(p, message);
    moe_peers__send_notices(p); /* those that waited */
    moe_mutex_unlock(&p->lock);
}

/* A sequencer that leaves the view says so (moe_peers_stop): it is there, and reports itself whom
 * it misses. */
static void stream_closed(void *ctx, struct moe_status status)
{
    struct moe_peers *p = ctx;
    bool left = status.reason == MOE_REASON_REFORMING;
    moe_mutex_lock(&p->lock);
    if (p->phase == STARTED)
        moe_peers__lost(p, left ? 0 : UINT64_C(1) << p->sequencer_slot,
                        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                  "the sequencer ended its stream: %s",
                                  moe_failed(&status) ? status.text : "closed by the peer"));
    moe_mutex_unlock(&p->lock);
}

struct moe_status moe_peers__connect(const struct moe_peers *p, const char *endpoint,
                                     struct moe_rpc_channel **out)
{
    const struct moe_rpc_channel_config channel = {
        .target = endpoint != NULL ? endpoint : "",
        .trust = p->config.trust,
        .own_connection = true, /* tickets must not queue behind other calls */
    };
    MOE_TRY(moe_rpc_channel_open(p->config.client, &channel, out));
    moe_rpc_channel_connect(*out);
    return moe_ok();
}

struct moe_status moe_peers__open_stream(struct moe_peers *p)
{
    /* The sequencer listens before it registers, so a failed connection is evidence of a lost peer,
     * and not a reason to wait. The attempt may be as old as the view's forming. */
    const struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    const struct moe_rpc_stream_events events = {stream_message, stream_closed};
    MOE_TRY(moe_rpc_stream_open(p->channel, moe_peers__path, &options, &events, p, &p->stream));
    send_hello(p);
    return moe_ok();
}
