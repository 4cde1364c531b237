/* gRPC server. No gRPC type appears here: the C core is private upstream, and this room is where a
 * replacement would go.
 *
 * A server has shards (completion queue + thread); a call belongs to one shard and all callbacks of
 * a call run on that shard's thread, one at a time, so handlers need no lock for their own state.
 * Functions marked [any thread] may be called from anywhere; they hand over to the shard.
 *
 * Life of a call: started -> message* -> (sent)* -> done. `done` is called exactly once and last
 * for every call that was started; user state is freed there. Calls that are refused before
 * (unknown method, draining server) never reach a handler. A unary call is answered by
 * moe_rpc_reply or moe_rpc_fail, a stream by any number of moe_rpc_send and then moe_rpc_finish. */
#ifndef MOE_RPC_SERVER_H
#define MOE_RPC_SERVER_H

#include "rpc/msg.h"

struct moe_rpc_server;
struct moe_rpc_call;

enum moe_rpc_kind {
    MOE_RPC_UNARY,  /* one request, one answer */
    MOE_RPC_STREAM, /* client, server or bidirectional stream */
};

struct moe_rpc_method {
    const char *path; /* "/moe.v1.ExpertService/Forward" */
    enum moe_rpc_kind kind;
    bool large;   /* unary: the request may be as large as the limit, and reading it is subject to
                     admission. Streams read when their handler asks, without admission. */
    bool endless; /* stream: clients keep it open for as long as they live, so a drain does not wait
                     for its end: it fails at once, after what was sent on it */
    /* Headers arrived. May be NULL. May refuse by moe_rpc_fail: no message is read then. */
    void (*started)(struct moe_rpc_call *call, void *ctx);
    /* A message, owned by the handler from here on. Unary: called once. Stream: m = NULL once, when
     * the client has half-closed; the next message is read after moe_rpc_read_next. */
    void (*message)(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx);
    /* Stream: a message handed to moe_rpc_send has left the queue. May be NULL. */
    void (*sent)(struct moe_rpc_call *call, void *ctx);
    /* The client cancelled, went away, left what was sent for too long, or the deadline passed. May
     * be NULL. `done` still comes. */
    void (*cancelled)(struct moe_rpc_call *call, void *ctx);
    /* Over. May be NULL. */
    void (*done)(struct moe_rpc_call *call, void *ctx);
    void *ctx;
};

struct moe_rpc_server_config {
    const char *listen;              /* "host:port"; port 0 = any */
    bool insecure;                   /* allow an address that is not loopback without TLS */
    uint32_t shards;                 /* threads that run handlers; 0 = 1 */
    uint32_t max_message_bytes;      /* both directions */
    uint64_t max_reading_bytes;      /* bound on bytes of large messages being read at once */
    uint32_t max_waiting_reads;      /* large calls that may wait for their turn to be read; more
                                        are refused with RESOURCE_EXHAUSTED / QUEUE_FULL */
    uint32_t max_read_ms;            /* a large message that takes longer to arrive fails its call
                                        with DEADLINE_EXCEEDED; 0 = one minute */
    uint32_t max_send_ms;            /* a message or final status that the client leaves for longer
                                        ends its call; 0 = one minute */
    uint32_t max_concurrent_streams; /* calls per connection; 0 = 128 */
    uint64_t spin_ns; /* after each event a shard looks for the next one for so long without
                         sleeping, which keeps a processor busy; 0 = never */
    const struct moe_rpc_method
        *methods; /* copied; health and reflection are added by the server */
    size_t method_count;
    const uint8_t *descriptors; /* serialised FileDescriptorSet for reflection; must stay */
    size_t descriptors_length;
};

/* Starts listening and serving. Errors: MOE_INVALID_ARGUMENT (address, or not loopback without
 * `insecure`), MOE_UNAVAILABLE/IO (cannot bind). */
struct moe_status moe_rpc_server_start(const struct moe_rpc_server_config *config,
                                       struct moe_rpc_server **out) MOE_CHECKED;
/* The port that was bound. */
uint16_t moe_rpc_server_port(const struct moe_rpc_server *s);
/* [any thread] Status of a service in grpc.health.v1; "" is the server as a whole. Services never
 * named are unknown to Check. Watchers are told. */
void moe_rpc_server_set_health(struct moe_rpc_server *s, const char *service, bool serving);
/* Refuses new calls with UNAVAILABLE / DRAINING, lets those in flight finish until `deadline_ns`,
 * then closes all connections, to whose clients what is left is UNAVAILABLE; returns when every
 * call's `done` has run. Not on a shard thread. Call once, before stop. */
void moe_rpc_server_drain(struct moe_rpc_server *s, uint64_t deadline_ns);
/* Frees everything. After drain; waits until every hold on a call has been released, and every
 * received message must have been freed. NULL is ignored. */
void moe_rpc_server_stop(struct moe_rpc_server *s);

/* ------------------------------------------------------------------ calls */

/* State of the handler's own. Set and read on the shard thread or under the handler's own rules. */
void moe_rpc_call_set_user(struct moe_rpc_call *c, void *user);
void *moe_rpc_call_user(const struct moe_rpc_call *c);
/* [any thread] Monotonic ns; MOE_NEVER when the client set none. */
uint64_t moe_rpc_call_deadline(const struct moe_rpc_call *c);
/* [any thread] True as soon as `cancelled` is due. */
bool moe_rpc_call_is_cancelled(const struct moe_rpc_call *c);
/* Value of a metadata key of the request, or NULL; lives as long as the call. Shard thread. */
const char *moe_rpc_call_metadata(struct moe_rpc_call *c, const char *key);
/* [any thread] Keeps `c` valid beyond `done` (which is still called when the call is over). Every
 * hold is paid back by one release; work that leaves the shard thread takes one. */
void moe_rpc_call_hold(struct moe_rpc_call *c);
void moe_rpc_call_release(struct moe_rpc_call *c);

/* [any thread] Unary: the answer. `out` is taken over in every case. */
void moe_rpc_reply(struct moe_rpc_call *c, const struct moe_rpc_out *out);
/* [any thread] Ends any call with an error, with ErrorInfo and RetryInfo in
 * grpc-status-details-bin, after everything queued has been sent. Later replies, sends and failures
 * are ignored. */
void moe_rpc_fail(struct moe_rpc_call *c, struct moe_status error);
/* [any thread] Stream: queues one message; `out` is taken over in every case. Queues without bound:
 * the handler bounds them by not reading on. */
void moe_rpc_send(struct moe_rpc_call *c, const struct moe_rpc_out *out);
/* [any thread] Stream: messages queued and not yet handed to the transport. */
size_t moe_rpc_send_backlog(const struct moe_rpc_call *c);
/* [any thread] Stream: read one more message. At most one read may be outstanding; the first is
 * implied when the call starts. */
void moe_rpc_read_next(struct moe_rpc_call *c);
/* [any thread] Stream: ends with OK after everything queued has been sent. */
void moe_rpc_finish(struct moe_rpc_call *c);

#endif
