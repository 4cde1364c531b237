/* SPDX-License-Identifier: Apache-2.0 */
/* Combine over several domains; see ep_domains.h. A domain's sum for a token is computed in one
 * way: at the gateway for tokens of other domains, at the token's slot for tokens of this domain.
 * So a token has the same bits whichever slot it belongs to. */
#include "cpu/exchange/ep_domains.h"
#include "cpu/exchange/stores.h"

/* The partial that the slot of index i in this domain returned for a token of a slot in `from`. */
static void *partial_of(const struct moe_cpu_ep *ep, uint32_t from, uint32_t i, uint32_t t)
{
    const struct moe_session *s = ep->session;
    size_t stride = ep->batch.backward ? ep->gradient_stride : ep->stride;
    return moe_window_partial_of(&s->layout, moe_cpu_session_own(s),
                                 moe_domains_slot(&ep->domains->map, from, i), t, stride);
}

static const struct token_rows *own_rows(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t)
{
    return token_of(ep, moe_domains_slot(&ep->domains->map, from, ep->domains->index), t);
}

/* sum = this domain's sum of columns c .. c + n - 1: the slots' sums, rounded to the dtype of their
 * partials, added in slot order. Not rounded. */
static void sum_domain(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t, uint32_t c,
                       uint32_t n, float *sum)
{
    enum moe_dtype dtype = ep->batch.backward ? MOE_DTYPE_F32 : ep->batch.dtype;
    float own[SUM_CHUNK];
    memset(sum, 0, n * sizeof *sum);
    for (uint64_t left = slots_with_rows(ep, from, t); left != 0; left &= left - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(left);
        if (i == ep->domains->index) {
            moe_cpu_ep_sum_rows(ep, own_rows(ep, from, t), c, n, own);
            moe_cpu_ep_round(dtype, n, own);
            moe_cpu_ep_add_row(MOE_DTYPE_F32, own, 0, n, 1.0f, sum);
        } else {
            moe_cpu_ep_add_row(dtype, partial_of(ep, from, i, t), c, n, 1.0f, sum);
        }
    }
}

/* The gradients of a token's weights in this domain, in the order of its entries. Each slot has
 * returned those of its rows in that order. */
static void gather_weights(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t, float *to)
{
    uint8_t used[MOE_DOMAINS_MAX_SIZE] = {0};
    const uint8_t *entry = entries_of(ep, from, t);
    const struct token_rows *own = own_rows(ep, from, t);
    for (uint32_t i = 0; i < ep->domains->entries[domain_token(ep, from, t)]; i++) {
        uint32_t nth = used[entry[i]]++;
        if (entry[i] == ep->domains->index)
            to[i] = ep->dweight_rows[ep->row[own->first + nth]];
        else
            to[i] = moe_cpu_ep_weights_of_partial(ep, partial_of(ep, from, entry[i], t))[nth];
    }
}

/* ------------------------------------------------------------------ the gateway's part */

static void sum_partner_token(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t, void *to)
{
    uint32_t width = ep->width;
    enum moe_dtype dtype = ep->batch.backward ? MOE_DTYPE_F32 : ep->batch.dtype;
    float sum[SUM_CHUNK];
    for (uint32_t c = 0; c < width; c += SUM_CHUNK) {
        uint32_t n = moe_cpu_min(SUM_CHUNK, width - c);
        sum_domain(ep, from, t, c, n, sum);
        moe_cpu_ep_store_row(dtype, to, c, n, sum);
    }
    if (ep->batch.backward)
        gather_weights(ep, from, t, moe_cpu_ep_weights_of_partial(ep, to));
}

/* Sums one grain of a partner's tokens and sends the sums across. */
static void sum_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    struct moe_session *s = ep->session;
    uint32_t slot = s->config.slot, from = ep->domains->from, end;
    uint8_t *own = moe_cpu_session_own(s);
    size_t stride = ep->batch.backward ? ep->gradient_stride : ep->stride;
    struct moe_cpu_stores stores = moe_cpu_stores_begin(s, ep->source);
    for (uint32_t t = grain_of_block(ep, item, &end); t < end; t++) {
        uint32_t entries = ep->domains->entries[domain_token(ep, from, t)];
        if (entries == 0)
            continue;
        const void *at = moe_window_partial_of(&s->layout, own, slot, t, stride);
        void *to = moe_cpu_stores_data(&stores, at, ep->batch.backward ? stride : ep->token_bytes);
        if (to != NULL)
            sum_partner_token(ep, from, t, to);
        moe_cpu_stores_flag(&stores, moe_window_returned_of(&s->layout, own, slot, t), ep->stamp,
                            entries);
    }
    moe_cpu_stores_end(&stores);
}

