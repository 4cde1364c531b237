/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the weights of one layer in canonical form, for the experts of one slot. A backend that
 * reads for itself gets only the place of weights that need no conversion.
 *
 * Walks over the pieces of layout.h in one fixed order. Reads each byte range once into a staging
 * buffer, allocated once per call, and gathers the canonical weight if the range is not yet in
 * canonical form. With a digester there are two buffers in turn: other threads hash one of them.
 * The same walk without reads counts the bytes. */
#include "model/model_internal.h"

#include "base/size.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors is little-endian and is read without swapping");

enum { TILE = 32 }; /* elements; a tile of rows and columns stays in the first-level cache */

static struct moe_status visit_weight(const struct moe_model *m, const struct moe_layer_spec *spec,
                                      enum moe_weight weight, uint32_t expert,
                                      moe_piece_visitor visit, void *ctx)
{
    struct moe_piece piece;
    size_t rows, columns;
    moe_weight_shape(spec, weight, &rows, &columns);
    if (rows == 0)
        return moe_ok();
    MOE_TRY(moe_layout_locate(&m->layout, spec, weight, expert, &piece));
    return visit(ctx, weight, expert, &piece);
}

struct moe_status moe_model__visit_layer(const struct moe_model *m, size_t layer, bool replicated,
                                         const uint32_t *experts, size_t expert_count,
                                         moe_piece_visitor visit, void *ctx)
{
    const struct moe_layer_spec *spec = moe_model_layer(m, layer);
    if (spec == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no such MoE layer");
    for (unsigned w = 0; replicated && w < MOE_WEIGHT_COUNT; w++)
        if (!moe_weight_is_expert((enum moe_weight)w))
            MOE_TRY(visit_weight(m, spec, (enum moe_weight)w, 0, visit, ctx));
    for (size_t i = 0; i < expert_count; i++) {
        if (experts[i] >= spec->experts || (i > 0 && experts[i] <= experts[i - 1]))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "experts to load are not ascending ids below %u", spec->experts);
        for (unsigned w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++)
            MOE_TRY(visit_weight(m, spec, (enum moe_weight)w, experts[i], visit, ctx));
    }
    return moe_ok();
}

/* ---- planning: bytes to read, and sizes of the buffers ---- */

struct plan {
    uint64_t read_bytes;
    uint64_t given_bytes; /* of all weights, in canonical form */
    size_t raw_bytes;     /* largest range */
    size_t out_bytes;     /* largest canonical weight that needs gathering or conversion */
    bool read_here_only;  /* raw_bytes counts only weights that need either */
    struct moe_piece last;
};

static enum moe_dtype output_dtype(const struct moe_piece *p)
{
    return p->at.tensor->dtype == MOE_ST_BF16 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
}

static bool delivered_as_read(const struct moe_piece *p)
{
    return p->at.tensor->dtype != MOE_ST_F16 && moe_piece_is_plain(p);
}

static struct moe_status plan_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    struct plan *plan = ctx;
    size_t out;
    (void)weight;
    (void)expert;
    if (!moe_size_mul3(p->rows, p->columns, moe_dtype_bytes(output_dtype(p)), &out) ||
        p->bytes > SIZE_MAX)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a weight is too large");
    plan->given_bytes += out;
    if (!moe_piece_same_range(p, &plan->last))
        plan->read_bytes += p->bytes;
    if (p->bytes > plan->raw_bytes && !(plan->read_here_only && delivered_as_read(p)))
        plan->raw_bytes = (size_t)p->bytes;
    if (!delivered_as_read(p) && out > plan->out_bytes)
        plan->out_bytes = out;
    plan->last = *p;
    return moe_ok();
}

uint64_t moe_model_layer_bytes(const struct moe_model *m, size_t i, const uint32_t *experts,
                               size_t expert_count)
{
    struct plan plan = {0};
    struct moe_status st =
        moe_model__visit_layer(m, i, true, experts, expert_count, plan_piece, &plan);
    return moe_failed(&st) ? 0 : plan.read_bytes;
}

