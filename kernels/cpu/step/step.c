/* SPDX-License-Identifier: Apache-2.0 */
/* Running whole steps; see step.h. `run_stages` lists the order of a step, top to bottom.
 *
 * The shared expert runs between sending and receiving rows, while this slot would otherwise wait
 * for its peers. */
#include "cpu/step/step.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "common/session_rules.h"
#include "cpu/exchange/ep.h"
#include "cpu/exchange/session.h"
#include "cpu/step/segments.h"
#include "cpu/training/trainer.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_STEPS = 2 };

struct moe_step {
    struct moe_cpu_steps *owner;
    bool backward; /* backward_args is used, else args */
    struct moe_step_args args;
    struct moe_backward_args backward_args;
    struct moe_step_result result;
    struct moe_status status;
    bool finished;
};

struct moe_cpu_steps {
    struct moe_session *session;
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t work; /* a step was enqueued, or `stop` */
    pthread_cond_t done; /* a step has finished */
    MOE_GUARDED_BY(lock) struct {
        struct moe_step *step[MAX_STEPS]; /* in order of arrival; step_wait removes them */
        uint32_t count;
        bool stop;
    };
};

/* ------------------------------------------------------------------ one step */

/* Memory that lives as long as one step. */
struct step_memory {
    float *hidden; /* [rows, I] */
    float *out;    /* [rows, W]; W = moe_expert_width */
    float *base;   /* [T, H] the shared expert's output; NULL without one */
    void *latent;  /* [2, T, L] of the dtype: the experts' inputs and sums; or NULL */
    void *rows;    /* [T] quantised rows, or NULL */
    struct moe_cpu_snapshot snapshot;
};

