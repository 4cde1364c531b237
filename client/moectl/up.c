/* SPDX-License-Identifier: Apache-2.0 */
/* moectl up: starts a coordinator and N workers on this machine and waits until they serve. Then it
 * runs until the user ends the group or a daemon dies. With --detach it leaves them running. */
#include "commands.h"
#include "moectl/group/daemons.h"
#include "moectl/group/keeper.h"
#include "moectl/group/link.h"
#include "moectl/group/train_state.h"

#include "base/clock.h"
#include "moectl/io/progress.h"
#include "moectl/io/proto_json.h"
#include "workers.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    POLL_MS = 50,                /* between two status calls */
    STATUS_LIMIT_MS = 2000,      /* for one answer of the coordinator */
    TERMINATE_LIMIT_MS = 5000,   /* between SIGTERM and SIGKILL */
    COORDINATOR_LIMIT_MS = 2000, /* for its own end, after the workers */
    REGISTER_LIMIT_MS = 10000,   /* for further workers of a group of another size */
    ARGUMENT_MAX = 64,           /* bytes of a number or address on a daemon's command line */
    TEXT_BYTES = 1024,           /* a state with its reason */
};

static const char port_advice[] = "use another port with --port P, or --port 0 for any free port";

/* Files that decide about trust: the options of all daemons, by the same names here. */
enum { ACCESS_FILE, TOKEN_FILE, TLS_CERTIFICATE, TLS_KEY, TLS_CLIENT_CA, TLS_CA, TRUST_FILES };
static const char *const trust_options[TRUST_FILES] = {
    [ACCESS_FILE] = "--access-file",         [TOKEN_FILE] = "--token-file",
    [TLS_CERTIFICATE] = "--tls-certificate", [TLS_KEY] = "--tls-key",
    [TLS_CLIENT_CA] = "--tls-client-ca",     [TLS_CA] = "--tls-ca",
};

struct up {
    const struct moectl_command *command;
    struct moectl_common common;
    const char *model, *backend, *transport, *log_level, *worker_config, *rebalance;
    uint64_t workers, max_workers, replicas, spare, every_s, min_gain, join_wait_s;
    uint64_t port, metrics_port, threads, drain_s;
    bool partial; /* views may lack experts */
    bool detach, restart;

    char coordinator_program[MOECTL_PATH_MAX], worker_program[MOECTL_PATH_MAX];
    char state_path[MOECTL_PATH_MAX];
    char worker_config_path[MOECTL_PATH_MAX]; /* "" = none */
    const char *trust[TRUST_FILES];           /* as given; NULL = none */
    char trust_paths[TRUST_FILES][MOECTL_PATH_MAX];
    int directory, lock;
    struct moectl_daemons daemons;
    struct moectl_group group;
    struct moectl_link *link;        /* to the coordinator; NULL while daemons start */
    struct moectl_progress progress; /* of loading */
    uint64_t started_ns;             /* all daemons were ready */
};

static uint64_t in_ms(uint64_t ms)
{
    return moe_clock_ns() + ms * MOE_NS_PER_MS;
}

/* ------------------------------------------------------------------ starting */

static uint64_t threads_per_worker(const struct up *u)
{
    if (u->threads > 0)
        return u->threads;
    cpu_set_t cpus;
    uint64_t count = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (uint64_t)CPU_COUNT(&cpus) : 1;
    return count > u->workers ? count / u->workers : 1;
}

static void listen_address(const struct up *u, uint64_t offset, char out[ARGUMENT_MAX])
{
    snprintf(out, ARGUMENT_MAX, "127.0.0.1:%" PRIu64, u->port == 0 ? 0 : u->port + offset);
}

/* "" (off) without --metrics-port; the coordinator is number 0, worker i number i + 1. */
static void metrics_address(const struct up *u, uint64_t number, char out[ARGUMENT_MAX])
{
    out[0] = '\0';
    if (u->metrics_port != 0)
        snprintf(out, ARGUMENT_MAX, "127.0.0.1:%" PRIu64, u->metrics_port + number);
}

