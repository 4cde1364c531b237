/* SPDX-License-Identifier: Apache-2.0 */
/* Splits received messages while walking the core's slices, and joins parts to send into one buffer
 * of slices. Never reads a part; never copies a byte twice. */
#include "rpc/msg.h"

#include "rpc/core.h"
#include "rpc/wire.h"

#include <grpc/byte_buffer_reader.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ received */

struct moe_rpc_msg *moe_rpc_msg_from_buffer(grpc_byte_buffer *buffer)
{
    return (struct moe_rpc_msg *)buffer;
}

static grpc_byte_buffer *buffer_of(const struct moe_rpc_msg *m)
{
    return (grpc_byte_buffer *)m;
}

size_t moe_rpc_msg_length(const struct moe_rpc_msg *m)
{
    return grpc_byte_buffer_length(buffer_of(m));
}

void moe_rpc_msg_free(struct moe_rpc_msg *m)
{
    if (m != NULL)
        grpc_byte_buffer_destroy(buffer_of(m));
}

struct moe_rpc_msg *moe_rpc_msg_from_pieces(const struct moe_rpc_piece *pieces, size_t count)
{
    grpc_slice *slices = calloc(count > 0 ? count : 1, sizeof *slices);
    if (slices == NULL)
        return NULL;
    for (size_t i = 0; i < count; i++)
        slices[i] = grpc_slice_from_copied_buffer(pieces[i].data, pieces[i].length);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(slices, count);
    for (size_t i = 0; i < count; i++)
        grpc_slice_unref(slices[i]);
    free(slices);
    return moe_rpc_msg_from_buffer(buffer);
}

/* Tags and lengths have 32 bits, so at most 5 bytes. */
enum { TAG_MAX = 5 };

/* A position in a chain of slices. */
struct cursor {
    grpc_byte_buffer_reader reader;
    const uint8_t *at, *end; /* unread bytes of the current slice */
    size_t left;             /* unread bytes of the message; >= end - at */
};

static bool cursor_open(struct cursor *c, const struct moe_rpc_msg *m)
{
    grpc_byte_buffer *buffer = buffer_of(m);
    *c = (struct cursor){.left = grpc_byte_buffer_length(buffer)};
    return grpc_byte_buffer_reader_init(&c->reader, buffer) != 0;
}

/* Makes at < end true; false at the end of the message. */
static bool cursor_fill(struct cursor *c)
{
    grpc_slice *slice;
    while (c->at == c->end) {
        if (!grpc_byte_buffer_reader_peek(&c->reader, &slice))
            return false;
        c->at = GRPC_SLICE_START_PTR(*slice);
        c->end = c->at + GRPC_SLICE_LENGTH(*slice);
    }
    return true;
}

/* Copies, or skips if `to` is NULL. False when the message ends before `length` bytes. */
static bool cursor_copy(struct cursor *c, void *to, size_t length)
{
    uint8_t *out = to;
    if (length > c->left)
        return false;
    while (length > 0) {
        if (!cursor_fill(c))
            return false;
        size_t n = (size_t)(c->end - c->at);
        n = n < length ? n : length;
        if (out != NULL) {
            memcpy(out, c->at, n);
            out += n;
        }
        c->at += n;
        c->left -= n;
        length -= n;
    }
    return true;
}

static struct moe_status malformed(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "malformed message: %s", what);
}

static struct moe_status truncated(void)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED,
                     "truncated message: it ends inside a field");
}

/* Tag, and length or varint, of a field. */
struct prefix {
    uint8_t raw[2 * MOE_WIRE_VARINT_MAX];
    size_t raw_length;
    uint32_t field;
    unsigned type;
    uint64_t value;  /* of a varint */
    uint64_t length; /* bytes of content that follow `raw` */
};

/* Reads a varint of at most `longest` bytes and appends its raw bytes to the prefix. */
static struct moe_status read_varint(struct cursor *c, unsigned longest, uint64_t *value,
                                     struct prefix *p)
{
    *value = 0;
    for (unsigned i = 0; i < longest; i++) {
        if (!cursor_fill(c))
            return truncated();
        uint8_t byte = *c->at++;
        c->left--;
        p->raw[p->raw_length++] = byte;
        if (i == MOE_WIRE_VARINT_MAX - 1 && byte > 1)
            break;
        *value |= (uint64_t)(byte & 0x7f) << (7 * i);
        if (!(byte & 0x80))
            return moe_ok();
    }
    return malformed("over-long varint");
}

