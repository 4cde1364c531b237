/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing, checking and answering of Backward; see service/training_request.h. As with Forward, a
 * number of the client is a size only after a comparison with the layer's. */
#include "service/training_request.h"

#include "base/clock.h"
#include "base/size.h"
#include "moe/v1/training.pb-c.h"
#include "service/request.h"
#include "service/request_checks.h"

#include <stdlib.h>

typedef Moe__V1__BackwardRequest Head;

enum { FIELD_IDS = 12, FIELD_WEIGHTS = 13, FIELD_DY = 14, FIELD_X = 15, ALIGN = 64 };
static const uint32_t part_fields[] = {FIELD_IDS, FIELD_WEIGHTS, FIELD_DY, FIELD_X};

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

struct parse {
    const struct moe_backward_context *context;
    struct moe_training_request *request;
};

/* ------------------------------------------------------------------------ splitting */

static struct moe_status place_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct parse *p = ctx;
    uint32_t part = field - FIELD_IDS;
    p->request->parts[part].bytes = length;
    return moe_request_take(p->context->info, p->context->staging, length,
                            &p->request->parts[part].buffer, dst);
}

static size_t bytes_of(const struct moe_training_request *r, int part)
{
    return r->parts[part].bytes;
}

static void *data_of(const struct moe_training_request *r, int part)
{
    return moe_buffer_data(r->parts[part].buffer);
}

/* --------------------------------------------------------------------------- checks */

static struct moe_status check_shape(struct parse *p, const Head *h)
{
    struct moe_training_request *r = p->request;
    size_t x_bytes = bytes_of(r, MOE_BACKWARD_X);
    MOE_TRY(moe_request_check_rows(r->spec, h->hidden, h->tokens));
    if (h->tokens > p->context->info->max_tokens_per_step)
        return invalid(TOKEN_LIMIT, "%u tokens; one Backward has at most %u", h->tokens,
                       p->context->info->max_tokens_per_step);
    MOE_TRY(moe_request_check_tensor("dy", bytes_of(r, MOE_BACKWARD_DY), r->spec, h->tokens,
                                     r->work.dtype));
    if (x_bytes != 0)
        MOE_TRY(moe_request_check_tensor("x", x_bytes, r->spec, h->tokens, r->work.dtype));
    r->work.tokens = h->tokens;
    return moe_ok();
}

/* *coeff is the coefficient under AUX_CONVENTION_MEAN, which kernels/include/moe/training.h uses.
 */
static struct moe_status check_aux(const Head *h, uint32_t top_k, double *coeff)
{
    if (!(h->aux_coeff >= 0) || h->aux_coeff > 1e30)
        return invalid(VALUE_INVALID, "aux_coeff must be a number of at least 0");
    switch (h->aux_convention) {
    case MOE__V1__AUX_CONVENTION__AUX_CONVENTION_UNSPECIFIED:
    case MOE__V1__AUX_CONVENTION__AUX_CONVENTION_MEAN: *coeff = h->aux_coeff; return moe_ok();
    case MOE__V1__AUX_CONVENTION__AUX_CONVENTION_TRANSFORMERS:
        *coeff = h->aux_coeff * top_k;
        return moe_ok();
    default:
        return invalid(VALUE_INVALID, "aux_convention %d is not known", (int)h->aux_convention);
    }
}

static struct moe_status check_routing(struct moe_training_request *r, const Head *h)
{
    struct moe_train_work *w = &r->work;
    size_t ids = bytes_of(r, MOE_BACKWARD_IDS), weights = bytes_of(r, MOE_BACKWARD_WEIGHTS);
    if (bytes_of(r, MOE_BACKWARD_X) == 0)
        return ids == 0 && weights == 0
                   ? moe_ok()
                   : invalid(ROUTING_INVALID, "routing without x: send both, or neither after a "
                                              "Forward with retain");
    switch (h->routing_mode) {
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS: w->mode = MOE_ROUTE_IDS; break;
    case MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS:
        w->mode = MOE_ROUTE_IDS_WEIGHTS;
        break;
    default:
        return invalid(ROUTING_INVALID, "Backward needs the routing that the forward pass used: "
                                        "CLIENT_IDS or CLIENT_IDS_AND_WEIGHTS");
    }
    bool weighted = w->mode == MOE_ROUTE_IDS_WEIGHTS;
    if (ids == 0)
        return invalid(ROUTING_INVALID, "topk_ids are missing");
    if ((weights != 0) != weighted)
        return invalid(ROUTING_INVALID, weighted
                                            ? "topk_weights are missing"
                                            : "topk_weights are given, and the router is to weigh");
    MOE_TRY(moe_request_check_ids(r->spec, h->tokens, (int)h->topk_ids_dtype,
                                  r->parts[MOE_BACKWARD_IDS].buffer, ids));
    return weighted ? moe_request_check_weights(r->spec, h->tokens,
                                                r->parts[MOE_BACKWARD_WEIGHTS].buffer, weights)
                    : moe_ok();
}

