/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing, checking and answering; see service/request.h. The parts of a message go straight from
 * the transport's slices into staging memory; the head goes through protobuf-c in a fixed arena. No
 * number of a client is used as a size before it has been compared with the layer's. */
#include "service/request.h"

#include "base/clock.h"
#include "base/size.h"
#include "moe/v1/expert.pb-c.h"
#include "service/request_checks.h"

typedef Moe__V1__ForwardStreamRequest Head;

enum {
    FIELD_IDS = 12,
    FIELD_WEIGHTS = 13,
    FIELD_TOKEN_IDS = 14,
    FIELD_DATA = 15,
    FIELD_STATES = 17,
    FIELD_ID = 30
};
static const uint32_t part_fields[] = {FIELD_IDS, FIELD_WEIGHTS, FIELD_TOKEN_IDS, FIELD_DATA};

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

/* ------------------------------------------------------------------------ splitting */

/* A message while it is parsed. */
struct parse {
    const struct moe_request_context *context;
    struct moe_request *request;
    const struct moe_token_table *table; /* of the layer; NULL: its router chooses */
    size_t x_bytes, ids_bytes, weights_bytes, token_bytes;
};

static struct moe_status place_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct parse *p = ctx;
    struct moe_request *r = p->request;
    struct moe_buffer **buffer;
    switch (field) {
    case FIELD_IDS:
        p->ids_bytes = length;
        buffer = &r->ids;
        break;
    case FIELD_WEIGHTS:
        p->weights_bytes = length;
        buffer = &r->weights;
        break;
    case FIELD_TOKEN_IDS:
        p->token_bytes = length;
        buffer = &r->token_ids;
        break;
    default:
        p->x_bytes = length;
        buffer = &r->x;
        break;
    }
    return moe_request_take(p->context->info, p->context->staging, length, buffer, dst);
}

/* -------------------------------------------------------------------------- checks */

static struct moe_status check_shape(struct parse *p, const Head *h)
{
    const struct moe_layer_spec *spec = p->request->spec;
    struct moe_work *w = &p->request->work;
    w->tokens = h->tokens;
    MOE_TRY(moe_request_check_rows(spec, h->hidden, h->tokens));
    if (h->tokens > p->context->info->max_tokens_per_request)
        return invalid(TOKEN_LIMIT, "%u tokens; a request may have at most %u", h->tokens,
                       p->context->info->max_tokens_per_request);
    return moe_request_check_tensor("x", p->x_bytes, spec, h->tokens, w->dtype);
}

/* With token ids, the layer's table is the router: from here on the request has given ids. */
static struct moe_status check_token_ids(struct parse *p, const Head *h)
{
    struct moe_work *w = &p->request->work;
    if (w->mode != MOE_ROUTE_SERVER || p->ids_bytes != 0 || p->weights_bytes != 0)
        return invalid(ROUTING_INVALID, "token_ids are given: topk_ids, topk_weights and routing "
                                        "modes other than SERVER are excluded");
    w->mode = MOE_ROUTE_IDS;
    return moe_request_check_token_ids(p->request->spec, p->table, h->tokens, p->request->token_ids,
                                       p->token_bytes);
}

static struct moe_status check_mode(struct parse *p, const Head *h)
{
    struct moe_work *w = &p->request->work;
    switch (h->routing_mode) {
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_UNSPECIFIED:
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_SERVER: w->mode = MOE_ROUTE_SERVER; break;
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS: w->mode = MOE_ROUTE_IDS; break;
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS:
        w->mode = MOE_ROUTE_IDS_WEIGHTS;
        break;
    default: return invalid(ROUTING_INVALID, "unknown routing mode %d", (int)h->routing_mode);
    }
    if (p->token_bytes != 0)
        return check_token_ids(p, h);
    if (h->parts != MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED)
        MOE_TRY(moe_request_check_routed(p->request->spec, w->mode));
    if ((p->ids_bytes != 0) != (w->mode != MOE_ROUTE_SERVER))
        return invalid(ROUTING_INVALID, w->mode == MOE_ROUTE_SERVER
                                            ? "topk_ids are given, but the routing mode is SERVER"
                                            : "topk_ids are missing");
    if ((p->weights_bytes != 0) != (w->mode == MOE_ROUTE_IDS_WEIGHTS))
        return invalid(ROUTING_INVALID,
                       w->mode == MOE_ROUTE_IDS_WEIGHTS
                           ? "topk_weights are missing"
                           : "topk_weights are given, but the routing mode has none");
    return moe_ok();
}

