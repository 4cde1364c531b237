/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of layer creation and upload: errors name the weight, and an incomplete layer never
 * runs.
 */
#include "kernels_fixture.h"

static const uint32_t three_offsets[] = {0, 1, 3, 4};
static const uint16_t three_slots[] = {1, 0, 2, 2}; /* 0 -> {1}, 1 -> {0, 2}, 2 -> {2} */

static struct moe_placement three_experts(void)
{
    return (struct moe_placement){
        .version = 9, .experts = 3, .slots = 3, .offset = three_offsets, .slot = three_slots};
}

static struct moe_layer_spec three_spec(void)
{
    struct moe_layer_spec spec = plain_spec();
    spec.experts = 3;
    spec.router.select_bias = true;
    spec.down_bias = true;
    return spec;
}

static struct moe_status upload_ones(struct moe_layer *layer, enum moe_weight w, uint32_t expert,
                                     size_t count)
{
    static const float ones[64] = {1, 1, 1};
    return moe_cpu_layer_upload(layer, w, expert, MOE_DTYPE_F32, ones, count * sizeof(float));
}

static void a_layer_knows_its_local_experts(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = three_spec();
    struct moe_placement placement = three_experts();
    struct moe_layer *layer;
    assert_ok(moe_cpu_layer_create(device, &spec, &placement, 2, &layer));
    assert_int_equal(layer->local_experts, 2);
    assert_int_equal(layer->local[0], 1);
    assert_int_equal(layer->local[1], 2);
    assert_int_equal(layer->local_index[0], -1);
    assert_int_equal(layer->local_index[2], 1);
    assert_ptr_not_equal(layer->placement.offset, placement.offset);
    assert_int_equal(layer->placement.slot[2], 2);
    moe_cpu_layer_destroy(layer);
    moe_cpu_device_close(device);
}

static void upload_expert(struct moe_layer *layer, const struct moe_layer_spec *spec,
                          uint32_t expert)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(spec, w, &rows, &columns);
        bool wanted = moe_weight_is_expert(w) ? expert != UINT32_MAX : expert == UINT32_MAX;
        if (rows > 0 && wanted)
            assert_ok(upload_ones(layer, w, expert, rows * columns));
    }
}

static uint64_t bytes_of(struct moe_device *device)
{
    struct moe_device_info info;
    moe_cpu_device_info(device, &info);
    return info.used_bytes;
}

/* Slot 2 has experts 1 and 2, and gets 0 and 2: it shares 2, and frees 1 when the old layer goes.
 * In the other order the old layer keeps what it has. */
static void a_layer_passes_shared_weights_to_its_successor(void **state)
{
    (void)state;
    static const uint32_t offset[] = {0, 1, 2, 3};
    static const uint16_t slot[] = {2, 0, 2};
    const struct moe_placement next = {
        .version = 2, .experts = 3, .slots = 3, .offset = offset, .slot = slot};
    for (int successor_first = 0; successor_first < 2; successor_first++) {
        struct moe_device *device = open_device(NULL, 1);
        struct moe_layer_spec spec = three_spec();
        struct moe_placement placement = three_experts();
        struct moe_layer *layer, *heir, *third;
        assert_ok(moe_cpu_layer_create(device, &spec, &placement, 2, &layer));
        assert_refused(moe_cpu_layer_succeed(layer, &next, &heir), MOE_FAILED_PRECONDITION,
                       MOE_REASON_UNSUPPORTED);
        upload_expert(layer, &spec, UINT32_MAX);
        upload_expert(layer, &spec, 1);
        upload_expert(layer, &spec, 2);
        assert_ok(moe_cpu_layer_finish(layer));
        uint64_t before = bytes_of(device);
        assert_ok(moe_cpu_layer_succeed(layer, &next, &heir));
        assert_refused(moe_cpu_layer_succeed(layer, &next, &third), MOE_FAILED_PRECONDITION,
                       MOE_REASON_UNSUPPORTED);
        assert_ptr_equal(heir->matrix[MOE_WEIGHT_UP][1].data, layer->matrix[MOE_WEIGHT_UP][1].data);
        assert_refused(moe_cpu_layer_finish(heir), MOE_FAILED_PRECONDITION,
                       MOE_REASON_TENSOR_MISSING);
        assert_refused(upload_ones(heir, MOE_WEIGHT_GATE, 2, 16), MOE_ALREADY_EXISTS,
                       MOE_REASON_TENSOR_INVALID);
        upload_expert(heir, &spec, 0);
        assert_ok(moe_cpu_layer_finish(heir));
        assert_true(bytes_of(device) > before);
        moe_cpu_layer_destroy(successor_first ? heir : layer);
        assert_int_equal(bytes_of(device), before); /* as many experts as before */
        struct moe_layer *left = successor_first ? layer : heir;
        assert_ok(moe_cpu_layer_succeed(left, successor_first ? &next : &placement, &third));
        moe_cpu_layer_destroy(third);
        moe_cpu_layer_destroy(left);
        assert_int_equal(bytes_of(device), 0);
        moe_cpu_device_close(device);
    }
}

