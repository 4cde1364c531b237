/* SPDX-License-Identifier: Apache-2.0 */
/* moectl get: lists of workers, experts, models and events. With --watch it asks again every
 * second, and prints what has changed. */
#include "commands.h"
#include "moectl/group/events.h"
#include "moectl/group/models.h"
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
    const char *model;
    /* Of the last question. */
    struct moectl_link *link;
    Moe__V1__GetStatusResponse *status;
    Moe__V1__ListEventsResponse *events;
    Moe__V1__ListModelsResponse *models;
    size_t layer_count; /* of the model with the listed experts */
    Moe__V1__LayerInfo **layers;
    Moe__V1__GetPlacementResponse **placements; /* [layer_count]; NULL: not asked for */
    uint64_t **rows; /* [layer_count][n_experts]; NULL: not asked for, or not all workers said */
    /* With --watch. */
    uint64_t end_ns; /* by --timeout; MOE_NEVER without */
    uint64_t after;
    int64_t started_unix_ms;
    bool said_no_rows;
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

static struct moe_status ask_models(struct get *g, uint64_t deadline_ns)
{
    return moectl_models_ask(g->link, deadline_ns, &g->models);
}

/* Of the default model it is that of the group. */
static const char *state_of(const struct get *g, const Moe__V1__ModelStatus *m)
{
    return m->is_default
               ? moectl_enum_name(&moe__v1__group_state__descriptor, (int)g->status->state)
               : moectl_model_state(m);
}

/* A group has no default model before a worker has registered. */
static bool is_known(const Moe__V1__ModelStatus *m)
{
    return m->name[0] != '\0';
}

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
        {.title = "MEMORY", .right = true},
        {.title = "HIDDEN", .right = true, .wide = true},
        {.title = "INTERMEDIATE", .right = true, .wide = true},
        {.title = "DIGEST", .wide = true},
        {.title = "DIRECTORY", .wide = true},
        {.title = "REASON"},
    };
    struct moectl_table *t =
        moectl_table_create(columns, sizeof columns / sizeof *columns, g->common.wide);
    for (size_t i = 0; i < g->models->n_models; i++) {
        const Moe__V1__ModelStatus *m = g->models->models[i];
        if (!is_known(m))
            continue;
        Moe__V1__LayerInfo unknown = MOE__V1__LAYER_INFO__INIT;
        const Moe__V1__LayerInfo *first = m->n_layers > 0 ? m->layers[0] : &unknown;
        char memory[MOECTL_MODEL_BYTES];
        moectl_table_cell(t, "%s", m->name);
        moectl_table_cell(t, "%s", m->family[0] != '\0' ? m->family : "-");
        moectl_table_cell(t, "%s", g->status->backend);
        moectl_table_cell(t, "%zu", m->n_layers);
        moectl_table_cell(t, "%" PRIu32, first->experts);
        moectl_table_cell(t, "%" PRIu32, first->top_k);
        moectl_table_cell(t, "%s", state_of(g, m));
        moectl_table_cell(t, "%s", moectl_model_memory(m, memory));
        moectl_table_cell(t, "%" PRIu32, first->hidden);
        moectl_table_cell(t, "%" PRIu32, first->intermediate);
        moectl_table_cell(t, "%s", m->digest[0] != '\0' ? m->digest : "-");
        moectl_table_cell(t, "%s", m->directory[0] != '\0' ? m->directory : "-");
        moectl_table_cell(t, "%s", m->reason[0] != '\0' ? m->reason : "-");
    }
    return t;
}

static json_t *models_list(const struct get *g)
{
    json_t *list = json_array();
    for (size_t i = 0; i < g->models->n_models; i++) {
        const Moe__V1__ModelStatus *m = g->models->models[i];
        if (!is_known(m))
            continue;
        json_t *model = moectl_proto_json(&m->base);
        json_object_set_new(model, "backend", json_string(g->status->backend));
        json_object_set_new(model, "state", json_string(state_of(g, m)));
        json_array_append_new(list, model);
    }
    return list;
}

/* ------------------------------------------------------------------ experts */

static bool is_asked_for(const struct get *g, uint32_t layer)
{
    return g->layer == MOE_OPTION_UNSET || g->layer == layer;
}

static void forget_rows(struct get *g)
{
    for (size_t i = 0; g->rows != NULL && i < g->layer_count; i++)
        free(g->rows[i]);
    free(g->rows);
    g->rows = NULL;
}

