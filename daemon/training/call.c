/* SPDX-License-Identifier: Apache-2.0 */
/* Training calls as they travel, and the hash of their content. */
#include "training/requests.h"

#include "moe/v1/worker.pb-c.h"
#include "rpc/msg.h"

#include <string.h>

/* ------------------------------------------------------------------------- content */

static uint64_t stir(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

enum { WORD = 8, CHAINS = 4 };

/* Four independent chains: in one chain each multiplication waits for the previous one. */
void moe_content_mix(uint64_t hash[2], const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint64_t chain[CHAINS] = {hash[0] + 1, hash[1] + 2, ~hash[0] + 3, ~hash[1] + 4};
    uint64_t word[CHAINS];
    size_t left = bytes;
    for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
        memcpy(word, at, sizeof word);
        for (int i = 0; i < CHAINS; i++)
            chain[i] = stir(chain[i], word[i]);
    }
    memset(word, 0, sizeof word);
    if (left > 0)
        memcpy(word, at, left);
    for (int i = 0; i < CHAINS; i++)
        chain[i] = stir(stir(chain[i], word[i]), bytes);
    hash[0] = stir(stir(chain[0], chain[1]), chain[2]);
    hash[1] = stir(stir(chain[3], chain[2]), chain[1]);
}

/* --------------------------------------------------------------------------- packing */

void moe_train_call_pack(const struct moe_train_call *c, uint8_t body[MOE_TRAINING_BODY_MAX],
                         uint32_t *length)
{
    uint64_t content[4];
    Moe__V1__TrainingBody b;
    moe__v1__training_body__init(&b);
    memcpy(content, &c->content, sizeof c->content);
    b.session = (char *)(uintptr_t)c->session; /* packing only reads */
    b.id = c->id;
    b.content = content;
    b.n_content = 4;
    b.lineage = c->lineage;
    b.weights_version = c->weights_version;
    b.aux_coeff = (double)c->aux_coeff;
    b.input_only = c->input_only;
    b.request.len = c->request_length;
    b.request.data = (uint8_t *)(uintptr_t)c->request;
    b.retained = c->retained;
    b.retained_epoch = c->retained_epoch;
    b.progress = c->is_progress;
    size_t size = moe__v1__training_body__get_packed_size(&b);
    MOE_INVARIANT(size <= MOE_TRAINING_BODY_MAX);
    *length = (uint32_t)moe__v1__training_body__pack(&b, body);
}

static bool copy_name(char to[MOE_TRAINING_NAME_MAX + 1], const char *from)
{
    if (from[0] != '\0' && !moe_training_name_ok(from))
        return false;
    memset(to, 0, MOE_TRAINING_NAME_MAX + 1);
    strncpy(to, from, MOE_TRAINING_NAME_MAX);
    return true;
}

/* Kinds without tensors: the client's message. */
static bool read_request(const ProtobufCBinaryData *request, struct moe_train_call *out)
{
    const struct ProtobufCMessageDescriptor *type = moe_train_request_type(out->kind);
    struct moe_rpc_arena arena;
    void *message = NULL;
    if (type == NULL)
        return request->len == 0;
    struct moe_status st = moe_rpc_unpack(type, request->data, request->len, &arena, &message);
    if (!moe_failed(&st))
        st = moe_train_read_request(out->kind, message, out);
    return !moe_failed(&st);
}

struct moe_status moe_train_call_read(const struct moe_ticket *ticket, struct moe_train_call *out)
{
    struct moe_rpc_arena arena;
    void *message = NULL;
    *out = (struct moe_train_call){.kind = ticket->kind};
    if (ticket->descriptor.length > MOE_TRAINING_BODY_MAX)
        goto malformed;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__training_body__descriptor, ticket->descriptor.body,
                       ticket->descriptor.length, &arena, &message);
    const Moe__V1__TrainingBody *b = message;
    if (moe_failed(&st) || b->n_content != 4 || !read_request(&b->request, out) ||
        !copy_name(out->session, b->session))
        goto malformed;
    memcpy(&out->content, b->content, sizeof out->content);
    out->id = b->id;
    out->lineage = b->lineage;
    out->weights_version = b->weights_version;
    out->aux_coeff = (float)b->aux_coeff;
    out->input_only = b->input_only;
    out->retained = b->retained;
    out->retained_epoch = b->retained_epoch;
    out->is_progress = b->progress;
    if (out->id != 0 && (out->session[0] != '\0') == moe_step_traits(out->kind)->has_rows)
        return moe_ok();
malformed:
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "ticket %llu: its training call is none",
                     (unsigned long long)ticket->seq);
}
