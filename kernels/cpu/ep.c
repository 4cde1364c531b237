/* Prepare, dispatch and combine; see ep.h, and moe/window.h for the words and their order.
 *
 * Waiting happens on the calling thread only, a block of tokens at a time; copying and summing of a
 * block is shared with the device's threads. What comes out of a window is checked before it is
 * used as an index: a peer that is wrong costs a step, never this process. */
#include "cpu/ep.h"

#include "cpu/session.h"

#include <stdlib.h>

enum {
    BLOCK = 256,     /* tokens waited for before their rows are copied or summed */
    GRAIN = 32,      /* tokens that one thread copies or sums at a time */
    SUM_CHUNK = 512, /* floats of a row summed at a time: stays in the first-level cache */
    NOWHERE = 0xff,  /* target of a (token, k) that gets no row */
};

/* Local rows of one token, in k order: row[first .. first + n - 1]. */
struct token_rows {
    uint32_t first;
    uint32_t n;
};

struct moe_cpu_ep {
    struct moe_session *session;
    struct moe_cpu_batch batch;
    uint64_t stamp;
    uint32_t parity;
    bool open;     /* a pass has begun and its done words have not been stored */
    bool received; /* the pass can be combined */
    size_t row_bytes, stride;

    /* Sending side, by own token. */
    uint8_t *target;  /* [max_tokens * max_top_k] slot of each (t, k), or NOWHERE */
    uint16_t *wanted; /* [max_tokens] bit p: slot p gets the token's row */
    uint32_t *count;  /* [slots][max_experts] rows for each expert on each slot */

    /* Receiving side. */
    uint32_t tokens_of[MOE_MAX_SLOTS];
    uint32_t *start;  /* [max_experts + 1] first row of each local expert; the last: rows in use */
    uint32_t *rows;   /* [max_experts] rows of each local expert */
    uint32_t *cursor; /* [slots][max_experts] where the source's next row for the expert goes */
    uint32_t *limit;  /* [slots][max_experts] and where it must stop */
    struct token_rows *of_token; /* [slots][max_tokens] */
    uint32_t *row; /* [slots * max_tokens * max_top_k] row numbers that of_token points into */
    uint32_t row_used;
    uint64_t row_total;
    uint8_t *x;    /* [start[local], H] of the pass's dtype; scratch of the device */
    float *weight; /* [start[local]]; the same */

    /* Arguments of the loops that are shared among threads. */
    uint32_t source, block_first, block_end;
    const float *expert_out, *base;
    void *y;
};

/* ------------------------------------------------------------------ life */

static void *array(size_t n, size_t each, bool *ok)
{
    void *p = calloc(n, each);
    *ok = *ok && p != NULL;
    return p;
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
        ep->wanted = array(w->max_tokens, sizeof *ep->wanted, &ok);
        ep->count = array(experts, sizeof *ep->count, &ok);
        ep->start = array(w->max_experts + 1, sizeof *ep->start, &ok);
        ep->rows = array(w->max_experts, sizeof *ep->rows, &ok);
        ep->cursor = array(experts, sizeof *ep->cursor, &ok);
        ep->limit = array(experts, sizeof *ep->limit, &ok);
        ep->of_token = array((size_t)w->slots * w->max_tokens, sizeof *ep->of_token, &ok);
        ep->row = array(w->slots * pairs, sizeof *ep->row, &ok);
    }
    *out = ep;
    if (ok)
        return moe_ok();
    moe_cpu_ep_destroy(ep);
    *out = NULL;
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "out of memory for a session's tables");
}

static void give_rows(struct moe_cpu_ep *ep)
{
    moe_cpu_scratch_give(ep->session->device, ep->x);
    moe_cpu_scratch_give(ep->session->device, ep->weight);
    ep->x = NULL;
    ep->weight = NULL;
}

void moe_cpu_ep_destroy(struct moe_cpu_ep *ep)
{
    if (ep == NULL)
        return;
    give_rows(ep);
    free(ep->target);
    free(ep->wanted);
    free(ep->count);
    free(ep->start);
    free(ep->rows);
    free(ep->cursor);
    free(ep->limit);
    free(ep->of_token);
    free(ep->row);
    free(ep);
}

