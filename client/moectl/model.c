/* SPDX-License-Identifier: Apache-2.0 */
/* moectl load, unload: more models for a group. moectl model: decisions about a group's models. */
#include "commands.h"
#include "moectl/group/models.h"
#include "moectl/io/proto_json.h"
#include "moectl/io/table.h"
#include "training_watch.h"

#include "base/clock.h"

#include <inttypes.h>
#include <string.h>

enum { REACH_S = 10 };

struct model_change {
    struct moectl_common common;
    const char *name; /* NULL: none was given */
    const char *directory, *reason;
    bool dry_run, drain;
    struct moectl_link *link;
};

/* The change may have no limit; reaching the group always has one. */
static struct moe_status open_link(struct model_change *c)
{
    Moe__V1__GetStatusResponse *status = NULL;
    uint64_t limit = moe_clock_ns() + REACH_S * MOE_NS_PER_S;
    struct moe_status st = moectl_admin_find(
        &c->common, moe_earlier(limit, moectl_deadline(&c->common)), &c->link, &status);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    return st;
}

/* Calls a method of AdminService. */
static struct moe_status call(struct model_change *c, const char *path,
                              const ProtobufCMessage *request,
                              const ProtobufCMessageDescriptor *type, ProtobufCMessage **answer)
{
    *answer = NULL;
    MOE_TRY(open_link(c));
    return moectl_link_call(c->link, path, request, moectl_deadline(&c->common), type, answer);
}

static char *text_or_empty(const char *text)
{
    return (char *)(uintptr_t)(text != NULL ? text : ""); /* packing only reads */
}

/* ------------------------------------------------------------------ load */

/* For moectl_watch: how far the load is. */
static void ask_progress(void *ctx, struct moectl_watch_look *look)
{
    struct model_change asking = {.common = ((const struct model_change *)ctx)->common};
    const char *name = ((const struct model_change *)ctx)->name;
    Moe__V1__ListModelsResponse *list = NULL;
    const Moe__V1__ModelStatus *m;
    asking.common.timeout_s = 1;
    struct moe_status st = open_link(&asking);
    if (!moe_failed(&st))
        st = moectl_models_ask(asking.link, moectl_deadline(&asking.common), &list);
    if (!moe_failed(&st))
        st = moectl_models_find(list, name, &m);
    if (moe_failed(&st)) {
        (void)snprintf(look->waiting, sizeof look->waiting, "waiting: %s", st.text);
    } else {
        (void)snprintf(look->what, sizeof look->what, "loading %.64s", m->name);
        (void)snprintf(look->waiting, sizeof look->waiting, "%.64s is %s%s%.200s", m->name,
                       moectl_model_state(m), m->reason[0] != '\0' ? ": " : "", m->reason);
        look->done = m->loaded_bytes;
        look->total = m->total_bytes;
    }
    if (list != NULL)
        moe__v1__list_models_response__free_unpacked(list, NULL);
    moectl_link_close(asking.link);
}

static int print_plan(FILE *to, const Moe__V1__LoadModelResponse *plan)
{
    static const struct moectl_column columns[] = {
        {.title = "SLOT", .right = true},
        {.title = "FILES", .right = true},
        {.title = "RESIDENT", .right = true},
        {.title = "FREE", .right = true},
    };
    const double mib = 1.0 / (1024.0 * 1024.0);
    struct moectl_table *t = moectl_table_create(columns, sizeof columns / sizeof *columns, false);
    for (size_t i = 0; i < plan->n_slots; i++) {
        const Moe__V1__SlotPlan *s = plan->slots[i];
        moectl_table_cell(t, "%" PRIu32, s->slot);
        moectl_table_cell(t, "%.1f MiB", (double)s->file_bytes * mib);
        moectl_table_cell(t, "%.1f MiB", (double)s->resident_bytes * mib);
        moectl_table_cell(t, "%.1f MiB", (double)s->free_bytes * mib);
    }
    bool good = moectl_table_write(to, t, NULL);
    moectl_table_free(t);
    return good ? MOECTL_OK : MOECTL_FAILED;
}

