/* SPDX-License-Identifier: Apache-2.0 */
/* moectl restart --rolling: one worker after another leaves, starts again and serves, while the
 * others go on. Then the next one.
 *
 * A worker that was drained ends. A supervisor starts it again (systemd, Kubernetes, `moectl up
 * --restart`), and this command waits for it. For a group of `moectl up --detach` it runs `moectl
 * replace`.
 * It never ends a process itself. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/process.h"
#include "moectl/group/state.h"
#include "workers.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { POLL_MS = 20, ADVICE_MS = 10000, RESTARTED_MAX = MOE_MAX_SLOTS };

struct restart {
    struct moectl_common common;
    bool rolling, force;
    const char *reason;
    struct moectl_link *link;           /* NULL after a call without an answer */
    Moe__V1__GetStatusResponse *status; /* the last one; NULL: the coordinator does not answer */
    bool local;                         /* `group` is the group's, of `moectl up --detach` */
    struct moectl_group group;
    uint32_t count; /* workers that serve again */
    struct {
        uint32_t slot;
        double seconds; /* from the drain until all slots served */
    } done[RESTARTED_MAX];
};

static void drop_status(struct restart *r)
{
    if (r->status != NULL)
        moe__v1__get_status_response__free_unpacked(r->status, NULL);
    r->status = NULL;
}

/* Asks again. A coordinator that does not answer may answer the next time, or another one leads
 * now. */
static void look(struct restart *r, uint64_t deadline_ns)
{
    uint64_t limit_ns = moectl_call_deadline(deadline_ns);
    drop_status(r);
    struct moe_status st = r->link == NULL
                               ? moectl_admin_find(&r->common, limit_ns, &r->link, &r->status)
                               : moectl_link_status(r->link, limit_ns, &r->status);
    if (!moe_failed(&st))
        return;
    moectl_link_close(r->link);
    r->link = NULL;
    r->status = NULL;
}

static bool all_serve(const Moe__V1__GetStatusResponse *s)
{
    return s != NULL && s->state == MOE__V1__GROUP_STATE__GROUP_STATE_SERVING &&
           s->n_live_slots == moectl_workers_size(s);
}

/* Before anything changes. */
static struct moe_status check_group(const struct restart *r)
{
    const Moe__V1__GetStatusResponse *s = r->status;
    if (r->local && r->group.foreground && !r->group.restarts)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "a `moectl up` in the foreground holds the group, and starts no worker "
                         "again: restart works with `moectl up --restart`, `moectl up --detach`, "
                         "and with groups of a supervisor");
    if (!all_serve(s))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "the group does not serve with all of its %" PRIu32
                         " slots: see `moectl status`",
                         moectl_workers_size(s));
    if (s->n_cordons > 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "slot %" PRIu32 " is cordoned, so a restarted worker does not get it: "
                         "`moectl uncordon %" PRIu32 " --reason ...` first",
                         s->cordons[0]->slot, s->cordons[0]->slot);
    if (s->replicas < 2 && !r->force)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_EXPERT_UNAVAILABLE,
                         "each expert has one copy: requests would wait for each worker while it "
                         "starts; start the group with --replicas 2, or use --force");
    return moe_ok();
}

static struct moe_status drain(struct restart *r, uint32_t slot, uint64_t deadline_ns,
                               uint64_t *epoch)
{
    ProtobufCMessage *answer = NULL;
    Moe__V1__DrainWorkerRequest request = MOE__V1__DRAIN_WORKER_REQUEST__INIT;
    request.slot = slot;
    request.reason = (char *)(uintptr_t)r->reason;
    request.force = r->force;
    MOE_TRY(moectl_link_call(r->link, "/moe.v1.AdminService/DrainWorker", &request.base,
                             moectl_call_deadline(deadline_ns),
                             &moe__v1__drain_worker_response__descriptor, &answer));
    *epoch = ((Moe__V1__DrainWorkerResponse *)answer)->epoch;
    protobuf_c_message_free_unpacked(answer, NULL);
    return moe_ok();
}

