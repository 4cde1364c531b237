/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of etcd: blocking ones of the store, and those of the election, with their answers on the
 * client's thread. */
#include "store/etcd_state.h"

#include "daemon/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALL_MS = 1000, LEASES_PER_CALL = 4, ANSWER_BYTES_MAX = 512 };
#define TELL_AGAIN_NS (10 * MOE_NS_PER_S)

static const char range_path[] = "/etcdserverpb.KV/Range", txn_path[] = "/etcdserverpb.KV/Txn",
                  grant_path[] = "/etcdserverpb.Lease/LeaseGrant",
                  revoke_path[] = "/etcdserverpb.Lease/LeaseRevoke",
                  renew_path[] = "/etcdserverpb.Lease/LeaseKeepAlive";

ProtobufCBinaryData moe_etcd__bytes(const char *text)
{
    /* protobuf-c has no const data; packing only reads */
    return (ProtobufCBinaryData){.len = strlen(text), .data = (uint8_t *)(uintptr_t)text};
}

void moe_etcd__image_key(const struct moe_etcd *e, uint32_t number, const char *behind,
                         char key[MOE_ETCD_KEY_BYTES])
{
    (void)snprintf(key, MOE_ETCD_KEY_BYTES, "%s/images/%u%s", e->prefix, number, behind);
}

/* A leader that waits for etcd goes on renewing only afterwards: a call is short in a lease. */
static uint64_t deadline_ns(const struct moe_etcd *e)
{
    uint64_t ms = (uint64_t)e->lease_s * 1000 / LEASES_PER_CALL;
    return moe_clock_ns() + (ms < CALL_MS ? ms : CALL_MS) * MOE_NS_PER_MS;
}

/* Logs the failure. An etcd that answers some calls only, as a full one does, fails again and again
 * between answers: the same text has one line in a while. */
static void tell(struct moe_etcd *e)
{
    uint64_t now = moe_clock_ns();
    e->reported = strcmp(e->error, e->warned) != 0 || now - e->warned_ns >= TELL_AGAIN_NS;
    if (!e->reported)
        return;
    moe_log_warn("etcd %s", e->error);
    memcpy(e->warned, e->error, sizeof e->warned);
    e->warned_ns = now;
}

void moe_etcd__failed(struct moe_etcd *e, const struct moe_status *why)
{
    bool first = e->error[0] == '\0';
    e->errors++;
    (void)snprintf(e->error, sizeof e->error, "%s: %s", e->endpoints.all[e->at], why->text);
    if (first)
        tell(e);
    e->at = (e->at + 1) % e->endpoints.count;
    moe_etcd__end_renewals(e);
}

void moe_etcd__answered(struct moe_etcd *e)
{
    if (e->error[0] != '\0' && e->reported)
        moe_log_info("etcd %s answers again", e->endpoints.all[e->at]);
    e->error[0] = '\0';
    e->answered = true;
    e->answered_ns = moe_lease_clock_ns();
}

struct moe_status moe_etcd__unpack(struct moe_rpc_msg *m, const ProtobufCMessageDescriptor *type,
                                   ProtobufCMessage **answer)
{
    size_t length = moe_rpc_msg_length(m);
    uint8_t *bytes = malloc(length > 0 ? length : 1);
    struct moe_status st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "etcd");
    void *message = NULL;
    if (bytes != NULL)
        st = moe_rpc_msg_flatten(m, bytes, length, &length);
    if (!moe_failed(&st))
        st = moe_rpc_unpack(type, bytes, length, NULL, &message);
    free(bytes);
    moe_rpc_msg_free(m);
    *answer = message;
    return st;
}

/* ------------------------------------------------------------------ blocking */

static struct moe_status call_once(struct moe_etcd *e, const char *path,
                                   const ProtobufCMessage *request,
                                   const ProtobufCMessageDescriptor *type,
                                   ProtobufCMessage **answer)
{
    const struct moe_rpc_call_options options = {.deadline_ns = deadline_ns(e)};
    struct moe_rpc_msg *reply = NULL;
    size_t length = protobuf_c_message_get_packed_size(request);
    uint8_t *bytes = malloc(length > 0 ? length : 1);
    if (bytes == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "etcd");
    struct moe_rpc_out out = {.head = bytes,
                              .head_length = protobuf_c_message_pack(request, bytes)};
    struct moe_status st = moe_rpc_call_wait(e->channels[e->at], path, &options, &out, &reply);
    free(bytes);
    if (!moe_failed(&st))
        st = moe_etcd__unpack(reply, type, answer);
    return st;
}

