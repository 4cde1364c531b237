/* SPDX-License-Identifier: Apache-2.0 */
/* See fake_expert.h. If it fails itself, the test ends at once. */
#include "fake_expert.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One request, and the answer in the making. */
struct job {
    struct fake *fake;
    enum fake_mood mood;
    uint64_t id;
    Moe__V1__ForwardStreamRequest head; /* numbers only */
    uint8_t *x;
    int32_t *ids;
    float *weights;
    int64_t *token_ids;
    size_t x_length, ids_length, weights_length, token_ids_length;
    struct job *next; /* held ones of a stream */
};

static void require(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "fake server: %s\n", what);
    abort();
}

int32_t fake_id(uint32_t row, uint32_t k)
{
    return (int32_t)((row + 3 * k) % FAKE_EXPERTS);
}

float fake_weight(uint32_t k)
{
    return k == 0 ? 0.75f : 0.25f;
}

/* ------------------------------------------------------------------ requests */

static struct moe_status take_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct job *j = ctx;
    void *memory = malloc(length + 1);
    require(memory != NULL, "memory");
    if (field == 15) {
        j->x = memory;
        j->x_length = length;
    } else if (field == 12) {
        j->ids = memory;
        j->ids_length = length;
    } else if (field == 14) {
        j->token_ids = memory;
        j->token_ids_length = length;
    } else {
        j->weights = memory;
        j->weights_length = length;
    }
    *dst = memory;
    return moe_ok();
}

static struct job *read_job(struct fake *f, struct moe_rpc_msg *m)
{
    static const uint32_t parts[] = {12, 13, 14, 15};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    struct job *j = calloc(1, sizeof *j);
    require(j != NULL, "memory");
    struct moe_status st = moe_rpc_msg_split(m, parts, 4, head, &length, take_part, j);
    require(!moe_failed(&st), st.text);
    moe_rpc_msg_free(m);
    Moe__V1__ForwardStreamRequest *q = moe__v1__forward_stream_request__unpack(NULL, length, head);
    require(q != NULL, "a request that is no ForwardRequest");
    j->head = *q;
    j->id = q->request_id;
    const Moe__V1__BatchPart none = {0}, part = q->batch_part != NULL ? *q->batch_part : none;
    bool added = strcmp(q->model, FAKE_ADDED) == 0;
    require(added || q->model[0] == '\0', "a model that was not asked for");
    moe__v1__forward_stream_request__free_unpacked(q, NULL);

    moe_mutex_lock(&f->lock);
    require(f->calls < FAKE_CALLS_MAX, "too many calls");
    j->mood = f->calls < f->script_length ? f->script[f->calls] : f->mood;
    f->added[f->calls] = added;
    f->batch[f->calls] = part.batch;
    f->parts[f->calls] = part.parts;
    f->tokens[f->calls++] = j->head.tokens;
    moe_mutex_unlock(&f->lock);
    j->fake = f;
    size_t element = j->head.dtype == MOE__V1__DATA_TYPE__DATA_TYPE_F32 ? 4 : 2;
    require(j->head.layer == FAKE_LAYER && j->head.hidden == FAKE_HIDDEN, "layer or width");
    require(j->x_length == j->head.tokens * FAKE_HIDDEN * element, "length of x");
    require(j->ids == NULL || j->ids_length == j->head.tokens * FAKE_TOP_K * 4, "length of ids");
    require(j->weights == NULL || j->weights_length == j->ids_length, "length of weights");
    require(j->token_ids == NULL || j->token_ids_length == j->head.tokens * 8,
            "length of token ids");
    return j;
}

static void free_job(struct job *j)
{
    free(j->x);
    free(j->ids);
    free(j->weights);
    free(j->token_ids);
    free(j);
}

/* ------------------------------------------------------------------ answers */

static void add_part(struct moe_rpc_out *out, uint32_t field, const void *data, size_t length)
{
    void *copy = malloc(length + 1);
    require(copy != NULL, "memory");
    memcpy(copy, data, length);
    out->parts[out->part_count++] = (struct moe_rpc_part){
        .field = field, .data = copy, .length = length, .release = free, .owner = copy};
}

