/* SPDX-License-Identifier: Apache-2.0 */
/* The window: memory of one slot that all other slots can load from and store to, and its layout.
 *
 * Every slot of a session has one window, and all windows have the same layout. Both backends use
 * it: sealed memfds on the CPU, symmetric memory on CUDA. A slot writes into its peers' windows and
 * reads its own. So data crosses once, and a reader sends no requests. This file is plain data and
 * address arithmetic.
 *
 * Flags   A reader polls 8-byte flags {stamp:40, value:24}. One store writes stamp and value
 *         together, and flags need no clearing between steps. A stamp is the low 12 bits of the
 *         view's epoch and 28 bits of the step's number. So a flag of an older view or step never
 *         has the stamp that a reader waits for, even if its store arrives late. Stores of flags
 *         are releases and loads are acquires. A reader that sees a flag sees all that its writer
 *         stored before it.
 *
 * A step, as seen by slot s with a live peer p
 *   prepare   s stores into p's window counts[s][e] for each expert e on p, and head[s]. The head
 *             describes the step that s runs. If heads differ, all slots refuse the step alike,
 *             because all slots see all heads.
 *   dispatch  For every token t of s, s stores three things in this order. First the routing
 *             entries of those k that go to p. Then the token's row, once, for any number of
 *             experts on p. Then sent[s][t] = number of routing entries, 0 if p gets no row. The
 *             row's address is (source slot, token), so it needs no agreement. p waits for the
 *             flag of a token and expands the token's row into one row per expert. The counts
 *             decide where rows start, so the order is the same on every run.
 *   combine   For every token of p that has rows on s, s sums these rows in fp32, in k order. s
 *             stores the sum in the step's dtype into partials[s][t] of p's window, then stores
 *             returned[s][t]. After its last partial, s stores done[s]. p adds the partials in
 *             slot order. p rounds its local partial to the step's dtype as well, so y has the
 *             same bits whichever slot the token belongs to.
 *
 * A backward pass has the same flags in the same order. Each of its rows holds x and dy of a token,
 * one after the other. Each partial is the fp32 sum of dx rows. Behind it is one fp32 gradient for
 * each routing weight of the token on that slot, in the order of its routing entries. With the
 * counts, every slot sends to every peer the flags of enum moe_window_pass and the loads of all
 * experts. Only windows of sessions with `training` have room for this.
 *
 * Why no barrier is needed   s starts step n+1 after done[p] of step n came from every live p. p
 * stores done after it has read its rows of step n. So rows of n+1 never overwrite rows that are in
 * use. s stores partials of step n+1 after head[p] of n+1 came from every live p. p stores that
 * head after it has summed its partials of step n. Partials have separate memory: s stores those of
 * step n while p may still read rows of step n, even those of s. For this, every live slot must run
 * every step, also with T = 0. It must wait for the flags of all live peers, also of peers that
 * send it no rows. Heads, counts and routing entries have two copies, by the parity of the step's
 * number: a slot that refuses a step stores no done flags, so its peers may then be one step ahead.
 *
 * Several domains   If slots of one host or NVLink domain form domains (common/domains.h), a source
 * of another domain stores a row and its entries only into the gateway's window, at the same
 * addresses. The gateway stores them into the windows of its domain, as that source would. Sums for
 * foreign tokens go to the gateway, into the partials of the slot that has the source's domain and
 * the sum's index; the same holds for `returned`. The gateway stores its domain's sum into the
 * source's window as its own partial. Each region still has one writer.
 *
 * Quantised rows   Rows for experts in W8A8 travel quantised, as moe/row_format.h says, at the same
 * addresses. Sums do not.
 *
 * Quick regions   On CUDA, rows and partials of small buckets go to separate regions, where the
 * data carry their validity. Between steps these regions hold only blanks, and a writer never
 * stores a blank. A reader that finds anything else has the data, and puts a blank back. So no flag
 * follows the data, and a reader can use a row while it arrives. A blank is 32 bits of ones, a NaN
 * in every dtype. A writer replaces such bits by another NaN. */
