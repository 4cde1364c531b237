/* SPDX-License-Identifier: Apache-2.0 */
/* Formulas of training with results that can be computed by hand, against the oracle. */
#include "oracle/oracle.h"
#include "support/check.h"

#include <math.h>

#define assert_near(got, want)                                                                     \
    do {                                                                                           \
        if (!(fabs((got) - (want)) <= 1e-12 * (1 + fabs(want))))                                   \
            fail_msg("%s is %.15g, not %.15g", #got, (double)(got), (double)(want));               \
    } while (0)

static struct moe_layer_spec small_spec(enum moe_score score, uint32_t experts, uint32_t top_k)
{
    return (struct moe_layer_spec){.hidden = 1,
                                   .experts = experts,
                                   .intermediate = 1,
                                   .router = {.score = score,
                                              .top_k = top_k,
                                              .groups = 1,
                                              .topk_group = 1,
                                              .group_best = 1,
                                              .scale = 1}};
}

/* --------------------------------------------------------------------- router */

static void softmax_over_all_moves_the_experts_that_were_not_chosen(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SOFTMAX, 2, 1);
    double logit[2] = {0, 0}, dw[1] = {1}, dlogit[2];
    int32_t ids[1] = {0};
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[0], 0.25);
    assert_near(dlogit[1], -0.25);
}

static void softmax_of_the_chosen_moves_only_them(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SOFTMAX_TOPK, 3, 2);
    double logit[3] = {0, log(3), 5}, dw[2] = {1, 0}, dlogit[3]; /* p = 1/4, 3/4 */
    int32_t ids[2] = {0, 1};
    s.router.scale = 2;
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[0], 0.25 * (2 - 0.5));
    assert_near(dlogit[1], 0.75 * (0 - 0.5));
    assert_near(dlogit[2], 0.0);
    s.router.top_k = 1; /* one weight, always 1 */
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[0], 0.0);
}

static void sigmoid_is_renormalised_by_those_that_were_chosen(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 8, 2);
    double logit[8], dw[2] = {1, 0}, dlogit[8];
    int32_t ids[2] = {7, 6};
    for (int i = 0; i < 8; i++)
        logit[i] = 0.5 * i - 1.5;
    s.router.renorm = MOE_RENORM_SUM;
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[7], 0.029759434673177907);
    assert_near(dlogit[6], -0.04554318272020389);
    assert_near(dlogit[5], 0.0);
    s.router.renorm = MOE_RENORM_NONE;
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    double s7 = 1 / (1 + exp(-2.0));
    assert_near(dlogit[7], s7 * (1 - s7));
    assert_near(dlogit[6], 0.0);
}

static void a_clamped_divisor_does_not_move(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 2, 1);
    double logit[2] = {0, 0}, dw[1] = {1}, dlogit[2];
    int32_t ids[1] = {1};
    s.router.renorm = MOE_RENORM_CLAMPED;
    s.router.renorm_eps = 2; /* above the score of 1/2: w = s / 2 */
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[1], 0.125);
    s.router.renorm_eps = 0.25; /* below: w = s / s */
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[1], 0.0);
}

static void sqrtsoftplus_has_its_own_slope(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SQRTSOFTPLUS, 2, 2);
    double logit[2] = {0, 36}, dw[2] = {1, 1}, dlogit[2];
    int32_t ids[2] = {0, 1};
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[0], 0.5 / (2 * sqrt(log(2))));
    assert_near(dlogit[1], 1.0 / 12);
}

static void the_same_expert_twice_gets_both_gradients_and_none_for_a_gap(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 2, 3);
    double logit[2] = {0, 0}, dw[3] = {1, NAN, 2}, dlogit[2];
    int32_t ids[3] = {1, -1, 1};
    moe_oracle_router_backward(&s, logit, ids, dw, dlogit, NULL);
    assert_near(dlogit[0], 0.0);
    assert_near(dlogit[1], 0.75);
}

/* ------------------------------------------------------------------- load balance */

static void perfect_balance_costs_the_coefficient(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 4, 2);
    double logit[4] = {1, 1, 1, 1}, dlogit[4] = {0}, loss = 0;
    uint32_t n[4] = {3, 3, 3, 3};
    for (int t = 0; t < 6; t++)
        loss += moe_oracle_aux_backward(&s, 0.01, n, 6, logit, dlogit, NULL);
    assert_near(loss, 0.01);
    for (int e = 0; e < 4; e++)
        assert_near(dlogit[e], 0.0);
}

