/* SPDX-License-Identifier: Apache-2.0 */
/* The file of a record: magic, u32 format, u32 length of the fingerprint, fingerprint, then for
 * each part u32 length and the part (model/digest_table.h), u32 0, and SHA-256 of all before.
 * Numbers are little-endian. */
#include "coordinator/weights.h"

#include "daemon/bytes.h"

#include <stdlib.h>
#include <string.h>

enum {
    FORMAT = 1,
    FINGERPRINT_BYTES = 128, /* with the final zero */
    PART_BYTES = 16384,
};

static const char magic[8] = "moeddgs\n";

struct held {
    uint64_t incarnation;
    struct moe_digest_table *table; /* NULL: nothing was reported, or the record has it */
    bool checked;                   /* complete, and differs from no other checked table */
};

struct moe_weights {
    uint32_t slots;
    const char *remedy; /* what an operator does who wants other weights than the record */
    struct held held[MOE_PLACEMENT_SLOTS_MAX];
    struct moe_digest_table *record; /* complete, or empty */
    char fingerprint[FINGERPRINT_BYTES];
    char digest[MOE_SHA256_HEX]; /* of the record; "" = none */
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for digests");
}

/* ------------------------------------------------------------------ lifetime */

struct moe_status moe_weights_create(uint32_t slots, const char *remedy, struct moe_weights **out)
{
    struct moe_weights *w = calloc(1, sizeof *w);
    if (w == NULL)
        return no_memory();
    struct moe_status st = moe_digest_table_create(&w->record);
    if (moe_failed(&st)) {
        free(w);
        return st;
    }
    MOE_INVARIANT(slots <= MOE_PLACEMENT_SLOTS_MAX);
    w->slots = slots;
    w->remedy = remedy;
    *out = w;
    return st;
}

static void drop(struct held *h)
{
    moe_digest_table_destroy(h->table);
    *h = (struct held){0};
}

void moe_weights_destroy(struct moe_weights *w)
{
    if (w == NULL)
        return;
    for (uint32_t s = 0; s < w->slots; s++)
        drop(&w->held[s]);
    moe_digest_table_destroy(w->record);
    free(w);
}

void moe_weights_keep(struct moe_weights *w, const uint64_t *incarnations)
{
    for (uint32_t s = 0; s < w->slots; s++)
        if (w->held[s].incarnation != incarnations[s])
            drop(&w->held[s]);
}

/* What the process in `slot` has reported; what an earlier one has, is forgotten. */
static struct held *hold(struct moe_weights *w, uint32_t slot, uint64_t incarnation)
{
    MOE_INVARIANT(slot < w->slots);
    struct held *h = &w->held[slot];
    if (h->incarnation != incarnation)
        drop(h);
    h->incarnation = incarnation;
    return h;
}

/* ------------------------------------------------------------------ reports */

struct moe_status moe_weights_add_part(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                       const struct moe_placement *p, const uint8_t *part,
                                       size_t length)
{
    struct held *h = hold(w, slot, incarnation);
    uint32_t layer, experts;
    size_t index;
    MOE_TRY(moe_digest_part_layer(part, length, &layer, &experts));
    if (!moe_placement_find_layer(p, layer, &index) ||
        moe_placement_layer_at(p, index).experts != experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "digests: layer %u with %u experts is none of the group", layer, experts);
    if (h->table == NULL)
        MOE_TRY(moe_digest_table_create(&h->table));
    h->checked = false;
    return moe_digest_table_unpack(h->table, part, length);
}

static bool is_holder(const struct moe_placement *p, size_t index, uint32_t expert, uint32_t slot)
{
    const uint8_t *holders;
    uint32_t count = moe_placement_holders(p, index, expert, &holders);
    return memchr(holders, (int)slot, count) != NULL;
}

static struct moe_status check_complete(const struct held *h, uint32_t slot,
                                        const struct moe_placement *p)
{
    for (size_t i = 0; i < moe_placement_layer_count(p); i++) {
        struct moe_placement_layer l = moe_placement_layer_at(p, i);
        bool all =
            h->table != NULL && moe_digest_table_get(h->table, l.layer, MOE_DIGEST_COMMON) != NULL;
        for (uint32_t e = 0; all && e < l.experts; e++)
            all = !is_holder(p, i, e, slot) || moe_digest_table_get(h->table, l.layer, e) != NULL;
        if (!all)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                             "digests of layer %u are missing", l.layer);
    }
    return moe_ok();
}

static bool has_record(const struct moe_weights *w, const char *fingerprint)
{
    return w->digest[0] != '\0' &&
           (fingerprint == NULL || strcmp(w->fingerprint, fingerprint) == 0);
}

