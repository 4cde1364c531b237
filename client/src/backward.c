/* SPDX-License-Identifier: Apache-2.0 */
/* Backward: sends its tensors by reference and copies the gradients once. First tries the pass that
 * the worker has retained; if that fails, sends x and the routing. */
#include "abi.h"
#include "base/size.h"
#include "moe/v1/training.pb-c.h"
#include "training.h"
#include "wire.h"

#include <inttypes.h>
#include <math.h>

/* Field numbers of moe/v1/training.proto. */
enum { FIELD_TOPK_IDS = 12, FIELD_TOPK_WEIGHTS = 13, FIELD_DY = 14, FIELD_X = 15 };

enum { MESSAGE_SLACK = 8192 }; /* room for everything in a message that is not a tensor */

static struct moe_status invalid(enum moe_reason reason, const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, reason, "%s", text);
}

/* ------------------------------------------------------------------------ the request */

static struct moe_status check_size(const struct moe_client_info *info,
                                    struct moe_client_gradients *w)
{
    const struct moe_client_backward *b = w->b;
    if (b->tokens == 0)
        return invalid(MOE_REASON_SHAPE_MISMATCH, "Backward needs at least one token");
    if (b->tokens > info->max_tokens_per_step)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "%" PRIu32 " tokens in one Backward, the server takes %" PRIu32, b->tokens,
                         info->max_tokens_per_step);
    if (moe_dtype_bytes(b->dtype) == 0)
        return invalid(MOE_REASON_DTYPE_UNSUPPORTED, "dtype must be F32 or BF16");
    size_t both, all;
    w->pairs = (size_t)b->tokens * w->layer->top_k;
    if (!moe_size_mul3(b->tokens, b->hidden, moe_dtype_bytes(b->dtype), &w->rows_bytes) ||
        !moe_size_add(w->rows_bytes, w->rows_bytes, &both) ||
        !moe_size_add(both, w->pairs * (sizeof(int32_t) + sizeof(float)), &all) ||
        !moe_size_add(all, MESSAGE_SLACK, &all) || all > info->max_message_bytes)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "%" PRIu32 " tokens do not fit a message of %" PRIu64
                         " bytes (the worker's --max-message-bytes): send fewer tokens per call",
                         b->tokens, info->max_message_bytes);
    return moe_ok();
}

static enum moe_client_aux_convention convention_of(const struct moe_client_backward *b)
{
    return MOE_CLIENT_HAS(b, aux_convention) ? b->aux_convention : MOE_CLIENT_AUX_MEAN;
}

static struct moe_status check(const struct moe_client_info *info, struct moe_client_gradients *w)
{
    const struct moe_client_backward *b = w->b;
    MOE_TRY(moe_client_wire_layer(info, b->layer, b->hidden, &w->layer));
    MOE_TRY(check_size(info, w));
    MOE_TRY(moe_client_wire_check_name("session", b->session));
    if (b->micro_batch_id == 0)
        return invalid(MOE_REASON_VALUE_INVALID, "micro_batch_id must be at least 1");
    if (!(b->aux_coeff >= 0) || !isfinite(b->aux_coeff))
        return invalid(MOE_REASON_VALUE_INVALID, "aux_coeff must be finite and at least 0");
    if (convention_of(b) != MOE_CLIENT_AUX_MEAN && convention_of(b) != MOE_CLIENT_AUX_TRANSFORMERS)
        return invalid(MOE_REASON_VALUE_INVALID, "aux_convention is not one of the enumeration");
    if (b->dy == NULL || b->dx == NULL)
        return invalid(MOE_REASON_SHAPE_MISMATCH, "dy and dx must not be NULL");
    if (b->x == NULL && !b->retained)
        return invalid(MOE_REASON_ROUTING_INVALID, "x is missing, and no pass was retained");
    if (b->x == NULL && (b->topk_ids != NULL || b->topk_weights != NULL))
        return invalid(MOE_REASON_ROUTING_INVALID, "routing is given without x");
    if (b->x != NULL && b->topk_ids == NULL)
        return invalid(MOE_REASON_ROUTING_INVALID, "Backward needs the ids that were used");
    if (b->retained && b->x != NULL && b->weights_version == 0)
        return invalid(MOE_REASON_VALUE_INVALID,
                       "with `retained` and x, give the weights_version of the retained pass");
    return b->x != NULL ? moe_client_wire_check_ids(b->topk_ids, b->tokens, w->layer) : moe_ok();
}

static void add_part(struct moe_rpc_out *out, uint32_t field, const void *data, size_t length)
{
    out->parts[out->part_count++] =
        (struct moe_rpc_part){.field = field, .data = data, .length = length};
}

