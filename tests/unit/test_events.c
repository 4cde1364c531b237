/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of events: sequences only rise, and the oldest events go first. */
#include "coordinator/events.h"
#include "support/check.h"

#include <stdio.h>
#include <string.h>

static struct moe_events events;

static void add(uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        struct moe_event e = {.kind = MOE_EVENT_JOINED, .slot = 3};
        (void)snprintf(e.text, sizeof e.text, "event %u", (unsigned)events.count + 1);
        moe_events_add(&events, &e);
    }
}

/* The listed sequences are first .. last, each with its text. */
static void expect(uint64_t after, size_t limit, uint64_t first, uint64_t last)
{
    const struct moe_event *found[MOE_EVENTS_MAX];
    size_t count = moe_events_list(&events, after, limit, found);
    assert_int_equal(count, last + 1 - first);
    for (size_t i = 0; i < count; i++) {
        char text[32];
        (void)snprintf(text, sizeof text, "event %u", (unsigned)(first + i));
        assert_int_equal(found[i]->sequence, first + i);
        assert_string_equal(found[i]->text, text);
    }
}

static void events_are_listed_oldest_first(void **unused)
{
    (void)unused;
    memset(&events, 0, sizeof events);
    expect(0, 0, 1, 0);
    add(5);
    expect(0, 0, 1, 5);
    expect(3, 0, 4, 5);
    expect(5, 0, 6, 5);
    expect(9, 0, 6, 5); /* of another start of the coordinator */
    expect(0, 2, 4, 5);
    expect(4, 2, 5, 5);
}

static void the_oldest_events_are_forgotten(void **unused)
{
    (void)unused;
    memset(&events, 0, sizeof events);
    add(MOE_EVENTS_MAX);
    expect(0, 0, 1, MOE_EVENTS_MAX);
    add(7);
    expect(0, 0, 8, MOE_EVENTS_MAX + 7);
    expect(10, 0, 11, MOE_EVENTS_MAX + 7);
    expect(UINT64_MAX, 1, 1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_are_listed_oldest_first),
        cmocka_unit_test(the_oldest_events_are_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
