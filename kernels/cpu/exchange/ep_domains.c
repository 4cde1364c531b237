/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch over several domains; see ep_domains.h. */
#include "cpu/exchange/ep_domains.h"

#include "cpu/exchange/stores.h"

#include <stdlib.h>

/* ------------------------------------------------------------------ prepare */

/* Rows for other domains go to the gateways there. */
static void choose_hops(struct moe_cpu_ep *ep, uint32_t t, uint32_t top_k)
{
    struct moe_cpu_ep_domains *d = ep->domains;
    const struct moe_domains *map = &d->map;
    uint8_t *entry =
        d->entry_index + domain_token(ep, d->own, t) * ep->session->layout.shape.max_top_k;
    uint8_t entries = 0;
    uint64_t direct = 0;
    for (uint32_t k = 0; k < top_k; k++) {
        size_t pair = (size_t)t * top_k + k;
        uint32_t slot = ep->target[pair];
        d->hop[pair] = MOE_PLAN_NO_SLOT;
        if (slot == MOE_PLAN_NO_SLOT)
            continue;
        if (map->domain_of[slot] == d->own)
            entry[entries++] = (uint8_t)map->index_of[slot];
        else
            slot = moe_domains_gateway(map, ep->session->config.slot, map->domain_of[slot]);
        d->hop[pair] = (uint16_t)slot;
        direct |= UINT64_C(1) << slot;
    }
    d->entries[domain_token(ep, d->own, t)] = entries;
    d->direct[t] = direct;
}

static struct moe_status plan_over_domains(struct moe_cpu_ep *ep, const struct moe_cpu_batch *batch)
{
    struct moe_cpu_ep_domains *d = ep->domains;
    struct moe_dispatch_plan out = {.across = d->across};
    MOE_TRY(moe_cpu_ep_plan(ep, batch, &d->map, &out));
    for (uint32_t t = 0; t < batch->tokens; t++)
        choose_hops(ep, t, batch->layer->spec.router.top_k);
    return moe_ok();
}

/* ------------------------------------------------------------------ receive and forward */

/* Reads the routing entries of a partner's token, and assigns this slot's rows. */
static bool assign_partner_token(struct moe_cpu_ep *ep, uint32_t from, uint32_t t, uint32_t n)
{
    const struct moe_session *s = ep->session;
    struct moe_cpu_ep_domains *d = ep->domains;
    const struct moe_layer *layer = ep->batch.layer;
    const struct moe_window_route *routes =
        moe_window_routes_of(&s->layout, moe_cpu_session_own(s), ep->parity, ep->source, t);
    struct token_rows *rows = token_of(ep, ep->source, t);
    uint8_t *entry = d->entry_index + domain_token(ep, from, t) * s->layout.shape.max_top_k;
    const void *row =
        moe_window_row_of(&s->layout, moe_cpu_session_own(s), ep->source, t, ep->token_stride);
    uint32_t choice = moe_cpu_ep_key(layer, row, ep->row_bytes, t);
    rows->first = ep->row_used;
    if (n > layer->spec.router.top_k)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t key = routes[i].key;
        uint32_t expert = moe_window_flag_value(key);
        if (moe_window_flag_stamp(key) != ep->stamp || expert >= layer->spec.experts ||
            layer->active.offset[expert] == layer->active.offset[expert + 1]) /* no live copy */
            return false;
        uint32_t slot = moe_dispatch_target(&layer->active, expert, choice);
        if (d->map.domain_of[slot] != d->own)
            return false;
        entry[i] = (uint8_t)d->map.index_of[slot];
        if (entry[i] == d->index &&
            !moe_cpu_ep_assign_row(ep, ep->source, expert, routes[i].weight))
            return false;
    }
    d->entries[domain_token(ep, from, t)] = (uint8_t)n;
    rows->n = ep->row_used - rows->first;
    return true;
}

/* Stores a partner's token into the window of the slot of index `index`, as a source of this domain
 * does. */
