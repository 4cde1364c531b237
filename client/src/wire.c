/* SPDX-License-Identifier: Apache-2.0 */
/* Makes messages of requests and tensors of answers. Has no state and never sends. x goes out by
 * reference; y is copied once, into the caller's memory. */
#include "wire.h"

#include "abi.h"

#include "base/size.h"
#include "moe/client_training.h"
#include "moe/v1/expert.pb-c.h"

#include <inttypes.h>
#include <string.h>

/* Field numbers of moe/v1/expert.proto, the same in requests and answers. */
enum {
    FIELD_TOPK_IDS = 12,
    FIELD_TOPK_WEIGHTS = 13,
    FIELD_TOKEN_IDS = 14,
    FIELD_TENSOR = 15,
    FIELD_TOKEN_STATES = 17,
};

enum {
    /* Bytes for all of a message except x or y: heads, tags, lengths, errors. */
    MESSAGE_SLACK = 8192,
};

static struct moe_status invalid(enum moe_reason reason, const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, reason, "%s", text);
}

static bool returns_routing(const struct moe_client_forward *f)
{
    return f->topk_ids != NULL;
}

struct moe_status moe_client_wire_check_ids(const int32_t *ids, uint32_t tokens,
                                            const struct moe_client_layer *layer)
{
    size_t count = (size_t)tokens * layer->top_k;
    int64_t end = (int64_t)layer->experts + layer->zero_experts;
    for (size_t i = 0; i < count; i++)
        if (ids[i] < -1 || ids[i] >= end)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "token %zu names expert %" PRId32 ", layer %" PRIu32
                             " has experts 0 to %" PRId64,
                             i / layer->top_k, ids[i], layer->layer, end - 1);
    return moe_ok();
}

struct moe_status moe_client_wire_check_name(const char *what, const char *name)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = name != NULL ? strspn(name, allowed) : 0;
    if (length == 0 || length > MOE_CLIENT_NAME_MAX || name[length] != '\0' || name[0] == '.')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
                         "%s must be 1 to %d characters of [A-Za-z0-9._-], no dot first", what,
                         MOE_CLIENT_NAME_MAX);
    return moe_ok();
}

struct moe_status moe_client_wire_layer(const struct moe_client_info *info, uint32_t index,
                                        uint32_t hidden, const struct moe_client_layer **layer)
{
    const struct moe_client_layer *l = NULL;
    for (size_t i = 0; i < info->layer_count && l == NULL; i++)
        if (info->layers[i].layer == index)
            l = &info->layers[i];
    if (l == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "model %s has no MoE layer %" PRIu32, info->model, index);
    if (hidden != l->hidden)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "layer %" PRIu32 " is %" PRIu32 " wide, the request %" PRIu32, index,
                         l->hidden, hidden);
    *layer = l;
    return moe_ok();
}

static enum moe_parts parts_of(const struct moe_client_forward *f)
{
    return MOE_CLIENT_HAS(f, parts) ? f->parts : MOE_PARTS_BOTH;
}

static enum moe_on_unavailable policy_of(const struct moe_client_forward *f)
{
    return MOE_CLIENT_HAS(f, on_unavailable) ? f->on_unavailable : MOE_ON_UNAVAILABLE_WAIT;
}

static const int64_t *token_ids_of(const struct moe_client_forward *f)
{
    return MOE_CLIENT_HAS(f, token_ids_in) ? f->token_ids_in : NULL;
}

static bool returns_rehomed(const struct moe_client_forward *f)
{
    return MOE_CLIENT_HAS(f, rehomed_count) && f->rehomed_experts != NULL;
}

static bool is_partial(const struct moe_client_forward *f)
{
    return policy_of(f) == MOE_ON_UNAVAILABLE_PARTIAL;
}

static struct moe_status check_policy(const struct moe_client_forward *f)
{
    if (policy_of(f) > MOE_ON_UNAVAILABLE_PARTIAL)
        return invalid(MOE_REASON_VALUE_INVALID, "on_unavailable has no such value");
    if (!is_partial(f))
        return moe_ok();
    if (!MOE_CLIENT_HAS(f, token_states) || f->token_states == NULL)
        return invalid(MOE_REASON_SHAPE_MISMATCH, "PARTIAL needs token_states");
    return f->retain_session == NULL
               ? moe_ok()
               : moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                           "on_unavailable: a pass that is retained for Backward has all tokens");
}