uint64_t moe_cpu_ep_rows(const struct moe_cpu_ep *ep)
{
    return ep->row_total;
}

/* --------------------------------------------------------------- prepare */

/* Every copy must be on a live slot: replicas are chosen by token id, the same on every run. */
static struct moe_status check_placement(const struct moe_session *s, const struct moe_layer *layer)
{
    const struct moe_placement *p = &layer->placement;
    if (p->slots != s->config.slots || layer->slot != s->config.slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "the layer was placed for slot %u of %u, the session has slot %u of %u",
                         layer->slot, p->slots, s->config.slot, s->config.slots);
    for (uint32_t e = 0; e < p->experts; e++) {
        bool available = p->offset[e] < p->offset[e + 1];
        for (uint32_t i = p->offset[e]; i < p->offset[e + 1]; i++)
            available = available && (s->config.live >> p->slot[i] & 1);
        if (!available)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE,
                             "expert %u has a copy on a slot that is not live, or none", e);
    }
    return moe_ok();
}

struct moe_status moe_cpu_ep_check(const struct moe_session *session, const struct moe_layer *layer,
                                   enum moe_dtype dtype, uint32_t bucket, uint32_t tokens)
{
    const struct moe_session_config *c = &session->config;
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "layer %u has weights missing",
                         layer->spec.layer);
    if (moe_dtype_bytes(dtype) == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED, "unknown dtype %d",
                         (int)dtype);
    if (layer->spec.hidden > c->max_hidden || layer->spec.router.top_k > c->max_top_k ||
        layer->spec.experts > c->max_experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "hidden %u, top-k %u, %u experts exceed the session's %u, %u, %u",
                         layer->spec.hidden, layer->spec.router.top_k, layer->spec.experts,
                         c->max_hidden, c->max_top_k, c->max_experts);
    if (bucket == 0 || (bucket & (bucket - 1)) != 0 || bucket > c->max_tokens || tokens > bucket)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "%u tokens in a bucket of %u: a bucket is a power of two, at most %u",
                         tokens, bucket, c->max_tokens);
    return check_placement(session, layer);
}

/* Where the rows of the own tokens go. Errors leave the pass unbegun. */
static struct moe_status plan(struct moe_cpu_ep *ep, const struct moe_cpu_batch *b)
{
    const struct moe_layer_spec *spec = &b->layer->spec;
    const struct moe_placement *place = &b->layer->placement;
    const struct moe_window_shape *w = &ep->session->layout.shape;
    uint32_t top_k = spec->router.top_k;
    int64_t id_limit = (int64_t)spec->experts + spec->router.zero_experts;
    memset(ep->count, 0, (size_t)w->slots * w->max_experts * sizeof *ep->count);
    for (uint32_t t = 0; t < b->tokens; t++) {
        bool skip = b->token_state != NULL && b->token_state[t] != MOE_TOKEN_OK;
        ep->wanted[t] = 0;
        for (uint32_t k = 0; k < top_k; k++) {
            size_t pair = (size_t)t * top_k + k;
            int32_t id = b->ids[pair];
            if (id >= id_limit && !skip)
                return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                                 "token %u is routed to expert %d of %lld", t, id,
                                 (long long)id_limit);
            ep->target[pair] = NOWHERE;
            if (skip || id < 0 || id >= (int32_t)spec->experts)
                continue;
            uint32_t first = place->offset[id], copies = place->offset[id + 1] - first;
            uint32_t slot = place->slot[first + t % copies];
            ep->target[pair] = (uint8_t)slot;
            ep->wanted[t] |= (uint16_t)(1u << slot);
            ep->count[(size_t)slot * w->max_experts + (uint32_t)id]++;
        }
    }
    return moe_ok();
}

