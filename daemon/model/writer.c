/* SPDX-License-Identifier: Apache-2.0 */
/* The reverse of the loader: writes canonical weights to their places in the files of a frame.
 *
 * The same walk over the same pieces. Gate and up of fused experts may share a byte range. They are
 * adjacent in the walk and cover the whole range, so it is assembled in memory and written once,
 * without reading. */
#include "model/model_write.h"

#include "base/size.h"
#include "model/model_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TILE = 32 }; /* as in loader.c */

struct writer {
    int directory;
    moe_weight_source source;
    moe_range_sink written;
    void *ctx;
    char *raw;    /* the range being assembled */
    float *value; /* one canonical weight */
    size_t raw_bytes, value_bytes;
    struct moe_digester *digester; /* NULL: none */
    enum moe_weight weight;        /* of `last` */
    uint32_t expert;
    struct moe_piece last; /* of which `filled` bytes are in `raw`; 0 = none */
    uint64_t filled;
    const char *shard; /* the file of `fd`, or NULL */
    int fd;
};

static struct moe_status io_failed(const char *what)
{
    return moe_error(errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? MOE_RESOURCE_EXHAUSTED
                                                                          : MOE_FAILED_PRECONDITION,
                     MOE_REASON_IO, "%s: %s", what, strerror(errno));
}

/* ---- numbers ---- */

/* Rounds to nearest even; exact for values from a half, also for NaN payloads. */
static uint16_t half_of(uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) {
        uint32_t payload = a >> 13 & 0x3ff;
        return (uint16_t)(sign | 0x7c00 | (payload != 0 ? payload : 0x200));
    }
    if (a >= 0x477ff000) /* 65520 rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a >= 0x38800000) {
        a -= UINT32_C(112) << 23;
        return (uint16_t)(sign | (a + 0xfff + (a >> 13 & 1)) >> 13);
    }
    if (a < 0x33000000) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    uint32_t mantissa = (a & 0x7fffff) | 0x800000, shift = 126 - (a >> 23);
    uint32_t kept = mantissa >> shift, rest = mantissa & ((UINT32_C(1) << shift) - 1);
    uint32_t tie = UINT32_C(1) << (shift - 1);
    return (uint16_t)(sign | (kept + (rest > tie || (rest == tie && (kept & 1) != 0))));
}

static uint16_t bfloat_of(uint32_t u)
{
    float f;
    if ((u & 0xffff) == 0) /* a BF16 value: exact, also NaN */
        return (uint16_t)(u >> 16);
    memcpy(&f, &u, sizeof f);
    return moe_f32_to_bf16(f);
}

static inline __attribute__((always_inline)) void put_element(enum moe_st_dtype dtype, float value,
                                                              char *raw, size_t at)
{
    uint32_t u;
    memcpy(&u, &value, sizeof u);
    if (dtype == MOE_ST_F32) {
        memcpy(raw + 4 * at, &u, sizeof u);
        return;
    }
    uint16_t narrow = dtype == MOE_ST_BF16 ? bfloat_of(u) : half_of(u);
    memcpy(raw + 2 * at, &narrow, sizeof narrow);
}

static inline __attribute__((always_inline)) void
scatter_as(enum moe_st_dtype dtype, const struct moe_piece *p, const float *value, char *raw)
{
    for (size_t row = 0; row < p->rows; row += TILE)
        for (size_t column = 0; column < p->columns; column += TILE)
            for (size_t r = row; r < p->rows && r < row + TILE; r++)
                for (size_t c = column; c < p->columns && c < column + TILE; c++)
                    put_element(dtype, value[r * p->columns + c], raw,
                                p->base + r * p->row_step + c * p->column_step);
}

static void scatter(const struct moe_piece *p, const float *value, char *raw)
{
    switch (p->at.tensor->dtype) {
    case MOE_ST_F32: scatter_as(MOE_ST_F32, p, value, raw); return;
    case MOE_ST_BF16: scatter_as(MOE_ST_BF16, p, value, raw); return;
    default: scatter_as(MOE_ST_F16, p, value, raw); return;
    }
}

/* ---- files ---- */

static struct moe_status close_shard(struct writer *w)
{
    if (w->shard == NULL)
        return moe_ok();
    int fd = w->fd;
    w->shard = NULL;
    struct moe_status st = fsync(fd) == 0 ? moe_ok() : io_failed("fsync");
    if (close(fd) != 0 && !moe_failed(&st))
        st = io_failed("closing");
    return st;
}

