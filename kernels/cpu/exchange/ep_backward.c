/* SPDX-License-Identifier: Apache-2.0 */
/* Combine of a backward pass: returns gradients of rows through the windows, in fp32.
 *
 * The order of all sums is that of the forward pass. The gradient of a routing weight belongs to
 * one row, so it needs no sum. It travels behind the sum, in the order of the token's rows. */
#include "cpu/exchange/ep_pass.h"

float *moe_cpu_ep_weights_of_partial(const struct moe_cpu_ep *ep, void *partial)
{
    size_t row = ep->gradient_stride - MOE_WINDOW_LINE;
    return (float *)(void *)((uint8_t *)partial + row);
}

static void return_token(const struct moe_cpu_ep *ep, const struct token_rows *rows, void *partial)
{
    uint32_t hidden = ep->batch.layer->spec.hidden;
    float *to = partial;
    for (uint32_t c = 0; c < hidden; c += SUM_CHUNK)
        moe_cpu_ep_sum_rows(ep, rows, c, moe_cpu_min(SUM_CHUNK, hidden - c), to + c);
    for (uint32_t i = 0; i < rows->n; i++)
        moe_cpu_ep_weights_of_partial(ep, to)[i] = ep->dweight_rows[ep->row[rows->first + i]];
}

static float dot(enum moe_dtype dtype, const void *a, const void *b, uint32_t n)
{
    double sum = 0;
    if (dtype == MOE_DTYPE_F32) {
        const float *x = a, *y = b;
        for (uint32_t j = 0; j < n; j++)
            sum += (double)x[j] * y[j];
    } else {
        const uint16_t *x = a, *y = b;
        for (uint32_t j = 0; j < n; j++)
            sum += (double)moe_bf16_to_f32(x[j]) * moe_bf16_to_f32(y[j]);
    }
    return (float)sum;
}

/* Adds slot p's sum for the local token t to dx, and stores its gradients of weights at their k. */
static void take_partial(const struct moe_cpu_ep *ep, uint32_t p, uint32_t t, float *dx,
                         float *dweights)
{
    const struct moe_session *s = ep->session;
    uint32_t hidden = ep->batch.layer->spec.hidden, top_k = ep->batch.layer->spec.router.top_k;
    const struct token_rows *own = p == s->config.slot ? token_of(ep, p, t) : NULL;
    float *partial = NULL, sum[SUM_CHUNK];
    if (own == NULL)
        partial =
            moe_window_partial_of(&s->layout, moe_cpu_session_own(s), p, t, ep->gradient_stride);
    for (uint32_t c = 0; c < hidden; c += SUM_CHUNK) {
        uint32_t n = moe_cpu_min(SUM_CHUNK, hidden - c);
        if (own != NULL)
            moe_cpu_ep_sum_rows(ep, own, c, n, sum);
        moe_cpu_ep_add_row(MOE_DTYPE_F32, own != NULL ? sum : partial + c, 0, n, 1.0f, dx + c);
    }
    uint32_t i = 0;
    for (uint32_t k = 0; k < top_k; k++)
        if (ep->target[(size_t)t * top_k + k] == p) {
            dweights[k] = own != NULL ? ep->dweight_rows[ep->row[own->first + i]]
                                      : moe_cpu_ep_weights_of_partial(ep, partial)[i];
            i++;
        }
}

bool moe_cpu_ep_begin_gradients(const struct moe_cpu_ep *ep, uint32_t t, float **dx,
                                float **dweights)
{
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t hidden = b->layer->spec.hidden, top_k = b->layer->spec.router.top_k;
    *dx = (float *)ep->y + (size_t)t * hidden;
    *dweights = ep->dweights + (size_t)t * top_k;
    memset(*dx, 0, hidden * sizeof **dx);
    memset(*dweights, 0, top_k * sizeof **dweights);
    return b->token_state == NULL || b->token_state[t] == MOE_TOKEN_OK;
}

void moe_cpu_ep_finish_gradients(const struct moe_cpu_ep *ep, uint32_t t, float *dx,
                                 float *dweights)
{
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t hidden = b->layer->spec.hidden, top_k = b->layer->spec.router.top_k;
    const uint8_t *x = (const uint8_t *)b->x + t * ep->token_bytes;
    const uint8_t *dy = (const uint8_t *)b->dy + t * ep->token_bytes;
    for (uint32_t k = 0; k < top_k; k++) {
        size_t pair = (size_t)t * top_k + k;
        if (b->ids[pair] < (int32_t)b->layer->spec.experts)
            continue;
        dweights[k] = dot(b->dtype, x, dy, hidden);
        moe_cpu_ep_add_row(b->dtype, dy, 0, hidden, b->weights[pair], dx);
    }
}

static void finish_token(const struct moe_cpu_ep *ep, uint32_t t)
{
    float *dx, *dweights;
    if (!moe_cpu_ep_begin_gradients(ep, t, &dx, &dweights))
        return;
    for (uint32_t p = 0; p < ep->session->config.slots; p++)
        if (ep->wanted[t] >> p & 1)
            take_partial(ep, p, t, dx, dweights);
    moe_cpu_ep_finish_gradients(ep, t, dx, dweights);
}

void moe_cpu_ep_finish_backward_item(void *ctx, uint32_t item)
{
    uint32_t end;
    for (uint32_t t = grain_of_block(ctx, item, &end); t < end; t++)
        finish_token(ctx, t);
}

struct moe_status moe_cpu_ep_combine_backward(struct moe_cpu_ep *ep, const float *dx_rows,
                                              const float *dweight_rows, float *dx, float *dweights)
{
    MOE_INVARIANT(ep->received && ep->batch.backward);
    MOE_TRY(moe_cpu_session_usable(ep->session));
    ep->received = false;
    ep->expert_out = dx_rows;
    ep->dweight_rows = dweight_rows;
    ep->y = dx;
    ep->dweights = dweights;
    return moe_cpu_ep_run_combine(ep, return_token, ep->ways->finish_backward_item);
}
