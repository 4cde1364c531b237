/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the weights of one layer in canonical form, for the experts of one slot. A backend that
 * reads for itself gets only the place of weights that need no conversion, also of quantised ones;
 * its reads check their scales. Other quantised weights are decoded, or packed for a backend that
 * keeps them.
 *
 * Walks over the pieces of layout.h in one fixed order. Reads each byte range once into a staging
 * buffer, allocated once per call, and gathers or decodes the canonical weight if the range is not
 * yet in canonical form. With a digester, its threads read, and hash what they have read. The same
 * walk without reads counts the bytes. */
#include "model/model_internal.h"

#include "base/cores.h"
#include "base/size.h"
#include "base/thread_pool.h"
#include "moe/numbers.h"
#include "quant/decode.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors is little-endian and is read without swapping");

enum {
    TILE = 32,         /* elements; a tile of rows and columns stays in the first-level cache */
    DECODED_ROWS = 16, /* at a time, of a quantised weight: they stay in the second-level cache */
    DECODE_THREADS_MAX = 16,
    KEPT_BYTES = 64 << 10, /* of a gathered weight that stays in memory as a source */
};

/* ---- the walk ---- */

struct walk {
    const struct moe_model *model;
    const struct moe_layer_spec *spec;
    moe_piece_visitor visit;
    void *ctx;
    struct moe_piece last[MOE_QUANT_PARTS];
};

static struct moe_status visit_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p)
{
    struct walk *w = ctx;
    struct moe_piece piece = *p;
    piece.again = moe_piece_same_range(p, &w->last[p->part]);
    w->last[p->part] = *p;
    return w->visit(w->ctx, weight, expert, &piece);
}

static struct moe_status visit_weight(struct walk *w, enum moe_weight weight, uint32_t expert)
{
    return moe_layout_visit(&w->model->layout, w->spec, weight, expert, visit_piece, w);
}

struct moe_status moe_model__visit_layer(const struct moe_model *m, size_t layer, bool replicated,
                                         const uint32_t *experts, size_t expert_count,
                                         moe_piece_visitor visit, void *ctx)
{
    const struct moe_layer_spec *spec = moe_model_layer(m, layer);
    if (spec == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no such MoE layer");
    struct walk walk = {.model = m, .spec = spec, .visit = visit, .ctx = ctx};
    for (unsigned w = 0; replicated && w < MOE_WEIGHT_COUNT; w++)
        if (!moe_weight_is_expert((enum moe_weight)w))
            MOE_TRY(visit_weight(&walk, (enum moe_weight)w, 0));
    for (size_t i = 0; i < expert_count; i++) {
        if (experts[i] >= spec->experts || (i > 0 && experts[i] <= experts[i - 1]))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "experts to load are not ascending ids below %u", spec->experts);
        for (unsigned w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++)
            MOE_TRY(visit_weight(&walk, (enum moe_weight)w, experts[i]));
    }
    return moe_ok();
}

/* ---- sources ---- */

/* What the source of a weight refers to. */
struct moe_model_source {
    struct moe_model_source *next;
    /* Scales of a quantised matrix, which are checked as they are read: */
    struct moe_weight_source file;
    struct moe_quant_matrix matrix; /* without parts, but for the scale of the matrix */
    const struct moe_tensor *tensor;
    float global;
    char data[]; /* of a weight that was gathered */
};

void moe_model_sources_free(struct moe_model_sources *s)
{
    while (s->first != NULL) {
        struct moe_model_source *next = s->first->next;
        free(s->first);
        s->first = next;
    }
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory to stage weights");
}

static struct moe_status add_source(struct moe_model_sources *s, size_t data_bytes,
                                    struct moe_model_source **out)
{
    struct moe_model_source *source = calloc(1, sizeof *source + data_bytes);
    if (source == NULL)
        return no_memory();
    source->next = s->first;
    *out = s->first = source;
    return moe_ok();
}