static int show_load(const struct model_change *c, const Moe__V1__LoadModelResponse *answer)
{
    const Moe__V1__ModelStatus *m = answer->model;
    if (!c->common.document) {
        if (c->dry_run)
            return print_plan(stdout, answer);
        moectl_put("serving %s: %s, %zu MoE layer%s, digest %s\n", m->name, m->family, m->n_layers,
                   m->n_layers == 1 ? "" : "s", m->digest);
        return MOECTL_OK;
    }
    json_t *document = moectl_document(c->dry_run ? "ModelPlan" : "LoadedModel");
    json_t *slots = json_array();
    for (size_t i = 0; i < answer->n_slots; i++)
        json_array_append_new(slots, moectl_proto_json(&answer->slots[i]->base));
    json_object_set_new(document, "model", moectl_proto_json(&m->base));
    json_object_set_new(document, "slots", slots);
    return moectl_print(document);
}

static struct moe_status ask_load(struct model_change *c, bool dry_run,
                                  Moe__V1__LoadModelResponse **out)
{
    Moe__V1__LoadModelRequest request = MOE__V1__LOAD_MODEL_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.directory = text_or_empty(c->directory);
    request.name = text_or_empty(c->name);
    request.dry_run = dry_run;
    struct moe_status st = moectl_link_call(c->link, "/moe.v1.AdminService/LoadModel",
                                            &request.base, moectl_deadline(&c->common),
                                            &moe__v1__load_model_response__descriptor, &answer);
    *out = (Moe__V1__LoadModelResponse *)answer;
    if (moe_failed(&st) || (*out)->model != NULL)
        return st;
    protobuf_c_message_free_unpacked(answer, NULL);
    *out = NULL;
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "the answer has no model");
}

/* The plan first, on stderr unless it is all that is wanted; then the load. */
static struct moe_status load(struct model_change *c, Moe__V1__LoadModelResponse **out)
{
    Moe__V1__LoadModelResponse *plan;
    *out = NULL;
    MOE_TRY(open_link(c));
    MOE_TRY(ask_load(c, true, &plan));
    if (c->dry_run) {
        *out = plan;
        return moe_ok();
    }
    (void)print_plan(stderr, plan);
    struct model_change watched = *c;
    watched.name = plan->model->name;
    struct moectl_watch *watch = moectl_watch_begin(ask_progress, &watched);
    struct moe_status st = ask_load(c, false, out);
    moectl_watch_end(watch);
    moe__v1__load_model_response__free_unpacked(plan, NULL);
    return st;
}

static int run_load(const struct moectl_command *self, int argc, char **argv)
{
    struct model_change c = {.common = {.format = "table", .words_max = 1}};
    const struct moe_option options[] = {
        {"name", 'n', MOE_OPTION_STRING, &c.name, 0, 0, "NAME",
         "as clients name it; default: the last component of DIR"},
        {"dry-run", 0, MOE_OPTION_BOOL, &c.dry_run, 0, 0, NULL,
         "print the memory of each slot, and load nothing"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &c.common, argc, argv,
                      &code))
        return code;
    c.directory = c.common.words[0];
    if (c.directory == NULL)
        return moectl_usage_error("which directory?");
    if (c.directory[0] != '/')
        return moectl_usage_error("'%s' is not an absolute path; each worker's host has it",
                                  c.directory);
    if (c.name != NULL && (code = moectl_check_model_name(c.name)) != MOECTL_OK)
        return code;
    Moe__V1__LoadModelResponse *answer;
    struct moe_status st = load(&c, &answer);
    code = moe_failed(&st) ? moectl_fail(&st) : show_load(&c, answer);
    if (answer != NULL)
        moe__v1__load_model_response__free_unpacked(answer, NULL);
    moectl_link_close(c.link);
    return code;
}

const struct moectl_command moectl_load = {
    .name = "load",
    .summary = "Serves one more model, next to those that a group serves.",
    .usage = "DIR [--name NAME] [--dry-run] [--timeout SECONDS]",
    .more =
        "DIR is the absolute path of a checkpoint folder, the same on the host of each worker.\n"
        "First the memory of each slot is planned: a model that does not fit is refused before\n"
        "a byte of its weights is read. The group goes on serving meanwhile.\n",
    .examples = "  moectl load /models/olmoe --dry-run\n"
                "  moectl load /models/olmoe --name small\n",
    .run = run_load,
};

/* ------------------------------------------------------------------ unload */

static int show_unload(const struct moectl_common *common, const char *name)
{
    if (common->document) {
        json_t *document = moectl_document("UnloadedModel");
        json_object_set_new(document, "name", json_string(name));
        return moectl_print(document);
    }
    moectl_put("unloaded %s\n", name);
    return MOECTL_OK;
}

