/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of packing on the CPU: on every instruction set, panels have the bytes that isa.h and
 * matrix.h describe, for any shape, format and alignment. Plain loops here write them a second
 * time.
 */
#include "cpu/compute/packed.h"
#include "kernels_fixture.h"
#include "support/packed.h"

static const struct moe_cpu_isa *const *isas;
static uint32_t isa_count;

static void check_bytes(const char *what, const void *got, const void *want, size_t n)
{
    const uint8_t *g = got, *w = want;
    for (size_t i = 0; i < n; i++)
        if (g[i] != w[i])
            fail_msg("%s: byte %zu of %zu is %#x, not %#x", what, i, n, g[i], w[i]);
}

/* ------------------------------------------------------------------ interleaving */

enum { ROW_MAX = 700, GUARD = 64 };

static bool is_nan(uint8_t byte)
{
    return (byte & 0x7f) == 0x7f;
}

/* to [ceil(n / size)][width] words; returns whether a byte is NaN. */
static bool interleave_by_hand(uint32_t width, uint32_t size, size_t n, const void *const *rows,
                               uint8_t *to)
{
    bool nan = false;
    for (size_t at = 0; at < (n + size - 1) / size * size; at += size)
        for (uint32_t r = 0; r < width; r++)
            for (uint32_t i = 0; i < size; i++, to++) {
                const uint8_t *row = rows[r];
                *to = row != NULL && at + i < n ? row[at + i] : 0;
                nan |= is_nan(*to);
            }
    return nan;
}

/* Rows with bytes of which at most one is NaN; some rows are missing. */
static void draw_rows(uint32_t width, size_t n, uint8_t *bytes, const void **rows)
{
    uint32_t missing = one_in(2) ? random_below(width + 1) : 0;
    fill_random(bytes, MOE_CPU_MAX_PANEL * (ROW_MAX + 1));
    for (size_t i = 0; i < MOE_CPU_MAX_PANEL * (ROW_MAX + 1); i++)
        if (is_nan(bytes[i]))
            bytes[i] ^= 0x10;
    for (uint32_t r = 0; r < width; r++)
        rows[r] = random_below(width) < missing ? NULL : bytes + (size_t)r * (ROW_MAX + 1);
    if (n > 0 && one_in(2))
        bytes[random_below(width) * (ROW_MAX + 1) + random_below((uint32_t)n)] =
            one_in(2) ? 0x7f : 0xff;
}

static void rows_become_words_side_by_side(void **state)
{
    (void)state;
    static uint8_t bytes[MOE_CPU_MAX_PANEL * (ROW_MAX + 1)];
    static uint8_t got[MOE_CPU_MAX_PANEL * (ROW_MAX + 4) + GUARD], want[sizeof got];
    for (uint32_t c = 0; c < 3000; c++) {
        const struct moe_cpu_isa *isa = isas[c % isa_count];
        const uint32_t size = 1u << random_below(3);
        const size_t n = random_below(one_in(2) ? ROW_MAX : 140);
        const void *rows[MOE_CPU_MAX_PANEL];
        char what[80];
        draw_rows(isa->panel, n, bytes, rows);
        memset(got, 0xa5, sizeof got);
        memset(want, 0xa5, sizeof want);
        bool nan = interleave_by_hand(isa->panel, size, n, rows, want);
        snprintf(what, sizeof what, "%s, %zu bytes in words of %u", isa->name, n, size);
        assert_int_equal(isa->interleave(size, n, rows, got), nan);
        check_bytes(what, got, want, sizeof got); /* nothing behind the panel either */
    }
}

/* ------------------------------------------------------------------ panels */

/* Panel `p` of a quantised matrix; gaps between its parts are zero. */
static void panel_by_hand(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *m,
                          const struct moe_weight_format *f, const struct moe_packed_matrix *from,
                          uint32_t p, uint8_t *panel)
{
    const struct moe_cpu_packed *packed = &m->packed;
    struct moe_packed_sizes s;
    const uint32_t width = isa->panel;
    const size_t each = moe_scale_bytes(f->scale);
    assert_true(moe_packed_sizes(f, m->out, m->in, &s));
    memset(panel, 0, m->panel_bytes);
    for (uint32_t r = 0; r < width && p * width + r < m->out; r++) {
        const size_t row = (size_t)p * width + r,
                     first = moe_packed_block(f, s.scale_columns, row, 0);
        for (size_t b = 0; b < s.scale_columns; b++) {
            float scale = moe_scale_to_f32(f, from->scales, first + b, from->global);
            if (packed->shared_scales)
                memcpy(panel + packed->scales_at + b * sizeof scale, &scale, sizeof scale);
            else
                memcpy(panel + packed->scales_at + (b * width + r) * each,
                       (const char *)from->scales + (first + b) * each, each);
            if (packed->zero_points)
                panel[packed->zeros_at + b * width + r] = from->zeros[first + b];
        }
        const uint32_t place = f->encoding == MOE_ENC_F8E4M3 ? r : isa->place[r];
        for (size_t i = 0; i < s.row_bytes; i++)
            panel[packed->elements_at + (i / 2 * width + place) * 2 + i % 2] =
                ((const uint8_t *)from->elements)[row * s.row_bytes + i];
    }
}

/* The same arrays at odd addresses. */
static struct moe_packed_matrix move_to_odd(const struct moe_packed_matrix *from,
                                            const struct moe_packed_sizes *s, uint8_t *room)
{
    struct moe_packed_matrix to = *from;
    to.elements = memcpy(room + 1, from->elements, s->elements);
    room += s->elements / 2 * 2 + 2;
    to.scales = memcpy(room + 1, from->scales, s->scales);
    return to;
}

