/* SPDX-License-Identifier: Apache-2.0 */
/* moectl down: drains a group and waits until all its daemons have ended. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/orphaned_group.h"
#include "moectl/group/process.h"
#include "moectl/group/state.h"
#include "moectl/group/train_state.h"

#include "base/clock.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

enum {
    POLL_MS = 50,
    ROUND_MS = 200,   /* for one of several daemons to answer, again and again */
    ORPHAN_MS = 2000, /* asked once: a slow machine needs a while for a refused connection */
    NAMES_BYTES = 200,
    GRACE_MS = 1000,
};

struct down {
    struct moectl_common common;
    const char *reason;
    bool force;
};

static struct moe_status ask(const struct down *d, struct moectl_link *link, uint64_t deadline_ns)
{
    Moe__V1__ShutdownRequest request = MOE__V1__SHUTDOWN_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    uint64_t now = moe_clock_ns();
    request.reason = (char *)(uintptr_t)d->reason;
    if (deadline_ns != MOE_NEVER && deadline_ns > now) /* a tenth is for the daemons to exit */
        request.limit_ms = (uint32_t)((deadline_ns - now) / MOE_NS_PER_MS * 9 / 10);
    struct moe_status st = moectl_link_call(link, "/moe.v1.AdminService/Shutdown", &request.base,
                                            moectl_call_deadline(deadline_ns),
                                            &moe__v1__shutdown_response__descriptor, &answer);
    if (answer != NULL) {
        uint64_t epoch = ((Moe__V1__ShutdownResponse *)answer)->epoch;
        if (epoch != 0)
            moectl_say("draining epoch %llu", (unsigned long long)epoch);
        else
            moectl_say("ending the group; no epoch is in force");
        protobuf_c_message_free_unpacked(answer, NULL);
    }
    return st;
}

/* ------------------------------------------------------------------ by its addresses */

static bool is_gone(const Moe__V1__WorkerStatus *w)
{
    return w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE;
}

/* A restarted coordinator has no address of a worker that has not reconnected. */
static bool is_away(const Moe__V1__WorkerStatus *w)
{
    return w->endpoint[0] == '\0' && !is_gone(w);
}

static bool is_complete(const Moe__V1__GetStatusResponse *s)
{
    for (size_t i = 0; i < s->n_workers; i++)
        if (is_away(s->workers[i]))
            return false;
    return true;
}

/* Waits until every worker of the last view has reconnected to a restarted coordinator or has lost
 * its lease: the coordinator cannot shut down a worker that is away. Takes at most half of the
 * time.
 */
static struct moe_status await_members(struct moectl_link *link, uint64_t deadline_ns,
                                       Moe__V1__GetStatusResponse **status)
{
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    uint64_t now = moe_clock_ns();
    uint64_t until =
        deadline_ns == MOE_NEVER || deadline_ns < now ? deadline_ns : now + (deadline_ns - now) / 2;
    if (!is_complete(*status))
        moectl_say("the coordinator was restarted: waiting for its workers to reconnect");
    while (!is_complete(*status) && moe_clock_ns() < until) {
        nanosleep(&pause, NULL);
        moe__v1__get_status_response__free_unpacked(*status, NULL);
        *status = NULL;
        MOE_TRY(moectl_link_status(link, moectl_call_deadline(deadline_ns), status));
    }
    return moe_ok();
}

/* A daemon that has to end. */
struct watched {
    const char *endpoint;
    const Moe__V1__WorkerStatus *worker; /* NULL: the coordinator */
    bool gone;
};

/* The first entry is the coordinator. A worker that is at a loopback address of another host is
 * left out, and counted: that address leads to a daemon of this host. */
