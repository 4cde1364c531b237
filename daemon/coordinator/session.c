/* SPDX-License-Identifier: Apache-2.0 */
/* Session streams of workers: protobuf on the wire on one side, inputs and actions of the machine
 * on the other. Most actions are messages to streams, so all are carried out here. Bytes of blobs
 * pass through and are never logged. A malformed message ends its stream and nothing else. */
#include "base/random.h"
#include "coordinator/service_state.h"

#include <stdlib.h>

enum {
    SESSIONS_MAX = 256,     /* beyond it, the oldest without a Register ends for a new one */
    OPENED_MAX = 1024,      /* those included that have ended and are not gone yet */
    BACKLOG_MAX = 256,      /* messages that a worker may leave unread */
    MESSAGE_MAX = 32 << 10, /* bytes of a worker's message; the largest one is half of it */
};
#define SILENCE_MAX_NS MOE_NS_PER_S /* from the opening of a stream to its first message */

/* ------------------------------------------------------------------ sending */

static struct session *find_session(const struct moe_coordinator *c, uint64_t stream)
{
    for (struct session *s = c->sessions; s != NULL; s = s->next)
        if (s->stream == stream)
            return s;
    return NULL;
}

static void end_session(struct session *s, const struct moe_status *status)
{
    if (s->ended)
        return;
    s->ended = true;
    if (status->code == MOE_OK)
        moe_rpc_finish(s->call);
    else
        moe_rpc_fail(s->call, *status);
}

static void close_stream(struct moe_coordinator *c, uint64_t stream,
                         const struct moe_status *status)
{
    struct session *s = find_session(c, stream);
    if (s != NULL)
        end_session(s, status);
}

static void send_message(struct session *s, const Moe__V1__SessionResponse *m)
{
    struct moe_status st;
    size_t length;
    uint8_t *bytes = moe_coordinator__pack(&m->base, &length);
    if (bytes == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
        end_session(s, &st);
    } else if (moe_rpc_send_backlog(s->call) >= BACKLOG_MAX) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                       "the worker does not read its messages");
        end_session(s, &st);
    } else {
        moe_rpc_send(s->call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    }
    free(bytes);
}

static void send_registered(struct moe_coordinator *c, struct session *s,
                            const struct moe_membership_action *a)
{
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    Moe__V1__Registered body = MOE__V1__REGISTERED__INIT;
    body.slot = a->slot;
    body.slots = g.slots;
    body.lease_ms = c->lease_ms;
    body.epoch = a->epoch;
    body.admin_port = moe_rpc_server_port(c->server);
    uint32_t moved = moe_moves_fetched_version(c->moves),
             next = moe_membership_next_version(c->machine);
    body.fetched_placement_version =
        moved != 0  ? moved
        : next != 0 ? next
                    : moe_placement_version(moe_membership_placement(c->machine));
    uint32_t numbers[MOE_ADDED_MAX];
    char *names[MOE_ADDED_MAX];
    struct moe_added_info info;
    body.models = numbers;
    body.model_names = names;
    for (size_t i = 0; moe_added_info(c->models, i, &info); i++)
        if (!info.closed) {
            numbers[body.n_models++] = info.number;
            names[body.n_model_names++] = moe_coordinator__text(info.name);
        }
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_REGISTERED;
    m.registered = &body;
    send_message(s, &m);
}

/* Writes one layer's lists to `numbers`; returns the end of the written part. */
static uint32_t *fill_layer(const struct moe_placement *p, size_t index, uint32_t *numbers,
                            Moe__V1__LayerPlacement *out)
{
    struct moe_placement_layer layer = moe_placement_layer_at(p, index);
    moe__v1__layer_placement__init(out);
    out->layer = layer.layer;
    out->copies = numbers;
    out->n_copies = layer.experts;
    out->slots = numbers + layer.experts;
    for (uint32_t e = 0; e < layer.experts; e++) {
        const uint8_t *holders;
        uint32_t n = moe_placement_holders(p, index, e, &holders);
        out->copies[e] = n;
        for (uint32_t i = 0; i < n; i++)
            out->slots[out->n_slots++] = holders[i];
    }
    return out->slots + out->n_slots;
}