/* This pass as a head: what must be the same on all slots, and the own number of tokens. */
static void fill_head(const struct moe_cpu_batch *b, uint32_t head[MOE_HEAD_WORDS])
{
    const uint32_t mask = (1u << MOE_WINDOW_VALUE_BITS) - 1;
    head[MOE_HEAD_TOKENS] = b->tokens;
    head[MOE_HEAD_LAYER] = b->layer->spec.layer & mask;
    head[MOE_HEAD_HIDDEN] = b->layer->spec.hidden;
    head[MOE_HEAD_EXPERTS] = b->layer->spec.experts;
    head[MOE_HEAD_TOP_K] = b->layer->spec.router.top_k;
    head[MOE_HEAD_DTYPE] = b->dtype;
    head[MOE_HEAD_BUCKET] = (uint32_t)__builtin_ctz(b->bucket);
    head[MOE_HEAD_PLACEMENT] = b->layer->placement.version & mask;
}

static void announce(struct moe_cpu_ep *ep, uint32_t peer, const uint32_t head[MOE_HEAD_WORDS])
{
    struct moe_session *s = ep->session;
    const struct moe_placement *place = &ep->batch.layer->placement;
    uint8_t *base = s->window[peer].base;
    uint64_t *counts = moe_window_counts_of(&s->layout, base, ep->parity, s->config.slot);
    const uint32_t *count = ep->count + (size_t)peer * s->layout.shape.max_experts;
    for (uint32_t e = 0; e < place->experts; e++)
        for (uint32_t i = place->offset[e]; i < place->offset[e + 1]; i++)
            if (place->slot[i] == peer)
                moe_cpu_session_store(&counts[e], ep->stamp, count[e]);
    uint64_t *words = moe_window_head_of(&s->layout, base, ep->parity, s->config.slot);
    for (uint32_t i = 0; i < MOE_HEAD_WORDS; i++)
        moe_cpu_session_store(&words[i], ep->stamp, head[i]);
}

/* From here on the peers may overwrite what this pass received. */
static void store_done(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p)) {
            moe_cpu_session_store(moe_window_done_of(&s->layout, s->window[p].base, s->config.slot),
                                  ep->stamp, 0);
            moe_cpu_session_ring(s, p);
        }
}

static struct moe_status await_done(struct moe_cpu_ep *ep)
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

/* The step number has run through its bits: words of the first steps would look new again. All
 * slots come here at the same step, clear their own windows, and start over. */
static struct moe_status wipe_words(struct moe_cpu_ep *ep)
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
    MOE_TRY(plan(ep, batch));
    give_rows(ep);
    ep->received = false;
    if (ep->open) {
        store_done(ep);
        MOE_TRY(await_done(ep));
    }
    if (s->step == (UINT32_C(1) << MOE_WINDOW_STEP_BITS) - 1)
        MOE_TRY(wipe_words(ep));
    ep->batch = *batch;
    ep->row_bytes = batch->layer->spec.hidden * moe_dtype_bytes(batch->dtype);
    ep->stride = moe_window_row_stride(batch->layer->spec.hidden, batch->dtype);
    s->step++;
    ep->stamp = moe_window_stamp(s->config.epoch, s->step);
    ep->parity = s->step & 1;
    ep->open = true;
    uint32_t head[MOE_HEAD_WORDS];
    fill_head(batch, head);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            announce(ep, p, head);
    return moe_ok();
}

/* ---------------------------------------------------------------- dispatch */

static void send_token(struct moe_cpu_ep *ep, uint32_t peer, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct moe_window_layout *l = &s->layout;
    const struct moe_cpu_batch *b = &ep->batch;
    uint8_t *base = s->window[peer].base;
    uint32_t top_k = b->layer->spec.router.top_k, n = 0;
    if (ep->wanted[t] >> peer & 1) {
        struct moe_window_route *routes =
            moe_window_routes_of(l, base, ep->parity, s->config.slot, t);
        for (uint32_t k = 0; k < top_k; k++) {
            size_t pair = (size_t)t * top_k + k;
            if (ep->target[pair] == peer)
                routes[n++] = (struct moe_window_route){
                    .key = moe_window_word(ep->stamp, (uint32_t)b->ids[pair]),
                    .weight = b->weights[pair],
                    .k = k};
        }
        memcpy(moe_window_row_of(l, base, s->config.slot, t, ep->stride),
               (const uint8_t *)b->x + t * ep->row_bytes, ep->row_bytes);
    }
    moe_cpu_session_store(moe_window_sent_of(l, base, s->config.slot, t), ep->stamp, n);
}

