/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the router: golden values, the total order, group limits, modes and token states, and
 * 2,000 random routers against the oracle. The router matrix is the identity, so x are the logits.
 */
#include "kernels_fixture.h"

struct routed {
    int32_t ids[MOE_MAX_TOP_K];
    float weights[MOE_MAX_TOP_K];
    uint8_t state;
};

static struct moe_device *device;

static struct moe_layer_spec router_spec(uint32_t experts, uint32_t top_k, enum moe_score score,
                                         enum moe_renorm renorm)
{
    struct moe_layer_spec spec = plain_spec();
    spec.hidden = spec.experts = experts;
    spec.router.top_k = top_k;
    spec.router.score = score;
    spec.router.renorm = renorm;
    return spec;
}

static struct routed route(struct moe_layer *layer, const float *x, enum moe_routing_mode mode,
                           const int32_t *ids_in, const float *weights_in)
{
    struct routed out;
    uint8_t m = (uint8_t)mode;
    assert_ok(moe_cpu_router_forward(layer, MOE_DTYPE_F32, 1, x, &m, ids_in, weights_in, out.ids,
                                     out.weights, &out.state));
    return out;
}

/* Routes one token with MOE_ROUTE_SERVER, with a new layer. */
static struct routed route_once(const struct moe_layer_spec *spec, const float *x,
                                const float *logit_bias, const float *select_bias)
{
    struct moe_layer *layer = identity_router(device, spec, logit_bias, select_bias);
    struct routed out = route(layer, x, MOE_ROUTE_SERVER, NULL, NULL);
    moe_cpu_layer_destroy(layer);
    return out;
}

static void assert_ids(const struct routed *got, uint32_t n, const int32_t *want)
{
    for (uint32_t k = 0; k < n; k++) {
        print_message("  id %d weight %.7g\n", got->ids[k], (double)got->weights[k]);
        assert_int_equal(got->ids[k], want[k]);
    }
}

static void assert_weights(const struct routed *got, uint32_t n, const double *want)
{
    for (uint32_t k = 0; k < n; k++)
        if (!(fabs((double)got->weights[k] - want[k]) <= 1e-6 * fabs(want[k])))
            fail_msg("weight %u is %.9g, not %.9g", k, (double)got->weights[k], want[k]);
}

/* ------------------------------------------------------------------ known values */

static const float ramp[8] = {-1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2};

static void a_ramp_of_logits_gives_the_known_weights(void **state)
{
    (void)state;
    /* The two largest of logits i / 2 - 1.5: softmax over them is 1 / (1 + e^-0.5). */
    const int32_t ids[2] = {7, 6};
    const double p = 1 / (1 + exp(-0.5));
    struct moe_layer_spec spec = router_spec(8, 2, MOE_SCORE_SOFTMAX_TOPK, MOE_RENORM_NONE);
    struct routed got = route_once(&spec, ramp, NULL, NULL);
    assert_ids(&got, 2, ids);
    assert_weights(&got, 2, (const double[]){p, 1 - p});
    assert_float_equal(got.weights[0], 0.622459, 5e-7);

    spec = router_spec(8, 2, MOE_SCORE_SOFTMAX, MOE_RENORM_SUM); /* the same by another way */
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 2, (const double[]){p, 1 - p});

    spec = router_spec(8, 2, MOE_SCORE_SIGMOID, MOE_RENORM_SUM);
    spec.router.renorm_eps = 1e-20f;
    got = route_once(&spec, ramp, NULL, NULL);
    assert_ids(&got, 2, ids);
    assert_float_equal(got.weights[0], 0.518613, 5e-7);
    assert_float_equal(got.weights[1], 0.481387, 5e-7);

    spec.router.renorm = MOE_RENORM_NONE;
    spec.router.scale = 2.5f;
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 2, (const double[]){2.5 / (1 + exp(-2)), 2.5 / (1 + exp(-1.5))});

    spec = router_spec(8, 1, MOE_SCORE_SQRTSOFTPLUS, MOE_RENORM_NONE);
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 1, (const double[]){sqrt(log1p(exp(2)))});
}

