/* SPDX-License-Identifier: Apache-2.0 */
/* gRPC server. No gRPC type appears here: the C core's API is private upstream, so a replacement
 * must stay possible within this room.
 *
 * A server has shards (completion queue + thread); a call belongs to one shard and all callbacks of
 * a call run on that shard's thread, one at a time, so handlers need no lock for their own state.
 * Functions marked [any thread] may be called from any thread; they pass the work to the shard.
 *
 * Life of a call: started -> message* -> (sent)* -> done. `done` is called exactly once and last
 * for every started call; free user state there. Calls that are refused earlier (unknown method,
 * draining server) never reach a handler. Answer a unary call by moe_rpc_reply or moe_rpc_fail. On
 * a stream, call moe_rpc_send any number of times, then moe_rpc_finish. */
#ifndef MOE_RPC_SERVER_H
#define MOE_RPC_SERVER_H

#include "daemon/identity.h"
#include "daemon/progress.h"
#include "rpc/msg.h"

struct moe_rpc_server;
struct moe_rpc_call;
struct moe_metrics;
struct moe_tls;

enum moe_rpc_kind {
    MOE_RPC_UNARY,  /* one request, one answer */
    MOE_RPC_STREAM, /* client, server or bidirectional stream */
};

struct moe_rpc_method {
    const char *path; /* "/moe.v1.ExpertService/Forward" */
    enum moe_rpc_kind kind;
    uint32_t largest; /* bytes of a received message; a longer one fails its call before it is read,
                         with RESOURCE_EXHAUSTED / TOO_LARGE. 0 = the server's limit */
    bool endless;     /* a stream that clients never end; a drain sends its queued messages, then
                         fails it */
    /* Headers arrived. May be NULL. After moe_rpc_fail here, no message is read. */
    void (*started)(struct moe_rpc_call *call, void *ctx);
    /* A message; the handler owns it. Unary: called once. Stream: the next message is read after
     * moe_rpc_read_next; m = NULL, once, is the client's half-close. */
    void (*message)(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx);
    /* Stream: one message of moe_rpc_send has left the queue. May be NULL. */
    void (*sent)(struct moe_rpc_call *call, void *ctx);
    /* The client cancelled, disconnected or left sent data unread for too long, or the deadline
     * passed. May be NULL. `done` follows. */
    void (*cancelled)(struct moe_rpc_call *call, void *ctx);
    /* The call is over. May be NULL. */
    void (*done)(struct moe_rpc_call *call, void *ctx);
    void *ctx;
};

struct moe_rpc_server_config {
    const char *listen;           /* 1 to 4 addresses, separated by commas: "host:port" (port 0 =
                                     any), "unix:/absolute/path" (mode 0600) */
    struct moe_tls *tls;          /* of all TCP addresses; outlives the server. NULL = plain TCP */
    bool insecure;                /* allow an address that is not loopback without TLS */
    uint32_t max_connections;     /* 0 = 16384, or fewer where the descriptors do not allow it */
    uint32_t descriptors_percent; /* share of this process's descriptors for connections; 0 = 100.
                                     The shares of its servers add up to 100 */
    uint32_t max_connections_per_peer; /* of one name, or, without one, of one address; 0 = three
                                          quarters of all */
    uint32_t shards;                   /* threads that run handlers; 0 = 1 */
    uint32_t max_message_bytes;        /* both directions */
    uint64_t max_reading_bytes;        /* bound on bytes of messages that have been announced and
                                          not handled (daemon/uploads); at least 16 MiB */
    uint32_t max_waiting_reads;        /* messages over 1 MiB that may wait to be read; more fail
                                          with RESOURCE_EXHAUSTED / QUEUE_FULL */
    uint64_t max_core_bytes;         /* the core's memory for received bytes, as a last line: above
                                        it, the core ends connections. 0 = 256 MiB over the others
                                        */
    uint32_t max_read_ms;            /* time for a unary call to bring a message; then it fails
                                        with DEADLINE_EXCEEDED. 0 = one minute */
    uint32_t max_send_ms;            /* time for the client to take a message or the final status;
                                        then its call ends. 0 = one minute */
    uint32_t silence_ms;             /* a connection ends when its client acknowledges nothing for
                                        this long, or takes less than 64 KiB/s of the answers that
                                        wait for it; at most INT_MAX. 0 = 10 s */
    uint32_t max_concurrent_streams; /* calls per connection; 0 = 128, at most 2^20. A
                                        client that opens 100 more is disconnected */
    uint64_t spin_ns; /* time that a shard, or a relay, polls without sleep after each event, which
                         keeps a core busy; 0 = never */
    const struct moe_rpc_method *methods; /* copied; the server adds health and reflection */
    size_t method_count;
    const uint8_t
        *descriptors; /* serialised FileDescriptorSet for reflection; outlives the server */
    size_t descriptors_length;
    struct moe_metrics *metrics;   /* gets moe_rpc_connections, ...; may be NULL */
    const char *name;              /* label `server` of the metrics; static. NULL = "data" */
    struct moe_progress *progress; /* gets a loop for each shard; borrowed, may be NULL */
    /* Whether `who` may call `path` with this token: the text after "authorization: Bearer", or "";
     * NULL if there is such a header, but not exactly one with printable characters.
     * Called on the call's shard before `started`, for every call: health, reflection and unknown
     * methods too. A failure is the answer to the call. `grant`, zero before, stays with the call.
     * NULL = everything is allowed. */
    struct moe_status (*authorise)(void *ctx, const struct moe_rpc_identity *who, const char *path,
                                   const char *token, struct moe_rpc_grant *grant);
    /* A call of a known method is over, also one that was refused. On the call's shard; `answer` is
     * CANCELLED if the client did not wait for one. May be NULL. */
    void (*finished)(void *ctx, const struct moe_rpc_identity *who,
                     const struct moe_rpc_grant *grant, const char *path,
                     const struct moe_status *answer);
    void *authorise_ctx; /* of authorise and finished */
};

