/* SPDX-License-Identifier: Apache-2.0 */
/* moectl status: shows the state of a group. moectl wait: waits for a state. Both ask the
 * coordinator. */
#include "commands.h"
#include "moectl/group/models.h"
#include "moectl/group/orphaned_group.h"
#include "moectl/group/state.h"
#include "moectl/group/train_state.h"
#include "moectl/io/progress.h"
#include "moectl/io/proto_json.h"
#include "workers.h"

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

static void print_added_models(const Moe__V1__ListModelsResponse *list)
{
    for (size_t i = 0; list != NULL && i < list->n_models; i++) {
        const Moe__V1__ModelStatus *m = list->models[i];
        if (!m->is_default)
            moectl_put("added    %s (%s), %zu MoE layer%s: %s%s%s\n", m->name, m->family,
                       m->n_layers, m->n_layers == 1 ? "" : "s", moectl_model_state(m),
                       m->reason[0] != '\0' ? ": " : "", m->reason);
    }
}

/* Of a group that can be scaled. */
static void print_scaling(const Moe__V1__GetStatusResponse *s)
{
    if (s->max_workers > s->size || s->n_spare_slots > 0)
        moectl_put("size     %" PRIu32 " of at most %" PRIu32 ", %zu spare\n", s->size,
                   s->max_workers, s->n_spare_slots);
    if (s->scaling_to != 0)
        moectl_put("scaling  to %" PRIu32 " workers\n", s->scaling_to);
    if (s->scale_error != NULL)
        moectl_put("scaling  was undone: %s\n", s->scale_error->message);
}

static int print_table(const Moe__V1__GetStatusResponse *s,
                       const Moe__V1__ListModelsResponse *models)
{
    moectl_put("state    %s%s%s\n", state_name(s), s->reason[0] != '\0' ? ": " : "", s->reason);
    if (s->model[0] != '\0') /* the coordinator knows it from the workers */
        moectl_put("model    %s (%s), %zu MoE layer%s\n", s->model, s->family, s->n_layers,
                   s->n_layers == 1 ? "" : "s");
    if (s->model_digest[0] != '\0')
        moectl_put("digest   %s\n", s->model_digest);
    print_added_models(models);
    if (s->epoch == 0)
        moectl_put("epoch    none\n");
    else
        moectl_put("epoch    %" PRIu64 ", placement %" PRIu32 "\n", s->epoch, s->placement_version);
    if ((s->replicas > 1 || s->n_live_slots < moectl_workers_size(s)) && s->epoch != 0) {
        char view[512];
        moectl_workers_describe_view(s, view, sizeof view);
        moectl_put("view     %s\n", view);
    }
    moectl_put("workers  %zu of %" PRIu32 "%s%s\n", moectl_workers_live(s), moectl_workers_size(s),
               s->backend[0] != '\0' ? ", " : "", s->backend);
    print_scaling(s);
    for (size_t i = 0; i < s->n_cordons; i++)
        moectl_put("cordon   slot %" PRIu32 ": %s\n", s->cordons[i]->slot, s->cordons[i]->reason);
    if (strcmp(s->store, "etcd") == 0)
        moectl_put("store    etcd, the leader's lease has %.1f s\n",
                   (double)s->leader_lease_remaining_ms / 1000.0);
    moectl_put("release  %s, up %.0f s\n", s->version, (double)s->uptime_ms / 1000.0);
    if (s->n_workers == 0)
        return MOECTL_OK;
    moectl_put("\n");
    struct moectl_table *workers = moectl_workers_table(s, true);
    int code = moectl_table_print(workers, NULL);
    moectl_table_free(workers);
    return code;
}

/* Without a view in force, reports the training state that may be lost. Skips workers that do not
 * answer at once; a failure here does not change the exit code. `by`: the coordinator's endpoint.
 */