static struct moe_status check_parts(const struct moe_client_forward *f)
{
    if (parts_of(f) == MOE_PARTS_BOTH)
        return moe_ok();
    if (parts_of(f) != MOE_PARTS_ROUTED && parts_of(f) != MOE_PARTS_SHARED)
        return invalid(MOE_REASON_VALUE_INVALID, "parts has no such value");
    if (f->retain_session != NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "parts: a pass that is retained for Backward computes both");
    if (f->parts == MOE_PARTS_SHARED &&
        (f->topk_ids_in != NULL || token_ids_of(f) != NULL || returns_routing(f)))
        return invalid(MOE_REASON_ROUTING_INVALID, "parts: shared experts have no routing");
    return moe_ok();
}

static struct moe_status check_token_ids(const struct moe_client_forward *f,
                                         const struct moe_client_layer *l)
{
    const int64_t *ids = token_ids_of(f);
    if (ids == NULL)
        return moe_ok();
    if (f->topk_ids_in != NULL)
        return invalid(MOE_REASON_ROUTING_INVALID, "token_ids_in excludes topk_ids_in");
    if (l->vocabulary == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                         "layer %" PRIu32 " does not route by token id: it takes no token_ids",
                         l->layer);
    for (uint32_t t = 0; t < f->tokens; t++)
        if (ids[t] < 0 || ids[t] >= (int64_t)l->vocabulary)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                             "token %" PRIu32 ": token id %" PRId64 " is not in 0 to %" PRIu32, t,
                             ids[t], l->vocabulary - 1);
    return moe_ok();
}

struct moe_status moe_client_wire_check(const struct moe_client_info *info,
                                        const struct moe_client_forward *f,
                                        const struct moe_client_layer **layer)
{
    const struct moe_client_layer *l;
    MOE_TRY(moe_client_wire_layer(info, f->layer, f->hidden, &l));
    if (f->tokens == 0)
        return invalid(MOE_REASON_SHAPE_MISMATCH, "a request needs at least one token");
    if (moe_dtype_bytes(f->dtype) == 0)
        return invalid(MOE_REASON_DTYPE_UNSUPPORTED, "dtype must be F32 or BF16");
    if (f->x == NULL || f->y == NULL)
        return invalid(MOE_REASON_SHAPE_MISMATCH, "x and y must not be NULL");
    if (f->topk_weights_in != NULL && f->topk_ids_in == NULL)
        return invalid(MOE_REASON_ROUTING_INVALID, "topk_weights_in needs topk_ids_in");
    if ((f->topk_ids == NULL) != (f->topk_weights == NULL))
        return invalid(MOE_REASON_ROUTING_INVALID,
                       "topk_ids and topk_weights are returned together or not at all");
    if (f->topk_ids_in != NULL)
        MOE_TRY(moe_client_wire_check_ids(f->topk_ids_in, f->tokens, l));
    MOE_TRY(check_token_ids(f, l));
    MOE_TRY(check_parts(f));
    MOE_TRY(check_policy(f));
    if (f->retain_session != NULL) {
        MOE_TRY(moe_client_wire_check_name("retain_session", f->retain_session));
        if (f->retain_micro_batch_id == 0)
            return invalid(MOE_REASON_VALUE_INVALID, "retain_micro_batch_id must be at least 1");
        if (f->tokens > info->max_tokens_per_step)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                             "a retained pass has at most %" PRIu32 " tokens, not %" PRIu32,
                             info->max_tokens_per_step, f->tokens);
    }
    *layer = l;
    return moe_ok();
}

struct moe_status moe_client_wire_check_rows(const struct moe_client_info *info,
                                             const struct moe_client_rows *rows)
{
    const struct moe_client_forward *f = rows->f;
    if (rows->tokens > info->max_tokens_per_request)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "%" PRIu32 " tokens in one request, the server takes %" PRIu32,
                         rows->tokens, info->max_tokens_per_request);
    size_t tensor, routing, token_ids, all;
    if (!moe_size_mul3(rows->tokens, f->hidden, moe_dtype_bytes(f->dtype), &tensor) ||
        !moe_size_mul3(rows->tokens, rows->layer->top_k, sizeof(int32_t) + sizeof(float),
                       &routing) ||
        !moe_size_mul(token_ids_of(f) != NULL ? rows->tokens : 0, sizeof(int64_t), &token_ids) ||
        !moe_size_add(tensor, routing, &all) || !moe_size_add(all, token_ids, &all) ||
        !moe_size_add(all, MESSAGE_SLACK, &all) || all > info->max_message_bytes)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "%" PRIu32 " tokens do not fit a message of %" PRIu64
                         " bytes (the worker's --max-message-bytes): send fewer tokens per call",
                         rows->tokens, info->max_message_bytes);
    return moe_ok();
}