uint64_t moe_model_layer_memory(const struct moe_model *m, size_t i, const uint32_t *experts,
                                size_t expert_count)
{
    struct plan plan = {0};
    struct moe_status st =
        moe_model__visit_layer(m, i, true, experts, expert_count, plan_piece, &plan);
    return moe_failed(&st) ? 0 : plan.given_bytes;
}

/* ---- loading ---- */

struct load {
    moe_weight_sink sink;
    moe_weight_source_sink source_sink; /* NULL: this file reads all weights */
    void *sink_ctx;
    moe_load_progress progress;
    void *progress_ctx;
    struct moe_digester *digester; /* NULL: none */
    uint64_t read_bytes;
    char *raw[2], *out;    /* raw[1] only with a digester: one is hashed while one is read */
    unsigned turn;         /* raw[turn] was read last */
    struct moe_piece last; /* the piece in raw[turn] */
};

/* IEEE 754 half to single precision: every half has an exact single. */
static uint32_t half_to_single_bits(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) /* infinity, NaN with its payload */
        return sign | 0x7f800000 | mantissa << 13;
    if (exponent != 0)
        return sign | (exponent + 127 - 15) << 23 | mantissa << 13;
    if (mantissa == 0)
        return sign;
    /* Subnormal: shift the leading one up to its implicit place. */
    uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21;
    return sign | (127 - 14 - shift) << 23 | (mantissa << shift & 0x3ff) << 13;
}

static inline __attribute__((always_inline)) void
copy_element(enum moe_st_dtype dtype, const char *raw, size_t from, char *out, size_t to)
{
    uint16_t half;
    uint32_t single;
    switch (dtype) {
    case MOE_ST_F32: memcpy(out + 4 * to, raw + 4 * from, 4); return;
    case MOE_ST_BF16: memcpy(out + 2 * to, raw + 2 * from, 2); return;
    default: break;
    }
    memcpy(&half, raw + 2 * from, sizeof half);
    single = half_to_single_bits(half);
    memcpy(out + 4 * to, &single, sizeof single);
}

static inline __attribute__((always_inline)) void gather_tile(enum moe_st_dtype dtype,
                                                              const struct moe_piece *p,
                                                              const char *raw, char *out,
                                                              size_t row, size_t column)
{
    size_t row_end = row + TILE < p->rows ? row + TILE : p->rows;
    size_t column_end = column + TILE < p->columns ? column + TILE : p->columns;
    for (size_t r = row; r < row_end; r++)
        for (size_t c = column; c < column_end; c++)
            copy_element(dtype, raw, p->base + r * p->row_step + c * p->column_step, out,
                         r * p->columns + c);
}

/* Inlined once per dtype, so that no element tests the dtype. */
static inline __attribute__((always_inline)) void
gather_all(enum moe_st_dtype dtype, const struct moe_piece *p, const char *raw, char *out)
{
    for (size_t r = 0; r < p->rows; r += TILE)
        for (size_t c = 0; c < p->columns; c += TILE)
            gather_tile(dtype, p, raw, out, r, c);
}

static void gather(const struct moe_piece *p, const char *raw, char *out)
{
    switch (p->at.tensor->dtype) {
    case MOE_ST_F32: gather_all(MOE_ST_F32, p, raw, out); return;
    case MOE_ST_BF16: gather_all(MOE_ST_BF16, p, raw, out); return;
    default: gather_all(MOE_ST_F16, p, raw, out); return;
    }
}

static void count_read(struct load *l, const struct moe_piece *p)
{
    l->read_bytes += p->bytes;
    if (l->progress != NULL)
        l->progress(l->progress_ctx, l->read_bytes);
}

