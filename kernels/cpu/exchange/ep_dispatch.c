/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch: rows into the peers' windows, and from this slot's window into expert-major rows.
 *
 * Only the calling thread waits, for a block of tokens at a time. The device's threads then copy
 * the block. Values from a window are checked before they become an index: a faulty peer can fail
 * a step, but not crash this process. */
#include "cpu/exchange/ep_pass.h"

/* Returns the number of entries. */
static uint32_t send_routes(const struct moe_cpu_ep *ep, struct moe_cpu_stores *stores, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct moe_cpu_batch *b = &ep->batch;
    struct moe_window_route routes[MOE_MAX_TOP_K];
    uint32_t top_k = b->layer->spec.router.top_k, n = 0;
    for (uint32_t k = 0; k < top_k; k++) {
        size_t pair = (size_t)t * top_k + k;
        if (ep->hop[pair] == stores->slot)
            routes[n++] =
                (struct moe_window_route){.key = moe_window_flag(ep->stamp, (uint32_t)b->ids[pair]),
                                          .weight = b->weights[pair],
                                          .k = k};
    }
    const void *at =
        moe_window_routes_of(&s->layout, moe_cpu_session_own(s), ep->parity, s->config.slot, t);
    void *to = moe_cpu_stores_data(stores, at, n * sizeof *routes);
    if (to != NULL)
        memcpy(to, routes, n * sizeof *routes);
    return n;
}

static void send_row(const struct moe_cpu_ep *ep, struct moe_cpu_stores *stores, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct moe_cpu_batch *b = &ep->batch;
    const uint8_t *at =
        moe_window_row_of(&s->layout, moe_cpu_session_own(s), s->config.slot, t, ep->token_stride);
    void *to = moe_cpu_stores_data(stores, at, ep->row_bytes);
    if (to != NULL)
        memcpy(to, ep->rows_sent + t * ep->row_bytes, ep->row_bytes);
    to = b->backward ? moe_cpu_stores_data(stores, at + ep->stride, ep->token_bytes) : NULL;
    if (to != NULL)
        memcpy(to, (const uint8_t *)b->dy + t * ep->token_bytes, ep->token_bytes);
}

static void send_token(const struct moe_cpu_ep *ep, struct moe_cpu_stores *stores, uint32_t t)
{
    const struct moe_session *s = ep->session;
    uint32_t n = 0;
    if (ep->direct[t] >> stores->slot & 1) {
        n = send_routes(ep, stores, t);
        send_row(ep, stores, t);
    }
    const uint64_t *sent =
        moe_window_sent_of(&s->layout, moe_cpu_session_own(s), s->config.slot, t);
    moe_cpu_stores_flag(stores, sent, ep->stamp, n);
}

/* Item i: grain i / slots for the slot (own + 1 + i % slots). Slots start with different receivers,
 * so each receiver can start early. The first grain follows what prepare announced. */
static void send_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    struct moe_session *s = ep->session;
    uint32_t slots = s->config.slots, grain = item / slots;
    uint32_t peer = (s->config.slot + 1 + item % slots) % slots;
    bool rows = ep->send_to >> peer & 1;
    if (!moe_cpu_session_has_peer(s, peer) || !(rows || grain == 0))
        return;
    uint32_t end = rows ? moe_cpu_min((grain + 1) * GRAIN, ep->batch.tokens) : 0;
    struct moe_cpu_stores later = moe_cpu_stores_begin(s, peer);
    struct moe_cpu_stores *stores = grain == 0 ? &ep->begun[peer] : &later;
    for (uint32_t t = grain * GRAIN; t < end; t++)
        send_token(ep, stores, t);
    moe_cpu_stores_end(stores);
}

void moe_cpu_ep_send(struct moe_cpu_ep *ep)
{
    /* Without tokens there is still the head. */
    uint32_t grains = ep->batch.tokens == 0 ? 1 : grains_of(ep->batch.tokens);
    moe_cpu_parallel(ep->session->device, grains * ep->session->config.slots, send_item, ep);
}