struct moe_status moe_etcd__call(struct moe_etcd *e, const char *path,
                                 const ProtobufCMessage *request, bool again,
                                 const ProtobufCMessageDescriptor *type, ProtobufCMessage **answer)
{
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < (again ? e->endpoints.count : 1); i++) {
        st = call_once(e, path, request, type, answer);
        if (!moe_failed(&st) || st.code == MOE_NOT_FOUND) {
            moe_etcd__answered(e);
            return st;
        }
        moe_etcd__failed(e, &st);
    }
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "etcd %s", e->error);
}

/* ------------------------------------------------------------------ of the election */

static void on_reply(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct moe_etcd *e = ctx;
    moe_mutex_lock(&e->lock);
    e->replied = true;
    e->reply_status = status;
    e->reply = reply;
    moe_mutex_unlock(&e->lock);
    e->wake(e->wake_ctx);
}

bool moe_etcd__take_reply(struct moe_etcd *e, struct moe_status *st, struct moe_rpc_msg **reply)
{
    moe_mutex_lock(&e->lock);
    bool replied = e->replied;
    *st = e->reply_status;
    *reply = e->reply;
    e->replied = false;
    e->reply = NULL;
    moe_mutex_unlock(&e->lock);
    return replied;
}

static void begin(struct moe_etcd *e, const char *path, const ProtobufCMessage *request)
{
    const struct moe_rpc_call_options options = {.deadline_ns = deadline_ns(e)};
    uint8_t head[2048]; /* a name and two keys at most */
    size_t length = protobuf_c_message_get_packed_size(request);
    MOE_INVARIANT(length <= sizeof head);
    protobuf_c_message_pack(request, head);
    moe_rpc_call_unary(e->channels[e->at], path, &options,
                       &(struct moe_rpc_out){.head = head, .head_length = length}, on_reply, e);
}

static void begin_look(struct moe_etcd *e)
{
    Etcdserverpb__RangeRequest range = ETCDSERVERPB__RANGE_REQUEST__INIT;
    range.key = moe_etcd__bytes(e->leader_key);
    begin(e, range_path, &range.base);
}

static void begin_grant(struct moe_etcd *e)
{
    Etcdserverpb__LeaseGrantRequest grant = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    grant.ttl = e->lease_s;
    begin(e, grant_path, &grant.base);
}

static void begin_release(struct moe_etcd *e)
{
    Etcdserverpb__LeaseRevokeRequest revoke = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    revoke.id = e->election.lease_id;
    moe_etcd__end_renewals(e);
    begin(e, revoke_path, &revoke.base);
}

static void begin_proposal(struct moe_etcd *e)
{
    Etcdserverpb__Compare absent = ETCDSERVERPB__COMPARE__INIT, *compare[] = {&absent};
    Etcdserverpb__PutRequest put = ETCDSERVERPB__PUT_REQUEST__INIT;
    Etcdserverpb__RequestOp op = ETCDSERVERPB__REQUEST_OP__INIT, *success[] = {&op};
    Etcdserverpb__TxnRequest txn = ETCDSERVERPB__TXN_REQUEST__INIT;
    absent.target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__CREATE;
    absent.key = moe_etcd__bytes(e->leader_key);
    absent.target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_CREATE_REVISION;
    put.key = absent.key;
    put.value = moe_etcd__bytes(e->name);
    put.lease = e->election.lease_id;
    op.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
    op.request_put = &put;
    txn.n_compare = txn.n_success = 1;
    txn.compare = compare;
    txn.success = success;
    begin(e, txn_path, &txn.base);
}