static struct moe_status check_routing(struct parse *p, const Head *h)
{
    const struct moe_work *w = &p->request->work;
    MOE_TRY(check_mode(p, h));
    if (p->ids_bytes != 0)
        MOE_TRY(moe_request_check_ids(p->request->spec, h->tokens, (int)h->topk_ids_dtype,
                                      p->request->ids, p->ids_bytes));
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        MOE_TRY(moe_request_check_weights(p->request->spec, h->tokens, p->request->weights,
                                          p->weights_bytes));
    return moe_ok();
}

static struct moe_status check_parts(struct parse *p, const Head *h)
{
    struct moe_request *r = p->request;
    switch (h->parts) {
    case MOE__V1__LAYER_PARTS__LAYER_PARTS_UNSPECIFIED:
    case MOE__V1__LAYER_PARTS__LAYER_PARTS_BOTH: return moe_ok();
    case MOE__V1__LAYER_PARTS__LAYER_PARTS_ROUTED: r->parts = MOE_PARTS_ROUTED; break;
    case MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED: r->parts = MOE_PARTS_SHARED; break;
    default: return invalid(VALUE_INVALID, "there is no LayerParts %d", (int)h->parts);
    }
    if (h->retain != NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "parts: a pass that is retained for Backward computes both");
    r->work.without_shared = r->parts == MOE_PARTS_ROUTED;
    if (r->parts == MOE_PARTS_ROUTED)
        return moe_ok();
    if (r->work.mode != MOE_ROUTE_SERVER || h->return_routing)
        return invalid(ROUTING_INVALID, "parts: shared experts have no routing");
    r->work.mode = MOE_ROUTE_IDS_WEIGHTS;
    return moe_request_route_nowhere(p->context->staging, r->spec, h->tokens, &r->ids, &r->weights);
}

static struct moe_status check_batch(struct parse *p, const Head *h)
{
    enum { PARTS_MAX = 64 };
    struct moe_work *w = &p->request->work;
    if (h->batch_part == NULL)
        return moe_ok();
    if (h->batch_part->parts < 2 || h->batch_part->parts > PARTS_MAX)
        return invalid(VALUE_INVALID, "a batch has 2 to %d parts, not %u", PARTS_MAX,
                       h->batch_part->parts);
    w->batch = h->batch_part->batch;
    w->batch_parts = h->batch_part->parts;
    return moe_ok();
}

static struct moe_status check_unavailable(struct parse *p, const Head *h)
{
    struct moe_work *w = &p->request->work;
    switch (h->on_unavailable) {
    case MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_UNSPECIFIED:
    case MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_WAIT:
        w->on_unavailable = MOE_ON_UNAVAILABLE_WAIT;
        return moe_ok();
    case MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_FAIL:
        w->on_unavailable = MOE_ON_UNAVAILABLE_FAIL;
        return moe_ok();
    case MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_PARTIAL:
        w->on_unavailable = MOE_ON_UNAVAILABLE_PARTIAL;
        break;
    default: return invalid(VALUE_INVALID, "there is no OnUnavailable %d", (int)h->on_unavailable);
    }
    return h->retain == NULL
               ? moe_ok()
               : moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                           "on_unavailable: a pass that is retained for Backward has all tokens");
}