/* moe_weight_source.read */
static struct moe_status read_kept(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    memcpy(to, (const char *)ctx + at, bytes);
    return moe_ok();
}

/* moe_weight_source.read */
static struct moe_status read_scales(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    const struct moe_model_source *s = ctx;
    size_t each = moe_scale_bytes(s->matrix.scale);
    MOE_TRY(s->file.read(s->file.ctx, s->file.at + at, bytes, to));
    return moe_error_context(
        moe_quant_check_scales(&s->matrix, to, (size_t)at / each, bytes / each), "tensor %.120s",
        s->tensor->name);
}

/* Row 2 i is of gate, row 2 i + 1 of up, also of the scales. */
static bool rows_take_turns(const struct moe_piece *p)
{
    return p->row_step == 2 && p->quant->format.block_rows == 1;
}

/* Whether a backend that reads for itself takes this piece of a matrix with format `f`. `scale`:
 * the tensor of its scales. */
static bool is_fetched(const struct moe_model_sinks *sinks, const struct moe_weight_format *f,
                       const struct moe_tensor *scale, const struct moe_piece *p)
{
    bool part = p->part == MOE_QUANT_DATA || p->part == MOE_QUANT_SCALE;
    if (sinks == NULL || sinks->packed_source == NULL || f == NULL || scale == NULL || !part)
        return false;
    struct moe_quant_matrix m = {.quant = p->quant, .rows = p->rows, .columns = p->columns};
    MOE_INVARIANT(moe_quant_scale_type(moe_st_dtype_name(scale->dtype), &m.scale));
    return moe_quant_rows_are_packed(&m, f) &&
           ((p->base == 0 && p->row_step == 1) || rows_take_turns(p));
}

/* ---- planning: bytes to read, and sizes of the buffers ---- */

struct plan {
    uint64_t read_bytes;
    uint64_t given_bytes;              /* of all weights, in canonical form */
    size_t raw_bytes[MOE_QUANT_PARTS]; /* largest range of each part */
    bool keeps_packed;                 /* matrices with a format in the spec are not decoded */
    const struct moe_layer_spec *spec;
    const struct moe_model_sinks *sinks; /* NULL: bytes are only counted */
    const struct moe_tensor *scale;      /* of the present matrix */
    /* Only of weights that are read here: */
    struct moe_packed_sizes packed; /* largest arrays of packed matrices */
    size_t out_bytes; /* largest canonical weight that needs gathering or conversion */
    size_t row_bytes; /* of DECODED_ROWS decoded rows */
};

static enum moe_dtype output_dtype(const struct moe_piece *p)
{
    bool bf16 = p->quant != NULL || p->at.tensor->dtype == MOE_ST_BF16;
    return bf16 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
}

static bool delivered_as_read(const struct moe_piece *p)
{
    return p->at.tensor->dtype != MOE_ST_F16 && moe_piece_is_plain(p);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static struct moe_status plan_packed(struct plan *plan, const struct moe_weight_format *f,
                                     const struct moe_piece *p, bool read_here)
{
    struct moe_packed_sizes s, *most = &plan->packed;
    if (!moe_packed_sizes(f, p->rows, p->columns, &s))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a weight is too large");
    plan->given_bytes += s.bytes;
    if (!read_here)
        return moe_ok();
    most->elements = larger(most->elements, s.elements);
    most->scales = larger(most->scales, s.scales);
    most->zeros = larger(most->zeros, s.zeros);
    return moe_ok();
}

static struct moe_status plan_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    struct plan *plan = ctx;
    size_t out, rows;
    const struct moe_weight_format *format =
        plan->keeps_packed ? moe_weight_format_of(plan->spec, weight) : NULL;
    (void)expert;
    if (!moe_size_mul3(p->rows, p->columns, moe_dtype_bytes(output_dtype(p)), &out) ||
        !moe_size_mul3(DECODED_ROWS, p->columns, sizeof(float), &rows) || p->bytes > SIZE_MAX)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a weight is too large");
    if (!p->again)
        plan->read_bytes += p->bytes;
    if (p->part == MOE_QUANT_SCALE)
        plan->scale = p->at.tensor;
    bool fetched = is_fetched(plan->sinks, format, plan->scale, p) ||
                   (plan->sinks != NULL && plan->sinks->source != NULL && delivered_as_read(p));
    if (p->bytes > plan->raw_bytes[p->part] && !fetched)
        plan->raw_bytes[p->part] = (size_t)p->bytes;
    if (p->part != MOE_QUANT_DATA)
        return moe_ok();
    if (p->quant != NULL && rows > plan->row_bytes && !fetched)
        plan->row_bytes = rows;
    if (format != NULL)
        return plan_packed(plan, format, p, !fetched);
    plan->given_bytes += out;
    if (!delivered_as_read(p) && out > plan->out_bytes)
        plan->out_bytes = out;
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
    struct plan plan = {.keeps_packed = true, .spec = moe_model_layer(m, i)};
    struct moe_status st =
        moe_model__visit_layer(m, i, true, experts, expert_count, plan_piece, &plan);
    return moe_failed(&st) ? 0 : plan.given_bytes;
}

