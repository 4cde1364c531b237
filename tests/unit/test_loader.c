/* SPDX-License-Identifier: Apache-2.0 */
/* A model directory is loaded: every weight arrives once, in canonical form,
 * whatever the layout on disk, and nothing is read that was not asked for. */
#include "small_model.h"
#include "support/golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A taker who reads for itself, a few bytes at a time and from the end. */
static struct moe_status read_and_deliver(void *ctx, enum moe_weight weight, uint32_t expert,
                                          enum moe_dtype dtype,
                                          const struct moe_weight_source *source, size_t bytes)
{
    const size_t piece = 7;
    char *data = malloc(bytes);
    assert_non_null(data);
    for (size_t first = (bytes - 1) / piece * piece;; first -= piece) {
        size_t n = bytes - first < piece ? bytes - first : piece;
        assert_ok(source->read(source->ctx, source->at + first, n, data + first));
        if (first == 0)
            break;
    }
    struct moe_status st = deliveries_sink(ctx, weight, expert, dtype, data, bytes);
    free(data);
    return st;
}

/* Both ways of loading, which must agree. */
static void load(const struct moe_model *m, size_t layer, const uint32_t *experts, size_t count,
                 struct deliveries *d)
{
    struct deliveries other = {0};
    assert_ok(
        moe_model_load_layer(m, layer, experts, count, deliveries_sink, d, deliveries_progress, d));
    assert_int_equal(d->read_bytes, moe_model_layer_bytes(m, layer, experts, count));
    struct moe_model_sources sources = {0};
    const struct moe_model_sinks sinks = {
        .weight = deliveries_sink, .source = read_and_deliver, .ctx = &other, .sources = &sources};
    assert_ok(moe_model_stream_layer(m, layer, experts, count, &sinks, NULL, deliveries_progress,
                                     &other));
    moe_model_sources_free(&sources);
    assert_int_equal(other.read_bytes, d->read_bytes);
    uint64_t given = 0;
    for (size_t i = 0; i < d->count; i++)
        given += d->list[i].bytes;
    assert_int_equal(moe_model_layer_memory(m, layer, experts, count), given);
    assert_int_equal(other.count, d->count);
    for (size_t i = 0; i < d->count; i++) {
        const struct delivery *a = &d->list[i], *b = &other.list[i];
        assert_true(a->weight == b->weight && a->expert == b->expert && a->dtype == b->dtype);
        assert_int_equal(a->bytes, b->bytes);
        assert_memory_equal(a->data, b->data, a->bytes);
    }
    deliveries_free(&other);
}

static float element(const struct delivery *d, size_t i)
{
    float v;
    if (d->dtype == MOE_DTYPE_F32) {
        memcpy(&v, (const char *)d->data + 4 * i, 4);
        return v;
    }
    uint16_t b;
    memcpy(&b, (const char *)d->data + 2 * i, 2);
    return moe_bf16_to_f32(b);
}

/* Element (r, c) of `weight` [rows, columns] must be first + r * row_step + c * column_step. */
static void check_values(const struct deliveries *d, enum moe_weight weight, uint32_t expert,
                         size_t rows, size_t columns, size_t first, size_t row_step,
                         size_t column_step)
{
    const struct delivery *w = deliveries_find(d, weight, expert);
    assert_int_equal(w->bytes, rows * columns * moe_dtype_bytes(w->dtype));
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            if (element(w, r * columns + c) != (float)(first + r * row_step + c * column_step))
                fail_msg("weight %d, expert %u, (%zu, %zu) is %g", weight, expert, r, c,
                         (double)element(w, r * columns + c));
}

/* ---- golden models ---- */

/* Every weight that the spec announces, and no other, with the size that the spec gives. */
static void check_complete(const struct moe_layer_spec *s, const uint32_t *experts, size_t count,
                           const struct deliveries *d)
{
    size_t expected = 0;
    for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        enum moe_weight weight = (enum moe_weight)w;
        moe_weight_shape(s, weight, &rows, &columns);
        size_t copies = rows == 0 ? 0 : moe_weight_is_expert(weight) ? count : 1;
        for (size_t i = 0; i < copies; i++) {
            const struct delivery *got =
                deliveries_find(d, weight, moe_weight_is_expert(weight) ? experts[i] : 0);
            if (moe_weight_is_expert(weight))
                assert_int_equal(got->dtype, MOE_DTYPE_BF16);
            assert_int_equal(got->bytes, rows * columns * moe_dtype_bytes(got->dtype));
        }
        expected += copies;
    }
    assert_int_equal(d->count, expected);
}