static size_t list_watched(struct moectl_link *link, const Moe__V1__GetStatusResponse *s,
                           struct watched all[MOE_MAX_SLOTS + 1], size_t *unseen)
{
    size_t count = *unseen = 0;
    all[count++] = (struct watched){moectl_link_endpoint(link), NULL, false};
    for (size_t i = 0; i < s->n_workers && count <= MOE_MAX_SLOTS; i++) {
        const Moe__V1__WorkerStatus *w = s->workers[i];
        struct moe_status st = moectl_link_check_worker(all[0].endpoint, w->endpoint);
        if (w->endpoint[0] == '\0')
            moectl_say("slot %u (worker %s) has not reconnected to its restarted coordinator: if "
                       "its process lives, it keeps running",
                       w->slot, w->worker_id);
        else if (!is_gone(w) && moe_failed(&st))
            moectl_say("this cannot see the end of slot %u: %s", w->slot, st.text);
        else if (!is_gone(w))
            all[count++] = (struct watched){w->endpoint, w, false};
        *unseen += w->endpoint[0] != '\0' && !is_gone(w) && moe_failed(&st);
    }
    return count;
}

/* The error when the time is over. It does not ask again: a daemon that is stopped does not answer.
 */
static struct moe_status name_remaining(const struct watched *all, size_t count)
{
    char text[NAMES_BYTES] = "";
    size_t used = 0;
    for (size_t i = 0; i < count && used < sizeof text; i++) {
        const char *comma = used > 0 ? ", " : "", *endpoint = all[i].endpoint;
        const Moe__V1__WorkerStatus *w = all[i].worker;
        if (all[i].gone)
            continue;
        used += (size_t)(w == NULL ? snprintf(text + used, sizeof text - used, "%s%.100s", comma,
                                              endpoint)
                                   : snprintf(text + used, sizeof text - used,
                                              "%sslot %u (worker %.60s, %.100s)", comma, w->slot,
                                              w->worker_id, endpoint));
    }
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                     "the time limit is over; daemons that have not ended: %s", text);
}

/* Without the state directory, a group has ended when none of its addresses answers. Each round
 * asks every daemon for a short time, so one that is stopped hides no other. */
static struct moe_status wait_silent(struct watched *all, size_t count, uint64_t deadline_ns)
{
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    for (size_t left = count;;) {
        for (size_t i = 0; i < count; i++) {
            uint64_t limit = moe_earlier(deadline_ns, moe_clock_ns() + ROUND_MS * MOE_NS_PER_MS);
            if (all[i].gone || moectl_link_answers(all[i].endpoint, limit))
                continue;
            all[i].gone = true;
            left--;
        }
        if (left == 0)
            return moe_ok();
        if (moe_clock_ns() >= deadline_ns)
            return name_remaining(all, count);
        nanosleep(&pause, NULL);
    }
}

static struct moe_status end_by_endpoint(const struct down *d, struct moectl_link *link,
                                         Moe__V1__GetStatusResponse **status, uint64_t deadline_ns)
{
    struct watched all[MOE_MAX_SLOTS + 1];
    MOE_TRY(await_members(link, deadline_ns, status));
    size_t unseen, count = list_watched(link, *status, all, &unseen);
    for (size_t i = 1; i < count; i++)
        if (moectl_train_report_unsaved(all[i].endpoint, moectl_share(deadline_ns, count - i + 1)))
            break;
    struct moe_status st = ask(d, link, deadline_ns);
    /* A daemon that ends at once may take its answer with it. */
    if (st.code == MOE_UNAVAILABLE && st.reason == MOE_REASON_NONE)
        moectl_say("the connection ended before the answer; waiting until no daemon answers");
    else
        MOE_TRY(st);
    MOE_TRY(wait_silent(all, count, deadline_ns));
    if (unseen == 0)
        return moe_ok();
    return moe_error(MOE_UNKNOWN, MOE_REASON_NONE,
                     "the coordinator has ended, as its workers had left the group; whether the "
                     "processes of %zu of them have ended cannot be seen from here",
                     unseen);
}

static struct moe_status down_by_endpoint(const struct down *d, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    MOE_TRY(
        moectl_admin_open(d->common.endpoint, moectl_call_deadline(deadline_ns), &link, &status));
    struct moe_status st = end_by_endpoint(d, link, &status, deadline_ns);
    moectl_link_close(link);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    return st;
}