static void uploads_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = three_spec();
    struct moe_placement placement = three_experts();
    struct moe_layer *layer;
    assert_ok(moe_cpu_layer_create(device, &spec, &placement, 2, &layer));
    assert_refused(upload_ones(layer, MOE_WEIGHT_GATE, 1, 15), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TENSOR_INVALID);
    assert_refused(upload_ones(layer, MOE_WEIGHT_GATE, 0, 16), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TENSOR_INVALID);
    assert_refused(upload_ones(layer, MOE_WEIGHT_GATE, 3, 16), MOE_INVALID_ARGUMENT,
                   MOE_REASON_EXPERT_INDEX_RANGE);
    assert_refused(upload_ones(layer, MOE_WEIGHT_LOGIT_BIAS, 0, 3), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TENSOR_INVALID);
    assert_refused(upload_ones(layer, MOE_WEIGHT_COUNT, 0, 3), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TENSOR_INVALID);
    assert_refused(moe_cpu_layer_upload(layer, MOE_WEIGHT_GATE, 1, MOE_DTYPE_NONE, "", 0),
                   MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED);
    assert_ok(upload_ones(layer, MOE_WEIGHT_GATE, 1, 16));
    assert_refused(upload_ones(layer, MOE_WEIGHT_GATE, 1, 16), MOE_ALREADY_EXISTS,
                   MOE_REASON_TENSOR_INVALID);
    moe_cpu_layer_destroy(layer);
    moe_cpu_device_close(device);
}

static void a_layer_with_any_weight_missing_does_not_run(void **state)
{
    (void)state;
    static const struct {
        enum moe_weight weight;
        uint32_t expert;
        size_t count;
    } all[] = {
        {MOE_WEIGHT_ROUTER, 0, 12},   {MOE_WEIGHT_SELECT_BIAS, 0, 3}, {MOE_WEIGHT_GATE, 1, 16},
        {MOE_WEIGHT_UP, 1, 16},       {MOE_WEIGHT_DOWN, 1, 16},       {MOE_WEIGHT_DOWN_BIAS, 1, 4},
        {MOE_WEIGHT_GATE, 2, 16},     {MOE_WEIGHT_UP, 2, 16},         {MOE_WEIGHT_DOWN, 2, 16},
        {MOE_WEIGHT_DOWN_BIAS, 2, 4},
    };
    const size_t n = sizeof all / sizeof *all;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = three_spec();
    struct moe_placement placement = three_experts();
    for (size_t missing = 0; missing < n; missing++) {
        struct moe_layer *layer;
        assert_ok(moe_cpu_layer_create(device, &spec, &placement, 2, &layer));
        for (size_t i = 0; i < n; i++)
            if (i != missing)
                assert_ok(upload_ones(layer, all[i].weight, all[i].expert, all[i].count));
        assert_refused(moe_cpu_layer_finish(layer), MOE_FAILED_PRECONDITION,
                       MOE_REASON_TENSOR_MISSING);
        struct moe_rows none = {0};
        assert_refused(moe_cpu_gemm_gate_up(layer, MOE_DTYPE_F32, &none, NULL),
                       MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING);
        assert_refused(moe_cpu_router_forward(layer, MOE_DTYPE_F32, 0, NULL, NULL, NULL, NULL, NULL,
                                              NULL, NULL),
                       MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING);
        assert_ok(upload_ones(layer, all[missing].weight, all[missing].expert, all[missing].count));
        assert_ok(moe_cpu_layer_finish(layer));
        assert_refused(upload_ones(layer, MOE_WEIGHT_ROUTER, 0, 12), MOE_FAILED_PRECONDITION,
                       MOE_REASON_TENSOR_INVALID);
        moe_cpu_layer_destroy(layer);
    }
    struct moe_device_info info;
    moe_cpu_device_info(device, &info);
    assert_int_equal(info.used_bytes, 0);
    moe_cpu_device_close(device);
}

