/* SPDX-License-Identifier: Apache-2.0 */
/* moectl get: lists of workers, experts, models and events. With --watch it asks again every
 * second, and prints what has changed. */
#include "commands.h"
#include "events.h"
#include "moectl/io/proto_json.h"
#include "workers.h"

#include "base/clock.h"
#include "base/wait.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { WATCH_MS = 1000 };

struct get {
    struct moectl_common common;
    const struct resource *resource;
    bool watch;
    uint64_t layer; /* MOE_OPTION_UNSET: all */
    /* Of the last question. */
    struct moectl_link *link;
    Moe__V1__GetStatusResponse *status;
    Moe__V1__ListEventsResponse *events;
    Moe__V1__GetPlacementResponse **placements; /* [status->n_layers]; NULL: not asked for */
    /* With --watch. */
    uint64_t after;
    int64_t started_unix_ms;
    struct moectl_table *shown;
    json_t *shown_document;
};

struct resource {
    const char *name, *kind;
    struct moe_status (*ask)(struct get *g, uint64_t deadline_ns); /* after the status */
    struct moectl_table *(*table)(const struct get *g);
    const char *key; /* of the list in the document */
    json_t *(*list)(const struct get *g);
};

/* ------------------------------------------------------------------ workers */

static struct moe_status ask_nothing(struct get *g, uint64_t deadline_ns)
{
    (void)g;
    (void)deadline_ns;
    return moe_ok();
}

static struct moectl_table *workers_table(const struct get *g)
{
    return moectl_workers_table(g->status, g->common.wide);
}

static json_t *workers_list(const struct get *g)
{
    json_t *list = json_array();
    for (size_t i = 0; i < g->status->n_workers; i++)
        json_array_append_new(list, moectl_proto_json(&g->status->workers[i]->base));
    return list;
}

/* ------------------------------------------------------------------ models */

static struct moectl_table *models_table(const struct get *g)
{
    static const struct moectl_column columns[] = {
        {.title = "MODEL"},
        {.title = "FAMILY"},
        {.title = "BACKEND"},
        {.title = "LAYERS", .right = true},
        {.title = "EXPERTS", .right = true},
        {.title = "TOP-K", .right = true},
        {.title = "STATE"},
        {.title = "HIDDEN", .right = true, .wide = true},
        {.title = "INTERMEDIATE", .right = true, .wide = true},
        {.title = "DIGEST", .wide = true},
    };
    struct moectl_table *t =
        moectl_table_create(columns, sizeof columns / sizeof *columns, g->common.wide);
    const Moe__V1__GetStatusResponse *s = g->status;
    if (s->n_layers == 0)
        return t; /* no worker has registered */
    const Moe__V1__LayerInfo *first = s->layers[0];
    moectl_table_cell(t, "%s", s->model);
    moectl_table_cell(t, "%s", s->family);
    moectl_table_cell(t, "%s", s->backend);
    moectl_table_cell(t, "%zu", s->n_layers);
    moectl_table_cell(t, "%" PRIu32, first->experts);
    moectl_table_cell(t, "%" PRIu32, first->top_k);
    moectl_table_cell(t, "%s", moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state));
    moectl_table_cell(t, "%" PRIu32, first->hidden);
    moectl_table_cell(t, "%" PRIu32, first->intermediate);
    moectl_table_cell(t, "%s", s->model_digest[0] != '\0' ? s->model_digest : "-");
    return t;
}

static json_t *models_list(const struct get *g)
{
    const Moe__V1__GetStatusResponse *s = g->status;
    json_t *list = json_array(), *layers = json_array();
    for (size_t i = 0; i < s->n_layers; i++)
        json_array_append_new(layers, moectl_proto_json(&s->layers[i]->base));
    if (s->n_layers > 0)
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:s, s:s, s:s, s:O}", "name", s->model, "family", s->family,
                            "backend", s->backend, "state",
                            moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state),
                            "digest", s->model_digest, "layers", layers));
    json_decref(layers);
    return list;
}

/* ------------------------------------------------------------------ experts */

static bool is_asked_for(const struct get *g, uint32_t layer)
{
    return g->layer == MOE_OPTION_UNSET || g->layer == layer;
}