static void crowding_pushes_the_crowded_expert_down(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SOFTMAX, 2, 1);
    s.router.zero_experts = 1; /* takes no part */
    double logit[3] = {0, 0, 9}, dlogit[3] = {0, 0, 0};
    uint32_t n[2] = {2, 0};
    double loss = moe_oracle_aux_backward(&s, 1.0, n, 2, logit, dlogit, NULL);
    assert_near(loss, 0.5); /* C = 2 / 4; a = 1/2, 1/2; two tokens make 1 */
    assert_near(dlogit[0], 0.25);
    assert_near(dlogit[1], -0.25);
    assert_near(dlogit[2], 0.0);
}

static void the_balance_rule_moves_by_sign_alone(void **state)
{
    (void)state;
    double bias[4] = {1, 0, 0, 0}, even[3] = {0, 0, 0};
    moe_oracle_balance(4, (const uint64_t[]){5, 2, 1, 2}, 0.01, bias);
    assert_near(bias[0], 0.99);
    for (int e = 1; e < 4; e++)
        assert_near(bias[e], 0.01);
    moe_oracle_balance(3, (const uint64_t[]){7, 7, 7}, 0.01, even);
    assert_true(even[0] == 0 && even[1] == 0 && even[2] == 0);
}

/* ---------------------------------------------------------------------- expert */

static void activations_have_their_slopes_inside_the_clamps_only(void **state)
{
    (void)state;
    double dg, du, silu = 1 / (1 + exp(-1.0));
    moe_oracle_activate_backward(MOE_ACT_SWIGLU, 0, 0, 1, 0.5, 1, &dg, &du);
    assert_near(dg, 0.46383525593574343);
    assert_near(du, silu);
    moe_oracle_activate_backward(MOE_ACT_SWIGLU_OAI, 7, 1.702, 1, 0.5, 1, &dg, &du);
    assert_near(dg, 1.6016694098345012);
    assert_near(du, 0.8457957659328212);
    moe_oracle_activate_backward(MOE_ACT_SWIGLU_CLAMPED, 0.75, 0, 1, 0.5, 1, &dg, &du);
    assert_near(dg, 0.0);
    assert_near(du, 0.75 / (1 + exp(-0.75)));
    moe_oracle_activate_backward(MOE_ACT_SWIGLU_CLAMPED, 1.25, 0, 1, -2, 1, &dg, &du);
    assert_near(dg, -1.25 * (silu + silu * (1 - silu)));
    assert_near(du, 0.0);
    moe_oracle_activate_backward(MOE_ACT_SWIGLU_CLAMPED, 1, 0, -9, 0, 1, &dg, &du);
    assert_near(du, -9 / (1 + exp(9.0))); /* the gate has no lower limit */
}

static void put(struct moe_oracle_layer *layer, enum moe_weight w, double v)
{
    *moe_oracle_weight(layer, w, 0) = v;
}

static double at(struct moe_oracle_layer *layer, enum moe_weight w)
{
    return *moe_oracle_weight(layer, w, 0);
}

/* H = I = 1, gate 0, up 3, down 2, down bias 4, x = 1, dy = 1, w = 1/2: h = 0, silu'(0) = 1/2. */
static void an_expert_of_one_number(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 1, 1);
    struct moe_oracle_layer *layer, *grad;
    double x = 1, dy = 1, dx = 10, dw;
    s.down_bias = true;
    assert_ok(moe_oracle_create_gradients(&s, &layer));
    assert_ok(moe_oracle_create_gradients(&s, &grad));
    put(layer, MOE_WEIGHT_UP, 3);
    put(layer, MOE_WEIGHT_DOWN, 2);
    put(layer, MOE_WEIGHT_DOWN_BIAS, 4);
    assert_ok(moe_oracle_expert_backward(layer, 0, 0.5, &x, &dy, &dx, &dw, grad, NULL));
    assert_near(dw, 4.0);
    assert_near(dx, 10.0); /* W_g dg = 0, and du = 0 */
    assert_near(at(grad, MOE_WEIGHT_GATE), 0.5 * 2 * 3 * 0.5);
    assert_near(at(grad, MOE_WEIGHT_UP), 0.0);
    assert_near(at(grad, MOE_WEIGHT_DOWN), 0.0);
    assert_near(at(grad, MOE_WEIGHT_DOWN_BIAS), 0.5);
    assert_ok(moe_oracle_expert_backward(layer, 0, 0.5, &x, &dy, &dx, &dw, grad, NULL));
    assert_near(at(grad, MOE_WEIGHT_DOWN_BIAS), 1.0); /* adds */
    moe_oracle_destroy(layer);
    moe_oracle_destroy(grad);
}

static void a_zero_expert_is_the_identity(void **state)
{
    (void)state;
    struct moe_layer_spec s = small_spec(MOE_SCORE_SIGMOID, 1, 1);
    struct moe_oracle_layer *layer;
    double x = 3, dy = 2, dx = 1, dw;
    s.router.zero_experts = 1;
    assert_ok(moe_oracle_create_gradients(&s, &layer));
    assert_ok(moe_oracle_expert_backward(layer, 1, 0.5, &x, &dy, &dx, &dw, NULL, NULL));
    assert_near(dx, 2.0);
    assert_near(dw, 6.0);
    moe_oracle_destroy(layer);
}