/* ---- loading ---- */

struct load {
    const struct moe_model_sinks *sinks;
    const struct moe_layer_spec *spec;
    moe_load_progress progress;
    void *progress_ctx;
    struct moe_digester *digester; /* NULL: none */
    uint64_t read_bytes;
    char *raw, *out; /* as read; in canonical form */
    /* Of a quantised weight: */
    char *parts[MOE_QUANT_PARTS]; /* as read; that of MOE_QUANT_DATA is not used */
    struct moe_piece
        pieces[MOE_QUANT_PARTS];  /* in `parts`; no tensor: the weight has no such part */
    struct moe_thread_pool *pool; /* decodes or packs; NULL: no weight is quantised */
    struct moe_thread_pool_batch batch;
    struct moe_quant_arrays packed; /* room for the largest packed matrix */
    float *rows;                    /* of each thread: [DECODED_ROWS, columns] */
    size_t row_bytes;               /* of one thread */
};

static inline __attribute__((always_inline)) void
copy_element(enum moe_st_dtype dtype, const char *raw, size_t from, char *out, size_t to)
{
    uint16_t half;
    float single;
    switch (dtype) {
    case MOE_ST_F32: memcpy(out + 4 * to, raw + 4 * from, 4); return;
    case MOE_ST_BF16: memcpy(out + 2 * to, raw + 2 * from, 2); return;
    default: break;
    }
    memcpy(&half, raw + 2 * from, sizeof half);
    single = moe_f16_to_f32(half);
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

static void tell_progress(const struct load *l)
{
    if (l->progress != NULL)
        l->progress(l->progress_ctx, l->read_bytes);
}

static struct moe_status read_piece(struct load *l, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    char *to = p->part == MOE_QUANT_DATA ? l->raw : l->parts[p->part];
    if (l->digester != NULL)
        MOE_TRY(moe_digester__read(l->digester, weight, expert, p, to));
    else
        MOE_TRY(moe_st_read(p->at.file, p->at.tensor, p->first, p->bytes, to));
    l->read_bytes += p->bytes;
    tell_progress(l);
    return moe_ok();
}

static struct moe_status open_source(struct load *l, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p, struct moe_weight_source *out)
{
    *out = moe_st_weight_source(p->at.file, p->at.tensor, p->first);
    if (p->again)
        return moe_ok();
    if (l->digester != NULL)
        MOE_TRY(moe_digester__watch(l->digester, weight, expert, p, out));
    l->read_bytes += p->bytes;
    return moe_ok();
}

static struct moe_status pass_source(struct load *l, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p, size_t bytes)
{
    struct moe_weight_source source;
    MOE_TRY(open_source(l, weight, expert, p, &source));
    MOE_TRY(l->sinks->source(l->sinks->ctx, weight, expert, output_dtype(p), &source, bytes));
    tell_progress(l);
    return moe_ok();
}

/* Gathers a small weight into memory that stays, so that the backend need not wait for it. */
static struct moe_status pass_gathered(struct load *l, enum moe_weight weight, uint32_t expert,
                                       const struct moe_piece *p, size_t bytes)
{
    struct moe_model_source *kept = NULL;
    MOE_TRY(add_source(l->sinks->sources, bytes, &kept));
    gather(p, l->raw, kept->data);
    const struct moe_weight_source source = {.read = read_kept, .ctx = kept->data};
    return l->sinks->source(l->sinks->ctx, weight, expert, output_dtype(p), &source, bytes);
}

/* A job of the pool; an item is DECODED_ROWS rows. */
struct decode_job {
    const struct moe_quant_matrix *matrix;
    uint16_t *out;                          /* NULL: the rows are packed */
    const struct moe_weight_format *format; /* of packed rows, with their sizes */
    const struct moe_packed_sizes *sizes;
};

static struct moe_status decode_rows(void *ctx, uint32_t thread, const void *job, uint32_t item)
{
    const struct load *l = ctx;
    const struct decode_job *j = job;
    const struct moe_quant_matrix *m = j->matrix;
    size_t first = (size_t)item * DECODED_ROWS, left = m->rows - first;
    size_t count = left < DECODED_ROWS ? left : DECODED_ROWS;
    float *rows = (float *)(void *)((char *)l->rows + thread * l->row_bytes);
    if (j->out == NULL)
        moe_quant_pack(m, j->format, j->sizes, first, count, &l->packed);
    else
        moe_quant_decode_bf16(m, first, count, rows, j->out + first * m->columns);
    return moe_ok();
}

static struct moe_status run_job(struct load *l, const struct decode_job *job)
{
    size_t items = (job->matrix->rows + DECODED_ROWS - 1) / DECODED_ROWS;
    MOE_TRY(moe_thread_pool_submit(l->pool, &l->batch, job, sizeof *job, (uint32_t)items));
    return moe_thread_pool_wait(l->pool, &l->batch);
}

/* The quantised weight with its last piece `p`, checked; forgets its parts. If it is `fetched`, it
 * has neither elements nor scales. */
static struct moe_status collect(struct load *l, const struct moe_piece *p, bool fetched,
                                 struct moe_quant_matrix *m)
{
    enum moe_quant_part wrong = MOE_QUANT_DATA;
    *m = (struct moe_quant_matrix){.quant = p->quant,
                                   .rows = p->rows,
                                   .columns = p->columns,
                                   .first_row = p->base,
                                   .row_step = p->row_step,
                                   .stored_rows = (size_t)p->bytes / p->columns};
    for (int part = MOE_QUANT_DATA + 1; part < MOE_QUANT_PARTS; part++)
        m->part[part] = l->pieces[part].at.tensor != NULL ? l->parts[part] : NULL;
    m->part[MOE_QUANT_DATA] = l->raw;
    if (fetched)
        m->part[MOE_QUANT_DATA] = m->part[MOE_QUANT_SCALE] = NULL;
    const struct moe_tensor *scale = l->pieces[MOE_QUANT_SCALE].at.tensor;
    MOE_INVARIANT(moe_quant_scale_type(moe_st_dtype_name(scale->dtype), &m->scale));
    struct moe_status st = moe_quant_check(m, &wrong);
    if (moe_failed(&st))
        return moe_error_context(st, "tensor %.120s", l->pieces[wrong].at.tensor->name);
    memset(l->pieces, 0, sizeof l->pieces);
    return moe_ok();
}

static struct moe_status decode(struct load *l, const struct moe_piece *p)
{
    struct moe_quant_matrix m;
    MOE_TRY(collect(l, p, false, &m));
    const struct decode_job job = {.matrix = &m, .out = (uint16_t *)(void *)l->out};
    return run_job(l, &job);
}

static struct moe_status give_packed(struct load *l, enum moe_weight weight, uint32_t expert,
                                     const struct moe_weight_format *f, const struct moe_piece *p)
{
    struct moe_quant_matrix m;
    struct moe_packed_matrix packed;
    struct moe_packed_sizes sizes;
    MOE_TRY(collect(l, p, false, &m));
    MOE_INVARIANT(moe_packed_sizes(f, m.rows, m.columns, &sizes)); /* plan_packed has seen it */
    if (!moe_quant_is_packed(&m, f, &packed)) {
        const struct decode_job job = {.matrix = &m, .format = f, .sizes = &sizes};
        MOE_TRY(run_job(l, &job));
        packed = (struct moe_packed_matrix){.elements = l->packed.elements,
                                            .scales = l->packed.scales,
                                            .zeros = f->zero_points ? l->packed.zeros : NULL,
                                            .global = moe_quant_global(&m)};
    }
    return l->sinks->packed(l->sinks->ctx, weight, expert, &packed);
}

/* The scales of matrix `m`, with piece `p`; each is checked when it is read. */
static struct moe_status open_scales(struct load *l, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p, const struct moe_quant_matrix *m,
                                     struct moe_weight_source *out)
{
    struct moe_model_source *s = NULL;
    MOE_TRY(add_source(l->sinks->sources, 0, &s));
    MOE_TRY(open_source(l, weight, expert, p, &s->file));
    s->matrix = *m;
    s->tensor = p->at.tensor;
    s->global = moe_quant_global(m);
    if (m->part[MOE_QUANT_GLOBAL] != NULL)
        s->matrix.part[MOE_QUANT_GLOBAL] = &s->global;
    *out = (struct moe_weight_source){.read = read_scales, .ctx = s};
    return moe_ok();
}

/* Elements and scales of a matrix; its other parts were read. */
static struct moe_status pass_packed_source(struct load *l, enum moe_weight weight, uint32_t expert,
                                            const struct moe_piece *p)
{
    const struct moe_piece scale = l->pieces[MOE_QUANT_SCALE];
    struct moe_quant_matrix m;
    struct moe_packed_source source = {.by_turns = rows_take_turns(p)};
    MOE_TRY(collect(l, p, true, &m));
    if (source.by_turns && p->base != 0) {
        MOE_INVARIANT(p->again && scale.again); /* up went with gate */
        return moe_ok();
    }
    source.global = moe_quant_global(&m);
    MOE_TRY(open_scales(l, weight, expert, &scale, &m, &source.scales));
    MOE_TRY(open_source(l, weight, expert, p, &source.elements));
    MOE_TRY(l->sinks->packed_source(l->sinks->ctx, weight, expert, &source));
    tell_progress(l);
    return moe_ok();
}

static struct moe_status load_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    struct load *l = ctx;
    const struct moe_model_sinks *sinks = l->sinks;
    enum moe_dtype dtype = output_dtype(p);
    size_t bytes = p->rows * p->columns * moe_dtype_bytes(dtype);
    const struct moe_weight_format *f =
        sinks->packed != NULL ? moe_weight_format_of(l->spec, weight) : NULL;
    if (sinks->source != NULL && delivered_as_read(p))
        return pass_source(l, weight, expert, p, bytes);
    if (p->part != MOE_QUANT_DATA)
        l->pieces[p->part] = *p;
    bool fetched = is_fetched(sinks, f, l->pieces[MOE_QUANT_SCALE].at.tensor, p);
    if (!p->again && !fetched)
        MOE_TRY(read_piece(l, weight, expert, p));
    if (p->part != MOE_QUANT_DATA)
        return moe_ok();
    if (fetched)
        return pass_packed_source(l, weight, expert, p);
    if (delivered_as_read(p))
        return sinks->weight(sinks->ctx, weight, expert, dtype, l->raw, bytes);
    if (f != NULL)
        return give_packed(l, weight, expert, f, p);
    if (p->quant == NULL && sinks->source != NULL && bytes <= KEPT_BYTES)
        return pass_gathered(l, weight, expert, p, bytes);
    if (p->quant != NULL)
        MOE_TRY(decode(l, p));
    else
        gather(p, l->raw, l->out);
    return sinks->weight(sinks->ctx, weight, expert, dtype, l->out, bytes);
}

