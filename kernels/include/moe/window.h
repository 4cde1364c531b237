/* SPDX-License-Identifier: Apache-2.0 */
/* The window: memory of one slot that all other slots can load from and store to, and its layout.
 *
 * Every slot of a session has one window of the same layout; both backends use it (sealed memfds on
 * the CPU, symmetric memory on CUDA). A slot writes into its peers' windows and reads its own, so
 * data crosses once and a reader never asks. This file is plain data and address arithmetic.
 *
 * Words   Everything a reader polls is an 8-byte word {stamp:40, value:24}, stored at once: value
 *         and validity travel together, and nothing has to be cleared between steps. A stamp is the
 *         view's epoch (low 12 bits) and the step's number (28 bits), so what a writer of an older
 *         view or step left behind, or stores late, never equals the stamp that is waited for.
 *         Stores of words are releases, loads are acquires: who has seen a word sees all that its
 *         writer stored before it.
 *
 * A step, as seen by slot s with a live peer p
 *   prepare   s stores into p's window: counts[s][e] for each expert e that p holds, and head[s],
 *             which says what s believes this step is. Heads that differ make all slots refuse
 *             alike, because all slots see all heads.
 *   dispatch  for every token t of s, wanted by p or not: the routing words of those k that go to
 *             p, the token's row (once, however many experts of p want it), and then
 *             sent[s][t] = number of routing words. The row's address needs no agreement: it is
 *             (source slot, token). p waits for the words of a token and expands its row into one
 *             row per expert; rows start from the counts, so the order is the same on every run.
 *   combine   for every token of p that has rows on s: the fp32 sum of these rows, in k order,
 *             stored in the step's dtype into partials[s][t] of p's window, then returned[s][t].
 *             After its last partial, s stores done[s]. p adds the partials in slot order; the
 *             own one is rounded to the step's dtype as well, so that y has the same bits on
 *             whatever slot the token is at home.
 *
 * A backward pass has the same words in the same order. Its rows are pairs, x and dy of a token
 * side by side, and its partials are the fp32 sum of dx rows followed by one fp32 gradient for each
 * routing weight of the token on that slot, in the order of its routing words. With the counts
 * travel the words of enum moe_window_pass and the loads of all experts, to every peer: they are
 * the same group-wide facts for all. Only windows of sessions with `training` have room for it.
 *
 * Why no barrier is needed   s starts step n+1 after done[p] of step n came from every live p, and
 * p stores done after it has read its slab of rows of step n: so rows of n+1 never overwrite rows
 * still in use. s stores partials of step n+1 after head[p] of n+1 came from every live p, and p
 * stores that head after it has summed its partials of step n. This needs every live slot to run
 * every step, with T = 0 too, and to wait for the words of all live peers, also of those it has no
 * rows for. Heads, counts and routing words are kept in two parities (of the step's number): a slot
 * that refuses a step goes on without done words, and its peers may be one step ahead then.
 *
 * Quick regions   On CUDA, rows and partials of small buckets go to regions of their own, in which
 * data carry their own validity: between steps these regions hold nothing but blanks, a writer
 * never stores a blank, and a reader that finds another word has the data and puts a blank back.
 * So no word has to follow the data, and a row is used as it trickles in. A blank is 32 bits of
 * ones, which is a NaN in every dtype; a writer stores such a word as another NaN. */
#ifndef MOE_WINDOW_H
#define MOE_WINDOW_H

#include "base/size.h"
#include "moe/types.h"

#include <assert.h>

/* Words and addresses are worked out by kernels too. */
#ifdef __CUDACC__
#define MOE_WINDOW_INLINE __host__ __device__ static inline
#else
#define MOE_WINDOW_INLINE static inline
#endif