/* -------------------------------------------------------------------------- content */

/* With the version as it was sent: gradients of other weights are another answer. Without the
 * lineage: a wrong one is refused before any comparison. */
static void hash_header(struct moe_training_request *r, const Head *h, double aux_coeff)
{
    const uint64_t numbers[] = {h->layer,
                                h->tokens,
                                (uint64_t)h->dtype,
                                h->input_only != 0,
                                h->return_weight_gradients != 0,
                                h->weights_version};
    moe_content_mix(r->call.content.header_hash, numbers, sizeof numbers);
    moe_content_mix(r->call.content.header_hash, &aux_coeff, sizeof aux_coeff);
    moe_content_mix(r->call.content.header_hash, data_of(r, MOE_BACKWARD_DY),
                    bytes_of(r, MOE_BACKWARD_DY));
}

static void hash_tensors(struct moe_training_request *r, size_t x_bytes)
{
    const struct moe_train_work *w = &r->work;
    size_t pairs = w->tokens * (size_t)r->spec->router.top_k * sizeof(int32_t);
    uint64_t mode = w->mode;
    moe_content_mix(r->call.content.tensor_hash, &mode, sizeof mode);
    moe_content_mix(r->call.content.tensor_hash, w->ids, pairs);
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        moe_content_mix(r->call.content.tensor_hash, w->weights, pairs);
    moe_content_mix(r->call.content.tensor_hash, w->x, x_bytes);
}

static struct moe_status use_sent(struct parse *p, const Head *h)
{
    struct moe_training_request *r = p->request;
    struct moe_train_work *w = &r->work;
    size_t pairs = h->tokens * (size_t)r->spec->router.top_k;
    size_t size = moe_request_id_bytes((int)h->topk_ids_dtype);
    w->x = data_of(r, MOE_BACKWARD_X);
    w->ids = data_of(r, MOE_BACKWARD_IDS);
    if (size != sizeof(int32_t)) {
        MOE_TRY(moe_staging_take(p->context->staging, pairs * sizeof(int32_t), &r->wide_ids));
        int32_t *wide = moe_buffer_data(r->wide_ids);
        moe_request_widen_ids(wide, w->ids, size, pairs);
        w->ids = wide;
    }
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        w->weights = data_of(r, MOE_BACKWARD_WEIGHTS);
    r->whole = true;
    hash_tensors(r, bytes_of(r, MOE_BACKWARD_X));
    return moe_ok();
}

/* If no pass is retained, the request stays incomplete: it may be a repeat. */
static struct moe_status use_retained(struct parse *p, const Head *h)
{
    struct moe_training_request *r = p->request;
    struct moe_train_work *w = &r->work;
    struct moe_retained_pass pass;
    r->pass = moe_pass_store_get(moe_train_passes(p->context->training), h->session,
                                 h->micro_batch_id, r->received_ns);
    if (r->pass == NULL)
        return moe_ok();
    memcpy(&pass, r->pass->head, sizeof pass);
    if (pass.layer != h->layer || pass.tokens != h->tokens || pass.dtype != w->dtype)
        return invalid(SHAPE_MISMATCH,
                       "the pass retained under this id has layer %u and %u tokens%s", pass.layer,
                       pass.tokens, pass.dtype != w->dtype ? " of another dtype" : "");
    if (h->weights_version != 0 && h->weights_version != pass.weights_version)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "weights version %llu was asked for; the retained pass used %llu",
                         (unsigned long long)h->weights_version,
                         (unsigned long long)pass.weights_version);
    const uint8_t *data = r->pass->data;
    w->mode = pass.mode;
    w->x = data;
    w->ids = (const int32_t *)(const void *)(data + pass.ids_at);
    if (pass.mode == MOE_ROUTE_IDS_WEIGHTS)
        w->weights = (const float *)(const void *)(data + pass.weights_at);
    r->call.weights_version = pass.weights_version;
    if (r->call.lineage == 0)
        r->call.lineage = pass.lineage;
    r->call.retained = pass.step;
    r->call.retained_epoch = pass.epoch;
    r->whole = r->used_retained = true;
    hash_tensors(r, pass.x_bytes);
    return moe_ok();
}

