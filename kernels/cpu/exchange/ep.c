/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of a session's passes, and prepare, which plans where rows go. See ep.h, and moe/window.h
 * for the flags and their order. Waits only to close an earlier pass, or to clear the flags. */
#include "common/session_rules.h"
#include "cpu/exchange/ep_pass.h"

#include <stdlib.h>

/* ------------------------------------------------------------------ create, destroy */

static void *array(size_t n, size_t each, bool *ok)
{
    void *p = calloc(n, each);
    *ok = *ok && p != NULL;
    return p;
}

static struct moe_status plan_straight(struct moe_cpu_ep *ep, const struct moe_cpu_batch *batch)
{
    struct moe_dispatch_plan out = {0};
    return moe_cpu_ep_plan(ep, batch, NULL, &out);
}

/* Every row goes straight to the slots that compute it. */
static void go_straight(struct moe_cpu_ep *ep)
{
    static const struct moe_cpu_ep_ways ways = {
        .plan = plan_straight,
        .receive_all = moe_cpu_ep_receive_all,
        .return_sums = moe_cpu_ep_return_all,
        .finish_item = moe_cpu_ep_finish_item,
        .finish_backward_item = moe_cpu_ep_finish_backward_item,
    };
    uint32_t own = ep->session->config.slot;
    ep->ways = &ways;
    ep->hop = ep->target;
    ep->direct = ep->wanted;
    ep->send_to = ep->session->config.live & ~(UINT64_C(1) << own);
    for (uint32_t p = 0; p < MOE_MAX_SLOTS; p++) {
        ep->home_of[p] = (uint8_t)p;
        ep->region_of[p] = (uint8_t)own;
    }
}

struct moe_status moe_cpu_ep_create(struct moe_session *session, struct moe_cpu_ep **out)
{
    const struct moe_window_shape *w = &session->layout.shape;
    size_t pairs = (size_t)w->max_tokens * w->max_top_k;
    size_t experts = (size_t)w->slots * w->max_experts;
    bool ok = true;
    struct moe_cpu_ep *ep = array(1, sizeof *ep, &ok);
    if (ep != NULL) {
        ep->session = session;
        ep->target = array(pairs, sizeof *ep->target, &ok);
        ep->keys = array(w->max_tokens, sizeof *ep->keys, &ok);
        ep->wanted = array(w->max_tokens, sizeof *ep->wanted, &ok);
        ep->count = array(experts, sizeof *ep->count, &ok);
        ep->start = array(w->max_experts + 1, sizeof *ep->start, &ok);
        ep->rows = array(w->max_experts, sizeof *ep->rows, &ok);
        ep->cursor = array(experts, sizeof *ep->cursor, &ok);
        ep->limit = array(experts, sizeof *ep->limit, &ok);
        ep->loads = array(w->max_experts, sizeof *ep->loads, &ok);
        ep->of_token = array((size_t)w->slots * w->max_tokens, sizeof *ep->of_token, &ok);
        ep->row = array(w->slots * pairs, sizeof *ep->row, &ok);
    }
    if (ok) {
        go_straight(ep);
        *out = ep;
        return moe_ok();
    }
    moe_cpu_ep_destroy(ep);
    *out = NULL;
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "out of memory for a session's tables");
}

void moe_cpu_ep_release_rows(struct moe_cpu_ep *ep)
{
    moe_cpu_scratch_give(ep->session->device, ep->x);
    moe_cpu_scratch_give(ep->session->device, ep->dy);
    moe_cpu_scratch_give(ep->session->device, ep->weight);
    ep->x = NULL;
    ep->dy = NULL;
    ep->weight = NULL;
}

