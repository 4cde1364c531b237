/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a server's answer to Backward. libmoeclient refuses it with a typed error, or the
 * caller's tensors get the values that protobuf-c reads. No byte after the tensors is written. */
#include "driver.h"
#include "moe/v1/training.pb-c.h"
#include "training.h"

#include <string.h>

enum { TOKENS = 3, HIDDEN = 6, TOP_K = 2, SETTINGS = 1, POISON = 0x5c, GUARD = 16 };

struct memory {
    uint8_t dx[TOKENS * HIDDEN * 4 + GUARD];
    float weights[TOKENS * TOP_K + GUARD];
};

static void check_behind(const void *tensor, size_t used, size_t total)
{
    for (size_t i = used; i < total; i++)
        MOE_INVARIANT(((const uint8_t *)tensor)[i] == POISON);
}

/* An accepted answer has the same values as the tensors. */
static void compare(const struct moe_client_gradients *w, const uint8_t *data, size_t size)
{
    Moe__V1__BackwardResponse *a = moe__v1__backward_response__unpack(NULL, size, data);
    MOE_INVARIANT(a != NULL && a->tokens == TOKENS && a->hidden == HIDDEN);
    MOE_INVARIANT(a->dx.len == w->rows_bytes && memcmp(a->dx.data, w->b->dx, a->dx.len) == 0);
    MOE_INVARIANT(a->repeated == w->b->repeated && a->lineage == w->b->answered_lineage);
    if (w->b->weight_gradients != NULL)
        MOE_INVARIANT(
            a->weight_gradients.len == w->pairs * sizeof(float) &&
            memcmp(a->weight_gradients.data, w->b->weight_gradients, a->weight_gradients.len) == 0);
    moe__v1__backward_response__free_unpacked(a, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct memory m;
    if (size < SETTINGS)
        return 0;
    bool wide = data[0] & 1, weights = data[0] & 2;
    size_t cut = (size_t)data[0] >> 2;
    data += SETTINGS;
    size -= SETTINGS;
    memset(&m, POISON, sizeof m);
    const struct moe_client_layer layer = {.hidden = HIDDEN, .experts = 8, .top_k = TOP_K};
    struct moe_client_backward b = {.size = sizeof b,
                                    .tokens = TOKENS,
                                    .hidden = HIDDEN,
                                    .dtype = wide ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                                    .dx = m.dx,
                                    .weight_gradients = weights ? m.weights : NULL};
    struct moe_client_gradients w = {.b = &b,
                                     .layer = &layer,
                                     .rows_bytes = TOKENS * HIDDEN * moe_dtype_bytes(b.dtype),
                                     .pairs = TOKENS * TOP_K};
    cut = cut < size ? cut : size;
    const struct moe_rpc_piece pieces[] = {{data, cut}, {data + cut, size - cut}};
    struct moe_rpc_msg *answer = moe_rpc_msg_from_pieces(pieces, 2);
    MOE_INVARIANT(answer != NULL);
    struct moe_status st = moe_client_gradients_read(&w, answer);
    moe_rpc_msg_free(answer);
    check_behind(m.dx, w.rows_bytes, sizeof m.dx);
    check_behind(m.weights, weights ? w.pairs * sizeof(float) : 0, sizeof m.weights);
    if (st.code == MOE_OK)
        compare(&w, data, size);
    return 0;
}

/* Valid answers of both dtypes, with and without gradients of the weights. */
size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t input[1024], bytes[256];
    enum { SEEDS = 4 };
    if (i >= SEEDS)
        return 0;
    bool wide = i & 1, weights = i & 2;
    for (size_t k = 0; k < sizeof bytes; k++)
        bytes[k] = (uint8_t)(k * 41 + i);
    Moe__V1__StageTimes stages = MOE__V1__STAGE_TIMES__INIT;
    stages.server_ns = 123456;
    Moe__V1__BackwardResponse a = MOE__V1__BACKWARD_RESPONSE__INIT;
    a.tokens = TOKENS;
    a.hidden = HIDDEN;
    a.dtype = wide ? MOE__V1__DATA_TYPE__DATA_TYPE_F32 : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    a.top_k = TOP_K;
    a.aux_loss = 0.5;
    a.lineage = 3;
    a.repeated = weights;
    a.stages = &stages;
    a.dx = (ProtobufCBinaryData){.len = TOKENS * HIDDEN * (wide ? 4 : 2), .data = bytes};
    if (weights)
        a.weight_gradients = (ProtobufCBinaryData){.len = TOKENS * TOP_K * 4, .data = bytes + 128};
    input[0] = (uint8_t)(i | 40 << 2);
    *data = input;
    return SETTINGS + moe__v1__backward_response__pack(&a, input + SETTINGS);
}
