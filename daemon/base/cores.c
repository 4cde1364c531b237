/* Reads the affinity mask and the control group's quota; see cores.h. What cannot be read does not
 * confine. */
#include "base/cores.h"

#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

uint32_t moe_cores_of_quota(const char *cpu_max)
{
    uint64_t quota = 0, period = 0;
    if (sscanf(cpu_max, "%" SCNu64 " %" SCNu64, &quota, &period) != 2 || quota == 0 || period == 0)
        return UINT32_MAX;
    uint64_t cores = (quota - 1) / period + 1;
    return cores < UINT32_MAX ? (uint32_t)cores : UINT32_MAX;
}

static uint32_t affinity_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1; /* more than CPU_SETSIZE processors, or forbidden */
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

/* False when there is no such file. */
static int read_line(const char *path, char *line, int cap)
{
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return 0;
    int got = fgets(line, cap, f) != NULL;
    (void)fclose(f);
    return got;
}

/* The path of the process's group in the one hierarchy of version 2; "" when it is in none. */
static void read_group(char *group, size_t cap)
{
    char line[PATH_MAX];
    FILE *f = fopen("/proc/self/cgroup", "re");
    group[0] = '\0';
    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "0::/", 4) == 0) {
            line[strcspn(line, "\n")] = '\0';
            (void)snprintf(group, cap, "%s", line + 3);
        }
    (void)fclose(f);
}

static uint32_t quota_cores(void)
{
    char group[PATH_MAX], path[PATH_MAX + 64], line[64];
    uint32_t cores = UINT32_MAX;
    read_group(group, sizeof group);
    /* From the own group up to the root, which inside a container is the container's. */
    for (char *end = group + strlen(group); end != NULL; end = strrchr(group, '/')) {
        *end = '\0';
        (void)snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        if (!read_line(path, line, sizeof line))
            continue;
        uint32_t here = moe_cores_of_quota(line);
        cores = here < cores ? here : cores;
    }
    return cores;
}

uint32_t moe_usable_cores(void)
{
    uint32_t mask = affinity_cores(), quota = quota_cores();
    return quota < mask ? quota : mask;
}