/* Makes `name` absolute, for daemons with another working directory. */
static bool find_file(const char *name, char out[MOECTL_PATH_MAX])
{
    char *path = realpath(name, NULL);
    bool fits = path != NULL && strlen(path) < MOECTL_PATH_MAX;
    if (fits)
        strcpy(out, path);
    free(path);
    return fits;
}

/* Daemons open their logs themselves, so that they can reopen them on SIGHUP. */
static struct moe_status log_path(const struct up *u, const char *daemon, char out[MOECTL_PATH_MAX])
{
    if (snprintf(out, MOECTL_PATH_MAX, "%s/%s.log", u->state_path, daemon) >= MOECTL_PATH_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the name of the state directory is too long");
    return moe_ok();
}

/* Appends the options to a daemon's command line, from `n` on; returns its new length. */
static size_t add_trust(const struct up *u, const char **argv, size_t n)
{
    for (int i = 0; i < TRUST_FILES; i++) {
        if (u->trust[i] == NULL)
            continue;
        argv[n++] = trust_options[i];
        argv[n++] = u->trust_paths[i];
    }
    return n;
}

static struct moe_status start_coordinator(struct up *u)
{
    char listen[ARGUMENT_MAX], control[ARGUMENT_MAX], metrics[ARGUMENT_MAX], workers[ARGUMENT_MAX],
        most[ARGUMENT_MAX], replicas[ARGUMENT_MAX], spare[ARGUMENT_MAX], every[ARGUMENT_MAX],
        gain[ARGUMENT_MAX], join_wait[ARGUMENT_MAX], state[MOECTL_PATH_MAX], log[MOECTL_PATH_MAX];
    MOE_TRY(log_path(u, "coordinator", log));
    listen_address(u, u->workers, listen);
    listen_address(u, u->workers + 1, control);
    metrics_address(u, 0, metrics);
    snprintf(workers, sizeof workers, "%" PRIu64, u->workers);
    snprintf(most, sizeof most, "%" PRIu64, u->max_workers);
    snprintf(every, sizeof every, "%" PRIu64, u->every_s);
    snprintf(gain, sizeof gain, "%" PRIu64, u->min_gain);
    snprintf(join_wait, sizeof join_wait, "%" PRIu64, u->join_wait_s);
    snprintf(replicas, sizeof replicas, "%" PRIu64, u->replicas);
    snprintf(spare, sizeof spare, "%" PRIu64, u->spare);
    if (snprintf(state, sizeof state, "%s/coordinator", u->state_path) >= (int)sizeof state)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the name of the state directory is too long");
    if (mkdirat(u->directory, "coordinator", 0700) != 0 && access(state, W_OK) != 0)
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_IO, "cannot write to %s", state);
    /* The operator has chosen the model: its digests begin a new record. */
    char record[MOECTL_PATH_MAX];
    if (snprintf(record, sizeof record, "%s/model.digests", state) >= (int)sizeof record ||
        (unlink(record) != 0 && errno != ENOENT))
        return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_IO, "cannot remove %s/model.digests",
                         state);
    enum { FIXED = 21 };
    const char *argv[FIXED + 11 + 2 * TRUST_FILES + 1] = {u->coordinator_program,
                                                          "--listen",
                                                          listen,
                                                          "--control-listen",
                                                          control,
                                                          "--workers",
                                                          workers,
                                                          "--replicas",
                                                          replicas,
                                                          "--spare-experts",
                                                          spare,
                                                          "--join-wait-s",
                                                          join_wait,
                                                          "--state-dir",
                                                          state,
                                                          "--ready-fd",
                                                          MOECTL_READY_FD,
                                                          "--log-level",
                                                          u->log_level,
                                                          "--log-file",
                                                          log};
    size_t n = add_trust(u, argv, FIXED);
    if (u->partial)
        argv[n++] = "--partial-views";
    if (u->max_workers != 0) {
        argv[n++] = "--max-workers";
        argv[n++] = most;
    }
    if (strcmp(u->rebalance, "off") != 0) {
        argv[n++] = "--rebalance";
        argv[n++] = u->rebalance;
        argv[n++] = "--rebalance-every-s";
        argv[n++] = every;
        argv[n++] = "--min-gain";
        argv[n++] = gain;
    }
    if (metrics[0] != '\0') {
        argv[n++] = "--metrics-listen";
        argv[n++] = metrics;
    }
    return moectl_daemons_start(&u->daemons, "coordinator", u->coordinator_program, argv);
}