static struct moe_status make_rows(struct get *g)
{
    g->rows = calloc(g->layer_count + 1, sizeof *g->rows);
    for (size_t i = 0; g->rows != NULL && i < g->layer_count; i++) {
        if (g->placements[i] == NULL)
            continue;
        g->rows[i] = calloc(g->placements[i]->n_experts + 1, sizeof **g->rows);
        if (g->rows[i] == NULL)
            forget_rows(g);
    }
    return g->rows != NULL
               ? moe_ok()
               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

static struct moe_status add_rows(struct get *g, const char *worker, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    struct moe_status st = moectl_link_open_worker(moectl_link_endpoint(g->link), worker, &link);
    for (size_t i = 0; i < g->layer_count && !moe_failed(&st); i++)
        if (g->placements[i] != NULL)
            st = moectl_link_add_expert_rows(link, g->layers[i]->layer, deadline_ns, g->rows[i],
                                             g->placements[i]->n_experts);
    moectl_link_close(link);
    return moe_error_context(st, "%s", worker);
}

/* Without an answer of each worker the rows are not known: a part of them would mislead. */
static void ask_rows(struct get *g, uint64_t deadline_ns)
{
    struct moe_status st = make_rows(g);
    for (size_t i = 0; i < g->status->n_workers && !moe_failed(&st); i++)
        if (g->status->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            st = add_rows(g, g->status->workers[i]->endpoint, deadline_ns);
    if (!moe_failed(&st))
        return;
    if (!g->said_no_rows)
        moectl_say("rows of experts: %s", st.text);
    g->said_no_rows = true;
    forget_rows(g);
}

static struct moe_status ask_placement(struct get *g, uint64_t deadline_ns)
{
    bool any = false;
    g->layer_count = g->status->n_layers;
    g->layers = g->status->layers;
    if (g->model != NULL) {
        const Moe__V1__ModelStatus *m;
        MOE_TRY(moectl_models_ask(g->link, deadline_ns, &g->models));
        MOE_TRY(moectl_models_find(g->models, g->model, &m));
        g->layer_count = m->n_layers;
        g->layers = m->layers;
    }
    g->placements = calloc(g->layer_count + 1, sizeof(void *));
    if (g->placements == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    for (size_t i = 0; i < g->layer_count; i++) {
        uint32_t layer = g->layers[i]->layer;
        if (!is_asked_for(g, layer))
            continue;
        any = true;
        MOE_TRY(moectl_link_placement(g->link, g->model != NULL ? g->model : "", layer, deadline_ns,
                                      &g->placements[i]));
    }
    if (!any && g->layer != MOE_OPTION_UNSET)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "the model has no MoE layer %" PRIu64, g->layer);
    if (g->model == NULL && (!g->watch || g->common.wide)) /* workers count by layer of that one */
        ask_rows(g, deadline_ns);
    return moe_ok();
}

/* Rows of the expert, and its share of all rows of the layer. */
static void add_load(struct moectl_table *t, const uint64_t *rows, size_t expert, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; rows != NULL && i < count; i++)
        sum += rows[i];
    if (rows == NULL) {
        moectl_table_cell(t, "-");
        moectl_table_cell(t, "-");
        return;
    }
    moectl_table_cell(t, "%" PRIu64, rows[expert]);
    moectl_table_cell(t, "%.2f%%", sum > 0 ? 100.0 * (double)rows[expert] / (double)sum : 0);
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
        {.title = "ROWS", .right = true, .wide = true},
        {.title = "SHARE", .right = true, .wide = true},
    };
    struct moectl_table *t =
        moectl_table_create(columns, sizeof columns / sizeof *columns, g->common.wide || !g->watch);
    for (size_t i = 0; i < g->layer_count; i++) {
        const Moe__V1__GetPlacementResponse *p = g->placements[i];
        for (size_t e = 0; p != NULL && e < p->n_experts; e++) {
            moectl_table_cell(t, "%" PRIu32, g->layers[i]->layer);
            moectl_table_cell(t, "%" PRIu32, p->experts[e]->expert);
            add_slots(t, p->experts[e]);
            add_load(t, g->rows != NULL ? g->rows[i] : NULL, e, p->n_experts);
        }
    }
    return t;
}

