/* A member's side: what it says to the sequencer, and what it hears from there. Sending is done
 * with the lock held. A failed send needs no answer: the stream is over then, and `closed` tells.
 */
#include "worker/peers_state.h"

#include "base/clock.h"
#include "base/log.h"

#include <string.h>

enum {
    BACKLOG_MAX = 64, /* unsent messages beyond which notices wait, and merge */
    MAIL_KEPT = 8,    /* room in a mailbox that notices leave to finished steps */
};

static struct moe_status not_a_ticket(void)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                     "the sequencer sent something that is no ticket");
}

/* One message of the sequencer. */
void moe_peers__read_order(struct moe_peers *p, const uint8_t *bytes, size_t length,
                           struct moe_rpc_arena *arena)
{
    struct moe_ticket t;
    const Moe__V1__SequenceResponse *r =
        moe_rpc_unpack(&moe__v1__sequence_response__descriptor, bytes, length, arena);
    if (r == NULL || !moe_wire_read_ticket(r, &t))
        moe_peers__lose_slot(p, p->sequencer_slot, not_a_ticket());
    else if (t.epoch == p->view.epoch)
        p->config.run(p->config.ctx, &t);
}

/* Whole messages, by mail where the sequencer has a mailbox that this worker can see. */
static void send_request(struct moe_peers *p, const Moe__V1__SequenceRequest *q)
{
    struct moe_control_out packed;
    struct moe_post *post = p->posts[p->sequencer_slot];
    struct moe_status st = moe_control_pack(&q->base, &packed);
    if (moe_failed(&st)) {
        moe_peers__lost(p, 0, st);
        return;
    }
    if (post == NULL)
        st = moe_rpc_stream_send(p->stream, &packed.out);
    else if (moe_post_room(post) > 0 && packed.out.head_length <= MOE_MAIL_MAX)
        moe_post_send(post, packed.out.head, packed.out.head_length);
    else
        moe_peers__lose_slot(p, p->sequencer_slot,
                             moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                       "the sequencer takes nothing from its mailbox"));
    moe_control_free(&packed);
    if (moe_failed(&st))
        moe_log_debug("sequencer: %s", st.text);
}

/* Notices may be sent: the way is known, and room is left for what cannot wait. */
static bool may_notify(const struct moe_peers *p)
{
    const struct moe_post *post = p->posts[p->sequencer_slot];
    if (p->stream == NULL || !p->welcome)
        return false;
    return post != NULL ? moe_post_room(post) > MAIL_KEPT
                        : moe_rpc_stream_backlog(p->stream) < BACKLOG_MAX;
}

static void send_hello(struct moe_peers *p)
{
    Moe__V1__SequenceHello hello = MOE__V1__SEQUENCE_HELLO__INIT;
    hello.slot = p->view.slot;
    hello.epoch = p->view.epoch;
    hello.incarnation = p->config.incarnation;
    Moe__V1__Mailbox mailbox;
    if (p->mailbox != NULL)
        hello.mailbox = moe_wire_mailbox(p->mailbox, &mailbox);
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_HELLO;
    q.hello = &hello;
    send_request(p, &q);
}

static void send_call(struct moe_peers *p, const struct call_notice *notice)
{
    Moe__V1__TrainingOrder order;
    Moe__V1__WorkNotice work = MOE__V1__WORK_NOTICE__INIT;
    moe_wire_order(&notice->call.order, &order);
    work.layer = notice->call.layer;
    work.kind = (Moe__V1__StepKind)notice->call.kind;
    work.dtype = (Moe__V1__DataType)notice->call.dtype;
    work.tokens = notice->tokens;
    work.training = &order;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_WORK;
    q.work = &work;
    send_request(p, &q);
}

static void send_work(struct moe_peers *p, const struct notice *notice)
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

void moe_peers__add_notice(struct moe_peers *p, const struct moe_sequencer_key *key,
                           uint32_t tokens)
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
    if (moe_failed(status)) {
        moe_control_error(status, &error);
        done.error = &error;
    }
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_DONE;
    q.done = &done;
    send_request(p, &q);
}

/* The sequencer's answer to hello, and tickets where no mailbox could be used. */
static void on_response(struct moe_peers *p, const Moe__V1__SequenceResponse *r)
{
    struct moe_ticket t;
    if (r->body_case == MOE__V1__SEQUENCE_RESPONSE__BODY_WELCOME && !p->welcome) {
        p->posts[p->sequencer_slot] = moe_peers__open_post(p, r->welcome->mailbox);
        p->welcome = true;
        moe_peers__read_mail(p);
    } else if (!moe_wire_read_ticket(r, &t)) {
        moe_peers__lose_slot(p, p->sequencer_slot, not_a_ticket());
    } else if (t.epoch == p->view.epoch) {
        p->config.run(p->config.ctx, &t);
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
    pthread_mutex_lock(&p->lock);
    if (p->phase == STARTED && moe_failed(&st))
        moe_peers__lose_slot(p, p->sequencer_slot, not_a_ticket());
    else if (p->phase == STARTED)
        on_response(p, message);
    moe_peers__send_notices(p); /* those that waited */
    pthread_mutex_unlock(&p->lock);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    struct moe_peers *p = ctx;
    pthread_mutex_lock(&p->lock);
    if (p->phase == STARTED)
        moe_peers__lost(p, UINT64_C(1) << p->sequencer_slot,
                        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                                  "the sequencer ended its stream: %s",
                                  moe_failed(&status) ? status.text : "closed by the peer"));
    pthread_mutex_unlock(&p->lock);
}

/* With the lock held. */
struct moe_status moe_peers__open_stream(struct moe_peers *p)
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
    MOE_TRY(moe_rpc_stream_open(p->channel, moe_peers__path, &options, &events, p, &p->stream));
    send_hello(p);
    return moe_ok();
}
