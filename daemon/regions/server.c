/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/server.h. */
#include "regions/server.h"

#include "base/status.h"

#include <string.h>

void moe_ring_server_init(struct moe_ring_server *s, struct moe_ring *ring)
{
    *s = (struct moe_ring_server){.ring = ring};
}

bool moe_ring_server_take(struct moe_ring_server *s, uint32_t *entry, struct moe_ring_request *out)
{
    for (uint32_t n = 0; n < MOE_RING_ENTRIES; n++) {
        uint32_t i = (s->next + n) % MOE_RING_ENTRIES;
        if (!MOE_GUARD(ENTRIES_TAKE_TURNS, !s->busy[i]))
            continue;
        /* With set_sleeps and the client's store: see moe_ring_caller_submit. */
        uint32_t sequence = __atomic_load_n(&s->ring->submitted[i], __ATOMIC_SEQ_CST);
        if (sequence == 0 || sequence == s->taken[i])
            continue;
        s->taken[i] = sequence;
        s->busy[i] = true;
        s->next = (i + 1) % MOE_RING_ENTRIES;
        memcpy(out, &s->ring->requests[i], sizeof *out);
        *entry = i;
        return true;
    }
    return false;
}

void moe_ring_server_give_back(struct moe_ring_server *s, uint32_t entry)
{
    MOE_INVARIANT(entry < MOE_RING_ENTRIES && s->busy[entry]);
    s->taken[entry] = 0;
    s->busy[entry] = false;
}

struct moe_ring_good moe_ring_server_good(const struct moe_ring_server *s, uint32_t entry)
{
    return (struct moe_ring_good){.word = &s->ring->completed[entry].word,
                                  .signal = &s->ring->ends[entry],
                                  .value = moe_ring_word(s->taken[entry], MOE_OK)};
}

static void write_details(struct moe_ring_server *s, uint32_t entry,
                          const struct moe_ring_details *details)
{
    MOE_INVARIANT(entry < MOE_RING_ENTRIES);
    struct moe_ring_details *to = &s->ring->completed[entry].details;
    size_t after = offsetof(struct moe_ring_details, reason);
    memcpy((char *)to + after, (const char *)details + after, sizeof *to - after);
    to->text[MOE_RING_TEXT - 1] = '\0';
    __atomic_store_n(&to->sequence, s->taken[entry], __ATOMIC_RELEASE);
}

static bool end(struct moe_ring_server *s, uint32_t entry)
{
    s->busy[entry] = false;
    return __atomic_load_n(&s->ring->waits[entry], __ATOMIC_SEQ_CST) != 0;
}

bool moe_ring_server_complete(struct moe_ring_server *s, uint32_t entry, enum moe_code code,
                              const struct moe_ring_details *details)
{
    write_details(s, entry, details);
    /* A stream of the client's device that sees this waits for the word below. */
    __atomic_store_n(&s->ring->ends[entry], 1, __ATOMIC_RELEASE);
    __atomic_store_n(&s->ring->completed[entry].word, moe_ring_word(s->taken[entry], code),
                     __ATOMIC_SEQ_CST);
    return end(s, entry);
}

bool moe_ring_server_add_details(struct moe_ring_server *s, uint32_t entry,
                                 const struct moe_ring_details *details)
{
    write_details(s, entry, details);
    return end(s, entry);
}

void moe_ring_server_set_sleeps(struct moe_ring_server *s, bool sleeps)
{
    __atomic_store_n(&s->ring->sleeps, sleeps ? 1 : 0, __ATOMIC_SEQ_CST);
}
