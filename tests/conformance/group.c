/* SPDX-License-Identifier: Apache-2.0 */
/* Forking, waiting and the shared board; see group.h. */
#include "group.h"

#include "base/clock.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_SETTINGS = 4 };

struct moe_backend_setting group_settings[MAX_SETTINGS + 1];
uint32_t group_domain_size;

void group_set(const struct moe_backend *backend, const char *option, const char *value)
{
    const struct moe_backend_option *o = backend->options;
    while (o != NULL && o->name != NULL && strcmp(o->name, option) != 0)
        o++;
    if (o == NULL || o->name == NULL)
        return;
    size_t count = 0;
    while (group_settings[count].name != NULL)
        count++;
    MOE_INVARIANT(count < MAX_SETTINGS);
    group_settings[count] = (struct moe_backend_setting){o->name, value};
}

/* ------------------------------------------------------------------------ hosts */

static struct moe_session_host hosts[MOE_MAX_SLOTS]; /* of slots; id: the namespace */
static bool have_hosts;
static uint32_t host_count;

static void read_hosts(uint32_t slots)
{
    struct moe_session_host named[MOE_MAX_SLOTS] = {0};
    const char *at = getenv("MOE_TEST_HOSTS");
    uint32_t count = 0;
    have_hosts = at != NULL && at[0] != '\0';
    for (; have_hosts && *at != '\0'; count++) {
        int used = 0;
        MOE_INVARIANT(count < MOE_MAX_SLOTS);
        MOE_INVARIANT(
            sscanf(at, "%79[^=,]=%47[^,]%n", named[count].id, named[count].address, &used) == 2);
        at += used;
        at += *at == ',';
    }
    host_count = count;
    for (uint32_t s = 0; have_hosts && s < slots; s++)
        hosts[s] = named[s * count / slots];
}

bool group_has_hosts(void)
{
    return have_hosts || group_domain_size != 0;
}

uint32_t group_slots_of_host(const struct member *m)
{
    uint32_t size = have_hosts ? (m->slots + host_count - 1) / host_count : group_domain_size;
    return size != 0 && size < m->slots ? size : 1;
}

/* In a new process, before it has threads. */
static void enter_host(uint32_t slot)
{
    char path[128];
    (void)snprintf(path, sizeof path, "/var/run/netns/%s", hosts[slot].id);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    MOE_INVARIANT(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
}

/* ------------------------------------------------------------------------ group */

void group_start(struct group *g, uint32_t slots, int (*fn)(struct member *), void *ctx)
{
    *g = (struct group){.slots = slots};
    g->board =
        mmap(NULL, sizeof *g->board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MOE_INVARIANT(g->board != MAP_FAILED);
    g->board->gather_ms = 60000 + 1000 * slots; /* many of them may open one device */
    struct moe_status st = moe_backends_prepare(NULL, NULL);
    MOE_INVARIANT(!moe_failed(&st));
    read_hosts(slots);
    fflush(NULL); /* or every member would print the buffer again */
    for (uint32_t s = 0; s < slots; s++) {
        g->pid[s] = fork();
        MOE_INVARIANT(g->pid[s] >= 0);
        if (g->pid[s] > 0)
            continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (have_hosts)
            enter_host(s);
        struct member m = {.board = g->board,
                           .slot = s,
                           .slots = slots,
                           .live = UINT64_MAX >> (64 - slots),
                           .ctx = ctx};
        int rc = fn(&m);
        if (rc != 0)
            __atomic_store_n(&g->board->failed, 1, __ATOMIC_RELEASE);
        exit(rc); /* not _exit: exit reports leaks */
    }
}

static bool reap(struct group *g, int status[MOE_MAX_SLOTS])
{
    bool left = false;
    for (uint32_t s = 0; s < g->slots; s++) {
        if (g->pid[s] > 0 && waitpid(g->pid[s], &status[s], WNOHANG) == g->pid[s])
            g->pid[s] = 0;
        left = left || g->pid[s] > 0;
    }
    return !left;
}

bool group_finish(struct group *g, uint32_t seconds, int status[MOE_MAX_SLOTS])
{
    uint64_t deadline = moe_clock_ns() + seconds * MOE_NS_PER_S;
    while (!reap(g, status)) {
        if (moe_clock_ns() > deadline) {
            fprintf(stderr, "members still run after %u s: killed\n", seconds);
            for (uint32_t s = 0; s < g->slots; s++)
                if (g->pid[s] > 0)
                    kill(g->pid[s], SIGKILL);
            deadline = MOE_NEVER;
        }
        usleep(2000);
    }
    bool good = true;
    for (uint32_t s = 0; s < g->slots; s++)
        good = good && WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0;
    munmap(g->board, sizeof *g->board);
    return good;
}

bool board_barrier(struct member *m, uint32_t ms)
{
    struct board *b = m->board;
    uint64_t deadline = moe_clock_ns() + ms * MOE_NS_PER_MS;
    uint32_t generation = __atomic_load_n(&b->generation, __ATOMIC_ACQUIRE);
    uint32_t all = (uint32_t)__builtin_popcountll(m->live);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == all) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELEASE);
        __atomic_fetch_add(&b->generation, 1, __ATOMIC_ACQ_REL);
        return true;
    }
    for (uint32_t tries = 0;; tries++) {
        if (__atomic_load_n(&b->generation, __ATOMIC_ACQUIRE) != generation)
            return true;
        if (__atomic_load_n(&b->failed, __ATOMIC_ACQUIRE) || moe_clock_ns() > deadline)
            return false;
        if (tries < 1000)
            sched_yield();
        else
            usleep(200);
    }
}

struct moe_status board_allgather(void *ctx, const void *mine, void *all, size_t bytes)
{
    struct member *m = ctx;
    struct board *b = m->board;
    if (bytes > BOARD_BLOB)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "blob of %zu bytes", bytes);
    memcpy(b->blob[m->slot], mine, bytes);
    if (!board_barrier(m, b->gather_ms))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "not all members gathered");
    memset(all, 0, bytes * m->slots);
    for (uint32_t s = 0; s < m->slots; s++)
        if (m->live >> s & 1)
            memcpy((uint8_t *)all + s * bytes, b->blob[s], bytes);
    if (!board_barrier(m, b->gather_ms))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "not all members gathered");
    return moe_ok();
}

struct moe_session_config member_session(struct member *m, uint64_t epoch, uint32_t budget_ms)
{
    return (struct moe_session_config){.slot = m->slot,
                                       .slots = m->slots,
                                       .live = m->live,
                                       .epoch = epoch,
                                       .max_tokens = 512,
                                       .max_hidden = 600,
                                       .max_top_k = MOE_COMMON_TOP_K,
                                       .max_experts = 64,
                                       .wait_budget_ms = budget_ms,
                                       .settings = group_settings,
                                       .domain_size = group_domain_size,
                                       .hosts = have_hosts ? hosts : NULL,
                                       .allgather = board_allgather,
                                       .allgather_ctx = m};
}
