/* SPDX-License-Identifier: Apache-2.0 */
/* moectl rebalance --dry-run: what other copies of experts would gain, by the rows that the workers
 * have computed. It reads figures and changes nothing. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/io/table.h"

#include "balance/plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One layer of the default model. */
struct layer {
    uint32_t layer, experts, places; /* places: copies that a slot would hold */
    Moe__V1__GetPlacementResponse *placement;
    uint64_t *rows;             /* [E] of all workers */
    double load[MOE_MAX_SLOTS]; /* rows of each slot */
    uint16_t *expert;           /* [slots, places] the plan */
    double mean, now, planned;  /* rows of a slot; of the busiest one */
    uint32_t added;             /* copies that slots lack now */
};

struct rebalance {
    struct moectl_common common;
    bool dry_run;
    uint64_t spare;
    struct moectl_link *link;
    Moe__V1__GetStatusResponse *status;
    struct moectl_link *workers[MOE_MAX_SLOTS]; /* by slot; NULL = empty */
    struct moectl_table *table;
    json_t *layers;
    double mean, now, planned; /* sums over layers: each step waits for its busiest slot */
    uint64_t added;
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

/* ------------------------------------------------------------------ one layer */

static bool holds_now(const struct layer *l, uint32_t slot, uint16_t expert)
{
    const Moe__V1__ExpertPlacement *e = l->placement->experts[expert];
    for (size_t i = 0; i < e->n_slots; i++)
        if (e->slots[i] == slot)
            return true;
    return false;
}

/* The copies that the fullest slot holds now. */
static uint32_t present_places(const struct layer *l, uint32_t slots)
{
    uint32_t most = 0;
    for (uint32_t s = 0; s < slots; s++) {
        uint32_t held = 0;
        for (uint16_t e = 0; e < l->experts; e++)
            held += holds_now(l, s, e);
        most = held > most ? held : most;
    }
    return most;
}

static struct moe_status read_rows(const struct rebalance *r, struct layer *l, uint64_t deadline_ns)
{
    uint64_t *of_slot = calloc(l->experts, sizeof *of_slot);
    struct moe_status st = of_slot != NULL ? moe_ok() : no_memory();
    for (uint32_t s = 0; s < r->status->slots && !moe_failed(&st); s++) {
        if (r->workers[s] == NULL)
            continue;
        memset(of_slot, 0, l->experts * sizeof *of_slot);
        st = moectl_link_add_expert_rows(r->workers[s], l->layer, deadline_ns, of_slot, l->experts);
        for (uint32_t e = 0; e < l->experts; e++) {
            l->rows[e] += of_slot[e];
            l->load[s] += (double)of_slot[e];
        }
    }
    free(of_slot);
    return st;
}

static void judge(struct layer *l, const struct moe_placement_plan_input *in)
{
    double sum = 0;
    for (uint32_t s = 0; s < in->slots; s++) {
        sum += l->load[s];
        l->now = l->load[s] > l->now ? l->load[s] : l->now;
        for (uint32_t p = 0; p < in->places; p++)
            l->added += !holds_now(l, s, l->expert[s * in->places + p]);
    }
    l->mean = sum / in->slots;
    l->planned = l->mean * moe_placement_imbalance(in, l->rows, l->expert);
}

static struct moe_status plan(const struct rebalance *r, struct layer *l, uint64_t deadline_ns)
{
    MOE_TRY(moectl_link_placement(r->link, "", l->layer, deadline_ns, &l->placement));
    l->experts = (uint32_t)l->placement->n_experts;
    uint32_t slots = r->status->slots, places = present_places(l, slots) + (uint32_t)r->spare;
    l->places = places < l->experts ? places : l->experts;
    l->rows = calloc((size_t)l->experts + 1, sizeof *l->rows);
    l->expert = calloc((size_t)slots * l->places + 1, sizeof *l->expert);
    if (l->rows == NULL || l->expert == NULL)
        return no_memory();
    MOE_TRY(read_rows(r, l, deadline_ns));
    const struct moe_placement_plan_input in = {
        .slots = slots, .layers = 1, .experts = l->experts, .places = l->places, .rows = l->rows};
    MOE_TRY(moe_placement_plan(&in, l->expert));
    judge(l, &in);
    return moe_ok();
}

/* ------------------------------------------------------------------ output */

static double over_mean(double rows, double mean)
{
    return mean > 0 ? rows / mean : 1;
}

static json_t *planned_slots(const struct layer *l, uint32_t slots)
{
    json_t *list = json_array();
    for (uint32_t s = 0; s < slots; s++) {
        json_t *experts = json_array();
        for (uint32_t p = 0; p < l->places; p++)
            json_array_append_new(experts, json_integer(l->expert[s * l->places + p]));
        json_array_append_new(list,
                              json_pack("{s:I, s:o}", "slot", (json_int_t)s, "experts", experts));
    }
    return list;
}

static void add_layer(struct rebalance *r, const struct layer *l)
{
    moectl_table_cell(r->table, "%" PRIu32, l->layer);
    moectl_table_cell(r->table, "%.0f", l->mean * r->status->slots);
    moectl_table_cell(r->table, "%.3f", over_mean(l->now, l->mean));
    moectl_table_cell(r->table, "%.3f", over_mean(l->planned, l->mean));
    moectl_table_cell(r->table, "%" PRIu32, l->added);
    json_array_append_new(
        r->layers,
        json_pack("{s:I, s:f, s:f, s:f, s:I, s:o}", "layer", (json_int_t)l->layer, "rows",
                  l->mean * r->status->slots, "maxOverMean", over_mean(l->now, l->mean),
                  "plannedMaxOverMean", over_mean(l->planned, l->mean), "copiesAdded",
                  (json_int_t)l->added, "slots", planned_slots(l, r->status->slots)));
    r->mean += l->mean;
    r->now += l->now;
    r->planned += l->planned;
    r->added += l->added;
}

static int show(const struct rebalance *r)
{
    if (r->common.document) {
        json_t *document = moectl_document("RebalancePlan");
        json_object_set_new(document, "maxOverMean", json_real(over_mean(r->now, r->mean)));
        json_object_set_new(document, "plannedMaxOverMean",
                            json_real(over_mean(r->planned, r->mean)));
        json_object_set_new(document, "copiesAdded", json_integer((json_int_t)r->added));
        json_object_set(document, "layers", r->layers);
        return moectl_print(document);
    }
    int code = moectl_table_print(r->table, NULL);
    if (code != MOECTL_OK)
        return code;
    if (r->mean == 0)
        moectl_put("\nno rows so far: a plan has no use before requests have come\n");
    else
        moectl_put("\nthe busiest slot has %.3f of the mean rows now, %.3f with the plan: %.0f %% "
                   "fewer rows; %" PRIu64 " copies would be loaded\n",
                   r->now / r->mean, r->planned / r->mean, 100 * (1 - r->planned / r->now),
                   r->added);
    return fflush(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
}

/* ------------------------------------------------------------------ the command */

static struct moe_status open_workers(struct rebalance *r)
{
    for (size_t i = 0; i < r->status->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = r->status->workers[i];
        if (w->slot < MOE_MAX_SLOTS && w->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE &&
            r->workers[w->slot] == NULL)
            MOE_TRY(moectl_link_open(w->endpoint, &r->workers[w->slot]));
    }
    return r->status->slots <= MOE_MAX_SLOTS
               ? moe_ok()
               : moe_error(MOE_INTERNAL, MOE_REASON_TOO_LARGE, "the group has too many slots");
}

static struct moe_status work(struct rebalance *r)
{
    uint64_t deadline_ns = moectl_deadline(&r->common);
    MOE_TRY(moectl_admin_find(&r->common, deadline_ns, &r->link, &r->status));
    MOE_TRY(open_workers(r));
    for (size_t i = 0; i < r->status->n_layers; i++) {
        struct layer l = {.layer = r->status->layers[i]->layer};
        struct moe_status st = plan(r, &l, deadline_ns);
        if (!moe_failed(&st))
            add_layer(r, &l);
        if (l.placement != NULL)
            moe__v1__get_placement_response__free_unpacked(l.placement, NULL);
        free(l.rows);
        free(l.expert);
        MOE_TRY(st);
    }
    return moe_ok();
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    static const struct moectl_column columns[] = {{.title = "LAYER", .right = true},
                                                   {.title = "ROWS", .right = true},
                                                   {.title = "NOW", .right = true},
                                                   {.title = "PLANNED", .right = true},
                                                   {.title = "ADDED", .right = true}};
    struct rebalance r = {.common = {.format = "table", .timeout_s = 30}, .spare = 2};
    const struct moe_option options[] = {
        {"dry-run", 0, MOE_OPTION_BOOL, &r.dry_run, 0, 0, NULL,
         "show the plan and its gain (required: moving experts is not built)"},
        {"spare", 0, MOE_OPTION_UINT, &r.spare, 0, MOE_MAX_EXPERTS, "N",
         "copies of each layer that a slot may hold beyond the present ones"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &r.common, argc, argv,
                      &code))
        return code;
    code = moectl_require(&(struct moectl_required){"dry-run", r.dry_run}, 1);
    if (code != MOECTL_OK)
        return code;
    r.table = moectl_table_create(columns, sizeof columns / sizeof *columns, false);
    r.layers = json_array();
    struct moe_status st = work(&r);
    code = moe_failed(&st) ? moectl_fail(&st) : show(&r);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        moectl_link_close(r.workers[s]);
    if (r.status != NULL)
        moe__v1__get_status_response__free_unpacked(r.status, NULL);
    moectl_link_close(r.link);
    moectl_table_free(r.table);
    json_decref(r.layers);
    return code;
}

const struct moectl_command moectl_rebalance = {
    .name = "rebalance",
    .summary = "Plans copies of experts that even out the rows of slots.",
    .usage = "--dry-run [--spare N]",
    .examples = "  moectl rebalance --dry-run --spare 4\n",
    .run = run,
};
