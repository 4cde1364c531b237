/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of one host and user share memory, others need a network, and a pair without a way is
 * refused by name. */
#include "common/reach.h"

#include "support/check.h"

#include <string.h>

static struct moe_reach_slot slot[4];

static void reset(void)
{
    for (uint32_t s = 0; s < 4; s++)
        slot[s] = (struct moe_reach_slot){.host = 7, .user = 1000, .network = true};
}

static struct moe_status plan(bool network_only, struct moe_reach *out)
{
    return moe_reach_plan(0xf, 4, slot, network_only, out);
}

static void assert_no_way(bool network_only, const char *text)
{
    struct moe_reach reach;
    struct moe_status st = plan(network_only, &reach);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(st.reason, MOE_REASON_UNSUPPORTED);
    assert_non_null(strstr(st.text, text));
}

static void slots_of_one_host_share_and_need_no_network(void **state)
{
    (void)state;
    struct moe_reach reach;
    reset();
    for (uint32_t s = 0; s < 4; s++)
        slot[s].network = false;
    assert_ok(plan(false, &reach));
    assert_false(reach.network);
    for (uint32_t s = 0; s < 4; s++)
        assert_int_equal(reach.sharing[s], 0xf);
}

static void hosts_domains_and_users_part_slots(void **state)
{
    (void)state;
    struct moe_reach reach;
    reset();
    slot[2].host = slot[3].host = 8;
    assert_ok(plan(false, &reach));
    assert_true(reach.network);
    assert_int_equal(reach.sharing[0], 0x3);
    assert_int_equal(reach.sharing[3], 0xc);
    reset();
    slot[2].domain = slot[3].domain = 1;
    assert_ok(plan(false, &reach));
    assert_int_equal(reach.sharing[2], 0xc);
    reset();
    slot[1].user = 1001;
    assert_ok(plan(false, &reach));
    assert_int_equal(reach.sharing[1], 0x2);
    assert_int_equal(reach.sharing[0], 0xd);
    assert_ok(plan(true, &reach));
    assert_int_equal(reach.sharing[3], 0x8);
}

static void a_pair_without_a_way_is_named(void **state)
{
    (void)state;
    reset();
    slot[2].host = 8;
    slot[2].machine = 80;
    slot[2].network = false;
    assert_no_way(false, "slots 0 and 2 are on different hosts and slot 2's build has no network");
    assert_no_way(true, "slot 2's build has no network transport");
    reset();
    slot[1].user = 0;
    slot[0].network = slot[1].network = false;
    assert_no_way(false, "slot 1 runs as another user than slot 0 (0, not 1000)");
    reset();
    slot[3].host = 8;
    slot[3].machine = 80;
    slot[3].loopback = true;
    assert_no_way(false, "slot 3 offers a loopback address");
    slot[3].machine = slot[0].machine;
    assert_no_way(false, "slots 0 and 3 are in different network namespaces of one host and slot 3 "
                         "offers a loopback address");
    slot[3].host = 7;
    slot[3].domain = 1;
    struct moe_reach reach;
    assert_ok(plan(false, &reach));
}

static void a_slot_that_is_not_live_does_not_count(void **state)
{
    (void)state;
    struct moe_reach reach;
    reset();
    slot[2].host = 8;
    slot[2].network = false;
    assert_ok(moe_reach_plan(0xb, 4, slot, false, &reach));
    assert_false(reach.network);
    assert_int_equal(reach.sharing[2], 0);
}

static void names_of_hosts_have_numbers(void **state)
{
    (void)state;
    assert_int_equal(moe_reach_host("a-1"), moe_reach_host("a-1"));
    assert_int_not_equal(moe_reach_host("a-1"), moe_reach_host("a-2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_of_one_host_share_and_need_no_network),
        cmocka_unit_test(hosts_domains_and_users_part_slots),
        cmocka_unit_test(a_pair_without_a_way_is_named),
        cmocka_unit_test(a_slot_that_is_not_live_does_not_count),
        cmocka_unit_test(names_of_hosts_have_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
