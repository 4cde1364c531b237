/* SPDX-License-Identifier: Apache-2.0 */
/* One backward pass of a layer over a batch: `run_stages` lists the order, top to bottom.
 *
 * The pass adds nothing to a gradient before all slots have agreed that they run the same pass. All
 * stages skip tokens that are not OK: a NaN in such a token is multiplied by nothing, not even by
 * zero. */
#include "cpu/exchange/ep.h"
#include "cpu/exchange/session.h"
#include "cpu/step/step.h"
#include "cpu/training/backward.h"

#include "base/size.h"

#include <stdlib.h>

/* Memory that lives as long as one pass; all of it scratch. */
struct pass {
    struct moe_session *session;
    const struct moe_backward_args *args;
    struct moe_layer *layer;
    uint8_t *mode, *ok, *routed; /* [T]; ok: MOE_TOKEN_OK; routed: ok and used the router */
    int32_t *ids;                /* [T,K] */
    float *weights, *dweights;   /* [T,K] */
    float *dx;                   /* [T,H] */
    float *dx_shared;            /* [T,H]; NULL without a shared expert */
    float *dlogits;              /* [T,E+Z] */
    float *dx_rows, *dweight_rows;
    uint32_t loads[MOE_MAX_EXPERTS];
    struct moe_cpu_pass_params params;
    struct moe_cpu_group_params group;
    double loss; /* of this slot's tokens */
    struct moe_rows rows;
};