static void check_quantised(const struct moe_cpu_isa *isa, enum moe_encoding encoding)
{
    struct rng r = {random_bits()};
    const struct moe_weight_format f = random_format(&r, encoding);
    const uint32_t out = random_between(1, 200), in = random_between(1, one_in(4) ? 1500 : 300);
    struct random_packed source = random_packed(&r, &f, out, in, 1);
    struct moe_device *device = open_device(isa, random_between(1, 3));
    struct moe_packed_sizes sizes;
    struct moe_cpu_matrix m;
    char what[200];
    assert_true(moe_packed_sizes(&f, out, in, &sizes));
    uint8_t *room = malloc(sizes.bytes + 8);
    assert_non_null(room);
    const struct moe_packed_matrix from = move_to_odd(&source.matrix, &sizes, room);
    assert_ok(moe_cpu_matrix_pack_quantised(device, out, in, &f, &from, &m));
    assert_int_equal(m.dtype, MOE_DTYPE_NONE);
    uint8_t *want = malloc(m.panel_bytes);
    assert_non_null(want);
    for (uint32_t p = 0; p < m.panels; p++) {
        panel_by_hand(isa, &m, &f, &from, p, want);
        snprintf(what, sizeof what, "%s, %u x %u, %s, panel %u", isa->name, out, in,
                 format_text(&f), p);
        check_bytes(what, (const uint8_t *)m.data + p * m.panel_bytes, want, m.panel_bytes);
    }
    free(want);
    free(room);
    moe_cpu_matrix_free(device, &m);
    moe_cpu_device_close(device);
    free_packed(&source);
}

static void quantised_panels_have_the_bytes_of_their_layout(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 360; c++)
        check_quantised(isas[c % isa_count], MOE_ENC_F8E4M3 + c / isa_count % 3);
}

static void check_plain(const struct moe_cpu_isa *isa, enum moe_dtype dtype)
{
    const uint32_t out = random_between(1, 200), in = random_between(1, one_in(4) ? 1500 : 300);
    const uint32_t width = isa->panel, size = (uint32_t)moe_dtype_bytes(dtype);
    struct moe_device *device = open_device(isa, random_between(1, 3));
    struct moe_cpu_matrix m;
    char what[120];
    uint8_t *data = malloc((size_t)out * in * size + 1);
    assert_non_null(data);
    fill_random(data, (size_t)out * in * size + 1); /* odd address, any bits */
    assert_ok(moe_cpu_matrix_pack(device, out, in, dtype, dtype, data + 1, &m));
    uint8_t *want = malloc(m.panel_bytes);
    assert_non_null(want);
    for (uint32_t p = 0; p < m.panels; p++) {
        const void *rows[MOE_CPU_MAX_PANEL] = {NULL};
        for (uint32_t r = 0; r < width && p * width + r < out; r++)
            rows[r] = data + 1 + ((size_t)p * width + r) * in * size;
        (void)interleave_by_hand(width, 4, (size_t)in * size, rows, want);
        snprintf(what, sizeof what, "%s, %u x %u, %u bytes, panel %u", isa->name, out, in, size, p);
        check_bytes(what, (const uint8_t *)m.data + p * m.panel_bytes, want, m.panel_bytes);
    }
    free(want);
    free(data);
    moe_cpu_matrix_free(device, &m);
    moe_cpu_device_close(device);
}

static void plain_panels_have_the_bytes_of_their_layout(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 240; c++)
        check_plain(isas[c % isa_count], c / isa_count % 2 == 0 ? MOE_DTYPE_BF16 : MOE_DTYPE_F32);
}

/* One element or one scale that is NaN, at any place, is found. (0xff is NaN in every type.) */
static void one_odd_value_anywhere_is_found(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 240; c++) {
        struct rng r = {random_bits()};
        const struct moe_cpu_isa *isa = isas[c % isa_count];
        const struct moe_weight_format f = random_format(&r, MOE_ENC_F8E4M3);
        const uint32_t out = random_between(1, 100), in = random_between(1, 300);
        const bool scale = c / isa_count % 2 == 0;
        struct moe_packed_sizes s;
        struct moe_cpu_matrix m;
        assert_true(moe_packed_sizes(&f, out, in, &s));
        struct random_packed source = random_packed(&r, &f, out, in, 1);
        if (scale)
            memset((char *)source.scales +
                       random_below((uint32_t)(s.scale_rows * s.scale_columns)) *
                           moe_scale_bytes(f.scale),
                   0xff, moe_scale_bytes(f.scale));
        else
            ((uint8_t *)source.elements)[random_below((uint32_t)s.elements)] = 0xff;
        struct moe_device *device = open_device(isa, random_between(1, 3));
        assert_ok(moe_cpu_matrix_pack_quantised(device, out, in, &f, &source.matrix, &m));
        assert_int_equal(m.dtype, MOE_DTYPE_F32);
        moe_cpu_matrix_free(device, &m);
        moe_cpu_device_close(device);
        free_packed(&source);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_become_words_side_by_side),
        cmocka_unit_test(quantised_panels_have_the_bytes_of_their_layout),
        cmocka_unit_test(plain_panels_have_the_bytes_of_their_layout),
        cmocka_unit_test(one_odd_value_anywhere_is_found),
    };
    seed_random();
    isas = moe_cpu_isa_list(&isa_count);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