#ifndef MOE_WINDOW_H
#define MOE_WINDOW_H

#include "base/size.h"
#include "moe/types.h"

#include <assert.h>

/* Kernels compute flags and addresses too. */
#ifdef __CUDACC__
#define MOE_WINDOW_INLINE __host__ __device__ static inline
#else
#define MOE_WINDOW_INLINE static inline
#endif

enum {
    MOE_WINDOW_VERSION = 6,
    MOE_WINDOW_PAGE = 4096,
    MOE_WINDOW_LINE = 64, /* data of two writers never share a line */
    MOE_WINDOW_VALUE_BITS = 24,
    MOE_WINDOW_STEP_BITS = 28,
    MOE_WINDOW_EPOCH_BITS = 12, /* of a stamp; a session's epochs span less (common/masks.h) */
    MOE_WINDOW_EXCHANGE_BYTES = 256,
    MOE_WINDOW_MAX_TOKENS = 1 << 20,
    /* Tokens times K. As a token may name one expert K times, a count is at most that. A count of
     * all 2^24 would not fit into a flag's value; workers allow 2^16 tokens in a step. */
    MOE_WINDOW_MAX_PAIRS = 1 << 24,
    MOE_WINDOW_QUICK_TOKENS = 512, /* largest bucket that uses the quick regions */
    MOE_WINDOW_PARTS = 2,          /* most parts of a partial; each part has a flag */
};
#define MOE_WINDOW_BLANK     UINT32_C(0xffffffff)
#define MOE_WINDOW_NOT_BLANK UINT32_C(0x7fffffff)         /* replaces a blank in data */
#define MOE_WINDOW_MAGIC     UINT64_C(0x776f646e69772d65) /* "e-window" */

/* Decides the layout. All slots of a session have the same shape. */
struct moe_window_shape {
    uint32_t slots, max_tokens, max_hidden, max_top_k, max_experts;
    bool training;           /* room for backward passes */
    uint32_t max_tokens_f32; /* largest bucket of F32 tokens; 0 = max_tokens */
};

/* First bytes of a window. The owner writes them; peers write only wake_count. */
struct moe_window_header {
    uint64_t magic;
    uint32_t version, slot;
    uint64_t epoch, bytes;
    uint8_t pad0[MOE_WINDOW_LINE - 32];
    uint32_t wake_count; /* CPU: a futex; raised after flags were stored */
    uint8_t pad1[MOE_WINDOW_LINE - 4];
    uint32_t sleepers; /* CPU: threads of the owner that sleep on wake_count */
    uint8_t pad2[MOE_WINDOW_LINE - 4];
    /* {when:56, slot + 1:8} while the owner waits for a slot; the owner refreshes it. So a slot
     * that waits in vain can find the slot that blocks the step. The backend defines `when`, and
     * the value at other times. */
    uint64_t waiting;
};

struct moe_window_exchange {
    uint64_t flag; /* value: bytes used of `data` */
    uint8_t data[MOE_WINDOW_EXCHANGE_BYTES];
    uint8_t pad[MOE_WINDOW_LINE - 8];
};

/* Flags of a head, which describes a slot's step. All but TOKENS must be equal on all slots. */
enum moe_window_head {
    MOE_HEAD_TOKENS,    /* T of the source */
    MOE_HEAD_LAYER,     /* the model's layer index */
    MOE_HEAD_HIDDEN,    /* W = moe_expert_width, of the rows */
    MOE_HEAD_EXPERTS,   /* E */
    MOE_HEAD_TOP_K,     /* K */
    MOE_HEAD_DTYPE,     /* enum moe_dtype; in a backward pass plus MOE_HEAD_BACKWARD */
    MOE_HEAD_BUCKET,    /* log2 of the bucket; plus MOE_HEAD_NO_MEMORY */
    MOE_HEAD_PLACEMENT, /* version of the placement, low bits */
    MOE_HEAD_COUNT
};

