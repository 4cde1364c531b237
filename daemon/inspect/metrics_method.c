/* SPDX-License-Identifier: Apache-2.0 */
#include "inspect/metrics_method.h"

#include "moe/v1/admin.pb-c.h"

#include <stdlib.h>

static struct moe_status pack(struct moe_metrics *metrics, uint8_t **bytes, size_t *packed)
{
    char *text = NULL;
    size_t length;
    MOE_TRY(moe_metrics_render(metrics, &text, &length));
    Moe__V1__GetMetricsResponse answer = MOE__V1__GET_METRICS_RESPONSE__INIT;
    answer.text = text;
    *packed = protobuf_c_message_get_packed_size(&answer.base);
    *bytes = malloc(*packed + 1);
    if (*bytes != NULL)
        protobuf_c_message_pack(&answer.base, *bytes);
    free(text);
    return *bytes != NULL
               ? moe_ok()
               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "metrics page");
}

static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    uint8_t *bytes = NULL;
    size_t length;
    moe_rpc_msg_free(m);
    struct moe_status st = pack(ctx, &bytes, &length);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
    else
        moe_rpc_reply(call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    free(bytes);
}

struct moe_rpc_method moe_inspect_metrics_method(struct moe_metrics *metrics)
{
    return (struct moe_rpc_method){.path = "/moe.v1.AdminService/GetMetrics",
                                   .kind = MOE_RPC_UNARY,
                                   .message = on_message,
                                   .ctx = metrics};
}