static size_t count_numbers(const struct moe_placement *p)
{
    size_t count = 0;
    for (size_t i = 0; i < moe_placement_layer_count(p); i++) {
        uint32_t experts = moe_placement_layer_at(p, i).experts;
        const uint8_t *holders;
        count += experts;
        for (uint32_t e = 0; e < experts; e++)
            count += moe_placement_holders(p, i, e, &holders);
    }
    return count;
}

/* The lists of a placement, as messages have them. */
struct placement_lists {
    size_t count;
    Moe__V1__LayerPlacement *layers, **list;
    uint32_t *numbers;
};

static void free_lists(struct placement_lists *l)
{
    free(l->numbers);
    free(l->list);
    free(l->layers);
}

/* On failure, ends the session. */
static bool make_lists(struct session *s, const struct moe_placement *p, struct placement_lists *l)
{
    l->count = moe_placement_layer_count(p);
    l->layers = calloc(l->count, sizeof *l->layers);
    l->list = calloc(l->count, sizeof *l->list);
    l->numbers = calloc(count_numbers(p), sizeof *l->numbers);
    if (l->layers == NULL || l->list == NULL || l->numbers == NULL) {
        struct moe_status st =
            moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
        end_session(s, &st);
        free_lists(l);
        return false;
    }
    uint32_t *at = l->numbers;
    for (size_t i = 0; i < l->count; i++) {
        at = fill_layer(p, i, at, &l->layers[i]);
        l->list[i] = &l->layers[i];
    }
    return true;
}

static void send_assign(struct moe_coordinator *c, struct session *s,
                        const struct moe_membership_action *a)
{
    const struct moe_placement *p = moe_membership_find_placement(c->machine, a->version);
    struct placement_lists lists;
    if (p == NULL || !make_lists(s, p, &lists)) /* NULL: the scaling was undone since */
        return;
    Moe__V1__Assign body = MOE__V1__ASSIGN__INIT;
    body.placement_version = moe_placement_version(p);
    body.slots = moe_placement_slots(p);
    body.keep = a->keep;
    body.spare_experts = c->machine_config.spare;
    body.order = a->order;
    body.n_layers = lists.count;
    body.layers = lists.list;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_ASSIGN;
    m.assign = &body;
    send_message(s, &m);
    free_lists(&lists);
}

/* `placement`: of the order; NULL = it has none. */
static void send_model_order(struct session *s, Moe__V1__ModelOrder *body,
                             const struct moe_placement *placement)
{
    struct placement_lists lists = {0};
    if (placement != NULL) {
        if (!make_lists(s, placement, &lists))
            return;
        body->slots = moe_placement_slots(placement);
        body->n_layers = lists.count;
        body->layers = lists.list;
    }
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER;
    m.model_order = body;
    send_message(s, &m);
    free_lists(&lists);
}

void moe_coordinator__send_move_order(struct moe_coordinator *c, const struct moe_moves_action *a)
{
    struct session *s = find_session(c, a->stream);
    bool fetch = a->step == MOE_MOVES_FETCH;
    const struct moe_placement *p =
        fetch ? moe_moves_plan(c->moves) : moe_membership_placement(c->machine);
    if (s == NULL || s->ended)
        return;
    Moe__V1__ModelOrder body = MOE__V1__MODEL_ORDER__INIT;
    body.step = (Moe__V1__ModelStep)a->step;
    body.order = a->order;
    body.epoch = a->epoch;
    body.placement_version = moe_placement_version(p);
    send_model_order(s, &body, fetch ? p : NULL);
}

void moe_coordinator__send_order(struct moe_coordinator *c, const struct moe_added_action *a,
                                 const struct moe_added_info *info)
{
    struct session *s = find_session(c, a->stream);
    if (s == NULL || s->ended)
        return;
    Moe__V1__ModelOrder body = MOE__V1__MODEL_ORDER__INIT;
    body.model = a->number;
    body.resume = a->step == MOE_ADDED_RESUME;
    body.step = body.resume ? MOE__V1__MODEL_STEP__MODEL_STEP_QUIESCE : (Moe__V1__ModelStep)a->step;
    body.order = a->order;
    body.epoch = a->epoch;
    body.if_idle = a->if_idle;
    body.again = a->again;
    if (a->step == MOE_ADDED_OPEN) {
        body.name = moe_coordinator__text(info->name);
        body.directory = moe_coordinator__text(info->directory);
    }
    if (a->step == MOE_ADDED_ADD)
        body.digest = moe_coordinator__text(moe_coordinator__added_digest(c, info));
    send_model_order(s, &body, a->step == MOE_ADDED_LOAD ? info->placement : NULL);
}

