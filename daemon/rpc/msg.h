/* Messages on the wire: received ones as a chain of slices, sent ones as a head plus parts by
 * reference. The tensor bytes of a message are moved once on the way in and never on the way out.
 *
 * A "part" is a top-level `bytes` field (numbers 12..15 in our protos) that is framed by hand; the
 * rest of a message, the "head", is itself a valid protobuf message and goes through protobuf-c. */
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

/* One received message. Owned by whoever was handed it; free exactly once, on any thread. */
struct moe_rpc_msg;

/* Length of the whole message in bytes. */
size_t moe_rpc_msg_length(const struct moe_rpc_msg *m);
/* NULL is ignored. */
void moe_rpc_msg_free(struct moe_rpc_msg *m);

/* For tests and fuzzing: a message made of copies of `count` pieces (any of them may be empty).
 * NULL when out of memory. */
struct moe_rpc_piece {
    const void *data;
    size_t length;
};
struct moe_rpc_msg *moe_rpc_msg_from_pieces(const struct moe_rpc_piece *pieces, size_t count);

/* Called when the length of part `field` is known and before any byte of it is copied; sets `*dst`
 * to memory for `length` bytes (may stay NULL when length is 0), or refuses with the status that
 * the caller of moe_rpc_msg_split will get. */
typedef struct moe_status (*moe_rpc_sink)(void *ctx, uint32_t field, size_t length, void **dst);

/* Walks `m` once: fields listed in `part_fields` go, each copied once, to what `sink` gives;
 * everything else is copied to `head`, in order.
 *
 * head      MOE_RPC_HEAD_MAX bytes; `*head_length` of them are set on success
 * Errors    MOE_INVALID_ARGUMENT with reason
 *             MALFORMED        bad tag, group, field number 0 or > 2^29-1, over-long varint,
 *                              wrong wire type for a part
 *             TRUNCATED        ends inside a field
 *             TOO_LARGE        head over MOE_RPC_HEAD_MAX
 *             DUPLICATE_TENSOR a part occurs twice
 *           or what `sink` said. Memory that sink gave out stays with whoever owns it.
 * Threads   any; `m` must not be shared. */
struct moe_status moe_rpc_msg_split(struct moe_rpc_msg *m, const uint32_t *part_fields,
                                    size_t part_count, uint8_t *head, size_t *head_length,
                                    moe_rpc_sink sink, void *ctx) MOE_CHECKED;

/* Value of the top-level varint `field` (the last one, if it occurs more than once), 0 where there
 * is none; copies nothing. For what has to be known before the parts can be placed. `m` may be
 * split afterwards. Errors: MALFORMED and TRUNCATED as above. */
struct moe_status moe_rpc_msg_find_uint(const struct moe_rpc_msg *m, uint32_t field,
                                        uint64_t *value) MOE_CHECKED;

/* The whole message in one piece, for control messages: copied into `buffer` (`capacity` bytes).
 * Errors: MOE_INVALID_ARGUMENT/TOO_LARGE. */
struct moe_status moe_rpc_msg_flatten(const struct moe_rpc_msg *m, uint8_t *buffer, size_t capacity,
                                      size_t *length) MOE_CHECKED;

/* ----------------------------------------------------------------------- sent */

/* Memory sent by reference. `release(owner)` is called exactly once per part of every message that
 * was handed to a sending function, whatever became of the message, on any thread, as soon as the
 * transport is done with the bytes; until then they must not change. NULL release = static data.
 * `release` may run inside the sending call itself, so it must take no lock that is held around
 * calls into this room. */
struct moe_rpc_part {
    uint32_t field;
    const void *data;
    size_t length;
    void (*release)(void *owner);
    void *owner;
};

/* A message to send: `head` (copied at once) and then the parts, in order. */
struct moe_rpc_out {
    const uint8_t *head;
    size_t head_length;
    struct moe_rpc_part parts[MOE_RPC_PARTS_MAX];
    size_t part_count;
};

/* Releases the parts of a message that will not be sent. */
void moe_rpc_out_discard(const struct moe_rpc_out *out);

/* Tag and length that precede a part on the wire; returns the bytes written, at most 15. */
size_t moe_rpc_put_part_prefix(uint8_t *to, uint32_t field, uint64_t length);

/* --------------------------------------------------------------------- protobuf-c */

/* Unpacking with a bound: memory for one unpacked message, so that hostile input can use this much
 * and no more. The message lives inside it: nothing to free. */
struct moe_rpc_arena {
    size_t used; /* bytes of `memory` */
    _Alignas(16) uint8_t memory[16384];
};

struct ProtobufCMessageDescriptor;

/* Unpacks `length` bytes to a message of `type`, inside `arena`, whose earlier message is gone.
 * Keeps nothing of `bytes`. NULL: malformed, or too big for an arena.
 *     const Foo *q = moe_rpc_unpack(&foo__descriptor, bytes, n, &arena); */
void *moe_rpc_unpack(const struct ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                     size_t length, struct moe_rpc_arena *arena);

/* The same for a received message without parts; sets `*message`, on success only.
 * Errors: MOE_INVALID_ARGUMENT with reason TOO_LARGE (over MOE_RPC_HEAD_MAX bytes) or MALFORMED. */
struct moe_status moe_rpc_msg_unpack(const struct moe_rpc_msg *m,
                                     const struct ProtobufCMessageDescriptor *type,
                                     struct moe_rpc_arena *arena, void **message) MOE_CHECKED;

/* --------------------------------------------------------------------- allocator */

/* Sets up glibc's malloc for large messages: memory that one message gave back is kept for the next
 * instead of being returned to the kernel and faulted in again, which otherwise costs more than
 * HTTP/2 does. Process-wide; call once from main, before any thread and any other function of this
 * room. */
void moe_rpc_tune_allocator(void);

/* Lets every thread that waits for events look at its own connections alone. By default the core
 * has one thread of the process look at all of them, which wakes the right one then; a server whose
 * shards stay awake (spin_ns) would wait for that thread all the same. Looking takes longer the
 * more connections there are, some 0.1 us for each. The environment's GRPC_POLL_STRATEGY comes
 * first. Process-wide; call once from main, before any thread and any other function of this room.
 */
void moe_rpc_tune_polling(void);

#endif
