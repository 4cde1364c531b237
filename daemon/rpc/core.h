/* SPDX-License-Identifier: Apache-2.0 */
/* Private to this room: gRPC types, and conversions between them and the types of msg.h and
 * base/status.h. */
#ifndef MOE_RPC_CORE_H
#define MOE_RPC_CORE_H

#include "rpc/msg.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#ifdef MOE_TSAN
#include <sanitizer/tsan_interface.h>
#endif

/* The struct of which `member` is `pointer`. */
#define MOE_RPC_OWNER(type, member, pointer) ((type *)((char *)(pointer)-offsetof(type, member)))

/* A tag of the completion queue: `fn` runs on the thread that polls the queue. */
struct moe_rpc_tag {
    void (*fn)(struct moe_rpc_tag *tag, bool ok);
};

enum {
    MOE_RPC_DEFAULT_MESSAGE_BYTES = 256 << 20,
    MOE_RPC_METADATA_BYTES = 16 << 10, /* all headers of one call */
    MOE_RPC_FRAME_BYTES = 1 << 20,     /* HTTP/2 frames that we accept */
    MOE_RPC_KEEPALIVE_MS = 30000,      /* interval of pings on an idle connection ... */
    MOE_RPC_KEEPALIVE_WAIT_MS =
        10000, /* ... and the time to answer one, before the connection closes */
};

/* The core takes a pointer from one thread to another, under locks that ThreadSanitizer
 * does not see: these tell it. What came before MOE_RPC_HAND_OVER(p) on one thread is seen behind
 * MOE_RPC_TAKE_OVER(p) on another. Nothing in other builds. */
#ifdef MOE_TSAN
#define MOE_RPC_HAND_OVER(p) __tsan_release(p)
#define MOE_RPC_TAKE_OVER(p) __tsan_acquire(p)
#else
#define MOE_RPC_HAND_OVER(p) ((void)0)
#define MOE_RPC_TAKE_OVER(p) ((void)0)
#endif

/* A batch that the core refuses is a bug of ours, never of a peer. */
#define MOE_RPC_START(call, ops, count, tag)                                                       \
    do {                                                                                           \
        grpc_call *started = (call); /* it may be over before the core returns */                  \
        MOE_RPC_HAND_OVER(tag);                                                                    \
        MOE_INVARIANT(grpc_call_start_batch(started, (ops), (count), (tag), NULL) ==               \
                      GRPC_CALL_OK);                                                               \
    } while (0)

/* Does what an event of a completion queue says. */
static inline void moe_rpc_run_event(const grpc_event *event)
{
    struct moe_rpc_tag *tag = event->tag;
    MOE_RPC_TAKE_OVER(tag);
    tag->fn(tag, event->success != 0);
}

/* Converts monotonic ns and the core's time; a change of the wall clock has no effect. */
gpr_timespec moe_rpc_time_to_core(uint64_t deadline_ns);
uint64_t moe_rpc_time_from_core(gpr_timespec deadline);

/* An argument of a channel or a server. */
static inline grpc_arg moe_rpc_int_arg(const char *key, int value)
{
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
    arg.value.integer = value;
    return arg;
}

/* ---------------------------------------------------------------------- messages (msg.c) */

/* A received message is the core's buffer with another type, so no allocation can fail. */
struct moe_rpc_msg *moe_rpc_msg_from_buffer(grpc_byte_buffer *buffer);
/* Takes `out` over. */
grpc_byte_buffer *moe_rpc_out_to_buffer(const struct moe_rpc_out *out);

/* ---------------------------------------------------------------------- status (details.c) */

enum { MOE_RPC_DETAILS_BYTES = 896 };

extern const char moe_rpc_details_key[]; /* "grpc-status-details-bin" */

/* google.rpc.Status with ErrorInfo and RetryInfo for `error`; returns its length, at most
 * MOE_RPC_DETAILS_BYTES. */
size_t moe_rpc_details_put(const struct moe_status *error, uint8_t *to);
/* Copies reason and retry hint of `details` to `status`; ignores malformed and unknown ones. */
void moe_rpc_details_get(const uint8_t *details, size_t length, struct moe_status *status);
/* The final status of a call. */
struct moe_status moe_rpc_status_from_core(grpc_status_code code, grpc_slice text,
                                           const grpc_metadata_array *trailing);

#endif