static struct moe_status check_head(struct parse *p, const uint8_t *head, size_t length)
{
    struct moe_training_request *r = p->request;
    struct moe_rpc_arena arena;
    void *message;
    double aux_coeff = 0;
    MOE_TRY(moe_rpc_unpack(&moe__v1__backward_request__descriptor, head, length, &arena, &message));
    const Head *h = message;
    const struct moe_service_info *info = p->context->info;
    const struct moe_served_model *model = p->context->worker.model;
    if (!moe_request_wants_default(model, h->model))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND,
                         "only the default model, %s, can train", model->name);
    MOE_TRY(moe_request_find_layer(info->layers, info->layer_count, h->layer, (int)h->dtype,
                                   &r->spec, &r->work.dtype));
    r->work.layer = h->layer;
    MOE_TRY(check_shape(p, h));
    MOE_TRY(moe_request_check_pass(h->session, h->micro_batch_id));
    MOE_TRY(check_aux(h, r->spec->router.top_k, &aux_coeff));
    MOE_TRY(check_routing(r, h));
    MOE_TRY(moe_request_check_worker(&p->context->worker));
    r->call = (struct moe_train_call){.kind = MOE_STEP_BACKWARD,
                                      .id = h->micro_batch_id,
                                      .lineage = h->lineage,
                                      .weights_version = h->weights_version,
                                      .aux_coeff = (float)aux_coeff,
                                      .input_only = h->input_only};
    strcpy(r->call.session, h->session); /* a checked name fits */
    r->return_weights = h->return_weight_gradients;
    r->work.dy = data_of(r, MOE_BACKWARD_DY);
    hash_header(r, h, aux_coeff);
    return bytes_of(r, MOE_BACKWARD_X) != 0 ? use_sent(p, h) : use_retained(p, h);
}

struct moe_status moe_backward_parse(struct moe_training_request *r,
                                     const struct moe_backward_context *context,
                                     struct moe_rpc_msg *m)
{
    struct parse p = {.context = context, .request = r};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    *r = (struct moe_training_request){.received_ns = moe_clock_ns()};
    struct moe_status st = moe_rpc_msg_split(
        m, part_fields, sizeof part_fields / sizeof *part_fields, head, &length, place_part, &p);
    if (!moe_failed(&st))
        st = check_head(&p, head, length);
    if (moe_failed(&st))
        moe_backward_release(r);
    return st;
}

void moe_backward_release(struct moe_training_request *r)
{
    for (size_t i = 0; i < MOE_BACKWARD_PARTS; i++) {
        moe_buffer_unref(r->parts[i].buffer);
        r->parts[i].buffer = NULL;
    }
    moe_buffer_unref(r->wide_ids);
    moe_pass_record_unref(r->pass);
    moe_pass_record_unref(r->cached);
    moe_pass_record_unref(r->answer.record);
    r->wide_ids = NULL;
    r->pass = r->cached = r->answer.record = NULL;
}

/* ------------------------------------------------------------------------- answers */

struct moe_status moe_backward_prepare(struct moe_training_request *r,
                                       const struct moe_backward_context *context)
{
    struct moe_train_work *w = &r->work;
    size_t pairs = w->tokens * (size_t)r->spec->router.top_k * sizeof(float), dx, at, end;
    if (!moe_size_mul3(w->tokens, r->spec->hidden, moe_dtype_bytes(w->dtype), &dx) ||
        !moe_size_round_up(dx, ALIGN, &at) ||
        !moe_size_add(at, r->return_weights ? pairs : 0, &end) ||
        end > context->info->max_message_bytes - MOE_BACKWARD_HEAD_MAX)
        return invalid(TOO_LARGE, "the answer would be larger than a message may be");
    MOE_TRY(moe_pass_store_reserve(moe_train_answers(context->training), end, r->received_ns,
                                   &r->cached));
    const struct moe_cached_answer head = {
        .content = r->call.content,
        .tokens = w->tokens,
        .hidden = r->spec->hidden,
        .top_k = r->spec->router.top_k,
        .dtype = w->dtype,
        .used_retained = r->used_retained,
        .dx_bytes = (uint32_t)dx,
        .weights_at = (uint32_t)at,
        .weights_bytes = r->return_weights ? (uint32_t)pairs : 0,
    };
    memcpy(r->cached->head, &head, sizeof head);
    w->dx = r->cached->data;
    if (r->return_weights)
        w->dweights = (float *)(void *)((uint8_t *)r->cached->data + at);
    return moe_ok();
}

