/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the group simulator; see simulation/world.h.
 *
 *   group_sim [--seeds N] [--first S] [--jobs J]   N runs from seed S on J processes
 *   group_sim --seed S [--off GUARD]               one run, printed event by event
 *   group_sim --guards [--seeds N] [--jobs J]      each guard switched off is found within N seeds
 */
#include "base/guard.h"
#include "simulation/world.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const struct {
    const char *name, *promise;
} guards[] = {
#define X(name, promise) {#name, promise},
#include "simulation/guards.h"
#undef X
};

static int off = -1; /* the guard that is switched off */

bool moe_guard_is_off(enum moe_guard guard)
{
    return (int)guard == off;
}

/* ------------------------------------------------------------------------- many runs */

enum { JOBS_MAX = 64, WHY = 512 };

struct result { /* of one process, in memory that all share */
    struct totals totals;
    uint64_t runs, failed_seed;
    bool failed;
    char why[WHY];
};

static void run_stripe(struct result *r, uint64_t first, uint64_t count, unsigned step,
                       const volatile bool *stop)
{
    for (uint64_t i = 0; i < count && !*stop && !r->failed; i += step) {
        r->failed_seed = first + i; /* should the run not come back */
        r->failed = !run_world(first + i, false, &r->totals, r->why, sizeof r->why);
        r->runs++;
    }
}

struct shared {
    bool stop;
    struct result results[JOBS_MAX];
};