/* As moectl_proto_json has numbers of 64 bits. */
static json_t *rows_json(uint64_t rows)
{
    char text[24];
    (void)snprintf(text, sizeof text, "%" PRIu64, rows);
    return json_string(text);
}

static json_t *experts_list(const struct get *g)
{
    json_t *list = json_array();
    for (size_t i = 0; i < g->layer_count; i++) {
        const Moe__V1__GetPlacementResponse *p = g->placements[i];
        for (size_t e = 0; p != NULL && e < p->n_experts; e++) {
            json_t *expert = moectl_proto_json(&p->experts[e]->base);
            json_object_set_new(expert, "layer", json_integer((json_int_t)g->layers[i]->layer));
            if (g->rows != NULL)
                json_object_set_new(expert, "rows", rows_json(g->rows[i][e]));
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
    {"models", "Models", ask_models, models_table, "models", models_list},
    {"events", "Events", ask_events, events_table, "events", events_list},
};
enum { RESOURCES = sizeof resources / sizeof *resources };

static void forget_answers(struct get *g)
{
    for (size_t i = 0; g->placements != NULL && i < g->layer_count; i++)
        if (g->placements[i] != NULL)
            moe__v1__get_placement_response__free_unpacked(g->placements[i], NULL);
    free(g->placements);
    g->placements = NULL;
    forget_rows(g);
    if (g->events != NULL)
        moe__v1__list_events_response__free_unpacked(g->events, NULL);
    g->events = NULL;
    if (g->models != NULL)
        moe__v1__list_models_response__free_unpacked(g->models, NULL);
    g->models = NULL;
    if (g->status != NULL)
        moe__v1__get_status_response__free_unpacked(g->status, NULL);
    g->status = NULL;
    moectl_link_close(g->link);
    g->link = NULL;
}

static struct moe_status ask(struct get *g)
{
    uint64_t deadline = moe_earlier(moectl_deadline(&g->common), g->end_ns);
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
    return code == MOECTL_OK ? moectl_flush() : code;
}

/* Until a signal or --timeout ends it. A group that does not answer for a while is reported once.
 */
static int watch(struct get *g)
{
    bool silent = false;
    for (;;) {
        moe_sleep_until(moe_earlier(moe_clock_ns() + WATCH_MS * MOE_NS_PER_MS, g->end_ns));
        if (moe_clock_ns() >= g->end_ns)
            return silent ? MOECTL_UNREACHABLE : MOECTL_OK;
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
    struct get g = {.common = {.format = "table", .timeout_s = 10, .words_max = 1},
                    .layer = MOE_OPTION_UNSET,
                    .end_ns = MOE_NEVER};
    const struct moe_option options[] = {
        {"watch", 'w', MOE_OPTION_BOOL, &g.watch, 0, 0, NULL,
         "ask again every second, and print what has changed, until Ctrl-C or a given --timeout"},
        {"layer", 'l', MOE_OPTION_UINT, &g.layer, 0, UINT32_MAX, "L",
         "experts: of this layer only"},
        {"model", 0, MOE_OPTION_STRING, &g.model, 0, 0, "NAME",
         "experts: of this model; default: the default model"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &g.common, argc, argv,
                      &code))
        return code;
    const char *name = g.common.words[0];
    if (name == NULL)
        return moectl_usage_error("get what? workers, experts, models or events");
    g.resource = find(name);
    if (g.resource == NULL)
        return moectl_usage_error("there are no '%s' to get", name);
    if (g.watch && g.common.timeout_given)
        g.end_ns = moectl_deadline(&g.common);
    code = work(&g);
    forget_answers(&g);
    moectl_table_free(g.shown);
    json_decref(g.shown_document);
    return code;
}

const struct moectl_command moectl_get = {
    .name = "get",
    .summary = "Lists workers, experts, models or events of a group.",
    .usage = "LIST [-o FORMAT] [--watch]",
    .more =
        "actions:\n"
        "  workers        the worker of each slot, its state and its last error\n"
        "  experts        which slots hold which expert; of the default model also its load: the\n"
        "                 rows that the workers have computed with it since they started, and its\n"
        "                 share of the layer\n"
        "  models         the models of the group, the default one first\n"
        "  events         what has happened, as far as the coordinator remembers\n",
    .examples = "  moectl get workers -o wide\n"
                "  moectl get events --watch\n"
                "  moectl get experts --layer 3 -o json\n",
    .run = run,
};
