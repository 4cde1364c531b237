/* SPDX-License-Identifier: Apache-2.0 */
/* Life of the store in etcd, and the election's calls and answers. */
#include "store/etcd_state.h"
#include "store/records.h"

#include "daemon/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MESSAGE_BYTES_MAX = 4 << 20,
    RECONNECT_MS = 500,
    POLL_MS = 250,    /* of the leader's key */
    RELEASES_MAX = 4, /* at the end: a busy etcd may answer the next one */
    CALLS_MAX = 4,    /* made at once; then the loop has a turn */
};

static const char range_path[] = "/etcdserverpb.KV/Range",
                  revoke_path[] = "/etcdserverpb.Lease/LeaseRevoke";

/* ------------------------------------------------------------------ open, close */

static bool is_prefix(const char *prefix)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";
    size_t length = strlen(prefix);
    return length > 1 && length < MOE_ETCD_PREFIX_BYTES && prefix[0] == '/' &&
           prefix[length - 1] != '/' && strspn(prefix, allowed) == length;
}

struct moe_status moe_etcd_check_settings(const char *endpoints, const char *prefix, bool tls,
                                          bool insecure)
{
    struct moe_endpoints list;
    MOE_TRY(moe_endpoints_parse("--etcd", endpoints, &list));
    for (size_t i = 0; i < list.count && !tls && !insecure; i++)
        MOE_TRY(moe_error_context(moe_endpoint_check_loopback(list.all[i]), "--etcd"));
    if (!is_prefix(prefix))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--etcd-prefix: a path such as /moed/GROUP, of at most %d letters, "
                         "digits and ._-/",
                         MOE_ETCD_PREFIX_BYTES - 1);
    return moe_ok();
}

static struct moe_status open_channels(struct moe_etcd *e, const struct moe_etcd_config *config)
{
    MOE_TRY(moe_endpoints_parse("--etcd", config->endpoints, &e->endpoints));
    MOE_TRY(moe_rpc_client_create(&e->client));
    for (size_t i = 0; i < e->endpoints.count; i++) {
        const struct moe_rpc_channel_config channel = {.target = e->endpoints.all[i],
                                                       .trust = config->trust,
                                                       .max_message_bytes = MESSAGE_BYTES_MAX,
                                                       .own_connection = true,
                                                       .reconnect_ms = RECONNECT_MS};
        MOE_TRY(moe_rpc_channel_open(e->client, &channel, &e->channels[i]));
    }
    return moe_ok();
}

struct moe_status moe_etcd_open(const struct moe_etcd_config *config, struct moe_etcd **out)
{
    struct moe_etcd *e = calloc(1, sizeof *e);
    if (e == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "etcd");
    moe_mutex_init(&e->lock);
    e->store.ops = &moe_etcd__ops;
    e->format = config->format;
    e->lease_s = config->lease_s;
    e->wake = config->wake;
    e->wake_ctx = config->ctx;
    e->answered_ns = moe_lease_clock_ns();
    (void)snprintf(e->prefix, sizeof e->prefix, "%s", config->prefix);
    (void)snprintf(e->leader_key, sizeof e->leader_key, "%s/leader", e->prefix);
    (void)snprintf(e->state_key, sizeof e->state_key, "%s/state", e->prefix);
    (void)snprintf(e->store.name, sizeof e->store.name, "etcd %s", e->state_key);
    struct moe_status st = open_channels(e, config);
    if (moe_failed(&st))
        moe_etcd_close(e);
    else
        *out = e;
    return st;
}

/* Without an answer, the lease ends by itself. */
static void release(struct moe_etcd *e)
{
    Etcdserverpb__LeaseRevokeRequest revoke = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    revoke.id = e->election.lease_id;
    e->election.revision = 0;
    struct moe_status st;
    int tries = 0;
    do
        st = moe_etcd__call(e, revoke_path, &revoke.base, true,
                            &etcdserverpb__lease_revoke_response__descriptor, &answer);
    while (moe_failed(&st) && st.code != MOE_NOT_FOUND && ++tries < RELEASES_MAX);
    if (answer != NULL)
        protobuf_c_message_free_unpacked(answer, NULL);
    if (moe_failed(&st) && st.code != MOE_NOT_FOUND)
        moe_log_warn("the leader's key stays until its lease ends: %s", st.text);
}