static void sparse_mixer_weighs_each_choice_among_near_logits(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 2, MOE_SCORE_SPARSEMIXER, MOE_RENORM_NONE);
    spec.router.jitter = 0.125f; /* logits of at least 3 / 4 of the choice are near */
    struct routed got = route_once(&spec, ramp, NULL, NULL);
    assert_ids(&got, 2, (const int32_t[]){7, 6});
    assert_weights(&got, 2, (const double[]){1 / (1 + exp(-0.5)), 1});
    spec.router.jitter = 0.2f; /* at least 3 / 5: of 2 also 1.5, and of 1.5 also 1 */
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 2, (const double[]){1 / (1 + exp(-0.5)), 1 / (1 + exp(-0.5))});
    const float below[4] = {-4, -1, -2, -1.25f}; /* of logit j then: (chosen - j) / |j| */
    spec = router_spec(4, 2, MOE_SCORE_SPARSEMIXER, MOE_RENORM_NONE);
    spec.router.jitter = 0.125f;
    got = route_once(&spec, below, NULL, NULL);
    assert_ids(&got, 2, (const int32_t[]){1, 3});
    assert_weights(&got, 2, (const double[]){1 / (1 + exp(-0.25)), 1});
    const float zeros[3] = {0, 0, 0}; /* 0 / 0 is near, as in the vendor's code */
    spec = router_spec(3, 2, MOE_SCORE_SPARSEMIXER, MOE_RENORM_NONE);
    spec.router.jitter = 0.01f;
    got = route_once(&spec, zeros, NULL, NULL);
    assert_weights(&got, 2, (const double[]){1.0 / 3, 0.5});
}

static void one_expert_is_renormalised_only_where_the_spec_says_so(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 1, MOE_SCORE_SIGMOID, MOE_RENORM_NONE);
    struct routed got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 1, (const double[]){1 / (1 + exp(-2))});
    spec.router.renorm = MOE_RENORM_SUM;
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 1, (const double[]){1});
    spec = router_spec(8, 1, MOE_SCORE_SOFTMAX_TOPK, MOE_RENORM_NONE);
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 1, (const double[]){1});
    spec = router_spec(8, 1, MOE_SCORE_SIGMOID, MOE_RENORM_CLAMPED);
    spec.router.renorm_eps = 2; /* larger than the sum: the clamp divides */
    got = route_once(&spec, ramp, NULL, NULL);
    assert_weights(&got, 1, (const double[]){0.5 / (1 + exp(-2))});
}

static void a_selection_bias_chooses_and_a_logit_bias_also_weighs(void **state)
{
    (void)state;
    const float bias[8] = {5, 0, 0, 5, 0, 0, 0, 0};
    const int32_t ids[2] = {3, 0};
    struct moe_layer_spec spec = router_spec(8, 2, MOE_SCORE_SIGMOID, MOE_RENORM_NONE);
    spec.router.select_bias = true;
    struct routed got = route_once(&spec, ramp, NULL, bias);
    assert_ids(&got, 2, ids);
    assert_weights(&got, 2, (const double[]){0.5, 1 / (1 + exp(1.5))});
    spec.router.select_bias = false;
    spec.router.logit_bias = true;
    got = route_once(&spec, ramp, bias, NULL);
    assert_ids(&got, 2, ids);
    assert_weights(&got, 2, (const double[]){1 / (1 + exp(-5)), 1 / (1 + exp(-3.5))});
}

/* --------------------------------------------------------------------- the order */