/* `whole`: with x and routing. `model` as in struct moe_client_wanted. */
static void pack(const struct moe_client_gradients *w, const char *model, bool whole,
                 uint8_t head[MOE_CLIENT_TRAINING_HEAD_MAX], struct moe_rpc_out *out)
{
    const struct moe_client_backward *b = w->b;
    Moe__V1__BackwardRequest q = MOE__V1__BACKWARD_REQUEST__INIT;
    q.model = (char *)(uintptr_t)model; /* packing only reads */
    q.layer = b->layer;
    q.tokens = b->tokens;
    q.hidden = b->hidden;
    q.dtype = b->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                        : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    q.session = (char *)(uintptr_t)b->session;
    q.micro_batch_id = b->micro_batch_id;
    q.weights_version = b->weights_version;
    q.lineage = b->lineage;
    q.return_weight_gradients = b->weight_gradients != NULL;
    q.input_only = b->input_only;
    q.aux_coeff = b->aux_coeff;
    q.aux_convention = convention_of(b) == MOE_CLIENT_AUX_TRANSFORMERS
                           ? MOE__V1__AUX_CONVENTION__AUX_CONVENTION_TRANSFORMERS
                           : MOE__V1__AUX_CONVENTION__AUX_CONVENTION_UNSPECIFIED;
    if (whole) {
        q.topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_I32;
        q.routing_mode = b->topk_weights != NULL
                             ? MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS
                             : MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS;
    }
    *out = (struct moe_rpc_out){.head = head,
                                .head_length = moe__v1__backward_request__get_packed_size(&q)};
    MOE_INVARIANT(out->head_length <= MOE_CLIENT_TRAINING_HEAD_MAX);
    moe__v1__backward_request__pack(&q, head);
    if (whole) {
        add_part(out, FIELD_TOPK_IDS, b->topk_ids, w->pairs * sizeof *b->topk_ids);
        if (b->topk_weights != NULL)
            add_part(out, FIELD_TOPK_WEIGHTS, b->topk_weights, w->pairs * sizeof *b->topk_weights);
    }
    add_part(out, FIELD_DY, b->dy, w->rows_bytes);
    if (whole)
        add_part(out, FIELD_X, b->x, w->rows_bytes);
}

/* ------------------------------------------------------------------------- the answer */

static struct moe_status broken(enum moe_reason reason, const char *what)
{
    return moe_error(MOE_INTERNAL, reason, "broken answer from the server: %s", what);
}

static struct moe_status take_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct moe_client_gradients *w = ctx;
    if (field == FIELD_X) {
        if (length != w->rows_bytes)
            return broken(MOE_REASON_SHAPE_MISMATCH, "dx has the wrong length");
        *dst = w->b->dx;
        w->dx_length = length;
        return moe_ok();
    }
    if (w->b->weight_gradients == NULL || length != w->pairs * sizeof(float))
        return broken(MOE_REASON_SHAPE_MISMATCH,
                      "weight gradients of the wrong length, or not requested");
    *dst = w->b->weight_gradients;
    w->weights_length = length;
    return moe_ok();
}

struct moe_status moe_client_gradients_read(void *ctx, struct moe_rpc_msg *answer)
{
    static const uint32_t parts[] = {FIELD_TOPK_WEIGHTS, FIELD_X};
    struct moe_client_gradients *w = ctx;
    struct moe_client_backward *b = w->b;
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    w->dx_length = w->weights_length = 0;
    MOE_TRY(moe_client_wire_blame(moe_rpc_msg_split(answer, parts, sizeof parts / sizeof *parts,
                                                    head, &length, take_part, w)));
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(moe_client_wire_blame(
        moe_rpc_unpack(&moe__v1__backward_response__descriptor, head, length, &arena, &message)));
    const Moe__V1__BackwardResponse *a = message;
    if (w->dx_length == 0 || (b->weight_gradients != NULL && w->weights_length == 0))
        return broken(MOE_REASON_MALFORMED, "a gradient is missing");
    Moe__V1__DataType dtype = b->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                                        : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    if (a->dtype != dtype || a->tokens != b->tokens || a->hidden != b->hidden)
        return broken(MOE_REASON_SHAPE_MISMATCH, "dx has another shape or dtype than x");
    b->answered_epoch = a->epoch;
    b->answered_weights_version = a->weights_version;
    b->answered_lineage = a->lineage;
    b->aux_loss = a->aux_loss;
    b->repeated = a->repeated;
    b->used_retained = a->used_retained;
    b->used_activations = a->used_activations;
    b->stages = moe_client_wire_stages(a->stages);
    return moe_ok();
}

static struct moe_status send_backward(struct moe_client *c, struct moe_client_gradients *w,
                                       uint64_t deadline_ns, bool whole)
{
    uint8_t head[MOE_CLIENT_TRAINING_HEAD_MAX];
    struct moe_rpc_out out;
    pack(w, c->wanted.model, whole, head, &out);
    const struct moe_client_training_call call = {
        .path = "/moe.v1.TrainingService/Backward",
        .request = &out,
        .deadline_ns = deadline_ns,
        .home = !whole,
        .once = !whole && w->b->x != NULL, /* the retained pass may be lost with its worker */
        .read = moe_client_gradients_read,
        .ctx = w,
    };
    return moe_client_training_run(c, &call);
}

struct moe_status moe_client_backward(struct moe_client *c, struct moe_client_backward *b)
{
    struct moe_client_gradients w = {.b = b};
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(b, backward, BACKWARD));
    MOE_TRY(check(&c->info, &w));
    uint64_t deadline_ns = moe_client_deadline(c, b->timeout_ms);
    if (b->retained) {
        struct moe_status st = send_backward(c, &w, deadline_ns, false);
        if (b->x == NULL ||
            (st.reason != MOE_REASON_RETAINED_PASS_GONE && st.code != MOE_UNAVAILABLE))
            return st;
    }
    return send_backward(c, &w, deadline_ns, true);
}