void moe_etcd_close(struct moe_etcd *e)
{
    if (e == NULL)
        return;
    if (e->client != NULL)
        moe_etcd__end_renewals(e);
    if (e->election.lease_id != 0)
        release(e);
    for (size_t i = 0; i < MOE_ENDPOINTS_MAX; i++)
        moe_rpc_channel_close(e->channels[i]);
    moe_rpc_client_destroy(e->client); /* runs callbacks of calls in flight */
    moe_mutex_not_shared(&e->lock);
    moe_rpc_msg_free(e->reply);
    moe_mutex_destroy(&e->lock);
    free(e);
}

/* ------------------------------------------------------------------ the record */

static struct moe_status take_record(struct moe_etcd *e, const Mvccpb__KeyValue *kv,
                                     struct moe_store_found *found)
{
    struct moe_records_last last;
    MOE_TRY(moe_records_read(kv->value.data, kv->value.len, e->format, &last));
    if (last.lost > 0)
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: cut");
    found->record = malloc(last.length > 0 ? last.length : 1);
    if (found->record == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "etcd");
    memcpy(found->record, last.payload, last.length);
    found->length = last.length;
    found->format = last.format;
    return moe_ok();
}

struct moe_status moe_etcd_read(struct moe_etcd *e, struct moe_store_found *found)
{
    Etcdserverpb__RangeRequest range = ETCDSERVERPB__RANGE_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    struct moe_status st = moe_ok();
    *found = (struct moe_store_found){0};
    range.key = moe_etcd__bytes(e->state_key);
    MOE_TRY(moe_etcd__call(e, range_path, &range.base, true,
                           &etcdserverpb__range_response__descriptor, &message));
    Etcdserverpb__RangeResponse *answer = (Etcdserverpb__RangeResponse *)message;
    e->fence = (struct moe_fence){.leader = e->election.revision};
    if (answer->n_kvs > 0) {
        e->fence.state = answer->kvs[0]->mod_revision;
        st = moe_error_context(take_record(e, answer->kvs[0], found), "%s", e->store.name);
    }
    etcdserverpb__range_response__free_unpacked(answer, NULL);
    return st;
}

struct moe_store *moe_etcd_store(struct moe_etcd *e)
{
    return &e->store;
}

/* ------------------------------------------------------------------ the election */

void moe_etcd_join(struct moe_etcd *e, const char *name)
{
    (void)snprintf(e->name, sizeof e->name, "%s", name);
    moe_election_init(&e->election, e->lease_s, POLL_MS * MOE_NS_PER_MS, moe_lease_clock_ns());
    e->joined = true;
}

void moe_etcd_hold(struct moe_etcd *e, bool held)
{
    moe_election_hold(&e->election, held);
}

static void on_looked(struct moe_etcd *e, uint64_t now, bool ok, const ProtobufCMessage *message)
{
    const Etcdserverpb__RangeResponse *answer = (const Etcdserverpb__RangeResponse *)message;
    bool exists = ok && answer->n_kvs > 0, stray = exists && answer->kvs[0]->lease == 0;
    if (stray && !e->stray)
        moe_log_error("etcd: no coordinator has made %s: remove it", e->leader_key);
    if (ok)
        e->stray = stray;
    if (ok)
        e->leader[0] = '\0';
    if (exists)
        (void)snprintf(e->leader, sizeof e->leader, "%.*s", (int)answer->kvs[0]->value.len,
                       (const char *)answer->kvs[0]->value.data);
    moe_election_on_looked(&e->election, now, ok, exists);
}

static void on_granted(struct moe_etcd *e, uint64_t now, bool ok, const ProtobufCMessage *message)
{
    const Etcdserverpb__LeaseGrantResponse *answer =
        (const Etcdserverpb__LeaseGrantResponse *)message;
    moe_election_on_granted(&e->election, now, ok, ok ? answer->id : 0, ok ? answer->ttl : 0);
}

static void on_proposed(struct moe_etcd *e, uint64_t now, bool ok, const ProtobufCMessage *message)
{
    const Etcdserverpb__TxnResponse *answer = (const Etcdserverpb__TxnResponse *)message;
    bool won = ok && answer->succeeded && answer->header != NULL;
    moe_election_on_proposed(&e->election, now, ok, won ? answer->header->revision : 0);
    if (!won)
        return;
    e->terms++;
    (void)snprintf(e->leader, sizeof e->leader, "%s", e->name);
}

static const ProtobufCMessageDescriptor *type_of(enum moe_election_call call)
{
    switch (call) {
    case MOE_ELECTION_LOOK: return &etcdserverpb__range_response__descriptor;
    case MOE_ELECTION_GRANT: return &etcdserverpb__lease_grant_response__descriptor;
    case MOE_ELECTION_PROPOSE: return &etcdserverpb__txn_response__descriptor;
    default: return &etcdserverpb__lease_revoke_response__descriptor;
    }
}