static uint32_t grains_of(uint32_t tokens)
{
    return (tokens + GRAIN - 1) / GRAIN;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Item i: grain i / slots for the slot (own + 1 + i % slots), so that slots start with different
 * receivers and each receiver can start early. */
static void send_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    struct moe_session *s = ep->session;
    uint32_t slots = s->config.slots, grain = item / slots;
    uint32_t peer = (s->config.slot + 1 + item % slots) % slots;
    if (!moe_cpu_session_has_peer(s, peer))
        return;
    uint32_t end = smaller((grain + 1) * GRAIN, ep->batch.tokens);
    for (uint32_t t = grain * GRAIN; t < end; t++)
        send_token(ep, peer, t);
    moe_cpu_session_ring(s, peer);
}

void moe_cpu_ep_send(struct moe_cpu_ep *ep)
{
    /* With no tokens there is still a head to be heard of. */
    uint32_t grains = ep->batch.tokens == 0 ? 1 : grains_of(ep->batch.tokens);
    moe_cpu_parallel(ep->session->device, grains * ep->session->config.slots, send_item, ep);
}

/* Reads a peer's head; *differs says whether the peer is about to run something else. */
static struct moe_status read_head(struct moe_cpu_ep *ep, uint32_t peer, bool *differs)
{
    struct moe_session *s = ep->session;
    uint32_t mine[MOE_HEAD_WORDS], theirs[MOE_HEAD_WORDS];
    const uint64_t *words =
        moe_window_head_of(&s->layout, moe_cpu_session_own(s), ep->parity, peer);
    for (uint32_t i = 0; i < MOE_HEAD_WORDS; i++)
        MOE_TRY(moe_cpu_session_wait(s, &words[i], ep->stamp, peer, &theirs[i]));
    fill_head(&ep->batch, mine);
    *differs = theirs[MOE_HEAD_TOKENS] > ep->batch.bucket;
    for (uint32_t i = MOE_HEAD_TOKENS + 1; i < MOE_HEAD_WORDS; i++)
        *differs = *differs || theirs[i] != mine[i];
    ep->tokens_of[peer] = theirs[MOE_HEAD_TOKENS];
    return moe_ok();
}

/* All heads are read before the verdict, so that all slots reach the same one. */
static struct moe_status agree(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    int other = -1;
    ep->tokens_of[s->config.slot] = ep->batch.tokens;
    for (uint32_t p = 0; p < s->config.slots; p++) {
        bool differs = false;
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(read_head(ep, p, &differs));
        if (differs && other < 0)
            other = (int)p;
    }
    if (other < 0)
        return moe_ok();
    ep->open = false;
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                     "slot %d runs another layer, dtype or bucket than layer %u, bucket %u", other,
                     ep->batch.layer->spec.layer, ep->batch.bucket);
}

/* The rows that `source` sends for each local expert, into ep->limit for the moment. */
static struct moe_status read_counts(struct moe_cpu_ep *ep, uint32_t source)
{
    struct moe_session *s = ep->session;
    const struct moe_layer *layer = ep->batch.layer;
    size_t at = (size_t)source * s->layout.shape.max_experts;
    const uint64_t *words =
        moe_window_counts_of(&s->layout, moe_cpu_session_own(s), ep->parity, source);
    uint64_t sum = 0;
    for (uint32_t l = 0; l < layer->local_experts; l++) {
        uint32_t e = layer->local[l];
        if (source == s->config.slot)
            ep->limit[at + l] = ep->count[at + e];
        else
            MOE_TRY(moe_cpu_session_wait(s, &words[e], ep->stamp, source, &ep->limit[at + l]));
        sum += ep->limit[at + l];
    }
    if (sum > (uint64_t)ep->tokens_of[source] * layer->spec.router.top_k)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "slot %u announces more rows than tokens",
                         source);
    return moe_ok();
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
    MOE_TRY(moe_cpu_scratch_take(s->device, at * ep->row_bytes, (void **)&ep->x));
    return moe_cpu_scratch_take(s->device, at * sizeof(float), (void **)&ep->weight);
}

