/* SPDX-License-Identifier: Apache-2.0 */
/* Keys with waiting tokens form a ring, in the order in which they began to wait. A ticket takes
 * the first key; a key with tokens left goes to the end. So each key is served after at most as
 * many tickets as there are other waiting keys. */
#include "schedule/sequencer.h"

#include "base/guard.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

enum {
    CALLS = MOE_MAX_SLOTS * MOE_SEQUENCER_CALLS,
    WHOLE = 1000, /* of a share */
};

struct key_state {
    struct moe_step_key key;
    uint64_t pending[MOE_MAX_SLOTS]; /* announced, not covered by a ticket */
    uint64_t owed[MOE_MAX_SLOTS]; /* of these, waiting since the last exclusive ticket was done */
    bool in_ring;                 /* exactly when some slot's pending is not 0 */
    bool in_use; /* else free, because its model was removed; nothing is pending then */
};

struct model_change {
    uint32_t model;
    bool serve;
};

struct moe_sequencer {
    uint64_t epoch, live;
    uint32_t max_bucket, max_bucket_f32;
    bool stopped;
    uint64_t issued;              /* seq of the last ticket */
    uint64_t done[MOE_MAX_SLOTS]; /* last ticket that the slot reported; <= issued */
    uint64_t pending;             /* sum over keys and slots */
    bool beats;                   /* a heartbeat of beat_layer is due unless another ticket is */
    uint32_t beat_layer;
    size_t key_count;
    struct key_state keys[MOE_SEQUENCER_KEYS];
    size_t served_count; /* added models between their ADD_MODEL and REMOVE_MODEL */
    uint32_t served[MOE_ADDED_MODELS_MAX];
    uint32_t swap_due, swapped; /* versions of placements; 0 = none in this view */
    size_t change_first, change_count;
    struct model_change changes[MOE_SEQUENCER_CHANGES]; /* a ring */
    size_t ring_first, ring_count; /* ring[(first + i) % KEYS]: indices into keys */
    uint32_t ring[MOE_SEQUENCER_KEYS];

    /* Training. */
    uint32_t permille;              /* its share; stays over views */
    bool holds_all, holds_training; /* see moe_sequencer_allow; stay over views */
    uint32_t
        credit; /* forward tickets add to it; training pays while forward work waits; <= WHOLE */
    uint64_t last_forward;  /* seq of the last forward ticket; 0 = none */
    uint64_t last_training; /* seq of the last training ticket; 0 = none */
    uint64_t exclusive;     /* seq of the exclusive ticket in flight; 0 = none */
    uint64_t owed;          /* sum over keys and slots */
    bool weight_updates_blocked;
    enum moe_hold hold;
    size_t call_first, call_count;
    uint32_t calls_of[MOE_MAX_SLOTS]; /* in the queue */
    struct moe_ticket calls[CALLS];   /* a ring; without epoch and seq */
};

struct moe_status moe_sequencer_create(struct moe_sequencer **out)
{
    struct moe_sequencer *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the sequencer");
    s->stopped = true;
    s->permille = WHOLE / 2;
    *out = s;
    return moe_ok();
}

void moe_sequencer_destroy(struct moe_sequencer *s)
{
    free(s);
}

void moe_sequencer_set_share(struct moe_sequencer *s, uint32_t permille)
{
    MOE_INVARIANT(permille > 0 && permille < WHOLE);
    s->permille = permille;
}

void moe_sequencer_begin(struct moe_sequencer *s, uint64_t epoch, uint64_t live,
                         uint32_t max_bucket)
{
    MOE_INVARIANT(live != 0);
    MOE_INVARIANT(max_bucket != 0 && moe_pow2_ceil(max_bucket) == max_bucket);
    uint32_t permille = s->permille;
    bool holds_all = s->holds_all, holds_training = s->holds_training;
    memset(s, 0, sizeof *s);
    s->permille = permille;
    s->holds_all = holds_all;
    s->holds_training = holds_training;
    s->epoch = epoch;
    s->live = live;
    s->max_bucket = s->max_bucket_f32 = max_bucket;
}

