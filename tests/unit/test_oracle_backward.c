/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's gradients against central differences of its forward pass: random layers by seed,
 * random cotangents, every element of every tensor. Near the kink of a clamp a difference is no
 * derivative; such cases are drawn again. */
#include "oracle/oracle.h"
#include "support/check.h"
#include "support/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CASES = 600, MAX_TOKENS = 3, MAX_HIDDEN = 6, MAX_IDS = 12, MAX_PARAMETERS = 512 };

static const double step = 0x1p-10; /* tensors are multiples of 2^-8: exact in fp32 +- 2 steps */
static const double noise = 1e-10;  /* of slopes, where the gradient is zero */

/* A layer, its tokens, and the inputs of loss = sum of dy * y + aux loss. */
struct world {
    struct moe_layer_spec spec;
    struct moe_oracle_layer *layer;
    uint32_t tokens, loads[MAX_IDS];
    uint64_t group_tokens;
    double aux_coeff;
    float x[MAX_TOKENS * MAX_HIDDEN], dy[MAX_TOKENS * MAX_HIDDEN];
    float weights[MAX_TOKENS * MOE_MAX_TOP_K];
    int32_t ids[MAX_TOKENS * MOE_MAX_TOP_K];
    uint8_t mode[MAX_TOKENS];
};

static float on_grid(struct rng *r)
{
    return (float)((int)rng_below(r, 513) - 256) / 256;
}

/* ---------------------------------------------------------------------- drawing */

static struct moe_layer_spec draw_spec(struct rng *r)
{
    struct moe_layer_spec s = {.hidden = rng_range(r, 1, MAX_HIDDEN),
                               .experts = rng_range(r, 1, 8),
                               .intermediate = rng_range(r, 1, 4),
                               .weighting = (enum moe_weighting)rng_below(r, 3),
                               .activation =
                                   (enum moe_activation)rng_below(r, MOE_ACT_COMMON_COUNT),
                               .swiglu_limit = rng_chance(r, 50) ? 7.0f : 0.5f,
                               .swiglu_alpha = 1.702f,
                               .gate_up_bias = rng_chance(r, 50),
                               .down_bias = rng_chance(r, 50)};
    if (rng_chance(r, 60)) {
        s.shared_intermediate = rng_range(r, 1, 4);
        s.shared_gated = rng_chance(r, 50);
        s.shared_activation = (enum moe_activation)rng_below(r, MOE_ACT_COMMON_COUNT);
    }
    struct moe_router_spec *o = &s.router;
    *o = (struct moe_router_spec){.score = (enum moe_score)rng_below(r, 4),
                                  .logit_bias = rng_chance(r, 50),
                                  .select_bias = rng_chance(r, 50),
                                  .groups = 1,
                                  .topk_group = 1,
                                  .group_best = 1,
                                  .renorm = (enum moe_renorm)rng_below(r, 3),
                                  .renorm_eps = 1e-20f,
                                  .scale = rng_chance(r, 50) ? 1.0f : 2.5f,
                                  .zero_experts = rng_chance(r, 30) ? rng_range(r, 1, 3) : 0};
    uint32_t all = s.experts + o->zero_experts;
    o->top_k = rng_range(r, 1, all < 4 ? all : 4);
    if (o->renorm == MOE_RENORM_CLAMPED)
        o->renorm_eps = rng_chance(r, 50) ? 0.6f : 1e-12f;
    if (o->zero_experts == 0 && s.experts % 2 == 0 && o->top_k <= s.experts / 2)
        o->groups = 2;
    return s;
}

static void draw_token(struct rng *r, struct world *w, uint32_t t)
{
    uint32_t hidden = w->spec.hidden, top_k = w->spec.router.top_k;
    for (uint32_t h = 0; h < hidden; h++) {
        w->x[t * hidden + h] = 2 * on_grid(r);
        w->dy[t * hidden + h] = on_grid(r);
    }
    w->mode[t] = rng_chance(r, 70) ? MOE_ROUTE_IDS : MOE_ROUTE_IDS_WEIGHTS;
    for (uint32_t k = t * top_k; k < (t + 1) * top_k; k++) {
        uint32_t all = w->spec.experts + w->spec.router.zero_experts;
        w->ids[k] = rng_chance(r, 10) ? -1 : (int32_t)rng_below(r, all); /* may repeat */
        w->weights[k] = on_grid(r);
    }
}

