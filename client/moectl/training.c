/* SPDX-License-Identifier: Apache-2.0 */
/* moectl training: shows the state of a group's training and makes an operator's changes to it:
 * checkpoints, adapters, discarded gradients, frozen parts. Programs, not moectl, compute gradients
 * and steps. */
#include "checkpoints.h"
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/orphaned_group.h"
#include "moectl/group/state.h"
#include "moectl/group/train_state.h"
#include "moectl/io/proto_json.h"
#include "training_watch.h"

#include "daemon/name.h"
#include "moe/client_training.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

enum {
    STEP_ID_TRIES = 8, /* a trainer may take the free id first */
    LATE_TRIES = 20,
    REACH_S = 60, /* limit for reaching a group; the change itself may have none */
};

struct training {
    struct moectl_common common;
    const char *object;     /* of the action: "save" has a NAME */
    uint64_t keep, step_id; /* options; MOE_OPTION_UNSET until check_options, which makes it 0.
                               step_id 0 = the next free id */
    char endpoint[MOECTL_ENDPOINT_MAX]; /* of the worker that gets the change */
    struct moe_client *client;
    bool pins_lineage; /* the change fails if the group has lost the state since `first` */
    bool trains;       /* `first` is known */
    struct moe_client_train_state first; /* state when the command began */
    /* answers */
    struct moe_client_change change;
    struct moe_client_checkpoint checkpoint;
    struct moe_client_frozen frozen;
    uint32_t backwards;
};

/* ---------------------------------------------------------------------------- status */

static void print_frozen(bool router, bool experts, bool shared)
{
    moectl_put("router      %s\n", router ? "frozen" : "learns");
    moectl_put("experts     %s\n", experts ? "frozen" : "learns");
    moectl_put("shared      %s\n", shared ? "frozen" : "learns");
}

static const char *optimizer_name(const Moe__V1__GetTrainStateResponse *s)
{
    return s->optimizer == MOE__V1__OPTIMIZER__OPTIMIZER_SGD ? "SGD" : "AdamW";
}

static void print_table(const Moe__V1__GetTrainStateResponse *s)
{
    moectl_put("weights     version %" PRIu64 ", lineage %" PRIu64 "\n", s->weights_version,
               s->lineage);
    moectl_put("steps       %" PRIu64 " of %s, last id %" PRIu64 "\n", s->steps, optimizer_name(s),
               s->last_step_id);
    moectl_put("gradients   of %" PRIu32 " Backward call%s\n", s->backwards,
               s->backwards == 1 ? "" : "s");
    print_frozen(s->router_frozen, s->experts_frozen, s->shared_frozen);
    if (s->lora_rank != 0) {
        moectl_put("adapters    rank %" PRIu32 ", alpha %g, scale %g:", s->lora_rank, s->lora_alpha,
                   s->lora_scale);
        for (size_t i = 0; i < s->n_lora_targets; i++)
            moectl_put(" %s", s->lora_targets[i]);
        moectl_put("\n");
    }
    moectl_put("checkpoint  %s", s->checkpoint[0] != '\0' ? s->checkpoint : "none");
    if (s->unsaved_steps != 0)
        moectl_put("; %" PRIu64 " step%s since", s->unsaved_steps,
                   s->unsaved_steps == 1 ? "" : "s");
    moectl_put("\n");
    bool saving = s->saving[0] != '\0';
    if (saving || s->loading[0] != '\0')
        moectl_put("%s     %s: %.1f of %.1f MiB of this worker\n", saving ? "saving " : "loading",
                   saving ? s->saving : s->loading, (double)s->progress_bytes / (1024.0 * 1024.0),
                   (double)s->progress_bytes_total / (1024.0 * 1024.0));
    if (s->problem[0] != '\0')
        moectl_put("problem     %s\n", s->problem);
    moectl_put("memory      %.1f MiB of state, %.1f of %.1f MiB of retained passes\n",
               (double)s->state_bytes / (1024.0 * 1024.0),
               (double)s->retained_bytes / (1024.0 * 1024.0),
               (double)s->retained_bytes_limit / (1024.0 * 1024.0));
    moectl_put("device      %.1f of %.1f MiB of activations retained for Backward\n",
               (double)s->retained_device_bytes / (1024.0 * 1024.0),
               (double)s->retained_device_bytes_limit / (1024.0 * 1024.0));
}

static int print_state(const struct moectl_common *common, const Moe__V1__GetTrainStateResponse *s)
{
    if (!common->document) {
        print_table(s);
        return MOECTL_OK;
    }
    return moectl_print_message("TrainState", &s->base);
}