enum { MOE_HEAD_BACKWARD = 1 << 8 };
/* Added to the bucket: the source has no memory for this pass, so all slots refuse the pass. The
 * source sends no rows and waits for none. */
enum { MOE_HEAD_NO_MEMORY = 1 << 8 };

/* Flags of a backward pass that every slot sends to every peer. All but ROUTED must be equal on all
 * slots. The loads of the experts follow: how often the source's routed tokens chose each. */
enum moe_window_pass {
    MOE_PASS_ROUTED,     /* tokens of the source that used the router */
    MOE_PASS_ACCUMULATE, /* the pass adds to gradients */
    MOE_PASS_AUX_LOW,    /* low 16 bits of aux_coeff as an fp32 bit pattern */
    MOE_PASS_AUX_HIGH,
    MOE_PASS_LOADS = 8, /* [max_experts]; a line later */
};

/* A routing entry: one (token, k) for an expert on the window's owner. The token's `sent` flag
 * tells which entries are in use.
 *
 * CPU   the first `sent` entries of a token are in use, in k order; field `k` is set.
 * CUDA  entry k belongs to k. It is in use if bit k of the value of `sent` is set. A value has 24
 *       bits; those from 24 on are in a second flag (moe_window_more_sent_of). Field
 *       `position` is set: the position among the rows that the source sends to this expert. So a
 *       slot can place all rows of a pass at the same time. One store writes an entry, and the
 *       stamp in `key` makes it valid. It may arrive before or after `sent`. */
struct moe_window_route {
    uint64_t key; /* flag: value = expert id */
    float weight;
    union {
        uint32_t k;
        uint32_t position;
    };
};

/* Byte offsets from the window's start. [source] is the slot that writes. [token] is a token of the
 * source in sent and rows, and of the window's owner in returned and partials. */
struct moe_window_layout {
    struct moe_window_shape shape;
    size_t exchange; /* [2][slots] struct moe_window_exchange */
    size_t head;     /* [2][slots][MOE_HEAD_COUNT] flag */
    size_t done;     /* [slots] flag, a line each */
    size_t flushed;  /* CUDA: [slots] flag, a line each: no row of this step is in flight */
    size_t counts;   /* [2][slots][max_experts] flag: rows for this expert from this source */
    size_t routing;  /* [2][slots][max_tokens][max_top_k] struct moe_window_route */
    size_t pass;     /* [2][slots][MOE_PASS_LOADS + max_experts] flag; training only */
    size_t sent;     /* [slots][max_tokens] flag: routing entries, and the row if > 0, are here;
                        then, with more than 24 experts per token, as many second flags (CUDA) */
    size_t returned; /* [slots][max_tokens][PARTS] flag: the partial, or this part of it, is here */
    size_t rows; /* [slots] regions of `row_region` bytes: all rows of a bucket of either dtype */
    size_t partials; /* [slots] regions of `partial_region` bytes */
    size_t row_region, partial_region;
    size_t bytes; /* of the window up to here; the whole window on the CPU */
    /* CUDA: rows and partials of forward passes that fit (moe_window_is_quick). They hold blanks
     * between steps. */
    size_t quick_rows;
    size_t quick_partials;
    size_t quick_region;
    size_t quick_bytes; /* of the whole window on CUDA */
};

MOE_WINDOW_INLINE uint64_t moe_window_stamp(uint64_t epoch, uint32_t step)
{
    uint64_t step_mask = (UINT64_C(1) << MOE_WINDOW_STEP_BITS) - 1;
    uint64_t epoch_mask = (UINT64_C(1) << MOE_WINDOW_EPOCH_BITS) - 1;
    return (epoch & epoch_mask) << MOE_WINDOW_STEP_BITS | (step & step_mask);
}