static void forward_token(const struct moe_cpu_ep *ep, struct moe_cpu_stores *stores,
                          uint32_t index, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct moe_window_layout *l = &s->layout;
    uint8_t *own = moe_cpu_session_own(s);
    uint32_t from = ep->domains->from, n = 0;
    const uint8_t *entry = entries_of(ep, from, t);
    const struct moe_window_route *routes = moe_window_routes_of(l, own, ep->parity, ep->source, t);
    struct moe_window_route chosen[MOE_MAX_TOP_K];
    for (uint32_t i = 0; i < ep->domains->entries[domain_token(ep, from, t)]; i++)
        if (entry[i] == index)
            chosen[n++] = routes[i];
    if (n > 0) {
        void *to = moe_cpu_stores_data(stores, routes, n * sizeof *chosen);
        if (to != NULL)
            memcpy(to, chosen, n * sizeof *chosen);
        const uint8_t *row = moe_window_row_of(l, own, ep->source, t, ep->token_stride);
        for (uint32_t half = 0; half < (ep->batch.backward ? 2u : 1u); half++) {
            to = moe_cpu_stores_data(stores, row + half * ep->stride, ep->row_bytes);
            if (to != NULL)
                memcpy(to, row + half * ep->stride, ep->row_bytes);
        }
    }
    moe_cpu_stores_flag(stores, moe_window_sent_of(l, own, ep->source, t), ep->stamp, n);
}

/* One grain of a partner's tokens: this slot's rows, then those of the others in the domain. Slots
 * start with different receivers. */
static void forward_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    const struct moe_cpu_ep_domains *d = ep->domains;
    uint32_t end, first = grain_of_block(ep, item, &end);
    for (uint32_t i = 1; i < d->map.size; i++) {
        uint32_t index = (d->index + i) % d->map.size;
        struct moe_cpu_stores stores =
            moe_cpu_stores_begin(ep->session, moe_domains_slot(&d->map, d->own, index));
        for (uint32_t t = first; t < end; t++)
            forward_token(ep, &stores, index, t);
        moe_cpu_stores_end(&stores);
    }
    for (uint32_t t = first; t < end; t++)
        moe_cpu_ep_copy_token(ep, t);
}

static struct moe_status receive_partner_block(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    for (uint32_t t = ep->block_first; t < ep->block_end; t++) {
        uint32_t n;
        const uint64_t *flag =
            moe_window_sent_of(&s->layout, moe_cpu_session_own(s), ep->source, t);
        MOE_TRY(moe_cpu_session_wait(s, flag, ep->stamp, ep->source, &n));
        if (!assign_partner_token(ep, ep->domains->from, t, n))
            return moe_cpu_ep_wrong_token(ep->source, t);
    }
    moe_cpu_parallel(s->device, grains_of(ep->block_end - ep->block_first), forward_item, ep);
    return moe_ok();
}

static struct moe_status receive_partner(struct moe_cpu_ep *ep, uint32_t from)
{
    ep->domains->from = from;
    ep->source = moe_domains_slot(&ep->domains->map, from, ep->domains->index);
    for (uint32_t t = 0; t < ep->tokens_of[ep->source]; t += BLOCK) {
        ep->block_first = t;
        ep->block_end = moe_cpu_min(t + BLOCK, ep->tokens_of[ep->source]);
        MOE_TRY(receive_partner_block(ep));
    }
    return moe_ok();
}

/* Partners first, since others wait for what this slot forwards. Every slot does so, and partners
 * send without waiting. So no cycle of waits exists. */
static struct moe_status receive_over_domains(struct moe_cpu_ep *ep)
{
    const struct moe_cpu_ep_domains *d = ep->domains;
    uint32_t domains = d->map.domains, slots = ep->session->config.slots;
    for (uint32_t i = 1; i < domains; i++)
        MOE_TRY(receive_partner(ep, (d->own + domains - i) % domains));
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t source = (ep->session->config.slot + slots - i) % slots;
        bool partner = ep->home_of[source] == ep->session->config.slot;
        if (!partner || i == 0)
            MOE_TRY(moe_cpu_ep_receive_source(ep, source));
    }
    return moe_ok();
}

/* ------------------------------------------------------------------ create, destroy */

void moe_cpu_ep_domains_destroy(struct moe_cpu_ep_domains *d)
{
    if (d == NULL)
        return;
    free(d->hop);
    free(d->direct);
    free(d->across);
    free(d->entries);
    free(d->entry_index);
    free(d);
}

