/* SPDX-License-Identifier: Apache-2.0 */
/* See wire.h. */
#include "rpc/wire.h"

#include <string.h>

size_t moe_wire_put_varint(uint8_t *to, uint64_t value)
{
    size_t n = 0;
    for (; value >= 0x80; value >>= 7)
        to[n++] = (uint8_t)(value | 0x80);
    to[n++] = (uint8_t)value;
    return n;
}

static void put(struct moe_wire_writer *w, const uint8_t *prefix, size_t prefix_length,
                const void *data, size_t length)
{
    size_t room = w->capacity - w->length;
    if (w->overflow || prefix_length > room || length > room - prefix_length) {
        w->overflow = true;
        return;
    }
    memcpy(w->memory + w->length, prefix, prefix_length);
    if (length > 0)
        memcpy(w->memory + w->length + prefix_length, data, length);
    w->length += prefix_length + length;
}

void moe_wire_put_uint(struct moe_wire_writer *w, uint32_t field, uint64_t value)
{
    uint8_t bytes[2 * MOE_WIRE_VARINT_MAX];
    size_t n = moe_wire_put_varint(bytes, (uint64_t)field << 3 | MOE_WIRE_VARINT);
    n += moe_wire_put_varint(bytes + n, value);
    put(w, bytes, n, NULL, 0);
}

void moe_wire_put_bytes(struct moe_wire_writer *w, uint32_t field, const void *data, size_t length)
{
    uint8_t prefix[2 * MOE_WIRE_VARINT_MAX];
    size_t n = moe_wire_put_varint(prefix, (uint64_t)field << 3 | MOE_WIRE_BYTES);
    n += moe_wire_put_varint(prefix + n, length);
    put(w, prefix, n, data, length);
}

static bool get_varint(const uint8_t *message, size_t length, size_t *at, uint64_t *out)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < MOE_WIRE_VARINT_MAX && *at + i < length; i++) {
        uint8_t byte = message[*at + i];
        if (i == MOE_WIRE_VARINT_MAX - 1 && byte > 1)
            return false;
        value |= (uint64_t)(byte & 0x7f) << (7 * i);
        if (!(byte & 0x80)) {
            *at += i + 1;
            *out = value;
            return true;
        }
    }
    return false;
}

bool moe_wire_next(const uint8_t *message, size_t length, size_t *at, struct moe_wire_field *out)
{
    size_t p = *at;
    uint64_t tag;
    if (!get_varint(message, length, &p, &tag) || tag >> 32 || tag >> 3 == 0)
        return false;
    *out = (struct moe_wire_field){.number = (uint32_t)(tag >> 3),
                                   .type = (enum moe_wire_type)(tag & 7)};
    uint64_t skip = 0;
    switch (tag & 7) {
    case MOE_WIRE_VARINT:
        if (!get_varint(message, length, &p, &out->value))
            return false;
        break;
    case MOE_WIRE_FIXED64: skip = 8; break;
    case MOE_WIRE_FIXED32: skip = 4; break;
    case MOE_WIRE_BYTES:
        if (!get_varint(message, length, &p, &skip))
            return false;
        out->bytes = message + p;
        break;
    default: return false;
    }
    if (skip > length - p)
        return false;
    out->length = (size_t)skip;
    *at = p + (size_t)skip;
    return true;
}
