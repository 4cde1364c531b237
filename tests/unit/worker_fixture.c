/* SPDX-License-Identifier: Apache-2.0 */
/* A group of one worker; see worker_fixture.h. */
#include "worker_fixture.h"

#include "base/clock.h"
#include "engine_hooks.h"

#include <math.h>
#include <time.h>

/* ------------------------------------------------------------------------ memory */

static void random_fill(void *to, enum moe_dtype dtype, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) {
        float f = scale * random_normal();
        if (dtype == MOE_DTYPE_F32)
            ((float *)to)[i] = f;
        else
            ((uint16_t *)to)[i] = moe_f32_to_bf16(f);
    }
}

static void *zeroed(size_t bytes)
{
    void *p = calloc(1, bytes);
    assert_non_null(p);
    return p;
}

/* ------------------------------------------------------------------------- layers */

static void describe_layers(struct worker *w)
{
    w->spec[0] = (struct moe_layer_spec){
        .layer = 1,
        .hidden = 24,
        .experts = 8,
        .intermediate = 16,
        .router = {.score = MOE_SCORE_SOFTMAX,
                   .top_k = 2,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 1},
    };
    w->spec[1] = (struct moe_layer_spec){
        .layer = 4,
        .hidden = 40,
        .experts = 300,
        .intermediate = 8,
        .router = {.score = MOE_SCORE_SIGMOID,
                   .top_k = 3,
                   .select_bias = true,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 2.5f,
                   .zero_experts = 4},
        .shared_intermediate = 8,
    };
}

static void upload_weight(struct worker *w, int layer, enum moe_weight weight, uint32_t expert,
                          size_t rows, size_t columns)
{
    size_t bytes = rows * columns * sizeof(float);
    float *data = zeroed(bytes);
    random_fill(data, MOE_DTYPE_F32, rows * columns, 1.0f / sqrtf((float)columns));
    assert_ok(
        moe_backend_cpu.layer_upload(w->layers[layer], weight, expert, MOE_DTYPE_F32, data, bytes));
    assert_ok(moe_oracle_upload(w->oracles[layer], weight, expert, MOE_DTYPE_F32, data, bytes));
    free(data);
}

static void create_layer(struct worker *w, int layer)
{
    const struct moe_layer_spec *spec = w->specs[layer] = &w->spec[layer];
    for (uint32_t e = 0; e <= spec->experts; e++)
        w->offset[layer][e] = e;
    struct moe_placement *placement = &w->placement[layer];
    *placement = (struct moe_placement){.version = 1,
                                        .experts = spec->experts,
                                        .slots = 1,
                                        .offset = w->offset[layer],
                                        .slot = w->slot[layer]};
    assert_ok(moe_backend_cpu.layer_create(w->device, spec, placement, 0, &w->layers[layer]));
    assert_ok(moe_oracle_create(spec, &w->oracles[layer]));
    for (enum moe_weight weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
        size_t rows, columns;
        moe_weight_shape(spec, weight, &rows, &columns);
        uint32_t entries = rows == 0 ? 0 : moe_weight_is_expert(weight) ? spec->experts : 1;
        for (uint32_t e = 0; e < entries; e++)
            upload_weight(w, layer, weight, e, rows, columns);
    }
    assert_ok(moe_backend_cpu.layer_finish(w->layers[layer]));
}

/* ---------------------------------------------------------------------- sequencing */

static void run_due_tickets(struct worker *w)
{
    struct moe_ticket ticket;
    while (moe_sequencer_next(w->sequencer, &ticket)) {
        w->tickets++;
        moe_engine_run(w->engine, &ticket);
    }
}

static void on_announce(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                        uint32_t tokens)
{
    struct worker *w = ctx;
    struct moe_step_key key = {layer, kind, dtype};
    moe_mutex_lock(&w->lock);
    if (w->epoch > 0) {
        struct moe_status st = moe_sequencer_work(w->sequencer, 0, &key, tokens);
        MOE_INVARIANT(!moe_failed(&st));
        run_due_tickets(w);
    }
    moe_mutex_unlock(&w->lock);
}

static void on_heartbeat(void *ctx, uint32_t layer)
{
    struct worker *w = ctx;
    moe_mutex_lock(&w->lock);
    w->beats++;
    moe_sequencer_beat(w->sequencer, layer);
    run_due_tickets(w);
    moe_mutex_unlock(&w->lock);
}