/* All Prepares of an epoch carry the same secret. */
static struct moe_status make_secret(struct moe_coordinator *c, uint64_t epoch)
{
    if (c->secret_epoch == epoch)
        return moe_ok();
    MOE_TRY(moe_random_bytes(c->secret, sizeof c->secret));
    c->secret_epoch = epoch;
    return moe_ok();
}

static void send_prepare(struct moe_coordinator *c, struct session *s,
                         const struct moe_membership_action *a)
{
    struct moe_membership_group g;
    struct moe_status st = make_secret(c, a->epoch);
    if (moe_failed(&st)) {
        end_session(s, &st);
        return;
    }
    moe_membership_group(c->machine, &g);
    const struct moe_placement *p = moe_membership_placement(c->machine);
    Moe__V1__Member members[MOE_PLACEMENT_SLOTS_MAX], *list[MOE_PLACEMENT_SLOTS_MAX];
    Moe__V1__Host hosts[MOE_PLACEMENT_SLOTS_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < g.slots; i++) {
        struct moe_membership_worker w;
        if ((g.live >> i & 1) == 0)
            continue;
        MOE_INVARIANT(moe_membership_worker(c->machine, i, &w));
        moe__v1__member__init(&members[i]);
        members[i].slot = i;
        members[i].worker_id = moe_coordinator__text(w.worker_id);
        members[i].incarnation = w.incarnation;
        members[i].endpoint = moe_coordinator__text(w.endpoint);
        moe_coordinator__fill_host(&w.host, &hosts[i]);
        members[i].host = &hosts[i];
        members[i].control_endpoint = moe_coordinator__text(w.control_endpoint);
        list[count++] = &members[i];
    }
    Moe__V1__Prepare body = MOE__V1__PREPARE__INIT;
    body.epoch = a->epoch;
    body.session_epoch = a->session_epoch;
    body.slots = moe_placement_slots(p);
    body.n_members = count;
    body.members = list;
    body.placement_version = moe_placement_version(p);
    body.placement_hash = moe_placement_hash(p);
    body.secret.data = c->secret;
    body.secret.len = sizeof c->secret;
    body.max_tokens_per_step = g.max_tokens_per_step;
    body.group_id = g.group_id;
    body.may_shrink = g.may_shrink;
    body.partial = g.partial;
    body.has_heirs = g.has_heirs;
    body.model = moe_coordinator__text(g.model);
    body.model_digest = moe_coordinator__text(moe_weights_digest(c->weights, g.fingerprint));
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_PREPARE;
    m.prepare = &body;
    send_message(s, &m);
}

static void send_blobs(struct moe_coordinator *c, struct session *s,
                       const struct moe_membership_action *a)
{
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    Moe__V1__SlotBlob blobs[MOE_PLACEMENT_SLOTS_MAX], *list[MOE_PLACEMENT_SLOTS_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < g.slots; i++) {
        if ((g.live >> i & 1) == 0)
            continue;
        moe__v1__slot_blob__init(&blobs[i]);
        blobs[i].slot = i;
        blobs[i].data.data =
            (uint8_t *)(uintptr_t)moe_membership_blob(c->machine, i, &blobs[i].data.len);
        list[count++] = &blobs[i];
    }
    Moe__V1__Blobs body = MOE__V1__BLOBS__INIT;
    body.epoch = a->epoch;
    body.round = a->round;
    body.n_blobs = count;
    body.blobs = list;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_BLOBS;
    m.blobs = &body;
    send_message(s, &m);
}

static void send_commit(struct session *s, const struct moe_membership_action *a)
{
    Moe__V1__Commit body = MOE__V1__COMMIT__INIT;
    body.epoch = a->epoch;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_COMMIT;
    m.commit = &body;
    send_message(s, &m);
}

static void send_abort(struct session *s, const struct moe_membership_action *a)
{
    Moe__V1__Abort body = MOE__V1__ABORT__INIT;
    body.epoch = a->epoch;
    body.reason = moe_coordinator__text(a->status.text);
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_ABORT;
    m.abort = &body;
    send_message(s, &m);
}