static void check_models(const char *directory)
{
    struct golden_models models;
    static const uint32_t experts[] = {1, 3, 6};
    golden_models_list(directory, &models);
    for (size_t i = 0; i < models.count; i++) {
        char path[512];
        struct moe_model *m;
        snprintf(path, sizeof path, "%s/%s/", directory, models.names[i]);
        assert_ok(moe_model_open(path, &m));
        assert_string_equal(moe_model_name(m), models.names[i]);
        for (size_t l = 0; l < moe_model_layer_count(m); l++) {
            struct deliveries some = {0}, none = {0};
            load(m, l, experts, 3, &some);
            check_complete(moe_model_layer(m, l), experts, 3, &some);
            load(m, l, NULL, 0, &none);
            check_complete(moe_model_layer(m, l), NULL, 0, &none);
            deliveries_free(&some);
            deliveries_free(&none);
        }
        print_message("    %s: %zu layers, %.16s...\n", moe_model_family(m),
                      moe_model_layer_count(m), moe_model_fingerprint(m));
        moe_model_close(m);
    }
}

static void every_golden_layer_delivers_each_weight_once(void **state)
{
    (void)state;
    check_models(MOE_GOLDEN_DIR);
    check_models(MOE_QUANTISED_DIR);
    check_models(MOE_NUMPY_DIR);
    check_models(MOE_UNCOMMON_DIR);
}

static uint16_t *read_golden(const char *family, const char *tensor)
{
    char path[512];
    struct moe_st_file *file;
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s/model.safetensors", family);
    assert_ok(moe_st_open(path, &file));
    const struct moe_tensor *t = moe_st_find(file, tensor);
    assert_non_null(t);
    uint16_t *data = malloc((size_t)t->bytes);
    assert_non_null(data);
    assert_ok(moe_st_read(file, t, 0, t->bytes, data));
    moe_st_close(file);
    return data;
}

static void load_golden(const char *family, uint32_t expert, struct deliveries *d)
{
    char path[512];
    struct moe_model *m;
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s", family);
    assert_ok(moe_model_open(path, &m));
    load(m, moe_model_layer_count(m) - 1, &expert, 1, d);
    moe_model_close(m);
}