static Moe__V1__RoutingMode routing_mode(const struct moe_client_forward *f)
{
    if (f->topk_ids_in == NULL)
        return MOE__V1__ROUTING_MODE__ROUTING_MODE_SERVER;
    return f->topk_weights_in == NULL ? MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS
                                      : MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS;
}

static const Moe__V1__LayerParts parts_on_wire[] = {
    [MOE_PARTS_BOTH] = MOE__V1__LAYER_PARTS__LAYER_PARTS_UNSPECIFIED,
    [MOE_PARTS_ROUTED] = MOE__V1__LAYER_PARTS__LAYER_PARTS_ROUTED,
    [MOE_PARTS_SHARED] = MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED,
};

static const Moe__V1__OnUnavailable policies_on_wire[] = {
    [MOE_ON_UNAVAILABLE_WAIT] = MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_UNSPECIFIED,
    [MOE_ON_UNAVAILABLE_FAIL] = MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_FAIL,
    [MOE_ON_UNAVAILABLE_PARTIAL] = MOE__V1__ON_UNAVAILABLE__ON_UNAVAILABLE_PARTIAL,
};

void moe_client_wire_pack(const struct moe_client_rows *rows, uint64_t id,
                          const struct moe_client_wanted *wanted, uint8_t *head,
                          void (*release)(void *owner), void *owner, struct moe_rpc_out *out)
{
    const struct moe_client_forward *f = rows->f;
    Moe__V1__ForwardStreamRequest q = MOE__V1__FORWARD_STREAM_REQUEST__INIT;
    q.layer = f->layer;
    q.tokens = rows->tokens;
    q.hidden = f->hidden;
    q.dtype = f->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                        : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    q.routing_mode = routing_mode(f);
    q.return_routing = returns_routing(f);
    q.return_rehomed = returns_rehomed(f);
    q.parts = parts_on_wire[parts_of(f)];
    q.on_unavailable = policies_on_wire[policy_of(f)];
    q.epoch = f->epoch;
    q.weights_version = f->weights_version;
    q.model = (char *)(uintptr_t)wanted->model; /* packing only reads */
    q.model_digest = (char *)(uintptr_t)wanted->digest;
    if (f->topk_ids_in != NULL)
        q.topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_I32;
    q.request_id = id;
    Moe__V1__RetainForBackward retain = MOE__V1__RETAIN_FOR_BACKWARD__INIT;
    if (f->retain_session != NULL) {
        retain.session = (char *)(uintptr_t)f->retain_session; /* packing only reads */
        retain.micro_batch_id = f->retain_micro_batch_id;
        q.retain = &retain;
    }
    Moe__V1__BatchPart part_of = MOE__V1__BATCH_PART__INIT;
    if (rows->parts > 1) {
        part_of.batch = rows->batch;
        part_of.parts = rows->parts;
        q.batch_part = &part_of;
    }
    size_t length = moe__v1__forward_stream_request__get_packed_size(&q);
    MOE_INVARIANT(length <= MOE_CLIENT_HEAD_MAX);
    moe__v1__forward_stream_request__pack(&q, head);

    size_t first = (size_t)rows->first * rows->layer->top_k;
    size_t count = (size_t)rows->tokens * rows->layer->top_k;
    size_t row_bytes = f->hidden * moe_dtype_bytes(f->dtype);
    *out = (struct moe_rpc_out){.head = head, .head_length = length};
    struct moe_rpc_part part = {.release = release, .owner = owner};
    if (f->topk_ids_in != NULL) {
        part.field = FIELD_TOPK_IDS;
        part.data = f->topk_ids_in + first;
        part.length = count * sizeof *f->topk_ids_in;
        out->parts[out->part_count++] = part;
    }
    if (f->topk_weights_in != NULL) {
        part.field = FIELD_TOPK_WEIGHTS;
        part.data = f->topk_weights_in + first;
        part.length = count * sizeof *f->topk_weights_in;
        out->parts[out->part_count++] = part;
    }
    if (token_ids_of(f) != NULL) {
        part.field = FIELD_TOKEN_IDS;
        part.data = token_ids_of(f) + rows->first;
        part.length = rows->tokens * sizeof *f->token_ids_in;
        out->parts[out->part_count++] = part;
    }
    part.field = FIELD_TENSOR;
    part.data = (const char *)f->x + rows->first * row_bytes;
    part.length = rows->tokens * row_bytes;
    out->parts[out->part_count++] = part;
}