static void send_drain(struct session *s, const struct moe_membership_action *a)
{
    Moe__V1__Drain body = MOE__V1__DRAIN__INIT;
    body.reason = moe_coordinator__text(a->status.text);
    body.limit_ms = a->limit_ms;
    body.experts_move = a->keep;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_DRAIN;
    m.drain = &body;
    send_message(s, &m);
}

static void send_trying_again(struct session *s)
{
    Moe__V1__TryingAgain body = MOE__V1__TRYING_AGAIN__INIT;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_TRYING_AGAIN;
    m.trying_again = &body;
    send_message(s, &m);
}

/* Where clients of a spare find the experts. */
static size_t list_places(const struct moe_coordinator *c, uint32_t slot,
                          char *endpoints[MOE_PLACEMENT_SLOTS_MAX])
{
    struct moe_membership_group g;
    struct moe_membership_worker w;
    size_t count = 0;
    moe_membership_group(c->machine, &g);
    if ((g.places >> slot & 1) != 0)
        return 0;
    for (uint32_t s = 0; s < g.slots; s++)
        if ((g.places >> s & 1) != 0 && moe_membership_worker(c->machine, s, &w) && w.connected &&
            w.endpoint[0] != '\0')
            endpoints[count++] = moe_coordinator__text(w.endpoint);
    return count;
}

static void send_heartbeat_answer(const struct moe_coordinator *c, struct session *s,
                                  const struct moe_membership_action *a)
{
    Moe__V1__HeartbeatAnswer body = MOE__V1__HEARTBEAT_ANSWER__INIT;
    char *places[MOE_PLACEMENT_SLOTS_MAX];
    body.sequence = a->sequence;
    body.oldest_ms = a->oldest_ms;
    body.joiner_waits = a->keep;
    body.released_calls = a->released_calls;
    body.n_places = list_places(c, a->slot, places);
    body.places = places;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_HEARTBEAT_ANSWER;
    m.heartbeat_answer = &body;
    send_message(s, &m);
}

static void send_read_checkpoint(const struct moe_coordinator *c, struct session *s,
                                 const struct moe_membership_action *a)
{
    const struct moe_saved_training *t = moe_membership_to_read(c->machine);
    Moe__V1__SavedTraining state = MOE__V1__SAVED_TRAINING__INIT;
    state.checkpoint = moe_coordinator__text(t->checkpoint);
    state.lineage = t->lineage;
    state.weights_version = t->weights_version;
    state.calls = t->calls;
    state.record = t->record;
    Moe__V1__ReadCheckpoint body = MOE__V1__READ_CHECKPOINT__INIT;
    body.order = a->order;
    body.state = &state;
    Moe__V1__SessionResponse m = MOE__V1__SESSION_RESPONSE__INIT;
    m.body_case = MOE__V1__SESSION_RESPONSE__BODY_READ_CHECKPOINT;
    m.read_checkpoint = &body;
    send_message(s, &m);
}

static void send_action(struct moe_coordinator *c, const struct moe_membership_action *a)
{
    struct session *s = find_session(c, a->stream);
    if (s == NULL || s->ended)
        return; /* its done event is in the inbox */
    switch (a->message) {
    case MOE_MEMBERSHIP_REGISTERED: send_registered(c, s, a); break;
    case MOE_MEMBERSHIP_ASSIGN: send_assign(c, s, a); break;
    case MOE_MEMBERSHIP_PREPARE: send_prepare(c, s, a); break;
    case MOE_MEMBERSHIP_BLOBS: send_blobs(c, s, a); break;
    case MOE_MEMBERSHIP_HEARTBEAT_ANSWER: send_heartbeat_answer(c, s, a); break;
    case MOE_MEMBERSHIP_READ_CHECKPOINT: send_read_checkpoint(c, s, a); break;
    case MOE_MEMBERSHIP_COMMIT: send_commit(s, a); break;
    case MOE_MEMBERSHIP_ABORT: send_abort(s, a); break;
    case MOE_MEMBERSHIP_DRAIN: send_drain(s, a); break;
    case MOE_MEMBERSHIP_TRYING_AGAIN: send_trying_again(s); break;
    }
}

/* ------------------------------------------------------------------ actions */

