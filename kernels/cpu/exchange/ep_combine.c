/* SPDX-License-Identifier: Apache-2.0 */
/* Combine: sums expert rows per token, returns the sums through the windows, finishes the tokens.
 *
 * All sums are fp32 in one fixed order: rows of a token by k, then slots by number. So the same
 * inputs give the same bits. This slot's sum is rounded like a partial that travels, so the bits
 * do not depend on the token's slot. */
#include "cpu/exchange/ep_pass.h"

struct moe_status moe_cpu_ep_same_pass(const struct moe_cpu_ep *ep,
                                       const struct moe_cpu_batch *batch,
                                       const struct moe_rows *rows)
{
    const struct moe_cpu_batch *b = &ep->batch;
    if (ep->received && b->layer == batch->layer && b->dtype == batch->dtype &&
        b->bucket == batch->bucket && b->tokens == batch->tokens && b->x == batch->x &&
        b->backward == batch->backward && b->dy == batch->dy && b->ids == batch->ids &&
        b->weights == batch->weights && rows->x == ep->x)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                     "combine wants a dispatch with the same arguments before it");
}

void moe_cpu_ep_sum_rows(const struct moe_cpu_ep *ep, const struct token_rows *rows, uint32_t c,
                         uint32_t n, float *sum)
{
    size_t width = ep->width;
    const uint32_t *row = ep->row + rows->first;
    memcpy(sum, ep->expert_out + row[0] * width + c, n * sizeof *sum);
    for (uint32_t i = 1; i < rows->n; i++) {
        const float *from = ep->expert_out + row[i] * width + c;
        for (uint32_t j = 0; j < n; j++)
            sum[j] += from[j];
    }
}

void moe_cpu_ep_store_row(enum moe_dtype dtype, void *row, uint32_t c, uint32_t n,
                          const float *from)
{
    if (dtype == MOE_DTYPE_F32) {
        memcpy((float *)row + c, from, n * sizeof *from);
        return;
    }
    uint16_t *to = (uint16_t *)row + c;
    for (uint32_t j = 0; j < n; j++)
        to[j] = moe_f32_to_bf16(from[j]);
}

void moe_cpu_ep_add_row(enum moe_dtype dtype, const void *row, uint32_t c, uint32_t n, float scale,
                        float *sum)
{
    if (dtype == MOE_DTYPE_F32) {
        const float *from = (const float *)row + c;
        for (uint32_t j = 0; j < n; j++)
            sum[j] += scale * from[j];
        return;
    }
    const uint16_t *from = (const uint16_t *)row + c;
    for (uint32_t j = 0; j < n; j++)
        sum[j] += scale * moe_bf16_to_f32(from[j]);
}

/* Sums one grain of the tokens of ep->source and returns the sums. If that is all, `done` follows
 * in the same message. */
static void return_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    struct moe_session *s = ep->session;
    uint32_t target = ep->source, region = ep->region_of[target];
    uint8_t *own = moe_cpu_session_own(s);
    size_t stride = ep->batch.backward ? ep->gradient_stride : ep->stride;
    struct moe_cpu_stores apart = moe_cpu_stores_begin(s, ep->home_of[target]);
    bool alone = ep->tokens_of[target] <= GRAIN;
    struct moe_cpu_stores *stores = alone ? &ep->begun[ep->home_of[target]] : &apart;
    uint32_t end = moe_cpu_min((item + 1) * GRAIN, ep->tokens_of[target]);
    for (uint32_t t = item * GRAIN; t < end; t++) {
        const struct token_rows *rows = token_of(ep, target, t);
        if (rows->n == 0)
            continue;
        const void *at = moe_window_partial_of(&s->layout, own, region, t, stride);
        size_t bytes = ep->batch.backward ? stride : ep->token_bytes;
        void *partial = moe_cpu_stores_data(stores, at, bytes);
        if (partial != NULL)
            ep->return_token(ep, rows, partial);
        moe_cpu_stores_flag(stores, moe_window_returned_of(&s->layout, own, region, t), ep->stamp,
                            rows->n);
    }
    if (!alone)
        moe_cpu_stores_end(stores);
}

struct moe_status moe_cpu_ep_return_all(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    for (uint32_t i = 1; i < s->config.slots; i++) {
        ep->source = (s->config.slot + i) % s->config.slots;
        if (moe_cpu_session_has_peer(s, ep->home_of[ep->source]))
            moe_cpu_parallel(s->device, grains_of(ep->tokens_of[ep->source]), return_item, ep);
    }
    moe_cpu_ep_store_done(ep);
    return moe_ok();
}

/* Waits for the partials of tokens block_first .. block_end - 1 from all slots that got them. */
static struct moe_status await_block(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t unused;
    for (uint32_t t = ep->block_first; t < ep->block_end; t++)
        for (uint32_t p = 0; p < s->config.slots; p++)
            if (p != s->config.slot && (ep->direct[t] >> p & 1))
                MOE_TRY(moe_cpu_session_wait(
                    s, moe_window_returned_of(&s->layout, moe_cpu_session_own(s), p, t), ep->stamp,
                    p, &unused));
    return moe_ok();
}

