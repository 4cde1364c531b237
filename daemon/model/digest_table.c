/* SPDX-License-Identifier: Apache-2.0 */
/* Layers ascending in one array; each has an array of its units, the common one first. */
#include "model/digest_table.h"

#include "daemon/bytes.h"
#include "moe/types.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct layer {
    uint32_t layer, experts;
    struct moe_digest_names names[2]; /* COMMON, EXPERT */
    struct moe_digest_unit *units;    /* [experts + 1] */
    uint8_t *known;                   /* [experts + 1], 0 or 1 */
};

enum { COMMON, EXPERT };

struct moe_digest_table {
    size_t count;
    struct layer *layers[MOE_MAX_LAYERS]; /* ascending by number */
};

static struct moe_status malformed(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "digests: %s", what);
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for digests");
}

/* ------------------------------------------------------------------ lifetime */

struct moe_status moe_digest_table_create(struct moe_digest_table **out)
{
    struct moe_digest_table *t = calloc(1, sizeof *t);
    if (t == NULL)
        return no_memory();
    *out = t;
    return moe_ok();
}

static void free_layer(struct layer *l)
{
    if (l == NULL)
        return;
    free(l->units);
    free(l->known);
    free(l);
}

void moe_digest_table_clear(struct moe_digest_table *t)
{
    for (size_t i = 0; i < t->count; i++)
        free_layer(t->layers[i]);
    t->count = 0;
}

void moe_digest_table_destroy(struct moe_digest_table *t)
{
    if (t == NULL)
        return;
    moe_digest_table_clear(t);
    free(t);
}

bool moe_digest_table_is_empty(const struct moe_digest_table *t)
{
    return t->count == 0;
}

/* ------------------------------------------------------------------ layers, units */

