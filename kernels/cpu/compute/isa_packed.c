/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops over quantised weights; built once per instruction set, as isa_kernels.c.
 *
 * A product sums rows times elements over a block of inputs, and multiplies this sum by the block's
 * scale (in W8A8 also by the row's) when it adds it to y. Sums of a block are one chain of
 * multiply-adds in ascending order, and so are the sums of blocks: for any number of rows.
 *
 * Few rows use elements as they are decoded. One row is one chain for each output, and waits for
 * each multiply-add, so two panels at a time keep twice as many chains under way. More rows share
 * elements that are decoded once into a cache. With 32 registers, a block of these has two panels
 * and half as many rows. It reads each input of a row once for both. Also, rows are often a
 * multiple of 4 KB apart: 12 of them would displace one another from the first-level cache.
 *
 * Many rows are more than the second-level cache holds, and a chunk takes a few lines of each. That
 * is too short for a processor's own prefetching, so each block prefetches the rows of the next. */
#include "cpu/compute/isa_decode.h"

/* Up to here, elements are used as they are decoded. Compilers take minutes for the instrumented
 * code of more rows (CMakeLists.txt). */
#if defined(MOE_CPU_SMALL_CODE) || defined(__aarch64__)
#define FEW_ROWS 4
#else
#define FEW_ROWS ROWS
#endif

enum {
    PAIR_ROWS = 2,                    /* up to here, two panels at a time */
    CHUNK = 128,                      /* inputs that are decoded at a time for more rows */
    LINE_INPUTS = 16,                 /* inputs in a line of a row */
    MAX_ROWS = 180,                   /* of these, at a time */
    MANY_PANELS = ROWS >= 10 ? 2 : 1, /* of these, at a time */
};

/* ROWS_CASE of each number of rows, which is so a constant. */
#define ALL_ROWS_CASES                                                                             \
    ROWS_CASE(1)                                                                                   \
    ROWS_CASE(2)                                                                                   \
    ROWS_CASE(3)                                                                                   \
    ROWS_CASE(4)                                                                                   \
    ROWS_CASE(5)                                                                                   \
    ROWS_CASE(6)                                                                                   \
    ROWS_CASE(7)                                                                                   \
    ROWS_CASE(8)                                                                                   \
    ROWS_CASE(9)                                                                                   \
    ROWS_CASE(10)                                                                                  \
    ROWS_CASE(11)                                                                                  \
    ROWS_CASE(12)

static inline const uint16_t *words_of(const struct moe_cpu_panel *p)
{
    return (const void *)((const char *)p->data + p->packed->elements_at);
}

/* total += the sums of a block of row `row`, times the scales of the row (W8A8) and of its
 * elements. No branch between product and sum: compilers join them in one basic block only, and few
 * and many rows must round alike. */
BLOCK fold(bool w8a8, const vec sum[VECTORS], const struct moe_cpu_rows *x, uint32_t row,
           uint32_t block, const vec scale[VECTORS], vec total[VECTORS])
{
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        vec factor = scale[v];
        if (w8a8)
            factor *= x->scale[row * x->groups + block];
        total[v] += sum[v] * factor;
    }
}

/* Where rows of a register block are: every fourth of them. So all addresses of an input take six
 * registers at most: compilers keep one for each row, and spill them to vectors. */
struct row_pointers {
    const char *row[(ROWS + 3) / 4];
    size_t stride, three_strides; /* bytes */
};

/* The empty statements keep compilers from computing addresses in another way. */
BLOCK point_to_rows(uint32_t rows, const float *x, size_t stride, struct row_pointers *p)
{
    p->stride = stride * sizeof *x;
    p->three_strides = 3 * p->stride;
    __asm__("" : "+r"(p->stride), "+r"(p->three_strides));
    UNROLL
    for (uint32_t r = 0; r < rows; r += 4)
        p->row[r / 4] = (const char *)(x + r * stride);
}

BLOCK advance_rows(uint32_t rows, uint32_t inputs, struct row_pointers *p)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r += 4) {
        p->row[r / 4] += inputs * sizeof(float);
        __asm__("" : "+r"(p->row[r / 4]));
    }
}