static struct moe_cpu_ep_domains *create(const struct moe_window_shape *w,
                                         const struct moe_domains *map, uint32_t slot)
{
    struct moe_cpu_ep_domains *d = calloc(1, sizeof *d);
    size_t tokens = w->max_tokens;
    if (d == NULL)
        return NULL;
    d->map = *map;
    d->own = map->domain_of[slot];
    d->index = map->index_of[slot];
    d->hop = calloc(tokens * w->max_top_k, sizeof *d->hop);
    d->direct = calloc(tokens, sizeof *d->direct);
    d->across = calloc(tokens, sizeof *d->across);
    d->entries = calloc(map->domains * tokens, sizeof *d->entries);
    d->entry_index = calloc(map->domains * tokens, w->max_top_k);
    if (d->hop != NULL && d->direct != NULL && d->across != NULL && d->entries != NULL &&
        d->entry_index != NULL)
        return d;
    moe_cpu_ep_domains_destroy(d);
    return NULL;
}

/* Who stores for whom; see struct moe_cpu_ep. */
static void set_tables(struct moe_cpu_ep *ep)
{
    const struct moe_cpu_ep_domains *d = ep->domains;
    const struct moe_domains *map = &d->map;
    ep->hop = d->hop;
    ep->direct = d->direct;
    ep->send_to = 0;
    for (uint32_t p = 0; p < ep->session->config.slots; p++) {
        if (!moe_cpu_session_has_peer(ep->session, p))
            continue;
        uint32_t domain = map->domain_of[p];
        ep->home_of[p] = (uint8_t)moe_domains_slot(map, d->own, map->index_of[p]);
        ep->region_of[p] = (uint8_t)moe_domains_slot(map, domain, d->index);
        if (domain == d->own || map->index_of[p] == d->index)
            ep->send_to |= UINT64_C(1) << p;
    }
}

static void go_over_domains(struct moe_cpu_ep *ep)
{
    static const struct moe_cpu_ep_ways ways = {
        .plan = plan_over_domains,
        .receive_all = receive_over_domains,
        .return_sums = moe_cpu_ep_return_over_domains,
        .finish_item = moe_cpu_ep_finish_over_domains,
        .finish_backward_item = moe_cpu_ep_finish_backward_over_domains,
    };
    ep->ways = &ways;
    set_tables(ep);
}

struct moe_status moe_cpu_ep_use_domains(struct moe_cpu_ep *ep, const struct moe_domains *map)
{
    if (moe_domains_flat(map))
        return moe_ok();
    ep->domains = create(&ep->session->layout.shape, map, ep->session->config.slot);
    if (ep->domains == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for the tables of %u domains", map->domains);
    go_over_domains(ep);
    return moe_ok();
}

/* ------------------------------------------------------------------ masks */

/* Sums of gradients go straight to slots of other domains, into regions that a gateway writes in a
 * pass. So in a session that trains, late sums might come after the rows of another epoch. */
static bool has_other_writers(const struct moe_cpu_ep *ep)
{
    return ep->domains != NULL && ep->session->config.training;
}

uint64_t moe_cpu_ep_together(const struct moe_cpu_ep *ep)
{
    uint32_t slot = ep->session->config.slot;
    if (has_other_writers(ep))
        return 0;
    return ep->domains != NULL ? moe_domains_together(&ep->domains->map, slot)
                               : UINT64_C(1) << slot;
}

bool moe_cpu_ep_may_lack(const struct moe_cpu_ep *ep, uint64_t live)
{
    struct moe_domains left;
    return ep->domains == NULL ||
           (!has_other_writers(ep) && moe_domains_without(&ep->domains->map, live, &left));
}

/* The tables of fewer domains fit. */
void moe_cpu_ep_mask_domains(struct moe_cpu_ep *ep)
{
    struct moe_cpu_ep_domains *d = ep->domains;
    if (d == NULL)
        return;
    bool whole = moe_domains_without(&d->map, ep->session->config.live, &d->map);
    MOE_INVARIANT(whole); /* moe_cpu_ep_prepare_mask has said so */
    if (moe_domains_flat(&d->map)) {
        moe_cpu_ep_domains_destroy(d);
        ep->domains = NULL;
        return;
    }
    d->own = d->map.domain_of[ep->session->config.slot];
    go_over_domains(ep);
}
