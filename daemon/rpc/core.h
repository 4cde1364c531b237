/* What the files of this room share and nobody else sees: gRPC types, and the bridges between them
 * and the types of msg.h and base/status.h. */
#ifndef MOE_RPC_CORE_H
#define MOE_RPC_CORE_H

#include "rpc/msg.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

/* The struct of which `member` is `pointer`. */
#define MOE_RPC_OWNER(type, member, pointer) ((type *)((char *)(pointer)-offsetof(type, member)))

/* A completion-queue tag: `fn` runs on the thread that polls the queue. */
struct moe_rpc_tag {
    void (*fn)(struct moe_rpc_tag *tag, bool ok);
};

enum {
    MOE_RPC_DEFAULT_MESSAGE_BYTES = 256 << 20,
    MOE_RPC_METADATA_BYTES = 16 << 10, /* all headers of one call */
    MOE_RPC_FRAME_BYTES = 1 << 20,     /* HTTP/2 frames that we accept */
    /* What a peer may send of a message that nobody reads yet. The bound on memory per waiting
     * call; large enough that most messages need not wait for a window update. */
    MOE_RPC_LOOKAHEAD_BYTES = 1 << 20,
    MOE_RPC_KEEPALIVE_MS = 30000,      /* ping an idle or silent connection this often ... */
    MOE_RPC_KEEPALIVE_WAIT_MS = 10000, /* ... and give it up when no answer comes for this long */
};

/* ---------------------------------------------------------------- library (library.c) */

/* Every server and client holds the library once; the last one to let go shuts it down, and
 * returns when that is done. */
void moe_rpc_library_hold(void);
void moe_rpc_library_release(void);

/* A batch that the core refuses is a bug of ours, never of a peer. */
#define MOE_RPC_START(call, ops, count, tag)                                                       \
    MOE_INVARIANT(grpc_call_start_batch((call), (ops), (count), (tag), NULL) == GRPC_CALL_OK)

/* Monotonic ns <-> the core's time, both ways without a jump when the wall clock is set. */
gpr_timespec moe_rpc_time_to_core(uint64_t deadline_ns);
uint64_t moe_rpc_time_from_core(gpr_timespec deadline);

/* ---------------------------------------------------------------------- messages (msg.c) */

/* A received message *is* the core's buffer under another name: no wrapper that could fail to be
 * allocated. */
struct moe_rpc_msg *moe_rpc_msg_from_buffer(grpc_byte_buffer *buffer);
grpc_byte_buffer *moe_rpc_msg_buffer(const struct moe_rpc_msg *m);
/* Takes `out` over. */
grpc_byte_buffer *moe_rpc_out_to_buffer(const struct moe_rpc_out *out);

/* ---------------------------------------------------------------------- status (details.c) */

enum { MOE_RPC_DETAILS_BYTES = 896 };

extern const char moe_rpc_details_key[]; /* "grpc-status-details-bin" */

/* google.rpc.Status with ErrorInfo and RetryInfo for `error`; returns its length, at most
 * MOE_RPC_DETAILS_BYTES. */
size_t moe_rpc_details_put(const struct moe_status *error, uint8_t *to);
/* Reason and retry hint of `details` into `status`; what is malformed or foreign is left out. */
void moe_rpc_details_get(const uint8_t *details, size_t length, struct moe_status *status);
/* The status that a call ended with. */
struct moe_status moe_rpc_status_from_core(grpc_status_code code, grpc_slice text,
                                           const grpc_metadata_array *trailing);

#endif