/* Gives the next row of `expert` to a token of `source`; false when the source has no more. */
static bool assign_row(struct moe_cpu_ep *ep, uint32_t source, uint32_t expert, float weight)
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

static struct token_rows *token_of(const struct moe_cpu_ep *ep, uint32_t source, uint32_t t)
{
    return &ep->of_token[(size_t)source * ep->session->layout.shape.max_tokens + t];
}

static bool assign_own_token(struct moe_cpu_ep *ep, uint32_t t)
{
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t own = ep->session->config.slot, top_k = b->layer->spec.router.top_k;
    struct token_rows *rows = token_of(ep, own, t);
    rows->first = ep->row_used;
    for (size_t pair = (size_t)t * top_k; pair < (size_t)(t + 1) * top_k; pair++)
        if (ep->target[pair] == own &&
            !assign_row(ep, own, (uint32_t)b->ids[pair], b->weights[pair]))
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
        if (moe_window_word_stamp(routes[i].key) != ep->stamp ||
            !assign_row(ep, source, moe_window_word_value(routes[i].key), routes[i].weight))
            return false;
    return true;
}

static void copy_token_rows(const struct moe_cpu_ep *ep, uint32_t t)
{
    const struct moe_session *s = ep->session;
    const struct token_rows *rows = token_of(ep, ep->source, t);
    const void *from =
        ep->source == s->config.slot
            ? (const uint8_t *)ep->batch.x + t * ep->row_bytes
            : moe_window_row_of(&s->layout, moe_cpu_session_own(s), ep->source, t, ep->stride);
    for (uint32_t i = 0; i < rows->n; i++)
        memcpy(ep->x + ep->row[rows->first + i] * ep->row_bytes, from, ep->row_bytes);
}

/* Tokens of the current block that item `item` of a shared loop works on. */
static uint32_t grain_of_block(const struct moe_cpu_ep *ep, uint32_t item, uint32_t *end)
{
    uint32_t first = ep->block_first + item * GRAIN;
    *end = smaller(first + GRAIN, ep->block_end);
    return first;
}

static void copy_item(void *ctx, uint32_t item)
{
    uint32_t end;
    for (uint32_t t = grain_of_block(ctx, item, &end); t < end; t++)
        copy_token_rows(ctx, t);
}

/* Waits for a block of a source's tokens and expands their rows. */
static struct moe_status receive_block(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t source = ep->source;
    for (uint32_t t = ep->block_first; t < ep->block_end; t++) {
        uint32_t n = 0;
        bool good;
        if (source == s->config.slot) {
            good = assign_own_token(ep, t);
        } else {
            const uint64_t *word =
                moe_window_sent_of(&s->layout, moe_cpu_session_own(s), source, t);
            MOE_TRY(moe_cpu_session_wait(s, word, ep->stamp, source, &n));
            good = assign_peer_token(ep, source, t, n);
        }
        if (!good)
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                             "slot %u routes token %u otherwise than it announced", source, t);
    }
    moe_cpu_parallel(s->device, grains_of(ep->block_end - ep->block_first), copy_item, ep);
    return moe_ok();
}

/* Own rows first, then the peers in the order in which they send to this slot. */
static struct moe_status receive_all(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t slots = s->config.slots;
    for (uint32_t i = 0; i < slots; i++) {
        ep->source = (s->config.slot + slots - i) % slots;
        for (uint32_t t = 0; t < ep->tokens_of[ep->source]; t += BLOCK) {
            ep->block_first = t;
            ep->block_end = smaller(t + BLOCK, ep->tokens_of[ep->source]);
            MOE_TRY(receive_block(ep));
        }
    }
    const uint32_t stride = s->layout.shape.max_experts;
    for (uint32_t p = 0; p < slots; p++)
        for (uint32_t l = 0; l < ep->batch.layer->local_experts; l++)
            if (ep->cursor[p * stride + l] != ep->limit[p * stride + l])
                return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                                 "slot %u announced more rows than it sent", p);
    return moe_ok();
}

