/* SPDX-License-Identifier: Apache-2.0 */
/* A session has its calls in an array ordered by id: the first is the next to forget. The packed
 * form has the sessions in the order of their last records, on which forgetting depends. */
#include "training/ledger.h"

#include "base/guard.h"

#include <stdlib.h>
#include <string.h>

struct session {
    char name[MOE_TRAINING_NAME_MAX + 1];
    bool used;
    uint64_t recorded; /* count of the ledger when it recorded last */
    uint64_t floor;    /* ids at or below are not NEW */
    uint32_t count;
    struct moe_ledger_call calls[MOE_LEDGER_CALLS]; /* ascending by id; all above floor */
    uint64_t pending[MOE_LEDGER_CALLS]; /* of the same call: its number in the sequence if it was
                                           pending when it was recorded, else 0 */
};

struct moe_ledger {
    uint64_t count, hash;
    uint64_t sequence; /* rises with every record; never starts again */
    uint64_t settled;  /* the sequence at the last moe_ledger_settle */
    struct session sessions[MOE_LEDGER_SESSIONS];
    uint64_t forgotten[MOE_LEDGER_FORGOTTEN];
};

struct moe_status moe_ledger_create(struct moe_ledger **out)
{
    struct moe_ledger *l = calloc(1, sizeof *l);
    if (l == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the ledger");
    *out = l;
    return moe_ok();
}

void moe_ledger_destroy(struct moe_ledger *l)
{
    free(l);
}

struct moe_status moe_ledger_copy(const struct moe_ledger *from, struct moe_ledger **out)
{
    MOE_TRY(moe_ledger_create(out));
    memcpy(*out, from, sizeof *from);
    return moe_ok();
}

void moe_ledger_reset(struct moe_ledger *l)
{
    memset(l, 0, sizeof *l);
}

/* -------------------------------------------------------------------------- looking */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 1;
    for (; *name != '\0'; name++)
        hash = mix(hash, (uint8_t)*name);
    return hash;
}

static size_t place_of(const char *name)
{
    return (size_t)(hash_name(name) % MOE_LEDGER_FORGOTTEN);
}

static const struct session *find_session(const struct moe_ledger *l, const char *name)
{
    for (size_t i = 0; i < MOE_LEDGER_SESSIONS; i++)
        if (l->sessions[i].used && strcmp(l->sessions[i].name, name) == 0)
            return &l->sessions[i];
    return NULL;
}