/* Lengths of the parts that were received. */
struct incoming {
    const struct moe_client_rows *rows;
    size_t ids_length, weights_length, y_length, states_length;
};

static struct moe_status broken(enum moe_reason reason, const char *what)
{
    return moe_error(MOE_INTERNAL, reason, "broken answer from the server: %s", what);
}

static struct moe_status take_ids(struct incoming *in, size_t length, size_t count, void **dst)
{
    /* Ids of 1 or 2 bytes go to the caller's memory first; widen_ids widens them in place. */
    if (length != count && length != count * sizeof(uint16_t) && length != count * sizeof(int32_t))
        return broken(MOE_REASON_SHAPE_MISMATCH, "topk_ids has the wrong length");
    *dst = in->rows->f->topk_ids + (size_t)in->rows->first * in->rows->layer->top_k;
    in->ids_length = length;
    return moe_ok();
}

static struct moe_status take_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct incoming *in = ctx;
    const struct moe_client_rows *rows = in->rows;
    const struct moe_client_forward *f = rows->f;
    size_t row_bytes = f->hidden * moe_dtype_bytes(f->dtype);
    size_t count = (size_t)rows->tokens * rows->layer->top_k;
    if (field == FIELD_TENSOR) {
        if (length != rows->tokens * row_bytes)
            return broken(MOE_REASON_SHAPE_MISMATCH, "y has the wrong length");
        *dst = (char *)f->y + rows->first * row_bytes;
        in->y_length = length;
        return moe_ok();
    }
    if (field == FIELD_TOKEN_STATES) {
        if (!is_partial(f) || length != rows->tokens)
            return broken(MOE_REASON_SHAPE_MISMATCH, "token_states has the wrong length");
        *dst = f->token_states + rows->first;
        in->states_length = length;
        return moe_ok();
    }
    if (!returns_routing(f))
        return broken(MOE_REASON_ROUTING_INVALID, "it has routing that was not requested");
    if (field == FIELD_TOPK_IDS)
        return take_ids(in, length, count, dst);
    if (length != count * sizeof(float))
        return broken(MOE_REASON_SHAPE_MISMATCH, "topk_weights has the wrong length");
    *dst = f->topk_weights + (size_t)rows->first * rows->layer->top_k;
    in->weights_length = length;
    return moe_ok();
}

/* From the last to the first, so that each id is read before it is overwritten. */
static void widen_ids(int32_t *ids, size_t count, size_t width)
{
    const uint8_t *narrow = (const uint8_t *)ids;
    for (size_t i = count; i-- > 0 && width < sizeof *ids;) {
        uint16_t id = narrow[i * width];
        if (width == sizeof id)
            memcpy(&id, narrow + i * width, sizeof id);
        ids[i] = id;
    }
}

static struct moe_status finish_routing(const struct incoming *in,
                                        const Moe__V1__ForwardStreamResponse *a)
{
    const struct moe_client_rows *rows = in->rows;
    size_t width = a->topk_ids_dtype == MOE__V1__DATA_TYPE__DATA_TYPE_U8    ? 1
                   : a->topk_ids_dtype == MOE__V1__DATA_TYPE__DATA_TYPE_U16 ? 2
                   : a->topk_ids_dtype == MOE__V1__DATA_TYPE__DATA_TYPE_I32 ? 4
                                                                            : 0;
    size_t count = (size_t)rows->tokens * rows->layer->top_k;
    if (width == 0)
        return broken(MOE_REASON_DTYPE_UNSUPPORTED, "topk_ids of an unknown dtype");
    if (a->top_k != rows->layer->top_k || in->ids_length != count * width ||
        in->weights_length != count * sizeof(float))
        return broken(MOE_REASON_SHAPE_MISMATCH, "routing of the wrong shape, or none");
    widen_ids(rows->f->topk_ids + (size_t)rows->first * rows->layer->top_k, count, width);
    return moe_ok();
}

struct moe_client_stages moe_client_wire_stages(const Moe__V1__StageTimes *t)
{
    if (t == NULL)
        return (struct moe_client_stages){0};
    return (struct moe_client_stages){
        .queue_ns = t->queue_ns,
        .copy_in_ns = t->copy_in_ns,
        .router_ns = t->router_ns,
        .prepare_ns = t->prepare_ns,
        .dispatch_ns = t->dispatch_ns,
        .gemm1_ns = t->gemm1_ns,
        .gemm2_ns = t->gemm2_ns,
        .shared_ns = t->shared_ns,
        .combine_ns = t->combine_ns,
        .step_ns = t->step_ns,
        .copy_out_ns = t->copy_out_ns,
        .server_ns = t->server_ns,
        .step_tokens = t->step_tokens,
        .steps = t->steps,
    };
}