static struct moe_status check_retain(struct parse *p, const Head *h)
{
    const struct moe_request_context *c = p->context;
    if (h->retain == NULL)
        return moe_ok();
    if (p->request->model != NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "only the default model can train: no pass of %s is retained",
                         p->request->model->name);
    if (c->training == NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this worker has no training; start it with --training");
    if (c->may_retain != NULL)
        MOE_TRY(c->may_retain(c->may_retain_ctx, c->call));
    MOE_TRY(moe_request_check_pass(h->retain->session, h->retain->micro_batch_id));
    if (h->tokens > c->info->max_tokens_per_step)
        return invalid(TOKEN_LIMIT, "%u tokens; one Backward has at most %u", h->tokens,
                       c->info->max_tokens_per_step);
    memcpy(p->request->retain_session, h->retain->session, strlen(h->retain->session));
    p->request->retain_id = h->retain->micro_batch_id;
    return moe_ok();
}

static struct moe_status check_state(struct parse *p, const Head *h)
{
    const struct moe_request_context *c = p->context;
    const struct moe_added_model *added = p->request->model;
    MOE_TRY(moe_request_check_epoch(&c->worker, h->epoch));
    MOE_TRY(moe_request_check_version(added == NULL ? c->weights_version : 1, h->weights_version));
    struct moe_served_model model = *c->worker.model;
    if (added != NULL)
        model = (struct moe_served_model){added->name, added->digest};
    MOE_TRY(moe_request_check_digest(&c->worker, &model, h->model_digest));
    return moe_request_check_worker(&c->worker);
}

/* -------------------------------------------------------------------------- memory */

enum { ALIGN = 64 };

/* Offsets into the results buffer; a part that is not needed has no bytes. */
struct layout {
    size_t y, ids_out, weights_out, states, rehomed, ids_in, end;
};

static bool append_part(size_t *end, size_t bytes, size_t *offset)
{
    *offset = *end;
    return moe_size_add(*end, bytes, end) && moe_size_round_up(*end, ALIGN, end);
}

static struct moe_status lay_out(const struct parse *p, const Head *h, struct layout *l)
{
    size_t pairs = h->tokens * (size_t)p->request->spec->router.top_k * sizeof(int32_t);
    size_t routing = h->return_routing || h->retain != NULL ? pairs : 0;
    bool made = p->token_bytes != 0 || (p->ids_bytes != 0 && p->ids_bytes != pairs);
    size_t head = h->return_rehomed ? MOE_REQUEST_HEAD_MAX : MOE_REQUEST_HEAD_PLAIN;
    size_t limit = p->context->info->max_message_bytes;
    size_t states =
        p->request->work.on_unavailable == MOE_ON_UNAVAILABLE_PARTIAL ? h->tokens : (size_t)0;
    *l = (struct layout){0};
    if (!append_part(&l->end, p->x_bytes, &l->y) || !append_part(&l->end, routing, &l->ids_out) ||
        !append_part(&l->end, routing, &l->weights_out) ||
        !append_part(&l->end, states, &l->states) || l->end > limit - head)
        return invalid(TOO_LARGE, "the answer would be larger than a message may be");
    size_t rehomed = h->return_rehomed ? p->request->spec->experts * sizeof(uint32_t) : 0;
    return append_part(&l->end, rehomed, &l->rehomed) &&
                   append_part(&l->end, made ? pairs : 0, &l->ids_in)
               ? moe_ok()
               : invalid(TOO_LARGE, "too large");
}

/* Takes memory for x and the routing, and copies x. Without room the pass is served all the same,
 * and `retained` of its answer stays false. */
static void reserve_pass(struct parse *p, const Head *h)
{
    struct moe_request *r = p->request;
    size_t pairs = h->tokens * (size_t)r->spec->router.top_k * sizeof(int32_t);
    size_t end = 0, x_at, ids_at, weights_at;
    if (!append_part(&end, p->x_bytes, &x_at) || !append_part(&end, pairs, &ids_at) ||
        !append_part(&end, pairs, &weights_at))
        return;
    r->training = p->context->training;
    struct moe_status st =
        moe_pass_store_reserve(moe_train_passes(r->training), end, r->received_ns, &r->pass);
    if (moe_failed(&st)) {
        r->pass = NULL;
        return;
    }
    const struct moe_retained_pass head = {
        .layer = h->layer,
        .tokens = h->tokens,
        .top_k = r->spec->router.top_k,
        .dtype = r->work.dtype,
        .mode = r->work.mode == MOE_ROUTE_IDS_WEIGHTS ? MOE_ROUTE_IDS_WEIGHTS : MOE_ROUTE_IDS,
        .x_bytes = p->x_bytes,
        .ids_at = ids_at,
        .weights_at = weights_at,
    };
    memcpy(r->pass->head, &head, sizeof head);
    memcpy(r->pass->data, moe_buffer_data(r->x), p->x_bytes);
    if (!moe_activations_are_worth(moe_train_activations(r->training), r->work.dtype, h->tokens))
        return;
    r->work.retain_session = r->retain_session;
    r->work.retain_id = r->retain_id;
}

/* The engine's thread: completes the record and lists it. */
static void store_pass(struct moe_request *r)
{
    const struct moe_work *w = &r->work;
    size_t pairs = w->tokens * (size_t)r->spec->router.top_k * sizeof(int32_t);
    struct moe_train_state state;
    struct moe_retained_pass head;
    uint8_t *data = r->pass->data;
    moe_train_read_state(r->training, &state);
    memcpy(&head, r->pass->head, sizeof head);
    head.weights_version = w->answered_version;
    head.lineage = state.lineage;
    head.step = w->retained_name;
    head.epoch = w->answered_epoch;
    memcpy(r->pass->head, &head, sizeof head);
    memcpy(data + head.ids_at, w->ids_out, pairs);
    memcpy(data + head.weights_at, w->weights_out, pairs);
    moe_pass_store_put(moe_train_passes(r->training), r->pass, r->retain_session, r->retain_id,
                       moe_clock_ns());
    r->pass = NULL;
}

static struct moe_status prepare_work(struct parse *p, const Head *h)
{
    struct moe_request *r = p->request;
    struct moe_work *w = &r->work;
    struct layout l;
    MOE_TRY(lay_out(p, h, &l));
    MOE_TRY(moe_staging_take(p->context->staging, l.end, &r->results));
    uint8_t *base = moe_buffer_data(r->results);
    w->layer = moe_layer_key(r->model != NULL ? r->model->number : 0, h->layer);
    w->epoch = h->epoch;
    w->weights_version = h->weights_version;
    w->x = moe_buffer_data(r->x);
    w->y = base + l.y;
    r->return_routing = h->return_routing;
    if (h->return_routing || h->retain != NULL) {
        w->ids_out = (int32_t *)(void *)(base + l.ids_out);
        w->weights_out = (float *)(void *)(base + l.weights_out);
    }
    if (w->on_unavailable == MOE_ON_UNAVAILABLE_PARTIAL)
        w->token_state = base + l.states;
    if (h->return_rehomed)
        w->rehomed = (uint32_t *)(void *)(base + l.rehomed);
    if (l.ids_in != l.end) {
        int32_t *ids = (int32_t *)(void *)(base + l.ids_in);
        if (r->token_ids != NULL)
            moe_request_look_up(p->table, h->tokens, r->token_ids, ids);
        else
            moe_request_widen_ids(ids, moe_buffer_data(r->ids),
                                  moe_request_id_bytes((int)h->topk_ids_dtype),
                                  h->tokens * (size_t)r->spec->router.top_k);
        w->ids_in = ids;
    } else if (r->ids != NULL) {
        w->ids_in = moe_buffer_data(r->ids);
    }
    if (r->weights != NULL)
        w->weights_in = moe_buffer_data(r->weights);
    if (h->retain != NULL)
        reserve_pass(p, h);
    return moe_ok();
}

/* -------------------------------------------------------------------------- parsing */

static struct moe_status find_layer(struct parse *p, const Head *h)
{
    struct moe_request *r = p->request;
    const struct moe_service_info *info = p->context->info;
    if (moe_request_wants_default(p->context->worker.model, h->model)) {
        p->table = moe_token_tables_find(&info->token_tables, h->layer);
        return moe_request_find_layer(info->layers, info->layer_count, h->layer, (int)h->dtype,
                                      &r->spec, &r->work.dtype);
    }
    r->models = p->context->models;
    MOE_TRY(moe_models_take(r->models, h->model, &r->model));
    p->table = moe_token_tables_find(&r->model->token_tables, h->layer);
    return moe_request_find_layer(r->model->layers, r->model->layer_count, h->layer, (int)h->dtype,
                                  &r->spec, &r->work.dtype);
}

static struct moe_status check_head(struct parse *p, const uint8_t *head, size_t length)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_rpc_unpack(&moe__v1__forward_stream_request__descriptor, head, length, &arena,
                           &message));
    const Head *h = message;
    p->request->id = h->request_id;
    MOE_TRY(find_layer(p, h));
    MOE_TRY(check_shape(p, h));
    MOE_TRY(check_routing(p, h));
    MOE_TRY(check_parts(p, h));
    MOE_TRY(check_batch(p, h));
    MOE_TRY(check_unavailable(p, h));
    MOE_TRY(check_retain(p, h));
    MOE_TRY(check_state(p, h));
    return prepare_work(p, h);
}