static struct moe_status start_worker(struct up *u, uint64_t number)
{
    char listen[ARGUMENT_MAX], threads[ARGUMENT_MAX], name[ARGUMENT_MAX], slot[ARGUMENT_MAX],
        drain[ARGUMENT_MAX], metrics[ARGUMENT_MAX], log[MOECTL_PATH_MAX];
    listen_address(u, number, listen);
    metrics_address(u, number + 1, metrics);
    snprintf(threads, sizeof threads, "%" PRIu64, threads_per_worker(u));
    snprintf(name, sizeof name, "worker-%" PRIu64, number);
    MOE_TRY(log_path(u, name, log));
    snprintf(slot, sizeof slot, "%" PRIu64, number); /* also the number of its GPU */
    snprintf(drain, sizeof drain, "%" PRIu64, u->drain_s * 1000);
    const char *const options[][2] = {
        {"--model", u->group.model},
        {"--coordinator", u->daemons.all[0].control_endpoint},
        {"--listen", listen},
        {"--backend", u->backend},
        {"--threads", threads},
        {"--worker-id", name},
        {"--slot", slot},
        {"--device", slot},
        {"--drain-ms", drain},
        {"--log-level", u->log_level},
        {"--log-file", log},
        {"--ready-fd", MOECTL_READY_FD},
        {metrics[0] != '\0' ? "--metrics-listen" : NULL, metrics},
        {strcmp(u->transport, "auto") != 0 ? "--transport" : NULL, u->transport},
        {u->worker_config_path[0] != '\0' ? "--config" : NULL, u->worker_config_path},
    };
    enum { COUNT = sizeof options / sizeof *options };
    const char *argv[1 + 2 * TRUST_FILES + 2 * COUNT + 1] = {u->worker_program};
    for (size_t i = 0, n = add_trust(u, argv, 1); i < COUNT; i++) {
        if (options[i][0] == NULL)
            continue;
        argv[n++] = options[i][0];
        argv[n++] = options[i][1];
    }
    return moectl_daemons_start(&u->daemons, name, u->worker_program, argv);
}

/* Turns an event during the start into an error. */
static struct moe_status check_event(const struct up *u, enum moectl_event event,
                                     uint64_t deadline_ns)
{
    if (event == MOECTL_EVENT_STOP)
        return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "interrupted");
    if (event == MOECTL_EVENT_ENDED) {
        const struct moectl_daemon *failed = moectl_daemons_failed(&u->daemons);
        if (failed != NULL)
            moectl_daemons_report(failed, port_advice);
        return moe_error(MOE_UNKNOWN, MOE_REASON_NONE, "a daemon ended before the group served");
    }
    if (moe_clock_ns() >= deadline_ns)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                         "the group did not serve within the time limit");
    return moe_ok();
}

/* Waits until all daemons from number `first` on have reported their endpoints. */
static struct moe_status await_ready(struct up *u, size_t first, uint64_t deadline_ns)
{
    for (size_t i = first; i < u->daemons.count;) {
        if (u->daemons.all[i].process.endpoint[0] != '\0') {
            i++;
            continue;
        }
        MOE_TRY(check_event(u, moectl_daemons_wait(&u->daemons, deadline_ns), deadline_ns));
    }
    return moe_ok();
}

static struct moe_status start_all(struct up *u, uint64_t deadline_ns)
{
    MOE_TRY(moectl_daemons_init(&u->daemons, u->directory, u->state_path, u->detach));
    MOE_TRY(start_coordinator(u));
    MOE_TRY(await_ready(u, 0, deadline_ns));
    for (uint64_t i = 0; i < u->workers; i++)
        MOE_TRY(start_worker(u, i));
    MOE_TRY(await_ready(u, 1, deadline_ns));
    u->started_ns = moe_clock_ns();
    u->group.foreground = !u->detach;
    u->group.restarts = u->restart;
    u->group.count = u->daemons.count;
    for (size_t i = 0; i < u->daemons.count; i++)
        u->group.processes[i] = u->daemons.all[i].process; /* u->daemons owns `command` */
    return moectl_state_write(u->directory, &u->group);
}

