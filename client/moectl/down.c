/* moectl down: ends a group in peace, and waits until all of it has gone. */
#include "commands.h"
#include "link.h"
#include "state.h"

#include "base/clock.h"
#include "moe/v1/training.pb-c.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { CALL_LIMIT_MS = 5000, POLL_MS = 50, STATE_LIMIT_MS = 500 };

struct down {
    struct moectl_common common;
    const char *reason;
    bool force;
};

static uint64_t call_deadline(uint64_t deadline_ns)
{
    uint64_t limit = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
    return limit < deadline_ns ? limit : deadline_ns;
}

/* Tells what training is lost with the group. Only that: whoever does not answer at once is not
 * waited for, and no failure here is one of `down`. */
static void say_unsaved(const char *worker, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    ProtobufCMessage *answer = NULL;
    Moe__V1__GetTrainStateRequest request = MOE__V1__GET_TRAIN_STATE_REQUEST__INIT;
    uint64_t limit = moe_clock_ns() + STATE_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_link_open(worker, &link);
    if (st.code == MOE_OK)
        st = moectl_link_call(link, "/moe.v1.TrainingService/GetTrainState", &request.base,
                              limit < deadline_ns ? limit : deadline_ns,
                              &moe__v1__get_train_state_response__descriptor, &answer);
    moectl_link_close(link);
    if (st.code != MOE_OK)
        return;
    const Moe__V1__GetTrainStateResponse *s = (const void *)answer;
    bool some = s->checkpoint[0] != '\0';
    if (s->unsaved_steps != 0)
        moectl_say("%llu optimizer step%s since %s%s %s not saved",
                   (unsigned long long)s->unsaved_steps, s->unsaved_steps == 1 ? "" : "s",
                   some ? "checkpoint " : "the model was loaded", some ? s->checkpoint : "",
                   s->unsaved_steps == 1 ? "was" : "were");
    protobuf_c_message_free_unpacked(answer, NULL);
}

static struct moe_status ask(const struct down *d, struct moectl_link *link, uint64_t deadline_ns)
{
    Moe__V1__ShutdownRequest request = MOE__V1__SHUTDOWN_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    uint64_t now = moe_clock_ns();
    request.reason = (char *)(uintptr_t)d->reason;
    if (deadline_ns != MOE_NEVER && deadline_ns > now) /* leave a tenth for the daemons to exit */
        request.limit_ms = (uint32_t)((deadline_ns - now) / MOE_NS_PER_MS * 9 / 10);
    struct moe_status st = moectl_link_call(link, "/moe.v1.AdminService/Shutdown", &request.base,
                                            call_deadline(deadline_ns),
                                            &moe__v1__shutdown_response__descriptor, &answer);
    if (answer != NULL) {
        moectl_say("draining epoch %llu",
                   (unsigned long long)((Moe__V1__ShutdownResponse *)answer)->epoch);
        protobuf_c_message_free_unpacked(answer, NULL);
    }
    return st;
}

/* Without the group's state directory, gone means that no address answers. */
static struct moe_status wait_silent(const char *const *endpoints, size_t count,
                                     uint64_t deadline_ns)
{
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    for (size_t i = 0; i < count;) {
        if (!moectl_link_answers(endpoints[i], call_deadline(MOE_NEVER))) {
            i++;
            continue;
        }
        if (moe_clock_ns() >= deadline_ns)
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "%s still answers",
                             endpoints[i]);
        nanosleep(&pause, NULL);
    }
    return moe_ok();
}

/* A restarted coordinator knows no address of a worker that has not come back to it. */
static void say_silent(const Moe__V1__WorkerStatus *w)
{
    if (w->endpoint[0] == '\0')
        moectl_say("slot %u (worker %s) has no known address: its end is not watched", w->slot,
                   w->worker_id);
}