static struct moe_status check_record(const struct moe_weights *w, const struct held *h)
{
    struct moe_digest_difference d;
    if (!moe_digest_table_differs(h->table, w->record, &d))
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "other weights than the record: %.110s (wanted? %s)", d.name, w->remedy);
}

static struct moe_status check_others(const struct moe_weights *w, const struct held *h)
{
    struct moe_digest_difference d;
    for (uint32_t s = 0; s < w->slots; s++) {
        const struct held *other = &w->held[s];
        if (other != h && other->checked && other->table != NULL &&
            moe_digest_table_differs(h->table, other->table, &d))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                             "other weights than slot %u: %.150s", s, d.name);
    }
    return moe_ok();
}

/* ------------------------------------------------------------------ the record */

void moe_weights_forget(struct moe_weights *w)
{
    moe_digest_table_clear(w->record);
    w->digest[0] = w->fingerprint[0] = '\0';
}

const char *moe_weights_digest(const struct moe_weights *w, const char *fingerprint)
{
    return has_record(w, fingerprint) ? w->digest : "";
}

/* `record` becomes the record. */
static struct moe_status take_record(struct moe_weights *w, const char *fingerprint,
                                     struct moe_digest_table *record)
{
    struct moe_digest digest;
    size_t length = strlen(fingerprint);
    MOE_INVARIANT(length < FINGERPRINT_BYTES);
    MOE_TRY(moe_digest_table_model(record, &digest));
    moe_digest_table_destroy(w->record);
    w->record = record;
    memcpy(w->fingerprint, fingerprint, length + 1);
    moe_sha256_to_hex(digest.bytes, w->digest);
    return moe_ok();
}

/* The slots that hold an expert. */
static uint64_t holders_of_any(const struct moe_placement *p)
{
    uint64_t mask = 0;
    for (size_t i = 0; i < moe_placement_layer_count(p); i++)
        for (uint32_t e = 0; e < moe_placement_layer_at(p, i).experts; e++)
            mask |= moe_placement_mask(p, i, e);
    return mask;
}

static bool all_have_reported(const struct moe_weights *w, const struct moe_placement *p)
{
    uint64_t holders = holders_of_any(p);
    for (uint32_t s = 0; s < w->slots; s++)
        if ((holders >> s & 1) != 0 && (!w->held[s].checked || w->held[s].table == NULL))
            return false;
    return true;
}

static struct moe_status begin_record(struct moe_weights *w, const char *fingerprint)
{
    struct moe_digest_table *all;
    MOE_TRY(moe_digest_table_create(&all));
    struct moe_status st = moe_ok();
    for (uint32_t s = 0; s < w->slots && !moe_failed(&st); s++)
        if (w->held[s].checked && w->held[s].table != NULL)
            st = moe_digest_table_merge(all, w->held[s].table);
    if (!moe_failed(&st))
        st = take_record(w, fingerprint, all);
    if (moe_failed(&st)) {
        moe_digest_table_destroy(all);
        return st;
    }
    for (uint32_t s = 0; s < w->slots; s++) {
        if (!w->held[s].checked)
            continue; /* without experts, and still to be compared */
        moe_digest_table_destroy(w->held[s].table);
        w->held[s].table = NULL;
    }
    return st;
}

struct moe_status moe_weights_check_more(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                         const struct moe_placement *p)
{
    struct held *h = hold(w, slot, incarnation);
    struct moe_status st = check_complete(h, slot, p);
    if (!moe_failed(&st) && !has_record(w, NULL))
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                       "the group has no record of the model's digests");
    if (!moe_failed(&st))
        st = check_record(w, h);
    moe_digest_table_destroy(h->table);
    h->table = NULL;
    h->checked = true;
    return st;
}

struct moe_status moe_weights_check(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                    const char *fingerprint, const struct moe_placement *p,
                                    bool *begun)
{
    struct held *h = hold(w, slot, incarnation);
    *begun = false;
    MOE_TRY(check_complete(h, slot, p));
    if (has_record(w, fingerprint)) {
        MOE_TRY(check_record(w, h));
        moe_digest_table_destroy(h->table);
        h->table = NULL;
        h->checked = true;
        return moe_ok();
    }
    MOE_TRY(check_others(w, h));
    h->checked = true;
    if (!all_have_reported(w, p))
        return moe_ok();
    MOE_TRY(begin_record(w, fingerprint));
    *begun = true;
    return moe_ok();
}

/* ------------------------------------------------------------------ its file */

struct image {
    uint8_t *bytes;
    size_t length, room;
};