static struct moe_cached_answer head_of(const struct moe_pass_record *cached)
{
    struct moe_cached_answer head;
    memcpy(&head, cached->head, sizeof head);
    return head;
}

void moe_backward_cache(struct moe_training_request *r, struct moe_train *training,
                        const struct moe_status *end)
{
    struct moe_cached_answer head = head_of(r->cached);
    head.outcome = r->answer.outcome;
    head.code = end->code;
    head.reason = end->reason;
    head.used_activations = r->work.step.used_retained;
    memcpy(r->cached->head, &head, sizeof head);
    moe_pass_record_ref(r->cached); /* until the answer is sent */
    moe_pass_store_put(moe_train_answers(training), r->cached, r->call.session, r->call.id,
                       moe_clock_ns());
    moe_pass_store_drop(moe_train_passes(training), r->call.session, r->call.id);
}

bool moe_backward_matches(const struct moe_pass_record *cached,
                          const struct moe_training_request *r)
{
    struct moe_cached_answer head = head_of(cached);
    const struct moe_content *c = &r->call.content;
    return memcmp(head.content.header_hash, c->header_hash, sizeof c->header_hash) == 0 &&
           (!r->whole ||
            memcmp(head.content.tensor_hash, c->tensor_hash, sizeof c->tensor_hash) == 0);
}

struct moe_status moe_backward_cached_status(const struct moe_pass_record *cached)
{
    struct moe_cached_answer head = head_of(cached);
    if (head.code == MOE_OK)
        return moe_ok();
    return moe_error(head.code, head.reason,
                     "the pass was run, and some of its tokens could not be computed");
}

static void release_part(void *owner)
{
    moe_pass_record_unref(owner);
}

static void add_part(struct moe_pass_record *cached, struct moe_rpc_out *out, uint32_t field,
                     size_t at, size_t length)
{
    moe_pass_record_ref(cached);
    out->parts[out->part_count++] =
        (struct moe_rpc_part){.field = field,
                              .data = (const uint8_t *)cached->data + at,
                              .length = length,
                              .release = release_part,
                              .owner = cached};
}

static void fill_stages(const struct moe_training_request *r, bool repeated,
                        Moe__V1__StageTimes *to)
{
    const struct moe_train_work *w = &r->work;
    moe__v1__stage_times__init(to);
    to->server_ns = moe_clock_ns() - r->received_ns;
    if (repeated)
        return;
    to->queue_ns = w->started_ns - w->submitted_ns;
    moe_request_fill_stages(&w->step, to);
    to->step_tokens = w->tokens;
    to->steps = 1;
}

void moe_backward_answer(const struct moe_training_request *r, struct moe_pass_record *cached,
                         bool repeated, uint8_t *head, struct moe_rpc_out *out)
{
    const struct moe_cached_answer k = head_of(cached);
    Moe__V1__StageTimes stages;
    Moe__V1__BackwardResponse answer;
    moe__v1__backward_response__init(&answer);
    fill_stages(r, repeated, &stages);
    answer.epoch = k.outcome.epoch;
    answer.weights_version = k.outcome.weights_version;
    answer.lineage = k.outcome.lineage;
    answer.aux_loss = k.outcome.number;
    answer.tokens = k.tokens;
    answer.hidden = k.hidden;
    answer.dtype = k.dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                            : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    answer.top_k = k.top_k;
    answer.repeated = repeated;
    answer.used_retained = k.used_retained;
    answer.used_activations = k.used_activations;
    answer.stages = &stages;
    *out = (struct moe_rpc_out){.head = head};
    out->head_length = moe__v1__backward_response__get_packed_size(&answer);
    MOE_INVARIANT(out->head_length <= MOE_BACKWARD_HEAD_MAX);
    moe__v1__backward_response__pack(&answer, head);
    if (k.weights_bytes != 0)
        add_part(cached, out, FIELD_WEIGHTS, k.weights_at, k.weights_bytes);
    add_part(cached, out, FIELD_X, 0, k.dx_bytes);
}