/* Index of the layer, or of the place where it belongs. */
static size_t find_place(const struct moe_digest_table *t, uint32_t layer)
{
    size_t low = 0, high = t->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (t->layers[middle]->layer < layer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct layer *find_layer(const struct moe_digest_table *t, uint32_t layer)
{
    size_t at = find_place(t, layer);
    return at < t->count && t->layers[at]->layer == layer ? t->layers[at] : NULL;
}

static bool same_names(const struct moe_digest_names *a, const struct moe_digest_names *b)
{
    if (a->count != b->count)
        return false;
    for (uint32_t i = 0; i < a->count; i++)
        if (strcmp(a->of[i], b->of[i]) != 0)
            return false;
    return true;
}

static bool same_form(const struct layer *a, const struct layer *b)
{
    return a->experts == b->experts && same_names(&a->names[COMMON], &b->names[COMMON]) &&
           same_names(&a->names[EXPERT], &b->names[EXPERT]);
}

static bool names_are_sound(const struct moe_digest_names *n)
{
    if (n->count < 1 || n->count > MOE_DIGEST_UNIT_TENSORS)
        return false;
    for (uint32_t i = 0; i < n->count; i++) {
        size_t length = strnlen(n->of[i], MOE_DIGEST_NAME_BYTES);
        if (length == 0 || length == MOE_DIGEST_NAME_BYTES)
            return false;
        for (size_t c = 0; c < length; c++)
            if (n->of[i][c] <= ' ' || n->of[i][c] > '~')
                return false;
    }
    return true;
}

static struct layer *new_layer(uint32_t layer, uint32_t experts,
                               const struct moe_digest_names *common,
                               const struct moe_digest_names *expert)
{
    struct layer *l = calloc(1, sizeof *l);
    if (l == NULL)
        return NULL;
    *l = (struct layer){.layer = layer,
                        .experts = experts,
                        .names = {*common, *expert},
                        .units = calloc((size_t)experts + 1, sizeof *l->units),
                        .known = calloc((size_t)experts + 1, 1)};
    if (l->units != NULL && l->known != NULL)
        return l;
    free_layer(l);
    return NULL;
}

struct moe_status moe_digest_table_add_layer(struct moe_digest_table *t, uint32_t layer,
                                             uint32_t experts,
                                             const struct moe_digest_names *common,
                                             const struct moe_digest_names *expert)
{
    if (experts < 1 || experts > MOE_MAX_EXPERTS || !names_are_sound(common) ||
        !names_are_sound(expert))
        return malformed("a layer has impossible numbers or names");
    size_t at = find_place(t, layer);
    if (at < t->count && t->layers[at]->layer == layer) {
        const struct layer wanted = {.experts = experts, .names = {*common, *expert}};
        return same_form(t->layers[at], &wanted) ? moe_ok()
                                                 : malformed("one layer with two sets of tensors");
    }
    if (t->count == MOE_MAX_LAYERS)
        return malformed("too many layers");
    struct layer *l = new_layer(layer, experts, common, expert);
    if (l == NULL)
        return no_memory();
    memmove(&t->layers[at + 1], &t->layers[at], (t->count - at) * sizeof t->layers[0]);
    t->layers[at] = l;
    t->count++;
    return moe_ok();
}

static uint32_t index_of(uint32_t expert)
{
    return expert == MOE_DIGEST_COMMON ? 0 : expert + 1;
}

static uint32_t expert_at(uint32_t index)
{
    return index == 0 ? MOE_DIGEST_COMMON : index - 1;
}

static const struct moe_digest_names *names_at(const struct layer *l, uint32_t index)
{
    return &l->names[index == 0 ? COMMON : EXPERT];
}

void moe_digest_table_set(struct moe_digest_table *t, uint32_t layer, uint32_t expert,
                          const struct moe_digest_unit *unit)
{
    struct layer *l = find_layer(t, layer);
    MOE_INVARIANT(l != NULL && (expert == MOE_DIGEST_COMMON || expert < l->experts));
    l->units[index_of(expert)] = *unit;
    l->known[index_of(expert)] = 1;
}

const struct moe_digest_unit *moe_digest_table_get(const struct moe_digest_table *t, uint32_t layer,
                                                   uint32_t expert)
{
    const struct layer *l = find_layer(t, layer);
    if (l == NULL || (expert != MOE_DIGEST_COMMON && expert >= l->experts))
        return NULL;
    return l->known[index_of(expert)] ? &l->units[index_of(expert)] : NULL;
}

struct moe_status moe_digest_table_merge(struct moe_digest_table *t,
                                         const struct moe_digest_table *from)
{
    for (size_t i = 0; i < from->count; i++) {
        const struct layer *l = from->layers[i];
        MOE_TRY(moe_digest_table_add_layer(t, l->layer, l->experts, &l->names[COMMON],
                                           &l->names[EXPERT]));
        for (uint32_t u = 0; u <= l->experts; u++)
            if (l->known[u])
                moe_digest_table_set(t, l->layer, expert_at(u), &l->units[u]);
    }
    return moe_ok();
}

/* ------------------------------------------------------------------ comparison */

/* The name of tensor `i` of a unit, with the expert in the place of '*' or behind it. */
static void name_tensor(const struct layer *l, uint32_t index, uint32_t i,
                        struct moe_digest_difference *out)
{
    const char *name = names_at(l, index)->of[i], *star = strchr(name, '*');
    out->layer = l->layer;
    out->expert = expert_at(index);
    if (index == 0)
        snprintf(out->name, sizeof out->name, "%s", name);
    else if (star == NULL)
        snprintf(out->name, sizeof out->name, "%s, expert %u", name, out->expert);
    else
        snprintf(out->name, sizeof out->name, "%.*s%u%s", (int)(star - name), name, out->expert,
                 star + 1);
}

/* The first tensor with another tag, else the first one. */
static uint32_t first_tensor(const struct layer *l, uint32_t index, const struct moe_digest_unit *a,
                             const struct moe_digest_unit *b)
{
    for (uint32_t i = 0; i < names_at(l, index)->count; i++)
        if (memcmp(a->tags[i], b->tags[i], MOE_DIGEST_TAG_BYTES) != 0)
            return i;
    return 0;
}

static bool layers_differ(const struct layer *a, const struct layer *b,
                          struct moe_digest_difference *out)
{
    if (!same_form(a, b)) {
        name_tensor(a, 0, 0, out);
        return true;
    }
    for (uint32_t u = 0; u <= a->experts; u++) {
        const struct moe_digest_unit *x = &a->units[u], *y = &b->units[u];
        if (!a->known[u] || !b->known[u] || memcmp(&x->digest, &y->digest, sizeof x->digest) == 0)
            continue;
        name_tensor(a, u, first_tensor(a, u, x, y), out);
        return true;
    }
    return false;
}

bool moe_digest_table_differs(const struct moe_digest_table *a, const struct moe_digest_table *b,
                              struct moe_digest_difference *out)
{
    for (size_t i = 0; i < a->count; i++) {
        const struct layer *other = find_layer(b, a->layers[i]->layer);
        if (other != NULL && layers_differ(a->layers[i], other, out))
            return true;
    }
    return false;
}

bool moe_digest_table_is_complete(const struct moe_digest_table *t)
{
    for (size_t i = 0; i < t->count; i++)
        if (memchr(t->layers[i]->known, 0, (size_t)t->layers[i]->experts + 1) != NULL)
            return false;
    return t->count > 0;
}

static struct moe_status digest_layer(const struct layer *l, struct moe_digest *out)
{
    struct moe_digest units[MOE_MAX_EXPERTS + 1];
    for (uint32_t u = 0; u <= l->experts; u++)
        units[u] = l->units[u].digest;
    return moe_digest_layer(l->layer, l->experts, units, out);
}

struct moe_status moe_digest_table_model(const struct moe_digest_table *t, struct moe_digest *out)
{
    struct moe_digest layers[MOE_MAX_LAYERS];
    MOE_INVARIANT(moe_digest_table_is_complete(t));
    for (size_t i = 0; i < t->count; i++)
        MOE_TRY(digest_layer(t->layers[i], &layers[i]));
    return moe_digest_model(layers, (uint32_t)t->count, out);
}

/* ------------------------------------------------------------------ parts */

enum { HEAD_BYTES = 10, COUNT_BYTES = 4 };

_Static_assert(HEAD_BYTES + 2 * MOE_DIGEST_UNIT_TENSORS * MOE_DIGEST_NAME_BYTES + COUNT_BYTES +
                       2 * sizeof(struct moe_digest_unit) <=
                   MOE_DIGEST_PART_MIN_BYTES,
               "a part holds the names and a unit");

static uint8_t *put(uint8_t *to, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        *to++ = (uint8_t)(value >> (8 * i));
    return to;
}

static uint8_t *put_bytes(uint8_t *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return to + bytes;
}

static uint8_t *put_head(uint8_t *at, const struct layer *l)
{
    at = put(at, l->layer);
    at = put(at, l->experts);
    *at++ = (uint8_t)l->names[COMMON].count;
    *at++ = (uint8_t)l->names[EXPERT].count;
    for (int kind = COMMON; kind <= EXPERT; kind++) {
        for (uint32_t i = 0; i < l->names[kind].count; i++) {
            size_t length = strlen(l->names[kind].of[i]);
            *at++ = (uint8_t)length;
            at = put_bytes(at, l->names[kind].of[i], length);
        }
    }
    return at;
}

/* Skips units and layers that are not known. False at the end. */
static bool find_unit(const struct moe_digest_table *t, struct moe_digest_cursor *at)
{
    for (; at->layer < t->count; at->layer++, at->unit = 0)
        for (; at->unit <= t->layers[at->layer]->experts; at->unit++)
            if (t->layers[at->layer]->known[at->unit])
                return true;
    return false;
}

size_t moe_digest_table_pack(const struct moe_digest_table *t, struct moe_digest_cursor *at,
                             uint8_t *part, size_t capacity)
{
    MOE_INVARIANT(capacity >= MOE_DIGEST_PART_MIN_BYTES);
    if (!find_unit(t, at))
        return 0;
    const size_t layer = at->layer;
    const struct layer *l = t->layers[layer];
    uint8_t *end = put_head(part, l), *count_at = end;
    uint32_t count = 0;
    end += COUNT_BYTES;
    for (; find_unit(t, at) && at->layer == layer; at->unit++) {
        size_t tags = names_at(l, at->unit)->count * (size_t)MOE_DIGEST_TAG_BYTES;
        if (4 + MOE_SHA256_BYTES + tags > capacity - (size_t)(end - part))
            break;
        const struct moe_digest_unit *unit = &l->units[at->unit];
        end = put(end, expert_at(at->unit));
        end = put_bytes(end, unit->digest.bytes, MOE_SHA256_BYTES);
        end = put_bytes(end, unit->tags, tags);
        count++;
    }
    put(count_at, count);
    return (size_t)(end - part);
}

static bool take_names(struct moe_bytes *r, uint8_t count, struct moe_digest_names *out)
{
    if (count > MOE_DIGEST_UNIT_TENSORS)
        return false;
    out->count = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *length = moe_bytes_take(r, 1);
        const uint8_t *text = length != NULL ? moe_bytes_take(r, *length) : NULL;
        if (text == NULL || *length >= MOE_DIGEST_NAME_BYTES || memchr(text, 0, *length) != NULL)
            return false;
        memcpy(out->of[i], text, *length);
        out->of[i][*length] = '\0';
    }
    return true;
}

static bool take_unit(struct moe_bytes *r, struct moe_digest_table *t, const struct layer *l)
{
    uint32_t expert;
    struct moe_digest_unit unit = {0};
    if (!moe_bytes_take_u32(r, &expert) || (expert != MOE_DIGEST_COMMON && expert >= l->experts))
        return false;
    size_t tags = names_at(l, index_of(expert))->count * (size_t)MOE_DIGEST_TAG_BYTES;
    const uint8_t *digest = moe_bytes_take(r, MOE_SHA256_BYTES), *tag = moe_bytes_take(r, tags);
    if (digest == NULL || tag == NULL)
        return false;
    memcpy(unit.digest.bytes, digest, MOE_SHA256_BYTES);
    memcpy(unit.tags, tag, tags);
    moe_digest_table_set(t, l->layer, expert, &unit);
    return true;
}

struct moe_status moe_digest_part_layer(const uint8_t *part, size_t length, uint32_t *layer,
                                        uint32_t *experts)
{
    struct moe_bytes r = {part, length};
    return moe_bytes_take_u32(&r, layer) && moe_bytes_take_u32(&r, experts)
               ? moe_ok()
               : malformed("a part is cut");
}

struct moe_status moe_digest_table_unpack(struct moe_digest_table *t, const uint8_t *part,
                                          size_t length)
{
    struct moe_bytes r = {part, length};
    struct moe_digest_names common = {0}, expert = {0};
    uint32_t layer, experts, count;
    const uint8_t *counts = NULL;
    if (!moe_bytes_take_u32(&r, &layer) || !moe_bytes_take_u32(&r, &experts) ||
        (counts = moe_bytes_take(&r, 2)) == NULL || !take_names(&r, counts[0], &common) ||
        !take_names(&r, counts[1], &expert) || !moe_bytes_take_u32(&r, &count))
        return malformed("a part is cut");
    MOE_TRY(moe_digest_table_add_layer(t, layer, experts, &common, &expert));
    const struct layer *l = find_layer(t, layer);
    for (uint32_t i = 0; i < count; i++)
        if (!take_unit(&r, t, l))
            return malformed("a unit is cut, or of no expert");
    return r.left == 0 ? moe_ok() : malformed("a part is too long");
}