/* Twice an F32 or BF16 number is the same number with one more in its exponent. */
static void double_rows(const struct job *j, uint8_t *y)
{
    if (j->head.dtype == MOE__V1__DATA_TYPE__DATA_TYPE_F32) {
        for (size_t i = 0; i < j->x_length / 4; i++) {
            float v;
            memcpy(&v, j->x + 4 * i, 4);
            v *= 2;
            memcpy(y + 4 * i, &v, 4);
        }
        return;
    }
    for (size_t i = 0; i < j->x_length / 2; i++) {
        uint32_t u = (uint32_t)(j->x[2 * i] | j->x[2 * i + 1] << 8) << 16;
        float v;
        memcpy(&v, &u, 4);
        v *= 2;
        memcpy(&u, &v, 4);
        y[2 * i] = (uint8_t)(u >> 16);
        y[2 * i + 1] = (uint8_t)(u >> 24);
    }
}

static void add_y(const struct job *j, struct moe_rpc_out *out)
{
    uint8_t *y = calloc(j->x_length + 8, 1);
    require(y != NULL, "memory");
    double_rows(j, y);
    size_t length = j->x_length;
    length = j->mood == FAKE_SHORT_Y ? length - 1 : j->mood == FAKE_LONG_Y ? length + 4 : length;
    if (j->mood != FAKE_NO_Y)
        add_part(out, 15, y, length);
    if (j->mood == FAKE_TWO_Y)
        add_part(out, 15, y, length);
    free(y);
}

static void add_routing(const struct job *j, struct moe_rpc_out *out)
{
    size_t count = (size_t)j->head.tokens * FAKE_TOP_K;
    uint32_t dtype = j->fake->ids_dtype;
    size_t width = dtype == 3 ? 1 : dtype == 4 ? 2 : 4;
    uint8_t *ids = calloc(count, width);
    float *weights = calloc(count, sizeof *weights);
    require(ids != NULL && weights != NULL, "memory");
    for (size_t i = 0; i < count; i++) {
        uint32_t row = (uint32_t)(i / FAKE_TOP_K), k = (uint32_t)(i % FAKE_TOP_K);
        int32_t id = j->ids != NULL         ? j->ids[i]
                     : j->token_ids != NULL ? (int32_t)((j->token_ids[row] + k) % FAKE_EXPERTS)
                                            : fake_id(row, k);
        memcpy(ids + i * width, &id, width);
        weights[i] = j->weights != NULL ? j->weights[i] : fake_weight(k);
    }
    add_part(out, 12, ids, j->mood == FAKE_SHORT_IDS ? count * width - 1 : count * width);
    if (j->mood != FAKE_NO_WEIGHTS)
        add_part(out, 13, weights, count * sizeof *weights);
    free(ids);
    free(weights);
}

static size_t pack_head(const struct job *j, uint8_t *head)
{
    Moe__V1__ForwardStreamResponse a;
    Moe__V1__StageTimes stages = MOE__V1__STAGE_TIMES__INIT;
    moe__v1__forward_stream_response__init(&a); /* its INIT macro warns: a oneof of bytes */
    stages.server_ns = 1000 + j->head.tokens;
    stages.step_ns = 900;
    stages.steps = 1;
    a.epoch = j->fake->epoch;
    a.rehomed =
        j->head.return_rehomed ? (Moe__V1__RehomedExperts *)(uintptr_t)j->fake->rehomed : NULL;
    a.weights_version = j->fake->weights_version;
    a.tokens = j->head.tokens + (j->mood == FAKE_OTHER_TOKENS);
    a.hidden = FAKE_HIDDEN;
    a.dtype = j->mood == FAKE_OTHER_DTYPE ? MOE__V1__DATA_TYPE__DATA_TYPE_U8 : j->head.dtype;
    a.top_k = FAKE_TOP_K + (j->mood == FAKE_OTHER_K);
    a.topk_ids_dtype = j->mood == FAKE_ODD_IDS_DTYPE ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                                     : (Moe__V1__DataType)j->fake->ids_dtype;
    a.stages = &stages;
    a.request_id = j->mood == FAKE_LAST_ID ? 0 : j->id;
    return moe__v1__forward_stream_response__pack(&a, head);
}