/* Asks a worker. `*serves`: it has a view in force. */
static struct moe_status ask(const struct moectl_common *common,
                             Moe__V1__GetTrainStateResponse **out, bool *serves)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    uint64_t deadline = moectl_deadline(common);
    *out = NULL;
    MOE_TRY(moectl_training_endpoint(common, deadline, endpoint));
    MOE_TRY(moectl_link_open(endpoint, &link));
    struct moe_status st = moectl_link_server_info(link, deadline, &info);
    if (st.code == MOE_OK) {
        *serves = info->epoch != 0;
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
        st = moectl_train_state(link, deadline, out);
    }
    moectl_link_close(link);
    return st;
}

static int fail(const struct moe_status *st)
{
    if (st->code != MOE_UNIMPLEMENTED)
        return moectl_fail(st);
    moectl_say("this group does not train: its workers were started without --training");
    return MOECTL_NOT_FOUND;
}

static int show(const struct moectl_common *common)
{
    Moe__V1__GetTrainStateResponse *state = NULL;
    bool serves;
    struct moe_status st = ask(common, &state, &serves);
    if (st.code != MOE_OK)
        return fail(&st);
    int code = print_state(common, state);
    if (!serves) {
        moectl_say("the worker has no view in force: `moectl status` shows why");
        moectl_train_report_at_stake(state);
    }
    moe__v1__get_train_state_response__free_unpacked(state, NULL);
    return code;
}

static int list(const struct moectl_common *common)
{
    struct moe_status st;
    int code = moectl_list_checkpoints(common, &st);
    return st.code == MOE_OK ? code : fail(&st);
}

/* -------------------------------------------------------------------------- recovery */

/* Names the checkpoint to which a group that does not form goes back. `name` NULL: to the model as
 * loaded. */
static int recover(const struct moectl_common *common, const char *name)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moectl_link *link = NULL;
    ProtobufCMessage *answer = NULL;
    Moe__V1__RecoverTrainingRequest request = MOE__V1__RECOVER_TRAINING_REQUEST__INIT;
    uint64_t deadline = moectl_deadline(common);
    request.name = (char *)(uintptr_t)(name != NULL ? name : "");
    request.as_loaded = name == NULL;
    struct moe_status st = moectl_training_endpoint(common, deadline, endpoint);
    if (st.code == MOE_OK)
        st = moectl_link_open(endpoint, &link);
    if (st.code == MOE_OK)
        st = moectl_link_call(link, "/moe.v1.TrainingService/RecoverTraining", &request.base,
                              deadline, &moe__v1__recover_training_response__descriptor, &answer);
    moectl_link_close(link);
    if (st.code != MOE_OK)
        return fail(&st);
    protobuf_c_message_free_unpacked(answer, NULL);
    moectl_put("the group goes back to %s when it forms, now or when its coordinator is back "
               "(`moectl wait` waits for it)\n",
               name != NULL ? name : "the model as loaded");
    return MOECTL_OK;
}

/* --------------------------------------------------------------------------- changes */

/* Makes the change t->change and stores its answer. */
typedef struct moe_status (*change_fn)(struct training *t);

static struct moe_status do_save(struct training *t)
{
    t->checkpoint = (struct moe_client_checkpoint){.size = sizeof t->checkpoint,
                                                   .change = t->change,
                                                   .name = t->object,
                                                   .keep = (uint32_t)t->keep};
    return moe_client_save_checkpoint(t->client, &t->checkpoint);
}

static struct moe_status do_load(struct training *t)
{
    t->checkpoint = (struct moe_client_checkpoint){
        .size = sizeof t->checkpoint, .change = t->change, .name = t->object};
    return moe_client_load_checkpoint(t->client, &t->checkpoint);
}

/* Merges if t->object is NULL. */
static struct moe_status do_export(struct training *t)
{
    t->checkpoint = (struct moe_client_checkpoint){
        .size = sizeof t->checkpoint, .change = t->change, .name = t->object};
    return moe_client_export_adapter(t->client, &t->checkpoint);
}

static struct moe_status do_zero_grad(struct training *t)
{
    return moe_client_zero_grad(t->client, &t->change, &t->backwards);
}

static struct moe_status do_freeze(struct training *t)
{
    return moe_client_set_frozen(t->client, &t->change, t->frozen);
}