/* ------------------------------------------------------------------ until it serves */

/* Prints the state if it differs from `last`, or how far loading is. */
static void report(struct up *u, const Moe__V1__GetStatusResponse *s, char *last, size_t size)
{
    char text[TEXT_BYTES];
    uint64_t done, total;
    bool loads = moectl_workers_load(s, &done, &total);
    snprintf(text, sizeof text, "%s%s%s",
             moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state),
             s->reason[0] != '\0' ? ": " : "", s->reason);
    if (strcmp(text, last) != 0) {
        moectl_progress_clear(&u->progress);
        moectl_say("%s", text);
    }
    snprintf(last, size, "%s", text);
    if (loads)
        moectl_progress_show(&u->progress, "loading", done, total);
    else
        moectl_progress_clear(&u->progress);
}

/* Asks the coordinator once, and reports. */
static struct moe_status poll_status(struct up *u, char *last, size_t size, bool *serving)
{
    Moe__V1__GetStatusResponse *s = NULL;
    struct moe_status st = moectl_link_status(u->link, in_ms(STATUS_LIMIT_MS), &s);
    if (st.code != MOE_OK)
        return st.code == MOE_UNAVAILABLE || st.code == MOE_DEADLINE_EXCEEDED ? moe_ok() : st;
    report(u, s, last, size);
    *serving = s->state == MOE__V1__GROUP_STATE__GROUP_STATE_SERVING;
    /* Further workers may be started by hand. */
    if (!*serving && s->size > u->workers && s->n_workers < s->size &&
        moe_clock_ns() > u->started_ns + REGISTER_LIMIT_MS * MOE_NS_PER_MS)
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                       "the group in %s has a size of %" PRIu32 ": use --workers %" PRIu32
                       " and then `moectl scale %" PRIu64 "`, or another --state-dir",
                       u->state_path, s->size, s->size, u->workers);
    if (s->state == MOE__V1__GROUP_STATE__GROUP_STATE_FAILED)
        st = moe_error(MOE_UNKNOWN, MOE_REASON_NONE, "the group has failed: %s", s->reason);
    moe__v1__get_status_response__free_unpacked(s, NULL);
    return st;
}

static struct moe_status await_serving(struct up *u, uint64_t deadline_ns)
{
    char last[TEXT_BYTES] = "";
    bool serving = false;
    MOE_TRY(moectl_link_open(u->group.processes[0].endpoint, &u->link));
    for (;;) {
        MOE_TRY(poll_status(u, last, sizeof last, &serving));
        if (serving)
            return moe_ok();
        enum moectl_event event = moectl_daemons_wait(&u->daemons, in_ms(POLL_MS));
        if (event == MOECTL_EVENT_STOP || event == MOECTL_EVENT_ENDED ||
            moe_clock_ns() >= deadline_ns)
            moectl_progress_clear(&u->progress);
        MOE_TRY(check_event(u, event, deadline_ns));
    }
}

static int print_group(const struct up *u)
{
    const struct moectl_group *g = &u->group;
    if (!u->common.document) {
        for (size_t i = 1; i < g->count; i++)
            moectl_put("%s\n", g->processes[i].endpoint);
        return MOECTL_OK;
    }
    json_t *document = moectl_document("StartedGroup");
    json_t *workers = json_array();
    for (size_t i = 1; i < g->count; i++)
        json_array_append_new(workers, json_string(g->processes[i].endpoint));
    json_object_set_new(document, "endpoint", json_string(g->processes[1].endpoint));
    json_object_set_new(document, "workers", workers);
    json_object_set_new(document, "coordinator", json_string(g->processes[0].endpoint));
    json_object_set_new(document, "stateDir", json_string(u->state_path));
    return moectl_print(document);
}

/* The group goes on in the foreground, so it must be known now. */
static int announce(const struct up *u)
{
    int code = print_group(u);
    return code == MOECTL_OK ? moectl_flush() : code;
}

/* ------------------------------------------------------------------ ending */