static void report_at_stake(const char *by, const Moe__V1__GetStatusResponse *s,
                            uint64_t deadline_ns)
{
    if (s->epoch != 0 || s->state == MOE__V1__GROUP_STATE__GROUP_STATE_DRAINING)
        return;
    for (size_t i = 0; i < s->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = s->workers[i];
        Moe__V1__GetTrainStateResponse *state;
        if (!w->connected || w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            continue;
        struct moe_status st = moectl_link_check_worker(by, w->endpoint);
        if (st.code == MOE_OK)
            st = moectl_train_probe(w->endpoint, deadline_ns, &state);
        if (st.code == MOE_UNIMPLEMENTED)
            return;
        if (st.code == MOE_INVALID_ARGUMENT) /* its endpoint, or the one for training, is no use */
            moectl_say("%s", st.text);
        if (st.code != MOE_OK)
            continue;
        moectl_train_report_at_stake(state);
        moe__v1__get_train_state_response__free_unpacked(state, NULL);
        return;
    }
}

#define GONE                                                                                       \
    "a worker is gone or cannot be reached. One that was only stopped or cut off comes back by "   \
    "itself. If it has ended, "

static bool is_taken(const Moe__V1__GetStatusResponse *s, uint32_t slot)
{
    for (size_t i = 0; i < s->n_workers; i++)
        if (s->workers[i]->slot == slot &&
            s->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            return true;
    return false;
}

/* An empty slot is cordoned: a restart of its worker does not help. */
static bool cordon_keeps_empty(const Moe__V1__GetStatusResponse *s)
{
    for (size_t i = 0; i < s->n_cordons; i++)
        if (!is_taken(s, s->cordons[i]->slot))
            return true;
    return false;
}

/* A worker is gone: says how to start it again. */
static void say_replace(const struct moectl_common *common)
{
    struct moectl_group group;
    struct moe_status st = moectl_state_group(common, &group);
    if (st.code != MOE_OK) {
        moectl_say(GONE "start it again with the same options, or end the group with `moectl "
                        "down`");
        return;
    }
    if (group.restarts)
        moectl_say(GONE "its `moectl up --restart` starts it again");
    else if (group.foreground)
        moectl_say(GONE "its `moectl up` ends the group");
    else
        moectl_say(GONE "`moectl replace` starts it again, `moectl down` ends the group");
    moectl_group_free(&group);
}

static int print_document(const Moe__V1__GetStatusResponse *s,
                          const Moe__V1__ListModelsResponse *models)
{
    json_t *document = moectl_document("GroupStatus");
    if (!moectl_proto_to_json(&s->base, document)) {
        json_decref(document);
        return moectl_print(NULL);
    }
    json_object_set_new(document, "addedModels", moectl_models_added_json(models));
    return moectl_print(document);
}

/* `by`: the coordinator's endpoint. `models`: NULL if they are not known. */
static int print_status(const struct moectl_common *common, const char *by,
                        const Moe__V1__GetStatusResponse *s,
                        const Moe__V1__ListModelsResponse *models, uint64_t deadline_ns)
{
    if (common->document)
        return print_document(s, models);
    int code = print_table(s, models);
    (void)moectl_flush(); /* messages follow the table */
    if (cordon_keeps_empty(s))
        moectl_say("an empty slot is cordoned: it gets no worker until `moectl uncordon`; then "
                   "start one again");
    else if (moectl_workers_can_fill(s))
        moectl_say("a place is empty, and %zu spare worker%s: `moectl scale %" PRIu32 "` gives it "
                   "to one",
                   s->n_spare_slots, s->n_spare_slots == 1 ? " waits" : "s wait",
                   moectl_workers_size(s));
    else if (moectl_workers_gone(s) > 0)
        say_replace(common);
    report_at_stake(by, s, deadline_ns);
    return code;
}

/* Gives up after CALL_LIMIT_MS if a worker answers: then the coordinator hangs. */
static struct moe_status ask_coordinator(const struct moectl_common *common, const char *endpoint,
                                         uint64_t deadline_ns, struct moectl_link **link,
                                         Moe__V1__GetStatusResponse **status)
{
    struct moectl_orphaned_group orphaned;
    uint64_t limit = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st =
        moectl_admin_open(endpoint, limit < deadline_ns ? limit : deadline_ns, link, status);
    if (st.code != MOE_DEADLINE_EXCEEDED || limit >= deadline_ns)
        return st;
    moectl_orphaned_group_find(common, &orphaned);
    if (orphaned.answering == 0)
        moectl_say("%s; asking again", st.text);
    return orphaned.answering > 0 ? st : moectl_admin_open(endpoint, deadline_ns, link, status);
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
        st = ask_coordinator(&common, endpoint, deadline, &link, &status);
    if (st.code != MOE_OK) {
        code = moectl_fail(&st);
        moectl_orphaned_group_explain(&common, &st);
        return code;
    }
    Moe__V1__ListModelsResponse *models = moectl_models_try(link, deadline);
    code = print_status(&common, moectl_link_endpoint(link), status, models, deadline);
    if (code == MOECTL_OK && !is_serving(status))
        code = MOECTL_UNHEALTHY;
    if (models != NULL)
        moe__v1__list_models_response__free_unpacked(models, NULL);
    moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return code;
}

const struct moectl_command moectl_status = {
    .name = "status",
    .summary = "Shows the state of a group. Exit code 0 if it serves, 3 if it does not.",
    .usage = "[--endpoint H:P] [-o json]",
    .examples = "  moectl status\n"
                "  moectl status --endpoint 127.0.0.1:7600 -o json | jq -r .state\n",
    .run = run_status,
};

/* ------------------------------------------------------------------ wait */

/* Result of one status call. */
struct sample {
    bool serving, gone;
    bool loads; /* `done` of `total` bytes of weights */
    uint64_t done, total;
    struct moe_status status; /* of the call */
    char state[1024];         /* "WAITING: slot 1 is empty"; "" without an answer */
};

/* `gone`: the address does not answer, or no process of the local group is left. */
static struct sample take_sample(const struct moectl_common *common, uint64_t deadline_ns)
{
    struct sample sample = {0};
    char endpoint[MOECTL_ENDPOINT_MAX], path[MOECTL_PATH_MAX];
    int directory;
    sample.status = moectl_state_endpoint(common, endpoint);
    if (common->endpoint == NULL) {
        struct moe_status st = moectl_state_open(common->state_dir, false, path, &directory);
        sample.gone = st.code != MOE_OK || !moectl_state_is_alive(directory);
        if (st.code == MOE_OK)
            close(directory);
    }
    if (sample.status.code != MOE_OK || sample.gone)
        return sample;
    uint64_t limit = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    sample.status =
        moectl_admin_open(endpoint, limit < deadline_ns ? limit : deadline_ns, &link, &status);
    /* A worker answers for a while after its coordinator has gone. */
    sample.gone = common->endpoint != NULL && sample.status.code == MOE_UNAVAILABLE &&
                  !moectl_link_answers(endpoint, limit);
    if (status != NULL) {
        sample.serving = is_serving(status);
        sample.loads = moectl_workers_load(status, &sample.done, &sample.total);
        snprintf(sample.state, sizeof sample.state, "%s%s%s", state_name(status),
                 status->reason[0] != '\0' ? ": " : "", status->reason);
        moe__v1__get_status_response__free_unpacked(status, NULL);
    }
    moectl_link_close(link);
    return sample;
}

/* `state`: the last state that the group reported, or "". */
static int out_of_time(const struct moe_status *st, const char *state)
{
    bool known = st->code == MOE_OK || st->code == MOE_DEADLINE_EXCEEDED;
    if (known && state[0] != '\0')
        moectl_say("the time limit is over; the group is %s", state);
    else
        moectl_say("the time limit is over; %s",
                   st->code != MOE_OK ? st->text : "its daemons are ending");
    return st->code == MOE_NOT_FOUND ? MOECTL_NOT_FOUND : MOECTL_UNREACHABLE;
}

/* After SILENCE_MS without an answer, explains a group that lacks only its coordinator. Returns
 * true if it did. */
static bool explain_silence(const struct moectl_common *common, const struct sample *sample,
                            uint64_t *silent_since)
{
    uint64_t now = moe_clock_ns();
    if (sample->state[0] != '\0')
        *silent_since = now;
    return now - *silent_since > SILENCE_MS * MOE_NS_PER_MS &&
           moectl_orphaned_group_explain(common, &sample->status);
}

/* The state if it is a new one, and how far loading is. */
static void report(struct moectl_progress *progress, const struct sample *sample, char *last,
                   size_t size)
{
    bool new_state = sample->state[0] != '\0' && strcmp(sample->state, last) != 0;
    if (new_state || !sample->loads)
        moectl_progress_clear(progress);
    if (new_state) {
        moectl_say("%s", sample->state);
        (void)snprintf(last, size, "%s", sample->state);
    }
    if (sample->loads)
        moectl_progress_show(progress, "loading", sample->done, sample->total);
}

static int wait_for(const struct moectl_common *common, bool gone)
{
    struct moectl_progress progress = {0};
    uint64_t silent_since = moe_clock_ns();
    bool explained = gone;
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    uint64_t deadline = moectl_deadline(common);
    char last[sizeof((struct sample *)NULL)->state] = "";
    for (;;) {
        struct sample sample = take_sample(common, deadline);
        bool over = gone ? sample.gone : sample.serving;
        if (over || moe_clock_ns() >= deadline)
            moectl_progress_clear(&progress);
        if (over)
            return MOECTL_OK;
        report(&progress, &sample, last, sizeof last);
        if (!explained)
            explained = explain_silence(common, &sample, &silent_since);
        if (moe_clock_ns() >= deadline) {
            moectl_progress_clear(&progress);
            return out_of_time(&sample.status, last);
        }
        nanosleep(&pause, NULL);
    }
}

static int run_wait(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    const char *condition = "serving";
    const struct moe_option options[] = {
        {"for", 0, MOE_OPTION_STRING, &condition, 0, 0, "STATE",
         "serving, or gone (all daemons have ended)"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &common, argc, argv, &code))
        return code;
    bool gone = strcmp(condition, "gone") == 0;
    if (!gone && strcmp(condition, "serving") != 0)
        return moectl_usage_error("--for must be serving or gone, not '%s'", condition);
    code = wait_for(&common, gone);
    if (code == MOECTL_OK && common.document) {
        json_t *document = moectl_document("Wait");
        json_object_set_new(document, "condition", json_string(condition));
        code = moectl_print(document);
    }
    return code;
}

const struct moectl_command moectl_wait = {
    .name = "wait",
    .summary = "Waits until a group serves, or until it has ended.",
    .usage = "[--for=serving|gone] [--timeout SECONDS]",
    .examples = "  moectl wait --for=serving --timeout 300 --endpoint 127.0.0.1:7600\n"
                "  moectl wait --for=gone\n",
    .run = run_wait,
};