static size_t pack_error(const struct job *j, uint8_t *head)
{
    Moe__V1__ForwardStreamResponse a;
    Moe__V1__Error e = MOE__V1__ERROR__INIT;
    moe_mutex_lock(&j->fake->lock);
    const struct moe_status failure = j->fake->failure, *st = &failure;
    moe_mutex_unlock(&j->fake->lock);
    moe__v1__forward_stream_response__init(&a);
    e.code = st->code;
    e.reason = (char *)(uintptr_t)moe_reason_name(st->reason);
    e.message = (char *)(uintptr_t)st->text;
    e.retry_after_ms = st->retry_after_ms;
    a.request_id = j->id;
    a.error = &e;
    return moe__v1__forward_stream_response__pack(&a, head);
}

/* An answer's tensors first and its id in a second head: legal, and no server of ours does it. */
static void put_id_last(struct moe_rpc_out *out, uint64_t id)
{
    uint8_t tail[24];
    Moe__V1__ForwardStreamResponse a;
    moe__v1__forward_stream_response__init(&a);
    a.request_id = id;
    size_t length = moe__v1__forward_stream_response__pack(&a, tail);
    size_t total = out->head_length;
    uint8_t *flat = malloc(total + out->parts[0].length + 64);
    require(flat != NULL && out->part_count == 1, "id last");
    memcpy(flat, out->head, total);
    total += moe_rpc_put_part_prefix(flat + total, 15, out->parts[0].length);
    memcpy(flat + total, out->parts[0].data, out->parts[0].length);
    total += out->parts[0].length;
    memcpy(flat + total, tail, length);
    moe_rpc_out_discard(out);
    out->part_count = 0;
    out->head = flat;
    out->head_length = total + length;
}

/* `head` holds 1024 bytes. */
static void make_answer(const struct job *j, uint8_t *head, struct moe_rpc_out *out)
{
    *out = (struct moe_rpc_out){.head = head, .head_length = pack_head(j, head)};
    if (j->mood == FAKE_NOT_PROTOBUF) {
        memcpy(head, "\x08\x05\x0b", 3); /* field 1 is 5, and then a group begins */
        out->head_length = 3;
        return;
    }
    if (j->mood == FAKE_TRUNCATED) {
        memcpy(head, "\x7a\x40xyz", 5); /* field 15: 64 bytes, of which 3 come */
        out->head_length = 5;
        return;
    }
    if (j->head.return_routing || j->mood == FAKE_UNASKED_ROUTING)
        add_routing(j, out);
    add_y(j, out);
    if (j->mood == FAKE_LAST_ID)
        put_id_last(out, j->id);
}

/* ------------------------------------------------------------------ methods */

static void on_forward(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct job *j = read_job(ctx, m);
    uint8_t head[1024];
    struct moe_rpc_out out;
    if (j->mood == FAKE_FAIL) {
        moe_rpc_fail(call, j->fake->failure);
    } else if (j->mood != FAKE_SILENT) {
        make_answer(j, head, &out);
        moe_rpc_reply(call, &out);
    }
    free_job(j);
}

static void send_answer(struct moe_rpc_call *call, struct job *j)
{
    uint8_t head[1024];
    struct moe_rpc_out out;
    if (j->mood == FAKE_FAIL)
        out = (struct moe_rpc_out){.head = head, .head_length = pack_error(j, head)};
    else
        make_answer(j, head, &out);
    moe_rpc_send(call, &out);
    if (j->mood == FAKE_LAST_ID)
        free((void *)(uintptr_t)out.head);
    free_job(j);
}

static void send_unknown(struct moe_rpc_call *call, struct job *j)
{
    uint8_t head[1024];
    struct moe_rpc_out out;
    uint64_t id = j->id;
    j->id = id + (UINT64_C(1) << 40);
    make_answer(j, head, &out);
    moe_rpc_send(call, &out);
    j->id = id;
}

/* Held answers leave after the one that ends the holding, the newest first. */
static void send_held(struct moe_rpc_call *call)
{
    struct job *j = moe_rpc_call_user(call);
    moe_rpc_call_set_user(call, NULL);
    while (j != NULL) {
        struct job *next = j->next;
        send_answer(call, j);
        j = next;
    }
}

