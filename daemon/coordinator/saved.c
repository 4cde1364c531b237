/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/saved.h"

#include "daemon/bytes.h"
#include "store/records.h"

#include <stdlib.h>
#include <string.h>

enum {
    FORMAT_VERSION = 7, /* 1: records end with the members; 2: with the lease; 3: with cordons; 4:
                           with models; 5: with places; 6: with the highest version; 7: with the
                           last members */
    STATE_FIXED_BYTES = 32,
    MEMBER_MAX_BYTES = 2 + MOE_MEMBERSHIP_ID_BYTES + 8,
    STATE_LEASE_BYTES = 8 + 4 + 1, /* after the members */
    CORDONS_MIN_BYTES = 8,         /* after the lease: the mask, then a reason for each bit */
    CORDON_MAX_BYTES = 2 + MOE_MEMBERSHIP_CORDON_BYTES,
    MODELS_MIN_BYTES = 4 + 4, /* after the cordons: highest number, count, then each model */
    MODEL_MAX_BYTES = 4 + 1 + 2 + MOE_ADDED_NAME_BYTES + 2 + MOE_ADDED_DIRECTORY_BYTES + 2 +
                      MOE_ADDED_FINGERPRINT_BYTES,
    PLACES_BYTES = 8 + 4, /* after the models: the slots with experts; the view's placement */
    VERSION_BYTES = 4,    /* after the places: the highest version of a placement */
    RECORD_MAX_BYTES = STATE_FIXED_BYTES + STATE_LEASE_BYTES + CORDONS_MIN_BYTES +
                       MOE_PLACEMENT_SLOTS_MAX * (MEMBER_MAX_BYTES + CORDON_MAX_BYTES) +
                       MODELS_MIN_BYTES + MOE_ADDED_MAX * MODEL_MAX_BYTES + PLACES_BYTES +
                       VERSION_BYTES + 8 * MOE_PLACEMENT_SLOTS_MAX,
    NUMBERS_LOST_MAX = 64, /* with the records of a bad end of the file */
};

const struct moe_store_format moe_saved_format = {
    .version = FORMAT_VERSION, .record_least = STATE_FIXED_BYTES, .record_most = RECORD_MAX_BYTES};

/* ------------------------------------------------------------------ encoding */

static uint8_t *put(uint8_t *to, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        *to++ = (uint8_t)(value >> (8 * i));
    return to;
}

static uint64_t get(const uint8_t **from, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++)
        value |= (uint64_t) * (*from)++ << (8 * i);
    return value;
}

static uint8_t *put_text(uint8_t *at, const char *text, size_t capacity)
{
    size_t n = strnlen(text, capacity - 1);
    at = put(at, n, 2);
    memcpy(at, text, n);
    return at + n;
}

static uint8_t *put_models(uint8_t *at, const struct moe_added_saved *models)
{
    at = put(at, models->highest, 4);
    at = put(at, models->count, 4);
    for (uint32_t i = 0; i < models->count; i++) {
        const struct moe_added_entry *e = &models->models[i];
        at = put(at, e->number, 4);
        at = put(at, e->leaving, 1);
        at = put_text(at, e->name, MOE_ADDED_NAME_BYTES);
        at = put_text(at, e->directory, MOE_ADDED_DIRECTORY_BYTES);
        at = put_text(at, e->fingerprint, MOE_ADDED_FINGERPRINT_BYTES);
    }
    return at;
}

static size_t encode_record(uint8_t to[RECORD_MAX_BYTES], const struct moe_membership_saved *state,
                            const struct moe_added_saved *models)
{
    uint8_t *at = to;
    at = put(at, state->epoch, 8);
    at = put(at, state->placement_hash, 8);
    at = put(at, state->view_epoch, 8);
    at = put(at, state->placement_version, 4);
    at = put(at, state->slots, 4);
    for (uint32_t s = 0; state->view_epoch != 0 && s < state->slots; s++) {
        at = put_text(at, state->members[s].worker_id, MOE_MEMBERSHIP_ID_BYTES);
        at = put(at, state->members[s].incarnation, 8);
    }
    at = put(at, state->group_id, 8);
    at = put(at, state->lease_ms, 4);
    at = put(at, state->settled, 1);
    at = put(at, state->cordoned, 8);
    for (uint32_t s = 0; s < MOE_PLACEMENT_SLOTS_MAX; s++)
        if ((state->cordoned >> s & 1) != 0)
            at = put_text(at, state->cordon_reasons[s], MOE_MEMBERSHIP_CORDON_BYTES);
    at = put_models(at, models);
    at = put(at, state->places, 8);
    at = put(at, state->view_version, 4);
    at = put(at, state->last_version, 4);
    for (uint32_t s = 0; s < state->slots; s++)
        at = put(at, state->last_members[s], 8);
    return (size_t)(at - to);
}

