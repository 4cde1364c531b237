/* SPDX-License-Identifier: Apache-2.0 */
/* Walks header blocks (RFC 7541) for their size, without decoding them: where each field ends, and
 * how many bytes it stands for. Of the dynamic table it keeps the sizes, in order. Strings in
 * Huffman's code are counted as if each were as long as it can be. */
#include "listener/frames.h"

enum state { FIELD, INDEX, SIZE, LENGTH, MORE_LENGTH, STRING };

enum {
    OVERHEAD = 32, /* of a field, as the format counts */
    STATIC_ENTRIES = 61,
    STATIC_NAME = 32,    /* no static name is longer, ... */
    STATIC_FIELD = 48,   /* ... nor is any static field */
    VALUE_MAX = 1 << 24, /* larger integers mean nothing here */
};

static uint32_t at_most(uint64_t bytes)
{
    return bytes < VALUE_MAX ? (uint32_t)bytes : VALUE_MAX;
}

/* A Huffman code has 5 bits at least. */
static uint32_t unfolded(const struct moe_hpack *h, uint32_t length)
{
    return h->prefix != 0 ? at_most((uint64_t)length * 8 / 5) : length;
}

static bool add_field(struct moe_hpack *h, uint32_t name, uint32_t value)
{
    uint32_t size = at_most((uint64_t)name + value + OVERHEAD);
    h->unfolded = at_most((uint64_t)h->unfolded + size);
    if (h->indexed) {
        h->newest = (h->newest + 1) % MOE_HPACK_ENTRIES;
        h->entries[h->newest].name = name;
        h->entries[h->newest].size = size;
        h->count += h->count < MOE_HPACK_ENTRIES;
    }
    return h->unfolded <= MOE_FRAMES_BLOCK_BYTES;
}

/* Name and size of the entry `index`. Those that the table has lost are refused by the server. */
static bool look_up(const struct moe_hpack *h, uint32_t index, uint32_t *name, uint32_t *size)
{
    *name = STATIC_NAME;
    *size = STATIC_NAME + STATIC_FIELD + OVERHEAD;
    if (index <= STATIC_ENTRIES)
        return index > 0;
    index -= STATIC_ENTRIES + 1;
    if (index >= h->count)
        return false;
    index = (h->newest + MOE_HPACK_ENTRIES - index) % MOE_HPACK_ENTRIES;
    *name = h->entries[index].name;
    *size = h->entries[index].size;
    return true;
}

/* `value` is the index of a whole field, or of a name; 0 = a new name. */
static bool have_index(struct moe_hpack *h)
{
    uint32_t name, size;
    if (h->state == SIZE || (h->value == 0 && h->prefix != 0x7f)) {
        h->has_name = false;
        h->state = h->state == SIZE ? FIELD : LENGTH;
        return true;
    }
    if (!look_up(h, h->value, &name, &size))
        return false;
    if (h->prefix == 0x7f) { /* all of the field */
        h->state = FIELD;
        h->unfolded = at_most((uint64_t)h->unfolded + size);
        return h->unfolded <= MOE_FRAMES_BLOCK_BYTES;
    }
    h->has_name = true;
    h->name = name;
    h->state = LENGTH;
    return true;
}

static bool end_string(struct moe_hpack *h)
{
    uint32_t length = unfolded(h, h->value);
    h->state = FIELD;
    if (h->has_name)
        return add_field(h, h->name, length);
    h->has_name = true;
    h->name = length;
    h->state = LENGTH;
    return true;
}

static bool have_length(struct moe_hpack *h)
{
    h->left = h->value;
    h->state = STRING;
    return h->left > 0 || end_string(h);
}

/* One more byte of an integer. False if it is too large. *over: it was the last one. */
static bool more_integer(struct moe_hpack *h, uint8_t byte, bool *over)
{
    uint64_t value = h->value + ((uint64_t)(byte & 0x7f) << h->shift);
    h->shift = (uint8_t)(h->shift + 7);
    h->value = (uint32_t)value;
    *over = (byte & 0x80) == 0;
    return value < VALUE_MAX && h->shift <= 28;
}

/* The first byte of a field or of a change of the table's size. */
static bool begin_field(struct moe_hpack *h, uint8_t byte)
{
    h->indexed = (byte & 0xc0) == 0x40;
    h->state = (byte & 0xe0) == 0x20 ? SIZE : INDEX;
    h->prefix = (byte & 0x80) != 0 ? 0x7f : h->indexed ? 0x3f : h->state == SIZE ? 0x1f : 0x0f;
    h->value = byte & h->prefix;
    h->shift = 0;
    return h->value == h->prefix || have_index(h);
}

/* The first byte of a string's length. Its top bit says whether it is in Huffman's code. */
static bool begin_length(struct moe_hpack *h, uint8_t byte)
{
    h->prefix = byte & 0x80;
    h->value = byte & 0x7f;
    h->shift = 0;
    if (h->value < 0x7f)
        return have_length(h);
    h->state = MORE_LENGTH;
    return true;
}

bool moe_hpack_walk(struct moe_hpack *h, const uint8_t *bytes, size_t length)
{
    bool good = true, over;
    for (size_t at = 0; at < length && good;) {
        if (h->state == STRING) {
            size_t part = length - at < h->left ? length - at : h->left;
            at += part;
            h->left -= (uint32_t)part;
            good = h->left > 0 || end_string(h);
            continue;
        }
        uint8_t byte = bytes[at++];
        switch ((enum state)h->state) {
        case FIELD: good = begin_field(h, byte); break;
        case LENGTH: good = begin_length(h, byte); break;
        case MORE_LENGTH: good = more_integer(h, byte, &over) && (!over || have_length(h)); break;
        default: /* INDEX, SIZE */
            good = more_integer(h, byte, &over) && (!over || have_index(h));
            break;
        }
    }
    return good;
}

bool moe_hpack_end(struct moe_hpack *h)
{
    bool whole = h->state == FIELD;
    h->unfolded = 0;
    return whole;
}
