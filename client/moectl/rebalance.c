/* SPDX-License-Identifier: Apache-2.0 */
/* moectl rebalance: the coordinator moves copies of experts to where they even out the rows of
 * slots, or tells with --dry-run what that would gain. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/io/table.h"

#include "base/clock.h"

#include <inttypes.h>

enum { REACH_S = 10, GAIN_DEFAULT = 5 };

struct rebalance {
    struct moectl_common common;
    bool dry_run;
    uint64_t spare, least_gain, version;
    double mean, now, planned; /* sums over layers: each step waits for its busiest slot */
    uint64_t added;
};

static double over_mean(double rows, double mean)
{
    return mean > 0 ? rows / mean : 1;
}

/* ------------------------------------------------------------------ the call */

/* A move may have no limit; reaching the group always has one. */
static struct moe_status ask(struct rebalance *r, Moe__V1__RebalanceResponse **answer)
{
    Moe__V1__GetStatusResponse *status = NULL;
    struct moectl_link *link = NULL;
    uint64_t deadline_ns = moectl_deadline(&r->common);
    uint64_t reach_ns = moe_earlier(moe_clock_ns() + REACH_S * MOE_NS_PER_S, deadline_ns);
    Moe__V1__RebalanceRequest request = MOE__V1__REBALANCE_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    request.dry_run = r->dry_run;
    request.spare_experts = (uint32_t)r->spare;
    request.least_gain = (uint32_t)r->least_gain;
    request.placement_version = (uint32_t)r->version;
    struct moe_status st = moectl_admin_find(&r->common, reach_ns, &link, &status);
    if (!moe_failed(&st))
        st = moectl_link_call(link, "/moe.v1.AdminService/Rebalance", &request.base, deadline_ns,
                              &moe__v1__rebalance_response__descriptor, &m);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    *answer = (Moe__V1__RebalanceResponse *)m;
    return st;
}

/* ------------------------------------------------------------------ output */

static void add(struct rebalance *r, const Moe__V1__RebalanceResponse *answer)
{
    for (size_t i = 0; i < answer->n_layers; i++) {
        r->mean += answer->layers[i]->mean_rows;
        r->now += answer->layers[i]->busiest_rows;
        r->planned += answer->layers[i]->planned_rows;
        r->added += answer->layers[i]->copies_added;
    }
}

static json_t *slots_of(const Moe__V1__LayerMove *l)
{
    json_t *list = json_array();
    for (size_t s = 0; s < l->n_slots; s++) {
        json_t *experts = json_array();
        for (size_t e = 0; e < l->slots[s]->n_experts; e++)
            json_array_append_new(experts, json_integer((json_int_t)l->slots[s]->experts[e]));
        json_array_append_new(list, json_pack("{s:I, s:o}", "slot", (json_int_t)l->slots[s]->slot,
                                              "experts", experts));
    }
    return list;
}

static int print_document(const struct rebalance *r, const Moe__V1__RebalanceResponse *answer)
{
    json_t *document = moectl_document("Rebalance"), *layers = json_array();
    json_object_set_new(document, "moved", json_boolean(answer->moved));
    json_object_set_new(document, "placementVersion",
                        json_integer((json_int_t)answer->placement_version));
    json_object_set_new(document, "maxOverMean", json_real(over_mean(r->now, r->mean)));
    json_object_set_new(document, "plannedMaxOverMean", json_real(over_mean(r->planned, r->mean)));
    json_object_set_new(document, "copiesAdded", json_integer((json_int_t)r->added));
    for (size_t i = 0; i < answer->n_layers; i++) {
        const Moe__V1__LayerMove *l = answer->layers[i];
        json_array_append_new(
            layers, json_pack("{s:I, s:f, s:f, s:f, s:I, s:o}", "layer", (json_int_t)l->layer,
                              "rows", l->mean_rows * (double)l->n_slots, "maxOverMean",
                              over_mean(l->busiest_rows, l->mean_rows), "plannedMaxOverMean",
                              over_mean(l->planned_rows, l->mean_rows), "copiesAdded",
                              (json_int_t)l->copies_added, "slots", slots_of(l)));
    }
    json_object_set_new(document, "layers", layers);
    return moectl_print(document);
}

