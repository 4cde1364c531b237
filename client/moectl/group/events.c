/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/group/events.h"

#include "moectl/io/proto_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

static const struct moectl_column columns[] = {
    {.title = "TIME"},
    {.title = "SEQUENCE", .right = true, .wide = true},
    {.title = "SEVERITY"},
    {.title = "KIND"},
    {.title = "SLOT", .right = true},
    {.title = "EPOCH", .right = true, .wide = true},
    {.title = "MESSAGE"},
};

struct moe_status moectl_events_ask(struct moectl_link *link, uint64_t deadline_ns, uint64_t after,
                                    uint32_t limit, Moe__V1__ListEventsResponse **out)
{
    Moe__V1__ListEventsRequest request = MOE__V1__LIST_EVENTS_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.after = after;
    request.limit = limit;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.AdminService/ListEvents", &request.base, deadline_ns,
                         &moe__v1__list_events_response__descriptor, &answer);
    *out = (Moe__V1__ListEventsResponse *)answer;
    return st;
}

const char *moectl_time_text(int64_t unix_ms, char text[MOECTL_TIME_BYTES])
{
    struct tm parts;
    time_t at = (time_t)(unix_ms / 1000);
    char seconds[24];
    if (unix_ms <= 0 || unix_ms / 1000 > INT32_MAX * INT64_C(64) || gmtime_r(&at, &parts) == NULL ||
        strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &parts) == 0)
        return "-";
    (void)snprintf(text, MOECTL_TIME_BYTES, "%s.%03dZ", seconds, (int)(unix_ms % 1000));
    return text;
}

static void add_row(struct moectl_table *t, const Moe__V1__Event *e)
{
    char at[MOECTL_TIME_BYTES];
    moectl_table_cell(t, "%s", moectl_time_text(e->unix_ms, at));
    moectl_table_cell(t, "%" PRIu64, e->sequence);
    moectl_table_cell(t, "%s",
                      moectl_enum_name(&moe__v1__event_severity__descriptor, (int)e->severity));
    moectl_table_cell(t, "%s", moectl_enum_name(&moe__v1__event_kind__descriptor, (int)e->kind));
    if (e->slot < 0)
        moectl_table_cell(t, "-");
    else
        moectl_table_cell(t, "%" PRId32, e->slot);
    moectl_table_cell(t, "%" PRIu64, e->epoch);
    moectl_table_cell(t, "%s", e->text);
}

struct moectl_table *moectl_events_table(const Moe__V1__ListEventsResponse *e, int32_t slot,
                                         bool wide)
{
    struct moectl_table *t = moectl_table_create(columns, sizeof columns / sizeof *columns, wide);
    for (size_t i = 0; i < e->n_events; i++)
        if (slot == MOECTL_ALL_EVENTS || e->events[i]->slot == slot)
            add_row(t, e->events[i]);
    return t;
}