static void draw_world(uint64_t seed, struct world *w)
{
    struct rng r = {.state = seed};
    *w = (struct world){.spec = draw_spec(&r), .tokens = rng_range(&r, 1, MAX_TOKENS)};
    assert_ok(moe_oracle_create_gradients(&w->spec, &w->layer)); /* zeros, to be filled */
    for (enum moe_weight k = 0; k < MOE_WEIGHT_COUNT; k++) {
        size_t rows, columns;
        moe_weight_shape(&w->spec, k, &rows, &columns);
        for (uint32_t e = 0; e < (moe_weight_is_expert(k) ? w->spec.experts : 1); e++)
            for (size_t i = 0; i < rows * columns; i++)
                moe_oracle_weight(w->layer, k, e)[i] = (double)rng_float(&r);
    }
    for (uint32_t t = 0; t < w->tokens; t++)
        draw_token(&r, w, t);
    /* The other slots' share of the loads is a constant like any other. */
    w->aux_coeff = rng_chance(&r, 50) ? 0.7 : 0;
    w->group_tokens = rng_range(&r, MAX_TOKENS, 9);
    for (uint32_t e = 0; e < w->spec.experts; e++)
        w->loads[e] = rng_below(&r, 6);
}

/* -------------------------------------------------------------------- the two sides */

static double loss_of(const struct world *w)
{
    uint32_t hidden = w->spec.hidden;
    double y[MAX_TOKENS * MAX_HIDDEN], loss = 0;
    assert_ok(moe_oracle_forward(w->layer, MOE_DTYPE_F32, w->tokens, w->x, w->mode, w->ids,
                                 w->weights, NULL, NULL, NULL, NULL, y));
    for (uint32_t i = 0; i < w->tokens * hidden; i++)
        loss += (double)w->dy[i] * y[i];
    for (uint32_t t = 0; t < w->tokens && w->aux_coeff != 0; t++) {
        double x[MAX_HIDDEN], logit[MAX_IDS], unused[MAX_IDS] = {0};
        for (uint32_t h = 0; h < hidden; h++)
            x[h] = (double)w->x[t * hidden + h];
        assert_ok(moe_oracle_logits(w->layer, x, logit));
        if (w->mode[t] == MOE_ROUTE_IDS)
            loss += moe_oracle_aux_backward(&w->spec, w->aux_coeff, w->loads, w->group_tokens,
                                            logit, unused, NULL);
    }
    return loss;
}

/* Five points: the error falls with step^4. */
static double five_points(const double at[4])
{
    return (8 * (at[1] - at[2]) - (at[0] - at[3])) / (12 * step);
}

static double slope_at_double(const struct world *w, double *p)
{
    static const double offset[4] = {2, 1, -1, -2};
    double original = *p, at[4];
    for (int i = 0; i < 4; i++) {
        *p = original + offset[i] * step;
        at[i] = loss_of(w);
    }
    *p = original;
    return five_points(at);
}

static double slope_at_float(const struct world *w, float *p)
{
    static const float offset[4] = {2, 1, -1, -2};
    float original = *p;
    double at[4];
    for (int i = 0; i < 4; i++) {
        *p = original + offset[i] * (float)step;
        at[i] = loss_of(w);
    }
    *p = original;
    return five_points(at);
}

struct gradients {
    double dx[MAX_TOKENS * MAX_HIDDEN], dweights[MAX_TOKENS * MOE_MAX_TOP_K], aux_loss;
    uint8_t state[MAX_TOKENS];
    struct moe_oracle_layer *of;
};

static void backward(const struct world *w, struct moe_oracle_rounding *rounding,
                     struct gradients *g)
{
    *g = (struct gradients){0};
    assert_ok(moe_oracle_create_gradients(&w->spec, &g->of));
    struct moe_oracle_backward args = {.dtype = MOE_DTYPE_F32,
                                       .tokens = w->tokens,
                                       .x = w->x,
                                       .dy = w->dy,
                                       .mode = w->mode,
                                       .ids = w->ids,
                                       .weights = w->weights,
                                       .aux_coeff = w->aux_coeff,
                                       .loads = w->loads,
                                       .group_tokens = w->group_tokens,
                                       .dx = g->dx,
                                       .dweights = g->dweights,
                                       .token_state = g->state,
                                       .aux_loss = &g->aux_loss,
                                       .gradients = g->of,
                                       .rounding = rounding};
    assert_ok(moe_oracle_backward(w->layer, &args));
}

