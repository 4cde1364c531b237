/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the rules of training for both backends: the tensors of a trainer, refusals, and the
 * scalars of optimizers, clipping, balance and initial values. */
#include "common/layer_rules.h"
#include "common/training_rules.h"
#include "support/check.h"

static struct moe_layer_spec some_spec(void)
{
    return (struct moe_layer_spec){.hidden = 64,
                                   .experts = 8,
                                   .intermediate = 48,
                                   .router = {.top_k = 2, .logit_bias = true, .select_bias = true},
                                   .gate_up_bias = true,
                                   .shared_intermediate = 16};
}

static void a_trainer_has_every_weight_but_the_selection_bias(void **state)
{
    (void)state;
    struct moe_layer_spec spec = some_spec();
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    struct moe_train_param params[MOE_TRAIN_MAX_PARAMS];
    /* router, its bias, three matrices and two biases of experts, three shared matrices */
    assert_int_equal(moe_train_params(&spec, &config, params), 10);
    config.frozen = 1u << MOE_PARAMS_EXPERTS;
    assert_int_equal(moe_train_params(&spec, &config, params), 5);
    config.frozen = 7;
    assert_int_equal(moe_train_params(&spec, &config, params), 0);
}

static void adapters_take_the_place_of_all_weights_of_an_expert(void **state)
{
    (void)state;
    struct moe_layer_spec spec = some_spec();
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD,
                                        .frozen = 1u << MOE_PARAMS_ROUTER | 1u << MOE_PARAMS_SHARED,
                                        .lora_rank = 4,
                                        .lora_alpha = 8,
                                        .lora_targets = MOE_LORA_DOWN | MOE_LORA_UP};
    struct moe_train_param p[MOE_TRAIN_MAX_PARAMS];
    assert_int_equal(moe_train_params(&spec, &config, p), 4);
    assert_true(p[0].weight == MOE_WEIGHT_UP && p[0].part == MOE_PART_LORA_A);
    assert_true(p[0].rows == 4 && p[0].columns == 64);
    assert_true(p[3].weight == MOE_WEIGHT_DOWN && p[3].part == MOE_PART_LORA_B);
    assert_true(p[3].rows == 64 && p[3].columns == 4);
}

static enum moe_code find(const struct moe_trainer_config *config, enum moe_weight weight,
                          enum moe_train_part part, enum moe_train_tensor tensor, size_t floats)
{
    struct moe_layer_spec spec = some_spec();
    struct moe_train_key key = {weight, 0, part, tensor};
    struct moe_train_place place;
    return moe_train_find(&spec, config, &key, floats * sizeof(float), &place).code;
}

static void keys_say_what_there_is(void **state)
{
    (void)state;
    struct moe_trainer_config c = {.optimizer = MOE_OPTIMIZER_SGD};
    const enum moe_train_part w = MOE_PART_WEIGHT;
    assert_int_equal(find(&c, MOE_WEIGHT_UP, w, MOE_TRAIN_GRAD, 48 * 64), MOE_OK);
    assert_int_equal(find(&c, MOE_WEIGHT_UP, w, MOE_TRAIN_GRAD, 48 * 64 - 1), MOE_INVALID_ARGUMENT);
    assert_int_equal(find(&c, MOE_WEIGHT_UP, w, MOE_TRAIN_MOMENT2, 48 * 64), MOE_NOT_FOUND);
    assert_int_equal(find(&c, MOE_WEIGHT_UP, MOE_PART_LORA_A, MOE_TRAIN_VALUE, 1), MOE_NOT_FOUND);
    assert_int_equal(find(&c, MOE_WEIGHT_SELECT_BIAS, w, MOE_TRAIN_VALUE, 8), MOE_OK);
    assert_int_equal(find(&c, MOE_WEIGHT_SELECT_BIAS, w, MOE_TRAIN_GRAD, 8), MOE_NOT_FOUND);
    assert_int_equal(find(&c, MOE_WEIGHT_DOWN_BIAS, w, MOE_TRAIN_VALUE, 64), MOE_NOT_FOUND);
    assert_int_equal(find(&c, MOE_WEIGHT_COUNT, w, MOE_TRAIN_VALUE, 8), MOE_INVALID_ARGUMENT);
    c.frozen = 1u << MOE_PARAMS_EXPERTS;
    assert_int_equal(find(&c, MOE_WEIGHT_UP, w, MOE_TRAIN_VALUE, 48 * 64), MOE_OK);
    assert_int_equal(find(&c, MOE_WEIGHT_UP, w, MOE_TRAIN_MOMENT1, 48 * 64), MOE_NOT_FOUND);
}

