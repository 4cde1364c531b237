/* SPDX-License-Identifier: Apache-2.0 */
/* Unpacks messages of protobuf-c and refuses strings with a zero byte. protobuf-c ends a string
 * there, so a checked name could differ from the sent one. */
#include "rpc/msg.h"
#include "rpc/wire.h"

#include <protobuf-c/protobuf-c.h>
#include <string.h>

static struct moe_status malformed(const ProtobufCMessageDescriptor *type)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "not a %s", type->short_name);
}

/* Checks the strings of a message and its nested messages on the wire, which has their lengths.
 * Types are not recursive, so they bound the depth. Refuses bytes that cannot be walked: protobuf-c
 * might read strings in them that were not checked. */
static struct moe_status check_strings(const ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                                       size_t length)
{
    struct moe_wire_field f;
    size_t at = 0;
    while (moe_wire_next(bytes, length, &at, &f)) {
        if (f.type != MOE_WIRE_BYTES)
            continue;
        const ProtobufCFieldDescriptor *d = protobuf_c_message_descriptor_get_field(type, f.number);
        if (d == NULL) /* unknown, so unused */
            continue;
        if (d->type == PROTOBUF_C_TYPE_STRING && memchr(f.bytes, '\0', f.length) != NULL)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "%s.%s holds a zero byte",
                             type->short_name, d->name);
        if (d->type == PROTOBUF_C_TYPE_MESSAGE)
            MOE_TRY(check_strings(d->descriptor, f.bytes, f.length));
    }
    return at == length ? moe_ok() : malformed(type);
}

static void *arena_alloc(void *arena, size_t size)
{
    struct moe_rpc_arena *a = arena;
    size_t room = sizeof a->memory - a->used;
    if (size > room)
        return NULL;
    void *p = a->memory + a->used;
    size_t rounded = (size + 15) & ~(size_t)15;
    a->used += rounded < room ? rounded : room;
    return p;
}

static void arena_free(void *arena, void *p)
{
    (void)arena;
    (void)p;
}

struct moe_status moe_rpc_unpack(const ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                                 size_t length, struct moe_rpc_arena *arena, void **message)
{
    ProtobufCAllocator allocator = {
        .alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    MOE_TRY(check_strings(type, bytes, length));
    if (arena != NULL)
        arena->used = 0;
    void *unpacked =
        protobuf_c_message_unpack(type, arena != NULL ? &allocator : NULL, length, bytes);
    if (unpacked == NULL)
        return malformed(type);
    *message = unpacked;
    return moe_ok();
}

struct moe_status moe_rpc_msg_unpack(const struct moe_rpc_msg *m,
                                     const ProtobufCMessageDescriptor *type,
                                     struct moe_rpc_arena *arena, void **message)
{
    uint8_t bytes[MOE_RPC_HEAD_MAX];
    size_t length;
    MOE_TRY(moe_rpc_msg_flatten(m, bytes, sizeof bytes, &length));
    return moe_rpc_unpack(type, bytes, length, arena, message);
}