static uint32_t named_as_removed(const struct training *t)
{
    uint32_t count = t->checkpoint.removed_count;
    return count < MOE_CLIENT_REMOVED_MAX ? count : MOE_CLIENT_REMOVED_MAX;
}

static void report_saved(const struct training *t)
{
    moectl_put("saved %s: %" PRIu64 " step%s, weights version %" PRIu64 ", %.1f MiB\n", t->object,
               t->checkpoint.steps, t->checkpoint.steps == 1 ? "" : "s",
               t->checkpoint.weights_version, (double)t->checkpoint.bytes / (1024.0 * 1024.0));
    for (uint32_t i = 0; i < named_as_removed(t); i++)
        moectl_put("removed %s\n", t->checkpoint.removed[i]);
    if (t->checkpoint.removed_count > MOE_CLIENT_REMOVED_MAX)
        moectl_put("removed %" PRIu32 " more\n",
                   t->checkpoint.removed_count - MOE_CLIENT_REMOVED_MAX);
}

/* On stderr, for all formats: the load has discarded this without a question. */
static void report_lost(const struct training *t)
{
    const struct moe_client_checkpoint *c = &t->checkpoint;
    if (c->lost_steps != 0)
        moectl_say("%" PRIu64 " unsaved optimizer step%s %s discarded", c->lost_steps,
                   c->lost_steps == 1 ? "" : "s", c->lost_steps == 1 ? "was" : "were");
    if (c->lost_backwards != 0)
        moectl_say("the gradients of %" PRIu32 " Backward call%s were discarded", c->lost_backwards,
                   c->lost_backwards == 1 ? "" : "s");
}

static void report_loaded(const struct training *t)
{
    const struct moe_client_checkpoint *c = &t->checkpoint;
    moectl_put("loaded %s: %" PRIu64 " step%s, weights version %" PRIu64 ", lineage %" PRIu64 "\n",
               t->object, c->steps, c->steps == 1 ? "" : "s", c->weights_version,
               c->answered_lineage);
}

static void report_exported(const struct training *t)
{
    moectl_put("exported %s: %.1f MiB\n", t->object,
               (double)t->checkpoint.bytes / (1024.0 * 1024.0));
}

static void report_merged(const struct training *t)
{
    (void)t;
    moectl_put("merged the adapters into the weights\n");
}

static void report_zeroed(const struct training *t)
{
    moectl_put("discarded the gradients of %" PRIu32 " Backward call%s\n", t->backwards,
               t->backwards == 1 ? "" : "s");
}

static void report_frozen(const struct training *t)
{
    print_frozen(t->frozen.router, t->frozen.experts, t->frozen.shared);
}

static json_t *json_checkpoint(const struct training *t)
{
    char version[24], lineage[24], bytes[24];
    const struct moe_client_checkpoint *c = &t->checkpoint;
    snprintf(version, sizeof version, "%" PRIu64, c->weights_version);
    snprintf(lineage, sizeof lineage, "%" PRIu64, c->answered_lineage);
    snprintf(bytes, sizeof bytes, "%" PRIu64, c->bytes);
    return json_pack("{s:s, s:s, s:s, s:s}", "name", t->object != NULL ? t->object : "",
                     "weightsVersion", version, "lineage", lineage, "bytes", bytes);
}

static json_t *json_loaded(const struct training *t)
{
    char steps[24], lost[24];
    json_t *document = json_checkpoint(t);
    snprintf(steps, sizeof steps, "%" PRIu64, t->checkpoint.steps);
    snprintf(lost, sizeof lost, "%" PRIu64, t->checkpoint.lost_steps);
    json_object_set_new(document, "steps", json_string(steps));
    json_object_set_new(document, "lostSteps", json_string(lost));
    json_object_set_new(document, "lostBackwards", json_integer(t->checkpoint.lost_backwards));
    return document;
}

static json_t *json_saved(const struct training *t)
{
    char steps[24];
    json_t *document = json_checkpoint(t), *removed = json_array();
    snprintf(steps, sizeof steps, "%" PRIu64, t->checkpoint.steps);
    json_object_set_new(document, "steps", json_string(steps));
    for (uint32_t i = 0; i < named_as_removed(t); i++)
        json_array_append_new(removed, json_string(t->checkpoint.removed[i]));
    json_object_set_new(document, "removed", removed);
    json_object_set_new(document, "removedCount", json_integer(t->checkpoint.removed_count));
    return document;
}

static json_t *json_zeroed(const struct training *t)
{
    return json_pack("{s:I}", "backwards", (json_int_t)t->backwards);
}