static void on_stream(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    struct job *j = read_job(ctx, m);
    if (j->mood == FAKE_HELD) {
        j->next = moe_rpc_call_user(call);
        moe_rpc_call_set_user(call, j);
    } else if (j->mood == FAKE_SILENT) {
        free_job(j);
    } else if (j->mood == FAKE_END) {
        free_job(j);
        moe_rpc_finish(call);
        return;
    } else {
        if (j->mood == FAKE_UNKNOWN_ID)
            send_unknown(call, j);
        send_answer(call, j);
        send_held(call);
    }
    moe_rpc_read_next(call);
}

static void on_stream_done(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    for (struct job *j = moe_rpc_call_user(call); j != NULL;) {
        struct job *next = j->next;
        free_job(j);
        j = next;
    }
}

static void on_info(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct fake *f = ctx;
    moe_rpc_msg_free(m);
    char *workers[16];
    moe_mutex_lock(&f->lock); /* the group is known by now */
    moe_mutex_unlock(&f->lock);
    require(f->worker_count <= 16, "too many workers");
    for (uint32_t i = 0; i < f->worker_count; i++)
        workers[i] = (char *)(uintptr_t)f->workers[i].endpoint;
    Moe__V1__GetServerInfoResponse a = MOE__V1__GET_SERVER_INFO_RESPONSE__INIT;
    a.name = (char *)(uintptr_t) "moe-worker";
    a.version = (char *)(uintptr_t) "9.8.7";
    a.backend = (char *)(uintptr_t) "cpu";
    a.coordinator = (char *)(uintptr_t) "127.0.0.1:1";
    a.max_message_bytes = 2 << 20;
    a.max_tokens_per_request = FAKE_MAX_TOKENS;
    a.max_tokens_per_step = 256;
    a.slot = f->slot;
    a.epoch = 7;
    a.workers = workers;
    a.n_workers = f->worker_count;
    char *models[] = {(char *)(uintptr_t) "fake", (char *)(uintptr_t)FAKE_ADDED};
    a.models = models;
    a.n_models = 2;
    char *extensions[] = {(char *)(uintptr_t) "another", (char *)(uintptr_t) "batch_parts"};
    a.extensions = extensions;
    a.n_extensions = f->joins_parts ? 2 : 1;
    uint8_t head[1024];
    struct moe_rpc_out out = {.head = head,
                              .head_length = moe__v1__get_server_info_response__pack(&a, head)};
    moe_rpc_reply(call, &out);
}

static void on_model(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    const struct fake *f = ctx;
    uint8_t bytes[512];
    size_t length;
    struct moe_status st = moe_rpc_msg_flatten(m, bytes, sizeof bytes, &length);
    require(!moe_failed(&st), st.text);
    moe_rpc_msg_free(m);
    Moe__V1__GetModelRequest *q = moe__v1__get_model_request__unpack(NULL, length, bytes);
    require(q != NULL, "a request that is no GetModelRequest");
    bool added = strcmp(q->model, FAKE_ADDED) == 0, known = added || q->model[0] == '\0';
    moe__v1__get_model_request__free_unpacked(q, NULL);
    if (!known) {
        moe_rpc_fail(call, moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "no such model"));
        return;
    }
    Moe__V1__LayerInfo layer = MOE__V1__LAYER_INFO__INIT;
    layer.layer = FAKE_LAYER;
    layer.hidden = FAKE_HIDDEN;
    layer.experts = FAKE_EXPERTS;
    layer.top_k = FAKE_TOP_K;
    layer.intermediate = 16;
    layer.routes_by_token_id = !added;
    layer.vocabulary = added ? 0 : FAKE_VOCABULARY;
    Moe__V1__LayerInfo *layers[] = {&layer};
    Moe__V1__GetModelResponse a = MOE__V1__GET_MODEL_RESPONSE__INIT;
    a.model = (char *)(uintptr_t)(added ? FAKE_ADDED : "fake");
    a.family = (char *)(uintptr_t) "mixtral";
    a.layers = layers;
    a.n_layers = 1;
    a.weights_version = f->weights_version;
    a.epoch = 7;
    uint8_t head[256];
    struct moe_rpc_out out = {.head = head,
                              .head_length = moe__v1__get_model_response__pack(&a, head)};
    moe_rpc_reply(call, &out);
}