static struct moe_status start_decoding(struct load *l, size_t row_bytes)
{
    size_t bytes;
    uint32_t cores = moe_usable_cores();
    uint32_t threads = cores < DECODE_THREADS_MAX ? cores : DECODE_THREADS_MAX;
    if (!moe_size_mul(threads, row_bytes, &bytes))
        return no_memory();
    l->row_bytes = row_bytes;
    l->rows = malloc(bytes);
    if (l->rows == NULL)
        return no_memory();
    return moe_thread_pool_create("moe-decode", threads, decode_rows, l, &l->pool);
}

static struct moe_status allocate_packed(struct load *l, const struct moe_packed_sizes *s)
{
    if (s->elements == 0)
        return moe_ok();
    l->packed = (struct moe_quant_arrays){malloc(s->elements), malloc(s->scales + 1),
                                          s->zeros != 0 ? malloc(s->zeros) : NULL};
    if (l->packed.elements == NULL || l->packed.scales == NULL ||
        (s->zeros != 0 && l->packed.zeros == NULL))
        return no_memory();
    return moe_ok();
}

static struct moe_status allocate(struct load *l, const struct plan *plan)
{
    MOE_TRY(allocate_packed(l, &plan->packed));
    l->raw = malloc(plan->raw_bytes[MOE_QUANT_DATA] + 1);
    l->out = malloc(plan->out_bytes + 1);
    if (l->raw == NULL || l->out == NULL)
        return no_memory();
    for (int part = MOE_QUANT_DATA + 1; part < MOE_QUANT_PARTS; part++) {
        l->parts[part] = malloc(plan->raw_bytes[part] + 1);
        if (l->parts[part] == NULL)
            return no_memory();
    }
    return plan->row_bytes > 0 ? start_decoding(l, plan->row_bytes) : moe_ok();
}