static void impossible_specs_are_refused(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_placement placement = three_experts();
    struct moe_layer_spec bad[29];
    size_t n = 0;
#define BAD(field, value)                                                                          \
    do {                                                                                           \
        bad[n] = three_spec();                                                                     \
        bad[n++].field = (value);                                                                  \
    } while (0)
    BAD(hidden, 0);
    BAD(hidden, MOE_MAX_HIDDEN + 1);
    BAD(experts, 4);
    BAD(intermediate, 0);
    BAD(router.top_k, 0);
    BAD(router.top_k, 4);
    BAD(router.groups, 2);
    BAD(router.topk_group, 2);
    BAD(router.scale, NAN);
    BAD(router.renorm_eps, -1.0f);
    BAD(router.score, 99);
    BAD(weighting, 99);
    BAD(activation, 99);
    BAD(shared_gated, true);
    bad[n] = three_spec();
    bad[n].router.groups = 3;
    bad[n++].router.group_best = 2;
    bad[n] = three_spec();
    bad[n].router.groups = 3;
    bad[n++].router.zero_experts = 1;
    bad[n] = three_spec();
    bad[n].router.by_token = true;
    bad[n++].router.select_bias = true;
    bad[n] = three_spec();
    bad[n].router.by_token = true;
    bad[n].router.group_best = 1;
    bad[n++].router.groups = 3;
    /* hidden is 4 */
    BAD(latent, 5);
    BAD(latent_norm, true);
    bad[n] = three_spec();
    bad[n].latent = 2;
    bad[n++].router.zero_experts = 1;
    for (int wrong = 0; wrong < 2; wrong++) {
        bad[n] = three_spec();
        bad[n].latent = 2;
        bad[n].latent_norm = true;
        bad[n++].latent_eps = wrong == 0 ? 0 : NAN;
    }
    for (int wrong = 0; wrong < 3; wrong++) {
        bad[n] = three_spec();
        bad[n].activation = MOE_ACT_SITU;
        bad[n].swiglu_alpha = wrong == 0 ? 0 : wrong == 1 ? -4 : 4;
        bad[n++].swiglu_limit = wrong == 2 ? 0 : 25;
    }
    for (int wrong = 0; wrong < 3; wrong++) {
        bad[n] = three_spec();
        bad[n].router.score = MOE_SCORE_SPARSEMIXER;
        bad[n].router.top_k = wrong == 0 ? 1 : 2;
        bad[n++].router.jitter = wrong == 1 ? 0 : wrong == 2 ? NAN : 0.01f;
    }
#undef BAD
    struct moe_layer *layer;
    for (size_t i = 0; i < n; i++)
        assert_refused(moe_cpu_layer_create(device, &bad[i], &placement, 0, &layer),
                       MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    moe_cpu_device_close(device);
}

static void impossible_placements_are_refused(void **state)
{
    (void)state;
    struct moe_device *device = open_device(NULL, 1);
    struct moe_layer_spec spec = three_spec();
    static const uint32_t falling[] = {0, 3, 2, 4}, late[] = {1, 1, 3, 4};
    static const uint16_t beyond[] = {1, 0, 3, 2}, unordered[] = {1, 2, 0, 2};
    struct moe_placement bad[] = {three_experts(), three_experts(), three_experts(),
                                  three_experts(), three_experts()};
    bad[0].offset = falling;
    bad[1].offset = late;
    bad[2].slot = beyond;
    bad[3].slot = unordered;
    bad[4].slots = MOE_MAX_SLOTS + 1;
    struct moe_layer *layer;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(moe_cpu_layer_create(device, &spec, &bad[i], 0, &layer),
                       MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    struct moe_placement good = three_experts();
    assert_refused(moe_cpu_layer_create(device, &spec, &good, 3, &layer), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    moe_cpu_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layer_knows_its_local_experts),
        cmocka_unit_test(a_layer_passes_shared_weights_to_its_successor),
        cmocka_unit_test(uploads_that_do_not_fit_are_refused),
        cmocka_unit_test(a_layer_with_any_weight_missing_does_not_run),
        cmocka_unit_test(impossible_specs_are_refused),
        cmocka_unit_test(impossible_placements_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