static void impossible_configurations_are_refused(void **state)
{
    (void)state;
    struct moe_layer_spec spec = some_spec();
    const struct moe_trainer_config good = {.optimizer = MOE_OPTIMIZER_ADAMW,
                                            .lora_rank = 48,
                                            .lora_alpha = 1,
                                            .lora_targets = MOE_LORA_GATE};
    assert_ok(moe_trainer_check(&spec, &good));
    struct moe_trainer_config bad[5] = {good, good, good, good, good};
    bad[0].optimizer = 3;
    bad[1].frozen = 8;
    bad[2].lora_rank = 49;
    bad[3].lora_targets = 0;
    bad[4].lora_alpha = INFINITY;
    for (int i = 0; i < 5; i++)
        assert_int_equal(moe_trainer_check(&spec, &bad[i]).code, MOE_INVALID_ARGUMENT);
    struct moe_layer_spec latent = spec, situ = spec, shared = spec, ungated = spec, wide = spec,
                          mixer = spec;
    latent.latent = 32;
    situ.activation = shared.shared_activation = MOE_ACT_SITU;
    assert_int_equal(moe_trainer_check(&latent, &good).code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_trainer_check(&situ, &good).code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_trainer_check(&shared, &good).code, MOE_INVALID_ARGUMENT);
    ungated.activation = MOE_ACT_RELU2;
    wide.router.top_k = MOE_COMMON_TOP_K + 1;
    mixer.router.score = MOE_SCORE_SPARSEMIXER;
    assert_int_equal(moe_trainer_check(&ungated, &good).code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_trainer_check(&wide, &good).code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_trainer_check(&mixer, &good).code, MOE_INVALID_ARGUMENT);
    assert_int_equal(moe_train_check_frozen(&good, 8).code, MOE_INVALID_ARGUMENT);
    assert_ok(moe_train_check_frozen(&good, 7));
    const struct moe_trainer_config frozen = {.frozen = 2};
    assert_int_equal(moe_train_check_frozen(&frozen, 1).code, MOE_FAILED_PRECONDITION);
}

static void impossible_hyper_parameters_are_refused(void **state)
{
    (void)state;
    const struct moe_optimizer_args good = {.learning_rate = 1e-3,
                                            .beta1 = 0.9,
                                            .beta2 = 0.999,
                                            .epsilon = 1e-8,
                                            .grad_scale = 1,
                                            .number = 1};
    assert_ok(moe_optimizer_check(MOE_OPTIMIZER_ADAMW, &good));
    struct moe_optimizer_args bad[7] = {good, good, good, good, good, good, good};
    bad[0].learning_rate = NAN;
    bad[1].beta1 = 1;
    bad[2].beta2 = -0.1;
    bad[3].grad_scale = 0;
    bad[4].number = 0;
    bad[5].max_grad_norm = -1;
    bad[6].weight_decay = INFINITY;
    for (int i = 0; i < 7; i++)
        assert_int_equal(moe_optimizer_check(MOE_OPTIMIZER_ADAMW, &bad[i]).code,
                         MOE_INVALID_ARGUMENT);
}

static void first_values_of_adapters_are_spread_evenly_and_depend_on_their_place(void **state)
{
    (void)state;
    enum { N = 100000, IN = 256 };
    double sum = 0, squares = 0, bound = 1 / sqrt(IN);
    for (uint64_t i = 0; i < N; i++) {
        double v = (double)moe_lora_initial(7, 1, 2, MOE_WEIGHT_UP, i, IN);
        assert_true(v >= -bound && v <= bound);
        sum += v / bound;
        squares += v * v / (bound * bound);
    }
    assert_true(fabs(sum / (double)N) < 0.01);
    assert_true(fabs(squares / (double)N - 1.0 / 3) < 0.01);
    float here = moe_lora_initial(7, 1, 2, MOE_WEIGHT_UP, 5, IN);
    assert_true(here == moe_lora_initial(7, 1, 2, MOE_WEIGHT_UP, 5, IN));
    assert_true(here != moe_lora_initial(8, 1, 2, MOE_WEIGHT_UP, 5, IN));
    assert_true(here != moe_lora_initial(7, 2, 2, MOE_WEIGHT_UP, 5, IN));
    assert_true(here != moe_lora_initial(7, 1, 3, MOE_WEIGHT_UP, 5, IN));
    assert_true(here != moe_lora_initial(7, 1, 2, MOE_WEIGHT_GATE, 5, IN));
}

static void scalars_are_those_of_the_header(void **state)
{
    (void)state;
    struct moe_layer_spec spec = some_spec();
    assert_true(moe_clip_factor(5, 0) == 1 && moe_clip_factor(0.5, 1) == 1);
    assert_true(fabs(moe_clip_factor(4, 1) - 1 / 4.000001) < 1e-12);
    /* counts 5, 2, 1, 2: the mean is 2.5 */
    const double want[] = {-0.01, 0.01, 0.01, 0.01};
    const uint64_t loads[] = {5, 2, 1, 2};
    for (int e = 0; e < 4; e++)
        assert_true(moe_balance_change(0.01, loads[e], 10, 4) == want[e]);
    assert_true(moe_balance_change(0.01, 0, 0, 4) == 0);
    assert_true(moe_aux_constant(&spec, 0.5f, 0) == 0);
    assert_true(fabs(moe_aux_constant(&spec, 0.5f, 4) - 0.5 * 8 / (2 * 16)) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trainer_has_every_weight_but_the_selection_bias),
        cmocka_unit_test(adapters_take_the_place_of_all_weights_of_an_expert),
        cmocka_unit_test(keys_say_what_there_is),
        cmocka_unit_test(impossible_configurations_are_refused),
        cmocka_unit_test(impossible_hyper_parameters_are_refused),
        cmocka_unit_test(first_values_of_adapters_are_spread_evenly_and_depend_on_their_place),
        cmocka_unit_test(scalars_are_those_of_the_header),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