enum {
    MOE_WINDOW_VERSION = 2,
    MOE_WINDOW_PAGE = 4096,
    MOE_WINDOW_LINE = 64, /* what one slot writes never shares a line with another slot's */
    MOE_WINDOW_VALUE_BITS = 24,
    MOE_WINDOW_STEP_BITS = 28,
    MOE_WINDOW_EXCHANGE_BYTES = 256,
    MOE_WINDOW_MAX_TOKENS = 1 << 20, /* times MOE_MAX_TOP_K: counts fit into a word's value */
    MOE_WINDOW_QUICK_TOKENS = 512,   /* largest bucket that the quick regions hold */
    MOE_WINDOW_PARTS = 2,            /* that a partial may come in, each with a word of its own */
};
#define MOE_WINDOW_BLANK     UINT32_C(0xffffffff)
#define MOE_WINDOW_NOT_BLANK UINT32_C(0x7fffffff) /* what is stored where data would be a blank */
#define MOE_WINDOW_MAGIC     UINT64_C(0x776f646e69772d65) /* "e-window" */

/* What decides the layout; equal on all slots of a session. */
struct moe_window_shape {
    uint32_t slots, max_tokens, max_hidden, max_top_k, max_experts;
    bool training; /* room for backward passes */
};

/* First bytes of a window. Written by its owner, except bell. */
struct moe_window_header {
    uint64_t magic;
    uint32_t version, slot;
    uint64_t epoch, bytes;
    uint8_t pad0[MOE_WINDOW_LINE - 32];
    uint32_t bell; /* raised by whoever stored words; a futex on the CPU */
    uint8_t pad1[MOE_WINDOW_LINE - 4];
    uint32_t sleepers; /* threads of the owner that sleep on the bell */
    uint8_t pad2[MOE_WINDOW_LINE - 4];
    /* {when:56, slot + 1:8} while the owner waits for a slot, refreshed as long as it lives and
     * waits. Lets a slot that waits in vain find who really holds the step up. What `when` counts,
     * and what the word is at other times, is the backend's own affair. */
    uint64_t waiting;
};

struct moe_window_exchange {
    uint64_t word; /* value: bytes used of `data` */
    uint8_t data[MOE_WINDOW_EXCHANGE_BYTES];
    uint8_t pad[MOE_WINDOW_LINE - 8];
};

/* Words of a head: each slot's idea of the step. All but TOKENS must be equal on all slots. */
enum moe_window_head {
    MOE_HEAD_TOKENS,    /* T of the source */
    MOE_HEAD_LAYER,     /* the model's layer index */
    MOE_HEAD_HIDDEN,    /* H */
    MOE_HEAD_EXPERTS,   /* E */
    MOE_HEAD_TOP_K,     /* K */
    MOE_HEAD_DTYPE,     /* enum moe_dtype; in a backward pass plus MOE_HEAD_BACKWARD */
    MOE_HEAD_BUCKET,    /* log2 of the bucket; of a slot that cannot, plus MOE_HEAD_NO_MEMORY */
    MOE_HEAD_PLACEMENT, /* version of the placement, low bits */
    MOE_HEAD_WORDS
};

enum { MOE_HEAD_BACKWARD = 1 << 8 };
/* Beside the bucket: the source has no memory for this pass, so all slots refuse it. It sends no
 * rows and waits for none. */
enum { MOE_HEAD_NO_MEMORY = 1 << 8 };

/* Words of a backward pass that every slot tells every other. All but ROUTED must be equal on all
 * slots. The loads of the experts follow: choices of the source's routed tokens per expert. */
enum moe_window_pass {
    MOE_PASS_ROUTED,     /* tokens of the source that went through the router */
    MOE_PASS_ACCUMULATE, /* gradients are kept */
    MOE_PASS_AUX_LOW,    /* low 16 bits of aux_coeff as an fp32 bit pattern */
    MOE_PASS_AUX_HIGH,
    MOE_PASS_LOADS = 8, /* [max_experts]; a line later */
};

/* One (token, k) that goes to an expert of the window's owner; ordered by the token's `sent` word.
 *
 * CPU   the first `sent` entries of a token are used, in k order; `k` says which.
 * CUDA  entry k belongs to k, and the value of `sent` has bit k set where entry k is used. In place
 *       of `k` stands the row's position among the rows that its source sends to this expert, so
 *       that all rows of a pass can be placed at the same time. An entry is stored at once and is
 *       valid by the stamp in its key; it may come before or after `sent`. */