struct moe_status moe_coordinator__save(struct moe_coordinator *c)
{
    static const struct moe_loop_place disk = {
        .what = "a write of the group's state", .code = "DISK_SLOW", .outside = true};
    struct moe_status st = moe_ok();
    uint64_t begun = moe_clock_ns();
    moe_loop_enter(c->turn.data, &disk);
    if (c->store != NULL)
        st = moe_coordinator__save_weights(c);
    if (c->store != NULL && !moe_failed(&st))
        st = moe_saved_append(c->store, moe_membership_to_save(c->machine),
                              moe_added_to_save(c->models));
    if (c->store != NULL && !moe_failed(&st))
        st = moe_coordinator__remember_group(c, moe_membership_to_save(c->machine)->group_id);
    moe_loop_leave(c->turn.data);
    moe_histogram_observe(c->seen.save_seconds,
                          (double)(moe_clock_ns() - begun) / (double)MOE_NS_PER_S);
    if (st.code != MOE_OK)
        moe_counter_add(c->seen.save_failures, 1);
    moe_gauge_set(c->seen.saved, st.code == MOE_OK ? 1 : 0);
    return st;
}

static void save(struct moe_coordinator *c, uint64_t sequence)
{
    struct moe_status st = moe_coordinator__save(c);
    moe_membership_on_saved(c->machine, moe_clock_ns(), sequence, &st);
}

int64_t moe_coordinator__unix_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void moe_coordinator__note(struct moe_coordinator *c, enum moe_log_level level,
                           enum moe_membership_event event, uint32_t slot, const char *text)
{
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    struct moe_event e = {.unix_ms = moe_coordinator__unix_ms(),
                          .kind = event,
                          .level = level,
                          .slot = slot,
                          .epoch = g.state == MOE_GROUP_FORMING ? g.last_epoch : g.epoch};
    (void)snprintf(e.text, sizeof e.text, "%s", text);
    moe_events_add(&c->events, &e);
    moe_log_write(level, "%s", text);
}

void moe_coordinator__act(struct moe_coordinator *c)
{
    struct moe_membership_action a;
    while (moe_membership_next_action(c->machine, &a)) {
        switch (a.kind) {
        case MOE_MEMBERSHIP_SAVE: save(c, a.sequence); break;
        case MOE_MEMBERSHIP_SEND: send_action(c, &a); break;
        case MOE_MEMBERSHIP_CLOSE: close_stream(c, a.stream, &a.status); break;
        case MOE_MEMBERSHIP_LOG:
            moe_coordinator__note(c, a.level, a.event, a.slot, a.status.text);
            break;
        case MOE_MEMBERSHIP_EXIT: c->exited = true; break;
        }
    }
    moe_coordinator__act_models(c);
    moe_coordinator__act_moves(c);
}

/* ------------------------------------------------------------------ receiving */

/* Ends the stream of a caller that may not speak for the worker. */
static bool may_register(struct moe_coordinator *c, struct session *s, const char *worker_id)
{
    const struct moe_rpc_grant *grant = moe_rpc_call_grant(s->call);
    if (moe_guard_speaks_for(c->guard, grant, worker_id))
        return true;
    struct moe_status st =
        moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE,
                  "%.80s may not register as worker_id %.60s", grant->who, worker_id);
    moe_log_warn("%s", st.text);
    end_session(s, &st);
    return false;
}

struct moe_membership_layer moe_coordinator__read_layer(const Moe__V1__LayerInfo *l)
{
    return (struct moe_membership_layer){.layer = l->layer,
                                         .hidden = l->hidden,
                                         .experts = l->experts,
                                         .top_k = l->top_k,
                                         .intermediate = l->intermediate,
                                         .zero_experts = l->zero_experts,
                                         .routes_by_token_id = l->routes_by_token_id != 0,
                                         .vocabulary = l->vocabulary,
                                         .latent = l->latent,
                                         .shared_intermediate = l->shared_intermediate,
                                         .routed_encoding = (uint32_t)l->routed_encoding,
                                         .shared_encoding = (uint32_t)l->shared_encoding,
                                         .routed_activations = (uint32_t)l->routed_activations,
                                         .shared_activations = (uint32_t)l->shared_activations};
}

