/* SPDX-License-Identifier: Apache-2.0 */
/* The way between the machine of added models and workers and operators: orders and reports,
 * LoadModel, UnloadModel, ListModels. */
#include "coordinator/service_state.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ answers */

/* A model as operators see it. */
struct model_view {
    Moe__V1__ModelStatus status;
    Moe__V1__LayerInfo layers[MOE_PLACEMENT_LAYERS_MAX], *list[MOE_PLACEMENT_LAYERS_MAX];
    char reason[MOE_MEMBERSHIP_REASON_BYTES];
};

static void add_layer(struct model_view *v, const struct moe_membership_layer *l)
{
    size_t i = v->status.n_layers++;
    moe_coordinator__fill_layer(l, &v->layers[i]);
    v->list[i] = &v->layers[i];
}

/* Texts are those of `info`. */
static void fill_added(const struct moe_coordinator *c, const struct moe_added_info *info,
                       struct model_view *v)
{
    Moe__V1__ModelStatus *m = &v->status;
    moe__v1__model_status__init(m);
    m->name = moe_coordinator__text(info->name);
    m->family = moe_coordinator__text(info->family);
    m->state = (Moe__V1__ModelState)info->state;
    m->reason = moe_coordinator__text(info->reason);
    m->digest = moe_coordinator__text(moe_coordinator__added_digest(c, info));
    m->directory = moe_coordinator__text(info->directory);
    m->loaded_bytes = info->loaded_bytes;
    m->total_bytes = info->total_bytes;
    m->layers = v->list;
    for (size_t i = 0; i < info->layer_count; i++)
        add_layer(v, &info->layers[i].info);
}

static Moe__V1__ModelState state_of_default(enum moe_group_state state)
{
    switch (state) {
    case MOE_GROUP_SERVING:
    case MOE_GROUP_DRAINING: return MOE__V1__MODEL_STATE__MODEL_STATE_SERVING;
    case MOE_GROUP_LOADING: return MOE__V1__MODEL_STATE__MODEL_STATE_LOADING;
    case MOE_GROUP_FAILED: return MOE__V1__MODEL_STATE__MODEL_STATE_FAILED;
    default: return MOE__V1__MODEL_STATE__MODEL_STATE_WAITING;
    }
}

/* Texts are those of `g`. */
static void fill_default(const struct moe_coordinator *c, const struct moe_membership_group *g,
                         struct model_view *v)
{
    Moe__V1__ModelStatus *m = &v->status;
    moe__v1__model_status__init(m);
    m->name = moe_coordinator__text(g->model);
    m->family = moe_coordinator__text(g->family);
    m->state = g->epoch == 0 && g->state == MOE_GROUP_DRAINING
                   ? MOE__V1__MODEL_STATE__MODEL_STATE_WAITING
                   : state_of_default(g->state);
    strcpy(v->reason, g->state != MOE_GROUP_SERVING ? g->reason : "");
    m->reason = v->reason;
    m->is_default = true;
    m->digest = moe_coordinator__text(moe_weights_digest(c->weights, g->fingerprint));
    m->layers = v->list;
    for (size_t i = 0; i < g->layer_count; i++)
        add_layer(v, &g->layers[i]);
    for (uint32_t s = 0; s < g->slots; s++) {
        struct moe_membership_worker w;
        if (!moe_membership_worker(c->machine, s, &w))
            continue;
        m->loaded_bytes += w.last.loaded_bytes;
        m->total_bytes += w.last.total_bytes;
    }
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
}

struct moe_status moe_coordinator__list_models(struct moe_coordinator *c, struct admin_call *a,
                                               const void *message)
{
    (void)message;
    struct moe_membership_group g;
    struct moe_added_info infos[MOE_ADDED_MAX];
    Moe__V1__ModelStatus *list[MOE_ADDED_MAX + 1];
    size_t count = 0;
    moe_membership_group(c->machine, &g);
    while (count < MOE_ADDED_MAX && moe_added_info(c->models, count, &infos[count]))
        count++;
    struct model_view *views = calloc(count + 1, sizeof *views);
    if (views == NULL)
        return no_memory();
    Moe__V1__ListModelsResponse m = MOE__V1__LIST_MODELS_RESPONSE__INIT;
    m.models = list;
    if (g.model[0] != '\0') {
        fill_default(c, &g, &views[0]);
        list[m.n_models++] = &views[0].status;
    }
    for (size_t i = 0; i < count; i++) {
        fill_added(c, &infos[i], &views[i + 1]);
        list[m.n_models++] = &views[i + 1].status;
    }
    moe_coordinator__reply(a->call, &m.base);
    free(views);
    return moe_ok();
}