void moe_etcd__begin(struct moe_etcd *e, enum moe_election_call call)
{
    e->calling = call;
    switch (call) {
    case MOE_ELECTION_LOOK: begin_look(e); break;
    case MOE_ELECTION_GRANT: begin_grant(e); break;
    case MOE_ELECTION_PROPOSE: begin_proposal(e); break;
    case MOE_ELECTION_RELEASE: begin_release(e); break;
    case MOE_ELECTION_RENEW:
    case MOE_ELECTION_NONE: break;
    }
}

/* ------------------------------------------------------------------ renewals */

/* On the client's thread. */
static void on_renewed(void *ctx, struct moe_rpc_msg *m)
{
    struct moe_etcd *e = ctx;
    struct moe_rpc_arena arena;
    void *message = NULL;
    struct moe_status st = moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "etcd");
    if (moe_rpc_msg_length(m) <= ANSWER_BYTES_MAX)
        st = moe_rpc_msg_unpack(m, &etcdserverpb__lease_keep_alive_response__descriptor, &arena,
                                &message);
    moe_rpc_msg_free(m);
    const Etcdserverpb__LeaseKeepAliveResponse *answer = message;
    moe_mutex_lock(&e->lock);
    if (moe_failed(&st) || e->renewed == MOE_ETCD_RENEWALS_MAX)
        e->renewals_closed = true;
    else
        e->renewed_ttl[e->renewed++] = answer->ttl;
    moe_mutex_unlock(&e->lock);
    e->wake(e->wake_ctx);
}

static void on_closed(void *ctx, struct moe_status status)
{
    struct moe_etcd *e = ctx;
    (void)status;
    moe_mutex_lock(&e->lock);
    e->renewals_closed = true;
    moe_mutex_unlock(&e->lock);
    e->wake(e->wake_ctx);
}

void moe_etcd__end_renewals(struct moe_etcd *e)
{
    struct moe_rpc_stream *stream = e->renewals;
    e->renewals = NULL;
    if (stream != NULL)
        moe_rpc_stream_free(stream); /* no callback comes after this */
    moe_mutex_lock(&e->lock);
    e->renewed = 0;
    e->renewals_closed = false;
    moe_mutex_unlock(&e->lock);
}

static struct moe_status open_renewals(struct moe_etcd *e)
{
    static const struct moe_rpc_stream_events events = {on_renewed, on_closed};
    const struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER};
    e->first_renewal = moe_election_renewal(&e->election);
    e->renewals_answered = e->renewals_sent = 0;
    return moe_rpc_stream_open(e->channels[e->at], renew_path, &options, &events, e, &e->renewals);
}

/* Answers are late: another endpoint may answer. */
static bool is_silent(const struct moe_etcd *e)
{
    return e->renewals_sent - e->renewals_answered >= MOE_LEASE_HEARTBEATS / 2;
}

void moe_etcd__renew(struct moe_etcd *e)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&e->lock);
    bool closed = e->renewals_closed;
    moe_mutex_unlock(&e->lock);
    if (e->renewals != NULL && (closed || is_silent(e))) {
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the lease is not renewed");
        moe_etcd__failed(e, &st);
        st = moe_ok();
    }
    if (e->renewals == NULL)
        st = open_renewals(e);
    if (!moe_failed(&st)) {
        Etcdserverpb__LeaseKeepAliveRequest renew = ETCDSERVERPB__LEASE_KEEP_ALIVE_REQUEST__INIT;
        uint8_t head[32];
        renew.id = e->election.lease_id;
        size_t length = protobuf_c_message_pack(&renew.base, head);
        st = moe_rpc_stream_send(e->renewals,
                                 &(struct moe_rpc_out){.head = head, .head_length = length});
        e->renewals_sent++;
    }
    if (moe_failed(&st))
        moe_etcd__failed(e, &st);
}

bool moe_etcd__take_renewal(struct moe_etcd *e, uint64_t *renewal, int64_t *ttl_s)
{
    moe_mutex_lock(&e->lock);
    bool any = e->renewed > 0;
    if (any) {
        *ttl_s = e->renewed_ttl[0];
        memmove(e->renewed_ttl, e->renewed_ttl + 1, --e->renewed * sizeof *e->renewed_ttl);
    }
    moe_mutex_unlock(&e->lock);
    *renewal = e->first_renewal + e->renewals_answered;
    e->renewals_answered += any;
    return any;
}
