/* SPDX-License-Identifier: Apache-2.0 */
/* Products that compute nothing and return their arguments as text. test_ggemm_binding.py finds
 * each argument there, on machines without a GPU. */
#include "ggemm_entry.h"

#include "cuda/gemm/ggemm.h"
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/gemm/ggemm_wgrad.h"
#include "cuda/gemm/quantise.h"

#include <stdio.h>

static char seen[4096];

const char *moe_recorded(void);
const char *moe_recorded(void)
{
    return seen;
}

static int add_pointer(int at, const char *name, const void *p)
{
    return at + snprintf(seen + at, sizeof seen - (size_t)at, "%s=%zu ", name, (size_t)p);
}

static int add_number(int at, const char *name, double v)
{
    return at + snprintf(seen + at, sizeof seen - (size_t)at, "%s=%.9g ", name, v);
}

static struct moe_status record_ggemm(const struct moe_cuda_ggemm *g, const void *stream)
{
    int at = add_number(0, "tile", g->tile);
    at = add_number(at, "gated", g->gated);
    at = add_number(at, "relu2", g->relu2);
    at = add_number(at, "back", g->back);
    at = add_number(at, "packing", g->packing);
    at = add_number(at, "experts", g->experts);
    at = add_number(at, "row_capacity", g->row_capacity);
    at = add_number(at, "n", g->n);
    at = add_number(at, "k", g->k);
    at = add_pointer(at, "start", g->start);
    at = add_pointer(at, "count", g->count);
    at = add_pointer(at, "x", g->x);
    at = add_number(at, "x_stride", g->x_stride);
    at = add_pointer(at, "x_scales", g->x_scales);
    at = add_pointer(at, "weights", g->weights);
    at = add_number(at, "has_bias", g->has_bias);
    at = add_pointer(at, "row_weight", g->row_weight);
    at = add_number(at, "weighting", g->weighting);
    at = add_number(at, "activation", g->activation);
    at = add_number(at, "limit", (double)g->limit);
    at = add_number(at, "alpha", (double)g->alpha);
    at = add_number(at, "out_dtype", g->out_dtype);
    at = add_number(at, "out_activations", g->out_activations);
    at = add_pointer(at, "out", g->out);
    at = add_number(at, "out_stride", g->out_stride);
    at = add_pointer(at, "pre", g->pre);
    at = add_pointer(at, "began", g->began);
    at = add_number(at, "processors", g->processors);
    add_pointer(at, "stream", stream);
    return moe_ok();
}

struct moe_status moe_cuda_ggemm_enqueue(const struct moe_cuda_ggemm *g, struct CUstream_st *stream)
{
    if (g->experts == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "no experts");
    return record_ggemm(g, stream);
}

struct moe_status moe_cuda_cublas_open(struct moe_cuda_cublas **out)
{
    *out = (struct moe_cuda_cublas *)(void *)seen;
    return moe_ok();
}

struct moe_status moe_cuda_cublas_enqueue(struct moe_cuda_cublas *cublas,
                                          const struct moe_cuda_ggemm *g, void *scratch,
                                          struct CUstream_st *stream)
{
    (void)cublas;
    MOE_TRY(record_ggemm(g, stream));
    size_t at = strlen(seen);
    add_pointer((int)at, "scratch", scratch);
    return moe_ok();
}

size_t moe_cuda_cublas_scratch_bytes(bool gated, enum moe_dtype out_dtype, uint32_t row_capacity,
                                     uint32_t n)
{
    return gated ? 0 : (size_t)out_dtype * 1000000 + row_capacity * 1000 + n;
}

