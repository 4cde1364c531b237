/* SPDX-License-Identifier: Apache-2.0 */
/* A ticket for shared memory lets one connection in, for ten seconds, as its owner. */
#include "base/clock.h"
#include "regions/tickets.h"
#include "support/check.h"

#include <string.h>

static struct moe_region_tickets tickets;
static const struct moe_region_owner alice = {.identity = "alice", .has_uid = true, .uid = 7};

enum { NOW = 1000 };

static int start(void **state)
{
    (void)state;
    memset(&tickets, 0, sizeof tickets);
    return 0;
}

/* Different bytes for each `n`. */
static const uint8_t *secret(unsigned n)
{
    static uint8_t bytes[MOE_REGION_TICKET];
    memset(bytes, (int)n + 1, sizeof bytes);
    return bytes;
}

static void a_ticket_works_once(void **state)
{
    (void)state;
    struct moe_region_owner owner;
    assert_ok(moe_region_tickets_add(&tickets, secret(0), &alice, NOW));
    assert_refused(moe_region_tickets_take(&tickets, secret(1), 16, NOW, &owner),
                   MOE_UNAUTHENTICATED, MOE_REASON_NONE);
    assert_refused(moe_region_tickets_take(&tickets, secret(0), 15, NOW, &owner),
                   MOE_UNAUTHENTICATED, MOE_REASON_NONE);
    assert_ok(moe_region_tickets_take(&tickets, secret(0), 16, NOW, &owner));
    assert_string_equal(owner.identity, "alice");
    assert_true(owner.has_uid);
    assert_int_equal(owner.uid, 7);
    assert_refused(moe_region_tickets_take(&tickets, secret(0), 16, NOW, &owner),
                   MOE_UNAUTHENTICATED, MOE_REASON_NONE);
}

static void a_ticket_lives_ten_seconds(void **state)
{
    (void)state;
    struct moe_region_owner owner;
    const uint64_t end = NOW + 10 * MOE_NS_PER_S;
    assert_ok(moe_region_tickets_add(&tickets, secret(0), &alice, NOW));
    assert_ok(moe_region_tickets_add(&tickets, secret(1), &alice, NOW));
    assert_ok(moe_region_tickets_take(&tickets, secret(0), 16, end - 1, &owner));
    assert_refused(moe_region_tickets_take(&tickets, secret(1), 16, end, &owner),
                   MOE_UNAUTHENTICATED, MOE_REASON_NONE);
}

/* Zeros are no ticket, also where none was ever made. */
static void an_empty_table_lets_nobody_in(void **state)
{
    (void)state;
    struct moe_region_owner owner;
    const uint8_t zeros[MOE_REGION_TICKET] = {0};
    assert_refused(moe_region_tickets_take(&tickets, zeros, sizeof zeros, 0, &owner),
                   MOE_UNAUTHENTICATED, MOE_REASON_NONE);
}

static unsigned living(const char *identity)
{
    unsigned count = 0;
    for (size_t i = 0; i < MOE_REGION_TICKETS; i++)
        count +=
            tickets.all[i].expires_ns > NOW && strcmp(tickets.all[i].owner.identity, identity) == 0;
    return count;
}

static void one_identity_cannot_take_all_places(void **state)
{
    (void)state;
    struct moe_region_owner bob = {.identity = "bob"};
    unsigned n = 0;
    struct moe_region_owner owner;
    for (; n < 2 * MOE_REGION_TICKETS; n++)
        assert_ok(moe_region_tickets_add(&tickets, secret(n), &alice, NOW + n));
    assert_int_equal(living("alice"), MOE_REGION_TICKETS_EACH);
    assert_ok(moe_region_tickets_take(&tickets, secret(n - 1), 16, NOW + n, &owner));
    assert_ok(moe_region_tickets_add(&tickets, secret(n), &bob, NOW + n));
    assert_ok(moe_region_tickets_take(&tickets, secret(n), 16, NOW + n, &owner));
    assert_string_equal(owner.identity, "bob");
}

/* One client asks and does not come. Others of its identity, over separate connections, get
 * tickets and keep them for as long as the first one goes on. */
static void a_connection_keeps_no_other_of_its_identity_out(void **state)
{
    (void)state;
    struct moe_region_owner greedy = {.identity = "tcp", .connection = 1}, owner;
    struct moe_region_owner modest = {.identity = "tcp", .connection = 2};
    unsigned n = 0;
    for (; n < MOE_REGION_TICKETS_EACH; n++)
        assert_ok(moe_region_tickets_add(&tickets, secret(n), &greedy, NOW + n));
    for (; n < MOE_REGION_TICKETS_EACH + 3; n++, modest.connection++)
        assert_ok(moe_region_tickets_add(&tickets, secret(n), &modest, NOW + n));
    for (; n < 100; n++)
        assert_ok(moe_region_tickets_add(&tickets, secret(n), &greedy, NOW + n));
    for (unsigned i = 0; i < 3; i++) {
        assert_ok(moe_region_tickets_take(&tickets, secret(MOE_REGION_TICKETS_EACH + i), 16,
                                          NOW + n, &owner));
        assert_int_equal(owner.connection, 2 + i);
    }
}

/* Four identities have all places: a fifth one gets in all the same, and they keep nearly all. */
static void many_identities_cannot_keep_another_out(void **state)
{
    (void)state;
    enum { MANY = MOE_REGION_TICKETS / MOE_REGION_TICKETS_EACH };
    struct moe_region_owner each = {.identity = "0"}, late = {.identity = "late"}, owner;
    for (unsigned n = 0; n < MOE_REGION_TICKETS; n++) {
        each.identity[0] = (char)('0' + n % MANY);
        assert_ok(moe_region_tickets_add(&tickets, secret(n), &each, NOW + n));
    }
    const unsigned own = MOE_REGION_TICKETS / (MANY + 1);
    for (unsigned n = 0; n < 2 * own; n++) /* the second half takes the places of the first */
        assert_ok(
            moe_region_tickets_add(&tickets, secret(MOE_REGION_TICKETS + n), &late, NOW + 100 + n));
    assert_int_equal(living("late"), own);
    for (unsigned n = own; n < 2 * own; n++) {
        assert_ok(moe_region_tickets_take(&tickets, secret(MOE_REGION_TICKETS + n), 16, NOW + 200,
                                          &owner));
        assert_string_equal(owner.identity, "late");
    }
    /* The oldest have gone. */
    for (unsigned n = 0; n < MOE_REGION_TICKETS; n++) {
        struct moe_status st = moe_region_tickets_take(&tickets, secret(n), 16, NOW + 200, &owner);
        assert_int_equal(moe_failed(&st), n < own);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_ticket_works_once, start),
        cmocka_unit_test_setup(a_ticket_lives_ten_seconds, start),
        cmocka_unit_test_setup(an_empty_table_lets_nobody_in, start),
        cmocka_unit_test_setup(one_identity_cannot_take_all_places, start),
        cmocka_unit_test_setup(a_connection_keeps_no_other_of_its_identity_out, start),
        cmocka_unit_test_setup(many_identities_cannot_keep_another_out, start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
