/* SPDX-License-Identifier: Apache-2.0 */
/* The control group (version 2) of this process and the groups above it. The limits of each apply
 * to the process. */
#ifndef MOE_BASE_CGROUP_H
#define MOE_BASE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

/* `directory`: of a group in the file system of control groups; borrowed. */
typedef void (*moe_cgroup_fn)(void *ctx, const char *directory);

/* Calls `visit` for the process's group, then for each one above it up to the root (in a container:
 * the container's root). Does nothing without control groups of version 2. `root` is a prefix for
 * the paths of /proc and /sys: "" except in tests. */
void moe_cgroup_walk(const char *root, moe_cgroup_fn visit, void *ctx);

/* First line of `directory`/`name`; false if there is none. */
bool moe_cgroup_read_line(const char *directory, const char *name, char *line, size_t cap);

#endif
