/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/caller.h. A result is the completion of the daemon, or else the release of the
 * watchdog; each carries the sequence number, so that an old one ends no new request. */
#include "regions/caller.h"

#include <string.h>

void moe_ring_caller_init(struct moe_ring_caller *c, struct moe_ring *ring)
{
    *c = (struct moe_ring_caller){.ring = ring};
}

static bool is_of(uint64_t word, uint32_t sequence)
{
    return word != 0 && MOE_GUARD(RESULT_OF_THIS_REQUEST, moe_ring_sequence_of(word) == sequence);
}

static uint64_t completion(const struct moe_ring_caller *c, uint32_t entry)
{
    return __atomic_load_n(&c->ring->completed[entry].word, __ATOMIC_ACQUIRE);
}

/* A stream that sees the signal waits for what follows it; so no stream misses it. */
static void release(struct moe_ring_caller *c, uint32_t entry, uint32_t sequence,
                    enum moe_code code)
{
    __atomic_store_n(&c->ring->ends[entry], 1, __ATOMIC_RELEASE);
    __atomic_store_n(&c->ring->released[entry], moe_ring_word(sequence, code), __ATOMIC_RELEASE);
}

bool moe_ring_caller_is_free(struct moe_ring_caller *c, uint32_t entry)
{
    if (c->waiting[entry])
        return false;
    bool ended = __atomic_load_n(&c->ended, __ATOMIC_ACQUIRE);
    if (c->abandoned[entry] && (ended || is_of(completion(c, entry), c->sequence[entry])))
        c->abandoned[entry] = false;
    return MOE_GUARD(ABANDONED_ENTRIES_WAIT, !c->abandoned[entry]);
}

uint32_t moe_ring_caller_submit(struct moe_ring_caller *c, uint32_t entry,
                                const struct moe_ring_request *request)
{
    uint32_t sequence = moe_ring_next(c->sequence[entry]);
    c->sequence[entry] = sequence;
    c->waiting[entry] = true;
    c->abandoned[entry] = false;
    memcpy(&c->ring->requests[entry], request, sizeof *request);
    /* Sequentially consistent, and so is the daemon's store to `sleeps`: one of the two sees the
     * other's. */
    __atomic_store_n(&c->ring->submitted[entry], sequence, __ATOMIC_SEQ_CST);
    /* moe_ring_caller_end may have looked at this entry before. */
    if (__atomic_load_n(&c->ended, __ATOMIC_SEQ_CST))
        release(c, entry, sequence, MOE_UNAVAILABLE);
    return sequence;
}

bool moe_ring_caller_must_wake(const struct moe_ring_caller *c)
{
    return __atomic_load_n(&c->ring->sleeps, __ATOMIC_SEQ_CST) != 0;
}

bool moe_ring_caller_poll(struct moe_ring_caller *c, uint32_t entry, enum moe_code *code)
{
    uint32_t sequence = c->sequence[entry];
    uint64_t word = completion(c, entry);
    if (!is_of(word, sequence)) {
        word = __atomic_load_n(&c->ring->released[entry], __ATOMIC_ACQUIRE);
        if (!is_of(word, sequence))
            return false;
        c->abandoned[entry] = true;
    }
    c->waiting[entry] = false;
    *code = moe_ring_code_of(word);
    return true;
}

bool moe_ring_caller_details(const struct moe_ring_caller *c, uint32_t entry,
                             struct moe_ring_details *out)
{
    return moe_ring_caller_details_of(c, entry, c->sequence[entry], out);
}

bool moe_ring_caller_details_of(const struct moe_ring_caller *c, uint32_t entry, uint32_t sequence,
                                struct moe_ring_details *out)
{
    const struct moe_ring_details *d = &c->ring->completed[entry].details;
    if (__atomic_load_n(&d->sequence, __ATOMIC_ACQUIRE) != sequence)
        return false;
    memcpy(out, d, sizeof *out);
    out->text[MOE_RING_TEXT - 1] = '\0';
    return true;
}

void moe_ring_caller_take_back(struct moe_ring_caller *c, uint32_t entry)
{
    uint32_t sequence = __atomic_load_n(&c->ring->submitted[entry], __ATOMIC_ACQUIRE);
    c->sequence[entry] = sequence;
    c->waiting[entry] = false;
    c->abandoned[entry] = sequence != 0 && !is_of(completion(c, entry), sequence);
}

/* -------------------------------------------------------------------- watchdog */

/* The entry's request if it has no result; 0 = none. */
static uint32_t outstanding(const struct moe_ring_caller *c, uint32_t entry)
{
    uint32_t sequence = __atomic_load_n(&c->ring->submitted[entry], __ATOMIC_ACQUIRE);
    bool has_result = moe_ring_sequence_of(completion(c, entry)) == sequence ||
                      moe_ring_sequence_of(
                          __atomic_load_n(&c->ring->released[entry], __ATOMIC_ACQUIRE)) == sequence;
    return MOE_GUARD(EVERY_WAIT_ENDS, has_result) ? 0 : sequence;
}

bool moe_ring_caller_is_busy(const struct moe_ring_caller *c)
{
    bool busy = false;
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++)
        busy = busy || outstanding(c, i) != 0;
    return busy;
}

void moe_ring_caller_end(struct moe_ring_caller *c)
{
    __atomic_store_n(&c->ended, true, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++) {
        uint32_t sequence = outstanding(c, i);
        if (sequence != 0)
            release(c, i, sequence, MOE_UNAVAILABLE);
    }
}

void moe_ring_caller_watch(struct moe_ring_caller *c, uint64_t now_ns, uint64_t limit_ns)
{
    if (__atomic_load_n(&c->ended, __ATOMIC_ACQUIRE)) {
        moe_ring_caller_end(c);
        return;
    }
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++) {
        uint32_t sequence = outstanding(c, i);
        if (sequence != c->seen[i]) {
            c->seen[i] = sequence;
            c->since_ns[i] = now_ns;
        }
        if (sequence != 0 && now_ns - c->since_ns[i] >= limit_ns)
            release(c, i, sequence, MOE_DEADLINE_EXCEEDED);
    }
}
