/* SPDX-License-Identifier: Apache-2.0 */
/* moectl status and moectl wait: what the coordinator says about the group, now or until it is what
 * the user waits for. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/orphaned_group.h"
#include "moectl/group/state.h"
#include "moectl/group/train_state.h"
#include "moectl/io/proto_json.h"

#include "base/clock.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { POLL_MS = 100, CALL_LIMIT_MS = 2000, SILENCE_MS = 1000 };

static const char *state_name(const Moe__V1__GetStatusResponse *s)
{
    return moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state);
}

static bool is_serving(const Moe__V1__GetStatusResponse *s)
{
    return s->state == MOE__V1__GROUP_STATE__GROUP_STATE_SERVING;
}

static void print_workers(const Moe__V1__GetStatusResponse *s)
{
    moectl_put("\n");
    moectl_put("%4s  %-22s %-11s %12s %10s %10s %8s  %s\n", "SLOT", "ENDPOINT", "STATE", "TOKENS",
               "STEPS", "WEIGHTS", "LEASE", "WORKER");
    for (size_t i = 0; i < s->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = s->workers[i];
        moectl_put("%4" PRIu32 "  %-22s %-11s %12" PRIu64 " %10" PRIu64 " %6.1f MiB %6.1f s  %s\n",
                   w->slot, w->endpoint[0] != '\0' ? w->endpoint : "(none)",
                   moectl_enum_name(&moe__v1__worker_state__descriptor, (int)w->state), w->tokens,
                   w->steps, (double)w->loaded_bytes / (1024.0 * 1024.0),
                   (double)w->lease_remaining_ms / 1000.0, w->worker_id);
        if (w->error != NULL)
            moectl_put("      %s: %s\n", w->error->reason, w->error->message);
    }
}

static size_t count_live(const Moe__V1__GetStatusResponse *s)
{
    size_t live = 0;
    for (size_t i = 0; i < s->n_workers; i++)
        live += s->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE;
    return live;
}

static void print_table(const Moe__V1__GetStatusResponse *s)
{
    moectl_put("state    %s%s%s\n", state_name(s), s->reason[0] != '\0' ? ": " : "", s->reason);
    moectl_put("model    %s (%s), %zu MoE layer%s\n", s->model, s->family, s->n_layers,
               s->n_layers == 1 ? "" : "s");
    if (s->epoch == 0)
        moectl_put("epoch    none\n");
    else
        moectl_put("epoch    %" PRIu64 ", placement %" PRIu32 "\n", s->epoch, s->placement_version);
    moectl_put("workers  %zu of %" PRIu32 ", %s\n", count_live(s), s->slots, s->backend);
    moectl_put("release  %s, up %.0f s\n", s->version, (double)s->uptime_ms / 1000.0);
    if (s->n_workers > 0)
        print_workers(s);
}

/* What was learnt and may be lost, where no view is in force. Only that: whoever does not answer at
 * once is not waited for, and no failure here is one of `status`. */
