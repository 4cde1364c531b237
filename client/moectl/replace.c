/* SPDX-License-Identifier: Apache-2.0 */
/* moectl replace: restarts daemons of the local group that have died, with their command lines from
 * group.json. It does not know what the daemons do.
 *
 * A dying daemon still has its process and its port, so replace waits for its end. It also waits
 * for a worker that runs although the coordinator reports its slot as empty: the worker ends, or it
 * reconnects. */
#include "commands.h"
#include "moectl/group/daemons.h"
#include "moectl/group/process.h"
#include "moectl/group/slots.h"

#include "base/clock.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { POLL_MS = 50, KILL_LIMIT_MS = 5000 };

struct replace {
    struct moectl_common common;
    char state_path[MOECTL_PATH_MAX];
    int directory, lock, change_lock;
    struct moectl_group group;
    struct moectl_daemons daemons;
    size_t places[MOECTL_PROCESSES_MAX]; /* indices in `group` of the daemons that we started */
    bool refused[MOECTL_PROCESSES_MAX];  /* [index in `group`] its slot is cordoned */
};

static struct moe_status start(struct replace *r, size_t place)
{
    const struct moectl_process *p = &r->group.processes[place];
    const char *argv[MOECTL_ARGUMENTS_MAX + 3];
    if (p->command == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "group.json has no command line of %s: an older release wrote it",
                         p->name);
    moectl_daemons_command(p, argv);
    r->places[r->daemons.count] = place;
    return moectl_daemons_start(&r->daemons, p->name, argv[0], argv);
}

static struct moe_status report_ended(const struct replace *r)
{
    for (size_t i = 0; i < r->daemons.count; i++)
        if (!r->daemons.all[i].running)
            moectl_daemons_report(&r->daemons.all[i],
                                  "end the program that listens on its port, then repeat "
                                  "`moectl replace`; another port needs a new group");
    return moe_error(MOE_UNKNOWN, MOE_REASON_NONE, "a daemon ended at its start");
}

/* Waits until all that we started have reported their endpoints. */
static struct moe_status await_ready(struct replace *r, uint64_t deadline_ns)
{
    for (size_t i = 0; i < r->daemons.count;) {
        if (r->daemons.all[i].process.endpoint[0] != '\0') {
            i++;
            continue;
        }
        switch (moectl_daemons_wait(&r->daemons, deadline_ns)) {
        case MOECTL_EVENT_READY: break;
        case MOECTL_EVENT_STOP: return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "interrupted");
        case MOECTL_EVENT_TIME:
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                             "%s did not listen within the time limit",
                             r->daemons.all[i].process.name);
        case MOECTL_EVENT_ENDED: return report_ended(r);
        }
    }
    return moe_ok();
}

/* Writes the daemons that run into group.json, also after a failure. */
static struct moe_status record(struct replace *r)
{
    for (size_t i = 0; i < r->daemons.count; i++) {
        struct moectl_process *p = &r->group.processes[r->places[i]];
        const struct moectl_daemon *daemon = &r->daemons.all[i];
        if (!daemon->running)
            continue;
        p->pid = daemon->process.pid;
        if (daemon->process.endpoint[0] != '\0')
            memcpy(p->endpoint, daemon->process.endpoint, sizeof p->endpoint);
    }
    return moectl_state_write(r->directory, &r->group);
}

static bool is_ours(const struct replace *r, size_t place)
{
    for (size_t i = 0; i < r->daemons.count; i++)
        if (r->places[i] == place)
            return true;
    return false;
}

/* A worker of a cordoned slot would get no slot. */
static bool refuses(struct replace *r, size_t place)
{
    struct moectl_slots slots;
    if (place > 0 && !r->refused[place] && moectl_slots_ask(&r->group, &slots))
        r->refused[place] = slots.cordoned[place];
    return r->refused[place];
}

/* The coordinator is first, because workers connect to it: none starts while it is about to end. */
static struct moe_status start_ended(struct replace *r, uint64_t deadline_ns)
{
    for (size_t i = 0; i < r->group.count; i++) {
        enum moectl_process_state state =
            is_ours(r, i) ? MOECTL_PROCESS_RUNS : moectl_process_state(&r->group, i);
        if (i == MOECTL_COORDINATOR && state == MOECTL_PROCESS_ENDING)
            return moe_ok();
        if (state != MOECTL_PROCESS_ENDED || refuses(r, i))
            continue;
        if (r->daemons.count == 0) /* without a record, start nothing */
            MOE_TRY(moectl_state_write(r->directory, &r->group));
        moectl_say("starting %s again", r->group.processes[i].name);
        MOE_TRY(start(r, i));
        MOE_TRY(await_ready(r, deadline_ns));
    }
    return moe_ok();
}