static void receive_register(struct moe_coordinator *c, struct session *s, uint64_t now,
                             const Moe__V1__Register *r)
{
    if (!may_register(c, s, r->worker_id))
        return;
    struct moe_membership_layer layers[MOE_PLACEMENT_LAYERS_MAX];
    size_t count = r->n_layers; /* the machine refuses too many without reading them */
    for (size_t i = 0; i < count && count <= MOE_PLACEMENT_LAYERS_MAX; i++)
        layers[i] = moe_coordinator__read_layer(r->layers[i]);
    struct moe_membership_register in = {.worker_id = r->worker_id,
                                         .endpoint = r->endpoint,
                                         .control_endpoint = r->control_endpoint,
                                         .backend = r->backend,
                                         .model = r->model,
                                         .fingerprint = r->model_fingerprint,
                                         .family = r->family,
                                         .version = r->version,
                                         .incarnation = r->incarnation,
                                         .identity = moe_rpc_call_grant(s->call)->who,
                                         .max_tokens_per_step = r->max_tokens_per_step,
                                         .wanted_slot_plus_one = r->wanted_slot_plus_one,
                                         .trains = r->trains,
                                         .partial = r->partial,
                                         .trains_with_copies = r->trains_with_copies,
                                         .moves_experts = r->moves_experts,
                                         .layers = layers,
                                         .layer_count = count};
    if (r->host != NULL)
        in.host = (struct moe_membership_host){r->host->id, r->host->name, r->host->domain,
                                               r->host->network_address};
    if (r->session != NULL) {
        in.session.epoch = r->session->epoch;
        in.session.together = r->session->together;
        in.session.max_tokens = r->session->max_tokens_per_step;
    }
    if (r->slot_token.len == MOE_MEMBERSHIP_TOKEN_BYTES)
        in.slot_token = r->slot_token.data;
    moe_membership_on_register(c->machine, now, s->stream, &in);
}

static struct moe_status status_of(const Moe__V1__Error *e)
{
    if (e == NULL || e->code == MOE_OK)
        return moe_ok();
    bool known = e->code <= MOE_UNAUTHENTICATED;
    return moe_error(known ? (enum moe_code)e->code : MOE_UNKNOWN, moe_reason_from_name(e->reason),
                     "%s", e->message);
}

static void read_training(const Moe__V1__SavedTraining *from, struct moe_saved_training *to)
{
    if (from == NULL)
        return;
    moe_membership_copy_text(to->checkpoint, sizeof to->checkpoint, from->checkpoint);
    to->lineage = from->lineage;
    to->weights_version = from->weights_version;
    to->calls = from->calls;
    to->record = from->record;
}

/* A message about an added model: it renews the lease. False if its sender has no slot. */
static bool renew(struct moe_coordinator *c, uint64_t now, uint64_t stream, uint32_t *slot)
{
    moe_membership_on_digests(c->machine, now, stream);
    moe_coordinator__act(c);
    return moe_membership_slot_of(c->machine, stream, slot);
}

/* `s->message_event.arrived_ns` is the time of the input. False when this release does not know the
 * message. */
