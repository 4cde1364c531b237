/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops, in portable GNU C vectors; built once per instruction set (CMakeLists.txt).
 *
 * A register block holds up to ROWS rows times two vectors of output columns. Each step takes two
 * neighbouring inputs. One vector load brings a pair of bf16 weights for every column. A shift and
 * a mask widen them exactly to fp32. Each row adds its two broadcast inputs times them. On
 * processors without a matrix unit, bf16 dot products run at half the rate of fp32 multiply-adds.
 * So bf16 only reduces memory traffic.
 *
 * Every output element is one chain of multiply-adds over k in ascending order, for any number of
 * rows: results are bitwise independent of the batch. */
#include "cpu/compute/isa_vectors.h"

extern const struct moe_cpu_isa GLUE(moe_cpu_isa_, MOE_CPU_ISA);

BLOCK block_bf16(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                 float *y, size_t y_stride)
{
    vec acc[ROWS][VECTORS] = {0};
    const uvec *pairs = w;
    uint32_t i = 0;
    for (; i + 1 < k; i += 2, pairs += VECTORS) {
        vec even[VECTORS], odd[VECTORS];
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            __builtin_prefetch((const char *)(pairs + v) + PREFETCH_BYTES);
            even[v] = (vec)(pairs[v] << 16);
            odd[v] = (vec)(pairs[v] & UINT32_C(0xffff0000));
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            float a = x[r * x_stride + i], b = x[r * x_stride + i + 1];
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                acc[r][v] += a * even[v];
                acc[r][v] += b * odd[v];
            }
        }
    }
    if (i < k) { /* odd k: the second weight of the last pair is padding, x has no such element */
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + i] * (vec)(pairs[v] << 16);
        }
    }
    store_block(rows, acc, y, y_stride);
}

BLOCK add_block(uint32_t rows, vec acc[ROWS][VECTORS], float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            vec old;
            memcpy(&old, y + r * y_stride + v * LANES, sizeof old);
            acc[r][v] += old;
        }
    }
    store_block(rows, acc, y, y_stride);
}

/* Prefetches y of the next block, which is usually not in a cache. */
BLOCK prefetch_next_rows(uint32_t rows, const float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch(y + (rows + r) * y_stride + v * LANES, 1);
    }
}

BLOCK sum_f32(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k, float *y,
              size_t y_stride, bool add)
{
    vec acc[ROWS][VECTORS] = {0};
    const vec *weights = w;
    for (uint32_t i = 0; i < k; i++, weights += VECTORS) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch((const char *)(weights + v) + PREFETCH_BYTES);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + i] * weights[v];
        }
    }
    if (add)
        add_block(rows, acc, y, y_stride);
    else
        store_block(rows, acc, y, y_stride);
}

BLOCK block_f32(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k, float *y,
                size_t y_stride)
{
    sum_f32(rows, x, x_stride, w, k, y, y_stride, false);
}

BLOCK block_f32_add(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                    float *y, size_t y_stride)
{
    prefetch_next_rows(rows, y, y_stride);
    sum_f32(rows, x, x_stride, w, k, y, y_stride, true);
}

DEFINE_PANEL(panel_bf16, block_bf16)
DEFINE_PANEL(panel_f32, block_f32)
DEFINE_PANEL(panel_f32_add, block_f32_add)

static void widen(enum moe_dtype dtype, size_t n, const void *from, float scale, float *to)
{
    if (dtype == MOE_DTYPE_F32) {
        const float *f = from;
        for (size_t i = 0; i < n; i++)
            to[i] = scale * f[i];
        return;
    }
    const uint16_t *b = from;
    for (size_t i = 0; i < n; i++)
        to[i] = scale * moe_bf16_to_f32(b[i]);
}

/* ------------------------------------------------------- quantised activations */

/* The largest |x|; NaN counts as 0. */
static float largest_of(const float *x, size_t n)
{
    vec most = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec value;
        memcpy(&value, x + i, sizeof value);
        value = (vec)((uvec)value & 0x7fffffff);
        ivec larger = value > most;
        most = (vec)((larger & (ivec)value) | (~larger & (ivec)most));
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    for (; i < n; i++) {
        float value = x[i] < 0 ? -x[i] : x[i];
        largest = value > largest ? value : largest;
    }
    return largest;
}