static void on_finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                        uint64_t lost_slots)
{
    struct worker *w = ctx;
    MOE_INVARIANT(lost_slots == 0);
    moe_mutex_lock(&w->lock);
    if (ticket->epoch == w->epoch) {
        struct moe_status st =
            moe_sequencer_done(w->sequencer, 0, ticket->seq, !moe_failed(&status));
        MOE_INVARIANT(!moe_failed(&st));
        run_due_tickets(w);
    }
    moe_mutex_unlock(&w->lock);
}

static void on_model_changed(void *ctx, uint32_t model, bool served, uint64_t epoch)
{
    struct worker *w = ctx;
    MOE_INVARIANT(model != 0 && epoch == w->epoch);
    atomic_fetch_add(served ? &w->added : &w->removed, 1);
    if (w->models != NULL)
        moe_models_changed(w->models, model, served, epoch);
}

void worker_order_change(struct worker *w, uint32_t model, bool serve)
{
    moe_mutex_lock(&w->lock);
    assert_ok(moe_sequencer_change_model(w->sequencer, model, serve));
    run_due_tickets(w);
    moe_mutex_unlock(&w->lock);
}

void worker_change_model(struct worker *w, uint32_t model, bool serve)
{
    _Atomic uint64_t *count = serve ? &w->added : &w->removed;
    uint64_t before = atomic_load(count), limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    struct timespec interval = {.tv_nsec = 100000};
    worker_order_change(w, model, serve);
    while (atomic_load(count) == before) {
        if (moe_clock_ns() > limit)
            fail_msg("a change of models did not end in half a minute");
        nanosleep(&interval, NULL);
    }
}

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

void worker_start_view(struct worker *w)
{
    struct moe_session_config config = {
        .slots = 1,
        .live = 1,
        .epoch = w->epoch + 1,
        .max_tokens = WORKER_BUCKET,
        .max_hidden = WORKER_HIDDEN,
        .max_top_k = 3,
        .max_experts = 300,
        .wait_budget_ms = 2000,
        .allgather = gather_alone,
    };
    assert_ok(moe_backend_cpu.session_join(w->device, &config, &w->session));
    moe_mutex_lock(&w->lock);
    w->epoch++;
    moe_sequencer_begin(w->sequencer, w->epoch, 1, WORKER_BUCKET);
    moe_mutex_unlock(&w->lock);
    moe_engine_start_view(w->engine, w->session, w->epoch, 1, WORKER_BUCKET);
}

void worker_stop_view(struct worker *w)
{
    if (w->session == NULL)
        return;
    moe_engine_stop_view(w->engine);
    moe_backend_cpu.session_leave(w->session);
    w->session = NULL;
}

const struct moe_backend *worker_backend = &moe_backend_cpu;
uint64_t worker_parts_wait_ns = MOE_NS_PER_MS;

void worker_open(struct worker *w)
{
    worker_open_watched(w, NULL);
}

void worker_open_watched(struct worker *w, struct moe_progress *p)
{
    *w = (struct worker){0};
    struct moe_device_config device = {.threads = 2};
    assert_ok(moe_backend_cpu.device_open(&device, &w->device));
    describe_layers(w);
    for (int i = 0; i < WORKER_LAYERS; i++)
        create_layer(w, i);
    moe_mutex_init(&w->lock);
    assert_ok(moe_sequencer_create(&w->sequencer));
    w->placements = w->placement;
    struct moe_engine_config config = {
        .backend = worker_backend,
        .device = w->device,
        .layers = w->layers,
        .specs = w->specs,
        .placements = &w->placements,
        .layer_count = WORKER_LAYERS,
        .max_hidden = WORKER_HIDDEN,
        .max_tokens_per_step = WORKER_BUCKET,
        .max_queued_tokens = WORKER_QUEUE,
        .announce = on_announce,
        .finished = on_finished,
        .model_changed = on_model_changed,
        .progress = p,
        .heartbeat = on_heartbeat,
        .spin_ns = spin_of_test(),
        .parts_wait_ns = worker_parts_wait_ns,
        .ctx = w,
    };
    assert_ok(moe_engine_create(&config, &w->engine));
}

void worker_close(struct worker *w)
{
    moe_engine_destroy(w->engine);
    if (w->session != NULL)
        moe_backend_cpu.session_leave(w->session);
    moe_sequencer_destroy(w->sequencer);
    moe_mutex_destroy(&w->lock);
    for (int i = 0; i < WORKER_LAYERS; i++) {
        moe_backend_cpu.layer_destroy(w->layers[i]);
        moe_oracle_destroy(w->oracles[i]);
    }
    moe_backend_cpu.device_close(w->device);
}

/* ------------------------------------------------------------------------ requests */

static void on_done(struct moe_work *work, struct moe_status status)
{
    struct request *r = work->user;
    r->status = status;
    atomic_fetch_add(&r->done, 1);
}