void moe_cpu_ep_destroy(struct moe_cpu_ep *ep)
{
    if (ep == NULL)
        return;
    moe_cpu_ep_release_rows(ep);
    moe_cpu_ep_domains_destroy(ep->domains);
    free(ep->target);
    free(ep->keys);
    free(ep->wanted);
    free(ep->count);
    free(ep->start);
    free(ep->rows);
    free(ep->cursor);
    free(ep->limit);
    free(ep->loads);
    free(ep->of_token);
    free(ep->row);
    free(ep);
}

bool moe_cpu_ep_prepare_mask(struct moe_cpu_ep *ep, uint64_t live)
{
    if (!moe_cpu_ep_may_lack(ep, live))
        return false;
    for (uint32_t p = 0; p < ep->session->config.slots; p++)
        if (ep->begun[p].message != NULL)
            moe_cpu_stores_end(&ep->begun[p]);
    return true;
}

void moe_cpu_ep_mask(struct moe_cpu_ep *ep)
{
    moe_cpu_ep_release_rows(ep);
    ep->open = ep->agreed = ep->received = ep->refused = false;
    go_straight(ep);
    moe_cpu_ep_mask_domains(ep);
}

bool moe_cpu_ep_take_refusal(struct moe_cpu_ep *ep)
{
    bool refused = ep->refused;
    ep->refused = false;
    return refused;
}

uint64_t moe_cpu_ep_rows(const struct moe_cpu_ep *ep)
{
    return ep->row_total;
}

void moe_cpu_ep_count(const struct moe_cpu_ep *ep, struct moe_step_counts *out)
{
    const struct moe_layer *layer = ep->batch.layer;
    const uint64_t own = UINT64_C(1) << ep->session->config.slot;
    memset(out->expert_rows, 0, layer->spec.experts * sizeof *out->expert_rows);
    for (uint32_t l = 0; l < layer->local_experts; l++)
        out->expert_rows[layer->local[l]] = ep->rows[l];
    out->local_experts = layer->local_experts;
    out->by_expert = true;
    out->slots = ep->session->config.slots;
    memset(out->sent_rows, 0, out->slots * sizeof *out->sent_rows);
    for (uint32_t t = 0; t < ep->batch.tokens; t++)
        for (uint64_t to = ep->direct[t] & ~own; to != 0; to &= to - 1)
            out->sent_rows[__builtin_ctzll(to)]++;
    out->to_slots = true;
}

/* --------------------------------------------------------------- prepare */

struct moe_status moe_cpu_ep_check(const struct moe_session *session, struct moe_layer *layer,
                                   enum moe_dtype dtype, uint32_t bucket, uint32_t tokens)
{
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "layer %u has weights missing",
                         layer->spec.layer);
    MOE_TRY(moe_session_check_step(&session->config, &layer->spec, &layer->placement, layer->slot,
                                   dtype, bucket, tokens));
    moe_cpu_layer_activate(layer, session->config.live);
    return moe_ok();
}

/* The sums of a token depend on which of its experts share a slot. So copies are chosen by what the
 * token is, and not by its place in the step, unless the placement makes no difference. */
uint32_t moe_cpu_ep_key(const struct moe_layer *layer, const void *row, size_t bytes, uint32_t t)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    if (!layer->active.by_content)
        return t;
    for (size_t at = 0; at < bytes; at += sizeof hash) {
        uint64_t word = 0;
        size_t n = bytes - at < sizeof word ? bytes - at : sizeof word;
        memcpy(&word, (const uint8_t *)row + at, n);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return (uint32_t)(hash >> 32);
}

static size_t bytes_of_token(const struct moe_cpu_batch *b)
{
    return moe_expert_width(&b->layer->spec) * moe_dtype_bytes(b->dtype);
}

static size_t bytes_of_row(const struct moe_cpu_batch *b)
{
    return b->row_bytes != 0 ? b->row_bytes : bytes_of_token(b);
}

static const uint8_t *rows_of(const struct moe_cpu_batch *b)
{
    return b->row_bytes != 0 ? b->rows : b->x;
}

