/* SPDX-License-Identifier: Apache-2.0 */
/* The way between the machine of moves and workers and operators: orders and reports, Rebalance. */
#include "coordinator/service_state.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ answers */

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
}

/* One layer of the answer. */
struct layer_view {
    Moe__V1__LayerMove move;
    Moe__V1__SlotExperts slots[MOE_PLACEMENT_SLOTS_MAX], *list[MOE_PLACEMENT_SLOTS_MAX];
    uint32_t *experts; /* of all slots */
};

static bool fill_slots(struct layer_view *v, const struct moe_moves_outcome *o, size_t index)
{
    const struct moe_placement *p = o->plan;
    uint32_t experts = moe_placement_layer_at(p, index).experts, slots = moe_placement_slots(p);
    size_t count = 0, listed = 0;
    for (uint32_t e = 0; e < experts; e++)
        count += (size_t)__builtin_popcountll(moe_placement_mask(p, index, e));
    uint32_t *at = v->experts = calloc(count + 1, sizeof *v->experts);
    for (uint32_t s = 0; at != NULL && s < slots; s++) {
        if ((o->places >> s & 1) == 0)
            continue;
        moe__v1__slot_experts__init(&v->slots[s]);
        v->slots[s].slot = s;
        v->slots[s].experts = at;
        for (uint32_t e = 0; e < experts; e++)
            if (moe_placement_mask(p, index, e) >> s & 1)
                *at++ = e;
        v->slots[s].n_experts = (size_t)(at - v->slots[s].experts);
        v->list[listed++] = &v->slots[s];
    }
    v->move.n_slots = listed;
    v->move.slots = v->list;
    return at != NULL;
}

static bool fill_layer(struct layer_view *v, const struct moe_moves_outcome *o, size_t index)
{
    const struct moe_move_layer *gain = &o->gain->layers[index];
    moe__v1__layer_move__init(&v->move);
    v->move.layer = moe_placement_layer_at(o->plan, index).layer;
    v->move.mean_rows = gain->mean;
    v->move.busiest_rows = gain->now;
    v->move.planned_rows = gain->planned;
    v->move.copies_added = gain->added;
    return fill_slots(v, o, index);
}

static void answer(struct moe_coordinator *c, struct moe_rpc_call *call)
{
    struct moe_moves_outcome o;
    moe_moves_outcome(c->moves, &o);
    size_t count = moe_placement_layer_count(o.plan);
    struct layer_view *views = calloc(count + 1, sizeof *views);
    Moe__V1__LayerMove *list[MOE_PLACEMENT_LAYERS_MAX];
    Moe__V1__RebalanceResponse m = MOE__V1__REBALANCE_RESPONSE__INIT;
    bool good = views != NULL;
    m.moved = o.moved;
    m.placement_version = moe_placement_version(moe_membership_placement(c->machine));
    m.layers = list;
    for (size_t i = 0; good && i < count; i++) {
        good = fill_layer(&views[i], &o, i);
        list[m.n_layers++] = &views[i].move;
    }
    if (good)
        moe_coordinator__reply(call, &m.base);
    else
        moe_rpc_fail(call, no_memory());
    for (size_t i = 0; views != NULL && i < count; i++)
        free(views[i].experts);
    free(views);
}

static void end_call(struct moe_coordinator *c, const struct moe_moves_action *action)
{
    struct admin_call *a = moe_coordinator__take_waiting(c, action->call);
    if (a == NULL)
        return;
    if (moe_failed(&action->status))
        moe_rpc_fail(a->call, action->status);
    else
        answer(c, a->call);
}

/* ------------------------------------------------------------------ actions */

static struct moe_status save_plan(struct moe_coordinator *c)
{
    const struct moe_placement *plan = moe_moves_plan(c->moves);
    if (!moe_membership_may_move(c->machine))
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000, "the view has ended");
    if (c->store != NULL)
        MOE_TRY(moe_saved_write_placement(c->store, plan));
    moe_membership_move(c->machine, plan);
    struct moe_status st = c->store != NULL ? moe_coordinator__save(c) : moe_ok();
    if (moe_failed(&st))
        moe_membership_undo_move(c->machine);
    return st;
}