static inline __attribute__((always_inline)) size_t row_offset(const struct row_pointers *p,
                                                               uint32_t row)
{
    return row % 4 == 3 ? p->three_strides : row % 4 * p->stride;
}

static inline __attribute__((always_inline)) float row_input(const struct row_pointers *p,
                                                             uint32_t row, uint32_t input)
{
    const char *x = p->row[row / 4] + row_offset(p, row);
    return ((const float *)(const void *)x)[input];
}

/* --------------------------------------------------------------------- few rows */

/* Adds the inputs of one word, of which `inputs` exist, to the sums of `rows` rows. */
BLOCK add_word(enum kind kind, uint32_t rows, const uint16_t *words, const struct levels *l,
               const struct row_pointers *x, uint32_t inputs, vec sum[FEW_ROWS][VECTORS])
{
    struct word word;
    read_word(kind, words, &word);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        vec value[VECTORS];
        if (j >= inputs)
            break;
        values_of(kind, &word, (int)j, l, value);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] += row_input(x, r, j) * value[v];
        }
    }
}

/* Adds the next `n` inputs, which are of one block, for `count` panels; `x` and `words` of each
 * panel move on. */
BLOCK add_inputs(enum kind kind, uint32_t count, uint32_t rows, const uint16_t *words[2],
                 const struct levels *l, struct row_pointers *x, uint32_t n,
                 vec sum[2][FEW_ROWS][VECTORS])
{
    const uint32_t step = word_inputs(kind), left = n % step;
    for (uint32_t steps = n / step; steps > 0; steps--) {
        UNROLL
        for (uint32_t c = 0; c < count; c++) {
            __builtin_prefetch((const char *)words[c] + PREFETCH_BYTES);
            add_word(kind, rows, words[c], &l[c], x, step, sum[c]);
            words[c] += PANEL;
        }
        advance_rows(rows, step, x);
    }
    if (left == 0)
        return;
    UNROLL
    for (uint32_t c = 0; c < count; c++) /* the matrix's last inputs */
        add_word(kind, rows, words[c], &l[c], x, left, sum[c]);
}

BLOCK load_all_levels(enum kind kind, uint32_t count, const struct moe_cpu_panel *p, uint32_t block,
                      struct levels l[2])
{
    UNROLL
    for (uint32_t c = 0; c < count; c++)
        load_levels(kind, p[c].packed, p[c].data, block, &l[c]);
}

/* `kind`, `w8a8`, `count` and `rows` are constants after inlining. */
BLOCK few_packed(enum kind kind, bool w8a8, uint32_t count, uint32_t rows,
                 const struct moe_cpu_panel *p, const struct moe_cpu_rows *x, uint32_t k,
                 size_t y_stride)
{
    const uint16_t *words[2] = {words_of(&p[0]), words_of(&p[count - 1])};
    const uint32_t size = p->packed->block;
    vec total[2][FEW_ROWS][VECTORS] = {0};
    struct levels l[2];
    struct row_pointers from;
    point_to_rows(rows, x->x, x->stride, &from);
    for (uint32_t i = 0, block = 0, n; i < k; i += n, block++) {
        n = k - i < size ? k - i : size;
        vec sum[2][FEW_ROWS][VECTORS] = {0};
        if (subtracts(kind))
            load_all_levels(kind, count, p, block, l);
        add_inputs(kind, count, rows, words, l, &from, n, sum);
        if (!subtracts(kind)) /* late: to spare registers */
            load_all_levels(kind, count, p, block, l);
        UNROLL
        for (uint32_t c = 0; c < count; c++) {
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                fold(w8a8, sum[c][r], x, r, block, l[c].scale, total[c][r]);
        }
    }
    UNROLL
    for (uint32_t c = 0; c < count; c++) {
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                memcpy(p[c].y + r * y_stride + v * LANES, &total[c][r][v], sizeof(vec));
        }
    }
}

/* -------------------------------------------------------------------- many rows */

/* Up to CHUNK inputs of one or two panels, decoded, and the sums of rows times these panels. A
 * piece is a block, or the part of a block that is in the chunk. Vectors of a panel are neighbours.
 */
