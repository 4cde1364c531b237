/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/base/memory: how much may still be taken, by the files of a made-up kernel. */
#include "base/memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

static char root[64];

/* `path` in the root, with the directories it needs. */
static void put(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *c = full + strlen(root) + 1; *c != '\0'; c++)
        if (*c == '/') {
            *c = '\0';
            (void)mkdir(full, 0777);
            *c = '/';
        }
    FILE *f = fopen(full, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static int make_root(void **state)
{
    (void)state;
    strcpy(root, "/tmp/moe-test-memory-XXXXXX");
    return mkdtemp(root) == NULL;
}

static int remove_root(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

static void without_a_group_the_host_says(void **state)
{
    (void)state;
    assert_int_equal(moe_available_memory_under(root), UINT64_MAX);
    put("/proc/meminfo",
        "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\nCached: 1 kB\n");
    assert_int_equal(moe_available_memory_under(root), 4000 * 1024);
    put("/proc/self/cgroup", "4:memory:/old\n");
    assert_int_equal(moe_available_memory_under(root), 4000 * 1024);
    put("/proc/self/cgroup", "4:memory:/old\n0::/a/b\n"); /* its files are not there */
    assert_int_equal(moe_available_memory_under(root), 4000 * 1024);
}

static void a_container_has_the_remaining_memory_of_its_group(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 4000 kB\n");
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "1000000\n");
    put("/sys/fs/cgroup/memory.current", "900000\n");
    assert_int_equal(moe_available_memory_under(root), 100000);
    put("/sys/fs/cgroup/memory.stat", "anon 500000\nfile 350000\ninactive_anon 7\nactive_anon "
                                      "8\ninactive_file 200000\nactive_file 100000\n");
    assert_int_equal(moe_available_memory_under(root), 400000);
    put("/sys/fs/cgroup/memory.current", "1500000\n"); /* max has been lowered */
    assert_int_equal(moe_available_memory_under(root), 0);
    put("/sys/fs/cgroup/memory.max", "max\n");
    assert_int_equal(moe_available_memory_under(root), 4000 * 1024);
}

static void the_tightest_group_on_the_way_up_counts(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 4000 kB\n");
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "50\n");
    put("/sys/fs/cgroup/a/memory.max", "3000\n");
    put("/sys/fs/cgroup/a/memory.current", "1000\n");
    put("/sys/fs/cgroup/memory.max", "9000\n");
    put("/sys/fs/cgroup/memory.current", "1000\n");
    assert_int_equal(moe_available_memory_under(root), 2000);
    put("/sys/fs/cgroup/a/b/memory.max", "60\n");
    assert_int_equal(moe_available_memory_under(root), 10);
    put("/sys/fs/cgroup/a/b/memory.max", "8000\n");
    put("/sys/fs/cgroup/memory.max", "1500\n");
    assert_int_equal(moe_available_memory_under(root), 500);
    put("/proc/meminfo", "MemAvailable: 0 kB\n");
    assert_int_equal(moe_available_memory_under(root), 0);
}

static void limits_are_distinct_from_the_free_memory_of_the_host(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 400 kB\n"); /* and more later */
    put("/proc/self/cgroup", "0::/a\n");
    assert_int_equal(moe_confined_memory_under(root), UINT64_MAX);
    put("/sys/fs/cgroup/a/memory.max", "9000000\n");
    put("/sys/fs/cgroup/a/memory.current", "1000000\n");
    assert_int_equal(moe_confined_memory_under(root), 8000000);
    assert_int_equal(moe_available_memory_under(root), 400 * 1024);
}

static void this_machine_has_some(void **state)
{
    (void)state;
    assert_true(moe_available_memory() > 0);
}

#define with_root(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_root(without_a_group_the_host_says),
        with_root(a_container_has_the_remaining_memory_of_its_group),
        with_root(the_tightest_group_on_the_way_up_counts),
        with_root(limits_are_distinct_from_the_free_memory_of_the_host),
        cmocka_unit_test(this_machine_has_some),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