MOE_WINDOW_INLINE uint64_t moe_window_flag(uint64_t stamp, uint32_t value)
{
    return stamp << MOE_WINDOW_VALUE_BITS | (value & ((1u << MOE_WINDOW_VALUE_BITS) - 1));
}

MOE_WINDOW_INLINE uint64_t moe_window_flag_stamp(uint64_t flag)
{
    return flag >> MOE_WINDOW_VALUE_BITS;
}

MOE_WINDOW_INLINE uint32_t moe_window_flag_value(uint64_t flag)
{
    return (uint32_t)flag & ((1u << MOE_WINDOW_VALUE_BITS) - 1);
}

/* Bytes from one row of a step to the next. A region has room for all rows of a step, because H <=
 * max_hidden, and buckets of each dtype are limited. */
static inline size_t moe_window_row_stride(uint32_t hidden, enum moe_dtype dtype)
{
    size_t bytes = hidden * moe_dtype_bytes(dtype);
    return (bytes + MOE_WINDOW_LINE - 1) & ~(size_t)(MOE_WINDOW_LINE - 1);
}

/* The same for the fp32 partials of a backward pass. The gradients of weights begin after one F32
 * row stride. */
static inline size_t moe_window_gradient_stride(uint32_t hidden)
{
    static_assert(MOE_COMMON_TOP_K * 4 <= MOE_WINDOW_LINE, "one line holds a token's gradients");
    return moe_window_row_stride(hidden, MOE_DTYPE_F32) + MOE_WINDOW_LINE;
}

/* Places `count` items of `each` bytes on whole pages at `*at`, and moves `*at` behind them. */
static inline bool moe_window_place(size_t *at, size_t *offset, size_t count, size_t each)
{
    size_t bytes;
    *offset = *at;
    return moe_size_mul(count, each, &bytes) && moe_size_add(*at, bytes, at) &&
           moe_size_round_up(*at, MOE_WINDOW_PAGE, at);
}

/* Bytes of `tokens` rows, or of `tokens_f32` rows of F32 tokens, whichever are more. */
static inline bool moe_window_rows_bytes(uint32_t hidden, size_t tokens, size_t tokens_f32,
                                         size_t *bytes)
{
    size_t wide;
    if (!moe_size_mul(tokens, moe_window_row_stride(hidden, MOE_DTYPE_BF16), bytes) ||
        !moe_size_mul(tokens_f32, moe_window_row_stride(hidden, MOE_DTYPE_F32), &wide))
        return false;
    *bytes = wide > *bytes ? wide : *bytes;
    return true;
}