void moe_sequencer_limit_f32(struct moe_sequencer *s, uint32_t max_bucket)
{
    MOE_INVARIANT(max_bucket != 0 && moe_pow2_ceil(max_bucket) == max_bucket);
    MOE_INVARIANT(max_bucket <= s->max_bucket);
    s->max_bucket_f32 = max_bucket;
}

void moe_sequencer_block_weight_updates(struct moe_sequencer *s, bool block)
{
    s->weight_updates_blocked = block;
}

void moe_sequencer_hold(struct moe_sequencer *s, enum moe_hold hold)
{
    s->hold = hold;
}

void moe_sequencer_allow(struct moe_sequencer *s, bool tickets, bool training)
{
    s->holds_all = !tickets;
    s->holds_training = !training;
}

static bool is_live(const struct moe_sequencer *s, uint32_t slot)
{
    return slot < MOE_MAX_SLOTS && (s->live >> slot & 1) != 0;
}

/* ----------------------------------------------------------------------- ring */

static void ring_append(struct moe_sequencer *s, struct key_state *k)
{
    MOE_INVARIANT(!k->in_ring && s->ring_count < MOE_SEQUENCER_KEYS);
    s->ring[(s->ring_first + s->ring_count++) % MOE_SEQUENCER_KEYS] = (uint32_t)(k - s->keys);
    k->in_ring = true;
}

static struct key_state *ring_take(struct moe_sequencer *s)
{
    struct key_state *k = &s->keys[s->ring[s->ring_first]];
    s->ring_first = (s->ring_first + 1) % MOE_SEQUENCER_KEYS;
    s->ring_count--;
    k->in_ring = false;
    return k;
}

/* ---------------------------------------------------------------------- inputs */

static bool same_key(const struct moe_step_key *a, const struct moe_step_key *b)
{
    return a->layer == b->layer && a->kind == b->kind && a->dtype == b->dtype;
}

static struct key_state *find_or_add_key(struct moe_sequencer *s, const struct moe_step_key *key)
{
    struct key_state *unused = NULL;
    for (size_t i = 0; i < s->key_count; i++) {
        if (s->keys[i].in_use && same_key(&s->keys[i].key, key))
            return &s->keys[i];
        if (!s->keys[i].in_use && unused == NULL)
            unused = &s->keys[i];
    }
    if (unused == NULL && s->key_count == MOE_SEQUENCER_KEYS)
        return NULL;
    struct key_state *k = unused != NULL ? unused : &s->keys[s->key_count++];
    k->key = *key;
    k->in_use = true;
    return k;
}

/* The place of an added model in `served`, or served_count. */
static size_t find_served(const struct moe_sequencer *s, uint32_t model)
{
    size_t i = 0;
    while (i < s->served_count && s->served[i] != model)
        i++;
    return i;
}

static bool is_served(const struct moe_sequencer *s, uint32_t layer)
{
    uint32_t model = moe_layer_model(layer);
    return model == 0 || find_served(s, model) < s->served_count;
}

struct moe_status moe_sequencer_work(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_step_key *key, uint32_t tokens)
{
    if (!is_live(s, slot))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "slot %u is not of this view",
                         slot);
    if (key->kind != MOE_STEP_FORWARD || moe_dtype_bytes(key->dtype) == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "work of kind %u and dtype %u is unknown", (unsigned)key->kind,
                         (unsigned)key->dtype);
    if (tokens == 0 || !is_served(s, key->layer))
        return moe_ok();
    struct key_state *k = find_or_add_key(s, key);
    if (k == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE, "more than %d kinds of work",
                         MOE_SEQUENCER_KEYS);
    k->pending[slot] += tokens;
    s->pending += tokens;
    if (!k->in_ring)
        ring_append(s, k);
    return moe_ok();
}