struct moe_window_route {
    uint64_t key; /* word: value = expert id */
    float weight;
    union {
        uint32_t k;
        uint32_t position;
    };
};

/* Byte offsets from the window's start; [source] and [token] are of the slot that writes. */
struct moe_window_layout {
    struct moe_window_shape shape;
    size_t exchange; /* [2][slots] struct moe_window_exchange */
    size_t head;     /* [2][slots][MOE_HEAD_WORDS] word */
    size_t done;     /* [slots] word, a line each */
    size_t flushed; /* CUDA: [slots] word, a line each: no row of this step is under way any more */
    size_t counts;  /* [2][slots][max_experts] word: rows for this expert from this source */
    size_t routing; /* [2][slots][max_tokens][max_top_k] struct moe_window_route */
    size_t pass;    /* [2][slots][MOE_PASS_LOADS + max_experts] word; training only */
    size_t sent;    /* [slots][max_tokens] word: routing words (and a row if > 0) are here */
    size_t returned; /* [slots][max_tokens][PARTS] word: the partial of the reader's token, or this
                        part of it, is here */
    size_t rows;     /* [slots] regions of `row_region` bytes: rows by token of the source */
    size_t partials; /* [slots] regions of `partial_region` bytes: by token of the reader */
    size_t row_region, partial_region;
    size_t bytes; /* of the window up to here, which is all of it on the CPU */
    /* CUDA: as rows and partials, of forward passes of at most MOE_WINDOW_QUICK_TOKENS tokens;
     * blanks at rest. */
    size_t quick_rows;
    size_t quick_partials;
    size_t quick_region;
    size_t quick_bytes; /* of the whole window on CUDA */
};

MOE_WINDOW_INLINE uint64_t moe_window_stamp(uint64_t epoch, uint32_t step)
{
    uint64_t step_mask = (UINT64_C(1) << MOE_WINDOW_STEP_BITS) - 1;
    return (epoch & 0xfff) << MOE_WINDOW_STEP_BITS | (step & step_mask);
}

MOE_WINDOW_INLINE uint64_t moe_window_word(uint64_t stamp, uint32_t value)
{
    return stamp << MOE_WINDOW_VALUE_BITS | (value & ((1u << MOE_WINDOW_VALUE_BITS) - 1));
}

MOE_WINDOW_INLINE uint64_t moe_window_word_stamp(uint64_t word)
{
    return word >> MOE_WINDOW_VALUE_BITS;
}

MOE_WINDOW_INLINE uint32_t moe_window_word_value(uint64_t word)
{
    return (uint32_t)word & ((1u << MOE_WINDOW_VALUE_BITS) - 1);
}

/* Distance of two rows of a step inside a region, in bytes: never more than the region holds, since
 * H <= max_hidden and no dtype is wider than F32. */
static inline size_t moe_window_row_stride(uint32_t hidden, enum moe_dtype dtype)
{
    size_t bytes = hidden * moe_dtype_bytes(dtype);
    return (bytes + MOE_WINDOW_LINE - 1) & ~(size_t)(MOE_WINDOW_LINE - 1);
}

/* The same for the fp32 partials of a backward pass; the gradients of weights begin at the stride
 * of an F32 row. */
static inline size_t moe_window_gradient_stride(uint32_t hidden)
{
    static_assert(MOE_MAX_TOP_K * 4 <= MOE_WINDOW_LINE, "one line holds a token's gradients");
    return moe_window_row_stride(hidden, MOE_DTYPE_F32) + MOE_WINDOW_LINE;
}

/* Puts `count` things of `each` bytes on whole pages at `*at`, and moves `*at` behind them. */
static inline bool moe_window_place(size_t *at, size_t *offset, size_t count, size_t each)
{
    size_t bytes;
    *offset = *at;
    return moe_size_mul(count, each, &bytes) && moe_size_add(*at, bytes, at) &&
           moe_size_round_up(*at, MOE_WINDOW_PAGE, at);
}

