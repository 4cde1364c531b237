/* SPDX-License-Identifier: Apache-2.0 */
/* The golden models through a backend, without daemons. Each checkpoint is loaded as in a worker,
 * and whole steps of one slot must give the numbers of transformers.
 *
 *     golden --backend cpu --models tests/golden/models
 *
 * F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm). Quantised matrices
 * stay as they are in all formats that the backend computes with, unless --weights is bf16. With
 * --fp8-compute w8a8, experts in FP8 quantise rows where config.json asks for it: then within 6e-2
 * of transformers' numbers, which come from rows as they are. Exits with 0 only when every layer of
 * every model is right. */
#include "golden_bench.h"

#include "daemon/options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

static void open_alone(struct golden_bench *b)
{
    struct moe_device_config device = {.settings = group_settings};
    struct moe_session_config config = {.slots = 1,
                                        .live = 1,
                                        .epoch = 1,
                                        .max_tokens = GOLDEN_BUCKET,
                                        .max_hidden = MOE_MAX_HIDDEN,
                                        .max_top_k = MOE_MAX_TOP_K,
                                        .max_experts = GOLDEN_EXPERTS,
                                        .wait_budget_ms = GOLDEN_BUDGET_MS,
                                        .allgather = gather_alone};
    b->slots = 1;
    golden_open(b, &device, &config);
}

/* One step; its relative error. */
static double run_step(struct golden_bench *b, enum moe_dtype dtype, uint32_t tokens, size_t n,
                       const float *x, const float *want)
{
    put_elements(b->x, dtype, n, x);
    golden_forward(b, dtype, tokens);
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)element(dtype, b->y, i) - (double)want[i];
        difference += d * d;
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static bool is_packed(const struct moe_layer_spec *spec)
{
    return moe_weight_format_of(spec, MOE_WEIGHT_GATE) != NULL ||
           moe_weight_format_of(spec, MOE_WEIGHT_SHARED_GATE) != NULL;
}

static bool is_w8a8(const struct moe_layer_spec *spec)
{
    return spec->routed_format.activations != MOE_ACTIVATIONS_PLAIN ||
           spec->shared_format.activations != MOE_ACTIVATIONS_PLAIN;
}

static bool check_layer(struct golden_bench *b, const struct moe_model *m, size_t i,
                        const struct moe_st_file *golden)
{
    static const uint32_t counts[] = {1, GOLDEN_TOKENS};
    static const struct {
        enum moe_dtype dtype;
        const char *name;
        double limit;
    } kinds[] = {{MOE_DTYPE_F32, "F32", 1e-5}, {MOE_DTYPE_BF16, "BF16", 1e-2}};
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    bool good = true;
    golden_load_layer(b, m, i);
    for (int c = 0; c < 2; c++) {
        size_t n = (size_t)counts[c] * spec->hidden;
        float *x = read_golden(golden, spec->layer, counts[c], "x", n);
        float *want =
            read_golden(golden, spec->layer, counts[c], is_packed(spec) ? "exact" : "y", n);
        for (int k = 0; k < 2; k++) {
            double error = run_step(b, kinds[k].dtype, counts[c], n, x, want);
            bool fits = error <= (is_w8a8(spec) ? 6e-2 : kinds[k].limit);
            good &= fits;
            printf("%-25s layer %u T %2u %-4s %s error %.1e%s\n", moe_model_name(m), spec->layer,
                   counts[c], kinds[k].name,
                   is_w8a8(spec)     ? "W8A8"
                   : is_packed(spec) ? "as stored"
                                     : "decoded",
                   error, fits ? "" : "  WRONG");
        }
        free(x);
        free(want);
    }
    b->backend->layer_destroy(b->layer);
    return good;
}

/* In W8A8, models in FP8 that do not ask for it, or not in blocks that the backend multiplies, are
 * refused: they count as right. *in_w8a8: models with a layer in W8A8. */
static bool check_model(struct golden_bench *b, const char *models, const char *family,
                        bool resident, bool w8a8, size_t *in_w8a8)
{
    char path[1024];
    struct moe_model *m;
    struct moe_st_file *golden;
    bool good = true;
    snprintf(path, sizeof path, "%s/%s", models, family);
    must(moe_model_open(path, &m));
    struct moe_status st =
        moe_model_keep_quantised(m, resident ? b->backend->computes : NULL, b->device, w8a8);
    if (w8a8 && moe_failed(&st)) {
        printf("%-25s %s\n", moe_model_name(m), st.text);
        moe_model_close(m);
        return st.code == MOE_FAILED_PRECONDITION && st.reason == MOE_REASON_UNSUPPORTED;
    }
    must(st);
    *in_w8a8 += moe_model_layer(m, 0)->routed_format.activations != MOE_ACTIVATIONS_PLAIN;
    snprintf(path, sizeof path, "%s/%s/golden.safetensors", models, family);
    must(moe_st_open(path, &golden));
    for (size_t i = 0; i < moe_model_layer_count(m); i++)
        good &= check_layer(b, m, i, golden);
    moe_st_close(golden);
    moe_model_close(m);
    return good;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu", *gemm = "auto", *models = "tests/golden/models";
    const char *weights = "resident", *fp8_compute = "w8a16";
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"gemm", 0, MOE_OPTION_STRING, &gemm, 0, 0, "NAME", "CUDA: auto, hopper or cublas"},
        {"weights", 0, MOE_OPTION_CHOICE, &weights, 0, 0, "resident|bf16",
         "whether quantised matrices stay as they are"},
        {"fp8-compute", 0, MOE_OPTION_CHOICE, &fp8_compute, 0, 0, "w8a8|w8a16",
         "whether experts in FP8 quantise rows"},
        {"models", 'm', MOE_OPTION_STRING, &models, 0, 0, "DIR", "folder of the golden models"},
    };
    struct moe_options parsed;
    struct golden_bench b = {0};
    int first;
    must(moe_options_parse(options, sizeof options / sizeof *options, NULL, argc, argv, &first,
                           &parsed));
    must(moe_backend_find(backend, &b.backend));
    group_set(b.backend, "gemm", gemm);
    open_alone(&b);
    bool good = true;
    size_t in_w8a8 = 0;
    struct golden_models all;
    golden_models_list(models, &all);
    for (size_t f = 0; f < all.count; f++)
        good &= check_model(&b, models, all.names[f], strcmp(weights, "resident") == 0,
                            strcmp(fp8_compute, "w8a8") == 0, &in_w8a8);
    if (strcmp(fp8_compute, "w8a8") == 0 && in_w8a8 == 0) {
        printf("no model was in W8A8\n");
        good = false;
    }
    golden_close(&b);
    moe_options_free(&parsed);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