static int run_unload(const struct moectl_command *self, int argc, char **argv)
{
    struct model_change c = {.common = {.format = "table", .words_max = 1}};
    const struct moe_option options[] = {
        {"drain", 0, MOE_OPTION_BOOL, &c.drain, 0, 0, NULL,
         "refuse new requests and finish the others, instead of failing if there are any"},
    };
    ProtobufCMessage *answer;
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &c.common, argc, argv,
                      &code))
        return code;
    c.name = c.common.words[0];
    if (c.name == NULL)
        return moectl_usage_error("which model?");
    if ((code = moectl_check_model_name(c.name)) != MOECTL_OK)
        return code;
    Moe__V1__UnloadModelRequest request = MOE__V1__UNLOAD_MODEL_REQUEST__INIT;
    request.name = text_or_empty(c.name);
    request.drain = c.drain;
    struct moe_status st = call(&c, "/moe.v1.AdminService/UnloadModel", &request.base,
                                &moe__v1__unload_model_response__descriptor, &answer);
    if (answer != NULL)
        protobuf_c_message_free_unpacked(answer, NULL);
    moectl_link_close(c.link);
    return moe_failed(&st) ? moectl_fail(&st) : show_unload(&c.common, c.name);
}

const struct moectl_command moectl_unload = {
    .name = "unload",
    .summary = "Ends the serving of a model that was added with load.",
    .usage = "NAME [--drain] [--timeout SECONDS]",
    .more = "While requests for the model are in flight, this fails and changes nothing.\n",
    .examples = "  moectl unload small --drain\n",
    .run = run_unload,
};

/* ------------------------------------------------------------------ model */

static int show_accepted(const struct moectl_common *common, const char *forgotten)
{
    if (common->document) {
        json_t *document = moectl_document("AcceptedModel");
        json_object_set_new(document, "forgotten", json_string(forgotten));
        return moectl_print(document);
    }
    moectl_put(forgotten[0] != '\0' ? "forgot the digests of model %s\n"
                                    : "no digests were recorded%s\n",
               forgotten);
    return MOECTL_OK;
}

static int accept(struct model_change *c)
{
    ProtobufCMessage *answer;
    Moe__V1__AcceptModelRequest request = MOE__V1__ACCEPT_MODEL_REQUEST__INIT;
    request.reason = text_or_empty(c->reason);
    request.model = text_or_empty(c->name);
    struct moe_status st = call(c, "/moe.v1.AdminService/AcceptModel", &request.base,
                                &moe__v1__accept_model_response__descriptor, &answer);
    moectl_link_close(c->link);
    if (st.code == MOE_UNAVAILABLE)
        moectl_say("the coordinator keeps the record, so it must run, without workers. While it is "
                   "stopped, removing model.digests from its --state-dir does the same");
    if (moe_failed(&st))
        return moectl_fail(&st);
    int code = show_accepted(&c->common, ((Moe__V1__AcceptModelResponse *)answer)->forgotten);
    protobuf_c_message_free_unpacked(answer, NULL);
    return code;
}

static int run_model(const struct moectl_command *self, int argc, char **argv)
{
    struct model_change c = {.common = {.format = "table", .timeout_s = 10, .words_max = 2},
                             .reason = "moectl model accept"};
    const struct moe_option options[] = {
        {"reason", 0, MOE_OPTION_STRING, &c.reason, 0, 0, "TEXT", "why; for the coordinator's log"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &c.common, argc, argv,
                      &code))
        return code;
    if (c.common.word_count == 0)
        return moectl_usage_error("which action? model accept");
    if (strcmp(c.common.words[0], "accept") != 0)
        return moectl_usage_error("there is no action 'model %s'", c.common.words[0]);
    c.name = c.common.words[1];
    return accept(&c);
}

const struct moectl_command moectl_model = {
    .name = "model",
    .summary = "Accepts that the next workers of a group have other weights.",
    .usage = "accept [NAME] [--endpoint H:P] [--reason TEXT]",
    .more =
        "actions:\n"
        "  accept [NAME]  let the next workers bring other weights of this model; without\n"
        "                 NAME: of the default model\n"
        "\n"
        "A coordinator records the digests of the models that its group serves, and refuses\n"
        "workers with other bytes in their files. To serve those, end all workers, run\n"
        "`moectl model accept`, and start workers with the new files. The coordinator must run.\n"
        "While it is stopped, removing model.digests from its --state-dir does the same.\n"
        "`moectl up` begins a new record by itself. A model with another configuration needs no\n"
        "decision.\n",
    .examples = "  moectl model accept --endpoint 127.0.0.1:7700 --reason \"fine-tuned again\"\n",
    .run = run_model,
};
