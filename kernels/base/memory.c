/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the kernel's figures of memory. An unreadable value is no limit. */
#include "base/memory.h"

#include "base/cgroup.h"

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The number after `key` in a file of lines "KEY NUMBER ..."; false if there is none. */
static bool read_entry(const char *path, const char *key, uint64_t *value)
{
    char line[256];
    size_t n = strlen(key);
    bool found = false;
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof line, f) != NULL)
        found = strncmp(line, key, n) == 0 && sscanf(line + n, " %" SCNu64, value) == 1;
    (void)fclose(f);
    return found;
}

static uint64_t host_bytes(const char *root)
{
    char path[2 * PATH_MAX];
    uint64_t kib;
    (void)snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!read_entry(path, "MemAvailable:", &kib) || kib > UINT64_MAX / 1024)
        return UINT64_MAX;
    return kib * 1024;
}

static bool read_number(const char *directory, const char *name, uint64_t *value)
{
    char line[64];
    return moe_cgroup_read_line(directory, name, line, sizeof line) &&
           sscanf(line, "%" SCNu64, value) == 1; /* not of "max" */
}

/* File cache, which the kernel counts as used by the group and reclaims before it kills. */
static uint64_t cached_bytes(const char *directory)
{
    char path[2 * PATH_MAX + 16];
    uint64_t active = 0, inactive = 0;
    (void)snprintf(path, sizeof path, "%s/memory.stat", directory);
    (void)read_entry(path, "active_file ", &active);
    (void)read_entry(path, "inactive_file ", &inactive);
    return active < UINT64_MAX - inactive ? active + inactive : 0;
}

/* moe_cgroup_fn; `ctx`: the minimum so far. */
static void look_at_group(void *ctx, const char *directory)
{
    uint64_t *least = ctx, most, used;
    if (!read_number(directory, "memory.max", &most) ||
        !read_number(directory, "memory.current", &used))
        return;
    uint64_t cached = cached_bytes(directory);
    used = used > cached ? used - cached : 0;
    uint64_t left = most > used ? most - used : 0;
    *least = left < *least ? left : *least;
}

uint64_t moe_confined_memory_under(const char *root)
{
    uint64_t least = UINT64_MAX;
    moe_cgroup_walk(root, look_at_group, &least);
    return least;
}

uint64_t moe_confined_memory(void)
{
    return moe_confined_memory_under("");
}

uint64_t moe_available_memory_under(const char *root)
{
    uint64_t host = host_bytes(root), confined = moe_confined_memory_under(root);
    return host < confined ? host : confined;
}

uint64_t moe_available_memory(void)
{
    return moe_available_memory_under("");
}