static void say_at_stake(const Moe__V1__GetStatusResponse *s, uint64_t deadline_ns)
{
    if (s->epoch != 0 || s->state == MOE__V1__GROUP_STATE__GROUP_STATE_DRAINING)
        return;
    for (size_t i = 0; i < s->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = s->workers[i];
        Moe__V1__GetTrainStateResponse *state;
        if (!w->connected || w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            continue;
        struct moe_status st = moectl_train_probe(w->endpoint, deadline_ns, &state);
        if (st.code == MOE_UNIMPLEMENTED)
            return;
        if (st.code != MOE_OK)
            continue;
        moectl_train_say_at_stake(state);
        moe__v1__get_train_state_response__free_unpacked(state, NULL);
        return;
    }
}

/* A worker has gone: how another one comes into its slot. */
static void say_replace(const struct moectl_common *common)
{
    struct moectl_group group;
    struct moe_status st = moectl_state_group(common, &group);
    if (st.code != MOE_OK) {
        moectl_say("a worker has gone: start one again for its slot, with the options that it was "
                   "started with, or end the group with `moectl down` and start it anew");
        return;
    }
    moectl_say("a worker has gone: `moectl replace` starts it again, `moectl down` ends the group");
    moectl_group_free(&group);
}

static int print_status(const struct moectl_common *common, const Moe__V1__GetStatusResponse *s,
                        uint64_t deadline_ns)
{
    if (!common->json) {
        print_table(s);
        fflush(stdout);
        if (count_live(s) < s->n_workers)
            say_replace(common);
        say_at_stake(s, deadline_ns);
        return fflush(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
    }
    json_t *document = moectl_document("GroupStatus");
    if (document != NULL && !moectl_proto_to_json(&s->base, document)) {
        json_decref(document);
        document = NULL;
    }
    return moectl_print(document);
}

static int run_status(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    char endpoint[MOECTL_ENDPOINT_MAX];
    int code;
    if (!moectl_parse(self, NULL, 0, &common, argc, argv, &code))
        return code;
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    uint64_t deadline = moectl_deadline(&common);
    struct moe_status st = moectl_state_endpoint(&common, endpoint);
    if (st.code == MOE_OK)
        st = moectl_admin_open(endpoint, deadline, &link, &status);
    if (st.code != MOE_OK) {
        code = moectl_fail(&st);
        moectl_orphaned_group_explain(&common, &st);
        return code;
    }
    code = print_status(&common, status, deadline);
    if (code == MOECTL_OK && !is_serving(status))
        code = MOECTL_UNHEALTHY;
    moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return code;
}

const struct moectl_command moectl_status = {
    .name = "status",
    .summary = "Shows the state of a group; exit code 0 only if it serves, 3 if it does not.",
    .usage = "[--endpoint H:P] [-o json]",
    .examples = "  moectl status\n"
                "  moectl status --endpoint 127.0.0.1:7600 -o json | jq -r .state\n",
    .run = run_status,
};

/* ------------------------------------------------------------------ wait */

/* Where the group stands: serving, there, or gone. */
struct sight {
    bool serving, gone;
    struct moe_status status; /* why it could not be asked */
    char state[256]; /* what it said: "WAITING: slot 1 is empty"; empty without an answer */
};

/* Gone means that nobody answers at the address, and for a local group that no process is left. */
static struct sight look(const struct moectl_common *common, uint64_t deadline_ns)
{
    struct sight sight = {0};
    char endpoint[MOECTL_ENDPOINT_MAX], path[MOECTL_PATH_MAX];
    int directory;
    sight.status = moectl_state_endpoint(common, endpoint);
    if (common->endpoint == NULL) {
        struct moe_status st = moectl_state_open(common->state_dir, false, path, &directory);
        sight.gone = st.code != MOE_OK || !moectl_state_is_alive(directory);
        if (st.code == MOE_OK)
            close(directory);
    }
    if (sight.status.code != MOE_OK || sight.gone)
        return sight;
    uint64_t limit = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    sight.status =
        moectl_admin_open(endpoint, limit < deadline_ns ? limit : deadline_ns, &link, &status);
    /* A worker answers for a while after its coordinator has gone. */
    sight.gone = common->endpoint != NULL && sight.status.code == MOE_UNAVAILABLE &&
                 !moectl_link_answers(endpoint, limit);
    if (status != NULL) {
        sight.serving = is_serving(status);
        snprintf(sight.state, sizeof sight.state, "%s%s%s", state_name(status),
                 status->reason[0] != '\0' ? ": " : "", status->reason);
        moe__v1__get_status_response__free_unpacked(status, NULL);
    }
    moectl_link_close(link);
    return sight;
}

/* `state` is the last that was heard of the group, "" for nothing. */
static int out_of_time(const struct moe_status *st, const char *state)
{
    bool known = st->code == MOE_OK || st->code == MOE_DEADLINE_EXCEEDED;
    if (known && state[0] != '\0')
        moectl_say("out of time; the group is %s", state);
    else
        moectl_say("out of time; %s", st->code != MOE_OK ? st->text : "its daemons are ending");
    return st->code == MOE_NOT_FOUND ? MOECTL_NOT_FOUND : MOECTL_UNREACHABLE;
}

/* Told once, when nobody has said anything about the group for a while: it may be that only its
 * coordinator has gone. */
static bool explain_silence(const struct moectl_common *common, const struct sight *sight,
                            uint64_t *silent_since)
{
    uint64_t now = moe_clock_ns();
    if (sight->state[0] != '\0')
        *silent_since = now;
    return now - *silent_since > SILENCE_MS * MOE_NS_PER_MS &&
           moectl_orphaned_group_explain(common, &sight->status);
}

static int wait_for(const struct moectl_common *common, bool gone)
{
    uint64_t silent_since = moe_clock_ns();
    bool explained = gone;
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    uint64_t deadline = moectl_deadline(common);
    char last[sizeof((struct sight *)NULL)->state] = "";
    for (;;) {
        struct sight sight = look(common, deadline);
        if (gone ? sight.gone : sight.serving)
            return MOECTL_OK;
        if (sight.state[0] != '\0' && strcmp(sight.state, last) != 0) {
            moectl_say("%s", sight.state);
            memcpy(last, sight.state, sizeof last);
        }
        if (!explained)
            explained = explain_silence(common, &sight, &silent_since);
        if (moe_clock_ns() >= deadline)
            return out_of_time(&sight.status, last);
        nanosleep(&pause, NULL);
    }
}

static int run_wait(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    const char *condition = "serving";
    const struct moe_option options[] = {
        {"for", 0, MOE_OPTION_STRING, &condition, 0, 0, "WHAT", "serving or gone"},
    };
    int code;
    if (!moectl_parse(self, options, 1, &common, argc, argv, &code))
        return code;
    bool gone = strcmp(condition, "gone") == 0;
    if (!gone && strcmp(condition, "serving") != 0)
        return moectl_usage_error("--for must be serving or gone, not '%s'", condition);
    code = wait_for(&common, gone);
    if (code == MOECTL_OK && common.json) {
        json_t *document = moectl_document("Wait");
        json_object_set_new(document, "condition", json_string(condition));
        code = moectl_print(document);
    }
    return code;
}

const struct moectl_command moectl_wait = {
    .name = "wait",
    .summary = "Waits until a group serves, or until it has gone.",
    .usage = "[--for=serving|gone] [--timeout SECONDS]",
    .examples = "  moectl wait --for=serving --timeout 300 --endpoint 127.0.0.1:7600\n"
                "  moectl wait --for=gone\n",
    .run = run_wait,
};