/* False when the shape is out of range or the size does not fit a size_t. */
static inline bool moe_window_layout_of(const struct moe_window_shape *s,
                                        struct moe_window_layout *l)
{
    if (s->slots < 1 || s->slots > MOE_MAX_SLOTS || s->max_tokens < 1 ||
        s->max_tokens > MOE_WINDOW_MAX_TOKENS || s->max_hidden < 1 ||
        s->max_hidden > MOE_MAX_HIDDEN || s->max_top_k < 1 || s->max_top_k > MOE_MAX_TOP_K ||
        s->max_top_k > MOE_WINDOW_MAX_PAIRS / s->max_tokens || s->max_experts < 1 ||
        s->max_experts > MOE_MAX_EXPERTS || s->max_tokens_f32 > s->max_tokens)
        return false;
    size_t slots = s->slots, tokens = s->max_tokens, per_token, at = MOE_WINDOW_PAGE;
    size_t tokens_f32 = s->max_tokens_f32 != 0 ? s->max_tokens_f32 : tokens, pass_flags;
    size_t quick = MOE_WINDOW_QUICK_TOKENS, rows;
    quick = tokens < quick ? tokens : quick;
    /* Flags of two sources are on different lines. */
    if (!moe_size_round_up(tokens * sizeof(uint64_t), MOE_WINDOW_LINE, &per_token))
        return false;
    if (!moe_size_round_up(s->max_experts + MOE_PASS_LOADS, MOE_WINDOW_LINE / sizeof(uint64_t),
                           &pass_flags))
        return false;
    l->shape = *s;
    return moe_window_place(&at, &l->exchange, 2 * slots, sizeof(struct moe_window_exchange)) &&
           moe_window_place(&at, &l->head, 2 * slots, MOE_HEAD_COUNT * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->done, slots, MOE_WINDOW_LINE) &&
           moe_window_place(&at, &l->flushed, slots, MOE_WINDOW_LINE) &&
           moe_window_place(&at, &l->counts, 2 * slots, s->max_experts * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->routing, 2 * slots * tokens,
                            s->max_top_k * sizeof(struct moe_window_route)) &&
           moe_window_place(&at, &l->pass, s->training ? 2 * slots : 0,
                            pass_flags * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->sent, (s->max_top_k > MOE_WINDOW_VALUE_BITS ? 2 : 1) * slots,
                            per_token) &&
           moe_window_place(&at, &l->returned, slots, MOE_WINDOW_PARTS * per_token) &&
           moe_window_rows_bytes(s->max_hidden, tokens, tokens_f32, &rows) &&
           moe_size_mul(rows, s->training ? 2 : 1, &l->row_region) &&
           (s->training ? moe_size_mul(tokens, moe_window_gradient_stride(s->max_hidden),
                                       &l->partial_region)
                        : moe_size_mul(rows, 1, &l->partial_region)) &&
           moe_window_rows_bytes(s->max_hidden, quick, quick * tokens_f32 / tokens,
                                 &l->quick_region) &&
           moe_window_place(&at, &l->rows, slots, l->row_region) &&
           moe_window_place(&at, &l->partials, slots, l->partial_region) &&
           ((l->bytes = at), true) &&
           moe_window_place(&at, &l->quick_rows, slots, l->quick_region) &&
           moe_window_place(&at, &l->quick_partials, slots, l->quick_region) &&
           ((l->quick_bytes = at), true);
}

/* Whether the quick regions hold all rows of a forward pass. */
static inline bool moe_window_is_quick(const struct moe_window_layout *l, uint32_t bucket,
                                       uint32_t hidden, enum moe_dtype dtype)
{
    return bucket <= MOE_WINDOW_QUICK_TOKENS &&
           bucket * moe_window_row_stride(hidden, dtype) <= l->quick_region;
}

/* Addresses inside the window that starts at `base`. */
MOE_WINDOW_INLINE struct moe_window_exchange *
moe_window_exchange_of(const struct moe_window_layout *l, uint8_t *base, uint32_t parity,
                       uint32_t source)
{
    struct moe_window_exchange *e = (struct moe_window_exchange *)(void *)(base + l->exchange);
    return &e[parity * l->shape.slots + source];
}

MOE_WINDOW_INLINE uint64_t *moe_window_head_of(const struct moe_window_layout *l, uint8_t *base,
                                               uint32_t parity, uint32_t source)
{
    uint64_t *flags = (uint64_t *)(void *)(base + l->head);
    return &flags[(size_t)(parity * l->shape.slots + source) * MOE_HEAD_COUNT];
}

MOE_WINDOW_INLINE uint64_t *moe_window_done_of(const struct moe_window_layout *l, uint8_t *base,
                                               uint32_t source)
{
    return (uint64_t *)(void *)(base + l->done + (size_t)source * MOE_WINDOW_LINE);
}

MOE_WINDOW_INLINE uint64_t *moe_window_flushed_of(const struct moe_window_layout *l, uint8_t *base,
                                                  uint32_t source)
{
    return (uint64_t *)(void *)(base + l->flushed + (size_t)source * MOE_WINDOW_LINE);
}