/* ------------------------------------------------------------------------ optimizer */

static void adamw_two_steps(void **state)
{
    (void)state;
    struct moe_optimizer_args a = {.learning_rate = 0.1,
                                   .weight_decay = 0.01,
                                   .beta1 = 0.9,
                                   .beta2 = 0.999,
                                   .epsilon = 1e-8,
                                   .grad_scale = 0.5,
                                   .number = 1};
    double value = 1, m = 0, v = 0, g = 1;
    moe_oracle_optimizer_step(MOE_OPTIMIZER_ADAMW, &a, 0.5, 1, &g, &value, &m, &v);
    assert_near(value, 0.999 - 0.1 * 0.5 / (0.5 + 1e-8));
    assert_near(m, 0.05);
    assert_near(v, 0.00025);
    a.number = 2;
    g = -0.5;
    moe_oracle_optimizer_step(MOE_OPTIMIZER_ADAMW, &a, 0.5, 1, &g, &value, &m, &v);
    assert_near(m, 0.02);
    assert_near(v, 0.00031225);
    assert_true(fabs(value - 0.8714672967078464) < 1e-8);
}

static void sgd_with_momentum(void **state)
{
    (void)state;
    struct moe_optimizer_args a = {
        .learning_rate = 0.1, .weight_decay = 0.5, .momentum = 0.9, .number = 1};
    double value = 1, m = 0, g = 2;
    moe_oracle_optimizer_step(MOE_OPTIMIZER_SGD, &a, 1, 1, &g, &value, &m, NULL);
    assert_near(value, 1 - 0.05 - 0.2);
    g = 1;
    moe_oracle_optimizer_step(MOE_OPTIMIZER_SGD, &a, 1, 1, &g, &value, &m, NULL);
    assert_near(m, 2.8);
    assert_near(value, 0.75 - 0.0375 - 0.28);
}

static void clipping_is_by_the_common_norm(void **state)
{
    (void)state;
    struct moe_optimizer_args a = {.grad_scale = -0.5, .max_grad_norm = 1};
    double squares = 0, norm, g[2] = {3, 4};
    moe_oracle_add_squares(1, g, &squares);
    moe_oracle_add_squares(1, g + 1, &squares);
    assert_near(squares, 25.0);
    assert_near(moe_oracle_gradient_factor(&a, squares, &norm), -0.5 / (2.5 + 1e-6));
    assert_near(norm, 2.5);
    a.max_grad_norm = 3;
    assert_near(moe_oracle_gradient_factor(&a, squares, &norm), -0.5);
    a.max_grad_norm = 0;
    assert_near(moe_oracle_gradient_factor(&a, 1e12, &norm), -0.5);
}

static void an_adapter_of_rank_one(void **state)
{
    (void)state;
    double base[4] = {1, 0, 0, 1}, a[2] = {1, 2}, b[2] = {3, 4}, w[4], da[2], db[2];
    moe_oracle_lora_merge(2, 2, 1, 2.0, base, a, b, w);
    const double want[4] = {7, 12, 8, 17};
    for (int i = 0; i < 4; i++)
        assert_near(w[i], want[i]);
    const double dw[4] = {1, 0, 0, -1};
    moe_oracle_lora_backward(2, 2, 1, 2.0, a, b, dw, da, db);
    assert_near(da[0], 6.0);
    assert_near(da[1], -8.0);
    assert_near(db[0], 2.0);
    assert_near(db[1], -4.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(softmax_over_all_moves_the_experts_that_were_not_chosen),
        cmocka_unit_test(softmax_of_the_chosen_moves_only_them),
        cmocka_unit_test(sigmoid_is_renormalised_by_those_that_were_chosen),
        cmocka_unit_test(a_clamped_divisor_does_not_move),
        cmocka_unit_test(sqrtsoftplus_has_its_own_slope),
        cmocka_unit_test(the_same_expert_twice_gets_both_gradients_and_none_for_a_gap),
        cmocka_unit_test(perfect_balance_costs_the_coefficient),
        cmocka_unit_test(crowding_pushes_the_crowded_expert_down),
        cmocka_unit_test(the_balance_rule_moves_by_sign_alone),
        cmocka_unit_test(activations_have_their_slopes_inside_the_clamps_only),
        cmocka_unit_test(an_expert_of_one_number),
        cmocka_unit_test(a_zero_expert_is_the_identity),
        cmocka_unit_test(adamw_two_steps),
        cmocka_unit_test(sgd_with_momentum),
        cmocka_unit_test(clipping_is_by_the_common_norm),
        cmocka_unit_test(an_adapter_of_rank_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
