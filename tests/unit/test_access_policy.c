/* SPDX-License-Identifier: Apache-2.0 */
/* The policy table and the services agree: each RPC of the descriptor set has exactly one entry,
 * and each entry is an RPC. So a new method is denied until somebody decides who may call it, and
 * this test fails until then. */
#include "access/policy.h"
#include "proto/descriptors.h"
#include "rpc/wire.h"
#include "support/check.h"

#include <stdio.h>
#include <string.h>

enum { /* field numbers of descriptor.proto */
       SET_FILE = 1,
       FILE_PACKAGE = 2,
       FILE_SERVICE = 6,
       NAME = 1,
       SERVICE_METHOD = 2,
       METHODS_MAX = 256,
       PATH_BYTES = 256,
};

struct span {
    const uint8_t *bytes;
    size_t length;
};

static char paths[METHODS_MAX][PATH_BYTES];
static size_t path_count;

static bool next(struct span in, size_t *at, uint32_t number, struct span *out)
{
    struct moe_wire_field f;
    while (moe_wire_next(in.bytes, in.length, at, &f)) {
        if (f.number != number || f.type != MOE_WIRE_BYTES)
            continue;
        *out = (struct span){f.bytes, f.length};
        return true;
    }
    assert_int_equal(*at, in.length); /* not malformed */
    return false;
}

static struct span first(struct span in, uint32_t number)
{
    struct span found = {NULL, 0};
    size_t at = 0;
    assert_true(next(in, &at, number, &found));
    return found;
}

static void list_service(struct span package, struct span service)
{
    struct span name = first(service, NAME), method;
    for (size_t at = 0; next(service, &at, SERVICE_METHOD, &method);) {
        struct span rpc = first(method, NAME);
        assert_true(path_count < METHODS_MAX);
        int n = snprintf(paths[path_count++], PATH_BYTES, "/%.*s.%.*s/%.*s", (int)package.length,
                         (const char *)package.bytes, (int)name.length, (const char *)name.bytes,
                         (int)rpc.length, (const char *)rpc.bytes);
        assert_in_range(n, 1, PATH_BYTES - 1);
    }
}

static int list_methods(void **state)
{
    struct span set = {moe_proto_descriptors,
                       (size_t)(moe_proto_descriptors_end - moe_proto_descriptors)};
    struct span file, service;
    (void)state;
    for (size_t at = 0; next(set, &at, SET_FILE, &file);) {
        struct span package = first(file, FILE_PACKAGE);
        for (size_t in = 0; next(file, &in, FILE_SERVICE, &service);)
            list_service(package, service);
    }
    return 0;
}

static void each_rpc_has_an_entry(void **state)
{
    (void)state;
    assert_true(path_count >= 25);
    for (size_t i = 0; i < path_count; i++)
        if (moe_access_policy_find(paths[i]) == NULL)
            fail_msg("%s has no entry in daemon/access/policy.c", paths[i]);
}

static void each_entry_is_an_rpc_and_stands_once(void **state)
{
    const struct moe_access_policy *p;
    size_t entries = 0;
    (void)state;
    for (; (p = moe_access_policy_at(entries)) != NULL; entries++) {
        bool served = false;
        for (size_t i = 0; i < path_count; i++)
            served = served || strcmp(paths[i], p->path) == 0;
        if (!served)
            fail_msg("%s is no method of any service", p->path);
        assert_ptr_equal(moe_access_policy_find(p->path), p);
        assert_true(p->roles != 0 && (p->roles & ~MOE_ROLES_ALL) == 0);
    }
    print_message("%zu methods\n", entries);
    assert_int_equal(entries, path_count);
}

/* Calls that change the group or its training never go to clients, scrapers or peers. */
static void changes_need_a_trainer_or_an_admin_and_are_audited(void **state)
{
    const struct moe_access_policy *p;
    (void)state;
    for (size_t i = 0; (p = moe_access_policy_at(i)) != NULL; i++) {
        if (p->audited)
            assert_int_equal(p->roles & ~(uint32_t)(MOE_ROLE_TRAINER | MOE_ROLE_ADMIN), 0);
        assert_false(p->public && strncmp(p->path, "/grpc.health.", 13) != 0);
    }
}

/* A new method of these services is recorded, unless its name says that it only reads. Backward is
 * part of each training step, and changes gradients only. */
static bool needs_record(const char *path)
{
    static const char *const services[] = {"/moe.v1.AdminService/", "/moe.v1.TrainingService/"};
    for (size_t i = 0; i < sizeof services / sizeof *services; i++) {
        size_t length = strlen(services[i]);
        if (strncmp(path, services[i], length) == 0)
            return strncmp(path + length, "Get", 3) != 0 &&
                   strncmp(path + length, "List", 4) != 0 && strcmp(path + length, "Backward") != 0;
    }
    return false;
}

static void all_changes_by_operators_and_trainers_are_audited(void **state)
{
    size_t recorded = 0;
    (void)state;
    for (size_t i = 0; i < path_count; i++) {
        const struct moe_access_policy *p = moe_access_policy_find(paths[i]);
        assert_non_null(p);
        if (p->audited != needs_record(paths[i]))
            fail_msg("%s: audited is %d", paths[i], p->audited);
        recorded += p->audited;
    }
    print_message("%zu of %zu methods are recorded\n", recorded, path_count);
    assert_true(recorded >= 8);
}

static void an_unknown_method_has_no_entry(void **state)
{
    static const char *const unknown[] = {"",
                                          "/",
                                          "Forward",
                                          "/moe.v1.ExpertService/forward",
                                          "/moe.v1.ExpertService/Forward/",
                                          "/moe.v1.AdminService/Reset"};
    (void)state;
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_null(moe_access_policy_find(unknown[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rpc_has_an_entry),
        cmocka_unit_test(each_entry_is_an_rpc_and_stands_once),
        cmocka_unit_test(changes_need_a_trainer_or_an_admin_and_are_audited),
        cmocka_unit_test(all_changes_by_operators_and_trainers_are_audited),
        cmocka_unit_test(an_unknown_method_has_no_entry),
    };
    return cmocka_run_group_tests(tests, list_methods, NULL);
}