static bool near_a_kink(const struct world *w, const struct gradients *exact)
{
    bool near = false;
    for (int lean = -1; lean <= 1; lean += 2) {
        struct moe_oracle_rounding rounding = {.kink = 0.02, .lean = lean};
        struct gradients g;
        backward(w, &rounding, &g);
        near = near || memcmp(g.dx, exact->dx, sizeof g.dx) != 0 ||
               memcmp(g.dweights, exact->dweights, sizeof g.dweights) != 0;
        for (enum moe_weight k = MOE_WEIGHT_GATE; k < MOE_WEIGHT_COUNT && !near; k++) {
            size_t rows, columns;
            moe_weight_shape(&w->spec, k, &rows, &columns);
            for (uint32_t e = 0; e < (moe_weight_is_expert(k) ? w->spec.experts : 1); e++)
                near = near || (rows > 0 && memcmp(moe_oracle_weight(g.of, k, e),
                                                   moe_oracle_weight(exact->of, k, e),
                                                   rows * columns * sizeof(double)) != 0);
        }
        moe_oracle_destroy(g.of);
    }
    return near;
}

/* ----------------------------------------------------------------------- comparing */

static double worst; /* relative error of a tensor that is not zero */

/* `floor`: the right side is not more exact than this. */
static void compare(uint64_t seed, const char *what, int which, size_t n, const double *got,
                    const double *want, double floor)
{
    double error = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    if (size > 1e-6 && floor == noise)
        worst = fmax(worst, sqrt(error / size));
    if (!(sqrt(error) <= 1e-6 * sqrt(size) + floor))
        fail_msg("seed %llu: %s %d is off by %g, its norm is %g", (unsigned long long)seed, what,
                 which, sqrt(error), sqrt(size));
}

static void compare_weights(uint64_t seed, const struct world *w, const struct gradients *g)
{
    double numeric[MAX_PARAMETERS];
    for (enum moe_weight k = 0; k < MOE_WEIGHT_COUNT; k++) {
        size_t rows, columns;
        moe_weight_shape(&w->spec, k, &rows, &columns);
        for (uint32_t e = 0; e < (moe_weight_is_expert(k) ? w->spec.experts : 1); e++) {
            for (size_t i = 0; i < rows * columns; i++)
                numeric[i] = slope_at_double(w, &moe_oracle_weight(w->layer, k, e)[i]);
            if (rows > 0)
                compare(seed, "weight", (int)k, rows * columns, moe_oracle_weight(g->of, k, e),
                        numeric, noise);
        }
    }
}

/* In mode IDS a weight is no input; with the same weights given, its gradient is the same. */
static void compare_routing(uint64_t seed, struct world *w, const struct gradients *g)
{
    uint32_t pairs = w->tokens * w->spec.router.top_k;
    double numeric[MAX_TOKENS * MOE_MAX_TOP_K] = {0}, used[MAX_TOKENS * MOE_MAX_TOP_K];
    struct gradients again;
    double unused[MAX_TOKENS * MAX_HIDDEN];
    assert_ok(moe_oracle_forward(w->layer, MOE_DTYPE_F32, w->tokens, w->x, w->mode, w->ids,
                                 w->weights, NULL, used, NULL, NULL, unused));
    for (uint32_t i = 0; i < pairs; i++)
        w->weights[i] = (float)used[i];
    memset(w->mode, MOE_ROUTE_IDS_WEIGHTS, w->tokens);
    backward(w, NULL, &again);
    compare(seed, "dweights of given weights", 0, pairs, again.dweights, g->dweights,
            1e-6); /* fp32 */
    moe_oracle_destroy(again.of);
    for (uint32_t i = 0; i < pairs; i++)
        w->weights[i] = roundf(w->weights[i] * 256) / 256;
    backward(w, NULL, &again);
    for (uint32_t i = 0; i < pairs; i++)
        numeric[i] = slope_at_float(w, &w->weights[i]);
    if (!near_a_kink(w, &again))
        compare(seed, "dweights", 0, pairs, again.dweights, numeric, noise);
    moe_oracle_destroy(again.of);
}

static bool check_world(uint64_t seed, struct world *w)
{
    struct gradients g;
    double numeric[MAX_TOKENS * MAX_HIDDEN];
    uint32_t n = w->tokens * w->spec.hidden;
    backward(w, NULL, &g);
    bool smooth = !near_a_kink(w, &g);
    for (uint32_t i = 0; i < n && smooth; i++)
        numeric[i] = slope_at_float(w, &w->x[i]);
    if (smooth) {
        compare(seed, "dx", 0, n, g.dx, numeric, noise);
        compare_weights(seed, w, &g);
        compare_routing(seed, w, &g);
    }
    moe_oracle_destroy(g.of);
    return smooth;
}