static const uint32_t *make_keys(struct moe_cpu_ep *ep, const struct moe_cpu_batch *b)
{
    const uint8_t *rows = rows_of(b);
    size_t bytes = bytes_of_row(b);
    if (!b->layer->active.by_content)
        return NULL;
    for (uint32_t t = 0; t < b->tokens; t++)
        ep->keys[t] = moe_cpu_ep_key(b->layer, rows + t * bytes, bytes, t);
    return ep->keys;
}

struct moe_status moe_cpu_ep_plan(struct moe_cpu_ep *ep, const struct moe_cpu_batch *b,
                                  const struct moe_domains *map, struct moe_dispatch_plan *out)
{
    const struct moe_session *s = ep->session;
    const struct moe_router_spec *router = &b->layer->spec.router;
    const struct moe_dispatch_input in = {.domains = map,
                                          .placement = &b->layer->active,
                                          .slot = s->config.slot,
                                          .tokens = b->tokens,
                                          .top_k = router->top_k,
                                          .zero_experts = router->zero_experts,
                                          .ids = b->ids,
                                          .keys = make_keys(ep, b),
                                          .token_state = b->token_state};
    out->target = ep->target;
    out->wanted = ep->wanted;
    out->count = ep->count;
    out->stride = s->layout.shape.max_experts;
    return moe_dispatch_plan(&in, out);
}

void moe_cpu_ep_fill_head(const struct moe_cpu_batch *b, uint32_t head[MOE_HEAD_COUNT])
{
    const uint32_t mask = (1u << MOE_WINDOW_VALUE_BITS) - 1;
    head[MOE_HEAD_TOKENS] = b->tokens;
    head[MOE_HEAD_LAYER] = b->layer->spec.layer & mask;
    head[MOE_HEAD_HIDDEN] = moe_expert_width(&b->layer->spec);
    head[MOE_HEAD_EXPERTS] = b->layer->spec.experts;
    head[MOE_HEAD_TOP_K] = b->layer->spec.router.top_k;
    head[MOE_HEAD_DTYPE] = b->dtype | (b->backward ? MOE_HEAD_BACKWARD : 0);
    head[MOE_HEAD_BUCKET] =
        (uint32_t)__builtin_ctz(b->bucket) | (b->no_memory ? MOE_HEAD_NO_MEMORY : 0);
    head[MOE_HEAD_PLACEMENT] = b->layer->placement.version & mask;
}

void moe_cpu_ep_fill_params(const struct moe_cpu_batch *b, uint32_t flags[MOE_PASS_LOADS])
{
    const struct moe_cpu_pass_params none = {0}, *params = b->params != NULL ? b->params : &none;
    uint32_t bits;
    memcpy(&bits, &params->aux_coeff, sizeof bits);
    memset(flags, 0, MOE_PASS_LOADS * sizeof *flags);
    flags[MOE_PASS_ROUTED] = params->routed;
    flags[MOE_PASS_ACCUMULATE] = params->accumulate;
    flags[MOE_PASS_AUX_LOW] = bits & 0xffff;
    flags[MOE_PASS_AUX_HIGH] = bits >> 16;
}

static void announce_params(struct moe_cpu_ep *ep, struct moe_cpu_stores *stores)
{
    struct moe_session *s = ep->session;
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t params[MOE_PASS_LOADS];
    const uint64_t *flags =
        moe_window_pass_of(&s->layout, moe_cpu_session_own(s), ep->parity, s->config.slot);
    moe_cpu_ep_fill_params(b, params);
    for (uint32_t i = 0; i < MOE_PASS_LOADS; i++)
        moe_cpu_stores_flag(stores, &flags[i], ep->stamp, params[i]);
    for (uint32_t e = 0; e < b->layer->spec.experts; e++)
        moe_cpu_stores_flag(stores, &flags[MOE_PASS_LOADS + e], ep->stamp,
                            b->params != NULL ? b->params->loads[e] : 0);
}