struct chunk {
    uint32_t first, end;            /* inputs */
    bool last;                      /* the matrix has no more */
    uint32_t block;                 /* inputs of a block */
    uint32_t first_block, in_block; /* the block of `first`, and its inputs before `first` */
    /* Words of the next chunk. A product prefetches them evenly: all at once, while they are
     * decoded, would be more than a processor has on the way. */
    const char *next[2];
    size_t next_step;         /* bytes from a prefetch to the next */
    uint32_t next_prefetches; /* while a block of rows takes LINE_INPUTS inputs */
    vec values[CHUNK * 2 * VECTORS];
    vec scale[CHUNK / 2 * 2 * VECTORS]; /* of each piece; blocks have two inputs or more */
    vec total[MAX_ROWS * 2 * VECTORS];  /* [rows] */
    vec sum[MAX_ROWS * 2 * VECTORS];    /* [rows]: of a block that began in the chunk before */
};

/* Decodes the inputs of one word, of which `inputs` exist. Inputs are `width` vectors apart. */
BLOCK decode_word(enum kind kind, const uint16_t *words, const struct levels *l, uint32_t inputs,
                  uint32_t width, vec *to)
{
    struct word word;
    read_word(kind, words, &word);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        vec value[VECTORS];
        if (j >= inputs)
            break;
        values_of(kind, &word, (int)j, l, value);
        UNROLL
        for (uint32_t v = 0; v < VECTORS; v++)
            to[j * width + v] = value[v];
    }
}

/* Decodes panel number `n` of `count`. */
BLOCK decode_chunk(enum kind kind, uint32_t count, uint32_t n, const struct moe_cpu_panel *p,
                   struct chunk *c)
{
    const uint32_t step = word_inputs(kind), width = count * VECTORS;
    const uint16_t *words = words_of(p) + (size_t)(c->first / step) * PANEL;
    vec *to = c->values + n * VECTORS, *scale = c->scale + n * VECTORS;
    for (uint32_t i = c->first, end; i < c->end; i = end, scale += width) {
        struct levels l;
        uint32_t left = c->block - i % c->block;
        end = c->end - i < left ? c->end : i + left;
        load_levels(kind, p->packed, p->data, i / c->block, &l);
        for (int v = 0; v < VECTORS; v++)
            scale[v] = l.scale[v];
        for (uint32_t steps = (end - i) / step; steps > 0; steps--) {
            decode_word(kind, words, &l, step, width, to);
            words += PANEL;
            to += step * width;
        }
        if ((end - i) % step != 0) /* the matrix's last inputs */
            decode_word(kind, words, &l, (end - i) % step, width, to);
    }
}

BLOCK copy_vectors(uint32_t n, const vec *from, vec *to)
{
    UNROLL
    for (uint32_t i = 0; i < n; i++)
        to[i] = from[i];
}

/* Prefetches a line of each of the next `rows` rows, `ahead` bytes after the present ones, to the
 * second-level cache. In the first they would displace values, because rows are often a multiple of
 * 4 KB apart. */
BLOCK prefetch_rows(uint32_t rows, const struct row_pointers *x, size_t ahead)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++)
        __builtin_prefetch(x->row[r / 4] + ahead + row_offset(x, r), 0, 2);
}

/* Adds the next `n` inputs of `rows` rows, times `width` vectors of values each, to the sums. */
BLOCK add_values(uint32_t rows, uint32_t width, uint32_t n, const vec *values,
                 struct row_pointers *x, vec sum[ROWS][2 * VECTORS])
{
    UNROLL_4
    for (; n > 0; n--, values += width) {
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (uint32_t v = 0; v < width; v++)
                sum[r][v] += row_input(x, r, 0) * values[v];
        }
        advance_rows(rows, 1, x);
    }
}

/* The chunk times `rows` rows from row `row`. `count`, `rows` and `w8a8` are constants after
 * inlining. */