/* Marks in `awaited` the daemons to wait for, and reports each once. Does not ask a coordinator
 * that we started, because it does not know its workers yet. Without an answer, the marks stay. */
static struct moe_status find_awaited(struct replace *r, bool awaited[MOECTL_PROCESSES_MAX])
{
    struct moectl_slots slots;
    bool ask = !is_ours(r, 0) && moectl_process_state(&r->group, 0) == MOECTL_PROCESS_RUNS;
    bool asked = ask && moectl_slots_ask(&r->group, &slots);
    if (ask && !asked)
        moectl_say("the coordinator does not answer: the empty slots are unknown");
    if (asked && slots.draining)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "the group is shutting down");
    for (size_t i = 0; i < r->group.count; i++) {
        const struct moectl_process *p = &r->group.processes[i];
        enum moectl_process_state state = moectl_process_state(&r->group, i);
        bool reported = awaited[i], empty = i > 0 && (asked ? !slots.filled[i] : awaited[i]);
        awaited[i] = !is_ours(r, i) && !r->refused[i] && (state != MOECTL_PROCESS_RUNS || empty);
        if (!awaited[i] || reported)
            continue;
        if (state == MOECTL_PROCESS_RUNS)
            moectl_say("%s (process %d) runs, but its slot is empty: waiting until it ends or "
                       "reconnects",
                       p->name, (int)p->pid);
        else
            moectl_say("waiting for the end of %s (process %d)", p->name, (int)p->pid);
    }
    return moe_ok();
}

/* Restarts daemons that have ended, until none is ending or without its slot. */
static struct moe_status settle(struct replace *r, uint64_t deadline_ns)
{
    bool awaited[MOECTL_PROCESSES_MAX] = {false};
    for (;;) {
        MOE_TRY(start_ended(r, deadline_ns));
        MOE_TRY(find_awaited(r, awaited));
        size_t i = 0;
        while (i < r->group.count && !awaited[i])
            i++;
        if (i == r->group.count)
            return moe_ok();
        if (moectl_state_down_waits(r->change_lock))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                             "a `moectl down` ends the group");
        uint64_t now = moe_clock_ns();
        if (now >= deadline_ns)
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                             "%s (process %d) has neither ended nor reconnected within the time "
                             "limit; to replace it: `kill -9 %d && moectl replace`",
                             r->group.processes[i].name, (int)r->group.processes[i].pid,
                             (int)r->group.processes[i].pid);
        enum moectl_event event = moectl_daemons_wait(&r->daemons, now + POLL_MS * MOE_NS_PER_MS);
        if (event == MOECTL_EVENT_STOP)
            return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "interrupted");
        if (event == MOECTL_EVENT_ENDED)
            return report_ended(r);
    }
}

/* Fails if a worker was not started because its slot is cordoned. */
static struct moe_status check_refused(const struct replace *r)
{
    for (size_t i = 1; i < r->group.count; i++)
        if (r->refused[i])
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                             "slot %zu is cordoned, so replace does not start %s: `moectl status` "
                             "has the reason; `moectl uncordon %zu --reason ...`, then repeat",
                             i - 1, r->group.processes[i].name, i - 1);
    return moe_ok();
}

/* Without a record, `down` would not find the daemons, and the next `replace` would start more.
 * Not SIGTERM: a coordinator would drain all workers. */
static void end_started(struct replace *r)
{
    uint64_t deadline_ns = moe_clock_ns() + KILL_LIMIT_MS * MOE_NS_PER_MS;
    moectl_daemons_signal(&r->daemons, SIGKILL);
    while (moectl_daemons_running(&r->daemons) > 0 &&
           moectl_daemons_wait(&r->daemons, deadline_ns) != MOECTL_EVENT_TIME)
        ;
    moectl_say("replace killed the daemons that it had started: group.json cannot list them");
}

