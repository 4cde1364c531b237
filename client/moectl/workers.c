/* SPDX-License-Identifier: Apache-2.0 */
#include "workers.h"

#include "moectl/io/proto_json.h"

#include "moe/types.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct moectl_column columns[] = {
    {.title = "SLOT", .right = true},
    {.title = "ENDPOINT"},
    {.title = "NODE"},
    {.title = "STATE"},
    {.title = "TOKENS", .right = true, .wide = true},
    {.title = "STEPS", .right = true, .wide = true},
    {.title = "WEIGHTS", .right = true},
    {.title = "LEASE", .right = true, .wide = true},
    {.title = "WORKER"},
    {.title = "ERROR"},
};

static bool is_first_of_host(const Moe__V1__GetStatusResponse *s, size_t worker)
{
    const Moe__V1__Host *host = s->workers[worker]->host;
    for (size_t i = 0; host != NULL && i < worker; i++)
        if (s->workers[i]->host != NULL && strcmp(s->workers[i]->host->id, host->id) == 0)
            return false;
    return host != NULL;
}

/* "1:name": the number of the worker's host among those of the group; "-" if it is not known. */
static void add_node(struct moectl_table *t, const Moe__V1__GetStatusResponse *s, size_t worker)
{
    const Moe__V1__Host *host = s->workers[worker]->host;
    size_t node = 0, i = 0;
    if (host == NULL) {
        moectl_table_cell(t, "-");
        return;
    }
    for (; s->workers[i]->host == NULL || strcmp(s->workers[i]->host->id, host->id) != 0; i++)
        node += is_first_of_host(s, i);
    moectl_table_cell(t, "%zu:%s", node, host->name);
}

static void add_row(struct moectl_table *t, const Moe__V1__GetStatusResponse *s, size_t worker)
{
    const Moe__V1__WorkerStatus *w = s->workers[worker];
    moectl_table_cell(t, "%" PRIu32, w->slot);
    moectl_table_cell(t, "%s", w->endpoint[0] != '\0' ? w->endpoint : "(none)");
    add_node(t, s, worker);
    moectl_table_cell(t, "%s", moectl_enum_name(&moe__v1__worker_state__descriptor, (int)w->state));
    moectl_table_cell(t, "%" PRIu64, w->tokens);
    moectl_table_cell(t, "%" PRIu64, w->steps);
    moectl_table_cell(t, "%.1f MiB", (double)w->loaded_bytes / (1024.0 * 1024.0));
    moectl_table_cell(t, "%.1f s", (double)w->lease_remaining_ms / 1000.0);
    moectl_table_cell(t, "%s", w->worker_id);
    if (w->error == NULL)
        moectl_table_cell(t, "-");
    else
        moectl_table_cell(t, "%s: %s", w->error->reason, w->error->message);
}

struct moectl_table *moectl_workers_table(const Moe__V1__GetStatusResponse *s, bool all)
{
    struct moectl_table *t = moectl_table_create(columns, sizeof columns / sizeof *columns, all);
    for (size_t i = 0; i < s->n_workers; i++)
        add_row(t, s, i);
    return t;
}

uint32_t moectl_workers_size(const Moe__V1__GetStatusResponse *s)
{
    return s->size != 0 ? s->size : s->slots; /* 0: an older release */
}

bool moectl_workers_is_spare(const Moe__V1__GetStatusResponse *s, uint32_t slot)
{
    for (size_t i = 0; i < s->n_spare_slots; i++)
        if (s->spare_slots[i] == slot)
            return true;
    return false;
}

size_t moectl_workers_live(const Moe__V1__GetStatusResponse *s)
{
    size_t live = 0;
    for (size_t i = 0; i < s->n_workers; i++)
        live += s->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE &&
                !moectl_workers_is_spare(s, s->workers[i]->slot);
    return live;
}

size_t moectl_workers_gone(const Moe__V1__GetStatusResponse *s)
{
    size_t gone = 0;
    for (size_t i = 0; i < s->n_workers; i++)
        gone += s->workers[i]->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE;
    return gone;
}

/* A worker that cannot load is GONE too, and has its slot: another one does not get it. */
bool moectl_workers_can_fill(const Moe__V1__GetStatusResponse *s)
{
    size_t taken = 0;
    for (size_t i = 0; i < s->n_workers; i++)
        taken += s->workers[i]->lease_remaining_ms > 0 &&
                 !moectl_workers_is_spare(s, s->workers[i]->slot);
    return s->n_spare_slots > 0 && s->scaling_to == 0 && taken < moectl_workers_size(s);
}

bool moectl_workers_load(const Moe__V1__GetStatusResponse *s, uint64_t *done, uint64_t *total)
{
    bool loading = false;
    *done = *total = 0;
    for (size_t i = 0; i < s->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = s->workers[i];
        if (w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            continue;
        loading = loading || w->state == MOE__V1__WORKER_STATE__WORKER_STATE_LOADING;
        *done += w->loaded_bytes;
        *total += w->total_bytes;
    }
    return loading && *total > 0;
}

void moectl_workers_describe_view(const Moe__V1__GetStatusResponse *s, char *out, size_t size)
{
    size_t at = 0;
    const char *before = s->n_live_slots == 1 ? "slot " : "slots ";
    for (size_t i = 0; i < s->n_live_slots && at < size; i++, before = ", ")
        at += (size_t)snprintf(out + at, size - at, "%s%" PRIu32, before, s->live_slots[i]);
    if (at < size)
        at += (size_t)snprintf(out + at, size - at, " of %" PRIu32 "; experts",
                               moectl_workers_size(s));
    before = " with ";
    for (size_t n = 0; n < s->n_experts_by_live_copies && at < size; n++) {
        const char *what = before[1] == 'w' ? n == 1 ? " live copy" : " live copies" : "";
        if (s->experts_by_live_copies[n] == 0)
            continue;
        at += (size_t)snprintf(out + at, size - at, "%s%zu%s: %" PRIu32, before, n, what,
                               s->experts_by_live_copies[n]);
        before = ", with ";
    }
}

const Moe__V1__WorkerStatus *moectl_workers_find(const Moe__V1__GetStatusResponse *s, uint32_t slot)
{
    for (size_t i = 0; i < s->n_workers; i++)
        if (s->workers[i]->slot == slot)
            return s->workers[i];
    return NULL;
}

int moectl_parse_slot(const char *text, uint32_t *slot)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value >= MOE_MAX_SLOTS)
        return moectl_usage_error("'%s' is not a slot: 0 to %d", text, MOE_MAX_SLOTS - 1);
    *slot = (uint32_t)value;
    return MOECTL_OK;
}