/* Runs a program without its standard output; `*succeeded`: it exits with 0. Not by fork: gRPC has
 * threads here. */
static struct moe_status run_program(const char *const *argv, bool *succeeded)
{
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status = 0, rc = posix_spawn_file_actions_init(&actions);
    if (rc == 0)
        rc = posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    if (rc == 0)
        rc = posix_spawn(&child, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    if (rc != 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO, "cannot start %s: %s", argv[0],
                         strerrorname_np(rc));
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    *succeeded = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return moe_ok();
}

/* Runs `moectl replace`, which starts daemons of the group that have ended. */
static struct moe_status replace(const struct restart *r)
{
    char program[MOECTL_PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n < 0)
        return moe_error(MOE_INTERNAL, MOE_REASON_IO, "cannot find moectl: %s",
                         strerrorname_np(errno));
    program[n] = '\0';
    const char *argv[] = {program, "replace", "-o", "json", NULL, NULL, NULL};
    bool succeeded;
    if (r->common.state_dir != NULL) {
        argv[4] = "--state-dir";
        argv[5] = r->common.state_dir;
    }
    MOE_TRY(run_program(argv, &succeeded));
    return succeeded ? moe_ok()
                     : moe_error(MOE_UNKNOWN, MOE_REASON_NONE, "`moectl replace` failed");
}

/* The workers' settings may have changed since their start. One that does not start again would
 * cost its slot. */
static struct moe_status check_settings(const struct restart *r)
{
    for (size_t i = 1; r->local && i < r->group.count; i++) {
        const struct moectl_process *p = &r->group.processes[i];
        const char *argv[MOECTL_ARGUMENTS_MAX + 2];
        size_t n = 0;
        bool valid;
        if (p->command == NULL) /* `moectl replace` says so */
            continue;
        for (; n < json_array_size(p->command) && n < MOECTL_ARGUMENTS_MAX; n++)
            argv[n] = json_string_value(json_array_get(p->command, n));
        argv[n] = "--check-config";
        argv[n + 1] = NULL;
        MOE_TRY(run_program(argv, &valid));
        if (!valid)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                             "%s would not start with its present settings; no worker was drained",
                             p->name);
    }
    return moe_ok();
}

/* Its place in the local group; 0 = it is not of this group. */
static size_t process_of(const struct restart *r, const char *worker_id)
{
    for (size_t i = 1; r->local && i < r->group.count; i++)
        if (strcmp(r->group.processes[i].name, worker_id) == 0)
            return i;
    return 0;
}

/* Waits until the slot serves under a later view of all slots. The one in force ends only when the
 * worker has left, so its slot has another process then. */
static struct moe_status await_return(struct restart *r, uint32_t slot, size_t process,
                                      uint64_t epoch, uint64_t deadline_ns)
{
    const struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    uint64_t advice_ns = moe_clock_ns() + ADVICE_MS * MOE_NS_PER_MS;
    bool started = false;
    for (;;) {
        look(r, deadline_ns);
        if (all_serve(r->status) && r->status->epoch > epoch)
            return moe_ok();
        if (process != 0 && !started && !r->group.foreground &&
            moectl_process_state(&r->group, process) == MOECTL_PROCESS_ENDED) {
            MOE_TRY(replace(r));
            started = true;
        }
        uint64_t now = moe_clock_ns();
        if (now >= deadline_ns)
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                             "slot %" PRIu32 " does not serve again within %g s: %s; no other "
                             "worker was drained",
                             slot, r->common.timeout_s,
                             r->status == NULL ? "the coordinator does not answer"
                                               : "see `moectl status`");
        if (process == 0 && now >= advice_ns) {
            moectl_say("slot %" PRIu32 " waits for its worker: if no supervisor starts it again, "
                       "start it by hand (systemctl start moe-worker@%" PRIu32 ")",
                       slot, slot);
            advice_ns = MOE_NEVER;
        }
        nanosleep(&pause, NULL);
    }
}

