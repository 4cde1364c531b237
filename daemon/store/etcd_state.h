/* SPDX-License-Identifier: Apache-2.0 */
/* Internal state of the etcd store: etcd.c (life, election), etcd_calls.c (calls), etcd_store.c
 * (record and images). Private to these files. */
#ifndef MOE_STORE_ETCD_STATE_H
#define MOE_STORE_ETCD_STATE_H

#include "base/clock.h"
#include "base/mutex.h"
#include "rpc/client.h"
#include "store/election.h"
#include "store/etcd.h"

#include "etcdserverpb/rpc.pb-c.h"

enum { MOE_ETCD_KEY_BYTES = MOE_ETCD_PREFIX_BYTES + 80, MOE_ETCD_RENEWALS_MAX = 64 };

struct moe_etcd {
    struct moe_store store; /* of the leader */
    const struct moe_store_format *format;
    uint32_t lease_s;
    void (*wake)(void *ctx);
    void *wake_ctx;
    struct moe_rpc_client *client;
    struct moe_endpoints endpoints;
    struct moe_rpc_channel *channels[MOE_ENDPOINTS_MAX];
    size_t at; /* the endpoint of the next call */
    char prefix[MOE_ETCD_PREFIX_BYTES];
    char leader_key[MOE_ETCD_KEY_BYTES], state_key[MOE_ETCD_KEY_BYTES];

    bool joined;
    char name[2 * MOE_ENDPOINT_BYTES]; /* of this process, in the leader's key */
    struct moe_election election;
    struct moe_fence fence;
    enum moe_election_call calling;      /* without an answer yet */
    char leader[2 * MOE_ENDPOINT_BYTES]; /* as last read; "" = none */
    bool stray;                          /* that key has no lease */
    /* The renewals' stream. Its n-th answer is that to renewal first_renewal + n. */
    struct moe_rpc_stream *renewals;
    uint64_t first_renewal, renewals_answered, renewals_sent;

    uint64_t terms, errors;
    bool answered;        /* a call was answered since the start, */
    uint64_t answered_ns; /* and the last one then; the start before */
    char error[120];
    char warned[120];   /* the failure that the log has last, */
    uint64_t warned_ns; /* and when; 0 = none */
    bool reported;      /* the log has the present failure */

    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        bool replied; /* to `calling` */
        struct moe_status reply_status;
        struct moe_rpc_msg *reply;
        int64_t renewed_ttl[MOE_ETCD_RENEWALS_MAX]; /* answers of `renewals` */
        size_t renewed;
        bool renewals_closed;
    };
};

/* ------------------------------------------------------------------ etcd_calls.c */

/* The key of an image, "PREFIX/images/N" with `behind`. */
void moe_etcd__image_key(const struct moe_etcd *e, uint32_t number, const char *behind,
                         char key[MOE_ETCD_KEY_BYTES]);
ProtobufCBinaryData moe_etcd__bytes(const char *text);
/* Blocks. Tries the other endpoints where `again`. The caller frees `*answer` with
 * protobuf_c_message_free_unpacked. Errors: MOE_UNAVAILABLE/IO, MOE_NOT_FOUND (no such lease). */
struct moe_status moe_etcd__call(struct moe_etcd *e, const char *path,
                                 const ProtobufCMessage *request, bool again,
                                 const ProtobufCMessageDescriptor *type,
                                 ProtobufCMessage **answer) MOE_CHECKED;
/* Unpacks and frees `m`. */
struct moe_status moe_etcd__unpack(struct moe_rpc_msg *m, const ProtobufCMessageDescriptor *type,
                                   ProtobufCMessage **answer) MOE_CHECKED;
/* Counts a failure, and turns to the next endpoint. */
void moe_etcd__failed(struct moe_etcd *e, const struct moe_status *why);
void moe_etcd__answered(struct moe_etcd *e);
/* Makes the call of the election. Its answer comes by moe_etcd__take_reply. */
void moe_etcd__begin(struct moe_etcd *e, enum moe_election_call call);
/* The answer of the call under way; false = it has not come. The caller frees `*reply`. */
bool moe_etcd__take_reply(struct moe_etcd *e, struct moe_status *st, struct moe_rpc_msg **reply);
/* Sends a renewal, on a new stream if there is none. */
void moe_etcd__renew(struct moe_etcd *e);
/* Takes one answer of a renewal; false = there is none. */
bool moe_etcd__take_renewal(struct moe_etcd *e, uint64_t *renewal, int64_t *ttl_s);
void moe_etcd__end_renewals(struct moe_etcd *e);

/* ------------------------------------------------------------------ etcd_store.c */

extern const struct moe_store_ops moe_etcd__ops;

#endif