struct moe_status moe_cpu_ep_receive(struct moe_cpu_ep *ep, struct moe_rows *out)
{
    MOE_TRY(agree(ep));
    MOE_TRY(lay_out_rows(ep));
    MOE_TRY(receive_all(ep));
    ep->received = true;
    *out = (struct moe_rows){.local_experts = ep->batch.layer->local_experts,
                             .expert = ep->batch.layer->local,
                             .start = ep->start,
                             .count = ep->rows,
                             .x = ep->x,
                             .weight = ep->weight};
    return moe_ok();
}

/* ----------------------------------------------------------------- combine */

struct moe_status moe_cpu_ep_same_pass(const struct moe_cpu_ep *ep,
                                       const struct moe_cpu_batch *batch,
                                       const struct moe_rows *rows)
{
    const struct moe_cpu_batch *b = &ep->batch;
    if (ep->received && b->layer == batch->layer && b->dtype == batch->dtype &&
        b->bucket == batch->bucket && b->tokens == batch->tokens && b->x == batch->x &&
        b->ids == batch->ids && b->weights == batch->weights && rows->x == ep->x)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                     "combine wants a dispatch with the same arguments before it");
}

/* sum[0 .. n-1] = columns c .. of the token's local rows, added in k order. */
static void sum_rows(const struct moe_cpu_ep *ep, const struct token_rows *rows, uint32_t c,
                     uint32_t n, float *sum)
{
    size_t hidden = ep->batch.layer->spec.hidden;
    const uint32_t *row = ep->row + rows->first;
    memcpy(sum, ep->expert_out + row[0] * hidden + c, n * sizeof *sum);
    for (uint32_t i = 1; i < rows->n; i++) {
        const float *from = ep->expert_out + row[i] * hidden + c;
        for (uint32_t j = 0; j < n; j++)
            sum[j] += from[j];
    }
}

static void store_row(enum moe_dtype dtype, void *row, uint32_t c, uint32_t n, const float *from)
{
    if (dtype == MOE_DTYPE_F32) {
        memcpy((float *)row + c, from, n * sizeof *from);
        return;
    }
    uint16_t *to = (uint16_t *)row + c;
    for (uint32_t j = 0; j < n; j++)
        to[j] = moe_f32_to_bf16(from[j]);
}