static void golden_weights_arrive_bit_by_bit(void **state)
{
    (void)state;
    static const struct {
        const char *family, *tensor;
        enum moe_weight weight;
    } cases[] = {
        {"mixtral", "model.layers.1.block_sparse_moe.gate.weight", MOE_WEIGHT_ROUTER},
        {"mixtral", "model.layers.1.block_sparse_moe.experts.5.w1.weight", MOE_WEIGHT_GATE},
        {"mixtral", "model.layers.1.block_sparse_moe.experts.5.w3.weight", MOE_WEIGHT_UP},
        {"mixtral", "model.layers.1.block_sparse_moe.experts.5.w2.weight", MOE_WEIGHT_DOWN},
        {"minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias",
         MOE_WEIGHT_SELECT_BIAS},
        {"deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", MOE_WEIGHT_SELECT_BIAS},
        {"deepseek_v3", "model.layers.1.mlp.experts.5.gate_proj.weight", MOE_WEIGHT_GATE},
        {"deepseek_v2", "model.layers.1.mlp.shared_experts.down_proj.weight",
         MOE_WEIGHT_SHARED_DOWN},
        {"qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight",
         MOE_WEIGHT_SHARED_GATE_VECTOR},
        {"qwen2_moe", "model.layers.1.mlp.shared_expert.gate_proj.weight", MOE_WEIGHT_SHARED_GATE},
        {"ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias",
         MOE_WEIGHT_SELECT_BIAS},
        {"gpt_oss", "model.layers.1.mlp.router.bias", MOE_WEIGHT_LOGIT_BIAS},
        {"llama4", "model.layers.1.feed_forward.shared_expert.up_proj.weight",
         MOE_WEIGHT_SHARED_UP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct deliveries d = {0};
        load_golden(cases[i].family, 5, &d);
        const struct delivery *got =
            deliveries_find(&d, cases[i].weight, moe_weight_is_expert(cases[i].weight) ? 5 : 0);
        uint16_t *want = read_golden(cases[i].family, cases[i].tensor);
        assert_memory_equal(got->data, want, got->bytes);
        free(want);
        deliveries_free(&d);
    }
}

/* GPT-OSS: [E, H, 2I] with gate in even and up in odd columns. */
static void gpt_oss_columns_alternate(void **state)
{
    (void)state;
    enum { GH = 64, GI = 64, EXPERT = 5 };
    struct deliveries d = {0};
    load_golden("gpt_oss", EXPERT, &d);
    uint16_t *gate_up = read_golden("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj");
    uint16_t *down = read_golden("gpt_oss", "model.layers.1.mlp.experts.down_proj");
    uint16_t *bias = read_golden("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias");
    uint16_t *down_bias = read_golden("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias");
    const uint16_t *gate = deliveries_find(&d, MOE_WEIGHT_GATE, EXPERT)->data;
    const uint16_t *up = deliveries_find(&d, MOE_WEIGHT_UP, EXPERT)->data;
    const uint16_t *dn = deliveries_find(&d, MOE_WEIGHT_DOWN, EXPERT)->data;
    const uint16_t *gate_bias = deliveries_find(&d, MOE_WEIGHT_GATE_BIAS, EXPERT)->data;
    const uint16_t *up_bias = deliveries_find(&d, MOE_WEIGHT_UP_BIAS, EXPERT)->data;
    for (size_t i = 0; i < GI; i++) {
        for (size_t h = 0; h < GH; h++) {
            size_t at = (EXPERT * GH + h) * 2 * GI + 2 * i;
            assert_int_equal(gate[i * GH + h], gate_up[at]);
            assert_int_equal(up[i * GH + h], gate_up[at + 1]);
            assert_int_equal(dn[h * GI + i], down[(EXPERT * GI + i) * GH + h]);
        }
        assert_int_equal(gate_bias[i], bias[EXPERT * 2 * GI + 2 * i]);
        assert_int_equal(up_bias[i], bias[EXPERT * 2 * GI + 2 * i + 1]);
    }
    assert_memory_equal(deliveries_find(&d, MOE_WEIGHT_DOWN_BIAS, EXPERT)->data,
                        down_bias + EXPERT * GH, GH * 2);
    free(gate_up);
    free(down);
    free(bias);
    free(down_bias);
    deliveries_free(&d);
}

/* Llama-4: [E, H, 2I] with the gate half first. */
static void llama4_columns_are_halves(void **state)
{
    (void)state;
    enum { LH = 64, LI = 48, EXPERT = 3 };
    struct deliveries d = {0};
    load_golden("llama4", EXPERT, &d);
    uint16_t *gate_up = read_golden("llama4", "model.layers.1.feed_forward.experts.gate_up_proj");
    uint16_t *down = read_golden("llama4", "model.layers.1.feed_forward.experts.down_proj");
    const uint16_t *gate = deliveries_find(&d, MOE_WEIGHT_GATE, EXPERT)->data;
    const uint16_t *up = deliveries_find(&d, MOE_WEIGHT_UP, EXPERT)->data;
    const uint16_t *dn = deliveries_find(&d, MOE_WEIGHT_DOWN, EXPERT)->data;
    for (size_t i = 0; i < LI; i++) {
        for (size_t h = 0; h < LH; h++) {
            size_t at = (EXPERT * LH + h) * 2 * LI + i;
            assert_int_equal(gate[i * LH + h], gate_up[at]);
            assert_int_equal(up[i * LH + h], gate_up[at + LI]);
            assert_int_equal(dn[h * LI + i], down[(EXPERT * LI + i) * LH + h]);
        }
    }
    free(gate_up);
    free(down);
    deliveries_free(&d);
}

/* ---- fused layouts ---- */

static void check_fused(const struct fixture *f, const char *config, const char *prefix, size_t h,
                        size_t i, bool transposed)
{
    static const uint32_t experts[] = {0, 2, 3};
    uint32_t first, second;
    make_fused_model(f, config, prefix, h, i, transposed, &first, &second);
    struct moe_model *m = open_model(f);
    struct deliveries d = {0};
    load(m, 0, experts, 3, &d);
    for (size_t n = 0; n < 3; n++) {
        uint32_t e = experts[n];
        size_t g = first + e * 2 * i * h, o = second + e * i * h;
        size_t up = transposed ? g + i : g + i * h;
        size_t step = transposed ? 1 : h, column = transposed ? 2 * i : 1;
        check_values(&d, MOE_WEIGHT_GATE, e, i, h, g, step, column);
        check_values(&d, MOE_WEIGHT_UP, e, i, h, up, step, column);
        check_values(&d, MOE_WEIGHT_DOWN, e, h, i, o, transposed ? 1 : i, transposed ? h : 1);
    }
    check_values(&d, MOE_WEIGHT_ROUTER, 0, E, h, 0, h, 1);
    /* Router, and three experts' worth of both tensors; nothing twice, nothing else. */
    assert_int_equal(d.read_bytes, 4 * (E * h + 3 * 3 * i * h));
    deliveries_free(&d);
    moe_model_close(m);
}

#define INSIDE(type, h, i)                                                                         \
    "{\"model_type\":\"" type "\",\"text_config\":" CONFIG(type "_text", h, i, "") "}"

static void fused_experts_are_cut_out(void **state)
{
    check_fused(*state, INSIDE("qwen3_vl_moe", 6, 5), "model.language_model.layers.", 6, 5, false);
}

static void fused_and_transposed_experts_are_turned(void **state)
{
    check_fused(*state, INSIDE("qwen3_vl_moe", 6, 5), "model.language_model.layers.", 6, 5, true);
    check_fused(*state, CONFIG("qwen3_moe", 6, 5, ""), "model.layers.", 6, 5, true);
}

/* Sizes at which one of the two tensors looks the same both ways. */
static void square_fused_tensors_are_recognised_by_the_other_one(void **state)
{
    check_fused(*state, CONFIG("qwen3_moe", 6, 6, ""), "model.layers.", 6, 6, true);
    check_fused(*state, CONFIG("qwen3_moe", 6, 6, ""), "model.layers.", 6, 6, false);
    check_fused(*state, CONFIG("qwen3_moe", 6, 3, ""), "model.layers.", 6, 3, true);
    check_fused(*state, CONFIG("qwen3_moe", 6, 3, ""), "model.layers.", 6, 3, false);
}

/* Wider than a tile in both directions, with edges. */
static void large_transposed_experts_are_turned(void **state)
{
    check_fused(*state, CONFIG("qwen3_moe", 71, 45, ""), "model.layers.", 71, 45, true);
}

static void qwen3_5_with_a_gated_shared_expert(void **state)
{
    struct tensors t = {0};
    const char *p = "model.language_model.layers.";
    for (int l = 0; l < 2; l++) {
        tensors_add(&t, MOE_ST_BF16, 2, (uint64_t[]){E, H}, "%s%d.mlp.gate.weight", p, l);
        tensors_add(&t, MOE_ST_BF16, 3, (uint64_t[]){E, 2 * I, H}, "%s%d.mlp.experts.gate_up_proj",
                    p, l);
        tensors_add(&t, MOE_ST_BF16, 3, (uint64_t[]){E, H, I}, "%s%d.mlp.experts.down_proj", p, l);
        tensors_add(&t, MOE_ST_BF16, 2, (uint64_t[]){7, H},
                    "%s%d.mlp.shared_expert.gate_proj.weight", p, l);
        tensors_add(&t, MOE_ST_BF16, 2, (uint64_t[]){7, H}, "%s%d.mlp.shared_expert.up_proj.weight",
                    p, l);
        tensors_add(&t, MOE_ST_BF16, 2, (uint64_t[]){H, 7},
                    "%s%d.mlp.shared_expert.down_proj.weight", p, l);
        tensors_add(&t, MOE_ST_BF16, 2, (uint64_t[]){1, H}, "%s%d.mlp.shared_expert_gate.weight", p,
                    l);
    }
    tensors_write(&t, *state, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(*state, "config.json",
                       "{\"model_type\":\"qwen3_5_moe\",\"text_config\":{\"hidden_size\":6,"
                       "\"moe_intermediate_size\":5,\"shared_expert_intermediate_size\":7,"
                       "\"num_hidden_layers\":2,\"num_experts\":4,\"num_experts_per_tok\":2}}");
    struct moe_model *m = open_model(*state);
    assert_int_equal(moe_model_layer_count(m), 2);
    struct deliveries d = {0};
    load(m, 1, (uint32_t[]){2}, 1, &d);
    check_complete(moe_model_layer(m, 1), (uint32_t[]){2}, 1, &d);
    deliveries_free(&d);
    moe_model_close(m);
}

/* DeepSeek-V4 names, without the `model.` prefix; LongCat names, with zero experts. */
static void families_with_names_of_their_own(void **state)
{
    struct tensors t = {0};
    tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){E, H}, "layers.0.ffn.gate.weight");
    tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){E}, "layers.0.ffn.gate.bias");
    for (int e = -1; e < E; e++) {
        char who[32];
        if (e < 0)
            snprintf(who, sizeof who, "shared_experts");
        else
            snprintf(who, sizeof who, "experts.%d", e);
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){I, H}, "layers.0.ffn.%s.w1.weight", who);
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){I, H}, "layers.0.ffn.%s.w3.weight", who);
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){H, I}, "layers.0.ffn.%s.w2.weight", who);
    }
    tensors_write(&t, *state, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(*state, "config.json",
                       "{\"model_type\":\"deepseek_v4\",\"hidden_size\":6,"
                       "\"moe_intermediate_size\":5,\"num_hidden_layers\":1,\"num_hash_layers\":0,"
                       "\"n_routed_experts\":4,\"n_shared_experts\":1,\"num_experts_per_tok\":2,"
                       "\"routed_scaling_factor\":1.5}");
    struct moe_model *m = open_model(*state);
    struct deliveries d = {0};
    load(m, 0, (uint32_t[]){3}, 1, &d);
    check_values(&d, MOE_WEIGHT_SELECT_BIAS, 0, E, 1, E * H, 1, 1);
    check_values(&d, MOE_WEIGHT_SHARED_UP, 0, I, H, E * H + E + I * H, H, 1);
    check_values(&d, MOE_WEIGHT_DOWN, 3, H, I, E * H + E + 14 * I * H, I, 1);
    deliveries_free(&d);
    moe_model_close(m);

    enum { Z = 3 };
    tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){E + Z, H},
                "model.layers.0.mlp.router.classifier.weight");
    tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){E + Z},
                "model.layers.0.mlp.router.e_score_correction_bias");
    for (int e = 0; e < E; e++) {
        const char *p = "model.layers.0.mlp.experts.";
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){I, H}, "%s%d.gate_proj.weight", p, e);
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){I, H}, "%s%d.up_proj.weight", p, e);
        tensors_add(&t, MOE_ST_F32, 2, (uint64_t[]){H, I}, "%s%d.down_proj.weight", p, e);
    }
    tensors_write(&t, *state, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(*state, "config.json",
                       "{\"model_type\":\"longcat_flash\",\"hidden_size\":6,"
                       "\"expert_ffn_hidden_size\":5,\"num_layers\":1,\"n_routed_experts\":4,"
                       "\"zero_expert_num\":3,\"moe_topk\":2,\"routed_scaling_factor\":6.0}");
    m = open_model(*state);
    load(m, 0, (uint32_t[]){0}, 1, &d);
    check_values(&d, MOE_WEIGHT_ROUTER, 0, E + Z, H, 0, H, 1);
    check_values(&d, MOE_WEIGHT_SELECT_BIAS, 0, E + Z, 1, (E + Z) * H, 1, 1);
    deliveries_free(&d);
    moe_model_close(m);
}