/* ------------------------------------------------------------------ the local group */

static void signal_group(const struct moectl_group *group, int signal_number)
{
    for (size_t i = 0; i < group->count; i++)
        if (moectl_process_runs(group, i))
            kill(group->processes[i].pid, signal_number);
}

static void list_running(const struct moectl_group *group, char text[NAMES_BYTES])
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < group->count && used < NAMES_BYTES; i++)
        if (moectl_process_runs(group, i))
            used += (size_t)snprintf(text + used, NAMES_BYTES - used, "%s%s (process %d)",
                                     used > 0 ? ", " : "", group->processes[i].name,
                                     (int)group->processes[i].pid);
}

/* The error when the time is over. group.json does not list a daemon that was started by hand. */
static struct moe_status still_running(const struct moectl_group *group)
{
    char text[NAMES_BYTES];
    list_running(group, text);
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "still running: %s",
                     text[0] != '\0' ? text : "a daemon that moectl did not start");
}

static struct moe_status drain_local(const struct down *d, const struct moectl_group *group,
                                     uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    MOE_TRY(moectl_link_open(group->processes[0].endpoint, &link));
    struct moe_status st = ask(d, link, deadline_ns);
    moectl_link_close(link);
    return st;
}

/* Names workers that still answer although all daemons of group.json have ended: moectl did not
 * start them, so it cannot send them signals. */
static struct moe_status check_orphans(const struct moectl_orphaned_group *r)
{
    char text[NAMES_BYTES] = "";
    size_t used = 0;
    for (size_t i = 0; i < r->count && used < sizeof text; i++) {
        uint64_t limit = moe_clock_ns() + ORPHAN_MS * MOE_NS_PER_MS;
        if (r->answers[i] && moectl_link_answers(r->workers[i], limit))
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", used > 0 ? ", " : "",
                                     r->workers[i]);
    }
    if (used == 0)
        return moe_ok();
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                     "still running: %.150s; moectl did not start it and its coordinator has "
                     "ended: end its process with SIGTERM",
                     text);
}

static bool workers_run(const struct moectl_group *group)
{
    for (size_t i = 1; i < group->count; i++)
        if (moectl_process_runs(group, i))
            return true;
    return false;
}

/* The coordinator ends when its members have left. A worker that had lost its slot, as one that was
 * stopped for longer than its lease, is none, and would look for a coordinator for ever: it gets a
 * signal. Members end at the same time as the coordinator, so they have a moment. */
static bool await_members_and_others(int directory, const struct moectl_group *group,
                                     uint64_t deadline_ns)
{
    uint64_t signal_ns = 0; /* 0: the coordinator runs */
    for (bool gone = false; !gone && moe_clock_ns() < deadline_ns;) {
        uint64_t now = moe_clock_ns();
        if (signal_ns == 0 && !moectl_process_runs(group, 0))
            signal_ns = now + GRACE_MS * MOE_NS_PER_MS;
        if (signal_ns != 0 && now >= signal_ns) {
            if (workers_run(group)) {
                moectl_say("the coordinator has ended; SIGTERM to workers that had no slot");
                signal_group(group, SIGTERM);
            }
            return moectl_state_wait_gone(directory, deadline_ns);
        }
        gone = moectl_state_wait_gone(directory, now + POLL_MS * MOE_NS_PER_MS);
    }
    return !moectl_state_is_alive(directory);
}

static struct moe_status await_gone(const struct down *d, int directory,
                                    const struct moectl_group *group, uint64_t deadline_ns)
{
    if (await_members_and_others(directory, group, deadline_ns))
        return moe_ok();
    if (!d->force) {
        struct moe_status st = still_running(group);
        moectl_say("--force kills the daemons that still run");
        return st;
    }
    char names[NAMES_BYTES];
    list_running(group, names);
    signal_group(group, SIGKILL);
    if (names[0] != '\0')
        moectl_say("the time limit is over; --force killed %s", names);
    return moectl_state_wait_gone(directory, moectl_call_deadline(MOE_NEVER))
               ? moe_ok()
               : still_running(group);
}