/* ------------------------------------------------------------------ life */

static void start_one(struct fake *f, const struct moe_rpc_method *more, size_t more_count)
{
    enum { OWN = 4 };
    struct moe_rpc_method methods[OWN + FAKE_MORE_METHODS_MAX] = {
        {.path = "/moe.v1.ExpertService/Forward",
         .kind = MOE_RPC_UNARY,
         .message = on_forward,
         .ctx = f},
        {.path = "/moe.v1.ExpertService/ForwardStream",
         .kind = MOE_RPC_STREAM,
         .message = on_stream,
         .done = on_stream_done,
         .ctx = f},
        {.path = "/moe.v1.ExpertService/GetServerInfo",
         .kind = MOE_RPC_UNARY,
         .message = on_info,
         .ctx = f},
        {.path = "/moe.v1.ExpertService/GetModel",
         .kind = MOE_RPC_UNARY,
         .message = on_model,
         .ctx = f},
    };
    require(more_count <= FAKE_MORE_METHODS_MAX, "too many methods");
    for (size_t i = 0; i < more_count; i++) {
        methods[OWN + i] = more[i];
        methods[OWN + i].ctx = f;
    }
    struct moe_rpc_server_config config = {
        .listen = "127.0.0.1:0",
        .shards = 1,
        .max_message_bytes = 8 << 20,
        .max_reading_bytes = 64 << 20,
        .max_waiting_reads = 1024,
        .max_concurrent_streams = 1024,
        .methods = methods,
        .method_count = OWN + more_count,
    };
    struct moe_status st = moe_rpc_server_start(&config, &f->server);
    require(!moe_failed(&st), st.text);
    snprintf(f->endpoint, sizeof f->endpoint, "127.0.0.1:%u", moe_rpc_server_port(f->server));
}

void fake_start(struct fake *all, uint32_t count)
{
    fake_start_with(all, count, NULL, 0);
}

void fake_start_with(struct fake *all, uint32_t count, const struct moe_rpc_method *more,
                     size_t more_count)
{
    for (uint32_t i = 0; i < count; i++) {
        all[i] = (struct fake){.slot = i, .weights_version = 1, .ids_dtype = 3, .epoch = 7};
        moe_mutex_init(&all[i].lock);
        fake_fail_with(&all[i], moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "on demand"));
        start_one(&all[i], more, more_count);
    }
    for (uint32_t i = 0; i < count; i++) {
        moe_mutex_lock(&all[i].lock);
        all[i].workers = all;
        all[i].worker_count = count;
        moe_mutex_unlock(&all[i].lock);
    }
}

void fake_stop(struct fake *all, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        moe_rpc_server_drain(all[i].server, moe_clock_ns());
        moe_rpc_server_stop(all[i].server);
        moe_mutex_destroy(&all[i].lock);
    }
}

struct fake fakes[FAKES];

int start_fakes(void **state)
{
    (void)state;
    fake_start(fakes, FAKES);
    return 0;
}

int stop_fakes(void **state)
{
    (void)state;
    fake_stop(fakes, FAKES);
    return 0;
}

void fake_fail_with(struct fake *f, struct moe_status failure)
{
    moe_mutex_lock(&f->lock);
    f->failure = failure;
    moe_mutex_unlock(&f->lock);
}

uint32_t fake_calls(struct fake *f)
{
    moe_mutex_lock(&f->lock);
    uint32_t calls = f->calls;
    moe_mutex_unlock(&f->lock);
    return calls;
}

void fake_script(struct fake *f, enum fake_mood then, uint32_t length, const enum fake_mood *script)
{
    require(length <= FAKE_SCRIPT_MAX, "script too long");
    moe_mutex_lock(&f->lock);
    if (length > 0)
        memcpy(f->script, script, length * sizeof *script);
    f->script_length = length;
    f->mood = then;
    f->calls = 0;
    moe_mutex_unlock(&f->lock);
}