static struct moe_status open_shard(struct writer *w, const struct moe_checkpoint_tensor *at)
{
    struct stat st;
    if (w->shard != NULL && strcmp(w->shard, at->shard) == 0)
        return moe_ok();
    MOE_TRY(close_shard(w));
    w->fd = openat(w->directory, at->shard, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (w->fd < 0)
        return io_failed("opening a file of the frame");
    w->shard = at->shard;
    if (fstat(w->fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        (uint64_t)st.st_size != moe_st_file_bytes(at->file))
        return moe_error(MOE_DATA_LOSS, MOE_REASON_TRUNCATED,
                         "%s is not as long as it was made: it was changed while in use",
                         at->shard);
    return moe_ok();
}

static struct moe_status write_at(int fd, const char *from, uint64_t length, uint64_t offset)
{
    while (length > 0) {
        size_t want = length < (UINT64_C(1) << 30) ? (size_t)length : (size_t)1 << 30;
        ssize_t n = pwrite(fd, from, want, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_failed("writing");
        from += n;
        offset += (uint64_t)n;
        length -= (uint64_t)n;
    }
    return moe_ok();
}

static struct moe_status flush(struct writer *w)
{
    const struct moe_piece *p = &w->last;
    if (w->filled == 0)
        return moe_ok();
    MOE_INVARIANT(w->filled == p->bytes); /* both weights of a fused pair are present */
    struct moe_model_range range = {p->at.shard, p->at.tensor->offset + p->first, p->bytes, ""};
    w->filled = 0;
    MOE_TRY(open_shard(w, &p->at));
    MOE_TRY(write_at(w->fd, w->raw, p->bytes, range.offset));
    if (w->digester != NULL)
        MOE_TRY(moe_digester__hash(w->digester, w->weight, w->expert, p, w->raw));
    struct moe_status st = moe_sha256_of(w->raw, (size_t)p->bytes, range.sha256);
    struct moe_status digested = w->digester != NULL ? moe_digester__wait(w->digester) : moe_ok();
    MOE_TRY(st);
    MOE_TRY(digested);
    return w->written(w->ctx, &range);
}

/* ---- the walk ---- */

static struct moe_status grow(void **buffer, size_t *has, size_t wanted)
{
    if (wanted <= *has && *buffer != NULL)
        return moe_ok();
    free(*buffer);
    *has = wanted;
    *buffer = malloc(wanted + 1);
    return *buffer != NULL ? moe_ok()
                           : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                       "no memory to write weights");
}

/* Quantised weights do not change: their bytes are those of the model. */
static struct moe_status copy_piece(struct writer *w, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    if (p->again)
        return moe_ok();
    MOE_TRY(flush(w));
    MOE_TRY(grow((void **)&w->raw, &w->raw_bytes, (size_t)p->bytes));
    MOE_TRY(moe_st_read(p->at.file, p->at.tensor, p->first, p->bytes, w->raw));
    w->last = *p;
    w->weight = weight;
    w->expert = expert;
    w->filled = p->bytes;
    return moe_ok();
}

static struct moe_status write_piece(void *ctx, enum moe_weight weight, uint32_t expert,
                                     const struct moe_piece *p)
{
    struct writer *w = ctx;
    size_t count = 0, bytes = 0;
    if (p->quant != NULL)
        return copy_piece(w, weight, expert, p);
    MOE_INVARIANT(moe_size_mul(p->rows, p->columns, &count) &&
                  moe_size_mul(count, sizeof(float), &bytes));
    if (w->filled == 0 || !moe_piece_same_range(p, &w->last)) {
        MOE_TRY(flush(w));
        MOE_TRY(grow((void **)&w->raw, &w->raw_bytes, (size_t)p->bytes));
        w->last = *p;
        w->weight = weight;
        w->expert = expert;
    }
    MOE_TRY(grow((void **)&w->value, &w->value_bytes, bytes));
    MOE_TRY(w->source(w->ctx, weight, expert, w->value, count));
    scatter(p, w->value, w->raw);
    w->filled += count * (moe_st_dtype_bits(p->at.tensor->dtype) / 8);
    return moe_ok();
}

struct moe_status moe_model_write_layer(const struct moe_model *m, int to, size_t i,
                                        bool replicated, const uint32_t *experts,
                                        size_t expert_count, moe_weight_source source,
                                        moe_range_sink written, void *ctx,
                                        struct moe_digester *digester)
{
    struct moe_status st;
    struct writer w = {.directory = to,
                       .source = source,
                       .written = written,
                       .ctx = ctx,
                       .digester = digester,
                       .fd = -1};
    if (digester != NULL)
        MOE_TRY(moe_digester__begin(digester, i, replicated));
    MOE_TRY_GOTO(
        st, moe_model__visit_layer(m, i, replicated, experts, expert_count, write_piece, &w), done);
    MOE_TRY_GOTO(st, flush(&w), done);
done:;
    struct moe_status closed = close_shard(&w);
    if (!moe_failed(&st))
        st = closed;
    free(w.raw);
    free(w.value);
    return st;
}

struct moe_status moe_model_weight_name(const struct moe_model *m, size_t i, enum moe_weight weight,
                                        uint32_t expert, char name[MOE_MODEL_NAME_MAX])
{
    char full[MOE_MODEL_NAME_MAX + 1];
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    if (spec == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no such MoE layer");
    moe_layout_plain_name(&m->layout, spec, weight, expert, full, sizeof full);
    if (strlen(full) >= MOE_MODEL_NAME_MAX)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "tensor %.120s... has too long a name", full);
    memcpy(name, full, strlen(full) + 1);
    return moe_ok();
}

struct moe_model_fusion moe_model_layer_fusion(const struct moe_model *m, size_t i)
{
    const struct moe_family *family = m->layout.family;
    return (struct moe_model_fusion){.fused =
                                         moe_layout_is_fused(&m->layout, moe_model_layer(m, i)),
                                     .interleaved = family->interleaved,
                                     .input_first = family->input_first};
}