static struct moe_status start_missing(struct replace *r, uint64_t deadline_ns)
{
    MOE_TRY(moectl_daemons_init(&r->daemons, r->directory, r->state_path, true));
    r->daemons.keep_logs = true;
    struct moe_status st = settle(r, deadline_ns);
    if (!moe_failed(&st))
        st = check_refused(r);
    if (r->daemons.count == 0)
        return st;
    struct moe_status recorded = record(r);
    if (recorded.code != MOE_OK)
        end_started(r);
    return st.code != MOE_OK ? st : recorded;
}

/* `up` in the foreground ends the group when a daemon dies, or starts that daemon again; it does
 * not know daemons of replace. */
static struct moe_status check_detached(const struct moectl_group *group)
{
    if (!group->foreground)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                     "a `moectl up` in the foreground holds the group: when a daemon dies, it ends "
                     "the group, or with --restart starts the daemon again; replace works with "
                     "groups of `moectl up --detach`");
}

/* Before the lock: an `up --restart` that does not get it ends the group, as for a `down`. */
static struct moe_status refuse_early(const struct replace *r)
{
    struct moectl_group group;
    struct moe_status st = moectl_state_read(r->directory, &group);
    if (moe_failed(&st)) /* read again with the lock */
        return moe_ok();
    st = check_detached(&group);
    moectl_group_free(&group);
    return st;
}

static struct moe_status prepare(struct replace *r, uint64_t deadline_ns)
{
    struct moe_status st =
        moectl_state_open(r->common.state_dir, false, r->state_path, &r->directory);
    if (st.code == MOE_OK && moectl_state_is_alive(r->directory)) {
        MOE_TRY(refuse_early(r));
        MOE_TRY(moectl_state_lock_changes(r->directory, MOECTL_CHANGE_REPLACE, deadline_ns,
                                          &r->change_lock));
    }
    if (st.code == MOE_OK &&
        moectl_state_is_alive(r->directory)) { /* it may have ended meanwhile */
        MOE_TRY(moectl_state_join(r->directory, &r->lock));
        st = moectl_state_read(r->directory, &r->group);
        if (st.code == MOE_NOT_FOUND)
            return moectl_state_no_group(r->state_path, true);
        return st.code == MOE_OK ? check_detached(&r->group) : st;
    }
    if (st.code == MOE_OK || st.code == MOE_NOT_FOUND)
        return moectl_state_no_group(r->state_path, false);
    return st;
}

static int announce(const struct replace *r)
{
    if (!r->common.document) {
        for (size_t i = 0; i < r->daemons.count; i++)
            moectl_put("%s %s\n", r->daemons.all[i].process.name,
                       r->daemons.all[i].process.endpoint);
        if (r->daemons.count == 0)
            moectl_say("nothing to replace: all %zu daemons run", r->group.count);
        else
            moectl_say("`moectl wait` waits until the group serves");
        return MOECTL_OK;
    }
    json_t *document = moectl_document("Replaced"), *started = json_array();
    for (size_t i = 0; i < r->daemons.count; i++) {
        const struct moectl_process *p = &r->daemons.all[i].process;
        json_array_append_new(started,
                              json_pack("{s:s, s:s}", "name", p->name, "endpoint", p->endpoint));
    }
    json_object_set_new(document, "started", started);
    return moectl_print(document);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct replace r = {.common = {.format = "table", .timeout_s = 60},
                        .directory = -1,
                        .lock = -1,
                        .change_lock = -1,
                        .daemons = {.signals = -1}};
    int code;
    if (!moectl_parse(self, NULL, 0, &r.common, argc, argv, &code))
        return code;
    uint64_t deadline = moectl_deadline(&r.common);
    struct moe_status st = prepare(&r, deadline);
    if (st.code == MOE_OK)
        st = start_missing(&r, deadline);
    code = st.code == MOE_OK ? announce(&r) : moectl_fail(&st);
    moectl_group_free(&r.group);
    moectl_daemons_free(&r.daemons);
    if (r.lock >= 0)
        close(r.lock);
    moectl_state_unlock_changes(r.change_lock);
    if (r.directory >= 0)
        close(r.directory);
    return code;
}

const struct moectl_command moectl_replace = {
    .name = "replace",
    .summary = "Restarts daemons of the local group that have died, with their old options.",
    .usage = "[--state-dir DIR]",
    .examples = "  moectl replace && moectl wait --timeout 60   # after a daemon died\n",
    .local = true,
    .run = run,
};