static void quantise(bool pow2, uint32_t group, size_t n, float *x, float *scale)
{
    for (size_t first = 0; first < n; first += group, x += group) {
        size_t count = n - first < group ? n - first : group;
        float s = moe_e4m3_scale(largest_of(x, count), pow2);
        for (size_t i = 0; i < count; i++)
            x[i] = moe_round_to_e4m3(x[i] / s);
        *scale++ = s;
    }
}

/* Reads the row twice, a tile at a time. */
static void quantise_bytes(enum moe_dtype dtype, bool pow2, uint32_t group, size_t n,
                           const void *from, uint8_t *to, float *scale)
{
    enum { TILE = 512 };
    float tile[TILE];
    const char *row = from;
    for (size_t first = 0, end; first < n; first = end) {
        float largest = 0;
        end = n - first < group ? n : first + group;
        for (size_t at = first; at < end; at += TILE) {
            size_t count = end - at < TILE ? end - at : TILE;
            widen(dtype, count, row + at * moe_dtype_bytes(dtype), 1.0f, tile);
            float most = largest_of(tile, count);
            largest = most > largest ? most : largest;
        }
        float s = moe_e4m3_scale(largest, pow2);
        for (size_t at = first; at < end; at += TILE) {
            size_t count = end - at < TILE ? end - at : TILE;
            if (end - first > TILE)
                widen(dtype, count, row + at * moe_dtype_bytes(dtype), 1.0f, tile);
            for (size_t i = 0; i < count; i++)
                tile[i] = moe_round_to_e4m3(tile[i] / s);
            for (size_t i = 0; i < count; i++)
                to[at + i] = moe_e4m3_byte(tile[i]);
        }
        *scale++ = s;
    }
}

static void widen_bytes(size_t n, const uint8_t *from, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = moe_e4m3_to_f32(from[i]);
}

/* ----------------------------------------------------------------- activation */

/* Lane-wise x < bound ? bound : x, and x > bound ? bound : x below: NaN stays NaN. */
static inline vec vec_at_least(vec x, float bound)
{
    ivec below = x < bound;
    return (vec)((below & (ivec)vec_set(bound)) | (~below & (ivec)x));
}

static inline vec vec_at_most(vec x, float bound)
{
    ivec above = x > bound;
    return (vec)((above & (ivec)vec_set(bound)) | (~above & (ivec)x));
}

/* exp(x) to about one unit in the last place, for x in [-87, 87]; clamped outside.
 * x = n ln2 + r, |r| <= ln2 / 2; exp(r) by its Taylor series up to r^7. The next term, r^8 / 8!, is
 * below 2^-27. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum. */
static inline vec vec_exp(vec x)
{
    const float round = 12582912.0f;
    x = vec_at_most(vec_at_least(x, -87.0f), 87.0f);
    vec shifted = x * 1.44269504f + round;
    vec n = shifted - round;
    vec r = x - n * 0.693359375f; /* ln2 in two parts, the first with few bits: n * it is exact */
    r = r - n * -2.12194440e-4f;
    vec p = vec_set(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vec)((uvec)p + ((uvec)shifted << 23)); /* times 2^n: n added to the exponent */
}

static inline vec vec_sigmoid(vec x)
{
    return 1.0f / (1.0f + vec_exp(-x));
}

/* tanh(x). Near 0, where 1 - 2 / (exp(2x) + 1) cancels, it is the Taylor series up to x^13: at 0.4
 * the next term is below 2^-27 of the sum. */
static inline vec vec_tanh(vec x)
{
    const uvec sign = (uvec)x & UINT32_C(0x80000000);
    const vec size = (vec)((uvec)x ^ sign), square = x * x;
    vec p = vec_set(21844.0f / 6081075.0f);
    p = p * square - 1382.0f / 155925.0f;
    p = p * square + 62.0f / 2835.0f;
    p = p * square - 17.0f / 315.0f;
    p = p * square + 2.0f / 15.0f;
    p = p * square - 1.0f / 3.0f;
    const vec near = x + x * square * p;
    const vec far = 1.0f - 2.0f / (vec_exp(2.0f * size) + 1.0f);
    const ivec small = size < 0.4f, is_nan = x != x; /* vec_exp does not keep NaN */
    const ivec tanh = (small & (ivec)near) | (~small & (ivec)((uvec)far | sign));
    return (vec)((is_nan & (ivec)x) | (~is_nan & tanh));
}

#define MOE_ACTIVATION_REAL              vec
#define MOE_ACTIVATION_AT_MOST(x, bound) vec_at_most(x, bound)
#define MOE_ACTIVATION_WITHIN(x, bound)  vec_at_most(vec_at_least(x, -(bound)), bound)
#define MOE_ACTIVATION_SIGMOID(x)        vec_sigmoid(x)
#define MOE_ACTIVATION_TANH(x)           vec_tanh(x)
#define MOE_ACTIVATION_POSITIVE(x)       vec_at_least(x, 0.0f)
#include "common/activation_math.h"