static bool receive(struct moe_coordinator *c, struct session *s, const Moe__V1__SessionRequest *m)
{
    struct moe_membership *machine = c->machine;
    uint64_t now = s->message_event.arrived_ns, stream = s->stream;
    struct moe_status st;
    uint32_t slot;
    switch (m->body_case) {
    case MOE__V1__SESSION_REQUEST__BODY_REGISTER:
        receive_register(c, s, now, m->register_);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_HEARTBEAT: {
        const Moe__V1__Heartbeat *h = m->heartbeat;
        struct moe_membership_heartbeat in = {.epoch = h->epoch,
                                              .loaded_bytes = h->loaded_bytes,
                                              .total_bytes = h->total_bytes,
                                              .tokens = h->tokens,
                                              .steps = h->steps,
                                              .sequence = h->sequence,
                                              .round_trip_ns =
                                                  h->round_trip_us * (MOE_NS_PER_MS / 1000)};
        read_training(h->training_saved, &in.training_saved);
        moe_membership_on_heartbeat(machine, now, stream, &in);
        return true;
    }
    case MOE__V1__SESSION_REQUEST__BODY_LOADED:
        st = status_of(m->loaded->error);
        moe_coordinator__receive_loaded(c, now, stream, m->loaded, &st);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_CHECKPOINT_READ:
        st = status_of(m->checkpoint_read->error);
        moe_membership_on_checkpoint_read(machine, now, stream, m->checkpoint_read->order, &st);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_DIGESTS:
        moe_coordinator__receive_digests(c, now, stream, m->digests->model, m->digests->part.data,
                                         m->digests->part.len);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_BLOB:
        moe_membership_on_blob(machine, now, stream, m->blob->epoch, m->blob->round,
                               m->blob->data.data, m->blob->data.len);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_READY:
        st = status_of(m->ready->error);
        moe_membership_on_ready(machine, now, stream, m->ready->epoch,
                                moe_failed(&st) ? m->ready->without : m->ready->together, &st);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_PEER_LOST:
        moe_membership_on_peer_lost(machine, now, stream, m->peer_lost->epoch, m->peer_lost->slots);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_DRAIN_NOTICE:
        moe_membership_on_drain_notice(machine, now, stream, m->drain_notice->reason);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_LEAVING:
        moe_membership_on_leaving(machine, now, stream, m->leaving->reason);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_TRY_AGAIN:
        moe_membership_on_try_again(machine, now, stream);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_MODEL_REPORT:
        st = status_of(m->model_report->error);
        if (!renew(c, now, stream, &slot))
            return true;
        if (m->model_report->model == 0)
            moe_coordinator__receive_move_report(c, slot, m->model_report, &st);
        else
            moe_coordinator__receive_model_report(c, slot, m->model_report, &st);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_EXPERT_ROWS:
        if (!renew(c, now, stream, &slot))
            return true;
        st = moe_coordinator__receive_rows(c, slot, m->expert_rows);
        if (moe_failed(&st))
            moe_membership_on_wrong_weights(machine, now, stream, &st);
        return true;
    case MOE__V1__SESSION_REQUEST__BODY_MODEL_PROGRESS:
        if (!renew(c, now, stream, &slot))
            return true;
        if (m->model_progress->model == 0)
            moe_moves_on_progress(c->moves, moe_clock_ns(), slot, m->model_progress->loaded_bytes);
        else
            moe_added_on_progress(c->models, moe_clock_ns(), slot, m->model_progress->model,
                                  m->model_progress->loaded_bytes, m->model_progress->total_bytes);
        return true;
    default: return false;
    }
}

static void observe_wait(struct moe_coordinator *c, const struct session *s,
                         const Moe__V1__SessionRequest *m)
{
    bool heartbeat = m->body_case == MOE__V1__SESSION_REQUEST__BODY_HEARTBEAT;
    uint64_t waited_ns = moe_clock_ns() - s->message_event.arrived_ns;
    moe_histogram_observe(heartbeat ? c->seen.heartbeat_waited : c->seen.others_waited,
                          (double)waited_ns / (double)MOE_NS_PER_S);
}

static void receive_bytes(struct moe_coordinator *c, struct session *s)
{
    size_t length = 0;
    struct moe_status st =
        moe_rpc_msg_flatten(s->received, c->received, sizeof c->received, &length);
    void *m = NULL;
    /* From the heap: Register with the largest number of layers does not fit into an arena. */
    if (!moe_failed(&st))
        st = moe_rpc_unpack(&moe__v1__session_request__descriptor, c->received, length, NULL, &m);
    moe_counter_add(c->seen.messages, 1);
    if (!moe_failed(&st))
        observe_wait(c, s, m);
    if (!moe_failed(&st) && !receive(c, s, m))
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "not a SessionRequest");
    if (m != NULL)
        moe__v1__session_request__free_unpacked(m, NULL);
    if (!moe_failed(&st))
        return;
    moe_counter_add(c->seen.malformed, 1);
    end_session(s, &st);
    moe_membership_on_stream_closed(c->machine, moe_clock_ns(), s->stream);
}

static void run_message(struct moe_coordinator *c, struct event *e)
{
    struct session *s = (struct session *)((char *)e - offsetof(struct session, message_event));
    s->received_any = true;
    if (s->received == NULL && !s->ended) { /* half-closed: no message follows */
        struct moe_status ok = moe_ok();
        end_session(s, &ok);
        moe_membership_on_stream_closed(c->machine, moe_clock_ns(), s->stream);
    } else if (!s->ended) {
        receive_bytes(c, s);
        moe_coordinator__act(c); /* the answer may be the end of this stream */
    }
    moe_rpc_msg_free(s->received);
    s->received = NULL;
    if (!s->ended)
        moe_rpc_read_next(s->call);
}

