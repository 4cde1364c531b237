/* SPDX-License-Identifier: Apache-2.0 */
/* Drawing large cases; see large_case.h. */
#include "large_case.h"

#include "base/size.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { POOL_VALUES = 64 << 20, LEAST_INNER = 64 };

static void *must_alloc(size_t bytes)
{
    void *p = calloc(1, bytes > 0 ? bytes : 1);
    MOE_INVARIANT(p != NULL);
    return p;
}

static uint32_t one_of(struct rng *r, const uint32_t *list, uint32_t n)
{
    return list[rng_below(r, n)];
}
#define ONE_OF(r, ...)                                                                             \
    one_of((r), (const uint32_t[]){__VA_ARGS__},                                                   \
           sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

const uint16_t *large_pool(void)
{
    size_t bytes = (size_t)POOL_VALUES * sizeof(uint16_t);
    uint16_t *values = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MOE_INVARIANT(values != MAP_FAILED);
    struct rng r = {.state = 1};
    for (size_t i = 0; i < POOL_VALUES; i += 4) {
        uint64_t bits = rng_next(&r);
        for (size_t j = 0; j < 4; j++)
            values[i + j] = moe_f32_to_bf16((float)(int16_t)(bits >> (16 * j)) * 0x1p-20f);
    }
    return values;
}

/* -------------------------------------------------------------------- shapes */

static void draw_router(struct rng *r, struct moe_layer_spec *s, uint64_t number)
{
    struct moe_router_spec *o = &s->router;
    o->score = (enum moe_score)rng_below(r, 4);
    o->logit_bias = rng_chance(r, 30);
    o->select_bias = rng_chance(r, 40);
    o->groups = o->topk_group = o->group_best = 1;
    if (rng_chance(r, 30) && s->experts % 8 == 0 && s->experts >= 64) {
        o->groups = 8;
        o->topk_group = 4;
        o->group_best = 2;
    }
    o->zero_experts = o->groups == 1 && rng_chance(r, 15) ? rng_range(r, 1, 9) : 0;
    o->top_k = number % 5 == 3 ? MOE_COMMON_TOP_K : ONE_OF(r, 1, 2, 4, 6, 8, 8);
    if (o->top_k > s->experts / 2)
        o->top_k = s->experts / 2;
    o->renorm = (enum moe_renorm)rng_below(r, 3);
    o->renorm_eps = o->renorm == MOE_RENORM_CLAMPED ? 1e-12f : 1e-20f;
    o->scale = rng_chance(r, 50) ? 1.0f : 2.5f;
}

static uint64_t products_of(const struct moe_layer_spec *s)
{
    return (uint64_t)3 * s->hidden *
           ((uint64_t)s->router.top_k * s->intermediate + s->shared_intermediate);
}

static uint64_t bytes_of(const struct large_case *c)
{
    return (uint64_t)3 * c->spec.hidden * c->spec.intermediate * c->spec.experts *
           moe_dtype_bytes(c->weight_dtype);
}

static bool within(const struct large_case *c, const struct large_limits *limits)
{
    return products_of(&c->spec) <= limits->products && bytes_of(c) <= limits->weight_bytes;
}

/* Inner sizes first, down to one step of a tile, then experts. */
static void shrink(struct large_case *c, const struct large_limits *limits)
{
    struct moe_layer_spec *s = &c->spec;
    while (!within(c, limits) && s->intermediate >= 2 * LEAST_INNER) {
        s->intermediate = s->intermediate / 16 * 8;
        s->shared_intermediate = s->shared_intermediate / 16 * 8;
    }
    uint32_t least = s->router.groups > 1 ? 4 * s->router.top_k + 16 : 2 * s->router.top_k + 8;
    /* A layer with the most experts gives up width, so that they stay. */
    while (s->experts == MOE_MAX_EXPERTS && bytes_of(c) > limits->weight_bytes &&
           s->intermediate >= 16)
        s->intermediate = s->intermediate / 16 * 8;
    while (bytes_of(c) > limits->weight_bytes && s->experts / 2 >= least &&
           s->experts / 2 % s->router.groups == 0)
        s->experts /= 2;
    while (!within(c, limits) && s->intermediate >= 16)
        s->intermediate = s->intermediate / 16 * 8;
}

static void draw_spec(struct rng *r, struct large_case *c, uint64_t number,
                      const struct large_limits *limits)
{
    static const uint32_t hidden[] = {7168, 16384, 2880, 4096};
    struct moe_layer_spec *s = &c->spec;
    s->layer = rng_below(r, MOE_MAX_LAYERS);
    s->hidden = hidden[number % 4];
    s->experts = number % 7 == 1 ? MOE_MAX_EXPERTS : ONE_OF(r, 8, 32, 64, 128, 160, 256, 384, 512);
    s->intermediate = ONE_OF(r, 512, 768, 1536, 2048, 2880, 4864, 14336);
    s->weighting = (enum moe_weighting)rng_below(r, 3);
    s->activation = (enum moe_activation)rng_below(r, MOE_ACT_COMMON_COUNT);
    s->swiglu_limit = 7.0f;
    s->swiglu_alpha = 1.702f;
    s->gate_up_bias = rng_chance(r, 30);
    s->down_bias = rng_chance(r, 30);
    if (rng_chance(r, 40)) {
        s->shared_intermediate = s->intermediate;
        s->shared_gated = rng_chance(r, 50);
    }
    draw_router(r, s, number);
    shrink(c, limits);
    if (rng_chance(r, 15)) /* matrix units need whole 16-byte chunks */
        s->intermediate -= rng_range(r, 1, 7);
}

/* 0: in order; 1: one slot has all; 2: one slot has one or two; 3: anywhere, some twice. */
static void draw_placement(struct rng *r, struct large_case *c, uint32_t slots)
{
    uint32_t kind = rng_below(r, 4), odd = rng_below(r, slots), few = rng_range(r, 1, 2), n = 0;
    for (uint32_t e = 0; e < c->spec.experts; e++) {
        uint32_t linear = e * slots / c->spec.experts;
        uint32_t others = slots == 1 ? 0 : (odd + 1 + rng_below(r, slots - 1)) % slots;
        uint32_t home = kind == 0 ? linear : kind == 1 ? odd : others;
        if ((kind == 2 && e < few) || (kind == 3 && rng_chance(r, 30)))
            home = odd;
        uint32_t copy = kind == 3 && rng_chance(r, 30) ? rng_below(r, slots) : home;
        c->offset[e] = n;
        c->slot[n++] = (uint16_t)(home < copy ? home : copy);
        if (copy != home)
            c->slot[n++] = (uint16_t)(home < copy ? copy : home);
    }
    c->offset[c->spec.experts] = n;
    c->placement = (struct moe_placement){.version = rng_below(r, 1 << 20),
                                          .experts = c->spec.experts,
                                          .slots = slots,
                                          .offset = c->offset,
                                          .slot = c->slot};
}

/* -------------------------------------------------------------------- inputs */

static void *draw_rows(struct rng *r, const struct large_case *c, uint32_t tokens, float scale)
{
    size_t n = (size_t)tokens * c->spec.hidden;
    void *rows = must_alloc(n * moe_dtype_bytes(c->dtype));
    for (size_t i = 0; i < n; i++) {
        float v = scale * rng_float(r);
        if (c->dtype == MOE_DTYPE_F32)
            ((float *)rows)[i] = v;
        else
            ((uint16_t *)rows)[i] = moe_f32_to_bf16(v);
    }
    return rows;
}

/* Random ids, or crowded on the first eighth of the experts; weights of one sign, so sums do not
 * cancel. */
static void draw_input(struct rng *r, const struct large_case *c, struct large_input *in)
{
    uint32_t ids = c->spec.experts + c->spec.router.zero_experts, modes = rng_below(r, 4);
    bool crowded = rng_chance(r, 30);
    size_t pairs = (size_t)in->tokens * c->spec.router.top_k;
    if (in->tokens == 0)
        return;
    in->x = draw_rows(r, c, in->tokens, 2.0f);
    in->dy = draw_rows(r, c, in->tokens, 1.0f);
    in->mode = must_alloc(in->tokens);
    in->ids = must_alloc(pairs * sizeof *in->ids);
    in->weights = must_alloc(pairs * sizeof *in->weights);
    for (uint32_t t = 0; t < in->tokens; t++) /* 0..2: one mode for all */
        in->mode[t] = (uint8_t)(modes < 3 ? modes : rng_below(r, 3));
    for (size_t i = 0; i < pairs; i++) {
        in->ids[i] = (int32_t)rng_below(r, crowded ? 1 + ids / 8 : ids);
        in->weights[i] = 0.1f + 0.5f * (1 + rng_float(r));
    }
}

static uint32_t draw_tokens(struct rng *r, uint32_t most)
{
    uint32_t kind = rng_below(r, 100);
    uint32_t limit = kind < 30 ? 16 : kind < 60 ? 128 : LARGE_MAX_TOKENS;
    return kind < 15 ? 0 : kind < 22 ? 1 : rng_range(r, 1, limit < most ? limit : most);
}

struct large_case *large_draw(uint64_t seed, uint64_t number, uint32_t slots,
                              const struct large_limits *limits)
{
    struct rng r = {.state = seed * UINT64_C(0x100000001b3) + number};
    struct large_case *c = must_alloc(sizeof *c);
    uint32_t most = 1, full = number % 3 == 0 ? (uint32_t)(number / 3 % slots) : slots;
    c->seed = rng_next(&r);
    c->pool = limits->pool;
    c->dtype = number % 3 == 2 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16; /* with each hidden size */
    c->weight_dtype = number % 5 == 4 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    draw_spec(&r, c, number, limits);
    draw_placement(&r, c, slots);
    for (uint32_t s = 0; s < slots; s++) {
        c->input[s].tokens = s == full ? limits->tokens : draw_tokens(&r, limits->tokens);
        draw_input(&r, c, &c->input[s]);
        most = c->input[s].tokens > most ? c->input[s].tokens : most;
    }
    c->bucket = moe_pow2_ceil(most);
    return c;
}

void large_free(struct large_case *c)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        free(c->input[s].x);
        free(c->input[s].dy);
        free(c->input[s].mode);
        free(c->input[s].ids);
        free(c->input[s].weights);
    }
    free(c);
}