/* sum[j] += scale * row[c + j] */
static void add_row(enum moe_dtype dtype, const void *row, uint32_t c, uint32_t n, float scale,
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

/* One grain of the tokens of ep->source, summed here and sent home. */
static void return_item(void *ctx, uint32_t item)
{
    struct moe_cpu_ep *ep = ctx;
    struct moe_session *s = ep->session;
    uint32_t home = ep->source, hidden = ep->batch.layer->spec.hidden;
    uint8_t *base = s->window[home].base;
    uint32_t end = smaller((item + 1) * GRAIN, ep->tokens_of[home]);
    float sum[SUM_CHUNK];
    for (uint32_t t = item * GRAIN; t < end; t++) {
        const struct token_rows *rows = token_of(ep, home, t);
        if (rows->n == 0)
            continue;
        void *to = moe_window_partial_of(&s->layout, base, s->config.slot, t, ep->stride);
        for (uint32_t c = 0; c < hidden; c += SUM_CHUNK) {
            uint32_t n = smaller(SUM_CHUNK, hidden - c);
            sum_rows(ep, rows, c, n, sum);
            store_row(ep->batch.dtype, to, c, n, sum);
        }
        moe_cpu_session_store(moe_window_returned_of(&s->layout, base, s->config.slot, t),
                              ep->stamp, rows->n);
    }
    moe_cpu_session_ring(s, home);
}

static void return_all(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    for (uint32_t i = 1; i < s->config.slots; i++) {
        ep->source = (s->config.slot + i) % s->config.slots;
        if (moe_cpu_session_has_peer(s, ep->source))
            moe_cpu_parallel(s->device, grains_of(ep->tokens_of[ep->source]), return_item, ep);
    }
    store_done(ep);
}

/* Columns c .. c + n - 1 of one own token: base, then the slots in order, then zero experts. */
static void finish_columns(const struct moe_cpu_ep *ep, uint32_t t, uint32_t c, uint32_t n)
{
    const struct moe_session *s = ep->session;
    const struct moe_cpu_batch *b = &ep->batch;
    uint32_t hidden = b->layer->spec.hidden, top_k = b->layer->spec.router.top_k;
    float sum[SUM_CHUNK] = {0}, own[SUM_CHUNK];
    if (ep->base != NULL)
        memcpy(sum, ep->base + (size_t)t * hidden + c, n * sizeof *sum);
    for (uint32_t p = 0; p < s->config.slots; p++) {
        if (!(ep->wanted[t] >> p & 1))
            continue;
        if (p == s->config.slot) {
            sum_rows(ep, token_of(ep, p, t), c, n, own);
            add_row(MOE_DTYPE_F32, own, 0, n, 1.0f, sum);
        } else {
            add_row(b->dtype,
                    moe_window_partial_of(&s->layout, moe_cpu_session_own(s), p, t, ep->stride), c,
                    n, 1.0f, sum);
        }
    }
    for (size_t pair = (size_t)t * top_k; pair < (size_t)(t + 1) * top_k; pair++)
        if (b->ids[pair] >= (int32_t)b->layer->spec.experts)
            add_row(b->dtype, (const uint8_t *)b->x + t * ep->row_bytes, c, n, b->weights[pair],
                    sum);
    store_row(b->dtype, (uint8_t *)ep->y + t * ep->row_bytes, c, n, sum);
}

static void finish_token(const struct moe_cpu_ep *ep, uint32_t t)
{
    uint32_t hidden = ep->batch.layer->spec.hidden;
    if (ep->batch.token_state != NULL && ep->batch.token_state[t] != MOE_TOKEN_OK) {
        memset((uint8_t *)ep->y + t * ep->row_bytes, 0, ep->row_bytes);
        return;
    }
    for (uint32_t c = 0; c < hidden; c += SUM_CHUNK)
        finish_columns(ep, t, c, smaller(SUM_CHUNK, hidden - c));
}

static void finish_item(void *ctx, uint32_t item)
{
    uint32_t end;
    for (uint32_t t = grain_of_block(ctx, item, &end); t < end; t++)
        finish_token(ctx, t);
}

static struct moe_status finish_block(struct moe_cpu_ep *ep)
{
    struct moe_session *s = ep->session;
    uint32_t unused;
    for (uint32_t t = ep->block_first; t < ep->block_end; t++)
        for (uint32_t p = 0; p < s->config.slots; p++)
            if (p != s->config.slot && (ep->wanted[t] >> p & 1))
                MOE_TRY(moe_cpu_session_wait(
                    s, moe_window_returned_of(&s->layout, moe_cpu_session_own(s), p, t), ep->stamp,
                    p, &unused));
    moe_cpu_parallel(s->device, grains_of(ep->block_end - ep->block_first), finish_item, ep);
    return moe_ok();
}

struct moe_status moe_cpu_ep_combine(struct moe_cpu_ep *ep, const float *expert_out,
                                     const float *base, void *y)
{
    MOE_INVARIANT(ep->received);
    MOE_TRY(moe_cpu_session_usable(ep->session));
    ep->received = false;
    ep->expert_out = expert_out;
    ep->base = base;
    ep->y = y;
    return_all(ep);
    for (uint32_t t = 0; t < ep->batch.tokens; t += BLOCK) {
        ep->block_first = t;
        ep->block_end = smaller(t + BLOCK, ep->batch.tokens);
        MOE_TRY(finish_block(ep));
    }
    return await_done(ep);
}