struct moe_status moe_request_parse(struct moe_request *r,
                                    const struct moe_request_context *context,
                                    struct moe_rpc_msg *m)
{
    struct parse p = {.context = context, .request = r};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    *r = (struct moe_request){.received_ns = moe_clock_ns()};
    struct moe_status st = moe_rpc_msg_split(
        m, part_fields, sizeof part_fields / sizeof *part_fields, head, &length, place_part, &p);
    if (!moe_failed(&st)) {
        st = check_head(&p, head, length);
    } else {
        /* The answer to a refused item of a stream has its number, or 0 if the item has no readable
         * number. */
        struct moe_status broken = moe_rpc_msg_find_uint(m, FIELD_ID, &r->id);
        if (moe_failed(&broken))
            r->id = 0;
    }
    if (moe_failed(&st))
        moe_request_release(r);
    return st;
}

void moe_request_finish(struct moe_request *r)
{
    if (r->model != NULL && !r->finished)
        moe_models_finish(r->models, r->model);
    r->finished = true;
}

static void release_model(struct moe_request *r)
{
    if (r->model == NULL)
        return;
    moe_request_finish(r);
    moe_models_unref(r->models, r->model);
    r->model = NULL;
    r->spec = NULL; /* the model's */
}

void moe_request_release(struct moe_request *r)
{
    release_model(r);
    moe_buffer_unref(r->x);
    moe_buffer_unref(r->ids);
    moe_buffer_unref(r->weights);
    moe_buffer_unref(r->token_ids);
    moe_buffer_unref(r->results);
    moe_pass_record_unref(r->pass);
    r->pass = NULL;
    r->x = r->ids = r->weights = r->token_ids = r->results = NULL;
}

