/* SPDX-License-Identifier: Apache-2.0 */
/* Endpoints: HOST:PORT is taken, and what gRPC would misread is refused with the setting's name. */
#include "daemon/endpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void host_and_port_are_taken(void **state)
{
    static const char *const good[] = {"127.0.0.1:7600", "node-7.rack_2:1", "a:65535", "[::1]:7601",
                                       "[fe80::1%eth0]:7"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        print_message("%s\n", good[i]);
        assert_int_equal(moe_endpoint_check("--endpoint", good[i]).code, MOE_OK);
        assert_int_equal(moe_endpoint_check_listen("listen", good[i]).code, MOE_OK);
    }
}

static void anything_else_is_refused_by_its_name(void **state)
{
    static const char *const bad[] = {
        "",           "foo",   "foo:",  ":7600",         "a:65536",  "a:99999", "a:-1",
        "a:+1",       "a:1x",  "a: 1",  "a:00000000001", "::1:7600", "[]:1",    "unix:/tmp/a",
        "dns:///a:1", "[::1]", "[x]:1", "http://a:80",   "a b:1",    "[::1:7"};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_status st = moe_endpoint_check("--endpoint", bad[i]);
        print_message("%s\n", st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_ptr_equal(strstr(st.text, "--endpoint: '"), st.text);
        assert_non_null(strstr(st.text, "is not HOST:PORT"));
        assert_int_equal(moe_endpoint_check_listen("listen", bad[i]).code, MOE_INVALID_ARGUMENT);
    }
}

static void only_a_listener_may_leave_the_port_open(void **state)
{
    (void)state;
    assert_int_equal(moe_endpoint_check("--endpoint", "127.0.0.1:0").code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_endpoint_check_listen("listen", "127.0.0.1:0").code, MOE_OK);
}

static void addresses_of_the_own_host_are_known_however_they_are_written(void **state)
{
    static const char *const loopback[] = {
        "127.0.0.1:1",  "127.9.9.9:1",          "127.1:1",           "0x7f000001:1", "[::1]:1",
        "[0:0::0:1]:1", "[::ffff:127.0.0.1]:1", "[::ffff:7f00:1]:1", "localhost:1",  "LocalHost:1"};
    static const char *const wildcard[] = {
        "0.0.0.0:1", "0:1", "[::]:1", "[0::0]:1", "[::ffff:0.0.0.0]:1", "[::ffff:0:0]:1"};
    static const char *const other[] = {"192.0.2.1:1",  "[::2]:1",         "[::ffff:192.0.2.127]:1",
                                        "localhost1:1", "[2001:db8::1]:1", "127.0.0.1.example:1"};
    (void)state;
    for (size_t i = 0; i < sizeof loopback / sizeof *loopback; i++) {
        print_message("%s\n", loopback[i]);
        assert_int_equal(moe_endpoint_check("", loopback[i]).code, MOE_OK);
        assert_int_equal(moe_endpoint_check_loopback(loopback[i]).code, MOE_OK);
        assert_false(moe_endpoint_is_wildcard(loopback[i]));
    }
    for (size_t i = 0; i < sizeof wildcard / sizeof *wildcard; i++) {
        print_message("%s\n", wildcard[i]);
        assert_int_equal(moe_endpoint_check("", wildcard[i]).code, MOE_OK);
        assert_true(moe_endpoint_is_wildcard(wildcard[i]));
        assert_int_equal(moe_endpoint_check_loopback(wildcard[i]).code, MOE_INVALID_ARGUMENT);
    }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        print_message("%s\n", other[i]);
        assert_int_equal(moe_endpoint_check_loopback(other[i]).code, MOE_INVALID_ARGUMENT);
        assert_false(moe_endpoint_is_wildcard(other[i]));
    }
}

static void a_list_names_each_endpoint_once(void **state)
{
    static const char *const bad[] = {
        "", "a:1,", ",a:1", "a:1,b", "a:1,a:1", "a:1 ,b:1", "a:1,a:2,a:3,a:4,a:5,a:6,a:7,a:8,a:9"};
    struct moe_endpoints list;
    (void)state;
    assert_int_equal(moe_endpoints_parse("--etcd", "a:1,[::1]:2,b:3", &list).code, MOE_OK);
    assert_int_equal(list.count, 3);
    assert_string_equal(list.all[1], "[::1]:2");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_status st = moe_endpoints_parse("--etcd", bad[i], &list);
        print_message("%s\n", st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_int_equal(st.reason, MOE_REASON_CONFIG_INVALID);
        assert_ptr_equal(strstr(st.text, "--etcd: "), st.text);
    }
}

static void the_leader_is_tried_before_the_next_one(void **state)
{
    struct moe_endpoints list;
    (void)state;
    assert_int_equal(moe_endpoints_parse("", "a:1,b:2,c:3", &list).code, MOE_OK);
    const struct moe_status gone = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "see c:3");
    const struct moe_status named = moe_error(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, "it is c:3");
    const struct moe_status other = moe_error(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, "it is d:4");
    const struct moe_status none = moe_error(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, "no leader");
    assert_int_equal(moe_endpoints_next(&list, 0, &gone), 1);
    assert_int_equal(moe_endpoints_next(&list, 0, &named), 2);
    assert_int_equal(moe_endpoints_next(&list, 2, &named), 0); /* it has named itself */
    assert_int_equal(moe_endpoints_next(&list, 2, &other), 0);
    assert_int_equal(moe_endpoints_next(&list, 1, &none), 2);
    assert_string_equal(moe_endpoint_of_leader(&named), "c:3");
    assert_string_equal(moe_endpoint_of_leader(&none), "");
    assert_string_equal(moe_endpoint_of_leader(&gone), "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_and_port_are_taken),
        cmocka_unit_test(anything_else_is_refused_by_its_name),
        cmocka_unit_test(only_a_listener_may_leave_the_port_open),
        cmocka_unit_test(addresses_of_the_own_host_are_known_however_they_are_written),
        cmocka_unit_test(a_list_names_each_endpoint_once),
        cmocka_unit_test(the_leader_is_tried_before_the_next_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
