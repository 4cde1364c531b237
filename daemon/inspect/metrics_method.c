/* SPDX-License-Identifier: Apache-2.0 */
#include "inspect/metrics_method.h"

#include "moe/v1/admin.pb-c.h"

#include <stdlib.h>

static struct moe_status pack(const Moe__V1__GetMetricsResponse *answer, uint8_t **bytes,
                              size_t *packed)
{
    *packed = protobuf_c_message_get_packed_size(&answer->base);
    *bytes = malloc(*packed + 1);
    if (*bytes == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "metrics page");
    protobuf_c_message_pack(&answer->base, *bytes);
    return moe_ok();
}

static struct moe_status pack_page(const struct moe_inspect_metrics *what, uint8_t **bytes,
                                   size_t *packed)
{
    char *text = NULL;
    size_t length;
    Moe__V1__GetMetricsResponse answer = MOE__V1__GET_METRICS_RESPONSE__INIT;
    MOE_TRY(moe_metrics_render(what->metrics, &text, &length));
    answer.text = text;
    struct moe_status st = pack(&answer, bytes, packed);
    free(text);
    return st;
}

static struct moe_status pack_rows(const struct moe_inspect_metrics *what, uint32_t layer,
                                   uint8_t **bytes, size_t *packed)
{
    uint64_t rows[MOE_MAX_EXPERTS];
    size_t count = what->expert_rows != NULL ? what->expert_rows(what->ctx, layer, rows) : 0;
    Moe__V1__GetMetricsResponse answer = MOE__V1__GET_METRICS_RESPONSE__INIT;
    if (count == 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "this daemon has no experts of layer %u", layer);
    answer.expert_rows = rows;
    answer.n_expert_rows = count;
    return pack(&answer, bytes, packed);
}

/* `*layer_plus_one`: see GetMetricsRequest. */
static struct moe_status read_request(struct moe_rpc_msg *m, uint32_t *layer_plus_one)
{
    struct moe_rpc_arena arena;
    void *request;
    MOE_TRY(moe_rpc_msg_unpack(m, &moe__v1__get_metrics_request__descriptor, &arena, &request));
    *layer_plus_one = ((const Moe__V1__GetMetricsRequest *)request)->expert_rows_of_layer_plus_one;
    return moe_ok();
}

static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    uint8_t *bytes = NULL;
    size_t length = 0;
    uint32_t layer_plus_one = 0;
    struct moe_status st = read_request(m, &layer_plus_one);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st))
        st = layer_plus_one == 0 ? pack_page(ctx, &bytes, &length)
                                 : pack_rows(ctx, layer_plus_one - 1, &bytes, &length);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
    else
        moe_rpc_reply(call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    free(bytes);
}

struct moe_rpc_method moe_inspect_metrics_method(struct moe_inspect_metrics *what)
{
    return (struct moe_rpc_method){.path = "/moe.v1.AdminService/GetMetrics",
                                   .kind = MOE_RPC_UNARY,
                                   .message = on_message,
                                   .ctx = what};
}