/* ---- shards ---- */

static void shards_are_found_through_the_index(void **state)
{
    make_sharded_model(*state, "");
    struct moe_model *m = open_model(*state);
    struct deliveries d = {0};
    load(m, 0, (uint32_t[]){0, 1, 3}, 3, &d);
    check_values(&d, MOE_WEIGHT_GATE, 0, I, H, E * H, H, 1);
    check_values(&d, MOE_WEIGHT_DOWN, 1, H, I, E * H + 5 * I * H, I, 1);
    check_values(&d, MOE_WEIGHT_UP, 3, I, H, E * H + 10 * I * H, H, 1);
    deliveries_free(&d);
    moe_model_close(m);
}

/* The shard of the other experts loses its data after opening: who needs none of it is not hurt,
 * who does gets an error. */
static void only_the_bytes_of_the_asked_experts_are_read(void **state)
{
    make_sharded_model(*state, "");
    struct moe_model *m = open_model(*state);
    assert_int_equal(truncate(fixture_path(*state, "model-2.safetensors"), 64), 0);
    struct deliveries d = {0};
    load(m, 0, (uint32_t[]){0}, 1, &d);
    assert_int_equal(d.count, 4);
    assert_int_equal(d.progress_calls, 4);
    assert_int_equal(d.read_bytes, 4 * (E * H + 3 * I * H));
    check_reason(moe_model_load_layer(m, 0, (uint32_t[]){0, 2}, 2, deliveries_sink, &d, NULL, NULL),
                 MOE_REASON_TRUNCATED);
    deliveries_free(&d);
    moe_model_close(m);
}