/* ------------------------------------------------------------------ decoding */

static struct moe_status damaged(const char *what)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: %s", what);
}

/* A text of less than `capacity` bytes that `after` more bytes follow. False when it is cut. */
static bool get_text(const uint8_t **at, const uint8_t *end, size_t after, char *to,
                     size_t capacity)
{
    size_t left = (size_t)(end - *at);
    size_t n = left >= 2 ? (size_t)get(at, 2) : capacity;
    if (n >= capacity || left < 2 + n + after)
        return false;
    memcpy(to, *at, n);
    *at += n;
    return true;
}

static struct moe_status decode_cordons(const uint8_t **at, const uint8_t *end,
                                        struct moe_membership_saved *state)
{
    if (end - *at < CORDONS_MIN_BYTES)
        return damaged("cordons cut");
    state->cordoned = get(at, 8);
    for (uint32_t s = 0; s < MOE_PLACEMENT_SLOTS_MAX; s++)
        if ((state->cordoned >> s & 1) != 0 &&
            !get_text(at, end, 0, state->cordon_reasons[s], MOE_MEMBERSHIP_CORDON_BYTES))
            return damaged("cordons cut");
    return moe_ok();
}

static struct moe_status decode_models(const uint8_t **at, const uint8_t *end,
                                       struct moe_added_saved *models)
{
    if (end - *at < MODELS_MIN_BYTES)
        return damaged("models cut");
    models->highest = (uint32_t)get(at, 4);
    models->count = (uint32_t)get(at, 4);
    if (models->count > MOE_ADDED_MAX || models->highest > MOE_ADDED_NUMBER_MAX)
        return damaged("impossible models");
    for (uint32_t i = 0; i < models->count; i++) {
        struct moe_added_entry *e = &models->models[i];
        if (end - *at < 5)
            return damaged("models cut");
        e->number = (uint32_t)get(at, 4);
        e->leaving = get(at, 1) != 0;
        if (!get_text(at, end, 0, e->name, sizeof e->name) ||
            !get_text(at, end, 0, e->directory, sizeof e->directory) ||
            !get_text(at, end, 0, e->fingerprint, sizeof e->fingerprint))
            return damaged("models cut");
    }
    return moe_ok();
}

static struct moe_status decode_state(const uint8_t *at, size_t length,
                                      struct moe_membership_saved *state,
                                      struct moe_added_saved *models)
{
    const uint8_t *end = at + length;
    *state = (struct moe_membership_saved){0};
    *models = (struct moe_added_saved){0};
    if (length < STATE_FIXED_BYTES)
        return damaged("record too short");
    state->epoch = get(&at, 8);
    state->placement_hash = get(&at, 8);
    state->view_epoch = get(&at, 8);
    state->placement_version = (uint32_t)get(&at, 4);
    state->slots = (uint32_t)get(&at, 4);
    if (state->slots > MOE_PLACEMENT_SLOTS_MAX || state->view_epoch > state->epoch)
        return damaged("impossible values");
    for (uint32_t s = 0; state->view_epoch != 0 && s < state->slots; s++) {
        if (!get_text(&at, end, 8, state->members[s].worker_id, MOE_MEMBERSHIP_ID_BYTES))
            return damaged("member list cut");
        state->members[s].incarnation = get(&at, 8);
    }
    if (end - at >= STATE_LEASE_BYTES) {
        state->group_id = get(&at, 8);
        state->lease_ms = (uint32_t)get(&at, 4);
        state->settled = get(&at, 1) != 0;
        if (at < end)
            MOE_TRY(decode_cordons(&at, end, state));
        if (at < end)
            MOE_TRY(decode_models(&at, end, models));
        if (end - at >= PLACES_BYTES) {
            state->places = get(&at, 8);
            state->view_version = (uint32_t)get(&at, 4);
            if (end - at >= VERSION_BYTES)
                state->last_version = (uint32_t)get(&at, 4);
        }
        if (at < end && (size_t)(end - at) != 8 * (size_t)state->slots)
            return damaged("last members cut");
        for (uint32_t s = 0; at < end; s++)
            state->last_members[s] = get(&at, 8);
    }
    return at == end ? moe_ok() : damaged("record too long");
}