static void equal_keys_go_to_the_lower_id_for_every_k(void **state)
{
    (void)state;
    float x[64];
    for (uint32_t i = 0; i < 64; i++)
        x[i] = i % 3 == 0 ? 1.0f : i % 3 == 1 ? -0.0f : 0.0f;
    int32_t want[64];
    uint32_t n = 0;
    for (int32_t i = 0; i < 64; i += 3)
        want[n++] = i;
    for (int32_t i = 0; i < 64; i++) /* minus and plus zero are one key */
        if (i % 3 != 0)
            want[n++] = i;
    for (uint32_t k = 1; k <= MOE_MAX_TOP_K; k++) {
        for (enum moe_score s = MOE_SCORE_SOFTMAX; s <= MOE_SCORE_SPARSEMIXER; s++) {
            if (s == MOE_SCORE_SPARSEMIXER && k != 2)
                continue;
            struct moe_layer_spec spec = router_spec(64, k, s, MOE_RENORM_NONE);
            spec.router.jitter = 0.01f;
            struct routed got = route_once(&spec, x, NULL, NULL);
            assert_memory_equal(got.ids, want, k * sizeof *want);
        }
    }
    const float zeros[4] = {-0.0f, 0.0f, -0.0f, 0.0f};
    const int32_t in_order[4] = {0, 1, 2, 3};
    struct moe_layer_spec spec = router_spec(4, 4, MOE_SCORE_SOFTMAX_TOPK, MOE_RENORM_NONE);
    struct routed got = route_once(&spec, zeros, NULL, NULL);
    assert_ids(&got, 4, in_order);
}

static void saturated_scores_do_not_hide_the_order_of_logits(void **state)
{
    (void)state;
    /* sigmoid is 1 in fp32 for all of these */
    const float x[4] = {20, 40, 30, 25};
    struct moe_layer_spec spec = router_spec(4, 2, MOE_SCORE_SIGMOID, MOE_RENORM_NONE);
    struct routed got = route_once(&spec, x, NULL, NULL);
    assert_ids(&got, 2, (const int32_t[]){1, 2});
}

static void scores_that_all_underflow_give_distinct_experts_and_no_nan(void **state)
{
    (void)state;
    const float x[4] = {-500, -400, -300, -200};
    for (enum moe_renorm r = MOE_RENORM_NONE; r <= MOE_RENORM_CLAMPED; r++) {
        struct moe_layer_spec spec = router_spec(4, 3, MOE_SCORE_SIGMOID, r);
        struct routed got = route_once(&spec, x, NULL, NULL);
        assert_int_equal(got.state, MOE_TOKEN_OK);
        assert_ids(&got, 3, (const int32_t[]){3, 2, 1});
        assert_weights(&got, 3, (const double[]){0, 0, 0});
    }
}

/* -------------------------------------------------------------------- group limits */

static void a_masked_group_stays_out_even_when_allowed_keys_are_negative(void **state)
{
    (void)state;
    /* DeepSeek's code masks groups with minus infinity, transformers' port with 0.0. The latter
     * would choose experts of masked groups here, because all keys of the allowed group are
     * negative. The router follows DeepSeek. */
    const float x[8] = {0, 0, 0, 0, 1, 1, 0, 0};
    const float bias[8] = {-9, -9, -9, -9, -2, -3, -9, -9};
    struct moe_layer_spec spec = router_spec(8, 3, MOE_SCORE_SIGMOID, MOE_RENORM_SUM);
    spec.router.select_bias = true;
    spec.router.groups = 2;
    spec.router.topk_group = 1;
    spec.router.group_best = 2;
    struct routed got = route_once(&spec, x, NULL, bias);
    assert_ids(&got, 3, (const int32_t[]){4, 5, 6});
}

static void the_group_score_counts_as_many_experts_as_the_spec_says(void **state)
{
    (void)state;
    /* Group 0 has the best expert, group 1 the best pair. */
    const float x[6] = {3, -2, -2, 2, 2, -1};
    struct moe_layer_spec spec = router_spec(6, 1, MOE_SCORE_SOFTMAX_TOPK, MOE_RENORM_NONE);
    spec.router.groups = 2;
    spec.router.topk_group = 1;
    for (uint32_t best = 1; best <= 3; best++) {
        spec.router.group_best = best;
        struct routed got = route_once(&spec, x, NULL, NULL);
        assert_ids(&got, 1, (const int32_t[]){best == 1 ? 0 : 3});
    }
    const float equal[6] = {1, 2, 3, 3, 2, 1}; /* equal groups: the lower one */
    spec.router.group_best = 2;
    struct routed got = route_once(&spec, equal, NULL, NULL);
    assert_ids(&got, 1, (const int32_t[]){2});
}