static void take_reply(struct moe_etcd *e)
{
    struct moe_status st;
    struct moe_rpc_msg *reply;
    ProtobufCMessage *message = NULL;
    if (!moe_etcd__take_reply(e, &st, &reply))
        return;
    enum moe_election_call call = e->calling;
    e->calling = MOE_ELECTION_NONE;
    if (!moe_failed(&st))
        st = moe_etcd__unpack(reply, type_of(call), &message);
    bool ok = !moe_failed(&st);
    /* A lease that is gone needs no release. */
    if (ok || (call == MOE_ELECTION_RELEASE && st.code == MOE_NOT_FOUND))
        moe_etcd__answered(e);
    else
        moe_etcd__failed(e, &st);
    uint64_t now = moe_lease_clock_ns();
    switch (call) {
    case MOE_ELECTION_LOOK: on_looked(e, now, ok, message); break;
    case MOE_ELECTION_GRANT: on_granted(e, now, ok, message); break;
    case MOE_ELECTION_PROPOSE: on_proposed(e, now, ok, message); break;
    case MOE_ELECTION_RELEASE: moe_election_on_released(&e->election, now); break;
    case MOE_ELECTION_RENEW:
    case MOE_ELECTION_NONE: break;
    }
    if (message != NULL)
        protobuf_c_message_free_unpacked(message, NULL);
}

void moe_etcd_run(struct moe_etcd *e)
{
    uint64_t renewal;
    int64_t ttl_s;
    if (!e->joined)
        return;
    take_reply(e);
    while (moe_etcd__take_renewal(e, &renewal, &ttl_s)) {
        moe_etcd__answered(e);
        moe_election_on_renewed(&e->election, moe_lease_clock_ns(), renewal, ttl_s);
    }
    for (int i = 0; i < CALLS_MAX; i++) {
        enum moe_election_call call = moe_election_next(&e->election, moe_lease_clock_ns());
        if (call == MOE_ELECTION_NONE)
            return;
        if (call == MOE_ELECTION_RENEW)
            moe_etcd__renew(e);
        else
            moe_etcd__begin(e, call);
    }
}

uint64_t moe_etcd_wait_ns(const struct moe_etcd *e)
{
    uint64_t due = e->joined ? moe_election_deadline(&e->election) : MOE_NEVER;
    uint64_t now = moe_lease_clock_ns();
    return due == MOE_NEVER ? MOE_NEVER : due > now ? due - now : 0;
}

bool moe_etcd_leads(const struct moe_etcd *e)
{
    return e->joined && moe_election_leads(&e->election, moe_lease_clock_ns());
}

void moe_etcd_resign(struct moe_etcd *e, uint32_t pause_ms)
{
    moe_election_resign(&e->election, moe_lease_clock_ns(), pause_ms * MOE_NS_PER_MS);
}

/* The `index`-th word of the leader's value, if it is an endpoint. */
static void read_name(const char *value, int index, char out[MOE_ENDPOINT_BYTES])
{
    const char *space = strchr(value, ' ');
    size_t length = space != NULL ? (size_t)(space - value) : strlen(value);
    const char *from = index == 0 || space == NULL ? value : space + 1;
    int n = index == 0 || space == NULL ? (int)length : (int)strlen(from);
    out[0] = '\0';
    if (n >= MOE_ENDPOINT_BYTES)
        return;
    (void)snprintf(out, MOE_ENDPOINT_BYTES, "%.*s", n, from);
    struct moe_status st = moe_endpoint_check("", out);
    if (moe_failed(&st) || moe_endpoint_is_wildcard(out))
        out[0] = '\0';
}

void moe_etcd_report(const struct moe_etcd *e, struct moe_etcd_report *out)
{
    uint64_t now = moe_lease_clock_ns();
    const struct moe_lease *lease = &e->election.lease;
    *out = (struct moe_etcd_report){
        .leads = moe_etcd_leads(e), .terms = e->terms, .errors = e->errors, .stray = e->stray};
    if (out->leads) {
        out->remaining_ns = lease->until_ns > now ? lease->until_ns - now : 0;
        out->age_ns = now - lease->answered_ns;
    }
    out->away =
        e->error[0] != '\0' && (!e->answered || now - e->answered_ns > e->lease_s * MOE_NS_PER_S);
    memcpy(out->error, e->error, sizeof out->error);
    if (!out->leads && e->leader[0] != '\0' && strcmp(e->leader, e->name) == 0)
        return; /* its own key, which is about to end */
    read_name(e->leader, 0, out->leader);
    read_name(e->leader, 1, out->leader_control);
}