static struct moe_status take_floats(struct moe_device *device, size_t rows, size_t columns,
                                     float **out)
{
    size_t bytes;
    if (!moe_size_mul3(rows, columns, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%zu rows of %zu do not fit in memory", rows, columns);
    return moe_cpu_scratch_take(device, bytes, (void **)out);
}

/* ------------------------------------------- retaining for a backward pass */

static struct moe_activation_key retained_key(const struct moe_session *s,
                                              const struct moe_step_args *a)
{
    return (struct moe_activation_key){.layer = a->layer,
                                       .session = s,
                                       .name = a->retain,
                                       .dtype = a->dtype,
                                       .bucket = a->bucket,
                                       .tokens = a->tokens};
}

/* Takes room for gate and up of `in_use` rows, padding included, or `rows` without; false if there
 * is none. */
static bool take_pre(struct moe_session *s, const struct moe_step_args *a,
                     enum moe_activation_part part, uint32_t in_use, uint64_t rows,
                     struct moe_cpu_pre *pre)
{
    const struct moe_activation_key key = retained_key(s, a);
    struct moe_activation_cache *cache = moe_cpu_device_activation_cache(s->device);
    uint32_t inner = part == MOE_ACTIVATION_SHARED ? a->layer->spec.shared_intermediate
                                                   : a->layer->spec.intermediate;
    size_t bytes;
    if (!moe_size_mul3(in_use, 2 * (size_t)inner, sizeof(float), &bytes))
        return false;
    pre->gate = moe_activation_cache_take(cache, &key, part, bytes);
    if (pre->gate == NULL)
        return false;
    pre->up = pre->gate + (size_t)in_use * inner;
    moe_activation_cache_fill(cache, &key, part, rows, in_use, bytes);
    return true;
}

/* Retains all parts or nothing; true if they are retained. */
static bool finish_retaining(struct moe_session *s, const struct moe_step_args *a, bool all)
{
    const struct moe_activation_key key = retained_key(s, a);
    if (a->retain == 0)
        return false;
    if (all)
        return moe_activation_cache_commit(moe_cpu_device_activation_cache(s->device), &key);
    moe_activation_cache_forget(moe_cpu_device_activation_cache(s->device), &key);
    return false;
}

/* A step must not fail for its retained activations, also because its peers wait for it. If memory
 * is short, moe_cpu_scratch_take frees the cache, but not while this step has open pieces. So this
 * drops them. True: the caller tries again. */
static bool drops_retained(struct moe_session *s, const struct moe_step_args *a,
                           const struct moe_status *st, bool *retains)
{
    if (st->code != MOE_RESOURCE_EXHAUSTED || !*retains)
        return false;
    *retains = finish_retaining(s, a, false);
    return true;
}

static struct moe_status take_or_drop(struct moe_session *s, const struct moe_step_args *a,
                                      size_t rows, size_t columns, float **out, bool *retains)
{
    struct moe_status st = take_floats(s->device, rows, columns, out);
    if (drops_retained(s, a, &st, retains))
        st = take_floats(s->device, rows, columns, out);
    return st;
}

/* ---------------------------------------------------------------------- stages */

static bool wants_shared(const struct moe_step_args *a)
{
    uint32_t t = 0;
    while (a->mode != NULL && t < a->tokens && (a->mode[t] & MOE_ROUTE_WITHOUT_SHARED) != 0)
        t++;
    return t < a->tokens;
}

/* *retains becomes false if there is no room to retain gate and up. */
static struct moe_status run_shared(struct moe_session *s, const struct moe_step_args *a,
                                    struct step_memory *m, bool *retains)
{
    const struct moe_layer_spec *spec = &a->layer->spec;
    if (spec->shared_intermediate == 0 || !wants_shared(a))
        return moe_ok();
    MOE_TRY(take_or_drop(s, a, a->tokens, spec->hidden, &m->base, retains));
    memset(m->base, 0, (size_t)a->tokens * spec->hidden * sizeof(float));
    struct moe_cpu_pre pre;
    *retains = *retains && take_pre(s, a, MOE_ACTIVATION_SHARED, a->tokens, a->tokens, &pre);
    struct moe_status st = moe_cpu_shared_retaining(a->layer, a->dtype, a->tokens, a->x,
                                                    *retains ? &pre : NULL, m->base);
    if (drops_retained(s, a, &st, retains))
        st = moe_cpu_shared_retaining(a->layer, a->dtype, a->tokens, a->x, NULL, m->base);
    return st;
}

/* Rows of the tokens as the experts get and give them, [T, W] of the dtype. */
struct expert_rows {
    const void *x;
    void *y;
};

/* Without a latent space these are the step's x and y. */
static struct moe_status enter_latent(struct moe_session *s, const struct moe_step_args *a,
                                      struct step_memory *m, struct expert_rows *e)
{
    const struct moe_layer_spec *spec = &a->layer->spec;
    size_t bytes;
    *e = (struct expert_rows){.x = a->x, .y = a->y};
    if (spec->latent == 0 || a->tokens == 0)
        return moe_ok();
    if (!moe_size_mul3(a->tokens, spec->latent, moe_dtype_bytes(a->dtype), &bytes) ||
        bytes > SIZE_MAX / 2)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%u rows of %u do not fit in memory", a->tokens, spec->latent);
    MOE_TRY(moe_cpu_scratch_take(s->device, 2 * bytes, &m->latent));
    *e = (struct expert_rows){.x = m->latent, .y = (char *)m->latent + bytes};
    return moe_cpu_to_latent(a->layer, a->dtype, a->tokens, a->x, m->latent);
}

/* Sums the experts' rows into y. The shared expert is added outside of the latent space. */
static struct moe_status combine(struct moe_session *s, const struct moe_step_args *a,
                                 const struct step_memory *m, const struct expert_rows *e)
{
    if (m->latent == NULL)
        return moe_cpu_ep_combine(s->ep, m->out, m->base, e->y);
    MOE_TRY(moe_cpu_ep_combine(s->ep, m->out, NULL, e->y));
    return moe_cpu_from_latent(a->layer, a->dtype, a->tokens, e->y, m->base, a->mode,
                               a->token_state, a->y);
}

static struct moe_status receive(struct moe_session *s, const struct moe_step_args *a,
                                 struct moe_rows *rows, bool *retains)
{
    MOE_TRY(moe_cpu_ep_agree(s->ep, NULL));
    struct moe_status st = moe_cpu_ep_receive(s->ep, rows);
    if (drops_retained(s, a, &st, retains))
        st = moe_cpu_ep_receive(s->ep, rows);
    return st;
}

static struct moe_status run_gate_up(struct moe_session *s, const struct moe_step_args *a,
                                     const struct moe_rows *rows, uint64_t count, float *hidden,
                                     bool *retains)
{
    struct moe_cpu_pre pre;
    *retains = *retains &&
               take_pre(s, a, MOE_ACTIVATION_ROUTED, rows->start[rows->local_experts], count, &pre);
    struct moe_status st =
        moe_cpu_gate_up_retaining(a->layer, a->dtype, rows, *retains ? &pre : NULL, hidden);
    if (drops_retained(s, a, &st, retains))
        st = moe_cpu_gate_up_retaining(a->layer, a->dtype, rows, NULL, hidden);
    return st;
}

/* Tokens with an expert that has no live copy get no row. Their ids stay as chosen. */
static void mark_unavailable(const struct moe_session *s, const struct moe_step_args *a)
{
    const struct moe_placement *p = &a->layer->active;
    const uint32_t top_k = a->layer->spec.router.top_k;
    for (uint32_t t = 0; s->config.partial && t < a->tokens; t++)
        for (uint32_t k = 0; a->token_state[t] == MOE_TOKEN_OK && k < top_k; k++) {
            int32_t id = a->ids_out[(size_t)t * top_k + k];
            if (id >= 0 && id < (int32_t)p->experts && p->offset[id] == p->offset[id + 1])
                a->token_state[t] = MOE_TOKEN_UNAVAILABLE;
        }
}

static struct moe_status run_stages(struct moe_session *s, const struct moe_step_args *a,
                                    struct moe_step_result *r, struct step_memory *m)
{
    struct moe_layer *layer = a->layer;
    uint64_t since = moe_clock_ns();
    bool retains = a->retain != 0 && layer->has_trainer && s->config.training;
    MOE_TRY(moe_cpu_session_usable(s));
    MOE_TRY(moe_cpu_router_forward(layer, a->dtype, a->tokens, a->x, a->mode, a->ids_in,
                                   a->weights_in, a->ids_out, a->weights_out, a->token_state));
    mark_unavailable(s, a);
    struct expert_rows e;
    MOE_TRY(enter_latent(s, a, m, &e));
    size_t row_bytes;
    MOE_TRY(moe_cpu_quantise_rows(layer, a->dtype, a->tokens, e.x, &m->rows, &row_bytes));
    moe_cpu_step_lap(r, MOE_STAGE_ROUTER, &since);

    struct moe_cpu_batch batch = {.layer = layer,
                                  .dtype = a->dtype,
                                  .bucket = a->bucket,
                                  .tokens = a->tokens,
                                  .x = e.x,
                                  .rows = m->rows,
                                  .row_bytes = row_bytes,
                                  .ids = a->ids_out,
                                  .weights = a->weights_out,
                                  .token_state = a->token_state,
                                  .mode = a->mode};
    MOE_TRY(moe_cpu_ep_prepare(s->ep, &batch));
    moe_cpu_step_lap(r, MOE_STAGE_PREPARE, &since);
    moe_cpu_ep_send(s->ep);
    moe_cpu_step_lap(r, MOE_STAGE_DISPATCH, &since);
    MOE_TRY(run_shared(s, a, m, &retains));
    moe_cpu_step_lap(r, MOE_STAGE_SHARED, &since);
    struct moe_rows rows;
    MOE_TRY(receive(s, a, &rows, &retains));
    r->rows = moe_cpu_ep_rows(s->ep);
    if (a->counts != NULL)
        moe_cpu_ep_count(s->ep, a->counts);
    moe_cpu_step_lap(r, MOE_STAGE_DISPATCH, &since);

    uint32_t n = rows.start[rows.local_experts];
    MOE_TRY(take_or_drop(s, a, n, layer->spec.intermediate, &m->hidden, &retains));
    MOE_TRY(take_or_drop(s, a, n, moe_expert_width(&layer->spec), &m->out, &retains));
    MOE_TRY(run_gate_up(s, a, &rows, r->rows, m->hidden, &retains));
    moe_cpu_step_lap(r, MOE_STAGE_GEMM1, &since);
    MOE_TRY(moe_cpu_gemm_down(layer, a->dtype, &rows, m->hidden, m->out));
    moe_cpu_step_lap(r, MOE_STAGE_GEMM2, &since);
    MOE_TRY(combine(s, a, m, &e));
    moe_cpu_step_lap(r, MOE_STAGE_COMBINE, &since);
    r->retained = retains;
    return moe_ok();
}

/* A step with its copies of segments, if it has any. */
static struct moe_status run_forward(struct moe_session *s, const struct moe_step_args *args,
                                     struct moe_step_result *r, struct step_memory *m)
{
    uint64_t start = moe_clock_ns();
    MOE_TRY(moe_cpu_snapshot_take(s->device, args, &m->snapshot));
    if (m->snapshot.memory != NULL)
        r->copy_in_ns = moe_clock_ns() - start;
    MOE_TRY(run_stages(s, &m->snapshot.args, r, m));
    start = moe_clock_ns();
    moe_cpu_snapshot_put(s->device, &m->snapshot);
    if (m->snapshot.memory != NULL)
        r->copy_out_ns = moe_clock_ns() - start;
    return moe_ok();
}

static void run(struct moe_session *s, struct moe_step *step)
{
    struct step_memory memory = {0};
    uint64_t start = moe_clock_ns();
    step->result.missing_slot = -1;
    step->result.began_ns = start;
    (void)moe_cpu_ep_take_refusal(s->ep);
    if (step->backward)
        step->status = moe_cpu_backward_run(s, &step->backward_args, &step->result);
    else
        step->status = run_forward(s, &step->args, &step->result, &memory);
    if (!step->backward)
        step->result.retained = finish_retaining(s, &step->args, step->result.retained);
    moe_cpu_scratch_give(s->device, memory.hidden);
    moe_cpu_scratch_give(s->device, memory.out);
    moe_cpu_scratch_give(s->device, memory.base);
    moe_cpu_scratch_give(s->device, memory.latent);
    moe_cpu_scratch_give(s->device, memory.rows);
    moe_cpu_snapshot_free(s->device, &memory.snapshot);
    /* A refused step leaves the session usable: all slots refuse it alike, and no row is in flight.
     */
    step->result.refused = moe_failed(&step->status) && moe_cpu_ep_take_refusal(s->ep);
    if (moe_failed(&step->status) && !step->result.refused)
        moe_cpu_session_fail(s, &step->status);
    if (step->status.reason == MOE_REASON_PEER_LOST)
        step->result.missing_slot = s->missing;
    step->result.total_ns = moe_clock_ns() - start;
}

/* ------------------------------------------------------------------- thread */

static struct moe_step *next_unfinished(const struct moe_cpu_steps *q) MOE_REQUIRES(q->lock)
{
    for (uint32_t i = 0; i < q->count; i++)
        if (!q->step[i]->finished)
            return q->step[i];
    return NULL;
}

static void *run_steps(void *arg)
{
    struct moe_cpu_steps *q = arg;
    moe_mutex_lock(&q->lock);
    for (;;) {
        struct moe_step *step = next_unfinished(q);
        if (step == NULL && q->stop)
            break;
        if (step == NULL) {
            moe_wait(&q->work, &q->lock);
            continue;
        }
        moe_mutex_unlock(&q->lock);
        run(q->session, step);
        moe_mutex_lock(&q->lock);
        step->finished = true;
        pthread_cond_broadcast(&q->done);
    }
    moe_mutex_unlock(&q->lock);
    return NULL;
}

struct moe_status moe_cpu_steps_create(struct moe_session *session, struct moe_cpu_steps **out)
{
    struct moe_cpu_steps *q = calloc(1, sizeof *q);
    if (q == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    q->session = session;
    moe_mutex_init(&q->lock);
    moe_wait_init(&q->work);
    moe_wait_init(&q->done);
    int rc = moe_thread_create(&q->thread, "moe-cpu-step", run_steps, q);
    if (rc != 0) {
        free(q);
        return moe_thread_failure("moe-cpu-step", rc);
    }
    *out = q;
    return moe_ok();
}

void moe_cpu_steps_destroy(struct moe_cpu_steps *q)
{
    if (q == NULL)
        return;
    moe_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_signal(&q->work);
    moe_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    moe_mutex_not_shared(&q->lock);
    for (uint32_t i = 0; i < q->count; i++)
        free(q->step[i]);
    pthread_cond_destroy(&q->work);
    pthread_cond_destroy(&q->done);
    moe_mutex_destroy(&q->lock);
    free(q);
}

struct moe_status moe_cpu_steps_idle(struct moe_cpu_steps *q)
{
    moe_mutex_lock(&q->lock);
    bool idle = q->count == 0;
    moe_mutex_unlock(&q->lock);
    return idle ? moe_ok()
                : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                            "the session has unfinished steps");
}

/* -------------------------------------------------------------------- calls */

/* Checks modes before the step: inside it, a bad mode would end the session of all slots. */
static struct moe_status check_modes(const struct moe_step_args *a)
{
    for (uint32_t t = 0; a->mode != NULL && t < a->tokens; t++) {
        enum moe_routing_mode mode = moe_routing_of(a->mode[t]);
        bool known = mode <= MOE_ROUTE_IDS_WEIGHTS;
        bool ids = mode == MOE_ROUTE_SERVER || a->ids_in != NULL;
        bool weights = mode != MOE_ROUTE_IDS_WEIGHTS || a->weights_in != NULL;
        if (!known || !ids || !weights)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                             "token %u: routing mode %u lacks its ids or weights", t, a->mode[t]);
    }
    return moe_ok();
}

static struct moe_status check_args(const struct moe_session *s, const struct moe_step_args *a)
{
    bool modes, need_logits;
    const bool rows = a->segments != NULL || (a->x != NULL && a->y != NULL);
    MOE_TRY(moe_cpu_ep_check(s, a->layer, a->dtype, a->bucket, a->tokens));
    MOE_TRY(moe_session_check_segments(a, s->config.max_tokens, &modes, &need_logits));
    if (a->tokens > 0 &&
        (!rows || a->ids_out == NULL || a->weights_out == NULL || a->token_state == NULL))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "a step with tokens needs x, y, ids, weights and token states");
    return check_modes(a);
}