static int print_table(const Moe__V1__RebalanceResponse *answer)
{
    static const struct moectl_column columns[] = {{.title = "LAYER", .right = true},
                                                   {.title = "ROWS", .right = true},
                                                   {.title = "BEFORE", .right = true},
                                                   {.title = "PLANNED", .right = true},
                                                   {.title = "ADDED", .right = true}};
    struct moectl_table *t = moectl_table_create(columns, sizeof columns / sizeof *columns, false);
    for (size_t i = 0; i < answer->n_layers; i++) {
        const Moe__V1__LayerMove *l = answer->layers[i];
        moectl_table_cell(t, "%" PRIu32, l->layer);
        moectl_table_cell(t, "%.0f", l->mean_rows * (double)l->n_slots);
        moectl_table_cell(t, "%.3f", over_mean(l->busiest_rows, l->mean_rows));
        moectl_table_cell(t, "%.3f", over_mean(l->planned_rows, l->mean_rows));
        moectl_table_cell(t, "%" PRIu32, l->copies_added);
    }
    int code = moectl_table_print(t, NULL);
    moectl_table_free(t);
    return code;
}

static int show(const struct rebalance *r, const Moe__V1__RebalanceResponse *answer)
{
    if (r->common.document)
        return print_document(r, answer);
    int code = print_table(answer);
    if (code != MOECTL_OK)
        return code;
    if (r->mean == 0)
        moectl_put("no rows so far: a plan has no use before requests have come\n");
    else
        moectl_put("the busiest slot had %.3f of the mean rows, %.3f with the plan: %.0f %% "
                   "fewer rows; %" PRIu64 " copies %s\n",
                   r->now / r->mean, r->planned / r->mean, 100 * (1 - r->planned / r->now),
                   r->added, answer->moved ? "have moved" : "would move");
    if (answer->moved)
        moectl_put("placement %" PRIu32 " is in force\n", answer->placement_version);
    else if (!r->dry_run)
        moectl_put("nothing has moved: the gain is below --min-gain %" PRIu64 "\n", r->least_gain);
    return MOECTL_OK;
}

/* ------------------------------------------------------------------ the command */

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct rebalance r = {.common = {.format = "table"}, .spare = 2, .least_gain = GAIN_DEFAULT};
    const struct moe_option options[] = {
        {"dry-run", 0, MOE_OPTION_BOOL, &r.dry_run, 0, 0, NULL,
         "show the plan and its gain, and move nothing"},
        {"spare", 0, MOE_OPTION_UINT, &r.spare, 0, MOE_MAX_EXPERTS, "N",
         "with --dry-run: copies of each layer that a slot may hold beyond its share; otherwise "
         "--spare-experts of the coordinator counts"},
        {"min-gain", 0, MOE_OPTION_UINT, &r.least_gain, 0, 100, "PERCENT",
         "move nothing unless the busiest slot would get at least this many percent fewer rows"},
        {"placement", 0, MOE_OPTION_UINT, &r.version, 0, UINT32_MAX, "VERSION",
         "move only if this placement is in force (0: any)"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &r.common, argc, argv,
                      &code))
        return code;
    Moe__V1__RebalanceResponse *answer = NULL;
    struct moe_status st = ask(&r, &answer);
    if (moe_failed(&st))
        return moectl_fail(&st);
    add(&r, answer);
    code = show(&r, answer);
    moe__v1__rebalance_response__free_unpacked(answer, NULL);
    return code;
}

const struct moectl_command moectl_rebalance = {
    .name = "rebalance",
    .summary = "Moves copies of experts to where they even out the rows of slots.",
    .usage = "[--dry-run [--spare N]] [--min-gain PERCENT] [--placement VERSION]",
    .examples = "  moectl rebalance --dry-run --spare 4\n"
                "  moectl rebalance\n",
    .run = run,
};
