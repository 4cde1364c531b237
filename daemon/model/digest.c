/* SPDX-License-Identifier: Apache-2.0 */
/* The nodes of the tree, one function for each kind. */
#include "model/digest.h"

#include <string.h>

enum kind { LEAF, TENSOR, UNIT, LAYER, MODEL }; /* first byte of a node */

static void begin_node(struct moe_sha256 *s, enum kind kind)
{
    const uint8_t first = (uint8_t)kind;
    moe_sha256_update(s, &first, 1);
}

static void add_number(struct moe_sha256 *s, uint64_t value, size_t bytes)
{
    uint8_t little[8];
    for (size_t i = 0; i < bytes; i++)
        little[i] = (uint8_t)(value >> (8 * i));
    moe_sha256_update(s, little, bytes);
}

static void add_text(struct moe_sha256 *s, const char *text)
{
    moe_sha256_update(s, text, strlen(text) + 1);
}

static struct moe_status end(struct moe_sha256 *s, struct moe_digest *out)
{
    struct moe_status st = moe_sha256_next(s, out->bytes);
    moe_sha256_drop(s);
    return st;
}

struct moe_status moe_digest_leaf(const void *first, size_t first_bytes, const void *rest,
                                  size_t rest_bytes, struct moe_digest *leaf)
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    begin_node(&s, LEAF);
    moe_sha256_update(&s, first, first_bytes);
    moe_sha256_update(&s, rest, rest_bytes);
    return end(&s, leaf);
}

/* Two leaves at a time, as long as that is possible. Returns the number of leaves that are done. */
static size_t hash_pairs(const char *data, size_t bytes, struct moe_digest *leaves)
{
    const size_t size = MOE_DIGEST_LEAF_BYTES;
    size_t done = 0;
    for (; (done + 2) * size <= bytes; done += 2) {
        const char *at = data + done * size;
        if (!moe_sha256_pair(LEAF, (const void *const[2]){at, at + size}, size,
                             (uint8_t *const[2]){leaves[done].bytes, leaves[done + 1].bytes}))
            break;
    }
    return done;
}

struct moe_status moe_digest_leaves(const void *data, size_t bytes, struct moe_digest *leaves)
{
    size_t done = hash_pairs(data, bytes, leaves);
    const char *at = (const char *)data + done * MOE_DIGEST_LEAF_BYTES;
    bytes -= done * MOE_DIGEST_LEAF_BYTES;
    struct moe_status st = moe_ok();
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    for (size_t i = done; bytes > 0 && !moe_failed(&st); i++) {
        size_t n = bytes < MOE_DIGEST_LEAF_BYTES ? bytes : MOE_DIGEST_LEAF_BYTES;
        begin_node(&s, LEAF);
        moe_sha256_update(&s, at, n);
        st = moe_sha256_next(&s, leaves[i].bytes);
        at += n;
        bytes -= n;
    }
    moe_sha256_drop(&s);
    return st;
}

struct moe_status moe_digest_tensor(const struct moe_digest_tensor *t,
                                    const struct moe_digest *leaves, struct moe_digest *out)
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    begin_node(&s, TENSOR);
    add_text(&s, t->name);
    add_text(&s, t->dtype);
    add_number(&s, t->rank, 4);
    for (uint32_t i = 0; i < t->rank; i++)
        add_number(&s, t->shape[i], 8);
    add_number(&s, t->first, 8);
    add_number(&s, t->bytes, 8);
    moe_sha256_update(&s, leaves, (size_t)moe_digest_leaf_count(t->bytes) * sizeof *leaves);
    return end(&s, out);
}

struct moe_status moe_digest_unit(uint32_t layer, uint32_t expert, const struct moe_digest *tensors,
                                  uint32_t count, struct moe_digest *out)
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    begin_node(&s, UNIT);
    add_number(&s, layer, 4);
    add_number(&s, expert, 4);
    add_number(&s, count, 4);
    moe_sha256_update(&s, tensors, count * sizeof *tensors);
    return end(&s, out);
}

struct moe_status moe_digest_layer(uint32_t layer, uint32_t experts, const struct moe_digest *units,
                                   struct moe_digest *out)
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    begin_node(&s, LAYER);
    add_number(&s, layer, 4);
    add_number(&s, experts, 4);
    moe_sha256_update(&s, units, ((size_t)experts + 1) * sizeof *units);
    return end(&s, out);
}

struct moe_status moe_digest_model(const struct moe_digest *layers, uint32_t count,
                                   struct moe_digest *out)
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    begin_node(&s, MODEL);
    add_number(&s, count, 4);
    moe_sha256_update(&s, layers, count * sizeof *layers);
    return end(&s, out);
}