static void await_end(struct up *u, uint64_t limit_ms)
{
    uint64_t deadline = in_ms(limit_ms);
    while (moectl_daemons_running(&u->daemons) > 0) {
        enum moectl_event event = moectl_daemons_wait(&u->daemons, deadline);
        if (event == MOECTL_EVENT_TIME || event == MOECTL_EVENT_STOP)
            return;
    }
}

static bool ask_to_drain(struct up *u)
{
    Moe__V1__ShutdownRequest request = MOE__V1__SHUTDOWN_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    request.reason = (char *)(uintptr_t) "moectl up was interrupted";
    request.limit_ms = (uint32_t)(u->drain_s * 1000);
    if (u->link == NULL)
        return false;
    struct moe_status st =
        moectl_link_call(u->link, "/moe.v1.AdminService/Shutdown", &request.base,
                         in_ms(STATUS_LIMIT_MS), &moe__v1__shutdown_response__descriptor, &answer);
    if (answer != NULL)
        protobuf_c_message_free_unpacked(answer, NULL);
    return st.code == MOE_OK;
}

/* Drains the group if `drain` and the coordinator answers, then sends SIGTERM, then SIGKILL.
 * Returns when no child is left. */
static void end_all(struct up *u, bool drain)
{
    if (moectl_daemons_running(&u->daemons) == 0)
        return;
    if (drain && ask_to_drain(u))
        await_end(u, u->drain_s * 1000);
    if (moectl_daemons_running(&u->daemons) > 0) {
        moectl_daemons_signal(&u->daemons, SIGTERM);
        await_end(u, TERMINATE_LIMIT_MS);
    }
    while (moectl_daemons_running(&u->daemons) > 0) {
        moectl_say("killing the daemons that still run");
        moectl_daemons_signal(&u->daemons, SIGKILL);
        await_end(u, TERMINATE_LIMIT_MS);
    }
}

/* Reports training steps that are not in a checkpoint, from the first worker that answers. */
static void report_unsaved(const struct up *u)
{
    bool answered = false;
    for (size_t i = 1; i < u->daemons.count && !answered; i++)
        if (u->daemons.all[i].running)
            answered = moectl_train_report_unsaved(u->daemons.all[i].process.endpoint, MOE_NEVER);
}

static void drain(struct up *u)
{
    report_unsaved(u);
    moectl_say("draining");
    end_all(u, true);
}

/* Somebody ends the group, so its workers end by themselves. The coordinator does so after them, if
 * it was asked to. */
static void await_others(struct up *u)
{
    bool workers = moectl_daemons_running(&u->daemons) >
                   (u->daemons.all[MOECTL_COORDINATOR].running ? 1u : 0u);
    moectl_say("the group is being shut down");
    await_end(u, workers ? u->drain_s * 1000 : COORDINATOR_LIMIT_MS);
    end_all(u, false);
}

/* Whether all workers leave, after a `moectl down` or a signal to the coordinator: one alone may
 * have left, and then the others were not asked to. */
static bool all_leave(struct up *u)
{
    Moe__V1__GetStatusResponse *s = NULL;
    if (!u->daemons.all[MOECTL_COORDINATOR].running || moectl_daemons_running(&u->daemons) == 1)
        return true;
    struct moe_status st = moectl_link_status(u->link, in_ms(STATUS_LIMIT_MS), &s);
    bool all = moe_failed(&st) || s->state == MOE__V1__GROUP_STATE__GROUP_STATE_DRAINING;
    if (s != NULL)
        moe__v1__get_status_response__free_unpacked(s, NULL);
    return all;
}

static int report_failed(const struct up *u)
{
    const struct moectl_daemon *failed = moectl_daemons_failed(&u->daemons);
    if (failed != NULL)
        moectl_daemons_report(failed, port_advice);
    return failed == NULL ? MOECTL_OK : MOECTL_FAILED;
}

/* In the foreground with --restart: from serving to the end. */
static int keep(struct up *u)
{
    if (moectl_keep(&u->daemons, u->directory, &u->group) == MOECTL_KEPT_STOP)
        drain(u);
    else
        await_others(u);
    return report_failed(u);
}

/* The coordinator has exited with 0, or so many workers that the group cannot serve: all, or one
 * without which an expert has no copy. */