struct moe_status moe_cuda_wgrad_enqueue(const struct moe_cuda_wgrad *w, struct CUstream_st *stream)
{
    int at = add_number(0, "experts", w->experts);
    at = add_number(at, "row_capacity", w->row_capacity);
    at = add_number(at, "n", w->n);
    at = add_number(at, "k", w->k);
    at = add_pointer(at, "start", w->start);
    at = add_pointer(at, "count", w->count);
    at = add_pointer(at, "dy", w->dy);
    at = add_pointer(at, "x", w->x);
    at = add_number(at, "dy_stride", w->dy_stride);
    at = add_number(at, "x_stride", w->x_stride);
    at = add_number(at, "accumulate", w->accumulate);
    at = add_pointer(at, "dw", w->dw);
    at = add_number(at, "processors", w->processors);
    add_pointer(at, "stream", stream);
    return moe_ok();
}

struct moe_status moe_cuda_quantise_enqueue(const struct moe_cuda_quantise *q,
                                            struct CUstream_st *stream)
{
    int at = add_number(0, "dtype", q->dtype);
    at = add_pointer(at, "x", q->x);
    at = add_pointer(at, "weight", q->weight);
    at = add_number(at, "experts", q->experts);
    at = add_number(at, "row_capacity", q->row_capacity);
    at = add_number(at, "columns", q->columns);
    at = add_pointer(at, "start", q->start);
    at = add_pointer(at, "count", q->count);
    at = add_number(at, "whole_rows", q->whole_rows);
    at = add_number(at, "pow2", q->pow2);
    at = add_pointer(at, "quantised", q->quantised);
    at = add_number(at, "row_bytes", q->row_bytes);
    at = add_pointer(at, "values", q->values);
    at = add_pointer(at, "began", q->began);
    at = add_number(at, "processors", q->processors);
    add_pointer(at, "stream", stream);
    return moe_ok();
}

static int add_weight(const struct moe_cuda_packed_weight *w, const void *src)
{
    int at = add_number(0, "packing", w->packing);
    at = add_pointer(at, "entry", w->entry);
    at = add_number(at, "rows", w->rows);
    at = add_number(at, "columns", w->columns);
    at = add_number(at, "interleaved", w->interleaved);
    at = add_number(at, "offset", w->offset);
    at = add_number(at, "global", (double)w->global);
    at = add_pointer(at, "wrong", w->wrong);
    return add_pointer(at, "src", src);
}

struct moe_status moe_cuda_packed_place(const struct moe_cuda_packed_weight *w, const void *src,
                                        uint32_t first, uint32_t count, struct CUstream_st *stream)
{
    if (first != 0 || count != w->rows)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "not all rows");
    add_pointer(add_weight(w, src), "stream", stream);
    return moe_ok();
}

static struct moe_status record_blocks(const struct moe_cuda_packed_weight *w,
                                       const struct moe_weight_format *format, const void *src,
                                       uint32_t first, uint32_t count, struct CUstream_st *stream)
{
    if (first != 0 || count < w->rows)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "not all rows");
    int at = add_number(add_weight(w, src), "encoding", format->encoding);
    at = add_number(at, "block_rows", format->block_rows);
    at = add_number(at, "block_columns", format->block_columns);
    at = add_number(at, "scale", format->scale);
    at = add_number(at, "zero_points", format->zero_points);
    add_pointer(at, "stream", stream);
    return moe_ok();
}

struct moe_status moe_cuda_packed_scale(const struct moe_cuda_packed_weight *w,
                                        const struct moe_weight_format *format, const void *src,
                                        uint32_t first, uint32_t count, struct CUstream_st *stream)
{
    return record_blocks(w, format, src, first, count, stream);
}

struct moe_status moe_cuda_packed_zeros(const struct moe_cuda_packed_weight *w,
                                        const struct moe_weight_format *format, const void *src,
                                        uint32_t first, uint32_t count, struct CUstream_st *stream)
{
    return record_blocks(w, format, src, first, count, stream);
}

struct moe_status moe_cuda_ggemm_describe(const void *data, uint32_t experts, uint32_t rows,
                                          uint32_t columns, struct moe_cuda_ggemm_weights *out)
{
    int at = add_pointer(0, "data", data);
    at = add_number(at, "experts", experts);
    at = add_number(at, "rows", rows);
    add_number(at, "columns", columns);
    memset(out, 0x5a, sizeof *out);
    return moe_ok();
}
