/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes, cut into any pieces, as a server's answer. libmoeclient refuses it with a typed error,
 * or the caller's tensors get the values that protobuf-c reads. No byte outside the requested rows
 * is written. */
#include "driver.h"
#include "moe/v1/expert.pb-c.h"
#include "wire.h"

#include <string.h>

enum {
    HIDDEN = 6,
    TOP_K = 2,
    ROWS = 20,
    PIECES_MAX = 16,
    POISON = 0x5c,
    SETTINGS = 2,
    EXPERTS = 300
};

/* Tensors of ROWS rows; the request is for some rows in the middle. */
struct memory {
    float y[ROWS * HIDDEN];
    int32_t ids[ROWS * TOP_K];
    float weights[ROWS * TOP_K];
    uint32_t rehomed[EXPERTS];
};

/* The request, from the first SETTINGS bytes of the input. */
struct request {
    struct moe_client_layer layer;
    struct moe_client_forward f;
    struct moe_client_rows rows;
    uint8_t piece; /* length of the answer's pieces */
};

static void make_request(const uint8_t settings[SETTINGS], struct memory *m, struct request *r)
{
    *r = (struct request){.layer = {.hidden = HIDDEN, .experts = EXPERTS, .top_k = TOP_K}};
    r->f = (struct moe_client_forward){
        .size = sizeof r->f, .tokens = ROWS, .hidden = HIDDEN, .y = m->y};
    r->f.dtype = settings[1] & 1 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    if (settings[1] & 2) {
        r->f.topk_ids = m->ids;
        r->f.topk_weights = m->weights;
    }
    if (settings[0] & 4)
        r->f.rehomed_experts = m->rehomed;
    r->rows = (struct moe_client_rows){
        .f = &r->f, .layer = &r->layer, .first = settings[0] & 3, .tokens = 1 + (settings[0] >> 4)};
    r->piece = (uint8_t)(1 + settings[1] / 4);
}

static struct moe_rpc_msg *cut(const uint8_t *data, size_t size, size_t piece)
{
    struct moe_rpc_piece pieces[PIECES_MAX];
    size_t count = 0, at = 0;
    for (; size - at > piece && count < PIECES_MAX - 1; at += piece)
        pieces[count++] = (struct moe_rpc_piece){data + at, piece};
    pieces[count++] = (struct moe_rpc_piece){data + at, size - at};
    return moe_rpc_msg_from_pieces(pieces, count);
}

/* Aborts if a byte outside the given rows of a tensor has changed. */
static void check_outside(const void *tensor, size_t row_bytes, size_t total,
                          const struct moe_client_rows *rows)
{
    const uint8_t *bytes = tensor;
    size_t begin = rows->first * row_bytes, end = begin + rows->tokens * row_bytes;
    for (size_t i = 0; i < total; i++)
        MOE_INVARIANT((i >= begin && i < end) || bytes[i] == POISON);
}

static int32_t wire_id(const Moe__V1__ForwardStreamResponse *a, size_t i)
{
    size_t width = a->topk_ids.len / (a->tokens * TOP_K);
    int32_t id = 0;
    memcpy(&id, a->topk_ids.data + i * width, width); /* little-endian, as the wire is */
    return id;
}

/* The list is ascending, and has the same ids. */
static void compare_rehomed(const struct moe_client_forward *f, const Moe__V1__RehomedExperts *list)
{
    bool named[EXPERTS] = {0};
    size_t count = 0;
    MOE_INVARIANT(list != NULL);
    for (size_t i = 0; i < list->n_experts; i++) {
        MOE_INVARIANT(list->experts[i] < EXPERTS);
        named[list->experts[i]] = true;
    }
    for (uint32_t e = 0; e < EXPERTS; e++)
        if (named[e])
            MOE_INVARIANT(count < f->rehomed_count && f->rehomed_experts[count++] == e);
    MOE_INVARIANT(count == f->rehomed_count);
}

