/* SPDX-License-Identifier: Apache-2.0 */
/* The ExpertService over loopback; see service_fixture.h. */
#include "service_fixture.h"

#include "base/clock.h"
#include "proto/descriptors.h"

static void open_server(struct service *s)
{
    struct moe_rpc_method methods[MOE_SERVICE_METHODS + MOE_REGION_SERVICE_METHODS];
    moe_service_methods(s->service, methods);
    moe_region_service_methods(s->regions, &methods[MOE_SERVICE_METHODS]);
    struct moe_rpc_server_config config = {
        .listen = "127.0.0.1:0",
        .max_message_bytes = SERVICE_MESSAGE,
        .max_reading_bytes = 4 * SERVICE_MESSAGE,
        .max_waiting_reads = 256,
        .max_concurrent_streams = 128,
        .methods = methods,
        .method_count = sizeof methods / sizeof *methods,
        .descriptors = moe_proto_descriptors,
        .descriptors_length = (size_t)(moe_proto_descriptors_end - moe_proto_descriptors),
    };
    assert_ok(moe_rpc_server_start(&config, &s->server));
    service_connect(s, &s->client, &s->channel);
}

void service_connect(const struct service *s, struct moe_rpc_client **client,
                     struct moe_rpc_channel **channel)
{
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%u", (unsigned)moe_rpc_server_port(s->server));
    struct moe_rpc_channel_config config = {.target = target, .own_connection = true};
    assert_ok(moe_rpc_client_create(client));
    assert_ok(moe_rpc_channel_open(*client, &config, channel));
}

void service_start_view(struct service *s)
{
    const char *workers[] = {"127.0.0.1:1"};
    worker_start_view(&s->worker);
    assert_ok(moe_service_set_model(s->service, "toy", TOY_DIGEST));
    assert_ok(moe_service_set_view(s->service, s->worker.epoch, workers, 1));
}

static uint64_t no_time(void)
{
    return 1;
}

void service_hold_lease(struct service *s, bool held)
{
    moe_lease_gate_set(&s->lease, &(struct moe_lease){.until_ns = held ? 2 : 0});
}

static void on_report(void *ctx, const struct moe_group_model_report *report)
{
    struct service *s = ctx;
    s->reported = report->status;
    atomic_fetch_add(&s->reports, 1);
}

static void on_progress(void *ctx, uint32_t model, uint64_t loaded_bytes, uint64_t total_bytes)
{
    (void)ctx;
    (void)model;
    assert_true(loaded_bytes <= total_bytes);
}

static void on_change(void *ctx, uint64_t epoch, uint32_t model, bool serve)
{
    struct service *s = ctx;
    assert_int_equal(epoch, s->worker.epoch);
    worker_order_change(&s->worker, model, serve);
}

static void open_models(struct service *s)
{
    const struct moe_models_config config = {
        .backend = &moe_backend_cpu,
        .device = s->worker.device,
        .engine = s->worker.engine,
        .default_model = "toy",
        .default_layers = WORKER_LAYERS,
        .widths = {.hidden = WORKER_HIDDEN, .experts = 300, .top_k = 3},
        .metrics = s->metrics,
        .report = on_report,
        .progress = on_progress,
        .change = on_change,
        .ctx = s,
    };
    assert_ok(moe_models_create(&config, &s->models));
    s->worker.models = s->models;
}

static void open_regions(struct service *s, const struct moe_service_info *info, uint64_t bytes,
                         uint64_t identity_bytes, const char *socket, struct moe_progress *progress)
{
    const struct moe_region_service_config config = {
        .info = *info,
        .service = s->service,
        .engine = s->worker.engine,
        .staging = s->staging,
        .backend = worker_backend,
        .device = s->worker.device,
        .metrics = s->metrics,
        .progress = progress,
        .bytes = bytes,
        .identity_bytes = identity_bytes,
        .socket = socket,
    };
    assert_ok(moe_region_service_create(&config, &s->regions));
}

bool service_trains = true;

uint16_t service_experts[SERVICE_VOCABULARY][2] = {{0, 1}, {7, 2}, {3, 4}, {5, 6}, {1, 0},
                                                   {2, 6}, {4, 7}, {6, 3}, {0, 5}, {7, 1}};
static struct moe_token_table table = {
    .layer = 1, .vocabulary = SERVICE_VOCABULARY, .top_k = 2, .ids = service_experts[0]};

void service_open(struct service *s)
{
    service_open_shared(s, 0, 0, NULL, NULL);
}

