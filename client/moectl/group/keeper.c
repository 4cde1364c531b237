/* SPDX-License-Identifier: Apache-2.0 */
/* See keeper.h. */
#include "moectl/group/keeper.h"

#include "base/clock.h"
#include "base/restart.h"

static const char advice[] = "end the program that listens on its port";

struct life {
    uint64_t started_ns;
    uint64_t due_ns; /* of the next start; MOE_NEVER: it runs */
    uint32_t ends;   /* in a row */
};

struct keeper {
    struct moectl_daemons *daemons;
    struct moectl_group *group;
    int directory;
    struct life lives[MOECTL_PROCESSES_MAX];
};

/* A worker that leaves in order comes back later than one that dies. If somebody ends the group,
 * the coordinator leaves meanwhile. */
static const uint64_t after_leaving_ns = MOE_NS_PER_S;

/* Plans new starts of daemons that have ended. False if the coordinator has exited with 0: somebody
 * has ended the group. */
static bool plan(struct keeper *k)
{
    uint64_t now = moe_clock_ns();
    for (size_t i = 0; i < k->daemons->count; i++) {
        const struct moectl_daemon *daemon = &k->daemons->all[i];
        struct life *life = &k->lives[i];
        if (daemon->running || life->due_ns != MOE_NEVER)
            continue;
        bool left = daemon->wait_status == 0;
        if (left && i == MOECTL_COORDINATOR)
            return false;
        uint64_t wait = moe_restart_wait_ns(&life->ends, now - life->started_ns);
        if (left && wait < after_leaving_ns)
            wait = after_leaving_ns;
        life->due_ns = now + wait;
        if (left)
            continue;
        moectl_daemons_report(daemon, advice);
        moectl_say("%s starts again in %.1f s", daemon->process.name,
                   (double)wait / (double)MOE_NS_PER_S);
    }
    return true;
}

static void start(struct keeper *k, size_t i)
{
    struct moectl_daemon *daemon = &k->daemons->all[i];
    struct life *life = &k->lives[i];
    if (daemon->wait_status == 0)
        moectl_say("%s has left and starts again", daemon->process.name);
    life->started_ns = moe_clock_ns();
    struct moe_status st = moectl_daemons_restart(k->daemons, i);
    life->due_ns = MOE_NEVER;
    if (moe_failed(&st)) {
        moectl_say("%s", st.text);
        life->due_ns = life->started_ns + moe_restart_wait_ns(&life->ends, 0);
    }
    k->group->processes[i].pid = daemon->process.pid;
}

/* False if a `moectl down` is at work. A state directory that cannot be locked, as one that is
 * gone, does not keep daemons from their start: no `down` can lock it either. */
static bool lock_changes(const struct keeper *k, uint64_t now, int *lock)
{
    struct moe_status st =
        moectl_state_lock_changes(k->directory, MOECTL_CHANGE_REPLACE, now, lock);
    if (moe_failed(&st) && st.code != MOE_DEADLINE_EXCEEDED)
        moectl_say("%s", st.text);
    return st.code != MOE_DEADLINE_EXCEEDED;
}

/* Starts those that are due. False if a `moectl down` is at work. */
static bool start_due(struct keeper *k)
{
    uint64_t now = moe_clock_ns();
    int lock = -1;
    bool any = false;
    for (size_t i = 0; i < k->daemons->count; i++) {
        if (k->lives[i].due_ns > now)
            continue;
        if (!any && !lock_changes(k, now, &lock))
            return false;
        any = true;
        start(k, i);
    }
    if (!any)
        return true;
    struct moe_status st = moectl_state_write(k->directory, k->group);
    if (moe_failed(&st))
        moectl_say("group.json is not up to date: %s", st.text);
    moectl_state_unlock_changes(lock);
    return true;
}

static uint64_t next_due(const struct keeper *k)
{
    uint64_t due = MOE_NEVER;
    for (size_t i = 0; i < k->daemons->count; i++)
        due = moe_earlier(due, k->lives[i].due_ns);
    return due;
}

static enum moectl_kept keep(struct keeper *k)
{
    for (;;) {
        if (!plan(k) || !start_due(k))
            return MOECTL_KEPT_ENDED;
        if (moectl_daemons_wait(k->daemons, next_due(k)) == MOECTL_EVENT_STOP)
            return MOECTL_KEPT_STOP;
    }
}

enum moectl_kept moectl_keep(struct moectl_daemons *d, int directory, struct moectl_group *group)
{
    struct keeper k = {.daemons = d, .group = group, .directory = directory};
    uint64_t now = moe_clock_ns();
    for (size_t i = 0; i < MOECTL_PROCESSES_MAX; i++)
        k.lives[i] = (struct life){.started_ns = now, .due_ns = MOE_NEVER};
    d->keep_logs = true;
    enum moectl_kept why = keep(&k);
    /* No failures: those that wait for a start, and those that died as the signal to stop came. */
    for (size_t i = 0; i < d->count; i++)
        if (k.lives[i].due_ns != MOE_NEVER || (why == MOECTL_KEPT_STOP && !d->all[i].running))
            d->all[i].wait_status = 0;
    return why;
}