static void save(struct moe_coordinator *c, uint64_t sequence)
{
    struct moe_status st = save_plan(c);
    moe_moves_on_saved(c->moves, moe_clock_ns(), sequence, &st);
}

static void carry_out(struct moe_coordinator *c)
{
    struct moe_moves_action a;
    while (moe_moves_next_action(c->moves, &a)) {
        switch (a.kind) {
        case MOE_MOVES_ORDER: moe_coordinator__send_move_order(c, &a); break;
        case MOE_MOVES_SAVE: save(c, a.sequence); break;
        case MOE_MOVES_ANSWER: end_call(c, &a); break;
        case MOE_MOVES_LOG:
            moe_coordinator__note(c, a.level, a.event, a.slot, a.status.text);
            break;
        }
    }
}

/* What it needs may be missing, such as a view of all slots: then the next look has its turn. */
static void look(struct moe_coordinator *c, const struct moe_membership_group *g)
{
    const struct moe_moves_request request = {
        .now = moe_membership_placement(c->machine),
        .places = g->places,
        .new_version = moe_saved_next_version(moe_membership_to_save(c->machine)),
        .trains = g->trains};
    struct moe_status st = moe_moves_begin(c->moves, moe_clock_ns(), &request);
    if (moe_failed(&st))
        moe_log_debug("no look at the rows of experts: %s", st.text);
}

void moe_coordinator__act_moves(struct moe_coordinator *c)
{
    struct moe_membership_group g;
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX];
    carry_out(c);
    moe_membership_group(c->machine, &g);
    moe_coordinator__list_slots(c, slots);
    moe_moves_on_group(c->moves, moe_clock_ns(), g.epoch, g.live,
                       moe_membership_may_move(c->machine), slots);
    if (moe_moves_wants_look(c->moves))
        look(c, &g);
    carry_out(c);
}

/* ------------------------------------------------------------------ messages */

struct moe_status moe_coordinator__receive_rows(struct moe_coordinator *c, uint32_t slot,
                                                const Moe__V1__ExpertRows *r)
{
    return moe_moves_on_rows(c->moves, moe_clock_ns(), slot, r->order, r->layer, r->rows,
                             r->n_rows);
}

void moe_coordinator__receive_move_report(struct moe_coordinator *c, uint32_t slot,
                                          const Moe__V1__ModelReport *r,
                                          const struct moe_status *error)
{
    struct moe_status st = *error;
    if (r->step == MOE__V1__MODEL_STEP__MODEL_STEP_FETCH && !moe_failed(&st) &&
        moe_moves_awaits_fetch(c->moves, slot, r->order))
        st = moe_coordinator__compare_fetched(c, slot, moe_moves_plan(c->moves));
    const struct moe_moves_report in = {
        .step = (enum moe_moves_step)r->step, .order = r->order, .epoch = r->epoch, .error = &st};
    moe_moves_on_report(c->moves, moe_clock_ns(), slot, &in);
}

/* ------------------------------------------------------------------ operators */

struct moe_status moe_coordinator__rebalance(struct moe_coordinator *c, struct admin_call *a,
                                             const void *message)
{
    const Moe__V1__RebalanceRequest *r = message;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    if (r->least_gain > 100 || r->spare_experts > MOE_PLACEMENT_EXPERTS_MAX)
        return moe_error(
            MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
            "a least gain is 0 to 100 percent, and a slot has at most %d spare experts",
            MOE_PLACEMENT_EXPERTS_MAX);
    const struct moe_moves_request request = {
        .call = ++c->next_call,
        .now = moe_membership_placement(c->machine),
        .places = g.places,
        .dry_run = r->dry_run,
        .spare = r->spare_experts,
        .least_gain = r->least_gain,
        .version = r->placement_version,
        .new_version = moe_saved_next_version(moe_membership_to_save(c->machine)),
        .trains = g.trains};
    MOE_TRY(moe_moves_begin(c->moves, moe_clock_ns(), &request));
    moe_coordinator__wait_for_answer(c, a, request.call);
    return moe_ok();
}