static void release(struct load *l)
{
    moe_thread_pool_destroy(l->pool);
    free(l->raw);
    free(l->out);
    free(l->rows);
    free(l->packed.elements);
    free(l->packed.scales);
    free(l->packed.zeros);
    for (int part = 0; part < MOE_QUANT_PARTS; part++)
        free(l->parts[part]);
}

struct moe_status moe_model_load_layer(const struct moe_model *m, size_t i, const uint32_t *experts,
                                       size_t expert_count, moe_weight_sink sink, void *ctx,
                                       moe_load_progress progress, void *progress_ctx)
{
    const struct moe_model_sinks sinks = {.weight = sink, .ctx = ctx};
    return moe_model_stream_layer(m, i, experts, expert_count, &sinks, NULL, progress,
                                  progress_ctx);
}

struct moe_status moe_model_stream_layer(const struct moe_model *m, size_t i,
                                         const uint32_t *experts, size_t expert_count,
                                         const struct moe_model_sinks *sinks,
                                         struct moe_digester *digester, moe_load_progress progress,
                                         void *progress_ctx)
{
    struct plan plan = {
        .keeps_packed = sinks->packed != NULL, .sinks = sinks, .spec = moe_model_layer(m, i)};
    MOE_TRY(moe_model__visit_layer(m, i, true, experts, expert_count, plan_piece, &plan));
    if (digester != NULL)
        MOE_TRY(moe_digester__begin(digester, i, true));
    struct load l = {.sinks = sinks,
                     .spec = plan.spec,
                     .progress = progress,
                     .progress_ctx = progress_ctx,
                     .digester = digester};
    struct moe_status st = allocate(&l, &plan);
    if (!moe_failed(&st))
        st = moe_model__visit_layer(m, i, true, experts, expert_count, load_piece, &l);
    release(&l);
    return st;
}
