/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of a pass. Internal to ep.c, ep_dispatch.c, ep_combine.c, ep_backward.c and
 * ep_domain*.c. */
#ifndef MOE_CPU_EP_PASS_H
#define MOE_CPU_EP_PASS_H

#include "common/dispatch_plan.h"
#include "cpu/exchange/ep.h"
#include "cpu/exchange/session.h"
#include "cpu/exchange/stores.h"

enum {
    BLOCK = 256,     /* tokens to wait for before their rows are copied or summed */
    SUM_CHUNK = 512, /* floats of a row summed at a time: fits the L1 cache */
    GRAIN = 32,      /* tokens that one thread copies or sums at a time */
};

/* Local rows of one token, in k order: row[first .. first + n - 1]. */
struct token_rows {
    uint32_t first;
    uint32_t n;
};

struct moe_cpu_ep_domains;                                     /* ep_domains.h */
void moe_cpu_ep_domains_destroy(struct moe_cpu_ep_domains *d); /* NULL is ignored */
/* Whether the pass's map allows a mask of these slots. */
bool moe_cpu_ep_may_lack(const struct moe_cpu_ep *ep, uint64_t live);
/* After go_straight: over several domains again, if any are left in the session's mask. */
void moe_cpu_ep_mask_domains(struct moe_cpu_ep *ep);

/* The parts of a pass that differ over several domains; chosen when the session forms. */
struct moe_cpu_ep_ways {
    struct moe_status (*plan)(struct moe_cpu_ep *ep, const struct moe_cpu_batch *batch);
    struct moe_status (*receive_all)(struct moe_cpu_ep *ep);
    struct moe_status (*return_sums)(struct moe_cpu_ep *ep);
    void (*finish_item)(void *ep, uint32_t item); /* an item of moe_cpu_parallel, by grains */
    void (*finish_backward_item)(void *ep, uint32_t item);
};

/* The state of a session's passes; one at a time. */
struct moe_cpu_ep {
    struct moe_session *session;
    const struct moe_cpu_ep_ways *ways;
    struct moe_cpu_ep_domains *domains; /* NULL: all rows go straight to their slots */
    uint64_t send_to;                   /* bit p: this slot stores rows into p's window */
    /* By source: the slot that stores the source's rows into this slot's window, and takes this
     * slot's sums for the source; and the region of partials for these sums there. A source of this
     * domain does both itself, and its region is this slot's. */
    uint8_t home_of[MOE_MAX_SLOTS], region_of[MOE_MAX_SLOTS];
    struct moe_cpu_batch batch;
    uint64_t stamp;
    uint32_t parity;
    bool open;                /* a pass has begun and is not closed */
    bool agreed;              /* all slots run the same pass */
    bool received;            /* combine can run */
    bool refused;             /* all slots have refused the pass */
    uint32_t width;           /* columns of a row: moe_expert_width */
    const uint8_t *rows_sent; /* [T, row_bytes] what experts get of this slot's tokens */
    size_t row_bytes;
    size_t token_bytes;     /* of W values of the dtype: a row of x, dy, y */
    size_t stride;          /* of x in the windows, dy behind it; of partials in a forward pass */
    size_t token_stride;    /* of the rows of a token in the windows: x, and dy if backward */
    size_t gradient_stride; /* of partials in a backward pass */

    /* Sending side, by local token. */
    uint16_t *target;       /* [max_tokens * max_top_k] slot of each (t, k), or MOE_PLAN_NO_SLOT */
    uint32_t *keys;         /* [max_tokens] of a layer that chooses copies by content */
    uint64_t *wanted;       /* [max_tokens] bit p: slot p gets the token's row */
    uint32_t *count;        /* [slots][max_experts] rows for each expert on each slot */
    const uint16_t *hop;    /* as target: the slot that this slot sends the row to */
    const uint64_t *direct; /* as wanted: those slots, which return the sums */
    /* By slot: stores that more stores of this pass soon follow, in the same message. */
    struct moe_cpu_stores begun[MOE_MAX_SLOTS];

    /* Receiving side. */
    uint32_t tokens_of[MOE_MAX_SLOTS];
    uint32_t *start;  /* [max_experts + 1] first row of each local expert; then the rows in use */
    uint32_t *rows;   /* [max_experts] rows of each local expert */
    uint32_t *cursor; /* [slots][max_experts] the source's next row of the expert */
    uint32_t *limit;  /* [slots][max_experts] the end of its rows */
    struct token_rows *of_token; /* [slots][max_tokens] */
    uint32_t *row; /* [slots * max_tokens * max_top_k] row numbers, indexed by of_token */
    uint32_t row_used;
    uint64_t row_total;
    uint8_t *x;      /* [start[local], row_bytes]; scratch of the device */
    uint8_t *dy;     /* [start[local], token_bytes], backward only */
    float *weight;   /* [start[local]]; scratch too */
    uint64_t *loads; /* [max_experts] choices of the group's routed tokens; backward only */
    uint64_t routed; /* such tokens in the group */

    /* Arguments of the parallel loops. */
    uint32_t source, block_first, block_end;
    void (*return_token)(const struct moe_cpu_ep *, const struct token_rows *, void *partial);
    const float *expert_out, *base;
    void *y;
    const float *dweight_rows;
    float *dweights;
};

static inline uint32_t grains_of(uint32_t tokens)
{
    return (tokens + GRAIN - 1) / GRAIN;
}

static inline struct token_rows *token_of(const struct moe_cpu_ep *ep, uint32_t source, uint32_t t)
{
    return &ep->of_token[(size_t)source * ep->session->layout.shape.max_tokens + t];
}