static struct moe_status restart_slot(struct restart *r, uint32_t slot)
{
    const Moe__V1__WorkerStatus *w = moectl_workers_find(r->status, slot);
    if (w == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "slot %" PRIu32 " is empty",
                         slot);
    size_t process = process_of(r, w->worker_id);
    uint64_t epoch = 0, begun_ns = moe_clock_ns(), deadline_ns = moectl_deadline(&r->common);
    moectl_say("slot %" PRIu32 " (%s) leaves", slot, w->worker_id);
    MOE_TRY(drain(r, slot, deadline_ns, &epoch));
    MOE_TRY(await_return(r, slot, process, epoch, deadline_ns));
    double seconds = (double)(moe_clock_ns() - begun_ns) / MOE_NS_PER_S;
    r->done[r->count].slot = slot;
    r->done[r->count++].seconds = seconds;
    moectl_say("slot %" PRIu32 " serves again after %.1f s", slot, seconds);
    if (process == 0)
        return moe_ok();
    moectl_group_free(&r->group); /* it has the old processes */
    return moectl_state_group(&r->common, &r->group);
}

static struct moe_status work(struct restart *r)
{
    struct moe_status st = moectl_state_group(&r->common, &r->group);
    r->local = !moe_failed(&st);
    if (!r->local && r->common.endpoint == NULL)
        return st;
    MOE_TRY(moectl_admin_find(&r->common, moectl_deadline(&r->common), &r->link, &r->status));
    MOE_TRY(check_group(r));
    MOE_TRY(check_settings(r));
    uint32_t slots[RESTARTED_MAX]; /* all of them serve */
    size_t count = r->status->n_live_slots;
    for (size_t i = 0; i < count; i++)
        slots[i] = r->status->live_slots[i];
    for (size_t i = 0; i < count; i++)
        MOE_TRY(restart_slot(r, slots[i]));
    return moe_ok();
}

static int report(const struct restart *r)
{
    if (!r->common.document) {
        moectl_put("%" PRIu32 " workers restarted, one after another\n", r->count);
        return MOECTL_OK;
    }
    json_t *document = moectl_document("Restarted"), *slots = json_array();
    for (uint32_t i = 0; i < r->count; i++)
        json_array_append_new(slots, json_pack("{s:I, s:f}", "slot", (json_int_t)r->done[i].slot,
                                               "seconds", r->done[i].seconds));
    json_object_set_new(document, "slots", slots);
    return moectl_print(document);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct restart r = {.common = {.format = "table", .timeout_s = 600},
                        .reason = "rolling restart"};
    const struct moe_option options[] = {
        {"rolling", 0, MOE_OPTION_BOOL, &r.rolling, 0, 0, NULL,
         "one worker after another; the next one leaves when the last one serves (required)"},
        {"force", 0, MOE_OPTION_BOOL, &r.force, 0, 0, NULL,
         "also without a second copy of each expert: requests wait while a worker starts"},
        {"reason", 'r', MOE_OPTION_STRING, &r.reason, 0, 0, "TEXT",
         "why; for the log and the events; default: rolling restart"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &r.common, argc, argv,
                      &code))
        return code;
    code = moectl_require(&(struct moectl_required){"rolling", r.rolling}, 1);
    if (code != MOECTL_OK)
        return code;
    struct moe_status st = work(&r);
    code = moe_failed(&st) ? moectl_fail(&st) : report(&r);
    drop_status(&r);
    moectl_link_close(r.link);
    if (r.local)
        moectl_group_free(&r.group);
    return code;
}

const struct moectl_command moectl_restart = {
    .name = "restart",
    .summary = "Restarts all workers, one after another, while the group serves.",
    .usage = "--rolling [--force] [--reason TEXT]",
    .examples = "  moectl restart --rolling                             # of moectl up\n"
                "  moectl restart --rolling --endpoint node0:7700       # systemd starts them\n",
    .run = run,
};