/* One walk over a message. */
struct split {
    struct cursor cursor;
    const uint32_t *part_fields;
    size_t part_count;
    uint32_t seen; /* bit i: part_fields[i] has occurred */
    uint8_t *head;
    size_t head_length;
    moe_rpc_sink sink;
    void *ctx;
};

static struct moe_status read_prefix(struct cursor *c, struct prefix *p)
{
    uint64_t tag;
    p->raw_length = 0;
    p->length = 0;
    MOE_TRY(read_varint(c, TAG_MAX, &tag, p));
    if (tag >> 32 != 0 || tag >> 3 == 0)
        return malformed("field number outside 1 to 536870911");
    p->field = (uint32_t)(tag >> 3);
    p->type = (unsigned)(tag & 7);
    switch (p->type) {
    case MOE_WIRE_VARINT: return read_varint(c, MOE_WIRE_VARINT_MAX, &p->value, p);
    case MOE_WIRE_FIXED64: p->length = 8; break;
    case MOE_WIRE_FIXED32: p->length = 4; break;
    case MOE_WIRE_BYTES: MOE_TRY(read_varint(c, TAG_MAX, &p->length, p)); break;
    default: return malformed("unknown wire type or group");
    }
    return p->length > c->left ? truncated() : moe_ok();
}

static struct moe_status take_part(struct split *s, size_t index, const struct prefix *p)
{
    void *to = NULL;
    if (p->type != MOE_WIRE_BYTES)
        return malformed("a tensor field is not of type bytes");
    if (s->seen & UINT32_C(1) << index)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DUPLICATE_TENSOR,
                         "tensor field %u occurs twice", p->field);
    s->seen |= UINT32_C(1) << index;
    MOE_TRY(s->sink(s->ctx, p->field, (size_t)p->length, &to));
    MOE_INVARIANT(to != NULL || p->length == 0);
    return cursor_copy(&s->cursor, to, (size_t)p->length) ? moe_ok() : truncated();
}

static struct moe_status take_head(struct split *s, const struct prefix *p)
{
    size_t room = MOE_RPC_HEAD_MAX - s->head_length;
    if (p->raw_length > room || p->length > room - p->raw_length)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the message without its tensors is over %d bytes", MOE_RPC_HEAD_MAX);
    memcpy(s->head + s->head_length, p->raw, p->raw_length);
    s->head_length += p->raw_length;
    if (!cursor_copy(&s->cursor, s->head + s->head_length, (size_t)p->length))
        return truncated();
    s->head_length += (size_t)p->length;
    return moe_ok();
}

static struct moe_status take_field(struct split *s)
{
    struct prefix p;
    MOE_TRY(read_prefix(&s->cursor, &p));
    for (size_t i = 0; i < s->part_count; i++) {
        if (s->part_fields[i] == p.field)
            return take_part(s, i, &p);
    }
    return take_head(s, &p);
}

struct moe_status moe_rpc_msg_split(struct moe_rpc_msg *m, const uint32_t *part_fields,
                                    size_t part_count, uint8_t *head, size_t *head_length,
                                    moe_rpc_sink sink, void *ctx)
{
    struct split s = {.part_fields = part_fields,
                      .part_count = part_count,
                      .head = head,
                      .sink = sink,
                      .ctx = ctx};
    MOE_INVARIANT(part_count <= 32);
    if (!cursor_open(&s.cursor, m))
        return malformed("compressed");
    struct moe_status st = moe_ok();
    while (!moe_failed(&st) && s.cursor.left > 0)
        st = take_field(&s);
    grpc_byte_buffer_reader_destroy(&s.cursor.reader);
    if (!moe_failed(&st))
        *head_length = s.head_length;
    return st;
}