void service_open_shared(struct service *s, uint64_t bytes, uint64_t identity_bytes,
                         const char *socket, struct moe_progress *progress)
{
    memset(s, 0, sizeof *s);
    moe_lease_gate_init(&s->lease, no_time);
    service_hold_lease(s, true);
    worker_open(&s->worker);
    assert_ok(moe_staging_create(&moe_backend_cpu, s->worker.device, SERVICE_BUDGET, &s->staging));
    assert_ok(moe_metrics_create(&s->metrics));
    open_models(s);
    struct moe_service_config config = {
        .info = {.model = "toy",
                 .family = "mixtral",
                 .backend = "cpu",
                 .layers = s->worker.specs,
                 .layer_count = WORKER_LAYERS,
                 .token_tables = {.of = &table, .count = 1},
                 .max_message_bytes = SERVICE_MESSAGE,
                 .max_tokens_per_request = SERVICE_TOKENS,
                 .max_tokens_per_step = WORKER_BUCKET,
                 .max_bytes_in_flight = SERVICE_BUDGET,
                 .regions = bytes != 0},
        .engine = s->worker.engine,
        .staging = s->staging,
        .models = s->models,
        .metrics = s->metrics,
        .lease = service_trains ? &s->lease : NULL,
    };
    assert_ok(moe_service_create(&config, &s->service));
    open_regions(s, &config.info, bytes, identity_bytes, socket, progress);
    assert_ok(moe_service_set_coordinator(s->service, "127.0.0.1:2"));
    service_start_view(s);
    open_server(s);
}

void service_close(struct service *s)
{
    moe_rpc_channel_close(s->channel);
    moe_rpc_client_destroy(s->client);
    moe_rpc_server_drain(s->server, moe_clock_ns() + 5 * MOE_NS_PER_S);
    moe_rpc_server_stop(s->server);
    moe_region_service_stop(s->regions);
    worker_stop_view(&s->worker);
    moe_models_stop(s->models);
    moe_engine_destroy(s->worker.engine);
    s->worker.engine = NULL;
    moe_region_service_destroy(s->regions);
    moe_staging_destroy(s->staging); /* waits for the last buffer */
    moe_service_destroy(s->service);
    moe_models_destroy(s->models);
    moe_metrics_destroy(s->metrics);
    worker_close(&s->worker);
}

struct service service;

int open_service(void **state)
{
    (void)state;
    service_open(&service);
    return 0;
}

int close_service(void **state)
{
    (void)state;
    service_close(&service);
    return 0;
}

/* ----------------------------------------------------------------------- messages */

static ProtobufCBinaryData borrow(void *data, size_t length)
{
    return (ProtobufCBinaryData){.len = length, .data = data};
}

void ask_fill(Ask *ask, const struct service *s, const struct request *r, bool return_routing)
{
    const struct moe_work *w = &r->work;
    const struct moe_layer_spec *spec = s->worker.specs[r->layer];
    size_t pairs = (size_t)w->tokens * spec->router.top_k;
    moe__v1__forward_stream_request__init(ask);
    ask->layer = w->layer;
    ask->tokens = w->tokens;
    ask->hidden = spec->hidden;
    ask->dtype = w->dtype == MOE_DTYPE_F32 ? MOE__V1__DATA_TYPE__DATA_TYPE_F32
                                           : MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
    ask->routing_mode = (Moe__V1__RoutingMode)(w->mode + 1);
    ask->return_routing = return_routing;
    if (w->mode != MOE_ROUTE_SERVER) {
        ask->topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_I32;
        ask->topk_ids = borrow(r->ids_in, pairs * sizeof *r->ids_in);
    }
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        ask->topk_weights = borrow(r->weights_in, pairs * sizeof *r->weights_in);
    ask->x_data = borrow(r->x, (size_t)w->tokens * spec->hidden * moe_dtype_bytes(w->dtype));
}

struct bytes ask_pack(const Ask *ask)
{
    struct bytes b = {.length = moe__v1__forward_stream_request__get_packed_size(ask)};
    b.data = malloc(b.length + 1);
    assert_non_null(b.data);
    moe__v1__forward_stream_request__pack(ask, b.data);
    return b;
}

Answer *answer_read(struct moe_rpc_msg *m)
{
    size_t length = moe_rpc_msg_length(m);
    uint8_t *flat = malloc(length + 1);
    assert_non_null(flat);
    assert_ok(moe_rpc_msg_flatten(m, flat, length, &length));
    Answer *answer = moe__v1__forward_stream_response__unpack(NULL, length, flat);
    assert_non_null(answer);
    free(flat);
    moe_rpc_msg_free(m);
    return answer;
}