static json_t *json_frozen(const struct training *t)
{
    return json_pack("{s:b, s:b, s:b}", "router", (int)t->frozen.router, "experts",
                     (int)t->frozen.experts, "shared", (int)t->frozen.shared);
}

enum object { NO_OBJECT, NAME, PARTS };

static const struct action {
    const char *name;
    enum object object;
    const char *kind; /* of the JSON document */
    change_fn run;
    void (*report)(const struct training *t);
    json_t *(*json)(const struct training *t);
} actions[] = {
    {"save", NAME, "SavedCheckpoint", do_save, report_saved, json_saved},
    {"load", NAME, "LoadedCheckpoint", do_load, report_loaded, json_loaded},
    {"export", NAME, "ExportedAdapter", do_export, report_exported, json_checkpoint},
    {"merge", NO_OBJECT, "MergedAdapter", do_export, report_merged, json_checkpoint},
    {"zero-grad", NO_OBJECT, "ZeroedGradients", do_zero_grad, report_zeroed, json_zeroed},
    {"freeze", PARTS, "Frozen", do_freeze, report_frozen, json_frozen},
    /* These make no change with an id. */
    {"status", NO_OBJECT, "TrainState", NULL, NULL, NULL},
    {"list", NO_OBJECT, "Checkpoints", NULL, NULL, NULL},
    {"recover", NAME, NULL, NULL, NULL, NULL},
    {"recover-model", NO_OBJECT, NULL, NULL, NULL, NULL},
};

static const struct action *find_action(const char *name)
{
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (strcmp(actions[i].name, name) == 0)
            return &actions[i];
    return NULL;
}

/* "router,experts" or "none". */
static bool read_parts(const char *text, struct moe_client_frozen *out)
{
    static const char *const names[] = {"router", "experts", "shared"};
    bool *const flags[] = {&out->router, &out->experts, &out->shared};
    if (strcmp(text, "none") == 0)
        return true;
    for (;;) {
        size_t length = strcspn(text, ","), i = 0;
        while (i < 3 && (strlen(names[i]) != length || strncmp(names[i], text, length) != 0))
            i++;
        if (i == 3)
            return false;
        *flags[i] = true;
        if (text[length] == '\0')
            return true;
        text += length + 1;
    }
}

/* Asks even if --step-id is given: the answer shows whether the group trains at all. */
static struct moe_status next_step_id(struct training *t)
{
    struct moe_client_train_state state = {.size = sizeof state};
    MOE_TRY(moe_client_get_train_state(t->client, t->change.timeout_ms, &state));
    if (!t->trains)
        t->first = state;
    t->trains = true;
    if (t->step_id == 0 && state.last_step_id >= INT64_MAX)
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_VALUE_INVALID,
                         "the highest step id is used: give an unused one with --step-id");
    if (t->step_id == 0)
        t->change.step_id = state.last_step_id + 1;
    /* Writes the state that the operator saw, or nothing. */
    if (t->pins_lineage)
        t->change.lineage = t->first.lineage;
    return moe_ok();
}

/* Makes the change. If a trainer took the id that we chose, tries the next one. */
static struct moe_status change(struct training *t, const struct action *a)
{
    /* The change may have no limit; reaching the group always has one. */
    struct moectl_common reach = t->common;
    reach.timeout_s = reach.timeout_s > 0 ? reach.timeout_s : (double)REACH_S;
    struct moe_client_config config = {
        .size = sizeof config, .endpoint = t->endpoint, .timeout_ms = moectl_timeout_ms(&reach)};
    MOE_TRY(moectl_training_endpoint(&t->common, moectl_deadline(&reach), t->endpoint));
    MOE_TRY(moe_client_connect(&config, &t->client));
    struct moectl_watch *watch = moectl_watch_training(t->endpoint);
    t->pins_lineage = a->run == do_save || a->run == do_export;
    t->change = (struct moe_client_change){
        .step_id = t->step_id, .session = "moectl", .timeout_ms = moectl_timeout_ms(&t->common)};
    struct moe_status st = moe_ok();
    for (int i = 0; i < STEP_ID_TRIES; i++) {
        st = next_step_id(t);
        if (st.code == MOE_OK)
            st = a->run(t);
        if (st.reason != MOE_REASON_ID_REUSED || t->step_id != 0)
            break;
    }
    moectl_watch_end(watch);
    moe_client_close(t->client);
    return st;
}