static void activate_ungated(size_t n, float *up)
{
    for (size_t i = 0; i < n; i += LANES) {
        size_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        vec u = {0};
        memcpy(&u, up + i, bytes);
        u = moe_activate_relu2(u);
        memcpy(up + i, &u, bytes);
    }
}

static void activate(enum moe_activation activation, float limit, float alpha, size_t n,
                     float *gate, const float *up)
{
    for (size_t i = 0; i < n; i += LANES) {
        size_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        vec g = {0}, u = {0};
        memcpy(&g, gate + i, bytes);
        memcpy(&u, up + i, bytes);
        g = activation == MOE_ACT_SITU ? moe_activate_situ(alpha, limit, g, u)
                                       : moe_activate(activation, limit, alpha, g, u);
        memcpy(gate + i, &g, bytes);
    }
}

/* One vector of activate_backward: d is the cotangent and becomes the activation. */
static inline void vec_activate_backward(enum moe_activation activation, float limit, float alpha,
                                         float weight, vec *g, vec *u, vec *d)
{
    vec gate = *g, up = *u, cotangent = *d * weight;
    ivec gate_unclamped = ~(ivec){0}, up_unclamped = gate_unclamped;
    if (moe_activation_clamps(activation)) {
        gate_unclamped = ~(gate > limit);
        up_unclamped = ~((up > limit) | (up < -limit));
        gate = MOE_ACTIVATION_AT_MOST(gate, limit);
        up = MOE_ACTIVATION_WITHIN(up, limit);
    }
    vec sigmoid = vec_sigmoid(moe_activation_z(activation, alpha, gate));
    vec slope = moe_activation_slope(activation, alpha, gate, sigmoid);
    vec factor = moe_activation_factor(activation, up);
    *g = (vec)((ivec)(cotangent * factor * slope) & gate_unclamped);
    *u = (vec)((ivec)(cotangent * (gate * sigmoid)) & up_unclamped);
    *d = gate * sigmoid * factor;
}

static float activate_backward(enum moe_activation activation, float limit, float alpha, size_t n,
                               float weight, float *gate, float *up, float *hidden)
{
    vec dot = {0};
    for (size_t i = 0; i < n; i += LANES) {
        size_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        vec g = {0}, u = {0}, d = {0}, cotangent;
        memcpy(&g, gate + i, bytes);
        memcpy(&u, up + i, bytes);
        memcpy(&d, hidden + i, bytes);
        cotangent = d;
        vec_activate_backward(activation, limit, alpha, weight, &g, &u, &d);
        dot += cotangent * d;
        memcpy(gate + i, &g, bytes);
        memcpy(up + i, &u, bytes);
        memcpy(hidden + i, &d, bytes);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += dot[lane];
    return sum;
}

static void optimize(const struct moe_train_update *update, size_t n, float *restrict value,
                     float *restrict grad, float *restrict m1, float *restrict m2)
{
    const struct moe_train_update u = *update;
    if (u.optimizer == MOE_OPTIMIZER_ADAMW) {
        for (size_t i = 0; i < n; i++) {
            value[i] = moe_train_adamw(&u, value[i], grad[i], &m1[i], &m2[i]);
            grad[i] = 0;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        value[i] = moe_train_sgd(&u, value[i], grad[i], &m1[i]);
        grad[i] = 0;
    }
}

const struct moe_cpu_isa GLUE(moe_cpu_isa_, MOE_CPU_ISA);
const struct moe_cpu_isa GLUE(moe_cpu_isa_, MOE_CPU_ISA) = {
    .name = ISA_NAME,
    .panel = PANEL,
    .place = {PLACES},
    .panel_bf16 = panel_bf16,
    .panel_f32 = panel_f32,
    .panel_f32_add = panel_f32_add,
    .panels_packed = MOE_CPU_PANELS_PACKED,
    .unpack = MOE_CPU_UNPACK,
    .interleave = MOE_CPU_INTERLEAVE,
    .widen = widen,
    .quantise = quantise,
    .quantise_bytes = quantise_bytes,
    .widen_bytes = widen_bytes,
    .activate = activate,
    .activate_ungated = activate_ungated,
    .activate_backward = activate_backward,
    .optimize = optimize,
};