struct moe_status moe_sequencer_call(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_ticket *call, uint32_t tokens)
{
    bool has_rows = moe_step_traits(call->kind)->has_rows;
    if (!is_live(s, slot))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "slot %u is not of this view",
                         slot);
    if (!moe_step_traits(call->kind)->has_descriptor ||
        call->descriptor.length > MOE_TRAINING_BODY_MAX || moe_layer_model(call->layer) != 0 ||
        (has_rows && (tokens == 0 || tokens > s->max_bucket || moe_dtype_bytes(call->dtype) == 0)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "a training call of kind %u, dtype %u and %u tokens is impossible",
                         (unsigned)call->kind, (unsigned)call->dtype, tokens);
    if (s->calls_of[slot] == MOE_SEQUENCER_CALLS)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "more than %d training calls of slot %u wait", MOE_SEQUENCER_CALLS, slot);
    struct moe_ticket *t = &s->calls[(s->call_first + s->call_count++) % CALLS];
    *t = *call;
    t->descriptor.origin = slot;
    t->bucket = has_rows ? moe_pow2_ceil(tokens) : 0;
    s->calls_of[slot]++;
    return moe_ok();
}

struct moe_status moe_sequencer_done(struct moe_sequencer *s, uint32_t slot, uint64_t seq, bool ok)
{
    if (!is_live(s, slot))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "slot %u is not of this view",
                         slot);
    if (seq != s->done[slot] + 1 || seq > s->issued)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "slot %u reports ticket %llu out of order", slot, (unsigned long long)seq);
    s->done[slot] = seq;
    if (!ok)
        s->stopped = true;
    return moe_ok();
}

/* --------------------------------------------------------------------- tickets */

/* The last ticket that all live slots have run. */
static uint64_t completed(const struct moe_sequencer *s)
{
    uint64_t least = s->issued;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (is_live(s, slot) && s->done[slot] < least)
            least = s->done[slot];
    return least;
}

/* The smallest bucket that holds the pending tokens of every slot, at most that of the dtype. */
static uint32_t choose_bucket(const struct moe_sequencer *s, const struct key_state *k)
{
    const uint32_t limit = k->key.dtype == MOE_DTYPE_F32 ? s->max_bucket_f32 : s->max_bucket;
    uint64_t most = 0;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (k->pending[slot] > most)
            most = k->pending[slot];
    return most >= limit ? limit : moe_pow2_ceil((uint32_t)most);
}

static uint64_t lesser(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Subtracts the tokens that a ticket covers; false when none are left. */
static bool cover(struct moe_sequencer *s, struct key_state *k, uint32_t bucket)
{
    bool left = false;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        uint64_t taken = lesser(k->pending[slot], bucket), owed = lesser(k->owed[slot], taken);
        k->pending[slot] -= taken;
        s->pending -= taken;
        k->owed[slot] -= owed;
        s->owed -= owed;
        left = left || k->pending[slot] != 0;
    }
    return left;
}

/* ------------------------------------------------------- shares of forward and training */

/* Once all slots have run the exclusive ticket, forward work that waits now comes before the next
 * one. */
static void close_exclusive(struct moe_sequencer *s)
{
    if (s->exclusive == 0 || completed(s) < s->exclusive)
        return;
    s->exclusive = 0;
    s->owed = s->pending;
    for (size_t i = 0; i < s->key_count; i++)
        memcpy(s->keys[i].owed, s->keys[i].pending, sizeof s->keys[i].owed);
}

static uint32_t price(const struct moe_sequencer *s)
{
    return WHOLE - s->permille;
}

static struct moe_ticket *call_at(struct moe_sequencer *s, size_t i)
{
    return &s->calls[(s->call_first + i) % CALLS];
}