/* So many acknowledged records may be lost. The epoch therefore rises by their number, and so does
 * the highest version of a placement; the view is void. So do numbers of models, of which few
 * records give one. */
static void lose(size_t lost, struct moe_membership_saved *state, struct moe_added_saved *models)
{
    state->epoch += lost;
    if (state->last_version < state->placement_version)
        state->last_version = state->placement_version;
    state->last_version += (uint32_t)lost;
    models->highest += (uint32_t)(lost < NUMBERS_LOST_MAX ? lost : NUMBERS_LOST_MAX);
    if (models->highest > MOE_ADDED_NUMBER_MAX)
        models->highest = MOE_ADDED_NUMBER_MAX;
    state->view_epoch = 0;
    state->settled = false;
    memset(state->members, 0, sizeof state->members);
    memset(state->last_members, 0, sizeof state->last_members);
}

static struct moe_status decode(const uint8_t *record, size_t length, size_t lost,
                                struct moe_membership_saved *state, struct moe_added_saved *models)
{
    MOE_TRY(decode_state(record, length, state, models));
    if (lost > 0)
        lose(lost, state, models);
    return moe_ok();
}

struct moe_status moe_saved_decode(const uint8_t *image, size_t length,
                                   struct moe_membership_saved *state,
                                   struct moe_added_saved *models, bool *incomplete)
{
    struct moe_records_last last;
    MOE_TRY(moe_records_read(image, length, &moe_saved_format, &last));
    *incomplete = last.lost > 0;
    return decode(last.payload, last.length, last.lost, state, models);
}

/* ------------------------------------------------------------------ placements
 *
 * Magic, u32 format, version, slots and layers; for each layer u32 index and experts, then the
 * copies of each expert and their slots, a byte each; u64 moe_placement_hash. */

static const char placement_magic[8] = "moedplc\n";

enum {
    PLACEMENT_FORMAT = 1,
    PLACEMENT_HEAD_BYTES = 8 + 4 * 4,
    PLACEMENT_LAYER_BYTES = 2 * 4,
    PLACEMENT_END_BYTES = 8,
    PLACEMENT_MAX_BYTES =
        PLACEMENT_HEAD_BYTES + PLACEMENT_END_BYTES +
        MOE_PLACEMENT_LAYERS_MAX * (PLACEMENT_LAYER_BYTES + 5 * MOE_PLACEMENT_EXPERTS_MAX),
};

static uint8_t *put_layer(uint8_t *at, const struct moe_placement *p, size_t index)
{
    struct moe_placement_layer l = moe_placement_layer_at(p, index);
    const uint8_t *holders;
    at = put(at, l.layer, 4);
    at = put(at, l.experts, 4);
    for (uint32_t e = 0; e < l.experts; e++)
        at = put(at, moe_placement_holders(p, index, e, &holders), 1);
    for (uint32_t e = 0; e < l.experts; e++) {
        uint32_t n = moe_placement_holders(p, index, e, &holders);
        memcpy(at, holders, n);
        at += n;
    }
    return at;
}

static uint32_t image_of(uint32_t version)
{
    return MOE_STORE_PLACEMENTS + version % 2;
}

uint32_t moe_saved_next_version(const struct moe_membership_saved *state)
{
    uint32_t next = state->last_version + 1;
    return image_of(next) != image_of(state->placement_version) ? next : next + 1;
}

