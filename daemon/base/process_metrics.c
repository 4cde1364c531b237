/* SPDX-License-Identifier: Apache-2.0 */
/* Figures come from /proc/self/stat (proc(5)), the list of descriptors and getrlimit. */
#include "daemon/process_metrics.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { STAT_BYTES = 1024 };

/* What /proc/self/stat says. */
struct process_stat {
    uint64_t user_ticks, system_ticks, threads, start_ticks, virtual_bytes, resident_pages;
};

static bool read_file(const char *path, char *text, size_t size)
{
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    size_t n = fread(text, 1, size - 1, f);
    (void)fclose(f);
    text[n] = '\0';
    return n > 0;
}

static bool read_stat(struct process_stat *out)
{
    char text[STAT_BYTES];
    if (!read_file("/proc/self/stat", text, sizeof text))
        return false;
    const char *at = strrchr(text, ')'); /* the name before it may contain anything */
    /* Fields 3 to 24; those between are not needed. */
    return at != NULL && sscanf(at + 1,
                                " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %" SCNu64 " %" SCNu64
                                " %*d %*d %*d %*d %" SCNu64 " %*d %" SCNu64 " %" SCNu64 " %" SCNu64,
                                &out->user_ticks, &out->system_ticks, &out->threads,
                                &out->start_ticks, &out->virtual_bytes, &out->resident_pages) == 6;
}

/* Seconds since 1970 at which this host started; 0 if that is not known. */
static double boot_time(void)
{
    char line[256];
    uint64_t seconds = 0;
    FILE *f = fopen("/proc/stat", "re");
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "btime %" SCNu64, &seconds) == 1)
            break;
    (void)fclose(f);
    return (double)seconds;
}

/* Without the descriptor that reads the list. */
static bool count_descriptors(unsigned *out)
{
    DIR *list = opendir("/proc/self/fd");
    if (list == NULL)
        return false;
    unsigned entries = 0;
    while (readdir(list) != NULL)
        entries++;
    (void)closedir(list);
    *out = entries > 3 ? entries - 3 : 0; /* ".", ".." and the list */
    return true;
}

static void collect(void *ctx)
{
    struct moe_process_metrics *m = ctx;
    struct process_stat p;
    struct rlimit files;
    unsigned descriptors;
    double ticks = (double)sysconf(_SC_CLK_TCK);
    if (read_stat(&p)) {
        moe_gauge_set(m->cpu_seconds, (double)(p.user_ticks + p.system_ticks) / ticks);
        moe_gauge_set(m->resident, (double)p.resident_pages * (double)sysconf(_SC_PAGESIZE));
        moe_gauge_set(m->virtual, (double)p.virtual_bytes);
        moe_gauge_set(m->threads, (double)p.threads);
        if (!(moe_gauge_value(m->start) > 0))
            moe_gauge_set(m->start, boot_time() + (double)p.start_ticks / ticks);
    }
    if (count_descriptors(&descriptors))
        moe_gauge_set(m->open_fds, descriptors);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        moe_gauge_set(m->max_fds, (double)files.rlim_cur);
}

struct moe_status moe_process_metrics_add(struct moe_metrics *m, struct moe_process_metrics *p)
{
    const struct {
        const char *name, *help;
        struct moe_gauge **out;
    } gauges[] = {
        {"process_resident_memory_bytes", "Resident memory of this process.", &p->resident},
        {"process_virtual_memory_bytes", "Virtual memory of this process.", &p->virtual},
        {"process_open_fds", "Open file descriptors of this process.", &p->open_fds},
        {"process_max_fds", "Limit of open file descriptors.", &p->max_fds},
        {"process_threads", "Threads of this process.", &p->threads},
        {"process_start_time_seconds", "Start of this process in seconds since 1970.", &p->start},
    };
    const struct moe_metric_desc cpu = {.name = "process_cpu_seconds_total",
                                        .help = "Processor time of this process, user and system."};
    MOE_TRY(moe_metrics_add_set_counter(m, &cpu, &p->cpu_seconds));
    for (size_t i = 0; i < sizeof gauges / sizeof *gauges; i++) {
        const struct moe_metric_desc desc = {.name = gauges[i].name, .help = gauges[i].help};
        MOE_TRY(moe_metrics_add_gauge(m, &desc, gauges[i].out));
    }
    return moe_metrics_add_collector(m, collect, p);
}