/* An accepted answer has the same values as the tensors. */
static void compare(const struct request *r, const struct memory *m, const uint8_t *data,
                    size_t size)
{
    Moe__V1__ForwardStreamResponse *a = moe__v1__forward_stream_response__unpack(NULL, size, data);
    MOE_INVARIANT(a != NULL && a->error == NULL && a->tokens == r->rows.tokens);
    size_t row_bytes = HIDDEN * moe_dtype_bytes(r->f.dtype);
    MOE_INVARIANT(a->y_data.len == a->tokens * row_bytes);
    const uint8_t *y = (const uint8_t *)m->y + r->rows.first * row_bytes;
    MOE_INVARIANT(memcmp(y, a->y_data.data, a->y_data.len) == 0);
    for (size_t i = 0; i < a->tokens * TOP_K && r->f.topk_ids != NULL; i++) {
        size_t at = r->rows.first * TOP_K + i;
        MOE_INVARIANT(m->ids[at] == wire_id(a, i));
        MOE_INVARIANT(memcmp(&m->weights[at], a->topk_weights.data + 4 * i, 4) == 0);
    }
    if (r->f.rehomed_experts != NULL)
        compare_rehomed(&r->f, a->rehomed);
    moe__v1__forward_stream_response__free_unpacked(a, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct memory memory;
    struct request r;
    struct moe_client_answer answer;
    if (size < SETTINGS)
        return 0;
    memset(&memory, POISON, sizeof memory);
    make_request(data, &memory, &r);
    data += SETTINGS;
    size -= SETTINGS;
    struct moe_rpc_msg *m = cut(data, size, r.piece);
    MOE_INVARIANT(m != NULL);
    struct moe_status st = moe_client_wire_unpack(&r.rows, m, &answer);
    moe_rpc_msg_free(m);
    check_outside(memory.y, HIDDEN * moe_dtype_bytes(r.f.dtype), sizeof memory.y, &r.rows);
    check_outside(memory.ids, TOP_K * sizeof(int32_t), sizeof memory.ids, &r.rows);
    check_outside(memory.weights, TOP_K * sizeof(float), sizeof memory.weights, &r.rows);
    if (st.code == MOE_OK) {
        moe_client_wire_answer(&r.f, &answer);
        compare(&r, &memory, data, size);
    }
    return 0;
}

/* Valid answers of both dtypes, without routing and with ids of each width; and an error. */
size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t input[2048];
    static uint8_t bytes[1024];
    enum { TOKENS = 3, SEEDS = 9 };
    if (i >= SEEDS)
        return 0;
    for (size_t k = 0; k < sizeof bytes; k++)
        bytes[k] = (uint8_t)(k * 37 + i);
    bool routing = i >= 2 && i < 8, wide = i % 2 == 1;
    size_t width = i < 4 ? 1 : i < 6 ? 2 : 4;
    Moe__V1__ForwardStreamResponse a;
    Moe__V1__StageTimes stages = MOE__V1__STAGE_TIMES__INIT;
    Moe__V1__Error error = MOE__V1__ERROR__INIT;
    moe__v1__forward_stream_response__init(&a);
    a.tokens = TOKENS;
    a.hidden = HIDDEN;
    a.dtype = wide ? MOE__V1__DATA_TYPE__DATA_TYPE_F32 : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    a.top_k = TOP_K;
    a.topk_ids_dtype = width == 1   ? MOE__V1__DATA_TYPE__DATA_TYPE_U8
                       : width == 2 ? MOE__V1__DATA_TYPE__DATA_TYPE_U16
                                    : MOE__V1__DATA_TYPE__DATA_TYPE_I32;
    a.stages = &stages;
    stages.server_ns = 123456;
    a.request_id = UINT64_C(1) << 40;
    Moe__V1__RehomedExperts rehomed = MOE__V1__REHOMED_EXPERTS__INIT;
    uint32_t experts[] = {2, 130, EXPERTS - 1};
    rehomed.experts = experts;
    rehomed.n_experts = i % 4;
    if (i % 3 < 2)
        a.rehomed = &rehomed;
    if (routing) {
        a.topk_ids = (ProtobufCBinaryData){.len = TOKENS * TOP_K * width, .data = bytes};
        a.topk_weights = (ProtobufCBinaryData){.len = TOKENS * TOP_K * 4, .data = bytes + 256};
    }
    a.y_case = MOE__V1__FORWARD_STREAM_RESPONSE__Y_Y_DATA;
    a.y_data = (ProtobufCBinaryData){.len = TOKENS * HIDDEN * (wide ? 4 : 2), .data = bytes + 512};
    if (i == SEEDS - 1) {
        a.y_case = MOE__V1__FORWARD_STREAM_RESPONSE__Y__NOT_SET;
        error.code = 8;
        error.reason = (char *)(uintptr_t) "QUEUE_FULL";
        a.error = &error;
    }
    input[0] = (uint8_t)((TOKENS - 1) << 4 | 1 | (i % 3 == 1 ? 4 : 0));
    input[1] = (uint8_t)((wide ? 1 : 0) | (routing ? 2 : 0) | 40 * (i % 5));
    *data = input;
    return SETTINGS + moe__v1__forward_stream_response__pack(&a, input + SETTINGS);
}
