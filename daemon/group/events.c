/* SPDX-License-Identifier: Apache-2.0 */
/* The queue of events for the session's thread, and the heartbeat. */
#include "group/state.h"

#include "base/clock.h"
#include "base/wait.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "group/report.h"

#include <stdlib.h>
#include <string.h>

/* The longest round trip loses a quarter with each later one. */
enum { ROUND_TRIP_FADES = 4 };

void moe_group__append_event(struct moe_group *g, struct event *e)
{
    *g->end = e;
    g->end = &e->next;
    g->event_count++;
    pthread_cond_signal(&g->wake);
}

struct event *moe_group__new_event(enum event_kind kind, size_t length)
{
    struct event *e = calloc(1, sizeof *e + length);
    if (e == NULL) {
        moe_log_error("group: no memory for an event");
        return NULL;
    }
    e->kind = kind;
    e->length = length;
    return e;
}

void moe_group__post(struct moe_group *g, enum event_kind kind, uint64_t number, uint64_t slots,
                     struct moe_status status)
{
    struct event *e = moe_group__new_event(kind, 0);
    if (e == NULL)
        return;
    e->number = number;
    e->slots = slots;
    e->status = status;
    moe_mutex_lock(&g->lock);
    moe_group__append_event(g, e);
    moe_mutex_unlock(&g->lock);
}

struct moe_status moe_group__add_part(void *ctx, const uint8_t *part, size_t length)
{
    struct parts *p = ctx;
    const uint32_t bytes = (uint32_t)length;
    if (sizeof bytes + length > p->room - p->length) {
        size_t room = 2 * (p->room + sizeof bytes + length);
        uint8_t *larger = realloc(p->bytes, room);
        if (larger == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "no memory for a message");
        p->bytes = larger;
        p->room = room;
    }
    memcpy(p->bytes + p->length, &bytes, sizeof bytes);
    memcpy(p->bytes + p->length + sizeof bytes, part, length);
    p->length += sizeof bytes + length;
    return moe_ok();
}

void moe_group__post_parts(struct moe_group *g, enum event_kind kind, uint64_t number,
                           uint64_t order, struct moe_status status, const struct parts *parts)
{
    struct event *e = moe_group__new_event(kind, parts->length);
    if (e == NULL)
        return;
    e->number = number;
    e->order = order;
    e->status = status;
    if (parts->length > 0)
        memcpy(e->bytes, parts->bytes, parts->length);
    moe_mutex_lock(&g->lock);
    moe_group__append_event(g, e);
    moe_mutex_unlock(&g->lock);
}

bool moe_group__next_part(const struct event *e, size_t *at, const uint8_t **part, size_t *length)
{
    uint32_t bytes;
    if (*at >= e->length)
        return false;
    memcpy(&bytes, e->bytes + *at, sizeof bytes);
    *part = e->bytes + *at + sizeof bytes;
    *length = bytes;
    *at += sizeof bytes + bytes;
    return true;
}

struct event *moe_group__wait_for_event(struct moe_group *g, uint64_t deadline_ns, bool *quit)
{
    bool in_time = true;
    moe_mutex_lock(&g->lock);
    while (g->first == NULL && !g->quit && in_time)
        in_time = moe_wait_until(&g->wake, &g->lock, deadline_ns);
    *quit = g->quit;
    struct event *e = g->first;
    if (e != NULL) {
        g->first = e->next;
        g->event_count--;
        if (g->first == NULL)
            g->end = &g->first;
    }
    moe_mutex_unlock(&g->lock);
    return e;
}

void moe_group__send_heartbeat(struct moe_group *g)
{
    struct moe_group_numbers numbers = {0};
    g->config.hooks.numbers(g->config.hooks.ctx, &numbers);
    uint64_t sequence = moe_lease_on_sent(&g->lease, g->config.lease->clock());
    moe_report_heartbeat(g->stream, g->epoch, sequence, g->round_trip_ns, &numbers);
    g->heartbeat_ns = moe_clock_ns() + g->lease.term_ns / MOE_LEASE_HEARTBEATS;
}

/* ------------------------------------------------------------------ lease */

void moe_group__show_lease(struct moe_group *g)
{
    moe_lease_gate_set(g->config.lease, &g->lease);
    uint64_t left_ns = moe_lease_gate_remaining_ns(g->config.lease);
    bool held = left_ns > 0;
    g->lease_end_ns = held ? moe_clock_ns() + left_ns : MOE_NEVER;
    if (g->lease_held && !held)
        moe_log_warn("no lease: the coordinator has not answered for %llu ms",
                     (unsigned long long)(g->lease.term_ns / MOE_NS_PER_MS));
    if (held || g->lease_held)
        g->config.hooks.lease_changed(g->config.hooks.ctx, held);
    g->lease_held = held;
}

void moe_group__on_heartbeat_answer(struct moe_group *g, const Moe__V1__HeartbeatAnswer *a)
{
    uint64_t sent_ns = moe_lease_sent_ns(&g->lease, a->sequence);
    if (sent_ns != 0) {
        uint64_t took_ns = g->config.lease->clock() - sent_ns;
        uint64_t before_ns = g->round_trip_ns - g->round_trip_ns / ROUND_TRIP_FADES;
        g->round_trip_ns = took_ns > before_ns ? took_ns : before_ns;
        if (g->config.heartbeat_seconds != NULL)
            moe_histogram_observe(g->config.heartbeat_seconds,
                                  (double)took_ns / (double)MOE_NS_PER_S);
    }
    moe_lease_on_answered(&g->lease, a->sequence, a->oldest_ms * MOE_NS_PER_MS);
    if (g->config.hooks.places_listed != NULL)
        g->config.hooks.places_listed(g->config.hooks.ctx, (const char *const *)a->places,
                                      a->n_places);
    if (g->config.hooks.joiner_waits != NULL)
        g->config.hooks.joiner_waits(g->config.hooks.ctx, a->joiner_waits, a->released_calls);
    moe_group__show_lease(g);
}
