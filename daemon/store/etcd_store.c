/* SPDX-License-Identifier: Apache-2.0 */
/* The record and the images of the leader. Each change is a transaction that needs the leader's key
 * (store/election.h). */
#include "store/etcd_state.h"
#include "store/records.h"

#include "base/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BYTES = 512 << 10, /* etcd takes requests of 1.5 MiB by default */
    PIECES_MAX = 1024,
    AGAIN_MAX = 4, /* own writes without an answer that may come first */
    OPS_MAX = 3,
};

static const char txn_path[] = "/etcdserverpb.KV/Txn", range_path[] = "/etcdserverpb.KV/Range";

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "etcd");
}

static struct moe_status not_leader(void)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NOT_LEADER,
                     "another coordinator leads, or none");
}

/* ------------------------------------------------------------------ transactions */

static void compare_leader(const struct moe_etcd *e, Etcdserverpb__Compare *c)
{
    etcdserverpb__compare__init(c);
    c->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__CREATE;
    c->key = moe_etcd__bytes(e->leader_key);
    c->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_CREATE_REVISION;
    c->create_revision = e->fence.leader;
}

static void put_op(Etcdserverpb__RequestOp *op, Etcdserverpb__PutRequest *put, const char *key,
                   const uint8_t *value, size_t length)
{
    etcdserverpb__request_op__init(op);
    etcdserverpb__put_request__init(put);
    put->key = moe_etcd__bytes(key);
    put->value = (ProtobufCBinaryData){.len = length, .data = (uint8_t *)(uintptr_t)value};
    op->request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
    op->request_put = put;
}

static void delete_op(Etcdserverpb__RequestOp *op, Etcdserverpb__DeleteRangeRequest *d,
                      const char *from, const char *to)
{
    etcdserverpb__request_op__init(op);
    etcdserverpb__delete_range_request__init(d);
    d->key = moe_etcd__bytes(from);
    if (to != NULL)
        d->range_end = moe_etcd__bytes(to);
    op->request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_DELETE_RANGE;
    op->request_delete_range = d;
}

static void range_op(Etcdserverpb__RequestOp *op, Etcdserverpb__RangeRequest *r, const char *key)
{
    etcdserverpb__request_op__init(op);
    etcdserverpb__range_request__init(r);
    r->key = moe_etcd__bytes(key);
    op->request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_RANGE;
    op->request_range = r;
}

/* Not repeated at another endpoint: the caller finds out what has become of it. */
static struct moe_status run_txn(struct moe_etcd *e, const Etcdserverpb__TxnRequest *txn,
                                 Etcdserverpb__TxnResponse **answer)
{
    ProtobufCMessage *message = NULL;
    if (!moe_etcd_leads(e))
        return not_leader();
    MOE_TRY(moe_etcd__call(e, txn_path, &txn->base, false, &etcdserverpb__txn_response__descriptor,
                           &message));
    *answer = (Etcdserverpb__TxnResponse *)message;
    if ((*answer)->header != NULL)
        return moe_ok();
    protobuf_c_message_free_unpacked(message, NULL);
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "etcd: an answer without a header");
}

/* Operations that need the leader's key only. */
static struct moe_status run_fenced(struct moe_etcd *e, Etcdserverpb__RequestOp *ops, size_t count)
{
    Etcdserverpb__Compare leads, *compare[] = {&leads};
    Etcdserverpb__RequestOp *success[OPS_MAX];
    Etcdserverpb__TxnRequest txn = ETCDSERVERPB__TXN_REQUEST__INIT;
    Etcdserverpb__TxnResponse *answer;
    compare_leader(e, &leads);
    for (size_t i = 0; i < count; i++)
        success[i] = &ops[i];
    txn.n_compare = 1;
    txn.compare = compare;
    txn.n_success = count;
    txn.success = success;
    MOE_TRY(run_txn(e, &txn, &answer));
    bool succeeded = answer->succeeded;
    etcdserverpb__txn_response__free_unpacked(answer, NULL);
    if (succeeded)
        return moe_ok();
    moe_etcd_resign(e, 0);
    return not_leader();
}

/* ------------------------------------------------------------------ the record */

/* Revision of the key in operation `i` of the answer; 0 = there is none. */
static int64_t revision_in(const Etcdserverpb__TxnResponse *answer, size_t i, bool created)
{
    if (i >= answer->n_responses || answer->responses[i]->response_range == NULL ||
        answer->responses[i]->response_case != ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE ||
        answer->responses[i]->response_range->n_kvs == 0)
        return 0;
    const Mvccpb__KeyValue *kv = answer->responses[i]->response_range->kvs[0];
    return created ? kv->create_revision : kv->mod_revision;
}