/* ---- number formats ---- */

static double half_value(uint16_t h)
{
    int exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    double v = exponent == 0 ? ldexp(mantissa, -24) : ldexp(mantissa + 1024, exponent - 25);
    return h & 0x8000 ? -v : v;
}

/* All 65536 halves, as the 256 x 256 gate of one expert. */
static void f16_becomes_f32_exactly(void **state)
{
    enum { SIDE = 256 };
    struct tensors t = {0};
    add_router(&t, "model.layers.", SIDE);
    for (int e = 0; e < E; e++) {
        static const char *const names[] = {"gate", "up", "down"};
        for (int n = 0; n < 3; n++) {
            uint16_t *data =
                tensors_add(&t, MOE_ST_F16, 2, (uint64_t[]){SIDE, SIDE},
                            "model.layers.%d.mlp.experts.%d.%s_proj.weight", LAYER, e, names[n]);
            for (size_t i = 0; i < SIDE * SIDE; i++)
                data[i] = (uint16_t)i;
        }
    }
    tensors_write(&t, *state, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(*state, "config.json", CONFIG("qwen3_moe", 256, 256, ""));
    struct moe_model *m = open_model(*state);
    struct deliveries d = {0};
    load(m, 0, (uint32_t[]){1}, 1, &d);
    const struct delivery *gate = deliveries_find(&d, MOE_WEIGHT_GATE, 1);
    assert_int_equal(gate->dtype, MOE_DTYPE_F32);
    for (size_t i = 0; i < SIDE * SIDE; i++) {
        float v = element(gate, i);
        bool special = (i >> 10 & 31) == 31, negative = i >> 15 != 0;
        if (special && (i & 0x3ff) != 0)
            assert_true(isnan(v));
        else if (special)
            assert_true(isinf(v) && (signbit(v) != 0) == negative);
        else if ((double)v != half_value((uint16_t)i) || (signbit(v) != 0) != negative)
            fail_msg("half %04zx became %g", i, (double)v);
    }
    deliveries_free(&d);
    moe_model_close(m);
}

/* ---- ends ---- */

static struct moe_status failing_sink(void *ctx, enum moe_weight weight, uint32_t expert,
                                      enum moe_dtype dtype, const void *data, size_t bytes)
{
    (void)weight;
    (void)expert;
    (void)dtype;
    (void)data;
    (void)bytes;
    int *calls = ctx;
    return ++*calls < 3 ? moe_ok() : moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "enough");
}