BLOCK multiply_rows(uint32_t count, uint32_t rows, bool w8a8, const struct moe_cpu_rows *x,
                    uint32_t row, struct chunk *c)
{
    const uint32_t width = count * VECTORS, size = c->block;
    const vec *values = c->values, *scale = c->scale;
    const char *next[2] = {c->next[0], c->next[count - 1]};
    const size_t next_step = c->next_step, ahead = rows * x->stride * sizeof *x->x;
    const uint32_t next_prefetches = c->next_prefetches;
    vec *total = c->total + (size_t)row * width, *carried = c->sum + (size_t)row * width;
    uint32_t in_block = c->in_block, block = c->first_block, n;
    struct row_pointers from;
    point_to_rows(rows, x->x + row * x->stride + c->first, x->stride, &from);
    for (uint32_t i = c->first; i < c->end; i += n, block++, scale += width, in_block = 0) {
        vec sum[ROWS][2 * VECTORS] = {0};
        n = c->end - i < size - in_block ? c->end - i : size - in_block;
        if (in_block != 0) {
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                copy_vectors(width, carried + r * width, sum[r]);
        }
        for (uint32_t left = n, line; left > 0; left -= line, values += line * width) {
            line = left < LINE_INPUTS ? left : LINE_INPUTS;
            prefetch_rows(rows, &from, ahead);
            for (uint32_t l = next_prefetches; l > 0; l--) {
                UNROLL
                for (uint32_t p = 0; p < count; p++) {
                    __builtin_prefetch(next[p]);
                    next[p] += next_step;
                }
            }
            add_values(rows, width, line, values, &from, sum);
        }
        if (i + n == c->end && !c->last && in_block + n < size) { /* the block goes on */
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                copy_vectors(width, sum[r], carried + r * width);
            break;
        }
        vec scales[2 * VECTORS]; /* in registers, for all rows */
        copy_vectors(width, scale, scales);
        __asm__("" : "+r"(total)); /* one register for all addresses of totals */
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (uint32_t p = 0; p < count; p++)
                fold(w8a8, sum[r] + p * VECTORS, x, row + r, block, scales + p * VECTORS,
                     total + r * width + p * VECTORS);
        }
    }
    UNROLL
    for (uint32_t p = 0; p < count; p++)
        c->next[p] = next[p];
}

/* The same for `blocks` blocks of `rows` rows, from row `row` on. */
BLOCK multiply_blocks(uint32_t count, bool w8a8, uint32_t blocks, uint32_t rows,
                      const struct moe_cpu_rows *x, uint32_t row, struct chunk *c)
{
#define ROWS_CASE(n)                                                                               \
    case n:                                                                                        \
        for (; n <= ROWS / count && blocks > 0; blocks--, row += n)                                \
            multiply_rows(count, n <= ROWS / count ? n : 1, w8a8, x, row, c);                      \
        break;
    switch (rows) {
        ALL_ROWS_CASES
    }
#undef ROWS_CASE
}

typedef void multiply_fn(uint32_t blocks, uint32_t rows, const struct moe_cpu_rows *x, uint32_t row,
                         struct chunk *c);
#define DEFINE_MULTIPLY(name, count, w8a8)                                                         \
    static void name(uint32_t blocks, uint32_t rows, const struct moe_cpu_rows *x, uint32_t row,   \
                     struct chunk *c)                                                              \
    {                                                                                              \
        multiply_blocks(count, w8a8, blocks, rows, x, row, c);                                     \
    }
DEFINE_MULTIPLY(multiply_one, 1, false)
DEFINE_MULTIPLY(multiply_one_w8a8, 1, true)
#if ROWS >= 10
DEFINE_MULTIPLY(multiply_two, 2, false)
DEFINE_MULTIPLY(multiply_two_w8a8, 2, true)
#endif

static multiply_fn *const multiply_of[MANY_PANELS][2] = {{multiply_one, multiply_one_w8a8},
#if ROWS >= 10
                                                         {multiply_two, multiply_two_w8a8}
#endif
};

static void decode(uint32_t count, uint32_t n, const struct moe_cpu_panel *p, struct chunk *c)
{
    switch (kind_of(p->packed)) {
    case KIND_F8: decode_chunk(KIND_F8, count, n, p, c); break;
    case KIND_E2M1: decode_chunk(KIND_E2M1, count, n, p, c); break;
    case KIND_INT4: decode_chunk(KIND_INT4, count, n, p, c); break;
    case KIND_INT4_ZEROS: decode_chunk(KIND_INT4_ZEROS, count, n, p, c); break;
    }
}