/* ---------------------------------------------------------------- modes and states */

static void given_ids_are_weighed_by_live_scores(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 4, MOE_SCORE_SIGMOID, MOE_RENORM_SUM);
    struct moe_layer *layer = identity_router(device, &spec, NULL, NULL);
    const int32_t ids[4] = {2, -1, 7, -1};
    struct routed got = route(layer, ramp, MOE_ROUTE_IDS, ids, NULL);
    double a = 1 / (1 + exp(0.5)), b = 1 / (1 + exp(-2));
    assert_ids(&got, 4, ids);
    assert_weights(&got, 4, (const double[]){a / (a + b), 0, b / (a + b), 0});
    moe_cpu_layer_destroy(layer);

    spec.router.score = MOE_SCORE_SOFTMAX_TOPK; /* softmax over the given ones */
    spec.router.renorm = MOE_RENORM_NONE;
    layer = identity_router(device, &spec, NULL, NULL);
    got = route(layer, ramp, MOE_ROUTE_IDS, ids, NULL);
    assert_weights(&got, 4, (const double[]){1 / (1 + exp(2.5)), 0, 1 / (1 + exp(-2.5)), 0});
    const int32_t none[4] = {-1, -1, -1, -1};
    got = route(layer, ramp, MOE_ROUTE_IDS, none, NULL);
    assert_int_equal(got.state, MOE_TOKEN_OK);
    assert_weights(&got, 4, (const double[]){0, 0, 0, 0});
    moe_cpu_layer_destroy(layer);
}

static void given_weights_are_used_as_they_are_and_logits_are_not_looked_at(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 3, MOE_SCORE_SIGMOID, MOE_RENORM_SUM);
    spec.router.scale = 3;
    struct moe_layer *layer = identity_router(device, &spec, NULL, NULL);
    const float x[8] = {NAN, NAN};
    const int32_t ids[3] = {5, -1, 1};
    const float weights[3] = {0.25f, NAN, -2};
    struct routed got = route(layer, x, MOE_ROUTE_IDS_WEIGHTS, ids, weights);
    assert_int_equal(got.state, MOE_TOKEN_OK);
    assert_ids(&got, 3, ids);
    assert_weights(&got, 3, (const double[]){0.25, 0, -2});
    moe_cpu_layer_destroy(layer);
}

static void assert_refused_token(struct routed got, enum moe_token_state want)
{
    assert_int_equal(got.state, want);
    assert_ids(&got, 2, (const int32_t[]){-1, -1});
    assert_weights(&got, 2, (const double[]){0, 0});
}

static void each_bad_token_has_its_state(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 2, MOE_SCORE_SOFTMAX, MOE_RENORM_NONE);
    spec.router.zero_experts = 2;
    spec.hidden = 10;
    struct moe_layer *layer = identity_router(device, &spec, NULL, NULL);
    float x[10] = {1, 2, 3};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float worse[10] = {0};
        worse[i * 4] = bad[i];
        assert_refused_token(route(layer, worse, MOE_ROUTE_SERVER, NULL, NULL),
                             MOE_TOKEN_NONFINITE_LOGITS);
        assert_refused_token(route(layer, worse, MOE_ROUTE_IDS, (const int32_t[]){0, 1}, NULL),
                             MOE_TOKEN_NONFINITE_LOGITS);
    }
    const float fine[2] = {1, 1}, broken[2] = {1, INFINITY};
    for (int i = 0; i < 2; i++) {
        const int32_t ids[2] = {0, i == 0 ? -2 : 10};
        assert_refused_token(route(layer, x, MOE_ROUTE_IDS, ids, NULL), MOE_TOKEN_BAD_EXPERT);
        assert_refused_token(route(layer, x, MOE_ROUTE_IDS_WEIGHTS, ids, fine),
                             MOE_TOKEN_BAD_EXPERT);
    }
    const int32_t zero_expert[2] = {9, 0};
    assert_refused_token(route(layer, x, MOE_ROUTE_IDS_WEIGHTS, zero_expert, broken),
                         MOE_TOKEN_BAD_WEIGHT);
    struct routed got = route(layer, x, MOE_ROUTE_IDS_WEIGHTS, zero_expert, fine);
    assert_int_equal(got.state, MOE_TOKEN_OK);
    moe_cpu_layer_destroy(layer);
}

