/* SPDX-License-Identifier: Apache-2.0 */
/* moectl placement: the experts of each slot, layer by layer. `get experts` is the other view: the
 * slots of each expert. */
#include "commands.h"
#include "moectl/group/models.h"
#include "moectl/io/table.h"

#include <inttypes.h>
#include <string.h>

enum { RANGES_BYTES = 900 };

struct placement {
    struct moectl_common common;
    uint64_t layer; /* MOE_OPTION_UNSET: all */
    const char *model;
    struct moectl_table *table;
    json_t *layers;
};

static bool holds(const Moe__V1__ExpertPlacement *e, uint32_t slot)
{
    for (size_t i = 0; i < e->n_slots; i++)
        if (e->slots[i] == slot)
            return true;
    return false;
}

/* "0-7,12"; the number of experts in `*count`. */
static void list_ranges(const Moe__V1__GetPlacementResponse *p, uint32_t slot,
                        char text[RANGES_BYTES], size_t *count)
{
    size_t used = 0;
    text[0] = '\0';
    *count = 0;
    for (size_t e = 0; e < p->n_experts && used < RANGES_BYTES; e++) {
        if (!holds(p->experts[e], slot))
            continue;
        size_t last = e;
        while (last + 1 < p->n_experts && holds(p->experts[last + 1], slot))
            last++;
        const char *comma = used > 0 ? "," : "";
        used += (size_t)(last == e ? snprintf(text + used, RANGES_BYTES - used, "%s%zu", comma, e)
                                   : snprintf(text + used, RANGES_BYTES - used, "%s%zu-%zu", comma,
                                              e, last));
        *count += last + 1 - e;
        e = last;
    }
}

static json_t *experts_of(const Moe__V1__GetPlacementResponse *p, uint32_t slot)
{
    json_t *experts = json_array();
    for (size_t e = 0; e < p->n_experts; e++)
        if (holds(p->experts[e], slot))
            json_array_append_new(experts, json_integer((json_int_t)p->experts[e]->expert));
    return experts;
}

static void add_layer(struct placement *all, uint32_t layer, uint32_t slots,
                      const Moe__V1__GetPlacementResponse *p)
{
    json_t *list = json_array();
    for (uint32_t slot = 0; slot < slots; slot++) {
        char ranges[RANGES_BYTES];
        size_t count;
        list_ranges(p, slot, ranges, &count);
        moectl_table_cell(all->table, "%" PRIu32, layer);
        moectl_table_cell(all->table, "%" PRIu32, slot);
        moectl_table_cell(all->table, "%zu", count);
        moectl_table_cell(all->table, "%s", ranges);
        json_array_append_new(list, json_pack("{s:I, s:o}", "slot", (json_int_t)slot, "experts",
                                              experts_of(p, slot)));
    }
    json_array_append_new(all->layers,
                          json_pack("{s:I, s:o}", "layer", (json_int_t)layer, "slots", list));
}

static struct moe_status ask_layers(struct placement *all, struct moectl_link *link,
                                    uint64_t deadline_ns, uint32_t slots,
                                    Moe__V1__LayerInfo *const *layers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t layer = layers[i]->layer;
        Moe__V1__GetPlacementResponse *p = NULL;
        if (all->layer != MOE_OPTION_UNSET && all->layer != layer)
            continue;
        MOE_TRY(moectl_link_placement(link, all->model != NULL ? all->model : "", layer,
                                      deadline_ns, &p));
        add_layer(all, layer, slots, p);
        moe__v1__get_placement_response__free_unpacked(p, NULL);
    }
    return moe_ok();
}

static struct moe_status ask_added_model(struct placement *all, struct moectl_link *link,
                                         uint64_t deadline_ns, uint32_t slots)
{
    Moe__V1__ListModelsResponse *list;
    const Moe__V1__ModelStatus *m;
    MOE_TRY(moectl_models_ask(link, deadline_ns, &list));
    struct moe_status st = moectl_models_find(list, all->model, &m);
    if (!moe_failed(&st))
        st = ask_layers(all, link, deadline_ns, slots, m->layers, m->n_layers);
    moe__v1__list_models_response__free_unpacked(list, NULL);
    return st;
}

static struct moe_status ask(struct placement *all)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    uint64_t deadline = moectl_deadline(&all->common);
    struct moe_status st = moectl_admin_find(&all->common, deadline, &link, &status);
    if (!moe_failed(&st))
        st = all->model != NULL
                 ? ask_added_model(all, link, deadline, status->slots)
                 : ask_layers(all, link, deadline, status->slots, status->layers, status->n_layers);
    if (!moe_failed(&st) && all->layer != MOE_OPTION_UNSET && json_array_size(all->layers) == 0)
        st = moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                       "the model has no MoE layer %" PRIu64, all->layer);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return st;
}

static int show(const struct placement *all)
{
    if (!all->common.document)
        return moectl_table_print(all->table, NULL);
    json_t *document = moectl_document("Placement");
    json_object_set(document, "layers", all->layers);
    return moectl_print(document);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    static const struct moectl_column columns[] = {{.title = "LAYER", .right = true},
                                                   {.title = "SLOT", .right = true},
                                                   {.title = "COUNT", .right = true},
                                                   {.title = "EXPERTS"}};
    struct placement all = {.common = {.format = "table", .timeout_s = 10},
                            .layer = MOE_OPTION_UNSET};
    const struct moe_option options[] = {
        {"layer", 'l', MOE_OPTION_UINT, &all.layer, 0, UINT32_MAX, "L", "of this layer only"},
        {"model", 0, MOE_OPTION_STRING, &all.model, 0, 0, "NAME",
         "of this model; default: the default model"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &all.common, argc, argv,
                      &code))
        return code;
    all.table = moectl_table_create(columns, sizeof columns / sizeof *columns, false);
    all.layers = json_array();
    struct moe_status st = ask(&all);
    code = moe_failed(&st) ? moectl_fail(&st) : show(&all);
    moectl_table_free(all.table);
    json_decref(all.layers);
    return code;
}

const struct moectl_command moectl_placement = {
    .name = "placement",
    .summary = "Shows which experts each slot holds.",
    .usage = "[--endpoint H:P] [--model NAME] [--layer L] [-o FORMAT]",
    .examples = "  moectl placement --layer 3\n",
    .run = run,
};