/* Enqueues a copy of `wanted`. */
static struct moe_status enqueue(struct moe_session *s, const struct moe_step *wanted,
                                 struct moe_step **out)
{
    struct moe_cpu_steps *q = s->steps;
    struct moe_step *step = malloc(sizeof *step);
    if (step == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a step");
    *step = *wanted;
    step->owner = q;
    moe_mutex_lock(&q->lock);
    bool room = q->count < MAX_STEPS;
    if (room) {
        q->step[q->count++] = step;
        pthread_cond_signal(&q->work);
    }
    moe_mutex_unlock(&q->lock);
    if (!room) {
        free(step);
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "a session runs at most %d steps at once", MAX_STEPS);
    }
    *out = step;
    return moe_ok();
}

struct moe_status moe_cpu_step_enqueue(struct moe_session *s, const struct moe_step_args *args,
                                       struct moe_step **out)
{
    MOE_TRY(check_args(s, args));
    struct moe_step step = {.args = *args};
    return enqueue(s, &step, out);
}

struct moe_status moe_cpu_backward_enqueue(struct moe_session *s,
                                           const struct moe_backward_args *args,
                                           struct moe_step **out)
{
    MOE_TRY(moe_backward_check(&s->config, args));
    MOE_TRY(moe_cpu_ep_check(s, args->trainer->layer, args->dtype, args->bucket, args->tokens));
    struct moe_step step = {.backward = true, .backward_args = *args};
    return enqueue(s, &step, out);
}

/* False if the deadline passed first. */
static bool wait_finished(struct moe_cpu_steps *q, const struct moe_step *step,
                          uint64_t deadline_ns) MOE_REQUIRES(q->lock)
{
    bool in_time = true;
    while (!step->finished && in_time)
        in_time = moe_wait_until(&q->done, &q->lock, deadline_ns);
    return step->finished;
}

struct moe_status moe_cpu_step_wait(struct moe_step *step, uint64_t deadline_ns,
                                    struct moe_step_result *result)
{
    struct moe_cpu_steps *q = step->owner;
    moe_mutex_lock(&q->lock);
    bool finished = wait_finished(q, step, deadline_ns);
    if (finished) {
        if (q->step[0] == step)
            q->step[0] = q->step[1];
        q->count--;
    }
    moe_mutex_unlock(&q->lock);
    if (!finished)
        return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the step is still running");
    struct moe_status st = step->status;
    if (result != NULL)
        *result = step->result;
    free(step);
    return st;
}
