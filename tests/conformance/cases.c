/* SPDX-License-Identifier: Apache-2.0 */
/* Drawing cases; see cases.h. Shapes are small, so thousands of them take seconds. Most are odd, so
 * no code can rely on round numbers. */
#include "cases.h"

#include "base/size.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void *must_alloc(size_t bytes)
{
    void *p = calloc(1, bytes > 0 ? bytes : 1);
    MOE_INVARIANT(p != NULL);
    return p;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

double element(enum moe_dtype dtype, const void *data, size_t i)
{
    if (dtype == MOE_DTYPE_F32)
        return (double)((const float *)data)[i];
    return (double)moe_bf16_to_f32(((const uint16_t *)data)[i]);
}

static void set_element(enum moe_dtype dtype, void *data, size_t i, float v)
{
    if (dtype == MOE_DTYPE_F32)
        ((float *)data)[i] = v;
    else
        ((uint16_t *)data)[i] = moe_f32_to_bf16(v);
}

/* -------------------------------------------------------------------- shapes */

static void draw_router(struct rng *r, struct moe_layer_spec *s)
{
    struct moe_router_spec *o = &s->router;
    o->score = (enum moe_score)rng_below(r, 4);
    o->logit_bias = rng_chance(r, 30);
    o->select_bias = rng_chance(r, 40);
    o->groups = 1;
    if (rng_chance(r, 35))
        for (uint32_t g = rng_range(r, 1, smaller(8, s->experts)); g > 1 && o->groups == 1; g--)
            o->groups = s->experts % g == 0 ? g : 1;
    uint32_t group_size = s->experts / o->groups;
    o->topk_group = rng_range(r, 1, o->groups);
    o->group_best = rng_range(r, 1, smaller(3, group_size));
    o->zero_experts = o->groups == 1 && rng_chance(r, 20) ? rng_range(r, 1, 9) : 0;
    uint32_t choices = o->topk_group * group_size + o->zero_experts;
    o->top_k = rng_range(r, 1, smaller(rng_chance(r, 10) ? MOE_COMMON_TOP_K : 8, choices));
    o->renorm = (enum moe_renorm)rng_below(r, 3);
    o->renorm_eps = o->renorm == MOE_RENORM_CLAMPED ? (rng_chance(r, 50) ? 1e-12f : 0.3f)
                    : rng_chance(r, 50)             ? 1e-20f
                                                    : 0.0f;
    o->scale = rng_chance(r, 50) ? 1.0f : 2.5f;
}

static void draw_spec(struct rng *r, struct moe_layer_spec *s)
{
    s->layer = rng_below(r, MOE_MAX_LAYERS);
    uint32_t width = rng_below(r, 100);
    s->hidden = rng_range(r, 1, width < 70 ? 48 : width < 95 ? 150 : CASE_MAX_HIDDEN);
    s->intermediate = rng_range(r, 1, rng_chance(r, 30) ? 70 : 32);
    s->experts = rng_range(r, 1, rng_chance(r, 20) ? CASE_MAX_EXPERTS : 16);
    bool whole = rng_chance(r, 40); /* matrix units need whole 16-byte chunks */
    if (whole) {
        s->hidden = (s->hidden + 7) / 8 * 8;
        s->intermediate = (s->intermediate + 7) / 8 * 8;
    }
    s->weighting = (enum moe_weighting)rng_below(r, 3);
    s->activation = (enum moe_activation)rng_below(r, MOE_ACT_COMMON_COUNT);
    s->swiglu_limit = rng_chance(r, 50) ? 7.0f : 0.4f; /* the small one clamps often */
    s->swiglu_alpha = 1.702f;
    s->gate_up_bias = rng_chance(r, 40);
    s->down_bias = rng_chance(r, 40);
    if (rng_chance(r, 40)) {
        s->shared_intermediate = whole ? 8 * rng_range(r, 1, 5) : rng_range(r, 1, 40);
        s->shared_gated = rng_chance(r, 50);
        s->shared_activation = (enum moe_activation)rng_below(r, MOE_ACT_COMMON_COUNT);
    }
    draw_router(r, s);
}

/* Draws a placement: from all experts on one slot to every expert on every slot. */
static void draw_placement(struct rng *r, struct test_case *c, uint32_t slots)
{
    uint32_t kind = rng_below(r, 4), lonely = rng_below(r, slots), n = 0;
    for (uint32_t e = 0; e < c->spec.experts; e++) {
        uint32_t linear = e * slots / c->spec.experts;
        uint32_t home = kind == 0 ? linear : kind == 1 ? lonely : rng_below(r, slots);
        bool copies = kind == 3 && rng_chance(r, 40);
        c->offset[e] = n;
        for (uint32_t s = 0; s < slots; s++)
            if (s == home || (copies && rng_chance(r, 50)))
                c->slot[n++] = (uint16_t)s;
    }
    c->offset[c->spec.experts] = n;
    c->placement = (struct moe_placement){.version = rng_below(r, 1 << 20),
                                          .experts = c->spec.experts,
                                          .slots = slots,
                                          .offset = c->offset,
                                          .slot = c->slot};
}

/* ------------------------------------------------------------------- weights */

static uint32_t entries_of(const struct test_case *c, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? c->spec.experts : 1;
}

/* Experts with equal router rows and biases tie exactly: only their ids may decide. */
static void make_ties(struct rng *r, struct test_case *c)
{
    static const enum moe_weight per_expert[] = {MOE_WEIGHT_ROUTER, MOE_WEIGHT_LOGIT_BIAS,
                                                 MOE_WEIGHT_SELECT_BIAS};
    uint32_t a = rng_below(r, c->spec.experts), b = rng_below(r, c->spec.experts);
    for (uint32_t i = 0; i < sizeof per_expert / sizeof *per_expert; i++) {
        enum moe_weight w = per_expert[i];
        size_t rows, columns;
        moe_weight_shape(&c->spec, w, &rows, &columns);
        if (rows == 0 || a == b)
            continue;
        size_t bytes = columns * moe_dtype_bytes(c->weight_dtype[w]);
        uint8_t *data = c->weight[w];
        memcpy(data + a * bytes, data + b * bytes, bytes);
    }
}

static void draw_weights(struct rng *r, struct test_case *c)
{
    bool mixed = rng_chance(r, 20);
    enum moe_dtype all = rng_chance(r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
    float router_scale = rng_chance(r, 50) ? 1.5f : 5.0f;
    for (uint32_t i = MOE_WEIGHT_TO_LATENT; i < MOE_WEIGHT_COUNT; i++)
        c->weight_dtype[i] = all; /* no case has a latent space: test_uncommon.c has */
    for (uint32_t i = 0; i < MOE_WEIGHT_TO_LATENT; i++) {
        enum moe_weight w = (enum moe_weight)i;
        size_t rows, columns;
        moe_weight_shape(&c->spec, w, &rows, &columns);
        enum moe_dtype d = mixed ? (rng_chance(r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32) : all;
        c->weight_dtype[w] = d;
        if (rows == 0)
            continue;
        size_t n = entries_of(c, w) * rows * columns;
        float scale = columns > 1 ? 1.7f / sqrtf((float)columns) : 0.5f;
        if (w == MOE_WEIGHT_ROUTER)
            scale = router_scale / sqrtf((float)columns);
        c->weight[w] = must_alloc(n * moe_dtype_bytes(d));
        for (size_t j = 0; j < n; j++)
            set_element(d, c->weight[w], j, scale * rng_float(r));
    }
    if (rng_chance(r, 25))
        make_ties(r, c);
}

/* One weight of all experts; its values replace the ones that were drawn. */
static void quantise(struct rng *r, struct test_case *c, enum moe_weight w)
{
    const struct moe_weight_format *f = moe_weight_format_of(&c->spec, w);
    size_t rows, columns;
    moe_weight_shape(&c->spec, w, &rows, &columns);
    if (f == NULL || rows == 0)
        return;
    uint32_t entries = entries_of(c, w);
    float *values = must_alloc(entries * rows * columns * sizeof *values);
    free(c->weight[w]);
    c->weight[w] = values;
    c->weight_dtype[w] = MOE_DTYPE_F32;
    c->packed[w] = must_alloc(entries * sizeof *c->packed[w]);
    for (uint32_t e = 0; e < entries; e++) {
        struct moe_packed_sizes sizes;
        MOE_INVARIANT(moe_packed_sizes(f, rows, columns, &sizes));
        c->packed[w][e] = random_packed(r, f, rows, columns, 1.0f / sqrtf((float)columns));
        for (size_t i = 0; i < rows * columns; i++)
            *values++ =
                moe_packed_value(f, &sizes, &c->packed[w][e].matrix, i / columns, i % columns);
    }
}

/* The format with quantised rows; if the backend does not compute that, blocks that GPUs do. */
static struct moe_weight_format with_quantised_rows(struct rng *r, moe_computes_fn computes,
                                                    const struct moe_device *device,
                                                    const struct moe_weight_format *f)
{
    struct moe_weight_format q = *f;
    q.activations = rng_chance(r, 50) ? MOE_ACTIVATIONS_F8 : MOE_ACTIVATIONS_F8_POW2;
    if (computes == NULL || computes(device, &q))
        return computes == NULL ? *f : q;
    q.block_rows = 128;
    q.block_columns = rng_chance(r, 70) ? 128 : 0;
    q.scale = MOE_SCALE_F32;
    return computes(device, &q) ? q : *f;
}

static void draw_format(struct rng *r, moe_computes_fn computes, const struct moe_device *device,
                        bool w8a8, struct moe_weight_format *out)
{
    struct moe_weight_format f = random_format(r, MOE_ENC_F8E4M3 + rng_below(r, 3));
    if (w8a8 && f.encoding == MOE_ENC_F8E4M3 && rng_chance(r, 50))
        f = with_quantised_rows(r, computes, device, &f);
    if (computes != NULL && computes(device, &f) && rng_chance(r, 70))
        *out = f;
}

void case_quantise(struct test_case *c, moe_computes_fn computes, const struct moe_device *device,
                   bool w8a8)
{
    struct rng r = {.state = c->seed * 41 + 5};
    if (rng_chance(&r, 50))
        return;
    draw_format(&r, computes, device, w8a8, &c->spec.routed_format);
    draw_format(&r, computes, device, w8a8, &c->spec.shared_format);
    for (uint32_t w = 0; w < MOE_WEIGHT_COUNT; w++)
        quantise(&r, c, (enum moe_weight)w);
}

bool case_is_w8a8(const struct test_case *c)
{
    const struct moe_weight_format *routed = moe_weight_format_of(&c->spec, MOE_WEIGHT_GATE);
    const struct moe_weight_format *shared = moe_weight_format_of(&c->spec, MOE_WEIGHT_SHARED_GATE);
    return (routed != NULL && routed->activations != MOE_ACTIVATIONS_PLAIN) ||
           (shared != NULL && shared->activations != MOE_ACTIVATIONS_PLAIN);
}

const void *case_weight(const struct test_case *c, enum moe_weight w, uint32_t expert,
                        size_t *bytes)
{
    size_t rows, columns;
    moe_weight_shape(&c->spec, w, &rows, &columns);
    *bytes = rows * columns * moe_dtype_bytes(c->weight_dtype[w]);
    return c->weight[w] == NULL ? NULL : (const uint8_t *)c->weight[w] + expert * *bytes;
}

double case_weight_at(const struct test_case *c, enum moe_weight w, uint32_t expert, size_t i)
{
    size_t rows, columns;
    moe_weight_shape(&c->spec, w, &rows, &columns);
    return element(c->weight_dtype[w], c->weight[w], expert * rows * columns + i);
}

/* -------------------------------------------------------------------- inputs */

static uint32_t draw_tokens(struct rng *r, uint32_t hidden)
{
    uint32_t kind = rng_below(r, 100);
    if (kind < 20)
        return 0;
    if (kind < 65 || hidden > 200) /* wide and many would take too long */
        return rng_range(r, 1, 8);
    return rng_range(r, 1, kind < 94 ? 50 : CASE_MAX_TOKENS);
}

/* Draws a client's routing of one token: any experts, repeated or -1, any finite weights. One token
 * in fifty is invalid. `favourite` >= 0: all ids are that expert. */
static void draw_given(struct rng *r, const struct test_case *c, struct case_input *in, uint32_t t,
                       int favourite)
{
    uint32_t top_k = c->spec.router.top_k, ids = c->spec.experts + c->spec.router.zero_experts;
    for (size_t i = (size_t)t * top_k; i < (size_t)(t + 1) * top_k; i++) {
        in->ids[i] = favourite >= 0 ? favourite : (int32_t)rng_below(r, ids);
        if (rng_chance(r, 8))
            in->ids[i] = -1;
        in->weights[i] = rng_chance(r, 5) ? 0.0f : 1.5f * rng_float(r);
    }
    size_t one = (size_t)t * top_k + rng_below(r, top_k);
    if (rng_chance(r, 2))
        in->ids[one] = rng_chance(r, 50) ? (int32_t)ids : -2;
    if (rng_chance(r, 2))
        in->weights[one] = rng_chance(r, 50) ? NAN : INFINITY;
}

static void draw_input(struct rng *r, const struct test_case *c, struct case_input *in)
{
    in->tokens = draw_tokens(r, c->spec.hidden);
    if (in->tokens == 0)
        return;
    size_t n = (size_t)in->tokens * c->spec.hidden;
    size_t pairs = (size_t)in->tokens * c->spec.router.top_k;
    uint32_t modes = rng_below(r, 5); /* 0..2: one mode for all, else mixed */
    int favourite = rng_chance(r, 25) ? (int)rng_below(r, c->spec.experts) : -1;
    in->x = must_alloc(n * moe_dtype_bytes(c->dtype));
    in->ids = must_alloc(pairs * sizeof *in->ids);
    in->weights = must_alloc(pairs * sizeof *in->weights);
    in->mode = must_alloc(in->tokens);
    for (size_t i = 0; i < n; i++)
        set_element(c->dtype, in->x, i, 2.0f * rng_float(r));
    for (uint32_t t = 0; t < in->tokens; t++) {
        in->mode[t] = (uint8_t)(modes < 3 ? modes : rng_below(r, 3));
        draw_given(r, c, in, t, favourite);
        size_t somewhere = (size_t)t * c->spec.hidden + rng_below(r, c->spec.hidden);
        if (in->mode[t] != MOE_ROUTE_IDS_WEIGHTS && rng_chance(r, 2))
            set_element(c->dtype, in->x, somewhere, rng_chance(r, 50) ? NAN : INFINITY);
    }
    if (modes == 0 && rng_chance(r, 50)) {
        free(in->mode); /* NULL means the same */
        in->mode = NULL;
    }
}

/* In some cases, some tokens want no shared expert. */
static void draw_parts(uint64_t seed, uint32_t slot, struct case_input *in)
{
    struct rng r = {.state = seed * 37 + slot};
    uint32_t percent = 50 * rng_below(&r, 3);
    for (uint32_t t = 0; in->mode != NULL && t < in->tokens; t++)
        if (rng_chance(&r, percent))
            in->mode[t] |= MOE_ROUTE_WITHOUT_SHARED;
}

/* ---------------------------------------------------------------------- skew */

/* The probability of each expert, by the kind of skew; returns the sum. */
static double likelihoods(struct rng *r, const struct test_case *c, uint32_t slots, double *of)
{
    uint32_t experts = c->spec.experts, home = rng_below(r, slots), favourite;
    double total = 0;
    favourite = rng_below(r, experts);
    for (uint32_t e = 0; e < experts; e++) {
        bool there = false;
        for (uint32_t i = c->offset[e]; i < c->offset[e + 1]; i++)
            there = there || c->slot[i] == home;
        of[e] = c->skew == CASE_ONE_EXPERT ? e == favourite
                : c->skew == CASE_ONE_SLOT ? there
                : c->skew == CASE_ZIPF     ? 1.0 / (1 + (e + favourite) % experts)
                                           : 1.0;
        total += of[e];
    }
    if (total > 0)
        return total;
    of[favourite] = 1; /* a slot without experts: all to the experts of another */
    return 1;
}

static int32_t draw_expert(struct rng *r, const double *of, double total, uint32_t experts)
{
    double at = (double)(rng_next(r) >> 11) * 0x1p-53 * total;
    uint32_t last = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if (of[e] <= 0)
            continue;
        last = e;
        if (at < of[e])
            break;
        at -= of[e];
    }
    return (int32_t)last;
}

/* Given routing for all tokens. In half of the cases, choices other than the first are random, so a
 * crowded expert has neighbours. */
static void draw_skewed_input(struct rng *r, const struct test_case *c, struct case_input *in,
                              const double *of, double total, bool all_choices)
{
    uint32_t top_k = c->spec.router.top_k;
    size_t n = (size_t)in->tokens * c->spec.hidden, pairs = (size_t)in->tokens * top_k;
    if (in->tokens == 0)
        return;
    in->x = must_alloc(n * moe_dtype_bytes(c->dtype));
    in->ids = must_alloc(pairs * sizeof *in->ids);
    in->weights = must_alloc(pairs * sizeof *in->weights);
    in->mode = must_alloc(in->tokens);
    for (size_t i = 0; i < n; i++)
        set_element(c->dtype, in->x, i, 2.0f * rng_float(r));
    for (size_t i = 0; i < pairs; i++) {
        in->ids[i] = all_choices || i % top_k == 0 ? draw_expert(r, of, total, c->spec.experts)
                                                   : (int32_t)rng_below(r, c->spec.experts);
        in->weights[i] = 0.1f + 0.5f * (1 + rng_float(r));
    }
    memset(in->mode, rng_chance(r, 50) ? MOE_ROUTE_IDS : MOE_ROUTE_IDS_WEIGHTS, in->tokens);
}

static void draw_skewed_inputs(struct rng *r, struct test_case *c, uint32_t slots)
{
    double of[CASE_MAX_EXPERTS], total = likelihoods(r, c, slots, of);
    uint32_t source = rng_below(r, slots);
    bool all_choices = c->skew != CASE_ONE_EXPERT || rng_chance(r, 50);
    for (uint32_t s = 0; s < slots; s++) {
        bool idle = s != source && (c->skew == CASE_ONE_SOURCE || rng_chance(r, 25));
        uint32_t most = c->spec.hidden > 200 ? 30 : CASE_MAX_TOKENS; /* or it takes too long */
        c->input[s].tokens = idle ? 0 : rng_range(r, most / 5, most);
        draw_skewed_input(r, c, &c->input[s], of, total, all_choices);
    }
}

struct test_case *case_draw(uint64_t seed, uint32_t slots, enum case_skew skew)
{
    struct rng r = {.state = seed};
    struct test_case *c = must_alloc(sizeof *c);
    c->seed = seed;
    c->skew = skew;
    draw_spec(&r, &c->spec);
    draw_placement(&r, c, slots);
    c->dtype = rng_chance(&r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
    draw_weights(&r, c);
    uint32_t most = 1;
    if (skew != CASE_PLAIN)
        draw_skewed_inputs(&r, c, slots);
    for (uint32_t s = 0; s < slots; s++) {
        if (skew == CASE_PLAIN)
            draw_input(&r, c, &c->input[s]);
        draw_parts(seed, s, &c->input[s]);
        most = c->input[s].tokens > most ? c->input[s].tokens : most;
    }
    c->bucket = moe_pow2_ceil(most);
    if (c->bucket < 512 && rng_chance(&r, 30))
        c->bucket *= 2;
    return c;
}

void case_free(struct test_case *c)
{
    for (uint32_t w = 0; w < MOE_WEIGHT_COUNT; w++) {
        for (uint32_t e = 0; c->packed[w] != NULL && e < entries_of(c, (enum moe_weight)w); e++)
            free_packed(&c->packed[w][e]);
        free(c->packed[w]);
        free(c->weight[w]);
    }
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        free(c->input[s].x);
        free(c->input[s].mode);
        free(c->input[s].ids);
        free(c->input[s].weights);
    }
    free(c);
}

void case_describe(const struct test_case *c, uint32_t slots, char *text, size_t cap)
{
    const struct moe_layer_spec *s = &c->spec;
    const struct moe_router_spec *r = &s->router;
    int n =
        snprintf(text, cap,
                 "%s H %u I %u E %u+%u K %u score %d renorm %d(%g) scale %g bias %d/%d groups "
                 "%u/%u best %u weighting %d act %d limit %g ffn bias %d/%d shared %u%s bucket "
                 "%u copies %u skew %d T",
                 c->dtype == MOE_DTYPE_F32 ? "f32" : "bf16", s->hidden, s->intermediate, s->experts,
                 r->zero_experts, r->top_k, (int)r->score, (int)r->renorm, (double)r->renorm_eps,
                 (double)r->scale, r->logit_bias, r->select_bias, r->topk_group, r->groups,
                 r->group_best, (int)s->weighting, (int)s->activation, (double)s->swiglu_limit,
                 s->gate_up_bias, s->down_bias, s->shared_intermediate,
                 s->shared_gated ? " gated" : "", c->bucket, c->offset[s->experts], (int)c->skew);
    if (s->routed_format.encoding != MOE_ENC_NONE && n > 0 && (size_t)n < cap)
        n += snprintf(text + n, cap - (size_t)n, " (experts %s)", format_text(&s->routed_format));
    if (s->shared_format.encoding != MOE_ENC_NONE && n > 0 && (size_t)n < cap)
        n += snprintf(text + n, cap - (size_t)n, " (shared %s)", format_text(&s->shared_format));
    for (uint32_t i = 0; i < slots && n > 0 && (size_t)n < cap; i++)
        n += snprintf(text + n, cap - (size_t)n, " %u", c->input[i].tokens);
}

int case_target(const struct test_case *c, uint32_t token, int32_t id)
{
    if (id < 0 || id >= (int32_t)c->spec.experts)
        return -1;
    uint32_t first = c->offset[id], copies = c->offset[id + 1] - first;
    return c->slot[first + token % copies];
}