static struct moe_status ask_placement(struct get *g, uint64_t deadline_ns)
{
    bool any = false;
    g->placements = calloc(g->status->n_layers + 1, sizeof(void *));
    if (g->placements == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    for (size_t i = 0; i < g->status->n_layers; i++) {
        uint32_t layer = g->status->layers[i]->layer;
        if (!is_asked_for(g, layer))
            continue;
        any = true;
        MOE_TRY(moectl_link_placement(g->link, layer, deadline_ns, &g->placements[i]));
    }
    if (!any && g->layer != MOE_OPTION_UNSET)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "the model has no MoE layer %" PRIu64, g->layer);
    return moe_ok();
}

static void add_slots(struct moectl_table *t, const Moe__V1__ExpertPlacement *e)
{
    char text[256] = "";
    size_t used = 0;
    for (size_t i = 0; i < e->n_slots && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%" PRIu32, i > 0 ? "," : "",
                                 e->slots[i]);
    moectl_table_cell(t, "%s", text);
}

static struct moectl_table *experts_table(const struct get *g)
{
    static const struct moectl_column columns[] = {
        {.title = "LAYER", .right = true},
        {.title = "EXPERT", .right = true},
        {.title = "SLOTS"},
    };
    struct moectl_table *t =
        moectl_table_create(columns, sizeof columns / sizeof *columns, g->common.wide);
    for (size_t i = 0; i < g->status->n_layers; i++) {
        const Moe__V1__GetPlacementResponse *p = g->placements[i];
        for (size_t e = 0; p != NULL && e < p->n_experts; e++) {
            moectl_table_cell(t, "%" PRIu32, g->status->layers[i]->layer);
            moectl_table_cell(t, "%" PRIu32, p->experts[e]->expert);
            add_slots(t, p->experts[e]);
        }
    }
    return t;
}

static json_t *experts_list(const struct get *g)
{
    json_t *list = json_array();
    for (size_t i = 0; i < g->status->n_layers; i++) {
        const Moe__V1__GetPlacementResponse *p = g->placements[i];
        for (size_t e = 0; p != NULL && e < p->n_experts; e++) {
            json_t *expert = moectl_proto_json(&p->experts[e]->base);
            json_object_set_new(expert, "layer",
                                json_integer((json_int_t)g->status->layers[i]->layer));
            json_array_append_new(list, expert);
        }
    }
    return list;
}

/* ------------------------------------------------------------------ events */

/* A restarted coordinator counts from 1 again. */
static struct moe_status ask_events(struct get *g, uint64_t deadline_ns)
{
    MOE_TRY(moectl_events_ask(g->link, deadline_ns, g->after, 0, &g->events));
    if (g->after != 0 && g->events->started_unix_ms != g->started_unix_ms) {
        moe__v1__list_events_response__free_unpacked(g->events, NULL);
        g->events = NULL;
        MOE_TRY(moectl_events_ask(g->link, deadline_ns, 0, 0, &g->events));
        g->after = 0;
    }
    g->started_unix_ms = g->events->started_unix_ms;
    return moe_ok();
}

static struct moectl_table *events_table(const struct get *g)
{
    return moectl_events_table(g->events, MOECTL_ALL_EVENTS, g->common.wide);
}

static json_t *events_list(const struct get *g)
{
    json_t *list = json_array();
    for (size_t i = 0; i < g->events->n_events; i++)
        json_array_append_new(list, moectl_proto_json(&g->events->events[i]->base));
    return list;
}

/* ------------------------------------------------------------------ the command */

static const struct resource resources[] = {
    {"workers", "Workers", ask_nothing, workers_table, "workers", workers_list},
    {"experts", "Experts", ask_placement, experts_table, "experts", experts_list},
    {"models", "Models", ask_nothing, models_table, "models", models_list},
    {"events", "Events", ask_events, events_table, "events", events_list},
};
enum { RESOURCES = sizeof resources / sizeof *resources };