static void answer_load(struct moe_coordinator *c, struct moe_rpc_call *call,
                        const struct moe_added_info *info)
{
    struct moe_membership_group g;
    Moe__V1__SlotPlan plans[MOE_PLACEMENT_SLOTS_MAX], *list[MOE_PLACEMENT_SLOTS_MAX];
    struct model_view *v = calloc(1, sizeof *v);
    if (v == NULL) {
        moe_rpc_fail(call, no_memory());
        return;
    }
    Moe__V1__LoadModelResponse m = MOE__V1__LOAD_MODEL_RESPONSE__INIT;
    moe_membership_group(c->machine, &g);
    fill_added(c, info, v);
    m.model = &v->status;
    m.slots = list;
    for (uint32_t s = 0; s < g.slots; s++) {
        if ((g.places >> s & 1) == 0)
            continue;
        moe__v1__slot_plan__init(&plans[s]);
        plans[s].slot = s;
        plans[s].file_bytes = info->plans[s].file_bytes;
        plans[s].resident_bytes = info->plans[s].resident_bytes;
        plans[s].free_bytes = info->plans[s].free_bytes;
        list[m.n_slots++] = &plans[s];
    }
    moe_coordinator__reply(call, &m.base);
    free(v);
}

/* ------------------------------------------------------------------ calls that wait */

struct admin_call *moe_coordinator__take_waiting(struct moe_coordinator *c, uint64_t number)
{
    for (struct admin_call **at = &c->waiting; *at != NULL; at = &(*at)->next) {
        struct admin_call *a = *at;
        if (a->number != number)
            continue;
        *at = a->next;
        a->number = 0;
        return a;
    }
    return NULL;
}

static void answer(struct moe_coordinator *c, const struct moe_added_action *action)
{
    struct moe_added_info info;
    struct admin_call *a = moe_coordinator__take_waiting(c, action->call);
    if (a == NULL)
        return;
    if (moe_failed(&action->status)) {
        moe_rpc_fail(a->call, action->status);
    } else if (a->method == ADMIN_LOAD) {
        MOE_INVARIANT(moe_added_find(c->models, action->number, &info));
        answer_load(c, a->call, &info);
    } else {
        Moe__V1__UnloadModelResponse m = MOE__V1__UNLOAD_MODEL_RESPONSE__INIT;
        moe_coordinator__reply(a->call, &m.base);
    }
}

void moe_coordinator__wait_for_answer(struct moe_coordinator *c, struct admin_call *a,
                                      uint64_t number)
{
    a->number = number;
    a->next = c->waiting;
    c->waiting = a;
}

struct moe_status moe_coordinator__load_model(struct moe_coordinator *c, struct admin_call *a,
                                              const void *message)
{
    const Moe__V1__LoadModelRequest *request = message;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    if (g.scaling_to != 0) /* the model would be on slots that are about to leave */
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000,
                               "the group is being scaled");
    uint64_t number = ++c->next_call;
    MOE_TRY(moe_added_load(c->models, moe_clock_ns(), number, request->directory, request->name,
                           g.model, request->dry_run));
    moe_coordinator__wait_for_answer(c, a, number);
    return moe_ok();
}

struct moe_status moe_coordinator__unload_model(struct moe_coordinator *c, struct admin_call *a,
                                                const void *message)
{
    const Moe__V1__UnloadModelRequest *request = message;
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    if (request->name[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID, "a name is required");
    if (strcmp(request->name, g.model) == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "%.64s is the default model: end the workers instead", g.model);
    uint64_t number = ++c->next_call;
    MOE_TRY(moe_added_unload(c->models, moe_clock_ns(), number, request->name, request->drain));
    moe_coordinator__wait_for_answer(c, a, number);
    return moe_ok();
}

void moe_coordinator__forget_call(struct moe_coordinator *c, struct admin_call *a)
{
    uint64_t number = a->number;
    if (number == 0 || moe_coordinator__take_waiting(c, number) == NULL)
        return;
    moe_added_cancel(c->models, moe_clock_ns(), number);
    moe_moves_cancel(c->moves, moe_clock_ns(), number);
}

void moe_coordinator__end_model_calls(struct moe_coordinator *c, const struct moe_status *why)
{
    while (c->waiting != NULL)
        moe_rpc_fail(moe_coordinator__take_waiting(c, c->waiting->number)->call, *why);
}

/* ------------------------------------------------------------------ workers */

/* Workers on the CPUs of one host share its memory: the number of its first slot, plus 1. */
static uint32_t memory_of(const struct moe_coordinator *c, const struct moe_membership_group *g,
                          const struct moe_membership_worker *w)
{
    struct moe_membership_worker other;
    if (strcmp(g->backend, "cpu") != 0 || w->host.id[0] == '\0')
        return 0;
    for (uint32_t s = 0; s < g->slots; s++)
        if (moe_membership_worker(c->machine, s, &other) && other.taken &&
            strcmp(other.host.id, w->host.id) == 0)
            return s + 1;
    return 0;
}

void moe_coordinator__list_slots(const struct moe_coordinator *c,
                                 struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX])
{
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    memset(slots, 0, MOE_PLACEMENT_SLOTS_MAX * sizeof *slots);
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w;
        if ((g.places >> s & 1) != 0 && moe_membership_worker(c->machine, s, &w) && w.taken)
            slots[s] = (struct moe_added_slot){w.incarnation, w.stream, memory_of(c, &g, &w)};
    }
}

