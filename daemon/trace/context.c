/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: W3C Trace Context, level 1, https://www.w3.org/TR/trace-context-1/ section 3.2:
 *
 *     00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
 *     version, trace id, parent id, flags; bit 0 of the flags: the caller samples */
#include "base/clock.h"
#include "trace/inside.h"

#include <string.h>

enum { FLAG_SAMPLED = 1 };

/* 16 for all other characters. */
static unsigned digit_of(char c)
{
    if (c >= '0' && c <= '9')
        return (unsigned)(c - '0');
    return c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
}

static bool read_bytes(const char *text, uint8_t *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        unsigned high = digit_of(text[2 * i]), low = digit_of(text[2 * i + 1]);
        if (high > 15 || low > 15)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool is_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

static bool is_valid(const struct moe_trace_context *c)
{
    return !is_zero(c->trace_id, sizeof c->trace_id) && !is_zero(c->parent_id, sizeof c->parent_id);
}

bool moe_trace_parse(const char *text, size_t length, struct moe_trace_context *out)
{
    enum { TRACE_AT = 3, PARENT_AT = 36, FLAGS_AT = 53 };
    struct moe_trace_context c = {0};
    uint8_t version, flags;
    *out = c;
    if (length != MOE_TRACE_PARENT_LENGTH || text[TRACE_AT - 1] != '-' ||
        text[PARENT_AT - 1] != '-' || text[FLAGS_AT - 1] != '-')
        return false;
    if (!read_bytes(text, &version, 1) || version != 0 ||
        !read_bytes(text + TRACE_AT, c.trace_id, sizeof c.trace_id) ||
        !read_bytes(text + PARENT_AT, c.parent_id, sizeof c.parent_id) ||
        !read_bytes(text + FLAGS_AT, &flags, 1))
        return false;
    if (!is_valid(&c))
        return false;
    c.sampled = (flags & FLAG_SAMPLED) != 0;
    *out = c;
    return true;
}

void moe_trace_id_text(const struct moe_trace_context *c, char out[MOE_TRACE_ID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    size_t length = 0;
    for (size_t i = 0; i < sizeof c->trace_id && !is_zero(c->trace_id, sizeof c->trace_id); i++) {
        out[length++] = digits[c->trace_id[i] >> 4];
        out[length++] = digits[c->trace_id[i] & 15];
    }
    out[length] = '\0';
}

/* splitmix64: a step of the state, then a bijection. */
static uint64_t next_random(struct moe_tracer *t)
{
    const uint64_t step = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = atomic_fetch_add_explicit(&t->id_state, step, memory_order_relaxed);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t moe_trace_next_id(struct moe_tracer *t)
{
    uint64_t id;
    do {
        id = next_random(t);
    } while (id == 0);
    return id;
}

/* Whether there is room for one more request with a parent. */
static bool has_room(struct moe_tracer *t)
{
    const uint64_t now = moe_clock_ns();
    uint64_t until = atomic_load_explicit(&t->parents_until, memory_order_relaxed), next;
    do {
        next = (until > now ? until : now) + t->parent_ns;
        if (next - now > t->parents_ns)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&t->parents_until, &until, next,
                                                    memory_order_relaxed, memory_order_relaxed));
    return true;
}

/* A caller may sample every request; the collector is not to pay for it. */
static void cap(struct moe_tracer *t, struct moe_trace_context *c)
{
    if (!c->sampled || has_room(t))
        return;
    c->sampled = false;
    if (t->capped != NULL)
        moe_counter_add(t->capped, 1);
}

void moe_trace_begin(struct moe_tracer *t, const char *traceparent, size_t length,
                     struct moe_trace_context *out)
{
    struct moe_trace_context parent = {0};
    if (t != NULL && traceparent != NULL)
        (void)moe_trace_parse(traceparent, length, &parent);
    moe_trace_begin_from(t, &parent, out);
}

void moe_trace_begin_from(struct moe_tracer *t, const struct moe_trace_context *parent,
                          struct moe_trace_context *out)
{
    *out = (struct moe_trace_context){0};
    if (t == NULL)
        return;
    if (is_valid(parent)) {
        *out = *parent;
        cap(t, out);
        return;
    }
    if (!t->samples_roots || next_random(t) > t->threshold)
        return;
    const uint64_t id[2] = {moe_trace_next_id(t), moe_trace_next_id(t)};
    memcpy(out->trace_id, id, sizeof out->trace_id);
    out->sampled = true;
}