static void wait_for_stripe(struct shared *s, unsigned i, pid_t pid)
{
    int status;
    struct result *r = &s->results[i];
    if (waitpid(pid, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        r->failed = true;
        if (r->why[0] == '\0')
            snprintf(r->why, sizeof r->why, "the run did not come back: an invariant of the code");
    }
    s->stop = s->stop || r->failed;
}

/* The first failure, or all that was seen. */
static struct result run_many(uint64_t first, uint64_t count, unsigned jobs)
{
    struct shared *s =
        mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[JOBS_MAX];
    struct result all = {0};
    if (s == MAP_FAILED)
        abort();
    fflush(stdout);
    for (unsigned i = 0; i < jobs; i++) {
        pids[i] = fork();
        if (pids[i] != 0)
            continue;
        if (off >= 0 && freopen("/dev/null", "w", stderr) == NULL)
            _exit(1);
        run_stripe(&s->results[i], first + i, count > i ? count - i : 0, jobs, &s->stop);
        s->stop = s->stop || s->results[i].failed;
        _exit(0);
    }
    for (unsigned i = 0; i < jobs; i++)
        wait_for_stripe(s, i, pids[i]);
    for (unsigned i = 0; i < jobs; i++) {
        const struct result *r = &s->results[i];
        uint64_t *to = (uint64_t *)&all.totals;
        const uint64_t *from = (const uint64_t *)&r->totals;
        for (size_t n = 0; n < sizeof all.totals / sizeof *to; n++)
            to[n] += from[n];
        all.runs += r->runs;
        if (!r->failed || (all.failed && all.failed_seed < r->failed_seed))
            continue;
        all.failed = true;
        all.failed_seed = r->failed_seed;
        memcpy(all.why, r->why, sizeof all.why);
    }
    munmap(s, sizeof *s);
    return all;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void print_totals(const struct result *r, double took)
{
    const double n = r->runs > 0 ? (double)r->runs : 1;
    const struct totals *t = &r->totals;
    printf(
        "%" PRIu64 " seeds in %.1f s. Of each, on average: %.0f inputs, %.2f crashes, %.2f lost "
        "links, %.1f views (%.2f of fewer slots),\n  %.2f recoveries, %.2f times without gradients "
        "or a call, %.2f slots that joined (%.2f had read ahead), %.2f that finished a call, %.1f "
        "answers, %.1f repeats, %.1f jobs, %.2f of "
        "them without a copy, %.2f called off, %.2f orphans\n",
        r->runs, took, (double)t->inputs / n, (double)t->crashes / n, (double)t->links / n,
        (double)t->views / n, (double)t->smaller_views / n, (double)t->restarts / n,
        (double)t->lost_gradients / n, (double)t->joins / n, (double)t->joins_ahead / n,
        (double)t->finished / n, (double)t->answers / n, (double)t->repeats / n,
        (double)t->jobs / n, (double)t->without_copy / n, (double)t->called_off / n,
        (double)t->orphans / n);
}

static int run_all(uint64_t first, uint64_t count, unsigned jobs)
{
    enum { INPUTS_MIN = 500, CRASHES_MIN = 1, COUNTS_FROM = 1000 };
    double begun = seconds();
    struct result r = run_many(first, count, jobs);
    print_totals(&r, seconds() - begun);
    if (r.failed) {
        printf("seed %" PRIu64 ": %s\nreplay: group_sim --seed %" PRIu64 "\n", r.failed_seed, r.why,
               r.failed_seed);
        return 1;
    }
    if (r.runs < COUNTS_FROM)
        return 0;
    bool enough =
        r.totals.inputs >= r.runs * INPUTS_MIN && r.totals.crashes >= r.runs * CRASHES_MIN;
    if (!enough)
        printf("too little happens: %d inputs and %d crash of each seed are wanted\n", INPUTS_MIN,
               CRASHES_MIN);
    return enough ? 0 : 1;
}

static int run_guards(uint64_t first, uint64_t count, unsigned jobs)
{
    int missed = 0;
    for (off = 0; off < MOE_GUARD_COUNT; off++) {
        struct result r = run_many(first, count, jobs);
        missed += !r.failed;
        if (r.failed)
            printf("%-28s found after %6" PRIu64 " seeds: %s\n", guards[off].name, r.runs, r.why);
        else
            printf("%-28s NOT FOUND in %" PRIu64 " seeds: %s\n", guards[off].name, r.runs,
                   guards[off].promise);
        if (r.failed)
            printf("%-28s   group_sim --seed %" PRIu64 " --off %s\n", "", r.failed_seed,
                   guards[off].name);
    }
    printf("%d guards, %d not found\n", MOE_GUARD_COUNT, missed);
    return missed == 0 ? 0 : 1;
}

static int run_one(uint64_t seed)
{
    struct result r = {0};
    bool good = run_world(seed, true, &r.totals, r.why, sizeof r.why);
    r.runs = 1;
    print_totals(&r, 0);
    printf("seed %" PRIu64 ": %s\n", seed, good ? "all promises held" : r.why);
    return good ? 0 : 1;
}

static int find_guard(const char *name)
{
    for (int i = 0; i < MOE_GUARD_COUNT; i++)
        if (strcmp(guards[i].name, name) == 0)
            return i;
    fprintf(stderr, "group_sim: no guard %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seeds", required_argument, NULL, 'n'},
                                            {"first", required_argument, NULL, 'f'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"jobs", required_argument, NULL, 'j'},
                                            {"off", required_argument, NULL, 'o'},
                                            {"guards", no_argument, NULL, 'g'},
                                            {NULL, 0, NULL, 0}};
    uint64_t seeds = 2000, first = 1, seed = 0;
    unsigned long jobs = 1;
    bool one = false, all_guards = false;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'n': seeds = strtoull(optarg, NULL, 10); break;
        case 'f': first = strtoull(optarg, NULL, 10); break;
        case 's':
            seed = strtoull(optarg, NULL, 10);
            one = true;
            break;
        case 'j': jobs = strtoul(optarg, NULL, 10); break;
        case 'o': off = find_guard(optarg); break;
        case 'g': all_guards = true; break;
        default: return 2;
        }
    }
    if (jobs < 1 || jobs > JOBS_MAX)
        return 2;
    if (one)
        return run_one(seed);
    return all_guards ? run_guards(first, seeds, (unsigned)jobs)
                      : run_all(first, seeds, (unsigned)jobs);
}