static void forget_answers(struct get *g)
{
    for (size_t i = 0; g->placements != NULL && i < g->status->n_layers; i++)
        if (g->placements[i] != NULL)
            moe__v1__get_placement_response__free_unpacked(g->placements[i], NULL);
    free(g->placements);
    g->placements = NULL;
    if (g->events != NULL)
        moe__v1__list_events_response__free_unpacked(g->events, NULL);
    g->events = NULL;
    if (g->status != NULL)
        moe__v1__get_status_response__free_unpacked(g->status, NULL);
    g->status = NULL;
    moectl_link_close(g->link);
    g->link = NULL;
}

static struct moe_status ask(struct get *g)
{
    uint64_t deadline = moectl_deadline(&g->common);
    forget_answers(g);
    MOE_TRY(moectl_admin_find(&g->common, deadline, &g->link, &g->status));
    return g->resource->ask(g, deadline);
}

/* With --watch, a document that equals the last one is not printed again. */
static int show_document(struct get *g)
{
    json_t *document = moectl_document(g->resource->kind);
    json_object_set_new(document, g->resource->key, g->resource->list(g));
    if (g->shown_document != NULL && json_equal(g->shown_document, document)) {
        json_decref(document);
        return MOECTL_OK;
    }
    json_decref(g->shown_document);
    g->shown_document = json_incref(document);
    return moectl_print(document);
}

static int show_table(struct get *g)
{
    struct moectl_table *table = g->resource->table(g);
    int code = moectl_table_print(table, g->shown);
    moectl_table_free(g->shown);
    g->shown = table;
    return code;
}

static int show(struct get *g)
{
    bool none_new = g->after != 0 && g->events != NULL && g->events->n_events == 0;
    int code = none_new ? MOECTL_OK : g->common.document ? show_document(g) : show_table(g);
    if (g->events != NULL && g->events->n_events > 0)
        g->after = g->events->events[g->events->n_events - 1]->sequence;
    return code;
}

/* Until a signal ends it. A group that does not answer for a while is reported once. */
static int watch(struct get *g)
{
    bool silent = false;
    for (;;) {
        moe_sleep_until(moe_clock_ns() + WATCH_MS * MOE_NS_PER_MS);
        struct moe_status st = ask(g);
        if (moe_failed(&st) && !silent)
            (void)moectl_fail(&st);
        silent = moe_failed(&st);
        if (silent)
            continue;
        int code = show(g);
        if (code != MOECTL_OK)
            return code;
    }
}

static int work(struct get *g)
{
    struct moe_status st = ask(g);
    if (moe_failed(&st))
        return moectl_fail(&st);
    int code = show(g);
    return code == MOECTL_OK && g->watch ? watch(g) : code;
}

static const struct resource *find(const char *name)
{
    for (size_t i = 0; i < RESOURCES; i++)
        if (strcmp(resources[i].name, name) == 0)
            return &resources[i];
    return NULL;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct get g = {.common = {.format = "table", .timeout_s = 10}, .layer = MOE_OPTION_UNSET};
    const struct moe_option options[] = {
        {"watch", 'w', MOE_OPTION_BOOL, &g.watch, 0, 0, NULL,
         "ask again every second, and print what has changed, until Ctrl-C"},
        {"layer", 'l', MOE_OPTION_UINT, &g.layer, 0, UINT32_MAX, "L",
         "experts: of this layer only"},
    };
    const char *name = NULL;
    int code, words = moectl_take_words(&name, 1, &argc, &argv);
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &g.common, argc, argv,
                      &code))
        return code;
    if (words == 0)
        return moectl_usage_error("get what? workers, experts, models or events");
    g.resource = find(name);
    if (g.resource == NULL)
        return moectl_usage_error("there are no '%s' to get", name);
    code = work(&g);
    forget_answers(&g);
    moectl_table_free(g.shown);
    json_decref(g.shown_document);
    return code;
}

const struct moectl_command moectl_get = {
    .name = "get",
    .summary = "Lists workers, experts, models or events of a group.",
    .usage = "LIST [-o FORMAT] [--watch]\n"
             "\n"
             "actions:\n"
             "  workers        the worker of each slot, its state and its last error\n"
             "  experts        which slots hold which expert\n"
             "  models         the model of the group\n"
             "  events         what has happened, as far as the coordinator remembers",
    .examples = "  moectl get workers -o wide\n"
                "  moectl get events --watch\n"
                "  moectl get experts --layer 3 -o json\n",
    .run = run,
};