/* Stays in ep->begun: send ends it. */
static void announce(struct moe_cpu_ep *ep, uint32_t peer, const uint32_t head[MOE_HEAD_COUNT])
{
    struct moe_session *s = ep->session;
    const struct moe_placement *place = &ep->batch.layer->active;
    uint8_t *own = moe_cpu_session_own(s);
    struct moe_cpu_stores *stores = &ep->begun[peer];
    *stores = moe_cpu_stores_begin(s, peer);
    const uint64_t *counts = moe_window_counts_of(&s->layout, own, ep->parity, s->config.slot);
    const uint32_t *count = ep->count + (size_t)peer * s->layout.shape.max_experts;
    for (uint32_t e = 0; e < place->experts; e++)
        for (uint32_t i = place->offset[e]; i < place->offset[e + 1]; i++)
            if (place->slot[i] == peer)
                moe_cpu_stores_flag(stores, &counts[e], ep->stamp, count[e]);
    if (ep->batch.backward)
        announce_params(ep, stores);
    const uint64_t *flags = moe_window_head_of(&s->layout, own, ep->parity, s->config.slot);
    for (uint32_t i = 0; i < MOE_HEAD_COUNT; i++)
        moe_cpu_stores_flag(stores, &flags[i], ep->stamp, head[i]);
}

void moe_cpu_ep_store_done(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p)) {
            moe_cpu_stores_flag(
                &ep->begun[p],
                moe_window_done_of(&s->layout, moe_cpu_session_own(s), s->config.slot), ep->stamp,
                0);
            moe_cpu_stores_end(&ep->begun[p]);
        }
}

struct moe_status moe_cpu_ep_await_done(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t unused;
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(moe_cpu_session_wait(s,
                                         moe_window_done_of(&s->layout, moe_cpu_session_own(s), p),
                                         ep->stamp, p, &unused));
    ep->open = false;
    return moe_ok();
}

/* The step number has used all its bits: flags of the first steps would match new stamps. All
 * slots call this at the same step, clear their windows, and restart at step 1. */
static struct moe_status clear_flags(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    MOE_TRY(moe_cpu_session_barrier(s));
    memset(moe_cpu_session_own(s) + s->layout.head, 0, s->layout.rows - s->layout.head);
    s->step = 0;
    return moe_cpu_session_barrier(s);
}

struct moe_status moe_cpu_ep_prepare(struct moe_cpu_ep *ep, const struct moe_cpu_batch *batch)
{
    struct moe_session *s = ep->session;
    MOE_TRY(moe_cpu_session_usable(s));
    MOE_TRY(ep->ways->plan(ep, batch));
    moe_cpu_ep_release_rows(ep);
    ep->received = false;
    ep->agreed = false;
    ep->refused = false;
    if (ep->open) {
        moe_cpu_ep_store_done(ep);
        MOE_TRY(moe_cpu_ep_await_done(ep));
    }
    if (s->step == (UINT32_C(1) << MOE_WINDOW_STEP_BITS) - 1)
        MOE_TRY(clear_flags(ep));
    ep->batch = *batch;
    ep->width = moe_expert_width(&batch->layer->spec);
    ep->rows_sent = rows_of(batch);
    ep->row_bytes = bytes_of_row(batch);
    ep->token_bytes = bytes_of_token(batch);
    ep->stride = moe_window_row_stride(ep->width, batch->dtype);
    ep->token_stride = batch->backward ? 2 * ep->stride : ep->stride;
    ep->gradient_stride = moe_window_gradient_stride(ep->width);
    s->step++;
    ep->stamp = moe_window_stamp(s->config.epoch, s->step);
    ep->parity = s->step & 1;
    ep->open = true;
    uint32_t head[MOE_HEAD_COUNT];
    moe_cpu_ep_fill_head(batch, head);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            announce(ep, p, head);
    return moe_ok();
}
