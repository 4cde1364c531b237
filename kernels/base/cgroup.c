/* SPDX-License-Identifier: Apache-2.0 */
/* Walks the hierarchy of control groups; see cgroup.h. */
#include "base/cgroup.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { PATH_ROOM = 2 * PATH_MAX };

/* The path of the process's group in the hierarchy of version 2; false if it has none. */
static bool read_group(const char *root, char *group, size_t cap)
{
    char path[PATH_ROOM], line[PATH_MAX];
    bool found = false;
    (void)snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "0::/", 4) == 0) {
            line[strcspn(line, "\n")] = '\0';
            (void)snprintf(group, cap, "%s", line + 3);
            found = true;
        }
    (void)fclose(f);
    return found;
}

void moe_cgroup_walk(const char *root, moe_cgroup_fn visit, void *ctx)
{
    char group[PATH_MAX], path[PATH_ROOM];
    if (!read_group(root, group, sizeof group))
        return;
    size_t n = strlen(group); /* "/" is the root: visit it once */
    if (n > 0 && group[n - 1] == '/')
        group[n - 1] = '\0';
    for (char *end = group + strlen(group); end != NULL; end = strrchr(group, '/')) {
        *end = '\0';
        (void)snprintf(path, sizeof path, "%s/sys/fs/cgroup%s", root, group);
        visit(ctx, path);
    }
}

bool moe_cgroup_read_line(const char *directory, const char *name, char *line, size_t cap)
{
    char path[PATH_ROOM];
    (void)snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    bool got = fgets(line, (int)cap, f) != NULL;
    (void)fclose(f);
    return got;
}