/* Waits for this domain's partials of a block of a partner's tokens. */
static struct moe_status await_domain(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    const struct moe_cpu_ep_domains *d = ep->domains;
    uint32_t unused;
    for (uint32_t t = ep->block_first; t < ep->block_end; t++)
        for (uint64_t left = slots_with_rows(ep, d->from, t) & ~(UINT64_C(1) << d->index);
             left != 0; left &= left - 1) {
            uint32_t i = (uint32_t)__builtin_ctzll(left);
            const uint64_t *flag = moe_window_returned_of(&s->layout, moe_cpu_session_own(s),
                                                          moe_domains_slot(&d->map, d->from, i), t);
            MOE_TRY(moe_cpu_session_wait(s, flag, ep->stamp, moe_domains_slot(&d->map, d->own, i),
                                         &unused));
        }
    return moe_ok();
}

struct moe_status moe_cpu_ep_return_over_domains(struct moe_cpu_ep *ep)
{
    struct moe_cpu_ep_domains *d = ep->domains;
    MOE_TRY(moe_cpu_ep_return_all(ep));
    for (uint32_t i = 1; i < d->map.domains; i++) {
        d->from = (d->own + i) % d->map.domains;
        ep->source = moe_domains_slot(&d->map, d->from, d->index);
        for (uint32_t t = 0; t < ep->tokens_of[ep->source]; t += BLOCK) {
            ep->block_first = t;
            ep->block_end = moe_cpu_min(t + BLOCK, ep->tokens_of[ep->source]);
            MOE_TRY(await_domain(ep));
            moe_cpu_parallel(ep->session->device, grains_of(ep->block_end - t), sum_item, ep);
        }
    }
    return moe_ok();
}

/* ------------------------------------------------------------------ this slot's tokens */

/* Domains in order; the own domain's sum is rounded like one that crossed. */
static void add_domains(const struct moe_cpu_ep *ep, uint32_t t, uint32_t c, uint32_t n, float *sum)
{
    const struct moe_cpu_ep_domains *d = ep->domains;
    enum moe_dtype dtype = ep->batch.backward ? MOE_DTYPE_F32 : ep->batch.dtype;
    float part[SUM_CHUNK];
    for (uint32_t from = 0; from < d->map.domains; from++)
        if (from == d->own && d->entries[domain_token(ep, from, t)] > 0) {
            sum_domain(ep, from, t, c, n, part);
            moe_cpu_ep_round(dtype, n, part);
            moe_cpu_ep_add_row(MOE_DTYPE_F32, part, 0, n, 1.0f, sum);
        } else if (d->across[t] >> from & 1) {
            moe_cpu_ep_add_row(dtype, partial_of(ep, from, d->index, t), c, n, 1.0f, sum);
        }
}

void moe_cpu_ep_finish_over_domains(void *ctx, uint32_t item)
{
    const struct moe_cpu_ep *ep = ctx;
    uint32_t width = ep->width, end;
    for (uint32_t t = grain_of_block(ep, item, &end); t < end; t++) {
        const float *base = base_of(ep, t);
        if (moe_cpu_ep_skips(ep, t))
            continue;
        for (uint32_t c = 0; c < width; c += SUM_CHUNK) {
            uint32_t n = moe_cpu_min(SUM_CHUNK, width - c);
            float sum[SUM_CHUNK] = {0};
            if (base != NULL)
                memcpy(sum, base + c, n * sizeof *sum);
            add_domains(ep, t, c, n, sum);
            moe_cpu_ep_finish_columns(ep, t, c, n, sum);
        }
    }
}

/* The gradients of weights of one domain, at their k. */
static void take_weights(const struct moe_cpu_ep *ep, uint32_t from, uint32_t t, float *dweights)
{
    const struct moe_cpu_ep_domains *d = ep->domains;
    uint32_t top_k = ep->batch.layer->spec.router.top_k, i = 0;
    float own[MOE_MAX_TOP_K];
    const float *w = own;
    if (from == d->own)
        gather_weights(ep, from, t, own);
    else
        w = moe_cpu_ep_weights_of_partial(ep, partial_of(ep, from, d->index, t));
    for (uint32_t k = 0; k < top_k; k++) {
        uint32_t slot = ep->target[(size_t)t * top_k + k];
        if (slot != MOE_PLAN_NO_SLOT && d->map.domain_of[slot] == from)
            dweights[k] = w[i++];
    }
}

void moe_cpu_ep_finish_backward_over_domains(void *ctx, uint32_t item)
{
    const struct moe_cpu_ep *ep = ctx;
    const struct moe_cpu_ep_domains *d = ep->domains;
    uint32_t width = ep->width, end;
    for (uint32_t t = grain_of_block(ep, item, &end); t < end; t++) {
        float *dx, *dweights;
        if (!moe_cpu_ep_begin_gradients(ep, t, &dx, &dweights))
            continue;
        for (uint32_t c = 0; c < width; c += SUM_CHUNK)
            add_domains(ep, t, c, moe_cpu_min(SUM_CHUNK, width - c), dx + c);
        for (uint32_t from = 0; from < d->map.domains; from++)
            if (from == d->own || (d->across[t] >> from & 1))
                take_weights(ep, from, t, dweights);
        moe_cpu_ep_finish_gradients(ep, t, dx, dweights);
    }
}
