/* The control group (version 2) that this process is in, with those above it: what any of them
 * limits, limits the process. */
#ifndef MOE_BASE_CGROUP_H
#define MOE_BASE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

/* `directory` is a group's, in the file system of control groups; borrowed. */
typedef void (*moe_cgroup_fn)(void *ctx, const char *directory);

/* Calls `visit` for the process's own group, the one above it, and so on up to the root, which
 * inside a container is the container's; not at all where there is none of version 2. `root` goes
 * before the paths of /proc and /sys: "" but in tests. */
void moe_cgroup_walk(const char *root, moe_cgroup_fn visit, void *ctx);

/* First line of `directory`/`name`; false when there is none. */
bool moe_cgroup_read_line(const char *directory, const char *name, char *line, size_t cap);

#endif