/* -------------------------------------------------------------------------- answers */

static void release_part(void *owner)
{
    moe_buffer_unref(owner);
}

static void add_part(struct moe_request *r, struct moe_rpc_out *out, uint32_t field,
                     const void *data, size_t length)
{
    moe_buffer_ref(r->results);
    out->parts[out->part_count++] = (struct moe_rpc_part){.field = field,
                                                          .data = data,
                                                          .length = length,
                                                          .release = release_part,
                                                          .owner = r->results};
}

/* Narrows the ids in place to the smallest format that holds them. */
static Moe__V1__DataType narrow_ids(const struct moe_request *r, size_t pairs)
{
    const int32_t *ids = r->work.ids_out;
    uint8_t *bytes = (uint8_t *)r->work.ids_out;
    for (size_t i = 0; i < pairs; i++)
        if (ids[i] < 0)
            return MOE__V1__DATA_TYPE__DATA_TYPE_I32;
    bool small = r->spec->experts + r->spec->router.zero_experts <= 256;
    for (size_t i = 0; i < pairs; i++) {
        uint16_t id = (uint16_t)ids[i]; /* ids from i on are still in their old format */
        if (small)
            bytes[i] = (uint8_t)id;
        else
            memcpy(bytes + 2 * i, &id, sizeof id);
    }
    return small ? MOE__V1__DATA_TYPE__DATA_TYPE_U8 : MOE__V1__DATA_TYPE__DATA_TYPE_U16;
}