/* Reads a peer's head. *differs: the peer runs another pass. *cannot: it has no memory. */
static struct moe_status read_head(struct moe_cpu_ep *ep, uint32_t peer, bool *differs,
                                   bool *cannot)
{
    struct moe_session *s = ep->session;
    uint32_t mine[MOE_HEAD_COUNT], theirs[MOE_HEAD_COUNT];
    const uint64_t *flags =
        moe_window_head_of(&s->layout, moe_cpu_session_own(s), ep->parity, peer);
    for (uint32_t i = 0; i < MOE_HEAD_COUNT; i++)
        MOE_TRY(moe_cpu_session_wait(s, &flags[i], ep->stamp, peer, &theirs[i]));
    moe_cpu_ep_fill_head(&ep->batch, mine);
    *differs = theirs[MOE_HEAD_TOKENS] > ep->batch.bucket;
    for (uint32_t i = MOE_HEAD_TOKENS + 1; i < MOE_HEAD_COUNT; i++)
        *differs = *differs || theirs[i] != mine[i];
    *cannot = (theirs[MOE_HEAD_BUCKET] & MOE_HEAD_NO_MEMORY) != 0;
    ep->tokens_of[peer] = theirs[MOE_HEAD_TOKENS];
    return moe_ok();
}

/* Reads a peer's parameters of a backward pass; adds its loads to the group's. */
static struct moe_status read_params(struct moe_cpu_ep *ep, uint32_t peer, bool *differs)
{
    struct moe_session *s = ep->session;
    uint32_t mine[MOE_PASS_LOADS], theirs[MOE_PASS_LOADS], load;
    const uint64_t *flags =
        moe_window_pass_of(&s->layout, moe_cpu_session_own(s), ep->parity, peer);
    for (uint32_t i = 0; i < MOE_PASS_LOADS; i++)
        MOE_TRY(moe_cpu_session_wait(s, &flags[i], ep->stamp, peer, &theirs[i]));
    moe_cpu_ep_fill_params(&ep->batch, mine);
    for (uint32_t i = MOE_PASS_ROUTED + 1; i < MOE_PASS_LOADS; i++)
        *differs = *differs || theirs[i] != mine[i];
    for (uint32_t e = 0; e < ep->batch.layer->spec.experts; e++) {
        MOE_TRY(moe_cpu_session_wait(s, &flags[MOE_PASS_LOADS + e], ep->stamp, peer, &load));
        ep->loads[e] += load;
    }
    ep->routed += theirs[MOE_PASS_ROUTED];
    return moe_ok();
}

/* All heads are equal, so every slot has sent its parameters. */
static struct moe_status gather_params(struct moe_cpu_ep *ep, int *other)
{
    struct moe_session *s = ep->session;
    const struct moe_cpu_pass_params *own = ep->batch.params;
    ep->routed = own != NULL ? own->routed : 0;
    for (uint32_t e = 0; e < ep->batch.layer->spec.experts; e++)
        ep->loads[e] = own != NULL ? own->loads[e] : 0;
    for (uint32_t p = 0; p < s->config.slots; p++) {
        bool differs = false;
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(read_params(ep, p, &differs));
        if (differs && *other < 0)
            *other = (int)p;
    }
    return moe_ok();
}

/* All slots refuse the pass: `other` runs a different one, or `unable` has no memory (-1: none). */
static struct moe_status refuse(struct moe_cpu_ep *ep, int other, int unable)
{
    ep->open = false;
    ep->refused = true;
    if (unable >= 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "slot %d has no memory for this pass", unable);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                     "slot %d runs another layer, dtype or bucket than layer %u, bucket %u", other,
                     ep->batch.layer->spec.layer, ep->batch.bucket);
}

/* Reads all heads before it decides, so all slots decide alike. */
struct moe_status moe_cpu_ep_agree(struct moe_cpu_ep *ep, struct moe_cpu_group_params *params)
{
    struct moe_session *s = ep->session;
    int other = -1, unable = -1;
    ep->tokens_of[s->config.slot] = ep->batch.tokens;
    for (uint32_t p = 0; p < s->config.slots; p++) {
        bool differs = false, cannot = p == s->config.slot && ep->batch.no_memory;
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(read_head(ep, p, &differs, &cannot));
        if (differs && other < 0)
            other = (int)p;
        if (cannot && unable < 0)
            unable = (int)p;
    }
    if (other < 0 && unable < 0 && ep->batch.backward)
        MOE_TRY(gather_params(ep, &other));
    if (other >= 0 || unable >= 0)
        return refuse(ep, other, unable);
    ep->agreed = true;
    if (params != NULL)
        *params = (struct moe_cpu_group_params){.routed = ep->routed, .loads = ep->loads};
    return moe_ok();
}