static bool is_held(const struct moe_sequencer *s, const struct moe_step_traits *traits)
{
    bool all = s->holds_training || s->hold == MOE_HOLD_TRAINING;
    return traits->is_training && (all || (s->hold == MOE_HOLD_CHANGES && !traits->is_job));
}

/* The oldest call that may come next, by its place in the queue; false when there is none. */
static bool next_call(struct moe_sequencer *s, size_t *at)
{
    bool behind_blocked = false;
    for (*at = 0; *at < s->call_count; ++*at) {
        const struct moe_step_traits *traits = moe_step_traits(call_at(s, *at)->kind);
        bool blocked =
            !MOE_GUARD(BLOCKED_KINDS_WAIT, !s->weight_updates_blocked || !traits->is_weight_update);
        blocked = blocked || is_held(s, traits);
        behind_blocked = behind_blocked || blocked;
        if (!blocked && (MOE_GUARD(LATER_CALLS_WAIT, !behind_blocked) || traits->passes_blocked))
            return true;
    }
    return false;
}

/* The call at place `at` may have the next ticket. */
static bool training_is_due(struct moe_sequencer *s, size_t at)
{
    if (moe_step_traits(call_at(s, at)->kind)->is_exclusive && s->owed > 0)
        return false;
    bool lately = s->last_forward != 0 && s->issued - s->last_forward < MOE_SEQUENCER_LATELY;
    if (lately && s->last_training > completed(s))
        return false;
    return s->ring_count == 0 || s->credit >= price(s);
}

static void issue_training(struct moe_sequencer *s, size_t at, struct moe_ticket *out)
{
    *out = *call_at(s, at);
    out->epoch = s->epoch;
    out->seq = ++s->issued;
    for (; at > 0; at--) /* the calls that it passes */
        *call_at(s, at) = *call_at(s, at - 1);
    s->call_first = (s->call_first + 1) % CALLS;
    s->call_count--;
    s->calls_of[out->descriptor.origin]--;
    s->last_training = out->seq;
    if (moe_step_traits(out->kind)->is_exclusive)
        s->exclusive = out->seq;
    if (s->ring_count > 0)
        s->credit -= price(s);
}

static void issue_forward(struct moe_sequencer *s, struct moe_ticket *out)
{
    struct key_state *k = ring_take(s);
    uint32_t bucket = choose_bucket(s, k);
    if (cover(s, k, bucket))
        ring_append(s, k);
    *out = (struct moe_ticket){
        .epoch = s->epoch,
        .seq = ++s->issued,
        .layer = k->key.layer,
        .kind = k->key.kind,
        .dtype = k->key.dtype,
        .bucket = bucket,
    };
    s->last_forward = out->seq;
    s->credit = s->credit + s->permille < WHOLE ? s->credit + s->permille : WHOLE;
}

static void issue_heartbeat(struct moe_sequencer *s, struct moe_ticket *out)
{
    *out = (struct moe_ticket){
        .epoch = s->epoch,
        .seq = ++s->issued,
        .layer = s->beat_layer,
        .kind = MOE_STEP_HEARTBEAT,
        .dtype = MOE_DTYPE_F32,
        .bucket = 1,
    };
}

/* -------------------------------------------------------------------------- models */

static struct model_change *change_at(struct moe_sequencer *s, size_t i)
{
    return &s->changes[(s->change_first + i) % MOE_SEQUENCER_CHANGES];
}

/* Whether the model is served once all changes have been issued; `count`: added models then. */
static bool will_serve(struct moe_sequencer *s, uint32_t model, size_t *count)
{
    bool serves = find_served(s, model) < s->served_count;
    *count = s->served_count;
    for (size_t i = 0; i < s->change_count; i++) {
        const struct model_change *c = change_at(s, i);
        *count = c->serve ? *count + 1 : *count - 1;
        if (c->model == model)
            serves = c->serve;
    }
    return serves;
}