/* False when the shape is out of range or the size does not fit a size_t. */
static inline bool moe_window_layout_of(const struct moe_window_shape *s,
                                        struct moe_window_layout *l)
{
    if (s->slots < 1 || s->slots > MOE_MAX_SLOTS || s->max_tokens < 1 ||
        s->max_tokens > MOE_WINDOW_MAX_TOKENS || s->max_hidden < 1 ||
        s->max_hidden > MOE_MAX_HIDDEN || s->max_top_k < 1 || s->max_top_k > MOE_MAX_TOP_K ||
        s->max_experts < 1 || s->max_experts > MOE_MAX_EXPERTS)
        return false;
    size_t slots = s->slots, tokens = s->max_tokens, per_token, at = MOE_WINDOW_PAGE;
    size_t row = moe_window_row_stride(s->max_hidden, MOE_DTYPE_F32), train_words;
    size_t quick = MOE_WINDOW_QUICK_TOKENS;
    quick = tokens < quick ? tokens : quick;
    /* A page multiple keeps the words of two sources on different lines. */
    if (!moe_size_round_up(tokens * sizeof(uint64_t), MOE_WINDOW_LINE, &per_token))
        return false;
    if (!moe_size_round_up(s->max_experts + MOE_PASS_LOADS, MOE_WINDOW_LINE / sizeof(uint64_t),
                           &train_words))
        return false;
    l->shape = *s;
    return moe_window_place(&at, &l->exchange, 2 * slots, sizeof(struct moe_window_exchange)) &&
           moe_window_place(&at, &l->head, 2 * slots, MOE_HEAD_WORDS * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->done, slots, MOE_WINDOW_LINE) &&
           moe_window_place(&at, &l->flushed, slots, MOE_WINDOW_LINE) &&
           moe_window_place(&at, &l->counts, 2 * slots, s->max_experts * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->routing, 2 * slots * tokens,
                            s->max_top_k * sizeof(struct moe_window_route)) &&
           moe_window_place(&at, &l->pass, s->training ? 2 * slots : 0,
                            train_words * sizeof(uint64_t)) &&
           moe_window_place(&at, &l->sent, slots, per_token) &&
           moe_window_place(&at, &l->returned, slots, MOE_WINDOW_PARTS * per_token) &&
           moe_size_mul(tokens, s->training ? 2 * row : row, &l->row_region) &&
           moe_size_mul(tokens, s->training ? moe_window_gradient_stride(s->max_hidden) : row,
                        &l->partial_region) &&
           moe_size_mul(quick, row, &l->quick_region) &&
           moe_window_place(&at, &l->rows, slots, l->row_region) &&
           moe_window_place(&at, &l->partials, slots, l->partial_region) &&
           ((l->bytes = at), true) &&
           moe_window_place(&at, &l->quick_rows, slots, l->quick_region) &&
           moe_window_place(&at, &l->quick_partials, slots, l->quick_region) &&
           ((l->quick_bytes = at), true);
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
    uint64_t *words = (uint64_t *)(void *)(base + l->head);
    return &words[(size_t)(parity * l->shape.slots + source) * MOE_HEAD_WORDS];
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
    uint64_t *words = (uint64_t *)(void *)(base + l->counts);
    return &words[(size_t)(parity * l->shape.slots + source) * l->shape.max_experts];
}

/* Words of enum moe_window_pass; training only. */
MOE_WINDOW_INLINE uint64_t *moe_window_pass_of(const struct moe_window_layout *l, uint8_t *base,
                                               uint32_t parity, uint32_t source)
{
    uint64_t *words = (uint64_t *)(void *)(base + l->pass);
    size_t each = ((size_t)l->shape.max_experts + MOE_PASS_LOADS + 7) & ~(size_t)7;
    return &words[(parity * l->shape.slots + source) * each];
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

MOE_WINDOW_INLINE uint64_t *moe_window_returned_part_of(const struct moe_window_layout *l,
                                                        uint8_t *base, uint32_t source,
                                                        uint32_t token, uint32_t part)
{
    size_t line = ((size_t)l->shape.max_tokens * 8 + MOE_WINDOW_LINE - 1) / MOE_WINDOW_LINE;
    size_t words = source * line * MOE_WINDOW_LINE * MOE_WINDOW_PARTS;
    return (uint64_t *)(void *)(base + l->returned + words) + token * MOE_WINDOW_PARTS + part;
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