static struct moe_status write_once(struct moe_etcd *e, const uint8_t *image, size_t length,
                                    enum moe_fence_result *result)
{
    Etcdserverpb__Compare leads, unchanged = ETCDSERVERPB__COMPARE__INIT;
    Etcdserverpb__Compare *compare[] = {&leads, &unchanged};
    Etcdserverpb__PutRequest put;
    Etcdserverpb__RangeRequest leader, state;
    Etcdserverpb__RequestOp put_it, read_leader, read_state;
    Etcdserverpb__RequestOp *success[] = {&put_it}, *failure[] = {&read_leader, &read_state};
    Etcdserverpb__TxnRequest txn = ETCDSERVERPB__TXN_REQUEST__INIT;
    Etcdserverpb__TxnResponse *answer;
    compare_leader(e, &leads);
    unchanged.target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__MOD;
    unchanged.key = moe_etcd__bytes(e->state_key);
    unchanged.target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_MOD_REVISION;
    unchanged.mod_revision = e->fence.state;
    put_op(&put_it, &put, e->state_key, image, length);
    range_op(&read_leader, &leader, e->leader_key);
    range_op(&read_state, &state, e->state_key);
    txn.n_compare = txn.n_failure = 2;
    txn.n_success = 1;
    txn.compare = compare;
    txn.success = success;
    txn.failure = failure;
    MOE_TRY(run_txn(e, &txn, &answer));
    *result = moe_fence_on_written(&e->fence, answer->succeeded, answer->header->revision,
                                   revision_in(answer, 0, true), revision_in(answer, 1, false));
    etcdserverpb__txn_response__free_unpacked(answer, NULL);
    return moe_ok();
}

static struct moe_status append(struct moe_store *store, const uint8_t *record, size_t length)
{
    struct moe_etcd *e = (struct moe_etcd *)store;
    size_t heads = MOE_RECORDS_HEADER_BYTES + MOE_RECORDS_HEAD_BYTES;
    uint8_t *image = malloc(heads + length);
    if (image == NULL)
        return no_memory();
    moe_records_put_header(image, e->format->version);
    moe_records_put_head(image + MOE_RECORDS_HEADER_BYTES, record, length);
    memcpy(image + heads, record, length);
    enum moe_fence_result result = MOE_FENCE_AGAIN;
    struct moe_status st = moe_ok();
    for (int i = 0; i < AGAIN_MAX && !moe_failed(&st) && result == MOE_FENCE_AGAIN; i++)
        st = write_once(e, image, heads + length, &result);
    free(image);
    if (moe_failed(&st) || result == MOE_FENCE_WRITTEN)
        return st;
    if (result == MOE_FENCE_AGAIN) /* only someone who is no coordinator writes so often */
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%s is changed by others", store->name);
    moe_etcd_resign(e, 0);
    return not_leader();
}

/* ------------------------------------------------------------------ images */

/* The caller frees `*answer`. */
static struct moe_status read_key(struct moe_etcd *e, const char *key,
                                  Etcdserverpb__RangeResponse **answer)
{
    Etcdserverpb__RangeRequest range = ETCDSERVERPB__RANGE_REQUEST__INIT;
    ProtobufCMessage *message = NULL;
    range.key = moe_etcd__bytes(key);
    MOE_TRY(moe_etcd__call(e, range_path, &range.base, true,
                           &etcdserverpb__range_response__descriptor, &message));
    *answer = (Etcdserverpb__RangeResponse *)message;
    return moe_ok();
}

static struct moe_status damaged(const char *key)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "etcd %s: damaged", key);
}

struct image_head {
    uint64_t generation; /* 0 = there is no image */
    uint32_t pieces;
    size_t bytes;
};

static struct moe_status read_head(struct moe_etcd *e, uint32_t number, size_t max,
                                   struct image_head *head)
{
    char key[MOE_ETCD_KEY_BYTES], text[64] = "";
    Etcdserverpb__RangeResponse *answer;
    *head = (struct image_head){0};
    moe_etcd__image_key(e, number, "", key);
    MOE_TRY(read_key(e, key, &answer));
    bool is_there = answer->n_kvs > 0;
    if (is_there && answer->kvs[0]->value.len < sizeof text)
        memcpy(text, answer->kvs[0]->value.data, answer->kvs[0]->value.len);
    etcdserverpb__range_response__free_unpacked(answer, NULL);
    if (!is_there)
        return moe_ok();
    if (sscanf(text, "%16" SCNx64 " %9" SCNu32 " %12zu", &head->generation, &head->pieces,
               &head->bytes) != 3 ||
        head->generation == 0 || head->pieces > PIECES_MAX || head->bytes > max)
        return damaged(key);
    return moe_ok();
}

static void piece_key(const struct moe_etcd *e, uint32_t number, uint64_t generation,
                      uint32_t piece, char key[MOE_ETCD_KEY_BYTES])
{
    char behind[40];
    (void)snprintf(behind, sizeof behind, "/%016" PRIx64 "/%04u", generation, piece);
    moe_etcd__image_key(e, number, behind, key);
}

