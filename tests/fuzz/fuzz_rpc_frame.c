/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes, cut into any pieces, as a received message. The split refuses it, or head and parts
 * have the values that protobuf-c reads in the whole message. */
#include "driver.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/msg.h"

#include <stdlib.h>
#include <string.h>

enum { PARTS = 4, PIECES_MAX = 64 };

static const uint32_t part_fields[PARTS] = {12, 13, 14, 15};

struct sunk {
    uint8_t *data[PARTS];
    size_t length[PARTS];
};

static struct moe_status sink(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct sunk *s = ctx;
    size_t i = field - part_fields[0];
    MOE_INVARIANT(i < PARTS && s->data[i] == NULL);
    s->data[i] = malloc(length > 0 ? length : 1);
    s->length[i] = length;
    *dst = s->data[i];
    return s->data[i] != NULL ? moe_ok() : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "-");
}

/* The first byte gives the length of the pieces. */
static struct moe_rpc_msg *cut(const uint8_t *data, size_t size, uint8_t how)
{
    struct moe_rpc_piece pieces[PIECES_MAX];
    size_t count = 0, at = 0;
    for (; at < size && count < PIECES_MAX - 1; count++) {
        size_t n = (how + count * 7) % 37;
        n = n < size - at ? n : size - at;
        pieces[count] = (struct moe_rpc_piece){data + at, n};
        at += n;
    }
    pieces[count++] = (struct moe_rpc_piece){data + at, size - at};
    return moe_rpc_msg_from_pieces(pieces, count);
}

static void check_part(const struct sunk *s, size_t i, const ProtobufCBinaryData *want)
{
    MOE_INVARIANT(s->length[i] == want->len);
    MOE_INVARIANT(want->len == 0 || memcmp(s->data[i], want->data, want->len) == 0);
}

static void compare(const uint8_t *head, size_t head_length, const struct sunk *s,
                    const Moe__V1__ForwardRequest *whole)
{
    Moe__V1__ForwardRequest *h = moe__v1__forward_request__unpack(NULL, head_length, head);
    MOE_INVARIANT((h == NULL) == (whole == NULL));
    if (h == NULL)
        return;
    MOE_INVARIANT(strcmp(h->model, whole->model) == 0);
    MOE_INVARIANT(h->tokens == whole->tokens && h->hidden == whole->hidden);
    MOE_INVARIANT(h->epoch == whole->epoch && h->dtype == whole->dtype);
    MOE_INVARIANT(h->base.n_unknown_fields == whole->base.n_unknown_fields);
    check_part(s, 0, &whole->topk_ids);
    check_part(s, 1, &whole->topk_weights);
    check_part(s, 2, &whole->token_ids);
    check_part(s, 3, &whole->x_data);
    moe__v1__forward_request__free_unpacked(h, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    uint8_t head[MOE_RPC_HEAD_MAX], flat[256];
    size_t head_length = 0, n;
    uint64_t number;
    struct sunk s = {{NULL}, {0}};
    struct moe_rpc_msg *m = cut(data + 1, size - 1, data[0]);
    MOE_INVARIANT(m != NULL && moe_rpc_msg_length(m) == size - 1);
    struct moe_status found = moe_rpc_msg_find_uint(m, 3, &number);
    struct moe_status st = moe_rpc_msg_flatten(m, flat, sizeof flat, &n);
    MOE_INVARIANT(moe_failed(&st) == (size - 1 > sizeof flat));
    MOE_INVARIANT(moe_failed(&st) || memcmp(flat, data + 1, n) == 0);
    st = moe_rpc_msg_split(m, part_fields, PARTS, head, &head_length, sink, &s);
    if (!moe_failed(&st)) {
        Moe__V1__ForwardRequest *whole = moe__v1__forward_request__unpack(NULL, size - 1, data + 1);
        compare(head, head_length, &s, whole);
        MOE_INVARIANT(!moe_failed(&found));
        if (whole != NULL)
            MOE_INVARIANT((uint32_t)number == whole->tokens);
        if (whole != NULL)
            moe__v1__forward_request__free_unpacked(whole, NULL);
    } else {
        MOE_INVARIANT(st.code == MOE_INVALID_ARGUMENT && st.text[0] != '\0');
    }
    for (size_t i = 0; i < PARTS; i++)
        free(s.data[i]);
    moe_rpc_msg_free(m);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t packed[2048];
    Moe__V1__ForwardRequest q = MOE__V1__FORWARD_REQUEST__INIT;
    Moe__V1__RetainForBackward retain = MOE__V1__RETAIN_FOR_BACKWARD__INIT;
    if (i > 3)
        return 0;
    *data = packed;
    packed[0] = (uint8_t)(11 * i);
    q.model = (char *)(uintptr_t) "mixtral";
    q.layer = 3;
    q.tokens = 2;
    q.hidden = 8;
    q.epoch = UINT64_MAX;
    q.topk_ids = (ProtobufCBinaryData){.len = i, .data = (uint8_t *)(uintptr_t) "\1\2\3\4"};
    q.token_ids = q.topk_ids;
    if (i % 2) {
        q.x_data = (ProtobufCBinaryData){.len = 64 * i, .data = packed + 1024};
    } else {
        q.retain = &retain;
        retain.micro_batch_id = 77;
    }
    return 1 + moe__v1__forward_request__pack(&q, packed + 1);
}