/* Where `id` is, or would have to be inserted. */
static uint32_t position_of(const struct session *s, uint64_t id)
{
    uint32_t low = 0, high = s->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (s->calls[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct moe_ledger_call *moe_ledger_find(const struct moe_ledger *l, const char *session,
                                              uint64_t id)
{
    const struct session *s = find_session(l, session);
    if (s == NULL)
        return NULL;
    uint32_t at = position_of(s, id);
    return at < s->count && s->calls[at].id == id ? &s->calls[at] : NULL;
}

enum moe_ledger_decision moe_ledger_look(const struct moe_ledger *l, const char *session,
                                         uint64_t id, const struct moe_content *content,
                                         const struct moe_ledger_call **call)
{
    const struct moe_ledger_call *known = moe_ledger_find(l, session, id);
    if (known != NULL) {
        bool same = memcmp(&known->content, content, sizeof *content) == 0;
        if (!MOE_GUARD(CONTENT_IS_COMPARED, same))
            return MOE_LEDGER_REUSED;
        if (call != NULL)
            *call = known;
        return MOE_LEDGER_REPEAT;
    }
    const struct session *s = find_session(l, session);
    bool is_new =
        s != NULL ? MOE_GUARD(FORGOTTEN_CALLS_STAY_DONE, id > s->floor)
                  : MOE_GUARD(FORGOTTEN_SESSIONS_STAY_DONE, id > l->forgotten[place_of(session)]);
    return is_new ? MOE_LEDGER_NEW : MOE_LEDGER_TOO_OLD;
}

uint64_t moe_ledger_count(const struct moe_ledger *l)
{
    return l->count;
}

uint64_t moe_ledger_hash(const struct moe_ledger *l)
{
    return l->hash;
}

void moe_ledger_set_hash(struct moe_ledger *l, uint64_t hash)
{
    l->hash = hash;
}

static uint64_t highest_of(const struct session *s)
{
    return s->count > 0 ? s->calls[s->count - 1].id : s->floor;
}

uint64_t moe_ledger_highest(const struct moe_ledger *l, const char *session)
{
    const struct session *s = find_session(l, session);
    return s != NULL ? highest_of(s) : 0;
}

/* ------------------------------------------------------------------------ recording */

static void forget_session(struct moe_ledger *l, struct session *s)
{
    uint64_t *floor = &l->forgotten[place_of(s->name)];
    uint64_t highest = highest_of(s);
    if (highest > *floor)
        *floor = highest;
    s->used = false;
}

/* A free place, or the place of the session that recorded least recently. The session "" stays. */
static struct session *make_room(struct moe_ledger *l)
{
    struct session *oldest = NULL;
    for (size_t i = 0; i < MOE_LEDGER_SESSIONS; i++) {
        struct session *s = &l->sessions[i];
        if (!s->used)
            return s;
        if (s->name[0] != '\0' && (oldest == NULL || s->recorded < oldest->recorded))
            oldest = s;
    }
    forget_session(l, oldest);
    return oldest;
}

static struct session *add_session(struct moe_ledger *l, const char *name)
{
    struct session *s = make_room(l);
    s->used = true;
    s->count = 0;
    s->floor = l->forgotten[place_of(name)];
    memset(s->name, 0, sizeof s->name);
    strncpy(s->name, name, MOE_TRAINING_NAME_MAX);
    return s;
}

static void remove_call(struct session *s, uint32_t at)
{
    s->count--;
    memmove(&s->calls[at], &s->calls[at + 1], (s->count - at) * sizeof s->calls[0]);
    memmove(&s->pending[at], &s->pending[at + 1], (s->count - at) * sizeof s->pending[0]);
}

/* If the session is full, forgets its lowest call; false if that is the new one. */
static bool make_place(struct session *s, uint64_t id)
{
    if (id <= s->floor)
        return false;
    if (s->count < MOE_LEDGER_CALLS)
        return true;
    if (id < s->calls[0].id) {
        s->floor = id;
        return false;
    }
    s->floor = s->calls[0].id;
    remove_call(s, 0);
    return true;
}

static uint64_t mix_call(uint64_t hash, const char *session, const struct moe_ledger_call *call)
{
    hash = mix(hash, hash_name(session));
    hash = mix(hash, call->id);
    for (int i = 0; i < 2; i++)
        hash = mix(mix(hash, call->content.header_hash[i]), call->content.tensor_hash[i]);
    return mix(hash, call->origin);
}

static void record(struct moe_ledger *l, const char *session, const struct moe_ledger_call *call,
                   bool pending)
{
    struct session *s = (struct session *)(uintptr_t)find_session(l, session);
    if (s == NULL)
        s = add_session(l, session);
    s->recorded = ++l->sequence;
    l->count++;
    l->hash = mix_call(l->hash, session, call);
    uint32_t at = position_of(s, call->id);
    bool known = at < s->count && s->calls[at].id == call->id;
    if (!known && !make_place(s, call->id))
        return;
    if (!known) {
        at = position_of(s, call->id);
        memmove(&s->calls[at + 1], &s->calls[at], (s->count - at) * sizeof s->calls[0]);
        memmove(&s->pending[at + 1], &s->pending[at], (s->count - at) * sizeof s->pending[0]);
        s->count++;
    }
    s->calls[at] = *call;
    s->pending[at] = pending ? l->sequence : 0;
}

void moe_ledger_record(struct moe_ledger *l, const char *session,
                       const struct moe_ledger_call *call)
{
    record(l, session, call, false);
}

/* ------------------------------------------------------------------------- taking back */

void moe_ledger_record_pending(struct moe_ledger *l, const char *session,
                               const struct moe_ledger_call *call)
{
    record(l, session, call, true);
}

void moe_ledger_settle(struct moe_ledger *l)
{
    l->settled = l->sequence;
}

static void take_back(struct moe_ledger *l, struct session *s, moe_ledger_each_fn each, void *ctx)
{
    for (uint32_t i = 0; i < s->count;) {
        if (s->pending[i] <= l->settled) {
            i++;
            continue;
        }
        each(ctx, s->name, &s->calls[i]);
        remove_call(s, i);
    }
}

/* The next session after `after`, in the order of names; NULL if there is none. */
static struct session *next_session(struct moe_ledger *l, const char *after)
{
    struct session *next = NULL;
    for (size_t i = 0; i < MOE_LEDGER_SESSIONS; i++) {
        struct session *s = &l->sessions[i];
        bool follows = s->used && (after == NULL || strcmp(s->name, after) > 0);
        if (follows && (next == NULL || strcmp(s->name, next->name) < 0))
            next = s;
    }
    return next;
}

void moe_ledger_take_back(struct moe_ledger *l, moe_ledger_each_fn each, void *ctx)
{
    for (struct session *s = next_session(l, NULL); s != NULL; s = next_session(l, s->name))
        take_back(l, s, each, ctx);
    moe_ledger_settle(l);
}

/* -------------------------------------------------------------------------- packing
 *
 * Header, then head and calls of each session, oldest first, then the places of forgotten ids
 * other than 0. */

enum { PACK_MAGIC = 0x314c6d6f };

struct pack_header {
    uint32_t magic, sessions, places, reserved;
    uint64_t count, hash;
};

struct pack_session {
    char name[MOE_TRAINING_NAME_MAX + 8];
    uint64_t floor, calls;
};

_Static_assert(sizeof(struct moe_ledger_call) == 14 * sizeof(uint64_t), "no gaps are packed");

struct pack_place {
    uint64_t place, floor;
};

static void count_parts(const struct moe_ledger *l, uint32_t *sessions, size_t *calls,
                        uint32_t *places)
{
    *sessions = *places = 0;
    *calls = 0;
    for (size_t i = 0; i < MOE_LEDGER_SESSIONS; i++) {
        *sessions += l->sessions[i].used;
        *calls += l->sessions[i].used ? l->sessions[i].count : 0;
    }
    for (size_t i = 0; i < MOE_LEDGER_FORGOTTEN; i++)
        *places += l->forgotten[i] != 0;
}

size_t moe_ledger_packed_size(const struct moe_ledger *l)
{
    uint32_t sessions, places;
    size_t calls;
    count_parts(l, &sessions, &calls, &places);
    return sizeof(struct pack_header) + sessions * sizeof(struct pack_session) +
           calls * sizeof(struct moe_ledger_call) + places * sizeof(struct pack_place);
}

static uint8_t *put(uint8_t *to, const void *data, size_t bytes)
{
    memcpy(to, data, bytes);
    return to + bytes;
}

static uint8_t *put_session(uint8_t *to, const struct session *s)
{
    struct pack_session head = {.floor = s->floor, .calls = s->count};
    memcpy(head.name, s->name, sizeof s->name);
    to = put(to, &head, sizeof head);
    return put(to, s->calls, s->count * sizeof s->calls[0]);
}

void moe_ledger_pack(const struct moe_ledger *l, uint8_t *to)
{
    struct pack_header header = {.magic = PACK_MAGIC, .count = l->count, .hash = l->hash};
    size_t calls;
    count_parts(l, &header.sessions, &calls, &header.places);
    to = put(to, &header, sizeof header);
    uint64_t after = 0;
    for (uint32_t n = 0; n < header.sessions; n++) {
        const struct session *next = NULL;
        for (size_t i = 0; i < MOE_LEDGER_SESSIONS; i++) {
            const struct session *s = &l->sessions[i];
            if (s->used && s->recorded > after && (next == NULL || s->recorded < next->recorded))
                next = s;
        }
        after = next->recorded;
        to = put_session(to, next);
    }
    for (size_t i = 0; i < MOE_LEDGER_FORGOTTEN; i++)
        if (l->forgotten[i] != 0)
            to = put(to, &(struct pack_place){i, l->forgotten[i]}, sizeof(struct pack_place));
}

/* The rest of the packed form. */
struct cursor {
    const uint8_t *at;
    size_t left;
};

static bool get(struct cursor *c, void *to, size_t bytes)
{
    if (c->left < bytes)
        return false;
    memcpy(to, c->at, bytes);
    c->at += bytes;
    c->left -= bytes;
    return true;
}

static bool is_call(const struct moe_ledger_call *c)
{
    return c->origin <= UINT32_MAX && c->outcome.backwards <= UINT32_MAX &&
           c->outcome.nonfinite <= 1;
}

static bool get_session(struct cursor *c, const struct moe_ledger *l, struct session *to)
{
    struct pack_session head;
    if (!get(c, &head, sizeof head) || head.calls > MOE_LEDGER_CALLS ||
        head.name[MOE_TRAINING_NAME_MAX] != '\0' ||
        (head.name[0] != '\0' && !moe_training_name_ok(head.name)) ||
        find_session(l, head.name) != NULL)
        return false;
    memcpy(to->name, head.name, sizeof to->name);
    to->floor = head.floor;
    to->count = (uint32_t)head.calls;
    if (!get(c, to->calls, to->count * sizeof to->calls[0]))
        return false;
    uint64_t last = head.floor;
    for (uint32_t i = 0; i < to->count; i++) {
        if (!is_call(&to->calls[i]) || to->calls[i].id <= last)
            return false;
        last = to->calls[i].id;
    }
    return true;
}

static bool unpack(struct moe_ledger *l, struct cursor *c)
{
    struct pack_header header;
    if (!get(c, &header, sizeof header) || header.magic != PACK_MAGIC || header.reserved != 0 ||
        header.sessions > MOE_LEDGER_SESSIONS || header.places > MOE_LEDGER_FORGOTTEN)
        return false;
    l->count = header.count;
    l->hash = header.hash;
    for (uint32_t i = 0; i < header.sessions; i++) {
        if (!get_session(c, l, &l->sessions[i]))
            return false;
        l->sessions[i].used = true;
        l->sessions[i].recorded = ++l->sequence;
    }
    for (uint32_t i = 0; i < header.places; i++) {
        struct pack_place p;
        if (!get(c, &p, sizeof p) || p.place >= MOE_LEDGER_FORGOTTEN || p.floor == 0 ||
            l->forgotten[p.place] != 0)
            return false;
        l->forgotten[p.place] = p.floor;
    }
    return c->left == 0;
}

struct moe_status moe_ledger_unpack(struct moe_ledger *l, const uint8_t *from, size_t bytes)
{
    struct moe_ledger *next = NULL;
    struct cursor c = {from, bytes};
    MOE_TRY(moe_ledger_create(&next));
    bool good = unpack(next, &c);
    if (good)
        memcpy(l, next, sizeof *l);
    moe_ledger_destroy(next);
    return good ? moe_ok()
                : moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                            "the record of training calls is not one");
}