static uint8_t *extend(struct image *m, size_t bytes)
{
    if (bytes > m->room - m->length) {
        size_t room = 2 * m->room + bytes;
        uint8_t *larger = realloc(m->bytes, room);
        if (larger == NULL)
            return NULL;
        m->bytes = larger;
        m->room = room;
    }
    m->length += bytes;
    return m->bytes + m->length - bytes;
}

static bool append(struct image *m, const void *data, size_t bytes)
{
    uint8_t *to = extend(m, bytes);
    if (to != NULL)
        memcpy(to, data, bytes);
    return to != NULL;
}

static bool append_number(struct image *m, uint32_t value)
{
    const uint8_t little[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                               (uint8_t)(value >> 24)};
    return append(m, little, sizeof little);
}

static bool append_record(struct image *m, const struct moe_weights *w)
{
    uint8_t part[PART_BYTES];
    size_t length = strlen(w->fingerprint);
    struct moe_digest_cursor at = {0};
    bool ok = append(m, magic, sizeof magic) && append_number(m, FORMAT) &&
              append_number(m, (uint32_t)length) && append(m, w->fingerprint, length);
    while (ok && (length = moe_digest_table_pack(w->record, &at, part, sizeof part)) > 0)
        ok = append_number(m, (uint32_t)length) && append(m, part, length);
    return ok && append_number(m, 0);
}

static struct moe_status hash(const uint8_t *data, size_t length, uint8_t out[MOE_SHA256_BYTES])
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    moe_sha256_update(&s, data, length);
    struct moe_status st = moe_sha256_next(&s, out);
    moe_sha256_drop(&s);
    return st;
}

struct moe_status moe_weights_encode(const struct moe_weights *w, uint8_t **image, size_t *length)
{
    struct image m = {0};
    uint8_t sum[MOE_SHA256_BYTES];
    struct moe_status st = append_record(&m, w) ? hash(m.bytes, m.length, sum) : no_memory();
    if (!moe_failed(&st) && !append(&m, sum, sizeof sum))
        st = no_memory();
    if (moe_failed(&st)) {
        free(m.bytes);
        return st;
    }
    *image = m.bytes;
    *length = m.length;
    return st;
}

static struct moe_status damaged(const char *what)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "record of the model's digests: %s",
                     what);
}

static struct moe_status check_frame(struct moe_bytes *r)
{
    uint8_t sum[MOE_SHA256_BYTES];
    uint32_t format = 0;
    if (r->left < sizeof sum + sizeof magic || memcmp(r->at, magic, sizeof magic) != 0)
        return damaged("it is none");
    r->left -= sizeof sum;
    MOE_TRY(hash(r->at, r->left, sum));
    if (memcmp(sum, r->at + r->left, sizeof sum) != 0)
        return damaged("the checksum is wrong");
    (void)moe_bytes_take(r, sizeof magic);
    if (!moe_bytes_take_u32(r, &format))
        return damaged("it is cut");
    if (format != FORMAT)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "the record of the model's digests has format %u; this release reads %d",
                         format, FORMAT);
    return moe_ok();
}

static struct moe_status take_parts(struct moe_bytes *r, struct moe_digest_table *t)
{
    uint32_t length = 0;
    for (;;) {
        if (!moe_bytes_take_u32(r, &length))
            return damaged("it is cut");
        if (length == 0)
            break;
        const uint8_t *part = moe_bytes_take(r, length);
        if (part == NULL)
            return damaged("it is cut");
        struct moe_status st = moe_digest_table_unpack(t, part, length);
        if (moe_failed(&st))
            return st.code == MOE_INVALID_ARGUMENT ? damaged(st.text) : st;
    }
    return r->left == 0 && moe_digest_table_is_complete(t) ? moe_ok() : damaged("it is incomplete");
}

struct moe_status moe_weights_decode(struct moe_weights *w, const uint8_t *image, size_t length)
{
    struct moe_bytes r = {image, length};
    char fingerprint[FINGERPRINT_BYTES] = "";
    uint32_t bytes = 0;
    moe_weights_forget(w);
    MOE_TRY(check_frame(&r));
    const uint8_t *text = moe_bytes_take_u32(&r, &bytes) ? moe_bytes_take(&r, bytes) : NULL;
    if (text == NULL || bytes >= sizeof fingerprint || memchr(text, 0, bytes) != NULL)
        return damaged("the fingerprint is none");
    memcpy(fingerprint, text, bytes);
    struct moe_digest_table *t;
    MOE_TRY(moe_digest_table_create(&t));
    struct moe_status st = take_parts(&r, t);
    if (!moe_failed(&st))
        st = take_record(w, fingerprint, t);
    if (moe_failed(&st))
        moe_digest_table_destroy(t);
    return st;
}