static bool has_ended(const struct up *u)
{
    const struct moectl_daemons *d = &u->daemons;
    size_t running = moectl_daemons_running(d);
    bool alone = u->replicas < 2 && !u->partial && u->max_workers == 0;
    return !d->all[MOECTL_COORDINATOR].running || running == 1 || (alone && running < d->count);
}

/* Waits for a signal, a failure, or the end of the group. Workers may leave before: the others
 * serve on. They are named after a second, because in the end of a group all leave. */
static enum moectl_event await_event(struct up *u)
{
    bool reported[MOECTL_PROCESSES_MAX] = {false};
    uint64_t tell_ns = MOE_NEVER;
    for (;;) {
        enum moectl_event event = moectl_daemons_wait(&u->daemons, tell_ns);
        if (event == MOECTL_EVENT_STOP || moectl_daemons_failed(&u->daemons) != NULL ||
            has_ended(u))
            return event;
        for (size_t i = 0; event == MOECTL_EVENT_TIME && i < u->daemons.count; i++) {
            if (!u->daemons.all[i].running && !reported[i])
                moectl_say("%s has left; the group goes on without it",
                           u->daemons.all[i].process.name);
            reported[i] = !u->daemons.all[i].running;
        }
        tell_ns = event == MOECTL_EVENT_ENDED ? in_ms(1000) : MOE_NEVER;
    }
}

/* In the foreground: from serving to the end. */
static int watch(struct up *u)
{
    enum moectl_event event = await_event(u);
    const struct moectl_daemon *failed = moectl_daemons_failed(&u->daemons);
    if (event == MOECTL_EVENT_STOP && failed == NULL) {
        drain(u);
    } else if (failed == NULL && all_leave(u)) {
        await_others(u);
    } else if (failed == NULL) {
        moectl_say("a worker has left, and no other one has its experts: moectl ends the group");
        drain(u);
    } else {
        moectl_daemons_report(failed, port_advice);
        report_unsaved(u);
        moectl_say("a daemon died, so moectl ends the group (`up --restart` would start the daemon "
                   "again; with `up --detach` the others would go on until `moectl replace`)");
        end_all(u, false);
        return MOECTL_FAILED;
    }
    return report_failed(u);
}

/* ------------------------------------------------------------------ the command */

static struct moe_status prepare(struct up *u)
{
    if (realpath(u->model, u->group.model) == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "there is no directory %s", u->model);
    if (u->worker_config != NULL && !find_file(u->worker_config, u->worker_config_path))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "--worker-config: there is no file '%s'",
                         u->worker_config);
    for (int i = 0; i < TRUST_FILES; i++)
        if (u->trust[i] != NULL && !find_file(u->trust[i], u->trust_paths[i]))
            return moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "%s: there is no file '%s'",
                             trust_options[i], u->trust[i]);
    MOE_TRY(moectl_daemons_find("moe-coordinator", u->coordinator_program));
    MOE_TRY(moectl_daemons_find("moe-worker", u->worker_program));
    MOE_TRY(moectl_state_open(u->common.state_dir, true, u->state_path, &u->directory));
    MOE_TRY(moectl_state_lock(u->directory, &u->lock));
    moectl_state_remove(u->directory);                           /* the file of an earlier group */
    return moectl_state_check_room(u->directory, u->state_path); /* for logs too */
}