/* Asks workers until one answers. */
static void report_unsaved(const struct moectl_orphaned_group *r, uint64_t deadline_ns)
{
    for (size_t i = 0; i < r->count; i++)
        if (r->answers[i] && moectl_train_report_unsaved(r->workers[i], deadline_ns))
            return;
}

static struct moe_status end_local(const struct down *d, int directory, uint64_t deadline_ns)
{
    struct moectl_group group;
    struct moectl_orphaned_group workers;
    MOE_TRY(moectl_state_read(directory, &group));
    moectl_orphaned_group_find(&d->common, &workers); /* before they end */
    report_unsaved(&workers, deadline_ns);
    struct moe_status drained = drain_local(d, &group, deadline_ns);
    if (drained.code != MOE_OK) {
        moectl_say("the coordinator cannot drain the group: %s", drained.text);
        signal_group(&group, SIGTERM);
    }
    struct moe_status st = await_gone(d, directory, &group, deadline_ns);
    moectl_group_free(&group);
    return st.code == MOE_OK && drained.code != MOE_OK ? check_orphans(&workers) : st;
}

/* `replace` starts no daemon meanwhile. If it takes too long, --force goes on. */
static struct moe_status end_alone(const struct down *d, int directory, uint64_t deadline_ns)
{
    int lock = -1;
    struct moe_status st =
        moectl_state_lock_changes(directory, MOECTL_CHANGE_DOWN, deadline_ns, &lock);
    if (st.code == MOE_DEADLINE_EXCEEDED && d->force) {
        moectl_say("%s", st.text);
        st = moe_ok();
    }
    if (st.code == MOE_OK && moectl_state_is_alive(directory))
        st = end_local(d, directory, deadline_ns);
    moectl_state_unlock_changes(lock);
    return st;
}

static struct moe_status down_by_state(const struct down *d, uint64_t deadline_ns)
{
    char path[MOECTL_PATH_MAX];
    int directory;
    struct moe_status st = moectl_state_open(d->common.state_dir, false, path, &directory);
    if (st.code == MOE_NOT_FOUND)
        return moectl_state_no_group(path, false);
    if (st.code != MOE_OK)
        return st;
    bool alive = moectl_state_is_alive(directory);
    if (alive)
        st = end_alone(d, directory, deadline_ns);
    if (!alive || st.code == MOE_NOT_FOUND)
        st = moectl_state_no_group(path, alive);
    if (!alive || st.code == MOE_OK)
        moectl_state_remove(directory);
    close(directory);
    return st;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct down d = {.common = {.format = "table", .timeout_s = 30}, .reason = "moectl down"};
    const struct moe_option options[] = {
        {"reason", 'r', MOE_OPTION_STRING, &d.reason, 0, 0, "TEXT", "text for the daemons' logs"},
        {"force", 0, MOE_OPTION_BOOL, &d.force, 0, 0, NULL,
         "when --timeout is over, kill the daemons of the local group that still run"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &d.common, argc, argv,
                      &code))
        return code;
    uint64_t deadline = moectl_deadline(&d.common);
    struct moe_status st =
        d.common.endpoint != NULL ? down_by_endpoint(&d, deadline) : down_by_state(&d, deadline);
    if (st.code != MOE_OK) {
        code = moectl_fail(&st);
        if (d.common.endpoint != NULL)
            moectl_orphaned_group_explain(&d.common, &st);
        return code;
    }
    moectl_say("the group has ended");
    return d.common.document ? moectl_print(moectl_document("GroupGone")) : MOECTL_OK;
}

const struct moectl_command moectl_down = {
    .name = "down",
    .summary = "Drains a group and waits until all its daemons have ended.",
    .usage = "[--endpoint H:P] [options]",
    .examples = "  moectl down                               # the local group\n"
                "  moectl down --endpoint 10.0.0.7:7600 --reason \"new release\" --timeout 120\n",
    .run = run,
};