static void bad_calls_and_a_failing_sink_end_the_load(void **state)
{
    make_plain_model(*state, MOE_ST_F32);
    struct moe_model *m = open_model(*state);
    int calls = 0;
    check_reason(
        moe_model_load_layer(m, 0, (uint32_t[]){0, 1}, 2, failing_sink, &calls, NULL, NULL),
        MOE_REASON_ABORTED);
    assert_int_equal(calls, 3);
    calls = 0;
    static const uint32_t bad[][2] = {{0, 4}, {1, 0}, {2, 2}, {0, UINT32_MAX}};
    for (size_t i = 0; i < 4; i++)
        check_reason(moe_model_load_layer(m, 0, bad[i], 2, failing_sink, &calls, NULL, NULL),
                     MOE_REASON_EXPERT_INDEX_RANGE);
    check_reason(moe_model_load_layer(m, 1, NULL, 0, failing_sink, &calls, NULL, NULL),
                 MOE_REASON_LAYER_NOT_FOUND);
    assert_int_equal(calls, 0);
    assert_null(moe_model_layer(m, 1));
    moe_model_close(m);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        TEST(every_golden_layer_delivers_each_weight_once),
        TEST(golden_weights_arrive_bit_by_bit),
        TEST(gpt_oss_columns_alternate),
        TEST(llama4_columns_are_halves),
        TEST(fused_experts_are_cut_out),
        TEST(fused_and_transposed_experts_are_turned),
        TEST(square_fused_tensors_are_recognised_by_the_other_one),
        TEST(large_transposed_experts_are_turned),
        TEST(qwen3_5_with_a_gated_shared_expert),
        TEST(families_with_names_of_their_own),
        TEST(shards_are_found_through_the_index),
        TEST(only_the_bytes_of_the_asked_experts_are_read),
        TEST(f16_becomes_f32_exactly),
        TEST(bad_calls_and_a_failing_sink_end_the_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