static void look_at_group(struct moe_coordinator *c)
{
    struct moe_membership_group g;
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX];
    moe_membership_group(c->machine, &g);
    moe_coordinator__list_slots(c, slots);
    moe_added_on_group(c->models, moe_clock_ns(), g.epoch, g.live, g.places, slots);
}

static void send_order(struct moe_coordinator *c, const struct moe_added_action *a)
{
    struct moe_added_info info;
    MOE_INVARIANT(moe_added_find(c->models, a->number, &info));
    moe_coordinator__send_order(c, a, &info);
}

static void save(struct moe_coordinator *c, uint64_t sequence)
{
    struct moe_status st = c->store != NULL ? moe_coordinator__save(c) : moe_ok();
    moe_added_on_saved(c->models, moe_clock_ns(), sequence, &st);
}

static void carry_out(struct moe_coordinator *c)
{
    struct moe_added_action a;
    while (moe_added_next_action(c->models, &a)) {
        switch (a.kind) {
        case MOE_ADDED_ORDER: send_order(c, &a); break;
        case MOE_ADDED_SAVE: save(c, a.sequence); break;
        case MOE_ADDED_ANSWER: answer(c, &a); break;
        case MOE_ADDED_LOG:
            moe_coordinator__note(c, a.level, a.event, a.slot, a.status.text);
            break;
        case MOE_ADDED_FORGET: moe_coordinator__forget_added(c, a.number); break;
        }
    }
}

/* Actions of the last input come before the next input. */
void moe_coordinator__act_models(struct moe_coordinator *c)
{
    struct moe_added_info any;
    carry_out(c);
    look_at_group(c);
    carry_out(c);
    moe_membership_set_models(c->machine, moe_added_info(c->models, 0, &any));
}

/* Layers of a report; a worker that sends too many is refused by the machine, unread. */
static size_t read_layers(const Moe__V1__ModelReport *r, struct moe_model_layer *out)
{
    for (size_t i = 0; i < r->n_layers && r->n_layers <= MOE_PLACEMENT_LAYERS_MAX; i++) {
        const Moe__V1__LayerMemory *l = r->layers[i];
        out[i] = (struct moe_model_layer){.common_file = l->common_file_bytes,
                                          .common_resident = l->common_resident_bytes,
                                          .expert_file = l->expert_file_bytes,
                                          .expert_resident = l->expert_resident_bytes};
        if (l->info != NULL)
            out[i].info = moe_coordinator__read_layer(l->info);
    }
    return r->n_layers;
}

void moe_coordinator__receive_model_report(struct moe_coordinator *c, uint32_t slot,
                                           const Moe__V1__ModelReport *r,
                                           const struct moe_status *error)
{
    struct moe_model_layer layers[MOE_PLACEMENT_LAYERS_MAX];
    struct moe_added_info info;
    struct moe_status st = *error;
    if (r->step == MOE__V1__MODEL_STEP__MODEL_STEP_LOAD && !moe_failed(&st) &&
        moe_added_awaits_load(c->models, slot, r->model, r->order) &&
        moe_added_find(c->models, r->model, &info))
        st = moe_coordinator__compare_added(c, slot, &info);
    struct moe_added_report in = {.number = r->model,
                                  .step = (enum moe_added_step)r->step,
                                  .order = r->order,
                                  .epoch = r->epoch,
                                  .error = &st,
                                  .fingerprint = r->fingerprint,
                                  .family = r->family,
                                  .layers = layers,
                                  .layer_count = read_layers(r, layers),
                                  .free_bytes = r->free_bytes};
    moe_added_on_report(c->models, moe_clock_ns(), slot, &in);
}
