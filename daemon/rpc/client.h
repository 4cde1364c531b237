/* gRPC client: asynchronous unary calls and streams over channels, plus a blocking unary call.
 *
 * A `moe_rpc_client` owns one thread, on which all callbacks run, one at a time; they must not
 * block. Every function here is safe from any thread, callbacks included. */
#ifndef MOE_RPC_CLIENT_H
#define MOE_RPC_CLIENT_H

#include "rpc/msg.h"

struct moe_rpc_client;
struct moe_rpc_channel;
struct moe_rpc_stream;
struct moe_rpc_pending;

struct moe_status moe_rpc_client_create(struct moe_rpc_client **out) MOE_CHECKED;
/* Cancels what is in flight, runs its callbacks, joins the thread. Channels must be closed first.
 * Not from a callback. NULL is ignored. */
void moe_rpc_client_destroy(struct moe_rpc_client *c);
/* From the next event on, the thread looks for another one for `spin_ns` after each without
 * sleeping, which keeps a processor busy; 0, as at first: never. */
void moe_rpc_client_stay_awake(struct moe_rpc_client *c, uint64_t spin_ns);

struct moe_rpc_channel_config {
    const char *target;         /* "host:port" */
    uint32_t max_message_bytes; /* 0 = 256 MiB */
    bool own_connection;        /* do not share a connection with channels to the same target */
    uint32_t reconnect_ms; /* longest pause between two tries to connect, at most 5000; 0 = 5000 */
};

/* Connects lazily. */
struct moe_status moe_rpc_channel_open(struct moe_rpc_client *c,
                                       const struct moe_rpc_channel_config *config,
                                       struct moe_rpc_channel **out) MOE_CHECKED;
/* Calls in flight go on. NULL is ignored. */
void moe_rpc_channel_close(struct moe_rpc_channel *ch);

/* The end of a unary call, called exactly once (on the calling thread, before the call returns,
 * where memory for it is exhausted). `reply` is NULL on failure and owned by the callee otherwise.
 * A server's ErrorInfo and RetryInfo are in `status`. */
typedef void (*moe_rpc_reply_fn)(void *ctx, struct moe_status status, struct moe_rpc_msg *reply);

struct moe_rpc_call_options {
    uint64_t deadline_ns; /* monotonic; MOE_NEVER = none */
    bool wait_for_ready;  /* wait for the connection instead of failing with UNAVAILABLE */
};

/* `path` must live for ever. `out` is taken over. `pending`, if not NULL, gets a handle for
 * moe_rpc_cancel that must be given back with moe_rpc_pending_free. */
void moe_rpc_call_unary(struct moe_rpc_channel *ch, const char *path,
                        const struct moe_rpc_call_options *options, const struct moe_rpc_out *out,
                        moe_rpc_reply_fn reply, void *ctx, struct moe_rpc_pending **pending);
void moe_rpc_cancel(struct moe_rpc_pending *pending);
void moe_rpc_pending_free(struct moe_rpc_pending *pending);

/* Blocks until the answer is there. Not from a callback. `*reply` is the caller's on success. A
 * call without parts whose connection failed for a reason that cannot be is tried again for about
 * two seconds, within its time. */
struct moe_status moe_rpc_call_wait(struct moe_rpc_channel *ch, const char *path,
                                    const struct moe_rpc_call_options *options,
                                    const struct moe_rpc_out *out,
                                    struct moe_rpc_msg **reply) MOE_CHECKED;

struct moe_rpc_stream_events {
    /* A message, owned by the callee. The next one is read by itself. */
    void (*message)(void *ctx, struct moe_rpc_msg *m);
    /* The stream is over (status of the server, or the transport's); last callback. */
    void (*closed)(void *ctx, struct moe_status status);
};

/* Opens a bidirectional stream. `path` must live for ever. */
struct moe_status moe_rpc_stream_open(struct moe_rpc_channel *ch, const char *path,
                                      const struct moe_rpc_call_options *options,
                                      const struct moe_rpc_stream_events *events, void *ctx,
                                      struct moe_rpc_stream **out) MOE_CHECKED;
/* Queues one message; `out` is taken over in every case. Errors: MOE_UNAVAILABLE when the stream is
 * already over. */
struct moe_status moe_rpc_stream_send(struct moe_rpc_stream *s,
                                      const struct moe_rpc_out *out) MOE_CHECKED;
/* Messages queued and not yet handed to the transport. */
size_t moe_rpc_stream_backlog(const struct moe_rpc_stream *s);
/* Half-close after everything queued. */
void moe_rpc_stream_close_send(struct moe_rpc_stream *s);
void moe_rpc_stream_cancel(struct moe_rpc_stream *s);
/* Gives the handle back. May be called before `closed`: the stream is cancelled then, and no
 * callback starts after this returns, unless it is called from a callback of the stream itself.
 * Waits for a callback that is running: hold no lock that callbacks take. */
void moe_rpc_stream_free(struct moe_rpc_stream *s);

#endif