/* Reports the state of a Save when its time limit is over. Workers cancel it with some delay. */
static int report_late_save(const struct training *t, const struct moe_status *late)
{
    struct moectl_common common = t->common;
    common.timeout_s = 1;
    struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
    bool running = true, written = false;
    for (int i = 0; i < LATE_TRIES && running; i++) {
        Moe__V1__GetTrainStateResponse *s = NULL;
        bool serves;
        struct moe_status st = ask(&common, &s, &serves);
        if (st.code != MOE_OK)
            return moectl_fail(late);
        running = strcmp(s->saving, t->object) == 0;
        written = strcmp(s->checkpoint, t->object) == 0;
        moe__v1__get_train_state_response__free_unpacked(s, NULL);
        if (running)
            nanosleep(&pause, NULL);
    }
    moectl_say(
        running   ? "the time limit is over (--timeout %g s); %s is still being written: see "
                    "`moectl training`"
        : written ? "the time limit is over (--timeout %g s); %s was written all the same"
                  : "the time limit is over (--timeout %g s); %s is cancelled and has left nothing "
                    "behind",
        t->common.timeout_s, t->object);
    return moectl_exit_code(late->code);
}

/* The group lost its state during the command and went back to a checkpoint. */
static int report_lost_state(const struct training *t, const struct action *a)
{
    Moe__V1__GetTrainStateResponse *s = NULL;
    bool serves;
    struct moe_status st = ask(&t->common, &s, &serves);
    if (st.code != MOE_OK)
        return moectl_fail(&st);
    bool of_model = s->checkpoint[0] == '\0';
    bool written = a->run == do_save && strcmp(s->checkpoint, t->object) == 0 &&
                   strcmp(t->first.checkpoint, t->object) != 0;
    if (written)
        moectl_say("%s is complete, with %" PRIu64 " steps; then the group lost a worker and went "
                   "back to it",
                   t->object, t->first.steps);
    else
        moectl_say("the group went back to %s%s (it lost a worker, or somebody loaded it): it had "
                   "%" PRIu64 " steps and has %" PRIu64
                   "; nothing was written, repeat the command to write this state",
                   of_model ? "the model as loaded" : "checkpoint ", s->checkpoint, t->first.steps,
                   s->steps);
    moe__v1__get_train_state_response__free_unpacked(s, NULL);
    return moectl_exit_code(MOE_FAILED_PRECONDITION);
}

/* Reports the failure, and the state of a group that did not answer in time. */
static int report_failure(const struct training *t, const struct moe_status *st)
{
    int code = t->trains ? moectl_fail(st) : fail(st);
    if (st->code == MOE_DEADLINE_EXCEEDED && t->common.timeout_s > 0)
        moectl_say("the limit is --timeout %g s; 0 = none", t->common.timeout_s);
    if ((st->code == MOE_UNAVAILABLE || st->code == MOE_DEADLINE_EXCEEDED) &&
        !moectl_orphaned_group_explain(&t->common, st) && t->endpoint[0] != '\0')
        moectl_watch_report_group(t->endpoint);
    return code;
}

static int run_change(struct training *t, const struct action *a)
{
    struct moe_status st = change(t, a);
    if (st.reason == MOE_REASON_STATE_LOST)
        return report_lost_state(t, a);
    if (st.reason == MOE_REASON_GRADIENTS_PENDING) {
        int code = moectl_fail(&st);
        moectl_say(
            "a trainer is between a backward pass and its step: try again, or let the trainer "
            "make the change between its steps (Session.change of moed.torch)");
        return code;
    }
    if (st.code == MOE_DEADLINE_EXCEEDED && t->trains && a->run == do_save)
        return report_late_save(t, &st);
    if (st.code != MOE_OK)
        return report_failure(t, &st);
    if (a->run == do_load)
        report_lost(t);
    if (!t->common.document) {
        a->report(t);
        return MOECTL_OK;
    }
    json_t *document = moectl_document(a->kind), *body = a->json(t);
    if (document != NULL && (body == NULL || json_object_update(document, body) != 0)) {
        json_decref(document);
        document = NULL;
    }
    json_decref(body);
    return moectl_print(document);
}

/* ----------------------------------------------------------------------- command line */