/* Reads how many rows `source` sends for each local expert, into ep->limit. */
static struct moe_status read_counts(struct moe_cpu_ep *ep, uint32_t source)
{
    struct moe_session *s = ep->session;
    const struct moe_layer *layer = ep->batch.layer;
    size_t at = (size_t)source * s->layout.shape.max_experts;
    const uint64_t *flags =
        moe_window_counts_of(&s->layout, moe_cpu_session_own(s), ep->parity, source);
    uint64_t sum = 0;
    for (uint32_t l = 0; l < layer->local_experts; l++) {
        uint32_t e = layer->local[l];
        if (source == s->config.slot)
            ep->limit[at + l] = ep->count[at + e];
        else
            MOE_TRY(moe_cpu_session_wait(s, &flags[e], ep->stamp, source, &ep->limit[at + l]));
        sum += ep->limit[at + l];
    }
    if (sum > (uint64_t)ep->tokens_of[source] * layer->spec.router.top_k)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "slot %u announces more rows than tokens",
                         source);
    return moe_ok();
}

/* All or nothing. */
static struct moe_status allocate_rows(struct moe_cpu_ep *ep, size_t rows)
{
    struct moe_device *device = ep->session->device;
    struct moe_status st = moe_cpu_scratch_take(device, rows * ep->row_bytes, (void **)&ep->x);
    if (!moe_failed(&st) && ep->batch.backward)
        st = moe_cpu_scratch_take(device, rows * ep->token_bytes, (void **)&ep->dy);
    if (!moe_failed(&st))
        st = moe_cpu_scratch_take(device, rows * sizeof(float), (void **)&ep->weight);
    if (moe_failed(&st))
        moe_cpu_ep_release_rows(ep);
    return st;
}

/* Experts in ascending order, each from an aligned row; inside, sources in slot order. */
static struct moe_status lay_out_rows(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t slots = s->config.slots, stride = s->layout.shape.max_experts;
    uint32_t local = ep->batch.layer->local_experts;
    for (uint32_t p = 0; p < slots; p++) {
        ep->tokens_of[p] = (s->config.live >> p & 1) ? ep->tokens_of[p] : 0;
        if (s->config.live >> p & 1)
            MOE_TRY(read_counts(ep, p));
    }
    uint32_t at = 0;
    ep->row_total = 0;
    for (uint32_t l = 0; l < local; l++) {
        ep->start[l] = at;
        for (uint32_t p = 0; p < slots; p++) {
            uint32_t n = (s->config.live >> p & 1) ? ep->limit[p * stride + l] : 0;
            ep->cursor[p * stride + l] = at;
            at += n;
            ep->limit[p * stride + l] = at;
        }
        ep->rows[l] = at - ep->start[l];
        ep->row_total += ep->rows[l];
        at = (at + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
    }
    ep->start[local] = at;
    ep->row_used = 0;
    return allocate_rows(ep, at);
}

bool moe_cpu_ep_assign_row(struct moe_cpu_ep *ep, uint32_t source, uint32_t expert, float weight)
{
    const struct moe_layer *layer = ep->batch.layer;
    int32_t l = expert < layer->spec.experts ? layer->local_index[expert] : -1;
    size_t at = (size_t)source * ep->session->layout.shape.max_experts + (uint32_t)l;
    if (l < 0 || ep->cursor[at] >= ep->limit[at])
        return false;
    uint32_t row = ep->cursor[at]++;
    ep->weight[row] = weight;
    ep->row[ep->row_used++] = row;
    return true;
}

static bool assign_own_token(struct moe_cpu_ep *ep, uint32_t t)
{
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t own = ep->session->config.slot, top_k = b->layer->spec.router.top_k;
    struct token_rows *rows = token_of(ep, own, t);
    rows->first = ep->row_used;
    for (size_t pair = (size_t)t * top_k; pair < (size_t)(t + 1) * top_k; pair++)
        if (ep->target[pair] == own &&
            !moe_cpu_ep_assign_row(ep, own, (uint32_t)b->ids[pair], b->weights[pair]))
            return false;
    rows->n = ep->row_used - rows->first;
    return true;
}

static bool assign_peer_token(struct moe_cpu_ep *ep, uint32_t source, uint32_t t, uint32_t n)
{
    const struct moe_session *s = ep->session;
    const struct moe_window_route *routes =
        moe_window_routes_of(&s->layout, moe_cpu_session_own(s), ep->parity, source, t);
    struct token_rows *rows = token_of(ep, source, t);
    rows->first = ep->row_used;
    rows->n = n;
    if (n > ep->batch.layer->spec.router.top_k)
        return false;
    for (uint32_t i = 0; i < n; i++)
        if (moe_window_flag_stamp(routes[i].key) != ep->stamp ||
            !moe_cpu_ep_assign_row(ep, source, moe_window_flag_value(routes[i].key),
                                   routes[i].weight))
            return false;
    return true;
}

void moe_cpu_ep_copy_token(const struct moe_cpu_ep *ep, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct token_rows *rows = token_of(ep, ep->source, t);
    const uint8_t *from, *dy;
    if (ep->source == s->config.slot) {
        from = ep->rows_sent + t * ep->row_bytes;
        dy = ep->dy != NULL ? (const uint8_t *)ep->batch.dy + t * ep->token_bytes : NULL;
    } else {
        from =
            moe_window_row_of(&s->layout, moe_cpu_session_own(s), ep->source, t, ep->token_stride);
        dy = from + ep->stride;
    }
    for (uint32_t i = 0; i < rows->n; i++) {
        size_t row = ep->row[rows->first + i];
        memcpy(ep->x + row * ep->row_bytes, from, ep->row_bytes);
        if (ep->dy != NULL)
            memcpy(ep->dy + row * ep->token_bytes, dy, ep->token_bytes);
    }
}

static void copy_item(void *ctx, uint32_t item)
{
    uint32_t end;
    for (uint32_t t = grain_of_block(ctx, item, &end); t < end; t++)
        moe_cpu_ep_copy_token(ctx, t);
}

struct moe_status moe_cpu_ep_wrong_token(uint32_t source, uint32_t t)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                     "slot %u routes token %u otherwise than it announced", source, t);
}

