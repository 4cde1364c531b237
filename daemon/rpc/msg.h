/* SPDX-License-Identifier: Apache-2.0 */
/* Messages on the wire. A received message is a chain of slices; a sent one is a head plus parts by
 * reference. Tensor bytes are copied once on receipt and never on sending.
 *
 * A part is a top-level `bytes` field (numbers 12..15 in our protos), which this room frames. The
 * head is the rest of the message. It is a valid protobuf message, and protobuf-c reads it. */
#ifndef MOE_RPC_MSG_H
#define MOE_RPC_MSG_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MOE_RPC_HEAD_MAX = 4096, /* bytes of everything that is not a part */
    MOE_RPC_PARTS_MAX = 4,   /* parts of one message */
};

/* ------------------------------------------------------------------ received */

/* One received message. The receiver owns it and frees it once, on any thread. */
struct moe_rpc_msg;

/* Length of the whole message in bytes. */
size_t moe_rpc_msg_length(const struct moe_rpc_msg *m);
/* NULL is ignored. */
void moe_rpc_msg_free(struct moe_rpc_msg *m);

/* For tests and fuzzing: a message of copies of `count` pieces, which may be empty. NULL when out
 * of memory. */
struct moe_rpc_piece {
    const void *data;
    size_t length;
};
struct moe_rpc_msg *moe_rpc_msg_from_pieces(const struct moe_rpc_piece *pieces, size_t count);

/* Called with the length of part `field`, before any byte of it is copied. Sets `*dst` to memory
 * for `length` bytes (may stay NULL for length 0), or fails; moe_rpc_msg_split returns that status.
 */
typedef struct moe_status (*moe_rpc_sink)(void *ctx, uint32_t field, size_t length, void **dst);

/* Walks `m` once. Copies each field of `part_fields` to the memory from `sink`, and all other
 * fields to `head`, in order.
 *
 * head      MOE_RPC_HEAD_MAX bytes; `*head_length` of them are set on success
 * Errors    MOE_INVALID_ARGUMENT with reason
 *             MALFORMED        bad tag, group, field number 0 or > 2^29-1, over-long varint,
 *                              wrong wire type for a part
 *             TRUNCATED        ends inside a field
 *             TOO_LARGE        head over MOE_RPC_HEAD_MAX
 *             DUPLICATE_TENSOR a part occurs twice
 *           or the error of `sink`. Memory from `sink` keeps its owner.
 * Threads   any; `m` must not be shared. */
struct moe_status moe_rpc_msg_split(struct moe_rpc_msg *m, const uint32_t *part_fields,
                                    size_t part_count, uint8_t *head, size_t *head_length,
                                    moe_rpc_sink sink, void *ctx) MOE_CHECKED;

/* Value of the top-level varint `field`: the last one, or 0 if there is none. Copies nothing. For
 * values that `sink` needs; `m` may be split afterwards. Errors: MALFORMED, TRUNCATED as above. */
struct moe_status moe_rpc_msg_find_uint(const struct moe_rpc_msg *m, uint32_t field,
                                        uint64_t *value) MOE_CHECKED;

/* Copies the whole message into `buffer` (`capacity` bytes); for control messages.
 * Errors: MOE_INVALID_ARGUMENT/TOO_LARGE. */
struct moe_status moe_rpc_msg_flatten(const struct moe_rpc_msg *m, uint8_t *buffer, size_t capacity,
                                      size_t *length) MOE_CHECKED;

/* ----------------------------------------------------------------------- sent */

/* Memory to send by reference. It must not change until `release(owner)` is called: once for each
 * part that a sending function got, on any thread, as soon as the transport no longer uses the
 * bytes, also after a failure. NULL release = static data. `release` may run inside the sending
 * function, so it must take no lock that its caller holds. */
struct moe_rpc_part {
    uint32_t field;
    const void *data;
    size_t length;
    void (*release)(void *owner);
    void *owner;
};

/* A message to send: `head` (copied at once), then the parts in order. */
struct moe_rpc_out {
    const uint8_t *head;
    size_t head_length;
    struct moe_rpc_part parts[MOE_RPC_PARTS_MAX];
    size_t part_count;
};

/* Releases the parts of a message that is not sent. */
void moe_rpc_out_discard(const struct moe_rpc_out *out);

/* Tag and length that precede a part on the wire; returns the bytes written, at most 15. */
size_t moe_rpc_put_part_prefix(uint8_t *to, uint32_t field, uint64_t length);

/* --------------------------------------------------------------------- protobuf-c */

/* Memory for one unpacked message: a bound on what hostile input can use. The message lives inside
 * it and is not freed. */
struct moe_rpc_arena {
    size_t used; /* bytes of `memory` */
    _Alignas(16) uint8_t memory[16384];
};

struct ProtobufCMessageDescriptor;

/* Unpacks `length` bytes to a message of `type`; sets `*message` on success only. Copies from
 * `bytes`. Use it for every message from outside, as protobuf-c silently ends a string at its first
 * zero byte.
 *
 * arena   holds the message, and replaces an earlier one. NULL: on the heap, without a bound; free
 *         with protobuf_c_message_free_unpacked.
 * Errors  MOE_INVALID_ARGUMENT/MALFORMED: not of this type, a zero byte in a `string` field (also
 * of a nested message), or too large for the arena. void *message;
 *     MOE_TRY(moe_rpc_unpack(&foo__descriptor, bytes, n, &arena, &message));
 *     const Foo *q = message; */
struct moe_status moe_rpc_unpack(const struct ProtobufCMessageDescriptor *type,
                                 const uint8_t *bytes, size_t length, struct moe_rpc_arena *arena,
                                 void **message) MOE_CHECKED;

/* The same for a received message without parts. Further errors: TOO_LARGE (over MOE_RPC_HEAD_MAX
 * bytes). */
struct moe_status moe_rpc_msg_unpack(const struct moe_rpc_msg *m,
                                     const struct ProtobufCMessageDescriptor *type,
                                     struct moe_rpc_arena *arena, void **message) MOE_CHECKED;

/* --------------------------------------------------------------------- the process */

/* Makes glibc's malloc keep freed memory for the next large message. Otherwise the kernel takes it
 * back, and page faults cost more than HTTP/2. Process-wide; call once from main, before any thread
 * and any other function of this room. */
void moe_rpc_tune_allocator(void);

/* Makes each thread poll only its connections, by the core's strategy `poll`. With the core's
 * default, any thread does the work of any connection, so that clients would delay heartbeats and
 * tickets, and a polling shard (spin_ns) would wait for others. The price: a call costs 1 to 2 us
 * of processor time for each open connection.
 *
 * Also turns off the search for deadlocks that Debian's build of Abseil makes at each lock of the
 * core. Without it, a small call is 10 % faster.
 *
 * Process-wide; call once from main, before any thread and any other function of this room. Errors:
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (GRPC_POLL_STRATEGY in the environment asks for another
 * strategy), MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_rpc_force_polling(void) MOE_CHECKED;

/* The core as a library. Every server and client has a reference to it; so may others that use it
 * several times. The last unref shuts it down and waits for the end of the shutdown, at most 20 s.
 * Any thread. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY (memory or threads are too few to start
 * it), MOE_FAILED_PRECONDITION/UNSUPPORTED (a child of fork while its parent uses it). */
struct moe_status moe_rpc_library_ref(void) MOE_CHECKED;
void moe_rpc_library_unref(void);

#endif
