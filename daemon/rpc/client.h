/* SPDX-License-Identifier: Apache-2.0 */
/* gRPC client: asynchronous unary calls and streams over channels, plus a blocking unary call.
 *
 * A `moe_rpc_client` owns one thread, on which all callbacks run, one at a time; they must not
 * block. Every function here is safe from any thread, callbacks included. */
#ifndef MOE_RPC_CLIENT_H
#define MOE_RPC_CLIENT_H

#include "daemon/identity.h"
#include "rpc/msg.h"

struct moe_rpc_client;
struct moe_rpc_channel;
struct moe_rpc_stream;

struct moe_status moe_rpc_client_create(struct moe_rpc_client **out) MOE_CHECKED;
/* Cancels calls in flight, runs their callbacks, joins the thread. Close all channels before. Not
 * from a callback. NULL is ignored. */
void moe_rpc_client_destroy(struct moe_rpc_client *c);
/* Sets how long the thread polls without sleep after each event, from the next event on. Polling
 * keeps a core busy. 0, the default: never. */
void moe_rpc_client_set_spin(struct moe_rpc_client *c, uint64_t spin_ns);

/* Takes MOED_TLS_CA, MOED_TLS_CERTIFICATE, MOED_TLS_KEY, MOED_TLS_SERVER_NAME, MOED_TOKEN_FILE for
 * what is NULL, and MOED_INSECURE=1. The strings are those of the environment. */
void moe_rpc_trust_from_environment(struct moe_rpc_trust *t);

/* Reads and checks the files of TLS, and keeps their contents for channels that are opened later
 * while the files are not valid. For the start of a daemon. */
struct moe_status moe_rpc_trust_check(struct moe_rpc_client *c,
                                      const struct moe_rpc_trust *trust) MOE_CHECKED;

/* True on the client's thread. */
bool moe_rpc_client_is_this_thread(const struct moe_rpc_client *c);

struct moe_rpc_channel_config {
    const char *target; /* "host:port", or "unix:/path". For a loopback port, the socket of a daemon
                           of this user if there is one (daemon/local.h) */
    struct moe_rpc_trust trust; /* copied */
    uint32_t max_message_bytes; /* 0 = 256 MiB */
    bool own_connection;        /* do not share a connection with other channels to the target */
    uint32_t
        reconnect_ms; /* longest pause between two attempts to connect, at most 5000; 0 = 5000 */
};

/* Connects lazily. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID; MOE_FAILED_PRECONDITION
 * /CONFIG_INVALID (a token would be sent without encryption); those of the files of `trust`. */
struct moe_status moe_rpc_channel_open(struct moe_rpc_client *c,
                                       const struct moe_rpc_channel_config *config,
                                       struct moe_rpc_channel **out) MOE_CHECKED;
/* Begins to connect, so that the first call need not wait for that. A failure shows in that call.
 */
void moe_rpc_channel_connect(struct moe_rpc_channel *ch);
/* Does not end calls in flight. NULL is ignored. */
void moe_rpc_channel_close(struct moe_rpc_channel *ch);

/* Called once at the end of a unary call: on the client's thread, or, if memory is exhausted, by
 * moe_rpc_call_unary itself. `reply` is NULL on failure; else the callee owns it. `status` contains
 * the server's ErrorInfo and RetryInfo. */
typedef void (*moe_rpc_reply_fn)(void *ctx, struct moe_status status, struct moe_rpc_msg *reply);

struct moe_rpc_call_options {
    uint64_t deadline_ns; /* monotonic; MOE_NEVER = none */
    bool wait_for_ready;  /* wait for the connection instead of failing with UNAVAILABLE */
    /* The client's thread sends the request, so that this one may go on: for requests over several
     * clients at once. Not for streams. */
    bool hand_over;
};

/* Starts a call. `path` is static. Takes `out` over. */
void moe_rpc_call_unary(struct moe_rpc_channel *ch, const char *path,
                        const struct moe_rpc_call_options *options, const struct moe_rpc_out *out,
                        moe_rpc_reply_fn reply, void *ctx);

/* Blocks until the answer arrives. Not from a callback. On success the caller owns `*reply`. If the
 * core reports an impossible reason for a failed connection, a call without parts retries for about
 * two seconds, within its deadline. */
struct moe_status moe_rpc_call_wait(struct moe_rpc_channel *ch, const char *path,
                                    const struct moe_rpc_call_options *options,
                                    const struct moe_rpc_out *out,
                                    struct moe_rpc_msg **reply) MOE_CHECKED;

struct moe_rpc_stream_events {
    /* A message; the callee owns it. The next one is read automatically. */
    void (*message)(void *ctx, struct moe_rpc_msg *m);
    /* The stream is over, with the status of the server or the transport; last callback. */
    void (*closed)(void *ctx, struct moe_status status);
};

/* Opens a bidirectional stream. `path` is static. */
struct moe_status moe_rpc_stream_open(struct moe_rpc_channel *ch, const char *path,
                                      const struct moe_rpc_call_options *options,
                                      const struct moe_rpc_stream_events *events, void *ctx,
                                      struct moe_rpc_stream **out) MOE_CHECKED;
/* Queues one message. Takes `out` over in every case. Errors: MOE_UNAVAILABLE when the stream is
 * over. */
struct moe_status moe_rpc_stream_send(struct moe_rpc_stream *s,
                                      const struct moe_rpc_out *out) MOE_CHECKED;
/* Number of messages that the transport has not taken yet. */
size_t moe_rpc_stream_backlog(const struct moe_rpc_stream *s);
/* Half-closes after the queued messages. */
void moe_rpc_stream_close_send(struct moe_rpc_stream *s);
void moe_rpc_stream_cancel(struct moe_rpc_stream *s);
/* Frees the handle. Before `closed` it also cancels the stream. No callback starts after this
 * returns, unless the caller is a callback of the stream. Waits for a running callback: hold no
 * lock that callbacks take. */
void moe_rpc_stream_free(struct moe_rpc_stream *s);

#endif
