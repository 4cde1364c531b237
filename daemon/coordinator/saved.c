/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/saved.h"

#include "store/records.h"

#include <stdlib.h>
#include <string.h>

enum {
    FORMAT_VERSION = 5, /* 1: records end with the members; 2: with the lease; 3: with cordons; 4:
                           with models */
    STATE_FIXED_BYTES = 32,
    MEMBER_MAX_BYTES = 2 + MOE_MEMBERSHIP_ID_BYTES + 8,
    STATE_LEASE_BYTES = 8 + 4 + 1, /* after the members */
    CORDONS_MIN_BYTES = 8,         /* after the lease: the mask, then a reason for each bit */
    CORDON_MAX_BYTES = 2 + MOE_MEMBERSHIP_CORDON_BYTES,
    MODELS_MIN_BYTES = 4 + 4, /* after the cordons: highest number, count, then each model */
    MODEL_MAX_BYTES = 4 + 1 + 2 + MOE_ADDED_NAME_BYTES + 2 + MOE_ADDED_DIRECTORY_BYTES + 2 +
                      MOE_ADDED_FINGERPRINT_BYTES,
    PLACES_BYTES = 8 + 4, /* after the models: the slots with experts; the view's placement */
    RECORD_MAX_BYTES = STATE_FIXED_BYTES + STATE_LEASE_BYTES + CORDONS_MIN_BYTES +
                       MOE_PLACEMENT_SLOTS_MAX * (MEMBER_MAX_BYTES + CORDON_MAX_BYTES) +
                       MODELS_MIN_BYTES + MOE_ADDED_MAX * MODEL_MAX_BYTES + PLACES_BYTES,
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
        }
    }
    return at == end ? moe_ok() : damaged("record too long");
}

/* So many acknowledged records may be lost. The epoch therefore rises by their number, and the view
 * is void. So do numbers of models, of which few records give one. */
static void lose(size_t lost, struct moe_membership_saved *state, struct moe_added_saved *models)
{
    state->epoch += lost;
    models->highest += (uint32_t)(lost < NUMBERS_LOST_MAX ? lost : NUMBERS_LOST_MAX);
    if (models->highest > MOE_ADDED_NUMBER_MAX)
        models->highest = MOE_ADDED_NUMBER_MAX;
    state->view_epoch = 0;
    state->settled = false;
    memset(state->members, 0, sizeof state->members);
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
