/* SPDX-License-Identifier: Apache-2.0 */
/* moectl describe: all that is known about the group, one worker or one model, with its last
 * events. */
#include "commands.h"
#include "moectl/group/events.h"
#include "moectl/group/models.h"
#include "moectl/io/proto_json.h"
#include "moectl/io/yaml.h"
#include "workers.h"

#include "base/clock.h"

#include <stdlib.h>
#include <string.h>

enum { EVENTS_SHOWN = 20, WORKER_LIMIT_MS = 2000 };

struct describe {
    struct moectl_common common;
    int32_t slot; /* MOECTL_ALL_EVENTS: the group, or a model */
    const char *model;
    struct moectl_link *link;
    Moe__V1__GetStatusResponse *status;
    Moe__V1__ListEventsResponse *events;
};

/* What the worker says of itself; null when it does not answer. */
static json_t *server_info(const struct describe *d, const Moe__V1__WorkerStatus *w,
                           uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    uint64_t limit = moe_clock_ns() + WORKER_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st =
        moectl_link_open_worker(moectl_link_endpoint(d->link), w->endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_server_info(link, moe_earlier(limit, deadline_ns), &info);
    json_t *said = NULL;
    if (!moe_failed(&st)) {
        said = moectl_proto_json(&info->base);
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    } else {
        moectl_say("slot %u, %s: %s", w->slot, w->endpoint, st.text);
    }
    moectl_link_close(link);
    return said != NULL ? said : json_null();
}

static struct moe_status describe_model(const struct describe *d, uint64_t deadline_ns,
                                        json_t **out)
{
    Moe__V1__ListModelsResponse *list;
    const Moe__V1__ModelStatus *m;
    MOE_TRY(moectl_models_ask(d->link, deadline_ns, &list));
    struct moe_status st = moectl_models_find(list, d->model, &m);
    if (!moe_failed(&st)) {
        *out = moectl_document("Model");
        json_object_set_new(*out, "model", moectl_proto_json(&m->base));
    }
    moe__v1__list_models_response__free_unpacked(list, NULL);
    return st;
}

/* Events about other slots go. */
static json_t *events_list(const struct describe *d)
{
    json_t *list = json_array();
    for (size_t i = 0; i < d->events->n_events; i++)
        if (d->slot == MOECTL_ALL_EVENTS || d->events->events[i]->slot == d->slot)
            json_array_append_new(list, moectl_proto_json(&d->events->events[i]->base));
    return list;
}

static struct moe_status build(const struct describe *d, uint64_t deadline_ns, json_t **out)
{
    if (d->model != NULL)
        return describe_model(d, deadline_ns, out);
    if (d->slot == MOECTL_ALL_EVENTS) {
        *out = moectl_document("Group");
        json_object_set_new(*out, "group", moectl_proto_json(&d->status->base));
        return moe_ok();
    }
    const Moe__V1__WorkerStatus *w = moectl_workers_find(d->status, (uint32_t)d->slot);
    if (w == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "slot %d never had a worker", d->slot);
    *out = moectl_document("Worker");
    json_object_set_new(*out, "worker", moectl_proto_json(&w->base));
    json_object_set_new(*out, "server",
                        w->connected ? server_info(d, w, deadline_ns) : json_null());
    return moe_ok();
}

static int show(const struct describe *d, json_t *document)
{
    if (d->common.document) {
        json_object_set_new(document, "events", events_list(d));
        return moectl_print(document);
    }
    json_object_del(document, "apiVersion");
    char *text = moectl_yaml(document);
    json_decref(document);
    if (text == NULL) {
        moectl_say("out of memory");
        return MOECTL_FAILED;
    }
    moectl_write(text);
    free(text);
    moectl_put("\n");
    struct moectl_table *events = moectl_events_table(d->events, d->slot, d->common.wide);
    int code = moectl_table_print(events, NULL);
    moectl_table_free(events);
    return code;
}

static struct moe_status ask(struct describe *d, uint64_t deadline_ns, json_t **out)
{
    MOE_TRY(moectl_admin_find(&d->common, deadline_ns, &d->link, &d->status));
    uint32_t limit = d->slot == MOECTL_ALL_EVENTS ? EVENTS_SHOWN : 0;
    MOE_TRY(moectl_events_ask(d->link, deadline_ns, 0, limit, &d->events));
    return build(d, deadline_ns, out);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct describe d = {
        .common = {.format = "table", .timeout_s = 10, .words_max = 2, .words = {"group"}},
        .slot = MOECTL_ALL_EVENTS};
    const char *const *words = d.common.words;
    uint32_t slot = 0;
    json_t *document = NULL;
    int code;
    if (!moectl_parse(self, NULL, 0, &d.common, argc, argv, &code))
        return code;
    bool worker = strcmp(words[0], "worker") == 0, model = strcmp(words[0], "model") == 0;
    if (!worker && !model && strcmp(words[0], "group") != 0)
        return moectl_usage_error("there is no '%s' to describe", words[0]);
    if ((worker || model) != (d.common.word_count == 2))
        return moectl_usage_error(worker  ? "describe worker: which slot?"
                                  : model ? "describe model: which one?"
                                          : "unexpected argument");
    d.model = model ? words[1] : NULL;
    if (worker) {
        code = moectl_parse_slot(words[1], &slot);
        if (code != MOECTL_OK)
            return code;
        d.slot = (int32_t)slot;
    }
    struct moe_status st = ask(&d, moectl_deadline(&d.common), &document);
    code = moe_failed(&st) ? moectl_fail(&st) : show(&d, document);
    if (d.events != NULL)
        moe__v1__list_events_response__free_unpacked(d.events, NULL);
    if (d.status != NULL)
        moe__v1__get_status_response__free_unpacked(d.status, NULL);
    moectl_link_close(d.link);
    return code;
}

const struct moectl_command moectl_describe = {
    .name = "describe",
    .summary = "Shows all that is known about the group, a worker or a model, and the last events.",
    .usage = "[group | worker SLOT | model NAME] [-o FORMAT]",
    .more = "actions:\n"
            "  group          the group (default)\n"
            "  worker SLOT    the worker of this slot, as coordinator and worker report it\n"
            "  model NAME     a model of the group: state, layers, digest, memory\n",
    .examples = "  moectl describe worker 1\n"
                "  moectl describe model small\n"
                "  moectl describe group -o yaml\n",
    .run = run,
};