/* Bytes of `inputs` inputs of a panel. */
static size_t word_bytes(const struct moe_cpu_packed *p, uint32_t inputs)
{
    return inputs / moe_cpu_word_inputs(p->encoding) * PANEL * sizeof(uint16_t);
}

static void decode_panels(uint32_t count, const struct moe_cpu_panel *p, struct chunk *c)
{
    for (uint32_t n = 0; n < count; n++) {
        decode(count, n, &p[n], c);
        c->next[n] = (const char *)words_of(&p[n]) + word_bytes(p[n].packed, c->end);
    }
}

/* Spreads the prefetches of `bytes` bytes of words over `lines` calls of add_values. */
static void plan_prefetches(size_t bytes, uint32_t lines, struct chunk *c)
{
    c->next_prefetches = (uint32_t)(bytes / 64 / lines) + 1;
    c->next_step = bytes / (lines * c->next_prefetches) + 1;
}

static void store_totals(uint32_t count, uint32_t rows, const vec *total,
                         const struct moe_cpu_panel *p, size_t y_at, size_t y_stride)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t n = 0; n < count; n++, total += VECTORS)
            memcpy(p[n].y + y_at + r * y_stride, total, PANEL * sizeof(float));
}

/* Rows row .. row + rows - 1; rows <= MAX_ROWS. */
static void many_packed(uint32_t count, const struct moe_cpu_panel *p, uint32_t row, uint32_t rows,
                        const struct moe_cpu_rows *all, uint32_t k, size_t y_stride)
{
    struct moe_cpu_rows x = *all;
    struct chunk c; /* large: not initialised as a whole */
    const uint32_t size = p->packed->block, height = ROWS / count;
    /* Blocks of nearly equal height, as in DEFINE_PANEL: `higher` of low + 1 rows, others of low.
     */
    const uint32_t blocks = (rows + height - 1) / height, low = rows / blocks,
                   higher = rows % blocks;
    multiply_fn *const multiply = multiply_of[count - 1][all->scale != NULL];
    /* Whole blocks, if they fit. */
    const uint32_t inputs = size > CHUNK ? CHUNK : CHUNK / size * size;
    x.x += row * x.stride;
    if (x.scale != NULL)
        x.scale += (size_t)row * x.groups;
    c.block = size;
    plan_prefetches(word_bytes(p->packed, inputs),
                    blocks * ((inputs + LINE_INPUTS - 1) / LINE_INPUTS), &c);
    memset(c.total, 0, rows * count * VECTORS * sizeof(vec));
    for (c.first = 0; c.first < k; c.first = c.end) {
        c.end = k - c.first < inputs ? k : c.first + inputs;
        c.last = c.end == k;
        c.first_block = c.first / size;
        c.in_block = c.first % size;
        decode_panels(count, p, &c);
        multiply(higher, low + 1, &x, 0, &c);
        multiply(blocks - higher, low, &x, higher * (low + 1), &c);
    }
    store_totals(count, rows, c.total, p, row * y_stride, y_stride);
}

/* ------------------------------------------------------------------ entry points */

/* All but `rows` are constants after inlining. */
BLOCK few_of(enum kind kind, bool w8a8, uint32_t count, uint32_t rows,
             const struct moe_cpu_panel *p, const struct moe_cpu_rows *x, uint32_t k,
             size_t y_stride)
{
#define ROWS_CASE(n)                                                                               \
    case n:                                                                                        \
        if (n <= (count == 2 ? (int)PAIR_ROWS : (int)FEW_ROWS))                                    \
            few_packed(kind, w8a8, count, n <= FEW_ROWS ? n : 1, p, x, k, y_stride);               \
        break;
    switch (rows) {
        ALL_ROWS_CASES
    }
#undef ROWS_CASE
}

typedef void few_fn(uint32_t rows, const struct moe_cpu_panel *p, const struct moe_cpu_rows *x,
                    uint32_t k, size_t y_stride);