static int check_object(struct training *t, const struct action *a)
{
    switch (a->object) {
    case NO_OBJECT:
        return t->object == NULL ? MOECTL_OK
                                 : moectl_usage_error("unexpected argument '%s'", t->object);
    case NAME:
        if (t->object == NULL)
            return moectl_usage_error("training %s needs a NAME", a->name);
        return moe_training_name_ok(t->object)
                   ? MOECTL_OK
                   : moectl_usage_error("'%s' is not a valid NAME: 1 to %d characters of "
                                        "[A-Za-z0-9._-], no dot first",
                                        t->object, MOE_TRAINING_NAME_MAX);
    case PARTS:
        return t->object != NULL && read_parts(t->object, &t->frozen)
                   ? MOECTL_OK
                   : moectl_usage_error("training freeze needs a comma-separated list of router, "
                                        "experts, shared, or none");
    }
    return MOECTL_USAGE;
}

/* Refuses an option that the action does not use. */
static int check_options(struct training *t, const struct action *a)
{
    if (t->keep != MOE_OPTION_UNSET && a->run != do_save)
        return moectl_usage_error("--keep is for training save, not for training %s", a->name);
    if (t->step_id != MOE_OPTION_UNSET && a->run == NULL)
        return moectl_usage_error("training %s takes no --step-id", a->name);
    t->keep = t->keep != MOE_OPTION_UNSET ? t->keep : 0;
    t->step_id = t->step_id != MOE_OPTION_UNSET ? t->step_id : 0;
    return MOECTL_OK;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct training t = {.common = {.format = "table",
                                    .timeout_s = 60,
                                    .words_max = 2,
                                    .words = {"status"}}, /* ACTION and its object */
                         .keep = MOE_OPTION_UNSET,
                         .step_id = MOE_OPTION_UNSET};
    const struct moe_option own[] = {
        {"keep", 0, MOE_OPTION_UINT, &t.keep, 0, UINT32_MAX, "N",
         "save: then remove all but the N newest checkpoints of this group; 0 = none (default)"},
        {"step-id", 0, MOE_OPTION_UINT, &t.step_id, 0, INT64_MAX, "ID",
         "id of the change: a repeat under it changes nothing; 0 = the next free id (default)"},
    };
    int code;
    if (!moectl_parse(self, own, sizeof own / sizeof *own, &t.common, argc, argv, &code))
        return code;
    t.object = t.common.words[1];
    const struct action *a = find_action(t.common.words[0]);
    if (a == NULL)
        return moectl_usage_error("there is no action 'training %s'", t.common.words[0]);
    if (!t.common.timeout_given && (a->run == do_save || a->run == do_load || a->run == do_export))
        t.common.timeout_s = 0; /* their time depends on the disk */
    code = check_object(&t, a);
    if (code == MOECTL_OK)
        code = check_options(&t, a);
    if (code != MOECTL_OK)
        return code;
    if (a->run != NULL)
        return run_change(&t, a);
    if (strcmp(a->name, "status") == 0)
        return show(&t.common);
    if (strcmp(a->name, "list") == 0)
        return list(&t.common);
    return recover(&t.common, t.object);
}

const struct moectl_command moectl_training = {
    .name = "training",
    .summary = "Shows the state of training; makes checkpoints, exports adapters, freezes parts.",
    .usage = "[ACTION] [--endpoint H:P] [-o json]",
    .more = "actions:\n"
            "  status         show the state of training (default)\n"
            "  list           list the checkpoints in the workers' training directory, newest\n"
            "                 first; * = the group goes back to this one if it loses a worker.\n"
            "                 Reads no tensor: only load finds damaged bytes of tensors\n"
            "  save NAME      write weights and optimizer state to checkpoint NAME in the\n"
            "                 workers' training directory\n"
            "  load NAME      load checkpoint NAME and zero the gradients; this resumes a\n"
            "                 restarted group\n"
            "  recover NAME   if the group cannot go back to its last checkpoint: go back to\n"
            "                 checkpoint NAME\n"
            "  recover-model  the same, but go back to the model as loaded\n"
            "  export NAME    write the adapters for PEFT\n"
            "  merge          merge the adapters into the weights and start new adapters\n"
            "  zero-grad      discard the gradients since the last step\n"
            "  freeze PARTS   freeze a comma-separated list of router, experts, shared; all\n"
            "                 other parts learn; none = all parts learn\n"
            "\n"
            "save, load, export and merge have no time limit unless --timeout is given. Ctrl-C\n"
            "cancels a save.\n",
    .examples = "  moectl training\n"
                "  moectl training -o json | jq .weightsVersion\n"
                "  moectl training save epoch-3 --keep 5\n"
                "  moectl training list -o json | jq -r '.checkpoints[0].name'\n"
                "  moectl training freeze router,shared\n",
    .run = run,
};
