/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a BackwardRequest and as the body of a training ticket. A request is refused with a
 * typed error and leaks no memory; or all its tensors, from the message or a retained pass, have
 * the sizes of the layer, and its answer is built and recorded as after a run. A body is refused,
 * or packing the unpacked call gives an equal call. */
#include "driver.h"
#include "request_world.h"

#include "moe/v1/training.pb-c.h"
#include "moe/v1/worker.pb-c.h"
#include "service/training_request.h"

static void destroy(struct moe_trainer *t)
{
    MOE_INVARIANT(t == NULL);
}

static const struct moe_training training_table = {.trainer_destroy = destroy};
static const struct moe_backend memory = {
    .name = "memory", .training = &training_table, .mem_alloc = take, .mem_free = give};

static struct moe_train *train;

static void open_once(void)
{
    if (train != NULL)
        return;
    const struct moe_train_config config = {.backend = &memory,
                                            .specs = specs,
                                            .layer_count = 1,
                                            .trainer = {.optimizer = MOE_OPTIMIZER_SGD},
                                            .retained_bytes = 1 << 16,
                                            .retained_ns = UINT32_MAX};
    open_staging(&memory);
    struct moe_status st = moe_train_create(&config, &train);
    MOE_INVARIANT(!moe_failed(&st));
}

/* A pass of 3 tokens under ("s", 1), which a request without x finds. */
static void retain_pass(void)
{
    struct moe_pass_record *r;
    size_t x = sizeof(float) * TOKENS * HIDDEN, pairs = sizeof(float) * TOKENS * TOP_K;
    const struct moe_retained_pass pass = {.layer = 2,
                                           .tokens = TOKENS,
                                           .top_k = TOP_K,
                                           .dtype = MOE_DTYPE_F32,
                                           .mode = MOE_ROUTE_IDS_WEIGHTS,
                                           .weights_version = 1,
                                           .lineage = 1,
                                           .x_bytes = x,
                                           .ids_at = x,
                                           .weights_at = x + pairs};
    struct moe_status st = moe_pass_store_reserve(moe_train_passes(train), x + 2 * pairs, 0, &r);
    MOE_INVARIANT(!moe_failed(&st));
    memcpy(r->head, &pass, sizeof pass);
    moe_pass_store_put(moe_train_passes(train), r, "s", 1, UINT64_MAX / 2);
}

/* Reads and writes all memory that a backend would. */
static void run_pass(struct moe_training_request *r)
{
    const struct moe_train_work *w = &r->work;
    size_t wide = (size_t)w->tokens * HIDDEN * moe_dtype_bytes(w->dtype);
    size_t pairs = (size_t)w->tokens * TOP_K;
    MOE_INVARIANT(w->tokens >= 1 && w->tokens <= info.max_tokens_per_step);
    memcpy(w->dx, w->x, wide);
    memcpy(w->dx, w->dy, wide);
    for (size_t i = 0; i < pairs; i++) {
        MOE_INVARIANT(w->ids[i] >= -1 && w->ids[i] < 8);
        if (w->dweights != NULL)
            w->dweights[i] = w->mode == MOE_ROUTE_IDS_WEIGHTS ? w->weights[i] : 1;
    }
}

static void answer(struct moe_training_request *r)
{
    uint8_t head[MOE_BACKWARD_HEAD_MAX];
    struct moe_rpc_out out;
    const struct moe_status fine = moe_ok();
    moe_backward_cache(r, train, &fine);
    MOE_INVARIANT(moe_backward_matches(r->cached, r));
    moe_backward_answer(r, r->cached, false, head, &out);
    moe_rpc_out_discard(&out);
}

static void try_request(const uint8_t *data, size_t size)
{
    const struct moe_backward_context context = {.info = &info,
                                                 .staging = staging,
                                                 .training = train,
                                                 .worker = {.epoch = 5, .model = &served}};
    struct moe_rpc_piece piece = {data, size};
    struct moe_rpc_msg *m = moe_rpc_msg_from_pieces(&piece, 1);
    struct moe_training_request r;
    MOE_INVARIANT(m != NULL);
    retain_pass();
    struct moe_status st = moe_backward_parse(&r, &context, m);
    moe_rpc_msg_free(m);
    MOE_INVARIANT(!moe_failed(&st) || st.reason != MOE_REASON_NONE);
    if (!moe_failed(&st) && r.whole) {
        st = moe_backward_prepare(&r, &context);
        if (!moe_failed(&st)) {
            run_pass(&r);
            answer(&r);
        }
    }
    moe_backward_release(&r);
    check_memory_is_back();
}

static void try_body(const uint8_t *data, size_t size)
{
    struct moe_ticket t = {.kind = (enum moe_step_kind)(MOE_STEP_BACKWARD + size % 7)};
    struct moe_train_call call, again;
    if (size > MOE_TRAINING_BODY_MAX)
        return;
    t.descriptor.length = (uint32_t)size;
    if (size > 0)
        memcpy(t.descriptor.body, data, size);
    struct moe_status st = moe_train_call_read(&t, &call);
    if (moe_failed(&st))
        return;
    moe_train_call_pack(&call, t.descriptor.body, &t.descriptor.length);
    st = moe_train_call_read(&t, &again);
    MOE_INVARIANT(!moe_failed(&st) && strcmp(call.session, again.session) == 0 &&
                  call.id == again.id && strcmp(call.name, again.name) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    open_once();
    try_request(data, size);
    try_body(data, size);
    return 0;
}

static size_t seed_body(size_t i, uint8_t *packed)
{
    static char session[] = "s", name[] = "n";
    static uint64_t content[4] = {1, 2, 3, 4};
    Moe__V1__TrainingBody b;
    moe__v1__training_body__init(&b);
    b.id = i;
    b.content = content;
    b.n_content = 4;
    if (i % 2 == 0)
        b.session = session;
    Moe__V1__SaveCheckpointRequest q;
    moe__v1__save_checkpoint_request__init(&q);
    q.step_id = i;
    q.name = name;
    uint8_t request[64];
    if (i % 2 != 0) {
        b.request.len = moe__v1__save_checkpoint_request__pack(&q, request);
        b.request.data = request;
    }
    return moe__v1__training_body__pack(&b, packed);
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t packed[4096];
    static uint8_t tensor[TOKENS * HIDDEN * 4], ids[TOKENS * TOP_K];
    static float weights[TOKENS * TOP_K];
    static char session[] = "s";
    Moe__V1__BackwardRequest q;
    *data = packed;
    if (i >= 20)
        return 0;
    if (i >= 12)
        return seed_body(i, packed);
    moe__v1__backward_request__init(&q);
    q.layer = 2;
    q.tokens = TOKENS;
    q.hidden = HIDDEN;
    q.dtype = i % 2 == 0 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32 : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    q.session = session;
    q.micro_batch_id = 1;
    q.return_weight_gradients = i % 4 < 2;
    q.aux_coeff = (double)i / 8;
    q.dy = (ProtobufCBinaryData){sizeof tensor / (i % 2 + 1), tensor};
    if (i % 3 > 0) {
        q.x = q.dy;
        q.routing_mode = (Moe__V1__RoutingMode)(i % 3 + 1);
        q.topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_U8;
        q.topk_ids = (ProtobufCBinaryData){sizeof ids, ids};
    }
    if (i % 3 > 1)
        q.topk_weights = (ProtobufCBinaryData){sizeof weights, (uint8_t *)weights};
    return moe__v1__backward_request__pack(&q, packed);
}