/* Adds the piece's bytes at `*length`. */
static struct moe_status read_piece(struct moe_etcd *e, const char *key, uint8_t *image,
                                    size_t bytes, size_t *length)
{
    Etcdserverpb__RangeResponse *answer;
    MOE_TRY(read_key(e, key, &answer));
    struct moe_status st = damaged(key);
    if (answer->n_kvs == 1 && answer->kvs[0]->value.len <= bytes - *length) {
        if (answer->kvs[0]->value.len > 0)
            memcpy(image + *length, answer->kvs[0]->value.data, answer->kvs[0]->value.len);
        *length += answer->kvs[0]->value.len;
        st = moe_ok();
    }
    etcdserverpb__range_response__free_unpacked(answer, NULL);
    return st;
}

static struct moe_status read_image(struct moe_store *store, uint32_t number, size_t max,
                                    uint8_t **image, size_t *length)
{
    struct moe_etcd *e = (struct moe_etcd *)store;
    char key[MOE_ETCD_KEY_BYTES];
    struct image_head head;
    *image = NULL;
    *length = 0;
    MOE_TRY(read_head(e, number, max, &head));
    if (head.generation == 0)
        return moe_ok();
    uint8_t *bytes = malloc(head.bytes > 0 ? head.bytes : 1);
    struct moe_status st = bytes != NULL ? moe_ok() : no_memory();
    for (uint32_t i = 0; i < head.pieces && !moe_failed(&st); i++) {
        piece_key(e, number, head.generation, i, key);
        st = read_piece(e, key, bytes, head.bytes, length);
        moe_etcd_run(e); /* renews */
    }
    if (!moe_failed(&st) && *length != head.bytes)
        st = damaged(key);
    if (moe_failed(&st))
        free(bytes);
    else
        *image = bytes;
    return st;
}

/* Puts the head, and removes the pieces of all other generations: at one revision. */
static struct moe_status put_head(struct moe_etcd *e, uint32_t number,
                                  const struct image_head *head)
{
    char key[MOE_ETCD_KEY_BYTES], first[MOE_ETCD_KEY_BYTES], own[MOE_ETCD_KEY_BYTES],
        behind[MOE_ETCD_KEY_BYTES], last[MOE_ETCD_KEY_BYTES], text[64], part[40];
    Etcdserverpb__RequestOp ops[OPS_MAX];
    Etcdserverpb__PutRequest put;
    Etcdserverpb__DeleteRangeRequest before, after;
    moe_etcd__image_key(e, number, "", key);
    moe_etcd__image_key(e, number, "/", first);
    (void)snprintf(part, sizeof part, "/%016" PRIx64 "/", head->generation);
    moe_etcd__image_key(e, number, part, own);
    part[strlen(part) - 1]++; /* '0' follows '/' */
    moe_etcd__image_key(e, number, part, behind);
    moe_etcd__image_key(e, number, "0", last);
    (void)snprintf(text, sizeof text, "%016" PRIx64 " %u %zu", head->generation, head->pieces,
                   head->bytes);
    put_op(&ops[0], &put, key, (const uint8_t *)text, strlen(text));
    delete_op(&ops[1], &before, first, own);
    delete_op(&ops[2], &after, behind, last);
    return run_fenced(e, ops, OPS_MAX);
}

static struct moe_status remove_image(struct moe_etcd *e, uint32_t number)
{
    char key[MOE_ETCD_KEY_BYTES], first[MOE_ETCD_KEY_BYTES], last[MOE_ETCD_KEY_BYTES];
    Etcdserverpb__RequestOp ops[2];
    Etcdserverpb__DeleteRangeRequest head, pieces;
    moe_etcd__image_key(e, number, "", key);
    moe_etcd__image_key(e, number, "/", first);
    moe_etcd__image_key(e, number, "0", last);
    delete_op(&ops[0], &head, key, NULL);
    delete_op(&ops[1], &pieces, first, last);
    return run_fenced(e, ops, 2);
}

static struct moe_status write_image(struct moe_store *store, uint32_t number, const uint8_t *image,
                                     size_t length)
{
    struct moe_etcd *e = (struct moe_etcd *)store;
    struct image_head head = {.bytes = length};
    if (image == NULL)
        return remove_image(e, number);
    if (length > (size_t)PIECES_MAX * PIECE_BYTES)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE, "an image for etcd");
    MOE_TRY(moe_random_id(&head.generation));
    for (size_t at = 0; at < length; at += PIECE_BYTES, head.pieces++) {
        char key[MOE_ETCD_KEY_BYTES];
        Etcdserverpb__RequestOp op;
        Etcdserverpb__PutRequest put;
        piece_key(e, number, head.generation, head.pieces, key);
        put_op(&op, &put, key, image + at, length - at < PIECE_BYTES ? length - at : PIECE_BYTES);
        MOE_TRY(run_fenced(e, &op, 1));
        moe_etcd_run(e); /* renews */
    }
    return put_head(e, number, &head);
}

static void close_store(struct moe_store *store)
{
    (void)store; /* moe_etcd_close */
}

const struct moe_store_ops moe_etcd__ops = {append, read_image, write_image, close_store};