void large_describe(const struct large_case *c, uint32_t slots, char *text, size_t cap)
{
    const struct moe_layer_spec *s = &c->spec;
    const struct moe_router_spec *r = &s->router;
    int n =
        snprintf(text, cap,
                 "%s weights %s H %u I %u E %u+%u (%u copies) K %u score %d groups %u weighting "
                 "%d act %d bias %d/%d shared %u bucket %u T",
                 c->dtype == MOE_DTYPE_F32 ? "f32" : "bf16",
                 c->weight_dtype == MOE_DTYPE_F32 ? "f32" : "bf16", s->hidden, s->intermediate,
                 s->experts, r->zero_experts, c->offset[s->experts], r->top_k, (int)r->score,
                 r->groups, (int)s->weighting, (int)s->activation, s->gate_up_bias, s->down_bias,
                 s->shared_intermediate, c->bucket);
    for (uint32_t i = 0; i < slots && n > 0 && (size_t)n < cap; i++)
        n += snprintf(text + n, cap - (size_t)n, " %u", c->input[i].tokens);
}

/* -------------------------------------------------------------------- weights */

void *large_weight(const struct large_case *c, enum moe_weight w, uint32_t expert, size_t *bytes)
{
    size_t rows, columns;
    moe_weight_shape(&c->spec, w, &rows, &columns);
    size_t n = rows * columns;
    struct rng r = {.state = c->seed ^ ((uint64_t)w << 32 | expert)};
    MOE_INVARIANT(n < POOL_VALUES);
    const uint16_t *view = c->pool + rng_next(&r) % (POOL_VALUES - n);
    *bytes = n * moe_dtype_bytes(c->weight_dtype);
    void *data = malloc(*bytes > 0 ? *bytes : 1);
    MOE_INVARIANT(data != NULL);
    if (c->weight_dtype == MOE_DTYPE_BF16)
        memcpy(data, view, *bytes);
    else
        for (size_t i = 0; i < n; i++) /* bits that bf16 does not have, and no rounding */
            ((float *)data)[i] = moe_bf16_to_f32(view[i]) * (1 + 0x1p-12f);
    return data;
}

bool large_holds(const struct large_case *c, uint32_t expert, uint32_t slot)
{
    for (uint32_t i = c->offset[expert]; i < c->offset[expert + 1]; i++)
        if (c->slot[i] == slot)
            return true;
    return false;
}

int large_target(const struct large_case *c, uint32_t token, int32_t id)
{
    if (id < 0 || id >= (int32_t)c->spec.experts)
        return -1;
    uint32_t first = c->offset[id], copies = c->offset[id + 1] - first;
    return c->slot[first + token % copies];
}