static struct moe_status allocate(struct pass *p, size_t n, size_t columns, size_t each, void *out)
{
    size_t bytes;
    if (!moe_size_mul3(n, columns, each, &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%zu rows of %zu do not fit in memory", n, columns);
    void *memory;
    MOE_TRY(moe_cpu_scratch_take(p->session->device, bytes, &memory));
    memcpy(out, &memory, sizeof memory);
    return moe_ok();
}

static struct moe_status allocate_all(struct pass *p)
{
    const struct moe_layer_spec *spec = &p->layer->spec;
    size_t tokens = p->args->tokens, top_k = spec->router.top_k;
    MOE_TRY(allocate(p, tokens, 1, 1, &p->mode));
    MOE_TRY(allocate(p, tokens, 1, 1, &p->ok));
    MOE_TRY(allocate(p, tokens, 1, 1, &p->routed));
    MOE_TRY(allocate(p, tokens, top_k, sizeof *p->ids, &p->ids));
    MOE_TRY(allocate(p, tokens, top_k, sizeof(float), &p->weights));
    MOE_TRY(allocate(p, tokens, top_k, sizeof(float), &p->dweights));
    MOE_TRY(allocate(p, tokens, spec->hidden, sizeof(float), &p->dx));
    MOE_TRY(allocate(p, tokens, (size_t)spec->experts + spec->router.zero_experts, sizeof(float),
                     &p->dlogits));
    if (spec->shared_intermediate == 0)
        return moe_ok();
    MOE_TRY(allocate(p, tokens, spec->hidden, sizeof(float), &p->dx_shared));
    memset(p->dx_shared, 0, tokens * spec->hidden * sizeof(float));
    return moe_ok();
}

static void release_all(const struct pass *p)
{
    void *const all[] = {p->mode, p->ok,        p->routed,  p->ids,     p->weights,     p->dweights,
                         p->dx,   p->dx_shared, p->dlogits, p->dx_rows, p->dweight_rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        moe_cpu_scratch_give(p->session->device, all[i]);
}

/* ---------------------------------------------------------------------- stages */

/* Computes weights of the given choices, token states, and the parameters for the peers. */
static struct moe_status route(struct pass *p)
{
    const struct moe_backward_args *a = p->args;
    uint32_t top_k = p->layer->spec.router.top_k;
    for (uint32_t t = 0; t < a->tokens; t++)
        p->mode[t] = a->mode != NULL ? a->mode[t] : MOE_ROUTE_IDS;
    MOE_TRY(moe_cpu_router_forward(p->layer, a->dtype, a->tokens, a->x, p->mode, a->ids, a->weights,
                                   p->ids, p->weights, a->token_state));
    for (uint32_t t = 0; t < a->tokens; t++) {
        p->ok[t] = a->token_state[t] == MOE_TOKEN_OK;
        p->routed[t] = p->ok[t] && p->mode[t] == MOE_ROUTE_IDS;
        p->params.routed += p->routed[t];
        for (size_t i = (size_t)t * top_k; p->routed[t] && i < (size_t)(t + 1) * top_k; i++)
            if (p->ids[i] >= 0 && p->ids[i] < (int32_t)p->layer->spec.experts)
                p->loads[p->ids[i]]++;
    }
    p->params.loads = p->loads;
    p->params.accumulate = a->accumulate;
    p->params.aux_coeff = a->aux_coeff;
    return moe_ok();
}

static void count_loads(struct pass *p)
{
    for (uint32_t e = 0; p->args->accumulate && e < p->layer->spec.experts; e++)
        p->args->trainer->loads[e] += p->group.loads[e];
}

/* Finds the activations that the forward step of this batch retained on this slot. */
static bool find_retained(const struct pass *p, enum moe_activation_part part, uint32_t inner,
                          struct moe_activation_piece *piece, struct moe_cpu_pre *pre)
{
    const struct moe_backward_args *a = p->args;
    const struct moe_activation_key key = {.layer = p->layer,
                                           .session = p->session,
                                           .name = a->retained,
                                           .dtype = a->dtype,
                                           .bucket = a->bucket,
                                           .tokens = a->tokens};
    if (a->retained == 0 ||
        !moe_activation_cache_find(moe_cpu_device_activation_cache(p->session->device), &key, part,
                                   piece))
        return false;
    pre->gate = piece->data;
    pre->up = pre->gate + (size_t)piece->in_use * inner;
    return true;
}

static bool find_retained_shared(const struct pass *p, struct moe_cpu_pre *pre)
{
    struct moe_activation_piece piece;
    return p->dx_shared != NULL &&
           find_retained(p, MOE_ACTIVATION_SHARED, p->layer->spec.shared_intermediate, &piece, pre);
}

/* Compares only row counts: a different batch is assumed to give a different count. */
static bool find_retained_rows(const struct pass *p, struct moe_cpu_pre *pre)
{
    struct moe_activation_piece piece;
    return find_retained(p, MOE_ACTIVATION_ROUTED, p->layer->spec.intermediate, &piece, pre) &&
           piece.in_use == p->rows.start[p->rows.local_experts] &&
           piece.rows == moe_cpu_ep_rows(p->session->ep);
}

/* Runs `compute` with retained activations if `find` finds them; *used: it did. They stay while
 * `compute` reads them. If `compute` runs out of memory, it runs again without them, and the cache
 * may give its block back. This works because `compute` allocates before it changes anything. */
static struct moe_status
run_retained(struct pass *p, bool (*find)(const struct pass *, struct moe_cpu_pre *),
             struct moe_status (*compute)(struct pass *, const struct moe_cpu_pre *), bool *used)
{
    struct moe_activation_cache *cache = moe_cpu_device_activation_cache(p->session->device);
    struct moe_cpu_pre pre;
    struct moe_status st = moe_ok();
    moe_activation_cache_read_begin(cache);
    *used = find(p, &pre);
    if (*used)
        st = compute(p, &pre);
    moe_activation_cache_read_end(cache);
    *used = *used && st.code != MOE_RESOURCE_EXHAUSTED;
    return *used ? st : compute(p, NULL);
}

static struct moe_status compute_shared(struct pass *p, const struct moe_cpu_pre *pre)
{
    const struct moe_backward_args *a = p->args;
    struct moe_cpu_tokens ok = {a->dtype, a->tokens, a->x, p->ok};
    return moe_cpu_shared_backward(a->trainer, &ok, a->accumulate, a->dy, pre, p->dx_shared);
}

static struct moe_status compute_experts(struct pass *p, const struct moe_cpu_pre *pre)
{
    return moe_cpu_experts_backward(p->args->trainer, p->args->dtype, p->args->accumulate, &p->rows,
                                    moe_cpu_ep_dy_rows(p->session->ep), pre, p->dx_rows,
                                    p->dweight_rows);
}

static struct moe_status run_shared(struct pass *p)
{
    bool used;
    return run_retained(p, find_retained_shared, compute_shared, &used);
}

static struct moe_status run_experts(struct pass *p, struct moe_step_result *r)
{
    size_t rows = p->rows.start[p->rows.local_experts];
    MOE_TRY(allocate(p, rows, p->layer->spec.hidden, sizeof(float), &p->dx_rows));
    MOE_TRY(allocate(p, rows, 1, sizeof(float), &p->dweight_rows));
    return run_retained(p, find_retained_rows, compute_experts, &r->used_retained);
}

static struct moe_status run_router(struct pass *p)
{
    const struct moe_backward_args *a = p->args;
    struct moe_cpu_tokens tokens = {a->dtype, a->tokens, a->x, p->routed};
    MOE_TRY(moe_cpu_router_backward(a->trainer, &tokens, p->ids, p->dweights, p->dlogits));
    if (a->aux_coeff != 0)
        MOE_TRY(moe_cpu_aux_backward(a->trainer, &tokens, p->group.loads, p->group.routed,
                                     a->aux_coeff, p->dlogits, &p->loss));
    return moe_cpu_logits_backward(a->trainer, &tokens, a->accumulate, p->dlogits, p->dx);
}

/* Adds the losses in slot order, so all slots report the same bits. */
static struct moe_status sum_losses(struct pass *p)
{
    double all[MOE_MAX_SLOTS], sum = 0;
    if (p->args->aux_coeff != 0) {
        MOE_TRY(moe_cpu_session_gather(p->session, &p->loss, all, sizeof p->loss));
        for (uint32_t s = 0; s < p->session->config.slots; s++)
            sum += all[s];
    }
    if (p->args->aux_loss != NULL)
        *p->args->aux_loss = sum;
    return moe_ok();
}

/* -------------------------------------------------------------------- results */

enum { TOKENS_PER_ITEM = 16 };

static void store_token(const struct pass *p, uint32_t t)
{
    const struct moe_backward_args *a = p->args;
    size_t hidden = p->layer->spec.hidden, at = t * hidden;
    const float *dx = p->dx + at;
    const float *shared = p->dx_shared != NULL ? p->dx_shared + at : NULL;
    for (size_t i = 0; i < hidden; i++) {
        float v = !p->ok[t] ? 0.0f : shared != NULL ? dx[i] + shared[i] : dx[i];
        if (a->dtype == MOE_DTYPE_F32)
            ((float *)a->dx)[at + i] = v;
        else
            ((uint16_t *)a->dx)[at + i] = moe_f32_to_bf16(v);
    }
}

static void store_item(void *ctx, uint32_t item)
{
    const struct pass *p = ctx;
    uint32_t end = (item + 1) * TOKENS_PER_ITEM;
    for (uint32_t t = item * TOKENS_PER_ITEM; t < end && t < p->args->tokens; t++)
        store_token(p, t);
}

static void store_results(struct pass *p)
{
    const struct moe_backward_args *a = p->args;
    moe_cpu_parallel(p->session->device, (a->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM,
                     store_item, p);
    if (a->dweights != NULL && a->tokens > 0)
        memcpy(a->dweights, p->dweights,
               (size_t)a->tokens * p->layer->spec.router.top_k * sizeof *a->dweights);
}

/* ------------------------------------------------------------------------ pass */

/* Allocates all memory of known size before this slot sends anything. */
static struct moe_status begin(struct pass *p)
{
    MOE_TRY(allocate_all(p));
    return route(p);
}

/* This slot has no memory: it sends MOE_HEAD_NO_MEMORY, and all slots refuse the pass. */
static struct moe_status refuse(struct moe_session *s, const struct moe_backward_args *a)
{
    const struct moe_cpu_batch batch = {.layer = a->trainer->layer,
                                        .dtype = a->dtype,
                                        .bucket = a->bucket,
                                        .backward = true,
                                        .no_memory = true};
    MOE_TRY(moe_cpu_ep_prepare(s->ep, &batch));
    moe_cpu_ep_send(s->ep);
    return moe_cpu_ep_agree(s->ep, NULL);
}

static struct moe_status run_stages(struct pass *p, struct moe_step_result *r)
{
    struct moe_session *s = p->session;
    const struct moe_backward_args *a = p->args;
    uint64_t since = moe_clock_ns();
    struct moe_status begun = begin(p);
    if (begun.code == MOE_RESOURCE_EXHAUSTED)
        return refuse(s, a);
    MOE_TRY(begun);
    moe_cpu_step_lap(r, MOE_STAGE_ROUTER, &since);

    struct moe_cpu_batch batch = {.layer = p->layer,
                                  .dtype = a->dtype,
                                  .bucket = a->bucket,
                                  .tokens = a->tokens,
                                  .x = a->x,
                                  .backward = true,
                                  .dy = a->dy,
                                  .params = &p->params,
                                  .ids = p->ids,
                                  .weights = p->weights,
                                  .token_state = a->token_state};
    MOE_TRY(moe_cpu_ep_prepare(s->ep, &batch));
    moe_cpu_step_lap(r, MOE_STAGE_PREPARE, &since);
    moe_cpu_ep_send(s->ep);
    moe_cpu_step_lap(r, MOE_STAGE_DISPATCH, &since);
    MOE_TRY(moe_cpu_ep_agree(s->ep, &p->group));
    count_loads(p);
    moe_cpu_step_lap(r, MOE_STAGE_PREPARE, &since);

    MOE_TRY(run_shared(p));
    moe_cpu_step_lap(r, MOE_STAGE_SHARED, &since);
    MOE_TRY(moe_cpu_ep_receive(s->ep, &p->rows));
    r->rows = moe_cpu_ep_rows(s->ep);
    moe_cpu_step_lap(r, MOE_STAGE_DISPATCH, &since);

    MOE_TRY(run_experts(p, r));
    moe_cpu_step_lap(r, MOE_STAGE_GEMM1, &since);
    MOE_TRY(moe_cpu_ep_combine_backward(s->ep, p->dx_rows, p->dweight_rows, p->dx, p->dweights));
    moe_cpu_step_lap(r, MOE_STAGE_COMBINE, &since);
    MOE_TRY(run_router(p));
    MOE_TRY(sum_losses(p));
    store_results(p);
    moe_cpu_step_lap(r, MOE_STAGE_ROUTER, &since);
    return moe_ok();
}

struct moe_status moe_cpu_backward_run(struct moe_session *session,
                                       const struct moe_backward_args *args,
                                       struct moe_step_result *result)
{
    MOE_TRY(moe_cpu_session_usable(session));
    struct pass *p = calloc(1, sizeof *p);
    if (p == NULL)
        return refuse(session, args);
    p->session = session;
    p->args = args;
    p->layer = args->trainer->layer;
    struct moe_status st = run_stages(p, result);
    release_all(p);
    free(p);
    return st;
}