struct moe_status moe_sequencer_change_model(struct moe_sequencer *s, uint32_t model, bool serve)
{
    size_t count;
    if (model == 0 || model > MOE_MODEL_NUMBER_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "%u is not an added model", model);
    if (will_serve(s, model, &count) == serve)
        return moe_ok();
    if (s->change_count == MOE_SEQUENCER_CHANGES || (serve && count == MOE_ADDED_MODELS_MAX))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                         "more than %d added models, or %d changes that wait", MOE_ADDED_MODELS_MAX,
                         MOE_SEQUENCER_CHANGES);
    *change_at(s, s->change_count++) = (struct model_change){model, serve};
    return moe_ok();
}

/* No ticket covers the work that waits for `model`. Its keys are free for others. */
static void drop_work(struct moe_sequencer *s, uint32_t model)
{
    for (size_t left = s->ring_count; left > 0; left--) {
        struct key_state *k = ring_take(s);
        if (moe_layer_model(k->key.layer) != model)
            ring_append(s, k);
    }
    for (size_t i = 0; i < s->key_count; i++) {
        struct key_state *k = &s->keys[i];
        if (!k->in_use || moe_layer_model(k->key.layer) != model)
            continue;
        for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
            s->pending -= k->pending[slot];
            s->owed -= k->owed[slot];
        }
        *k = (struct key_state){0};
    }
}

static void issue_model_change(struct moe_sequencer *s, struct moe_ticket *out)
{
    const struct model_change c = *change_at(s, 0);
    s->change_first = (s->change_first + 1) % MOE_SEQUENCER_CHANGES;
    s->change_count--;
    *out = (struct moe_ticket){
        .epoch = s->epoch,
        .seq = ++s->issued,
        .layer = moe_layer_key(c.model, 0),
        .kind = c.serve ? MOE_STEP_ADD_MODEL : MOE_STEP_REMOVE_MODEL,
    };
    if (c.serve) {
        s->served[s->served_count++] = c.model;
        return;
    }
    s->served[find_served(s, c.model)] = s->served[s->served_count - 1];
    s->served_count--;
    drop_work(s, c.model);
}

void moe_sequencer_swap_placement(struct moe_sequencer *s, uint32_t version)
{
    if (version > s->swapped && version > s->swap_due)
        s->swap_due = version;
}

static void issue_swap(struct moe_sequencer *s, struct moe_ticket *out)
{
    *out = (struct moe_ticket){.epoch = s->epoch,
                               .seq = ++s->issued,
                               .layer = s->swap_due,
                               .kind = MOE_STEP_SWAP_PLACEMENT};
    s->swapped = s->swap_due;
    s->swap_due = 0;
}

void moe_sequencer_beat(struct moe_sequencer *s, uint32_t layer)
{
    s->beats = true;
    s->beat_layer = layer;
}

bool moe_sequencer_next(struct moe_sequencer *s, struct moe_ticket *out)
{
    if (s->stopped || s->holds_all || s->issued - completed(s) >= MOE_SEQUENCER_IN_FLIGHT)
        return false;
    close_exclusive(s);
    if (!MOE_GUARD(EXCLUSIVE_RUNS_ALONE, s->exclusive == 0))
        return false;
    size_t at;
    if (s->swap_due != 0)
        issue_swap(s, out);
    else if (s->change_count > 0)
        issue_model_change(s, out);
    else if (next_call(s, &at) && training_is_due(s, at))
        issue_training(s, at, out);
    else if (s->ring_count > 0)
        issue_forward(s, out);
    else if (s->beats && completed(s) == s->issued)
        issue_heartbeat(s, out);
    else
        return false;
    s->beats = false;
    return true;
}

uint64_t moe_sequencer_pending(const struct moe_sequencer *s)
{
    return s->pending;
}

size_t moe_sequencer_calls(const struct moe_sequencer *s)
{
    return s->call_count;
}