void request_fill(struct request *r, const struct worker *w, int layer, uint32_t tokens,
                  enum moe_dtype dtype, enum moe_routing_mode mode)
{
    const struct moe_layer_spec *spec = w->specs[layer];
    size_t wide = (size_t)tokens * spec->hidden * moe_dtype_bytes(dtype);
    size_t pairs = (size_t)tokens * spec->router.top_k;
    *r = (struct request){.layer = layer};
    r->x = zeroed(wide);
    r->y = zeroed(wide);
    r->ids_in = zeroed(pairs * sizeof *r->ids_in);
    r->ids_out = zeroed(pairs * sizeof *r->ids_out);
    r->weights_in = zeroed(pairs * sizeof *r->weights_in);
    r->weights_out = zeroed(pairs * sizeof *r->weights_out);
    random_fill(r->x, dtype, (size_t)tokens * spec->hidden, 1);
    random_fill(r->weights_in, MOE_DTYPE_F32, pairs, 1);
    uint32_t all = spec->experts + spec->router.zero_experts, k = spec->router.top_k;
    for (uint32_t t = 0; t < tokens; t++) {
        uint32_t first = random_below(all);
        for (uint32_t i = 0; i < k; i++) /* distinct */
            r->ids_in[t * k + i] = (int32_t)((first + i * 5) % all);
        if (mode == MOE_ROUTE_IDS_WEIGHTS && random_below(4) == 0)
            r->ids_in[t * k + random_below(k)] = -1;
    }
    r->work = (struct moe_work){
        .layer = spec->layer,
        .dtype = dtype,
        .tokens = tokens,
        .mode = mode,
        .x = r->x,
        .ids_in = mode != MOE_ROUTE_SERVER ? r->ids_in : NULL,
        .weights_in = mode == MOE_ROUTE_IDS_WEIGHTS ? r->weights_in : NULL,
        .deadline_ns = MOE_NEVER,
        .y = r->y,
        .ids_out = r->ids_out,
        .weights_out = r->weights_out,
        .done = on_done,
        .user = r,
    };
}

void request_free(struct request *r)
{
    free(r->x);
    free(r->y);
    free(r->ids_in);
    free(r->ids_out);
    free(r->weights_in);
    free(r->weights_out);
}

void request_wait(struct request *r)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    struct timespec interval = {.tv_nsec = 100000};
    while (atomic_load(&r->done) == 0) {
        if (moe_clock_ns() > limit)
            fail_msg("a request was not finished in half a minute");
        nanosleep(&interval, NULL);
    }
}

struct moe_status request_run(struct request *r, struct worker *w)
{
    MOE_TRY(moe_engine_submit(w->engine, &r->work));
    request_wait(r);
    return r->status;
}

static double element(enum moe_dtype dtype, const void *tensor, size_t i)
{
    return dtype == MOE_DTYPE_F32 ? (double)((const float *)tensor)[i]
                                  : (double)moe_bf16_to_f32(((const uint16_t *)tensor)[i]);
}

/* The oracle gets the routing that was used: this checks the path of the rows, and a near-tie of
 * two experts must not matter. */
void request_check(const struct request *r, const struct worker *w)
{
    const struct moe_work *work = &r->work;
    const struct moe_layer_spec *spec = w->specs[r->layer];
    size_t n = (size_t)work->tokens * spec->hidden;
    double *want = zeroed(n * sizeof *want), error = 0, norm = 0;
    uint8_t *mode = zeroed(work->tokens), *state = zeroed(work->tokens);
    memset(mode, MOE_ROUTE_IDS_WEIGHTS | (work->without_shared ? MOE_ROUTE_WITHOUT_SHARED : 0),
           work->tokens);
    assert_ok(moe_oracle_forward(w->oracles[r->layer], work->dtype, work->tokens, r->x, mode,
                                 r->ids_out, r->weights_out, NULL, NULL, state, NULL, want));
    for (size_t i = 0; i < n; i++) {
        double d = element(work->dtype, r->y, i) - want[i];
        error += d * d;
        norm += want[i] * want[i];
    }
    error = norm > 0 ? sqrt(error / norm) : sqrt(error);
    if (!(error <= (work->dtype == MOE_DTYPE_F32 ? 1e-5 : 1e-2)))
        fail_msg("layer %u, %u tokens: relative error %g", work->layer, work->tokens, error);
    if (work->mode != MOE_ROUTE_SERVER)
        assert_memory_equal(r->ids_out, r->ids_in,
                            work->tokens * spec->router.top_k * sizeof *r->ids_in);
    free(want);
    free(mode);
    free(state);
}