static struct moe_status read_piece(struct load *l, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    l->last = (struct moe_piece){0};
    if (l->digester != NULL) {
        l->turn ^= 1;
        MOE_TRY(moe_digester__wait(l->digester, l->turn));
    }
    MOE_TRY(moe_st_read(p->at.file, p->at.tensor, p->first, p->bytes, l->raw[l->turn]));
    if (l->digester != NULL)
        MOE_TRY(moe_digester__hash(l->digester, weight, expert, p, l->raw[l->turn], l->turn));
    l->last = *p;
    count_read(l, p);
    return moe_ok();
}

static struct moe_status pass_source(struct load *l, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p, size_t bytes)
{
    struct moe_weight_source source = moe_st_weight_source(p->at.file, p->at.tensor, p->first);
    if (l->digester != NULL)
        MOE_TRY(moe_digester__watch(l->digester, weight, expert, p, &source));
    MOE_TRY(l->source_sink(l->sink_ctx, weight, expert, output_dtype(p), &source, bytes));
    count_read(l, p);
    return moe_ok();
}

static struct moe_status load_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    struct load *l = ctx;
    enum moe_dtype dtype = output_dtype(p);
    size_t bytes = p->rows * p->columns * moe_dtype_bytes(dtype);
    if (l->source_sink != NULL && delivered_as_read(p))
        return pass_source(l, weight, expert, p, bytes);
    if (!moe_piece_same_range(p, &l->last))
        MOE_TRY(read_piece(l, weight, expert, p));
    if (delivered_as_read(p))
        return l->sink(l->sink_ctx, weight, expert, dtype, l->raw[l->turn], bytes);
    gather(p, l->raw[l->turn], l->out);
    return l->sink(l->sink_ctx, weight, expert, dtype, l->out, bytes);
}

/* Hashes that still run read the buffers. */
static struct moe_status end_hashing(struct load *l)
{
    if (l->digester == NULL)
        return moe_ok();
    struct moe_status first = moe_digester__wait(l->digester, 0);
    struct moe_status second = moe_digester__wait(l->digester, 1);
    return moe_failed(&first) ? first : second;
}

struct moe_status moe_model_load_layer(const struct moe_model *m, size_t i, const uint32_t *experts,
                                       size_t expert_count, moe_weight_sink sink, void *ctx,
                                       moe_load_progress progress, void *progress_ctx)
{
    return moe_model_stream_layer(m, i, experts, expert_count, sink, NULL, ctx, NULL, progress,
                                  progress_ctx);
}

struct moe_status moe_model_stream_layer(const struct moe_model *m, size_t i,
                                         const uint32_t *experts, size_t expert_count,
                                         moe_weight_sink sink, moe_weight_source_sink source_sink,
                                         void *ctx, struct moe_digester *digester,
                                         moe_load_progress progress, void *progress_ctx)
{
    struct plan plan = {.read_here_only = source_sink != NULL};
    MOE_TRY(moe_model__visit_layer(m, i, true, experts, expert_count, plan_piece, &plan));
    if (digester != NULL)
        moe_digester__begin(digester, i);
    struct load l = {
        .sink = sink,
        .source_sink = source_sink,
        .sink_ctx = ctx,
        .progress = progress,
        .progress_ctx = progress_ctx,
        .digester = digester,
        .raw = {malloc(plan.raw_bytes + 1), digester != NULL ? malloc(plan.raw_bytes + 1) : NULL},
        .out = malloc(plan.out_bytes + 1)};
    struct moe_status st;
    if (l.raw[0] == NULL || l.out == NULL || (digester != NULL && l.raw[1] == NULL))
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                       "no memory to stage weights");
    else
        st = moe_model__visit_layer(m, i, true, experts, expert_count, load_piece, &l);
    struct moe_status hashed = end_hashing(&l);
    free(l.raw[0]);
    free(l.raw[1]);
    free(l.out);
    return moe_failed(&st) ? st : hashed;
}