#define DEFINE_FEW(name, kind, w8a8)                                                               \
    static void one_##name(uint32_t rows, const struct moe_cpu_panel *p,                           \
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)              \
    {                                                                                              \
        few_of(kind, w8a8, 1, rows, p, x, k, y_stride);                                            \
    }                                                                                              \
    static void two_##name(uint32_t rows, const struct moe_cpu_panel *p,                           \
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)              \
    {                                                                                              \
        few_of(kind, w8a8, 2, rows, p, x, k, y_stride);                                            \
    }
DEFINE_FEW(f8, KIND_F8, false)
DEFINE_FEW(f8_w8a8, KIND_F8, true)
DEFINE_FEW(e2m1, KIND_E2M1, false)
DEFINE_FEW(int4, KIND_INT4, false)
DEFINE_FEW(int4_zeros, KIND_INT4_ZEROS, false)

static few_fn *find_few(enum kind kind, bool w8a8, uint32_t count)
{
    static few_fn *const of_kind[][2] = {[KIND_F8] = {one_f8, two_f8},
                                         [KIND_E2M1] = {one_e2m1, two_e2m1},
                                         [KIND_INT4] = {one_int4, two_int4},
                                         [KIND_INT4_ZEROS] = {one_int4_zeros, two_int4_zeros}};
    if (w8a8)
        return count == 2 ? two_f8_w8a8 : one_f8_w8a8;
    return of_kind[kind][count - 1];
}

void MOE_CPU_PANELS_PACKED(uint32_t count, const struct moe_cpu_panel *panels, uint32_t rows,
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)
{
    uint32_t together = rows <= PAIR_ROWS ? count : 1;
    few_fn *few = find_few(kind_of(panels->packed), x->scale != NULL, together);
    for (uint32_t c = 0; rows <= FEW_ROWS && c < count; c += together)
        few(rows, &panels[c], x, k, y_stride);
    if (rows <= FEW_ROWS)
        return;
    for (uint32_t c = 0, n; c < count; c += n) {
        n = count - c < MANY_PANELS ? count - c : MANY_PANELS;
        for (uint32_t row = 0; row < rows; row += MAX_ROWS)
            many_packed(n, &panels[c], row, rows - row < MAX_ROWS ? rows - row : MAX_ROWS, x, k,
                        y_stride);
    }
}

/* The weights themselves: values times scales, rounded once, as moe/packed_matrix.h defines. */
BLOCK unpack_as(enum kind kind, const struct moe_cpu_packed *p, const char *panel, uint32_t first,
                uint32_t n, float *to)
{
    const uint32_t step = word_inputs(kind);
    const uint16_t *words = (const void *)(panel + p->elements_at);
    words += (size_t)(first / step) * PANEL;
    struct levels l;
    uint32_t i = first, last = first + n;
    while (i < last) {
        uint32_t block = i / p->block, end = p->block - i % p->block;
        end = last - i < end ? last : i + end;
        load_levels(kind, p, panel, block, &l);
        for (; i < end; i += step, words += PANEL) {
            struct word word;
            read_word(kind, words, &word);
            UNROLL
            for (int j = 0; j < 4; j++) {
                vec weight[VECTORS];
                if (j >= (int)step || i + (uint32_t)j >= end)
                    break;
                values_of(kind, &word, j, &l, weight);
                UNROLL
                for (int v = 0; v < VECTORS; v++)
                    weight[v] *= l.scale[v];
                memcpy(to, weight, sizeof weight);
                to += PANEL;
            }
        }
        i = end;
    }
}

void MOE_CPU_UNPACK(const struct moe_cpu_packed *p, const void *panel, uint32_t first, uint32_t n,
                    float *to)
{
    switch (kind_of(p)) {
    case KIND_F8: unpack_as(KIND_F8, p, panel, first, n, to); break;
    case KIND_E2M1: unpack_as(KIND_E2M1, p, panel, first, n, to); break;
    case KIND_INT4: unpack_as(KIND_INT4, p, panel, first, n, to); break;
    case KIND_INT4_ZEROS: unpack_as(KIND_INT4_ZEROS, p, panel, first, n, to); break;
    }
}