struct moe_status moe_saved_write_placement(struct moe_store *s, const struct moe_placement *p)
{
    uint8_t *image = malloc(PLACEMENT_MAX_BYTES), *at = image;
    if (image == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory to save");
    memcpy(at, placement_magic, sizeof placement_magic);
    at = put(at + sizeof placement_magic, PLACEMENT_FORMAT, 4);
    at = put(at, moe_placement_version(p), 4);
    at = put(at, moe_placement_slots(p), 4);
    at = put(at, moe_placement_layer_count(p), 4);
    for (size_t i = 0; i < moe_placement_layer_count(p); i++)
        at = put_layer(at, p, i);
    at = put(at, moe_placement_hash(p), 8);
    struct moe_status st =
        moe_store_write(s, image_of(moe_placement_version(p)), image, (size_t)(at - image));
    free(image);
    return st;
}

static struct moe_status get_layer(struct moe_bytes *r, struct moe_placement *p)
{
    struct moe_placement_layer l = {0};
    size_t count = 0;
    if (!moe_bytes_take_u32(r, &l.layer) || !moe_bytes_take_u32(r, &l.experts) ||
        l.experts > MOE_PLACEMENT_EXPERTS_MAX)
        return damaged("placement cut");
    const uint8_t *copies = moe_bytes_take(r, l.experts);
    for (uint32_t e = 0; copies != NULL && e < l.experts; e++)
        count += copies[e];
    const uint8_t *holders = copies != NULL ? moe_bytes_take(r, count) : NULL;
    if (holders == NULL)
        return damaged("placement cut");
    struct moe_status st = moe_placement_add_layer(p, &l, copies, holders, count);
    return moe_failed(&st) ? damaged(st.text) : st;
}

static struct moe_status get_placement(struct moe_bytes r, struct moe_placement *p)
{
    uint32_t format = 0, version = 0, slots = 0, layers = 0;
    const uint8_t *magic = moe_bytes_take(&r, sizeof placement_magic);
    if (magic == NULL || memcmp(magic, placement_magic, sizeof placement_magic) != 0 ||
        !moe_bytes_take_u32(&r, &format) || format != PLACEMENT_FORMAT ||
        !moe_bytes_take_u32(&r, &version) || !moe_bytes_take_u32(&r, &slots) ||
        !moe_bytes_take_u32(&r, &layers))
        return damaged("no placement of this release");
    struct moe_status st = moe_placement_begin(p, version, slots);
    if (moe_failed(&st))
        return damaged(st.text);
    for (uint32_t i = 0; i < layers; i++)
        MOE_TRY(get_layer(&r, p));
    const uint8_t *end = moe_bytes_take(&r, PLACEMENT_END_BYTES);
    return end != NULL && r.left == 0 && get(&end, 8) == moe_placement_hash(p)
               ? moe_ok()
               : damaged("the checksum of the placement is wrong");
}

/* An image of another version is of a move that was not saved, or of an earlier model. */
struct moe_status moe_saved_read_placement(struct moe_store *s,
                                           const struct moe_membership_saved *state,
                                           struct moe_placement **out)
{
    uint8_t *image = NULL;
    size_t length = 0;
    struct moe_placement *p;
    *out = NULL;
    MOE_TRY(moe_store_read(s, image_of(state->placement_version), PLACEMENT_MAX_BYTES, &image,
                           &length));
    if (image == NULL)
        return moe_ok();
    struct moe_status st = moe_placement_create(&p);
    if (!moe_failed(&st)) {
        st = get_placement((struct moe_bytes){image, length}, p);
        if (!moe_failed(&st) && moe_placement_version(p) == state->placement_version &&
            moe_placement_content_hash(p) == state->placement_hash)
            *out = p;
        else
            moe_placement_destroy(p);
    }
    free(image);
    return st;
}

/* ------------------------------------------------------------------ in a store */

struct moe_status moe_saved_append(struct moe_store *s, const struct moe_membership_saved *state,
                                   const struct moe_added_saved *models)
{
    uint8_t record[RECORD_MAX_BYTES];
    return moe_store_append(s, record, encode_record(record, state, models));
}

struct moe_status moe_saved_read(const struct moe_store *s, struct moe_store_found *found,
                                 struct moe_membership_saved *state, struct moe_added_saved *models,
                                 bool *stale)
{
    *state = (struct moe_membership_saved){0};
    *models = (struct moe_added_saved){0};
    struct moe_status st = moe_ok();
    bool is_new = found->record == NULL;
    if (!is_new)
        st = moe_error_context(decode(found->record, found->length, found->lost, state, models),
                               "%s", s->name);
    free(found->record);
    found->record = NULL;
    *stale = is_new || found->lost > 0 || found->format < FORMAT_VERSION;
    return st;
}

struct moe_status moe_saved_open(const char *directory, struct moe_store **out,
                                 struct moe_membership_saved *state, struct moe_added_saved *models)
{
    struct moe_store *s;
    struct moe_store_found found;
    bool stale;
    MOE_TRY(moe_store_file_open(directory, &moe_saved_format, &s, &found));
    struct moe_status st = moe_saved_read(s, &found, state, models, &stale);
    if (!moe_failed(&st) && stale)
        st = moe_saved_append(s, state, models);
    if (moe_failed(&st))
        moe_store_close(s);
    else
        *out = s;
    return st;
}