/* Waits for a block of a source's tokens and expands their rows. */
static struct moe_status receive_block(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t source = ep->source, from = ep->home_of[source];
    for (uint32_t t = ep->block_first; t < ep->block_end; t++) {
        uint32_t n = 0;
        bool good;
        if (source == s->config.slot) {
            good = assign_own_token(ep, t);
        } else {
            const uint64_t *flag =
                moe_window_sent_of(&s->layout, moe_cpu_session_own(s), source, t);
            MOE_TRY(moe_cpu_session_wait(s, flag, ep->stamp, from, &n));
            good = assign_peer_token(ep, source, t, n);
        }
        if (!good)
            return moe_cpu_ep_wrong_token(source, t);
    }
    moe_cpu_parallel(s->device, grains_of(ep->block_end - ep->block_first), copy_item, ep);
    return moe_ok();
}

struct moe_status moe_cpu_ep_receive_source(struct moe_cpu_ep *ep, uint32_t source)
{
    ep->source = source;
    for (uint32_t t = 0; t < ep->tokens_of[source]; t += BLOCK) {
        ep->block_first = t;
        ep->block_end = moe_cpu_min(t + BLOCK, ep->tokens_of[source]);
        MOE_TRY(receive_block(ep));
    }
    return moe_ok();
}

/* This slot's rows first, then the peers in the order in which they send to this slot. */
struct moe_status moe_cpu_ep_receive_all(struct moe_cpu_ep *ep)
{
    uint32_t slots = ep->session->config.slots, own = ep->session->config.slot;
    for (uint32_t i = 0; i < slots; i++)
        MOE_TRY(moe_cpu_ep_receive_source(ep, (own + slots - i) % slots));
    return moe_ok();
}

/* All announced rows have come. */
static struct moe_status check_rows(const struct moe_cpu_ep *ep)
{
    const uint32_t stride = ep->session->layout.shape.max_experts;
    for (uint32_t p = 0; p < ep->session->config.slots; p++)
        for (uint32_t l = 0; l < ep->batch.layer->local_experts; l++)
            if (ep->cursor[p * stride + l] != ep->limit[p * stride + l])
                return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                                 "slot %u announced more rows than it sent", p);
    return moe_ok();
}

struct moe_status moe_cpu_ep_receive(struct moe_cpu_ep *ep, struct moe_rows *out)
{
    if (!ep->agreed)
        MOE_TRY(moe_cpu_ep_agree(ep, NULL));
    MOE_TRY(lay_out_rows(ep));
    MOE_TRY(ep->ways->receive_all(ep));
    MOE_TRY(check_rows(ep));
    ep->received = true;
    *out = (struct moe_rows){.local_experts = ep->batch.layer->local_experts,
                             .expert = ep->batch.layer->local,
                             .start = ep->start,
                             .count = ep->rows,
                             .x = ep->x,
                             .quantised = ep->batch.row_bytes != 0,
                             .weight = ep->weight};
    return moe_ok();
}

const void *moe_cpu_ep_dy_rows(const struct moe_cpu_ep *ep)
{
    return ep->dy;
}