struct moe_status moe_rpc_msg_find_uint(const struct moe_rpc_msg *m, uint32_t field,
                                        uint64_t *value)
{
    struct cursor c;
    struct prefix p;
    *value = 0;
    if (!cursor_open(&c, m))
        return malformed("compressed");
    struct moe_status st = moe_ok();
    while (!moe_failed(&st) && c.left > 0) {
        st = read_prefix(&c, &p);
        if (moe_failed(&st))
            break;
        if (p.field == field && p.type == MOE_WIRE_VARINT)
            *value = p.value;
        if (!cursor_copy(&c, NULL, (size_t)p.length))
            st = truncated();
    }
    grpc_byte_buffer_reader_destroy(&c.reader);
    return st;
}

struct moe_status moe_rpc_msg_flatten(const struct moe_rpc_msg *m, uint8_t *buffer, size_t capacity,
                                      size_t *length)
{
    struct cursor c;
    size_t n = moe_rpc_msg_length(m);
    if (n > capacity)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "a message of %zu bytes where at most %zu are accepted", n, capacity);
    if (!cursor_open(&c, m))
        return malformed("compressed");
    bool whole = cursor_copy(&c, buffer, n);
    grpc_byte_buffer_reader_destroy(&c.reader);
    *length = n;
    return whole ? moe_ok() : truncated();
}

/* ----------------------------------------------------------------------- sent */

void moe_rpc_out_discard(const struct moe_rpc_out *out)
{
    for (size_t i = 0; i < out->part_count; i++) {
        if (out->parts[i].release != NULL)
            out->parts[i].release(out->parts[i].owner);
    }
}

size_t moe_rpc_put_part_prefix(uint8_t *to, uint32_t field, uint64_t length)
{
    size_t n = moe_wire_put_varint(to, (uint64_t)field << 3 | MOE_WIRE_BYTES);
    return n + moe_wire_put_varint(to + n, length);
}

#ifdef MOE_TSAN
/* A slice ends on any thread; what was done with the part before is seen there. */
static void release_seen(void *arg)
{
    MOE_RPC_TAKE_OVER(arg);
    struct moe_rpc_part part = *(struct moe_rpc_part *)arg;
    free(arg);
    part.release(part.owner);
}

static grpc_slice seen_slice(const struct moe_rpc_part *part)
{
    struct moe_rpc_part *copy = malloc(sizeof *copy);
    MOE_INVARIANT(copy != NULL);
    *copy = *part;
    MOE_RPC_HAND_OVER(copy);
    return grpc_slice_new_with_user_data((void *)(uintptr_t)part->data, part->length, release_seen,
                                         copy);
}
#endif

static grpc_slice part_slice(const struct moe_rpc_part *part)
{
    if (part->release == NULL)
        return grpc_slice_from_static_buffer(part->data, part->length);
#ifdef MOE_TSAN
    return seen_slice(part);
#else
    return grpc_slice_new_with_user_data((void *)(uintptr_t)part->data, part->length, part->release,
                                         part->owner);
#endif
}

/* Layout: head, prefix, part, prefix, part ... Only the slice's destructor shows that the core no
 * longer uses a part: after a completed send it may still need the bytes. */
grpc_byte_buffer *moe_rpc_out_to_buffer(const struct moe_rpc_out *out)
{
    grpc_slice slices[2 * MOE_RPC_PARTS_MAX + 1];
    uint8_t prefix[2 * MOE_WIRE_VARINT_MAX];
    size_t count = 0;
    MOE_INVARIANT(out->part_count <= MOE_RPC_PARTS_MAX);
    if (out->head_length > 0)
        slices[count++] = grpc_slice_from_copied_buffer((const char *)out->head, out->head_length);
    for (size_t i = 0; i < out->part_count; i++) {
        const struct moe_rpc_part *part = &out->parts[i];
        size_t n = moe_rpc_put_part_prefix(prefix, part->field, part->length);
        slices[count++] = grpc_slice_from_copied_buffer((const char *)prefix, n);
        if (part->length > 0)
            slices[count++] = part_slice(part);
        else if (part->release != NULL)
            part->release(part->owner);
    }
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(slices, count);
    for (size_t i = 0; i < count; i++)
        grpc_slice_unref(slices[i]);
    return buffer;
}