void answer_free(Answer *answer)
{
    moe__v1__forward_stream_response__free_unpacked(answer, NULL);
}

struct moe_status call_forward(struct service *s, const struct bytes *message, Answer **answer)
{
    const struct moe_rpc_call_options options = {.deadline_ns = moe_clock_ns() + 30 * MOE_NS_PER_S,
                                                 .wait_for_ready = true};
    const struct moe_rpc_out out = {.head = message->data, .head_length = message->length};
    struct moe_rpc_msg *reply;
    MOE_TRY(moe_rpc_call_wait(s->channel, "/moe.v1.ExpertService/Forward", &options, &out, &reply));
    *answer = answer_read(reply);
    return moe_ok();
}

struct moe_status call_ask(struct service *s, const Ask *ask, Answer **answer)
{
    struct bytes b = ask_pack(ask);
    struct moe_status st = call_forward(s, &b, answer);
    free(b.data);
    return st;
}

/* --------------------------------------------------------------------------- checks */

static int32_t id_at(const Answer *answer, size_t i)
{
    const uint8_t *data = answer->topk_ids.data;
    uint16_t wide;
    int32_t full;
    switch (answer->topk_ids_dtype) {
    case MOE__V1__DATA_TYPE__DATA_TYPE_U8: return data[i];
    case MOE__V1__DATA_TYPE__DATA_TYPE_U16: memcpy(&wide, data + 2 * i, 2); return wide;
    default: memcpy(&full, data + 4 * i, 4); return full;
    }
}

void answer_check(const struct service *s, struct request *r, const Answer *answer)
{
    const struct moe_work *w = &r->work;
    const struct moe_layer_spec *spec = s->worker.specs[r->layer];
    size_t pairs = (size_t)w->tokens * spec->router.top_k;
    assert_int_equal(answer->epoch, s->worker.epoch);
    assert_int_equal(answer->weights_version, 1);
    assert_int_equal(answer->tokens, w->tokens);
    assert_int_equal(answer->hidden, spec->hidden);
    assert_int_equal(answer->dtype, w->dtype);
    assert_int_equal(answer->top_k, spec->router.top_k);
    assert_non_null(answer->stages);
    assert_true(answer->stages->step_ns > 0);
    assert_true(answer->stages->server_ns > answer->stages->queue_ns);
    assert_true(answer->stages->step_tokens > 0 && answer->stages->steps > 0);
    assert_int_equal(answer->y_data.len,
                     pairs / spec->router.top_k * spec->hidden * moe_dtype_bytes(w->dtype));
    memcpy(r->y, answer->y_data.data, answer->y_data.len);
    assert_int_equal(answer->topk_weights.len, pairs * sizeof(float));
    memcpy(r->weights_out, answer->topk_weights.data, answer->topk_weights.len);
    for (size_t i = 0; i < pairs; i++)
        r->ids_out[i] = id_at(answer, i);
    request_check(r, &s->worker);
}

void assert_serves(struct service *s)
{
    struct request r;
    Ask ask;
    Answer *answer;
    request_fill(&r, &s->worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, s, &r, true);
    assert_ok(call_ask(s, &ask, &answer));
    answer_check(s, &r, answer);
    answer_free(answer);
    request_free(&r);
}

void sample_fill(struct sample *b, const struct service *s)
{
    struct request r;
    request_fill(&r, &s->worker, 0, SAMPLE_TOKENS, MOE_DTYPE_F32, MOE_ROUTE_IDS_WEIGHTS);
    moe__v1__retain_for_backward__init(&b->retain);
    ask_fill(&b->ask, s, &r, false);
    memcpy(b->x, r.x, sizeof b->x);
    memcpy(b->ids, r.ids_in, sizeof b->ids);
    memcpy(b->weights, r.weights_in, sizeof b->weights);
    memset(b->token_ids, 0, sizeof b->token_ids);
    b->ask.x_data.data = (uint8_t *)b->x;
    b->ask.topk_ids.data = (uint8_t *)b->ids;
    b->ask.topk_weights.data = (uint8_t *)b->weights;
    request_free(&r);
}

struct bytes random_message(const struct service *s)
{
    struct request r;
    Ask ask;
    request_fill(&r, &s->worker, (int)random_below(2), 1 + random_below(4),
                 random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                 (enum moe_routing_mode)random_below(3));
    ask_fill(&ask, s, &r, random_below(2) == 0);
    struct bytes b = ask_pack(&ask);
    request_free(&r);
    return b;
}