static void gradients_are_the_slopes_of_the_forward_pass(void **state)
{
    (void)state;
    uint64_t first = seed_from_environment(1);
    uint32_t checked = 0, score[4] = {0}, renorm[3] = {0}, weighting[3] = {0};
    uint32_t activation[MOE_ACT_COMMON_COUNT] = {0}, gated = 0, zero = 0, aux = 0;
    for (uint64_t seed = first; seed < first + CASES; seed++) {
        struct world w;
        draw_world(seed, &w);
        if (check_world(seed, &w)) {
            checked++;
            score[w.spec.router.score]++;
            renorm[w.spec.router.renorm]++;
            weighting[w.spec.weighting]++;
            activation[w.spec.activation]++;
            gated += w.spec.shared_gated;
            zero += w.spec.router.zero_experts > 0;
            aux += w.aux_coeff != 0;
        }
        moe_oracle_destroy(w.layer);
    }
    print_message("  %u layers, worst relative error %.1e\n", checked, worst);
    assert_true(checked >= CASES / 2 && gated >= 20 && zero >= 20 && aux >= 20);
    for (int i = 0; i < 4; i++)
        assert_true(score[i] >= 20);
    for (int i = 0; i < 3; i++)
        assert_true(renorm[i] >= 20 && weighting[i] >= 20);
    for (int i = 0; i < MOE_ACT_COMMON_COUNT; i++)
        assert_true(activation[i] >= 20);
}

/* ------------------------------------------------------------------- single tokens */

static void a_refused_token_adds_nothing(void **state)
{
    (void)state;
    struct world w;
    draw_world(3, &w);
    w.tokens = 3;
    memset(w.mode, MOE_ROUTE_IDS, sizeof w.mode);
    for (uint32_t i = 0; i < 3 * w.spec.router.top_k; i++)
        w.ids[i] = 0;
    for (uint32_t i = 0; i < 3 * w.spec.hidden; i++)
        w.x[i] = w.dy[i] = 1;
    w.x[0] = NAN;
    w.ids[w.spec.router.top_k] = -2;
    w.mode[2] = MOE_ROUTE_IDS_WEIGHTS;
    w.weights[2 * w.spec.router.top_k] = INFINITY;
    struct gradients g;
    backward(&w, NULL, &g);
    assert_int_equal(g.state[0], MOE_TOKEN_NONFINITE_LOGITS);
    assert_int_equal(g.state[1], MOE_TOKEN_BAD_EXPERT);
    assert_int_equal(g.state[2], MOE_TOKEN_BAD_WEIGHT);
    for (uint32_t i = 0; i < 3 * w.spec.hidden; i++)
        assert_true(g.dx[i] == 0);
    for (enum moe_weight k = 0; k < MOE_WEIGHT_COUNT; k++) {
        size_t rows, columns;
        moe_weight_shape(&w.spec, k, &rows, &columns);
        for (size_t i = 0; i < rows * columns; i++)
            assert_true(moe_oracle_weight(g.of, k, 0)[i] == 0);
    }
    assert_true(g.aux_loss == 0);
    moe_oracle_destroy(g.of);
    moe_oracle_destroy(w.layer);
}

/* Simulated rounding errors must have about their stated size. */
static void rounding_errors_have_the_size_that_was_asked_for(void **state)
{
    (void)state;
    double total = 0;
    uint32_t counted = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world w;
        struct gradients exact, rough;
        struct moe_oracle_rounding rounding = {.arithmetic = 1e-6, .stored = 1e-6, .state = seed};
        draw_world(seed, &w);
        backward(&w, NULL, &exact);
        backward(&w, &rounding, &rough);
        double difference = 0, size = 0;
        for (uint32_t i = 0; i < w.tokens * w.spec.hidden; i++) {
            difference += (rough.dx[i] - exact.dx[i]) * (rough.dx[i] - exact.dx[i]);
            size += exact.dx[i] * exact.dx[i];
        }
        if (size > 1e-3) {
            total += sqrt(difference / size);
            counted++;
        }
        moe_oracle_destroy(exact.of);
        moe_oracle_destroy(rough.of);
        moe_oracle_destroy(w.layer);
    }
    assert_true(counted > 20);
    assert_true(total / counted > 1e-7 && total / counted < 1e-5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_slopes_of_the_forward_pass),
        cmocka_unit_test(a_refused_token_adds_nothing),
        cmocka_unit_test(rounding_errors_have_the_size_that_was_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