static bool is_silent(const struct session *s)
{
    return !s->ended && !s->received_any;
}

/* Refuses `s`, or ends another session for it, when there are too many. A session that has sent no
 * Register holds no place: so a caller who opens sessions and says nothing keeps no worker out. */
static void limit_sessions(struct moe_coordinator *c, struct session *s)
{
    struct session *oldest = NULL;
    unsigned open = 0, of_connection = 0;
    struct moe_status st =
        moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, 1000, "too many sessions");
    for (struct session *each = c->sessions; each != NULL; each = each->next) {
        open += !each->ended;
        of_connection +=
            !each->ended && moe_rpc_call_identity(each->call) == moe_rpc_call_identity(s->call);
        if (is_silent(each))
            oldest = each;
    }
    if (of_connection > SESSIONS_PER_CONNECTION)
        end_session(s, &st);
    else if (open > SESSIONS_MAX)
        end_session(oldest, &st); /* `s` itself if all others are members */
}

static void run_opened(struct moe_coordinator *c, struct event *e)
{
    struct session *s = (struct session *)((char *)e - offsetof(struct session, opened_event));
    s->opened_ns = moe_clock_ns();
    s->next = c->sessions;
    if (s->next != NULL)
        s->next->previous = s;
    c->sessions = s;
    struct moe_status st = moe_coordinator__refusal(c, true);
    if (moe_failed(&st))
        end_session(s, &st);
    else
        limit_sessions(c, s);
}

static void run_done(struct moe_coordinator *c, struct event *e)
{
    struct session *s = (struct session *)((char *)e - offsetof(struct session, done_event));
    moe_membership_on_stream_closed(c->machine, moe_clock_ns(), s->stream);
    moe_coordinator__act(c);
    if (s->previous != NULL)
        s->previous->next = s->next;
    else
        c->sessions = s->next;
    if (s->next != NULL)
        s->next->previous = s->previous;
    moe_rpc_call_unref(s->call);
    free(s);
    atomic_fetch_sub(&c->session_count, 1);
}

void moe_coordinator__end_sessions(struct moe_coordinator *c, const struct moe_status *why)
{
    for (struct session *s = c->sessions; s != NULL; s = s->next)
        end_session(s, why);
}

void moe_coordinator__drop_silent(struct moe_coordinator *c, uint64_t now_ns)
{
    struct moe_status st =
        moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "no Register came in time");
    for (struct session *s = c->sessions; s != NULL; s = s->next)
        if (is_silent(s) && now_ns - s->opened_ns > SILENCE_MAX_NS)
            end_session(s, &st);
}

/* ------------------------------------------------------------------ on gRPC threads */

static void on_started(struct moe_rpc_call *call, void *ctx)
{
    struct moe_coordinator *c = ctx;
    struct session *s = NULL;
    if (atomic_fetch_add(&c->session_count, 1) < OPENED_MAX)
        s = calloc(1, sizeof *s);
    if (s == NULL) {
        atomic_fetch_sub(&c->session_count, 1);
        moe_rpc_fail(call, moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, 1000,
                                           "too many sessions"));
        return;
    }
    s->opened_event.run = run_opened;
    s->message_event.run = run_message;
    s->done_event.run = run_done;
    s->call = call;
    s->stream = atomic_fetch_add(&c->next_stream, 1) + 1;
    moe_rpc_call_ref(call);
    moe_rpc_call_set_user(call, s);
    moe_coordinator__post(c, &s->opened_event);
}

static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct session *s = moe_rpc_call_user(call);
    if (s == NULL) { /* refused in on_started */
        moe_rpc_msg_free(m);
        return;
    }
    s->received = m;
    moe_coordinator__post(ctx, &s->message_event);
}

static void on_done(struct moe_rpc_call *call, void *ctx)
{
    struct session *s = moe_rpc_call_user(call);
    if (s != NULL)
        moe_coordinator__post(ctx, &s->done_event);
}

struct moe_rpc_method moe_coordinator__session_method(struct moe_coordinator *c)
{
    return (struct moe_rpc_method){.path = "/moe.v1.CoordinatorService/Session",
                                   .kind = MOE_RPC_STREAM,
                                   .largest = MESSAGE_MAX,
                                   .started = on_started,
                                   .message = on_message,
                                   .done = on_done,
                                   .ctx = c};
}