MOE_WINDOW_INLINE uint64_t *moe_window_counts_of(const struct moe_window_layout *l, uint8_t *base,
                                                 uint32_t parity, uint32_t source)
{
    uint64_t *flags = (uint64_t *)(void *)(base + l->counts);
    return &flags[(size_t)(parity * l->shape.slots + source) * l->shape.max_experts];
}

/* Flags of enum moe_window_pass; training only. */
MOE_WINDOW_INLINE uint64_t *moe_window_pass_of(const struct moe_window_layout *l, uint8_t *base,
                                               uint32_t parity, uint32_t source)
{
    uint64_t *flags = (uint64_t *)(void *)(base + l->pass);
    size_t each = ((size_t)l->shape.max_experts + MOE_PASS_LOADS + 7) & ~(size_t)7;
    return &flags[(parity * l->shape.slots + source) * each];
}

MOE_WINDOW_INLINE struct moe_window_route *moe_window_routes_of(const struct moe_window_layout *l,
                                                                uint8_t *base, uint32_t parity,
                                                                uint32_t source, uint32_t token)
{
    struct moe_window_route *routes = (struct moe_window_route *)(void *)(base + l->routing);
    size_t row = (size_t)(parity * l->shape.slots + source) * l->shape.max_tokens + token;
    return &routes[row * l->shape.max_top_k];
}

MOE_WINDOW_INLINE uint64_t *moe_window_sent_of(const struct moe_window_layout *l, uint8_t *base,
                                               uint32_t source, uint32_t token)
{
    size_t line = ((size_t)l->shape.max_tokens * 8 + MOE_WINDOW_LINE - 1) / MOE_WINDOW_LINE;
    return (uint64_t *)(void *)(base + l->sent + source * line * MOE_WINDOW_LINE) + token;
}

/* CUDA, with more than 24 experts per token: the flag with the choices from 24 on. */
MOE_WINDOW_INLINE uint64_t *moe_window_more_sent_of(const struct moe_window_layout *l,
                                                    uint8_t *base, uint32_t source, uint32_t token)
{
    return moe_window_sent_of(l, base, l->shape.slots + source, token);
}

MOE_WINDOW_INLINE uint64_t *moe_window_returned_part_of(const struct moe_window_layout *l,
                                                        uint8_t *base, uint32_t source,
                                                        uint32_t token, uint32_t part)
{
    size_t line = ((size_t)l->shape.max_tokens * 8 + MOE_WINDOW_LINE - 1) / MOE_WINDOW_LINE;
    size_t flags = source * line * MOE_WINDOW_LINE * MOE_WINDOW_PARTS;
    return (uint64_t *)(void *)(base + l->returned + flags) + token * MOE_WINDOW_PARTS + part;
}

MOE_WINDOW_INLINE uint64_t *moe_window_returned_of(const struct moe_window_layout *l, uint8_t *base,
                                                   uint32_t source, uint32_t token)
{
    return moe_window_returned_part_of(l, base, source, token, 0);
}

MOE_WINDOW_INLINE void *moe_window_row_of(const struct moe_window_layout *l, uint8_t *base,
                                          uint32_t source, uint32_t token, size_t stride)
{
    return base + l->rows + source * l->row_region + token * stride;
}

MOE_WINDOW_INLINE void *moe_window_partial_of(const struct moe_window_layout *l, uint8_t *base,
                                              uint32_t source, uint32_t token, size_t stride)
{
    return base + l->partials + source * l->partial_region + token * stride;
}

MOE_WINDOW_INLINE void *moe_window_quick_row_of(const struct moe_window_layout *l, uint8_t *base,
                                                uint32_t source, uint32_t token, size_t stride)
{
    return base + l->quick_rows + source * l->quick_region + token * stride;
}

MOE_WINDOW_INLINE void *moe_window_quick_partial_of(const struct moe_window_layout *l,
                                                    uint8_t *base, uint32_t source, uint32_t token,
                                                    size_t stride)
{
    return base + l->quick_partials + source * l->quick_region + token * stride;
}

#endif
