/* Keys with waiting tokens stand in a ring, in the order in which they began to wait; a ticket
 * takes the first, and a key with tokens left goes to the end. So each key is served after at most
 * as many tickets as there are other waiting keys. */
#include "worker/sequencer.h"

#include "base/size.h"

#include <stdlib.h>
#include <string.h>

struct key_state {
    struct moe_sequencer_key key;
    uint64_t pending[MOE_MAX_SLOTS]; /* announced, not covered by a ticket */
    bool in_ring;                    /* exactly when some slot's pending is not 0 */
};

struct moe_sequencer {
    uint64_t epoch, live;
    uint32_t max_bucket;
    bool stopped;
    uint64_t issued;              /* seq of the last ticket */
    uint64_t done[MOE_MAX_SLOTS]; /* last ticket that the slot reported; <= issued */
    uint64_t pending;             /* sum over keys and slots */
    size_t key_count;
    struct key_state keys[MOE_SEQUENCER_KEYS];
    size_t ring_first, ring_count; /* ring[(first + i) % KEYS]: indices into keys */
    uint32_t ring[MOE_SEQUENCER_KEYS];
};

struct moe_status moe_sequencer_create(struct moe_sequencer **out)
{
    struct moe_sequencer *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the sequencer");
    s->stopped = true;
    *out = s;
    return moe_ok();
}

void moe_sequencer_destroy(struct moe_sequencer *s)
{
    free(s);
}

void moe_sequencer_begin(struct moe_sequencer *s, uint64_t epoch, uint64_t live,
                         uint32_t max_bucket)
{
    MOE_INVARIANT(live != 0 && live >> MOE_MAX_SLOTS == 0);
    MOE_INVARIANT(max_bucket != 0 && moe_pow2_ceil(max_bucket) == max_bucket);
    memset(s, 0, sizeof *s);
    s->epoch = epoch;
    s->live = live;
    s->max_bucket = max_bucket;
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

static bool same_key(const struct moe_sequencer_key *a, const struct moe_sequencer_key *b)
{
    return a->layer == b->layer && a->kind == b->kind && a->dtype == b->dtype;
}

static struct key_state *find_or_add_key(struct moe_sequencer *s,
                                         const struct moe_sequencer_key *key)
{
    for (size_t i = 0; i < s->key_count; i++)
        if (same_key(&s->keys[i].key, key))
            return &s->keys[i];
    if (s->key_count == MOE_SEQUENCER_KEYS)
        return NULL;
    struct key_state *k = &s->keys[s->key_count++];
    k->key = *key;
    return k;
}

struct moe_status moe_sequencer_work(struct moe_sequencer *s, uint32_t slot,
                                     const struct moe_sequencer_key *key, uint32_t tokens)
{
    if (!is_live(s, slot))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "slot %u is not of this view",
                         slot);
    if (key->kind != MOE_STEP_FORWARD || moe_dtype_bytes(key->dtype) == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "work of kind %u and dtype %u is unknown", (unsigned)key->kind,
                         (unsigned)key->dtype);
    if (tokens == 0)
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

/* The smallest bucket that holds what the fullest slot can bring. */
static uint32_t choose_bucket(const struct moe_sequencer *s, const struct key_state *k)
{
    uint64_t most = 0;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if (k->pending[slot] > most)
            most = k->pending[slot];
    return most >= s->max_bucket ? s->max_bucket : moe_pow2_ceil((uint32_t)most);
}

/* Takes what a ticket covers off the books; false when nothing is left. */
static bool cover(struct moe_sequencer *s, struct key_state *k, uint32_t bucket)
{
    bool left = false;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        uint64_t taken = k->pending[slot] < bucket ? k->pending[slot] : bucket;
        k->pending[slot] -= taken;
        s->pending -= taken;
        left = left || k->pending[slot] != 0;
    }
    return left;
}

bool moe_sequencer_next(struct moe_sequencer *s, struct moe_ticket *out)
{
    if (s->stopped || s->ring_count == 0 || s->issued - completed(s) >= MOE_SEQUENCER_IN_FLIGHT)
        return false;
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
    return true;
}

bool moe_sequencer_stopped(const struct moe_sequencer *s)
{
    return s->stopped;
}

uint64_t moe_sequencer_pending(const struct moe_sequencer *s)
{
    return s->pending;
}