struct moe_status moe_cpu_ep_run_combine(struct moe_cpu_ep *ep, moe_cpu_ep_return_fn return_token,
                                         void (*finish_item)(void *ctx, uint32_t item))
{
    ep->return_token = return_token;
    MOE_TRY(ep->ways->return_sums(ep));
    for (uint32_t t = 0; t < ep->batch.tokens; t += BLOCK) {
        ep->block_first = t;
        ep->block_end = moe_cpu_min(t + BLOCK, ep->batch.tokens);
        MOE_TRY(await_block(ep));
        moe_cpu_parallel(ep->session->device, grains_of(ep->block_end - ep->block_first),
                         finish_item, ep);
    }
    return moe_cpu_ep_await_done(ep);
}

static void return_token(const struct moe_cpu_ep *ep, const struct token_rows *rows, void *partial)
{
    uint32_t width = ep->width;
    float sum[SUM_CHUNK];
    for (uint32_t c = 0; c < width; c += SUM_CHUNK) {
        uint32_t n = moe_cpu_min(SUM_CHUNK, width - c);
        moe_cpu_ep_sum_rows(ep, rows, c, n, sum);
        moe_cpu_ep_store_row(ep->batch.dtype, partial, c, n, sum);
    }
}

void moe_cpu_ep_round(enum moe_dtype dtype, uint32_t n, float *sum)
{
    for (uint32_t j = 0; dtype != MOE_DTYPE_F32 && j < n; j++)
        sum[j] = moe_bf16_to_f32(moe_f32_to_bf16(sum[j]));
}

void moe_cpu_ep_finish_columns(const struct moe_cpu_ep *ep, uint32_t t, uint32_t c, uint32_t n,
                               float *sum)
{
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t top_k = b->layer->spec.router.top_k;
    for (size_t pair = (size_t)t * top_k; pair < (size_t)(t + 1) * top_k; pair++)
        if (b->ids[pair] >= (int32_t)b->layer->spec.experts)
            moe_cpu_ep_add_row(b->dtype, (const uint8_t *)b->x + t * ep->token_bytes, c, n,
                               b->weights[pair], sum);
    moe_cpu_ep_store_row(b->dtype, (uint8_t *)ep->y + t * ep->token_bytes, c, n, sum);
}

/* Columns c .. c + n - 1 of one local token: base, then the slots in order, then zero experts. */
static void finish_columns(const struct moe_cpu_ep *ep, uint32_t t, uint32_t c, uint32_t n)
{
    const struct moe_session *s = ep->session;
    const struct moe_cpu_batch *b = &ep->batch;
    const float *base = base_of(ep, t);
    float sum[SUM_CHUNK] = {0}, own[SUM_CHUNK];
    if (base != NULL)
        memcpy(sum, base + c, n * sizeof *sum);
    for (uint32_t p = 0; p < s->config.slots; p++) {
        if (!(ep->wanted[t] >> p & 1))
            continue;
        if (p == s->config.slot) {
            moe_cpu_ep_sum_rows(ep, token_of(ep, p, t), c, n, own);
            moe_cpu_ep_round(b->dtype, n, own);
            moe_cpu_ep_add_row(MOE_DTYPE_F32, own, 0, n, 1.0f, sum);
        } else {
            moe_cpu_ep_add_row(
                b->dtype,
                moe_window_partial_of(&s->layout, moe_cpu_session_own(s), p, t, ep->stride), c, n,
                1.0f, sum);
        }
    }
    moe_cpu_ep_finish_columns(ep, t, c, n, sum);
}

bool moe_cpu_ep_skips(const struct moe_cpu_ep *ep, uint32_t t)
{
    bool skips = ep->batch.token_state != NULL && ep->batch.token_state[t] != MOE_TOKEN_OK;
    if (skips)
        memset((uint8_t *)ep->y + t * ep->token_bytes, 0, ep->token_bytes);
    return skips;
}

static void finish_token(const struct moe_cpu_ep *ep, uint32_t t)
{
    uint32_t width = ep->width;
    if (moe_cpu_ep_skips(ep, t))
        return;
    for (uint32_t c = 0; c < width; c += SUM_CHUNK)
        finish_columns(ep, t, c, moe_cpu_min(SUM_CHUNK, width - c));
}

void moe_cpu_ep_finish_item(void *ctx, uint32_t item)
{
    uint32_t end;
    for (uint32_t t = grain_of_block(ctx, item, &end); t < end; t++)
        finish_token(ctx, t);
}

struct moe_status moe_cpu_ep_combine(struct moe_cpu_ep *ep, const float *expert_out,
                                     const float *base, void *y)
{
    MOE_INVARIANT(ep->received && !ep->batch.backward);
    MOE_TRY(moe_cpu_session_usable(ep->session));
    ep->received = false;
    ep->expert_out = expert_out;
    ep->base = base;
    ep->y = y;
    return moe_cpu_ep_run_combine(ep, return_token, ep->ways->finish_item);
}