static void fill_stages(struct moe_request *r, Moe__V1__StageTimes *to)
{
    const struct moe_work *w = &r->work;
    moe__v1__stage_times__init(to);
    to->queue_ns = w->started_ns - w->submitted_ns;
    to->copy_in_ns = w->copy_in_ns;
    moe_request_fill_stages(&w->step, to);
    to->copy_out_ns = w->copy_out_ns;
    r->answered_ns = moe_clock_ns();
    to->server_ns = r->answered_ns - r->received_ns;
    to->step_tokens = w->step_tokens;
    to->steps = w->steps;
}

static void pack_head(const Moe__V1__ForwardStreamResponse *answer, uint8_t *head,
                      struct moe_rpc_out *out)
{
    out->head = head;
    out->head_length = moe__v1__forward_stream_response__get_packed_size(answer);
    MOE_INVARIANT(out->head_length <= MOE_REQUEST_HEAD_MAX);
    moe__v1__forward_stream_response__pack(answer, head);
}

static const Moe__V1__LayerParts parts_on_wire[] = {
    [MOE_PARTS_BOTH] = MOE__V1__LAYER_PARTS__LAYER_PARTS_BOTH,
    [MOE_PARTS_ROUTED] = MOE__V1__LAYER_PARTS__LAYER_PARTS_ROUTED,
    [MOE_PARTS_SHARED] = MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED,
};

void moe_request_answer(struct moe_request *r, uint8_t *head, struct moe_rpc_out *out)
{
    const struct moe_work *w = &r->work;
    size_t pairs = w->tokens * (size_t)r->spec->router.top_k;
    Moe__V1__StageTimes stages;
    Moe__V1__RehomedExperts rehomed;
    Moe__V1__ForwardStreamResponse answer;
    *out = (struct moe_rpc_out){0};
    moe__v1__forward_stream_response__init(&answer);
    answer.epoch = w->answered_epoch;
    answer.weights_version = w->answered_version;
    if (r->pass != NULL) {
        store_pass(r);
        answer.retained = true;
        answer.retained_activations = w->retained_here;
    }
    answer.tokens = w->tokens;
    answer.hidden = r->spec->hidden;
    answer.dtype = w->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                             : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    answer.top_k = r->spec->router.top_k;
    answer.parts = parts_on_wire[r->parts];
    answer.request_id = r->id;
    answer.stages = &stages;
    if (w->rehomed != NULL) {
        moe__v1__rehomed_experts__init(&rehomed);
        rehomed.n_experts = w->rehomed_count;
        rehomed.experts = w->rehomed;
        answer.rehomed = &rehomed;
    }
    if (r->return_routing) {
        answer.topk_ids_dtype = narrow_ids(r, pairs);
        add_part(r, out, FIELD_IDS, w->ids_out,
                 pairs * moe_request_id_bytes((int)answer.topk_ids_dtype));
        add_part(r, out, FIELD_WEIGHTS, w->weights_out, pairs * sizeof(float));
    }
    if (w->token_state != NULL)
        add_part(r, out, FIELD_STATES, w->token_state, w->tokens);
    add_part(r, out, FIELD_DATA, w->y,
             w->tokens * (size_t)r->spec->hidden * moe_dtype_bytes(w->dtype));
    fill_stages(r, &stages);
    pack_head(&answer, head, out);
}

void moe_request_answer_error(uint64_t id, const struct moe_status *error, uint8_t *head,
                              struct moe_rpc_out *out)
{
    Moe__V1__Error e;
    Moe__V1__ForwardStreamResponse answer;
    *out = (struct moe_rpc_out){0};
    moe__v1__forward_stream_response__init(&answer);
    moe__v1__error__init(&e);
    e.code = error->code;
    e.reason =
        (char *)(uintptr_t)(error->reason == MOE_REASON_NONE ? "" : moe_reason_name(error->reason));
    e.message = (char *)(uintptr_t)error->text;
    e.retry_after_ms = error->retry_after_ms;
    answer.request_id = id;
    answer.error = &e;
    pack_head(&answer, head, out);
}