static struct moe_status down_by_endpoint(const struct down *d, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    MOE_TRY(moectl_admin_open(d->common.endpoint, call_deadline(deadline_ns), &link, &status));
    const char *endpoints[MOE_MAX_SLOTS + 1] = {d->common.endpoint};
    size_t count = 1;
    for (size_t i = 0; i < status->n_workers && count <= MOE_MAX_SLOTS; i++)
        if (status->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE) {
            say_silent(status->workers[i]);
            if (status->workers[i]->endpoint[0] != '\0')
                endpoints[count++] = status->workers[i]->endpoint;
        }
    if (count > 1)
        say_unsaved(endpoints[1], deadline_ns);
    struct moe_status st = ask(d, link, deadline_ns);
    moectl_link_close(link);
    if (st.code == MOE_OK)
        st = wait_silent(endpoints, count, deadline_ns);
    moe__v1__get_status_response__free_unpacked(status, NULL);
    return st;
}

/* ------------------------------------------------------------------ the local group */

/* Signals the recorded processes that are still what they were. */
static void signal_group(const struct moectl_group *group, int signal_number)
{
    for (size_t i = 0; i < group->count; i++) {
        char link[64], program[MOECTL_PATH_MAX];
        pid_t pid = group->processes[i].pid;
        snprintf(link, sizeof link, "/proc/%d/exe", (int)pid);
        ssize_t n = readlink(link, program, sizeof program - 1);
        program[n > 0 ? n : 0] = '\0';
        if (strstr(program, i == 0 ? "/moe-coordinator" : "/moe-worker") != NULL)
            kill(pid, signal_number);
    }
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

static struct moe_status end_local(const struct down *d, int directory, uint64_t deadline_ns)
{
    struct moectl_group group;
    MOE_TRY(moectl_state_read(directory, &group));
    if (group.count > 1)
        say_unsaved(group.processes[1].endpoint, deadline_ns);
    struct moe_status st = drain_local(d, &group, deadline_ns);
    if (st.code != MOE_OK) {
        moectl_say("the coordinator cannot drain the group: %s", st.text);
        signal_group(&group, SIGTERM);
    }
    if (moectl_state_wait_gone(directory, deadline_ns))
        return moe_ok();
    if (!d->force)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                         "daemons are still running; --force kills them");
    signal_group(&group, SIGKILL);
    if (moectl_state_wait_gone(directory, call_deadline(MOE_NEVER)))
        return moe_ok();
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "daemons are still running");
}

static struct moe_status down_by_state(const struct down *d, uint64_t deadline_ns)
{
    char path[MOECTL_PATH_MAX];
    int directory;
    struct moe_status st = moectl_state_open(d->common.state_dir, false, path, &directory);
    if (st.code == MOE_NOT_FOUND)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE,
                         "no group is running here, and no --endpoint was given");
    if (st.code == MOE_OK) {
        if (moectl_state_is_alive(directory))
            st = end_local(d, directory, deadline_ns);
        else
            st = moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "no group is running in %s", path);
        if (st.code == MOE_OK || st.code == MOE_NOT_FOUND)
            moectl_state_remove(directory);
        close(directory);
    }
    return st;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct down d = {.common = {.format = "table", .timeout_s = 30}, .reason = "moectl down"};
    const struct moe_option options[] = {
        {"reason", 'r', MOE_OPTION_STRING, &d.reason, 0, 0, "TEXT", "for the daemons' logs"},
        {"force", 0, MOE_OPTION_BOOL, &d.force, 0, 0, NULL,
         "kill what is left of the local group when the time is over"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &d.common, argc, argv,
                      &code))
        return code;
    uint64_t deadline = moectl_deadline(&d.common);
    struct moe_status st =
        d.common.endpoint != NULL ? down_by_endpoint(&d, deadline) : down_by_state(&d, deadline);
    if (st.code != MOE_OK)
        return moectl_fail(&st);
    moectl_say("the group has gone");
    return d.common.json ? moectl_print(moectl_document("GroupGone")) : MOECTL_OK;
}

const struct moectl_command moectl_down = {
    .name = "down",
    .summary = "Drains a group and waits until all of it has gone.",
    .usage = "[--endpoint H:P] [options]",
    .examples = "  moectl down                               # the local group\n"
                "  moectl down --endpoint 10.0.0.7:7600 --reason \"new release\" --timeout 120\n",
    .run = run,
};