static int bring_up(struct up *u)
{
    uint64_t deadline = moectl_deadline(&u->common);
    struct moe_status st = prepare(u);
    if (st.code != MOE_OK)
        return moectl_fail(&st);
    moectl_say("starting %" PRIu64 " worker%s on %s; logs in %s", u->workers,
               u->workers == 1 ? "" : "s", u->group.model, u->state_path);
    st = start_all(u, deadline);
    if (st.code == MOE_OK)
        st = await_serving(u, deadline);
    int code = st.code == MOE_OK ? announce(u) : moectl_fail(&st);
    if (code == MOECTL_OK && u->detach)
        return code;
    if (code == MOECTL_OK)
        code = u->restart ? keep(u) : watch(u);
    else
        end_all(u, false);
    moectl_state_remove(u->directory);
    return code;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct up u = {
        .common = {.format = "table"},
        .backend = "auto",
        .transport = "auto",
        .log_level = "info",
        .rebalance = "off",
        .every_s = 60,
        .min_gain = 10,
        .join_wait_s = 300,
        .workers = 1,
        .replicas = 1,
        .port = 7600,
        .drain_s = 30,
        .directory = -1,
        .lock = -1,
        .daemons = {.signals = -1},
    };
    const struct moe_option options[] = {
        {"model", 'm', MOE_OPTION_STRING, &u.model, 0, 0, "DIR",
         "model directory with config.json and *.safetensors (required)"},
        {"workers", 'n', MOE_OPTION_UINT, &u.workers, 1, MOE_MAX_SLOTS, "N",
         "number of workers, 1 to 64"},
        {"max-workers", 0, MOE_OPTION_UINT, &u.max_workers, 0, MOE_MAX_SLOTS, "N",
         "workers that the group can have: `moectl scale` changes how many hold experts. You start "
         "those above --workers with moe-worker; 0 = a fixed size"},
        {"replicas", 'r', MOE_OPTION_UINT, &u.replicas, 1, MOE_MAX_SLOTS, "N",
         "workers with a copy of each expert; above 1, the group serves on without workers that "
         "it loses while every expert has a copy"},
        {"spare-experts", 0, MOE_OPTION_UINT, &u.spare, 0, MOE_MAX_EXPERTS, "N",
         "places of each layer on each worker for copies that `moectl rebalance` moves"},
        {"rebalance", 0, MOE_OPTION_STRING, &u.rebalance, 0, 0, "MODE",
         "off, or auto: experts move without `moectl rebalance` (see moe-coordinator --help)"},
        {"rebalance-every-s", 0, MOE_OPTION_UINT, &u.every_s, 1, 86400, "S",
         "with --rebalance auto: seconds between two looks at the rows of experts"},
        {"min-gain", 0, MOE_OPTION_UINT, &u.min_gain, 1, 100, "PERCENT",
         "with --rebalance auto: experts move once, in three looks in a row, the busiest worker "
         "would get at least this many percent fewer rows"},
        {"join-wait-s", 0, MOE_OPTION_UINT, &u.join_wait_s, 1, 86400, "S",
         "in a group that trains with --replicas: seconds that training waits, after one Save, for "
         "a worker that returns (see moe-coordinator --help)"},
        {"partial-views", 0, MOE_OPTION_BOOL, &u.partial, 0, 0, NULL,
         "serve on also without the experts of lost workers (see moe-coordinator --help)"},
        {"backend", 0, MOE_OPTION_STRING, &u.backend, 0, 0, "NAME",
         "cpu, cuda, or auto (cuda if there is a GPU)"},
        {"transport", 0, MOE_OPTION_STRING, &u.transport, 0, 0, "NAME",
         "how rows travel: nvlink (GPUs), network, or auto (the fastest that all pairs have)"},
        {"port", 'p', MOE_OPTION_UINT, &u.port, 0, UINT16_MAX - MOE_MAX_SLOTS - 1, "P",
         "workers listen on P, P+1, ..., the coordinator on the next two ports; 0 = any free "
         "ports"},
        {"metrics-port", 0, MOE_OPTION_UINT, &u.metrics_port, 0, UINT16_MAX - MOE_MAX_SLOTS, "P",
         "HTTP /metrics, /livez, /readyz: coordinator on P, workers on P+1, ...; 0 = off"},
        {"threads", 0, MOE_OPTION_UINT, &u.threads, 0, 1024, "N",
         "CPU threads per worker; 0 = CPUs / workers, at least 1"},
        {"detach", 'd', MOE_OPTION_BOOL, &u.detach, 0, 0, NULL,
         "return when the group serves; the group keeps running"},
        {"restart", 0, MOE_OPTION_BOOL, &u.restart, 0, 0, NULL,
         "start a daemon that dies again: after 100 ms, then twice as long each time, up to 10 s; "
         "and a worker that leaves, after a second"},
        {"drain", 0, MOE_OPTION_UINT, &u.drain_s, 0, 3600, "SECONDS",
         "at the end of the group, time for requests in flight to finish"},
        {"log-level", 0, MOE_OPTION_STRING, &u.log_level, 0, 0, "LEVEL",
         "error, warn, info or debug"},
        {"worker-config", 0, MOE_OPTION_STRING, &u.worker_config, 0, 0, "FILE",
         "more settings of the workers, one 'name = value' per line (see moe-worker --help); "
         "options of moectl override them"},
        {"access-file", 0, MOE_OPTION_STRING, &u.trust[ACCESS_FILE], 0, 0, "FILE",
         "for the daemons: roles of identities and tokens"},
        {"token-file", 0, MOE_OPTION_STRING, &u.trust[TOKEN_FILE], 0, 0, "FILE",
         "for the daemons, and for the calls of moectl up: the group's token, mode 0600"},
        {"tls-certificate", 0, MOE_OPTION_STRING, &u.trust[TLS_CERTIFICATE], 0, 0, "FILE",
         "for the daemons, as the next three: their certificate, then its chain"},
        {"tls-key", 0, MOE_OPTION_STRING, &u.trust[TLS_KEY], 0, 0, "FILE", "its key, mode 0600"},
        {"tls-client-ca", 0, MOE_OPTION_STRING, &u.trust[TLS_CLIENT_CA], 0, 0, "FILE",
         "roots of clients' certificates"},
        {"tls-ca", 0, MOE_OPTION_STRING, &u.trust[TLS_CA], 0, 0, "FILE",
         "roots of the daemons' certificates"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &u.common, argc, argv,
                      &code))
        return code;
    /* Links read the variable. */
    const char *variable = moectl_trust_names[MOECTL_TOKEN_FILE].variable;
    if (u.trust[TOKEN_FILE] != NULL && setenv(variable, u.trust[TOKEN_FILE], 1) != 0)
        return moectl_usage_error("out of memory");
    if (u.replicas > u.workers)
        return moectl_usage_error("--replicas %" PRIu64 " is above --workers %" PRIu64
                                  ": a worker has one copy of an expert",
                                  u.replicas, u.workers);
    if (u.max_workers != 0 && u.max_workers < u.workers)
        return moectl_usage_error("--max-workers %" PRIu64 " is below --workers %" PRIu64,
                                  u.max_workers, u.workers);
    if (u.max_workers != 0 && u.spare != 0)
        return moectl_usage_error("--max-workers excludes --spare-experts: experts of a group that "
                                  "can be scaled do not move");
    bool automatic = strcmp(u.rebalance, "auto") == 0;
    if (!automatic && strcmp(u.rebalance, "off") != 0)
        return moectl_usage_error("--rebalance must be off or auto, not '%s'", u.rebalance);
    if (automatic && u.spare == 0)
        return moectl_usage_error("--rebalance auto needs --spare-experts");
    if (u.restart && u.detach)
        return moectl_usage_error("--restart needs a moectl that goes on: it excludes --detach");
    code = moectl_require(&(struct moectl_required){"model", u.model != NULL}, 1);
    if (code != MOECTL_OK)
        return code;
    if (strcmp(u.backend, "cpu") != 0 && strcmp(u.backend, "cuda") != 0 &&
        strcmp(u.backend, "auto") != 0)
        return moectl_usage_error("--backend must be cpu, cuda or auto, not '%s'", u.backend);
    if (strcmp(u.transport, "nvlink") != 0 && strcmp(u.transport, "network") != 0 &&
        strcmp(u.transport, "auto") != 0)
        return moectl_usage_error("--transport must be nvlink, network or auto, not '%s'",
                                  u.transport);
    code = bring_up(&u);
    moectl_link_close(u.link);
    moectl_daemons_free(&u.daemons);
    if (u.lock >= 0)
        close(u.lock);
    if (u.directory >= 0)
        close(u.directory);
    return code;
}

const struct moectl_command moectl_up = {
    .name = "up",
    .summary = "Starts a group on this machine; prints the workers' endpoints when it serves.",
    .usage = "--model DIR [--workers N] [--detach] [options]",
    .examples = "  moectl up --model Mixtral-8x7B --workers 4      # until Ctrl-C, which drains\n"
                "  moectl up --model Mixtral-8x7B --workers 4 --detach && moectl status\n"
                "  moectl up --model DIR --port 0 --state-dir /tmp/second   # a second group\n",
    .local = true,
    .run = run,
};