/* Starts listening and serving. Errors: MOE_INVALID_ARGUMENT (address, or not loopback without
 * `insecure`), MOE_UNAVAILABLE/IO (cannot bind). */
struct moe_status moe_rpc_server_start(const struct moe_rpc_server_config *config,
                                       struct moe_rpc_server **out) MOE_CHECKED;
/* The port of the first TCP address; 0 if there is none. */
uint16_t moe_rpc_server_port(const struct moe_rpc_server *s);
/* [any thread] Ends the connections of identities that `which` chooses, and so their calls.
 * `which` runs under a lock: it must not call this room. */
void moe_rpc_server_disconnect(struct moe_rpc_server *s,
                               bool (*which)(void *ctx, const struct moe_rpc_identity *who),
                               void *ctx);
/* [any thread] Sets the status of a service in grpc.health.v1 and notifies watchers; "" is the
 * server as a whole. Check answers NOT_FOUND for services that were never set. */
void moe_rpc_server_set_health(struct moe_rpc_server *s, const char *service, bool serving);
/* Refuses new calls with UNAVAILABLE / DRAINING, lets those in flight finish until `deadline_ns`,
 * then closes all connections; clients of unfinished calls get UNAVAILABLE. Returns when every
 * call's `done` has run. Not on a shard thread. Call once, before stop. */
void moe_rpc_server_drain(struct moe_rpc_server *s, uint64_t deadline_ns);
/* Frees the server, after drain. Blocks until every reference to a call is dropped. All received
 * messages are freed before. NULL is ignored. */
void moe_rpc_server_stop(struct moe_rpc_server *s);

/* ------------------------------------------------------------------ calls */

/* A pointer for the handler. Threads: the shard's, or by rules of the handler. */
void moe_rpc_call_set_user(struct moe_rpc_call *c, void *user);
void *moe_rpc_call_user(const struct moe_rpc_call *c);
/* [any thread] Monotonic ns; MOE_NEVER when the client set none. */
uint64_t moe_rpc_call_deadline(const struct moe_rpc_call *c);
/* [any thread] Who called. Valid while the call is referenced. */
const struct moe_rpc_identity *moe_rpc_call_identity(const struct moe_rpc_call *c);
/* [any thread] Number of the connection that the call came over. Another connection of the server
 * has it again after 2^32 others. */
uint32_t moe_rpc_call_connection(const struct moe_rpc_call *c);
/* [any thread] The value of header `name` (lower-case), `*length` bytes without a NUL. NULL unless
 * the call has exactly one such header. Valid while the call is referenced. */
const char *moe_rpc_call_header(const struct moe_rpc_call *c, const char *name, size_t *length);
/* [any thread] What `authorise` has found. Valid while the call is referenced. */
const struct moe_rpc_grant *moe_rpc_call_grant(const struct moe_rpc_call *c);
/* [any thread] References keep `c` valid beyond `done`, which still runs when the call is over.
 * Each ref needs one unref. Take a reference for work that leaves the shard thread. */
void moe_rpc_call_ref(struct moe_rpc_call *c);
void moe_rpc_call_unref(struct moe_rpc_call *c);

/* [any thread] Unary: sends the answer. Takes `out` over in every case. */
void moe_rpc_reply(struct moe_rpc_call *c, const struct moe_rpc_out *out);
/* [any thread] Ends a call with an error after the queued messages; ErrorInfo and RetryInfo go to
 * grpc-status-details-bin. Later replies, sends and failures are ignored. */
void moe_rpc_fail(struct moe_rpc_call *c, struct moe_status error);
/* [any thread] Stream: queues one message. Takes `out` over in every case. The queue has no bound:
 * the handler bounds it by delaying moe_rpc_read_next. */
void moe_rpc_send(struct moe_rpc_call *c, const struct moe_rpc_out *out);
/* [any thread] Stream: number of messages that the transport has not taken yet. */
size_t moe_rpc_send_backlog(const struct moe_rpc_call *c);
/* [any thread] Stream: reads one more message. At most one read may be outstanding; the start of
 * the call implies the first. */
void moe_rpc_read_next(struct moe_rpc_call *c);
/* [any thread] Stream: ends with OK after the queued messages. */
void moe_rpc_finish(struct moe_rpc_call *c);

#endif