static void a_mode_without_its_tensors_is_refused(void **state)
{
    (void)state;
    struct moe_layer_spec spec = router_spec(8, 2, MOE_SCORE_SOFTMAX, MOE_RENORM_NONE);
    struct moe_layer *layer = identity_router(device, &spec, NULL, NULL);
    int32_t ids[2] = {0, 1};
    float weights[2];
    uint8_t token_state;
    for (uint8_t mode = 1; mode <= 3; mode++)
        assert_refused(moe_cpu_router_forward(layer, MOE_DTYPE_F32, 1, ramp, &mode,
                                              mode == 1 ? NULL : ids, NULL, ids, weights,
                                              &token_state),
                       MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    assert_ok(
        moe_cpu_router_forward(layer, MOE_DTYPE_BF16, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL));
    moe_cpu_layer_destroy(layer);
}

/* ------------------------------------------------------------------- random routers */

static struct moe_layer_spec random_router(void)
{
    uint32_t experts = one_in(20) ? random_between(1, MOE_MAX_EXPERTS) : random_between(1, 48);
    struct moe_layer_spec spec =
        router_spec(experts, 1, random_below(5), (enum moe_renorm)random_below(3));
    struct moe_router_spec *r = &spec.router;
    r->logit_bias = one_in(3);
    r->select_bias = one_in(2);
    r->scale = one_in(2) ? 1.0f : 2.5f;
    if (r->renorm == MOE_RENORM_SUM)
        r->renorm_eps = one_in(2) ? 0 : 1e-20f;
    if (r->renorm == MOE_RENORM_CLAMPED)
        r->renorm_eps = one_in(2) ? 1e-12f : 0.5f;
    r->groups = random_between(1, 8);
    if (one_in(2) || experts % r->groups != 0)
        r->groups = 1;
    uint32_t size = experts / r->groups;
    if (r->groups == 1 && one_in(4))
        r->zero_experts = random_between(1, 8);
    r->topk_group = r->groups == 1 ? 1 : random_between(1, r->groups);
    r->group_best = random_between(1, size < 3 ? size : 3);
    uint32_t choosable = r->topk_group * size + r->zero_experts;
    r->top_k = random_between(1, choosable < MOE_MAX_TOP_K ? choosable : MOE_MAX_TOP_K);
    if (r->score == MOE_SCORE_SPARSEMIXER && choosable < 2)
        r->score = MOE_SCORE_SOFTMAX;
    if (r->score == MOE_SCORE_SPARSEMIXER) {
        r->top_k = 2;
        r->jitter = one_in(2) ? 0.01f : 0.3f;
    }
    spec.hidden = experts + r->zero_experts;
    return spec;
}

/* Normal values, or multiples of 1/2: many exact ties. */
static float *random_values(size_t n, float scale)
{
    float *v = random_tensor(MOE_DTYPE_F32, n, scale);
    bool coarse = one_in(4);
    for (size_t i = 0; coarse && i < n; i++)
        v[i] = roundf(v[i] * 2) / 2;
    return v;
}

enum { TOKENS = 4 };

struct given {
    uint8_t mode[TOKENS];
    int32_t ids[TOKENS * MOE_MAX_TOP_K];
    float weights[TOKENS * MOE_MAX_TOP_K];
};

static void random_given(const struct moe_layer_spec *spec, struct given *g)
{
    for (uint32_t t = 0; t < TOKENS; t++)
        g->mode[t] = one_in(2) ? MOE_ROUTE_SERVER : (uint8_t)random_below(3);
    for (uint32_t i = 0; i < TOKENS * spec->router.top_k; i++) {
        g->ids[i] = (int32_t)random_below(spec->hidden + 1) - 1;
        if (one_in(200))
            g->ids[i] = one_in(2) ? -2 : (int32_t)spec->hidden;
        g->weights[i] = one_in(200) ? NAN : random_normal();
    }
}

/* 1 if ids and weights of the token agree with the oracle, 0 if its choice is too close to compare;
 * fails otherwise. */
static uint32_t check_token(const struct moe_layer_spec *spec, const float *x,
                            const float *logit_bias, const float *select_bias,
                            const struct given *g, uint32_t t, const int32_t *ids,
                            const float *weights, uint8_t state)
{
    double logit[2 * MOE_MAX_EXPERTS], bias[2 * MOE_MAX_EXPERTS], want[MOE_MAX_TOP_K], margin;
    double largest = 0; /* of the finite logits: keys and their sums are rounded in proportion */
    int32_t want_ids[MOE_MAX_TOP_K];
    uint32_t top_k = spec->router.top_k;
    for (uint32_t i = 0; i < spec->hidden; i++) {
        /* NaN times the identity's zeros reaches every logit; the router sums in fp32. */
        logit[i] = (double)(spec->router.logit_bias ? x[i] + logit_bias[i] : x[i]);
        bias[i] = (double)select_bias[i];
        if (isfinite(logit[i]) && fabs(logit[i]) > largest)
            largest = fabs(logit[i]);
    }
    enum moe_token_state expected =
        moe_oracle_route(spec, logit, spec->router.select_bias ? bias : NULL, g->mode[t],
                         g->ids + t * top_k, g->weights + t * top_k, want_ids, want, &margin);
    assert_int_equal(state, expected);
    for (uint32_t a = 0; g->mode[t] == MOE_ROUTE_SERVER && state == MOE_TOKEN_OK && a < top_k; a++)
        for (uint32_t b = 0; b < a; b++)
            assert_int_not_equal(ids[a], ids[b]);
    if (margin < 3e-6 * (1 + largest))
        return 0;
    assert_memory_equal(ids, want_ids, top_k * sizeof *ids);
    assert_true(relative_error(top_k, weights, want) <= 1e-5);
    return 1;
}

static void random_routers_agree_with_the_oracle(void **state)
{
    (void)state;
    enum { CASES = 2000 };
    uint32_t compared = 0;
    for (uint32_t c = 0; c < CASES; c++) {
        struct moe_layer_spec spec = random_router();
        float *x = random_values((size_t)TOKENS * spec.hidden, one_in(2) ? 1 : 6);
        float *logit_bias = random_values(spec.hidden, 1);
        float *select_bias = random_values(spec.hidden, one_in(2) ? 0.1f : 1);
        struct given g;
        random_given(&spec, &g);
        if (one_in(20))
            x[random_below(TOKENS * spec.hidden)] = one_in(2) ? NAN : INFINITY;
        struct moe_layer *layer = identity_router(device, &spec, logit_bias, select_bias);
        int32_t ids[TOKENS * MOE_MAX_TOP_K];
        float weights[TOKENS * MOE_MAX_TOP_K];
        uint8_t token_state[TOKENS];
        assert_ok(moe_cpu_router_forward(layer, MOE_DTYPE_F32, TOKENS, x, g.mode, g.ids, g.weights,
                                         ids, weights, token_state));
        uint32_t k = spec.router.top_k;
        for (uint32_t t = 0; t < TOKENS; t++)
            compared += check_token(&spec, x + (size_t)t * spec.hidden, logit_bias, select_bias, &g,
                                    t, ids + t * k, weights + t * k, token_state[t]);
        moe_cpu_layer_destroy(layer);
        free(x);
        free(logit_bias);
        free(select_bias);
    }
    print_message("  %u of %u tokens compared, the others too close to a tie\n", compared,
                  CASES * TOKENS);
    assert_true(compared > CASES * TOKENS * 9 / 10);
}

static void logits_of_a_real_matrix_are_right_and_do_not_depend_on_the_batch(void **state)
{
    (void)state;
    enum { T = 700, H = 333, E = 75, K = 6 }; /* more than one pass, odd width, partial panel */
    struct moe_layer_spec spec = router_spec(E, K, MOE_SCORE_SOFTMAX, MOE_RENORM_NONE);
    spec.hidden = H;
    spec.router.logit_bias = true;
    for (enum moe_dtype dtype = MOE_DTYPE_F32; dtype <= MOE_DTYPE_BF16; dtype++) {
        struct moe_oracle_layer *oracle;
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, false, &oracle);
        char *x = random_tensor(dtype, (size_t)T * H, 1);
        int32_t *ids = calloc(T * K, sizeof *ids), alone_ids[K];
        float *weights = calloc(T * K, sizeof *weights), alone[K];
        uint8_t *states = calloc(T, 1), alone_state;
        double worst = 0;
        assert_ok(
            moe_cpu_router_forward(layer, dtype, T, x, NULL, NULL, NULL, ids, weights, states));
        for (uint32_t t = 0; t < T; t++) {
            const char *row = x + t * H * moe_dtype_bytes(dtype);
            double token[H], logit[E], want[K];
            int32_t want_ids[K];
            for (uint32_t h = 0; h < H; h++)
                token[h] = element_of(dtype, row, h);
            assert_ok(moe_oracle_logits(oracle, token, logit));
            moe_oracle_route(&spec, logit, NULL, MOE_ROUTE_IDS, ids + t * K, NULL, want_ids, want,
                             NULL);
            worst = fmax(worst, relative_error(K, weights + t * K, want));
            assert_ok(moe_cpu_router_forward(layer, dtype, 1, row, NULL, NULL, NULL, alone_ids,
                                             alone, &alone_state));
            assert_memory_equal(alone_ids, ids + t * K, sizeof alone_ids);
            assert_memory_equal(alone, weights + t * K, sizeof alone);
        }
        print_message("  worst relative error of a token's weights: %.2g\n", worst);
        assert_true(worst <= 1e-5);
        free(x);
        free(ids);
        free(weights);
        free(states);
        moe_oracle_destroy(oracle);
        moe_cpu_layer_destroy(layer);
    }
}