static struct moe_status take_rehomed(const struct moe_client_rows *rows,
                                      const Moe__V1__RehomedExperts *from,
                                      struct moe_client_answer *answer)
{
    if (!returns_rehomed(rows->f))
        return moe_ok();
    memset(answer->rehomed, 0, sizeof answer->rehomed);
    if (from == NULL)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this worker's release tells no re-homed experts");
    for (size_t i = 0; i < from->n_experts; i++) {
        uint32_t expert = from->experts[i];
        if (expert >= rows->layer->experts || expert >= MOE_MAX_EXPERTS)
            return broken(MOE_REASON_EXPERT_INDEX_RANGE, "a re-homed expert does not exist");
        answer->rehomed[expert / 64] |= UINT64_C(1) << expert % 64;
    }
    return moe_ok();
}

void moe_client_wire_answer(struct moe_client_forward *f, const struct moe_client_answer *answer)
{
    f->answered_epoch = answer->epoch;
    f->answered_weights_version = answer->weights_version;
    f->retained = answer->retained;
    f->retained_activations = answer->retained_activations;
    f->stages = answer->stages;
    if (!returns_rehomed(f))
        return;
    f->rehomed_count = 0;
    for (uint32_t expert = 0; expert < MOE_MAX_EXPERTS; expert++)
        if ((answer->rehomed[expert / 64] >> expert % 64 & 1) != 0)
            f->rehomed_experts[f->rehomed_count++] = expert;
}

/* The error of one item of a stream. Never OK: an unknown code becomes MOE_UNKNOWN. */
static struct moe_status item_error(const Moe__V1__Error *e)
{
    enum moe_code code =
        e->code > MOE_OK && e->code <= MOE_UNAUTHENTICATED ? (enum moe_code)e->code : MOE_UNKNOWN;
    return moe_error_retry(code, moe_reason_from_name(e->reason), e->retry_after_ms, "%s",
                           e->message[0] != '\0' ? e->message : "the server gave no reason");
}

struct moe_status moe_client_wire_blame(struct moe_status st)
{
    if (st.code != MOE_INVALID_ARGUMENT)
        return st;
    st.code = MOE_INTERNAL; /* not the caller's fault */
    return moe_error_context(st, "broken answer from the server");
}

struct moe_status moe_client_wire_unpack(const struct moe_client_rows *rows, struct moe_rpc_msg *m,
                                         struct moe_client_answer *answer)
{
    static const uint32_t parts[] = {FIELD_TOPK_IDS, FIELD_TOPK_WEIGHTS, FIELD_TENSOR,
                                     FIELD_TOKEN_STATES};
    const struct moe_client_forward *f = rows->f;
    struct incoming in = {.rows = rows};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t head_length;
    MOE_TRY(moe_client_wire_blame(moe_rpc_msg_split(m, parts, sizeof parts / sizeof *parts, head,
                                                    &head_length, take_part, &in)));

    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_client_wire_blame(moe_rpc_unpack(&moe__v1__forward_stream_response__descriptor,
                                                 head, head_length, &arena, &message)));
    const Moe__V1__ForwardStreamResponse *a = message;
    if (a->error != NULL)
        return item_error(a->error);
    Moe__V1__DataType dtype = f->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                                        : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    if (parts_of(f) != MOE_PARTS_BOTH && a->parts != parts_on_wire[parts_of(f)])
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this worker's release computes routed and shared experts together only");
    if (is_partial(f) && in.states_length == 0)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this worker's release answers no part of a request");
    if (in.y_length == 0)
        return broken(MOE_REASON_MALFORMED, "y is missing");
    if (a->dtype != dtype)
        return broken(MOE_REASON_DTYPE_UNSUPPORTED, "y has another dtype than x");
    if (a->tokens != rows->tokens || a->hidden != f->hidden)
        return broken(MOE_REASON_SHAPE_MISMATCH, "y has another shape than x");
    if (returns_routing(f))
        MOE_TRY(finish_routing(&in, a));
    MOE_TRY(take_rehomed(rows, a->rehomed, answer));
    answer->epoch = a->epoch;
    answer->weights_version = a->weights_version;
    answer->retained = a->retained;
    answer->retained_activations = a->retained_activations;
    answer->stages = moe_client_wire_stages(a->stages);
    return moe_ok();
}