/* The token's row of `base`, or NULL if its sum begins with zeros. */
static inline const float *base_of(const struct moe_cpu_ep *ep, uint32_t t)
{
    const uint8_t *mode = ep->batch.mode;
    bool without = ep->base == NULL || (mode != NULL && (mode[t] & MOE_ROUTE_WITHOUT_SHARED) != 0);
    return without ? NULL : ep->base + (size_t)t * ep->width;
}

/* Tokens of the current block that item `item` of a shared loop works on. */
static inline uint32_t grain_of_block(const struct moe_cpu_ep *ep, uint32_t item, uint32_t *end)
{
    uint32_t first = ep->block_first + item * GRAIN;
    *end = moe_cpu_min(first + GRAIN, ep->block_end);
    return first;
}

/* Releases x, dy and weight of the rows, if any. */
void moe_cpu_ep_release_rows(struct moe_cpu_ep *ep);

/* What chooses the copies of a token's experts: its index, or a hash of its row of `bytes`. */
uint32_t moe_cpu_ep_key(const struct moe_layer *layer, const void *row, size_t bytes, uint32_t t);
/* Sets ep->target, wanted and count from the ids; also the legs of `out` that are set, for `map`.
 * After an error no pass has begun. */
struct moe_status moe_cpu_ep_plan(struct moe_cpu_ep *ep, const struct moe_cpu_batch *batch,
                                  const struct moe_domains *map,
                                  struct moe_dispatch_plan *out) MOE_CHECKED;

/* Fills the head of this pass. */
void moe_cpu_ep_fill_head(const struct moe_cpu_batch *batch, uint32_t head[MOE_HEAD_COUNT]);
/* Fills the flags of enum moe_window_pass, without the loads. */
void moe_cpu_ep_fill_params(const struct moe_cpu_batch *batch, uint32_t flags[MOE_PASS_LOADS]);

/* Rows of one source, in ep_dispatch.c. Waits for blocks of its tokens, expands their rows. */
struct moe_status moe_cpu_ep_receive_source(struct moe_cpu_ep *ep, uint32_t source) MOE_CHECKED;
/* Assigns the next row of `expert` to a token of `source`; false if no announced row is left. */
bool moe_cpu_ep_assign_row(struct moe_cpu_ep *ep, uint32_t source, uint32_t expert, float weight);
/* Copies token t of ep->source into its rows. */
void moe_cpu_ep_copy_token(const struct moe_cpu_ep *ep, uint32_t t);
/* The error for a token with other entries than its source announced. */
struct moe_status moe_cpu_ep_wrong_token(uint32_t source, uint32_t t);

/* Sums of rows, in ep_combine.c: sum[0 .. n-1] = columns c .. of the token's local rows, added in k
 * order; sum[j] += scale * row[c + j]. */
void moe_cpu_ep_sum_rows(const struct moe_cpu_ep *ep, const struct token_rows *rows, uint32_t c,
                         uint32_t n, float *sum);
void moe_cpu_ep_add_row(enum moe_dtype dtype, const void *row, uint32_t c, uint32_t n, float scale,
                        float *sum);
void moe_cpu_ep_store_row(enum moe_dtype dtype, void *row, uint32_t c, uint32_t n,
                          const float *from);
/* Rounds a sum to `dtype`, as storing and loading it does. */
void moe_cpu_ep_round(enum moe_dtype dtype, uint32_t n, float *sum);
/* Whether local token t gets no sum; then y is zeros. */
bool moe_cpu_ep_skips(const struct moe_cpu_ep *ep, uint32_t t);
/* Adds the zero experts to columns c .. c + n - 1 of local token t, and stores them in y. */
void moe_cpu_ep_finish_columns(const struct moe_cpu_ep *ep, uint32_t t, uint32_t c, uint32_t n,
                               float *sum);
/* Of a backward pass, in ep_backward.c: where dx and dweights of local token t go, filled with
 * zeros. False: that is all. Then the zero experts' part. */
bool moe_cpu_ep_begin_gradients(const struct moe_cpu_ep *ep, uint32_t t, float **dx,
                                float **dweights);
void moe_cpu_ep_finish_gradients(const struct moe_cpu_ep *ep, uint32_t t, float *dx,
                                 float *dweights);
/* In a backward pass: the gradients of weights behind a partial. */
float *moe_cpu_ep_weights_of_partial(const struct moe_cpu_ep *ep, void *partial);

/* The ways of a session without gateways. return_all sends this slot's sums for all tokens of other
 * slots to their homes, and stores done. */
struct moe_status moe_cpu_ep_receive_all(struct moe_cpu_ep *ep) MOE_CHECKED;
struct moe_status moe_cpu_ep_return_all(struct moe_cpu_ep *ep) MOE_CHECKED;
void moe_cpu_ep_finish_item(void *ep, uint32_t item);
void moe_cpu_ep_finish_backward_item(void *ep, uint32_t item);

/* The order of every combine, in ep_combine.c: sums all tokens of the peers and returns the sums.
 * Then finishes the local tokens, a block at a time as partials arrive, and closes the pass.
 * return_token writes the partial of a token that has at least one row here. finish_item is an item
 * of moe_cpu_parallel over the tokens of the current block. */
typedef void (*moe_cpu_ep_return_fn)(const struct moe_cpu_ep *ep, const struct token_rows *rows,
                                     void *partial);
struct moe_status moe_cpu_ep_run_combine(struct moe_cpu_ep *ep, moe_cpu_ep_return_fn return_token,
                                         void (*finish_item)(void *ctx, uint32_t item)) MOE_CHECKED;

/* Stores done: from here on the peers may overwrite the rows of this pass. */
void moe_cpu_ep_store_done(struct moe_cpu_ep *ep);
/* Waits for done from all peers; closes the pass. */
struct moe_status moe_cpu_ep_await_done(struct moe_cpu_ep *ep) MOE_CHECKED;

#endif