static int setup(void **state)
{
    (void)state;
    seed_random();
    device = open_device(NULL, 2);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    moe_cpu_device_close(device);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ramp_of_logits_gives_the_known_weights),
        cmocka_unit_test(sparse_mixer_weighs_each_choice_among_near_logits),
        cmocka_unit_test(one_expert_is_renormalised_only_where_the_spec_says_so),
        cmocka_unit_test(a_selection_bias_chooses_and_a_logit_bias_also_weighs),
        cmocka_unit_test(equal_keys_go_to_the_lower_id_for_every_k),
        cmocka_unit_test(saturated_scores_do_not_hide_the_order_of_logits),
        cmocka_unit_test(scores_that_all_underflow_give_distinct_experts_and_no_nan),
        cmocka_unit_test(a_masked_group_stays_out_even_when_allowed_keys_are_negative),
        cmocka_unit_test(the_group_score_counts_as_many_experts_as_the_spec_says),
        cmocka_unit_test(given_ids_are_weighed_by_live_scores),
        cmocka_unit_test(given_weights_are_used_as_they_are_and_logits_are_not_looked_at),
        cmocka_unit_test(each_bad_token_has_its_state),
        cmocka_unit_test(a_mode_without_its_tensors_is_refused),
        cmocka_unit_test(random_routers_agree_with_the_oracle),
        cmocka_unit_test(logits_of_a_real_matrix_are_right_and_do_not_depend_on_the_batch),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
