/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over slots; see reduce.h.
 *
 * The pieces form one sequence of floats. Each round handles as many floats as fit into a region.
 * In a round each holder of a piece owns a part of it. All holders store their values of the part
 * into the owner's window (rows, by source). Then the owner adds them in slot order and stores the
 * sum into the holders' windows (partials, by source). A barrier follows each of the two. */
#include "cpu/training/reduce.h"

#include "cpu/exchange/stores.h"

enum { CHUNK = 1 << 15 }; /* floats that a thread works on at a time */

struct round {
    struct moe_session *session;
    const struct moe_cpu_shared_piece *piece;
    uint32_t pieces;
    size_t first, end; /* floats of the whole list */
    /* The phase, for floats [from, to) of a piece, `at` floats after the round's first; the part
     * belongs to slot `owner`. */
    void (*fn)(const struct round *r, const struct moe_cpu_shared_piece *piece, size_t from,
               size_t to, size_t at, uint32_t owner);
};

static bool holds(const struct moe_cpu_shared_piece *p, uint32_t slot)
{
    return p->holders >> slot & 1;
}

/* In this slot's window. */
static float *rows_of(const struct round *r, uint32_t source)
{
    const struct moe_session *s = r->session;
    return moe_window_row_of(&s->layout, moe_cpu_session_own(s), source, 0, 0);
}

static float *partials_of(const struct round *r, uint32_t source)
{
    const struct moe_session *s = r->session;
    return moe_window_partial_of(&s->layout, moe_cpu_session_own(s), source, 0, 0);
}

static void store(const struct round *r, uint32_t slot, const float *at, const float *from,
                  size_t n)
{
    struct moe_cpu_stores stores = moe_cpu_stores_begin(r->session, slot);
    void *to = moe_cpu_stores_data(&stores, at, n * sizeof *from);
    if (to != NULL)
        memcpy(to, from, n * sizeof *from);
    moe_cpu_stores_end(&stores);
}

static void send_part(const struct round *r, const struct moe_cpu_shared_piece *p, size_t from,
                      size_t to, size_t at, uint32_t owner)
{
    uint32_t own = r->session->config.slot;
    if (holds(p, own) && owner != own)
        store(r, owner, rows_of(r, own) + at, p->data + from, to - from);
}

static void sum_part(const struct round *r, const struct moe_cpu_shared_piece *p, size_t from,
                     size_t to, size_t at, uint32_t owner)
{
    uint32_t own = r->session->config.slot;
    if (owner != own)
        return;
    float sum[256];
    for (size_t i = from; i < to;) {
        size_t n = to - i < 256 ? to - i : 256;
        memset(sum, 0, sizeof sum);
        for (uint32_t s = 0; s < r->session->config.slots; s++) {
            if (!holds(p, s))
                continue;
            const float *v = s == own ? p->data + i : rows_of(r, s) + at + (i - from);
            for (size_t j = 0; j < n; j++)
                sum[j] += v[j];
        }
        memcpy(p->data + i, sum, n * sizeof *sum);
        i += n;
    }
    for (uint32_t s = 0; s < r->session->config.slots; s++)
        if (holds(p, s) && s != own)
            store(r, s, partials_of(r, own) + at, p->data + from, to - from);
}

static void take_part(const struct round *r, const struct moe_cpu_shared_piece *p, size_t from,
                      size_t to, size_t at, uint32_t owner)
{
    uint32_t own = r->session->config.slot;
    if (holds(p, own) && owner != own)
        memcpy(p->data + from, partials_of(r, owner) + at, (to - from) * sizeof(float));
}

/* Cuts floats [from, to) of a piece, `at` floats after the round's first, into the holders' parts.
 * A part depends on the whole round's share of the piece, not on this chunk. */
static void each_part(const struct round *r, const struct moe_cpu_shared_piece *p, size_t share,
                      size_t share_end, size_t from, size_t to, size_t at)
{
    uint32_t holders = (uint32_t)__builtin_popcountll(p->holders), nth = 0;
    for (uint32_t s = 0; s < r->session->config.slots; s++) {
        if (!holds(p, s))
            continue;
        size_t a = share + (share_end - share) * nth / holders;
        size_t b = share + (share_end - share) * (nth + 1) / holders;
        nth++;
        a = a > from ? a : from;
        b = b < to ? b : to;
        if (a < b)
            r->fn(r, p, a, b, at + (a - from), s);
    }
}

static void round_item(void *ctx, uint32_t item)
{
    const struct round *r = ctx;
    size_t first = r->first + (size_t)item * CHUNK, start = 0;
    size_t end = r->end - first < CHUNK ? r->end : first + CHUNK;
    for (uint32_t i = 0; i < r->pieces && start < end; start += r->piece[i++].n) {
        const struct moe_cpu_shared_piece *p = &r->piece[i];
        size_t stop = start + p->n;
        size_t a = start > first ? start : first, b = stop < end ? stop : end;
        if (a >= b)
            continue;
        size_t share = start > r->first ? start : r->first,
               share_end = stop < r->end ? stop : r->end;
        each_part(r, p, share - start, share_end - start, a - start, b - start, a - r->first);
    }
}

static void run_phase(struct round *r,
                      void (*fn)(const struct round *, const struct moe_cpu_shared_piece *, size_t,
                                 size_t, size_t, uint32_t))
{
    r->fn = fn;
    moe_cpu_parallel(r->session->device, (uint32_t)((r->end - r->first + CHUNK - 1) / CHUNK),
                     round_item, r);
}

struct moe_status moe_cpu_reduce(struct moe_session *session,
                                 const struct moe_cpu_shared_piece *piece, uint32_t pieces)
{
    const struct moe_window_layout *l = &session->layout;
    size_t region = l->row_region < l->partial_region ? l->row_region : l->partial_region;
    size_t total = 0, capacity = region / sizeof(float);
    for (uint32_t i = 0; i < pieces; i++)
        total += piece[i].n;
    struct round r = {.session = session, .piece = piece, .pieces = pieces};
    for (; r.first < total; r.first = r.end) {
        r.end = total - r.first < capacity ? total : r.first + capacity;
        run_phase(&r, send_part);
        MOE_TRY(moe_cpu_session_barrier(session));
        run_phase(&r, sum_part);
        MOE_TRY(moe_cpu_session_barrier(session));
        run_phase(&r, take_part);
    }
    return moe_ok();
}
