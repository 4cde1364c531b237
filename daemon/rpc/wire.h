/* SPDX-License-Identifier: Apache-2.0 */
/* The protobuf wire format over flat memory, for messages without generated code (google.rpc
 * details, descriptor sets, part prefixes). Never allocates. Malformed input ends a walk early; the
 * cursor shows this. */
#ifndef MOE_RPC_WIRE_H
#define MOE_RPC_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum moe_wire_type {
    MOE_WIRE_VARINT = 0,
    MOE_WIRE_FIXED64 = 1,
    MOE_WIRE_BYTES = 2,
    MOE_WIRE_FIXED32 = 5,
};

enum { MOE_WIRE_VARINT_MAX = 10 };

/* Writes at most MOE_WIRE_VARINT_MAX bytes and returns how many. */
size_t moe_wire_put_varint(uint8_t *to, uint64_t value);

/* A bounded writer: a put that does not fit only sets `overflow`. */
struct moe_wire_writer {
    uint8_t *memory;
    size_t capacity;
    size_t length;
    bool overflow;
};
void moe_wire_put_uint(struct moe_wire_writer *w, uint32_t field, uint64_t value);
void moe_wire_put_bytes(struct moe_wire_writer *w, uint32_t field, const void *data, size_t length);

/* One field of a flat message. `bytes` points into the message; only for MOE_WIRE_BYTES. */
struct moe_wire_field {
    uint32_t number;
    enum moe_wire_type type;
    uint64_t value; /* of a varint */
    const uint8_t *bytes;
    size_t length;
};
/* Reads the field at `*at` and advances `*at`. False at the end, and also at a malformed field;
 * then
 * `*at` < length. */
bool moe_wire_next(const uint8_t *message, size_t length, size_t *at, struct moe_wire_field *out);

#endif
