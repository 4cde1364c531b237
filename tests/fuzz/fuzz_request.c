/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a ForwardRequest. It is refused with a typed error and leaks no memory, or all its
 * tensors have the sizes of the layer. The answer is built too, as if the engine had chosen expert
 * 0 everywhere, and all experts were re-homed. */
#include "driver.h"
#include "request_world.h"

#include "moe/v1/expert.pb-c.h"

static const struct moe_backend memory = {.name = "memory", .mem_alloc = take, .mem_free = give};

/* Accesses the first and last byte of x, y and the routing, so that sanitizers check their sizes.
 */
static void touch(const struct moe_work *w)
{
    size_t wide = (size_t)w->tokens * HIDDEN * moe_dtype_bytes(w->dtype);
    size_t pairs = (size_t)w->tokens * TOP_K;
    MOE_INVARIANT(w->tokens >= 1 && w->tokens <= info.max_tokens_per_request);
    memcpy(w->y, w->x, wide);
    for (size_t i = 0; i < pairs && w->mode != MOE_ROUTE_SERVER; i++)
        MOE_INVARIANT(w->ids_in[i] >= -1 && w->ids_in[i] < 8);
    for (size_t i = 0; i < pairs && w->ids_out != NULL; i++) {
        w->ids_out[i] = 0;
        w->weights_out[i] = w->mode == MOE_ROUTE_IDS_WEIGHTS ? w->weights_in[i] : 1;
    }
}

static struct moe_rpc_msg *message_of(const uint8_t *data, size_t size)
{
    size_t first = size > 0 ? data[0] % (size + 1) : 0;
    struct moe_rpc_piece pieces[3] = {
        {data, first}, {data + first, 0}, {data + first, size - first}};
    struct moe_rpc_msg *m = moe_rpc_msg_from_pieces(pieces, 3);
    MOE_INVARIANT(m != NULL);
    return m;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (staging == NULL)
        open_staging(&memory);
    const struct moe_request_context context = {.info = &info,
                                                .staging = staging,
                                                .weights_version = 1,
                                                .worker = {.epoch = 5, .model = &served}};
    struct moe_request r;
    struct moe_rpc_msg *m = message_of(data, size);
    struct moe_status st = moe_request_parse(&r, &context, m);
    moe_rpc_msg_free(m);
    uint8_t head[MOE_REQUEST_HEAD_MAX];
    struct moe_rpc_out out;
    if (moe_failed(&st)) {
        MOE_INVARIANT(st.reason != MOE_REASON_NONE);
        check_memory_is_back();
        moe_request_answer_error(r.id, &st, head, &out);
    } else {
        touch(&r.work);
        for (uint32_t e = 0; r.work.rehomed != NULL && e < r.spec->experts; e++)
            r.work.rehomed[r.work.rehomed_count++] = e;
        moe_request_answer(&r, head, &out);
    }
    moe_rpc_out_discard(&out);
    moe_request_release(&r);
    check_memory_is_back();
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t packed[4096];
    static uint8_t tensor[TOKENS * HIDDEN * 4], ids[TOKENS * TOP_K];
    static float weights[TOKENS * TOP_K];
    static int64_t token_ids[TOKENS] = {1, 0, 1};
    Moe__V1__BatchPart part = MOE__V1__BATCH_PART__INIT;
    Moe__V1__ForwardStreamRequest q;
    if (i >= 12)
        return 0;
    moe__v1__forward_stream_request__init(&q);
    q.layer = 2;
    q.tokens = TOKENS;
    q.hidden = HIDDEN;
    q.dtype = i % 2 == 0 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32 : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    q.routing_mode = (Moe__V1__RoutingMode)(i % 3 + 1);
    q.return_routing = i % 4 < 2;
    q.return_rehomed = i % 5 < 2;
    q.parts = (Moe__V1__LayerParts)(i % 4);
    q.epoch = i > 6 ? 5 : 0;
    q.request_id = i;
    if (i % 4 == 3) {
        q.batch_part = &part;
        part.batch = i;
        part.parts = (uint32_t)i / 2;
    }
    q.x_data = (ProtobufCBinaryData){sizeof tensor / (i % 2 + 1), tensor};
    if (i % 3 > 0) {
        q.topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_U8;
        q.topk_ids = (ProtobufCBinaryData){sizeof ids, ids};
    }
    if (i % 3 > 1)
        q.topk_weights = (ProtobufCBinaryData){sizeof weights, (uint8_t *)weights};
    if (i % 6 == 0)
        q.token_ids = (ProtobufCBinaryData){sizeof token_ids, (uint8_t *)token_ids};
    *data = packed;
    return moe__v1__forward_stream_request__pack(&q, packed);
}
