/* The golden models through a backend, without daemons: each checkpoint is loaded as a worker loads
 * it, and whole steps of one slot must give the numbers of transformers.
 *
 *     golden --backend cpu --models tests/golden/models
 *
 * F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm). Exits with 0 only when
 * every layer of every model is right. */
#include "moe/backend.h"

#include "base/clock.h"
#include "base/options.h"
#include "model/model.h"
#include "model/safetensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_TOKENS = 37, BUCKET = 64, BUDGET_MS = 20000 };

static const char *const families[] = {"mixtral", "qwen2_moe",   "qwen3_moe",   "qwen3_next",
                                       "olmoe",   "deepseek_v2", "deepseek_v3", "glm4_moe",
                                       "gpt_oss", "llama4",      "minimax_m2",  "ernie4_5_moe"};

struct bench {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_session *session;
    void *x, *y; /* [MOST_TOKENS, MOE_MAX_HIDDEN] F32, host memory of the backend */
    int32_t *ids;
    float *weights;
    uint8_t *state;
    struct moe_layer *layer;
};

/* The program has nothing to clean up that its end does not. */
static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    exit(1);
}

static void *host_memory(struct bench *b, size_t bytes)
{
    void *p;
    must(b->backend->mem_alloc(b->device, MOE_MEM_HOST, bytes, &p));
    return p;
}

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

static void open_bench(struct bench *b, enum moe_gemm gemm)
{
    struct moe_device_config device = {.gemm = gemm};
    struct moe_session_config config = {.slots = 1,
                                        .live = 1,
                                        .epoch = 1,
                                        .max_tokens = BUCKET,
                                        .max_hidden = MOE_MAX_HIDDEN,
                                        .max_top_k = MOE_MAX_TOP_K,
                                        .max_experts = MOE_MAX_EXPERTS,
                                        .wait_budget_ms = BUDGET_MS,
                                        .allgather = gather_alone};
    must(b->backend->device_open(&device, &b->device));
    must(b->backend->session_join(b->device, &config, &b->session));
    size_t rows = (size_t)MOST_TOKENS * MOE_MAX_HIDDEN * sizeof(float);
    b->x = host_memory(b, rows);
    b->y = host_memory(b, rows);
    b->ids = host_memory(b, MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->ids);
    b->weights = host_memory(b, MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->weights);
    b->state = host_memory(b, MOST_TOKENS);
}

static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct bench *b = ctx;
    return b->backend->layer_upload(b->layer, weight, expert, dtype, data, bytes);
}

/* All experts on the one slot. */
static void load_layer(struct bench *b, const struct moe_model *m, size_t i)
{
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    uint32_t experts[MOE_MAX_EXPERTS], offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[MOE_MAX_EXPERTS] = {0};
    for (uint32_t e = 0; e <= spec->experts; e++)
        offset[e] = e;
    memcpy(experts, offset, spec->experts * sizeof *experts);
    struct moe_placement placement = {
        .version = 1, .experts = spec->experts, .slots = 1, .offset = offset, .slot = slot};
    must(b->backend->layer_create(b->device, spec, &placement, 0, &b->layer));
    must(moe_model_load_layer(m, i, experts, spec->experts, upload, b, NULL, NULL));
    must(b->backend->layer_finish(b->layer));
}

static float *read_tensor(const struct moe_st_file *file, uint32_t layer, uint32_t tokens,
                          const char *what, size_t n)
{
    char name[64];
    snprintf(name, sizeof name, "layer%u.T%u.%s", layer, tokens, what);
    const struct moe_tensor *t = moe_st_find(file, name);
    float *data = malloc(n * sizeof *data);
    if (t == NULL || data == NULL || t->bytes != n * sizeof *data) {
        fprintf(stderr, "no usable tensor %s\n", name);
        exit(1);
    }
    must(moe_st_read(file, t, 0, t->bytes, data));
    return data;
}

static float element(enum moe_dtype dtype, const void *data, size_t i)
{
    return dtype == MOE_DTYPE_F32 ? ((const float *)data)[i]
                                  : moe_bf16_to_f32(((const uint16_t *)data)[i]);
}

/* One step; its relative error. */
static double run_step(struct bench *b, enum moe_dtype dtype, uint32_t tokens, size_t n,
                       const float *x, const float *want)
{
    for (size_t i = 0; i < n; i++)
        if (dtype == MOE_DTYPE_F32)
            ((float *)b->x)[i] = x[i];
        else
            ((uint16_t *)b->x)[i] = moe_f32_to_bf16(x[i]);
    struct moe_step_args args = {.layer = b->layer,
                                 .dtype = dtype,
                                 .bucket = BUCKET,
                                 .tokens = tokens,
                                 .x = b->x,
                                 .y = b->y,
                                 .ids_out = b->ids,
                                 .weights_out = b->weights,
                                 .token_state = b->state};
    struct moe_step *step;
    must(b->backend->step_enqueue(b->session, &args, &step));
    must(b->backend->step_wait(step, MOE_NEVER, NULL));
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)element(dtype, b->y, i) - (double)want[i];
        difference += d * d;
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static bool check_layer(struct bench *b, const struct moe_model *m, size_t i,
                        const struct moe_st_file *golden)
{
    static const uint32_t counts[] = {1, MOST_TOKENS};
    static const struct {
        enum moe_dtype dtype;
        const char *name;
        double limit;
    } kinds[] = {{MOE_DTYPE_F32, "F32", 1e-5}, {MOE_DTYPE_BF16, "BF16", 1e-2}};
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    bool good = true;
    load_layer(b, m, i);
    for (int c = 0; c < 2; c++) {
        size_t n = (size_t)counts[c] * spec->hidden;
        float *x = read_tensor(golden, spec->layer, counts[c], "x", n);
        float *want = read_tensor(golden, spec->layer, counts[c], "y", n);
        for (int k = 0; k < 2; k++) {
            double error = run_step(b, kinds[k].dtype, counts[c], n, x, want);
            bool fits = error <= kinds[k].limit;
            good &= fits;
            printf("%-13s layer %u T %2u %-4s error %.1e%s\n", moe_model_name(m), spec->layer,
                   counts[c], kinds[k].name, error, fits ? "" : "  WRONG");
        }
        free(x);
        free(want);
    }
    b->backend->layer_destroy(b->layer);
    return good;
}

static bool check_model(struct bench *b, const char *models, const char *family)
{
    char path[1024];
    struct moe_model *m;
    struct moe_st_file *golden;
    bool good = true;
    snprintf(path, sizeof path, "%s/%s", models, family);
    must(moe_model_open(path, &m));
    snprintf(path, sizeof path, "%s/%s/golden.safetensors", models, family);
    must(moe_st_open(path, &golden));
    for (size_t i = 0; i < moe_model_layer_count(m); i++)
        good &= check_layer(b, m, i, golden);
    moe_st_close(golden);
    moe_model_close(m);
    return good;
}

static void close_bench(struct bench *b)
{
    size_t rows = (size_t)MOST_TOKENS * MOE_MAX_HIDDEN * sizeof(float);
    const struct moe_backend *backend = b->backend;
    backend->session_leave(b->session);
    backend->mem_free(b->device, MOE_MEM_HOST, b->x, rows);
    backend->mem_free(b->device, MOE_MEM_HOST, b->y, rows);
    backend->mem_free(b->device, MOE_MEM_HOST, b->ids,
                      MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->ids);
    backend->mem_free(b->device, MOE_MEM_HOST, b->weights,
                      MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->weights);
    backend->mem_free(b->device, MOE_MEM_HOST, b->state, MOST_TOKENS);
    backend->device_close(b->device);
}

int main(int argc, char **argv)
{
    const char *backend = "cpu", *gemm_name = "auto", *models = "tests/golden/models";
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"gemm", 0, MOE_OPTION_STRING, &gemm_name, 0, 0, "NAME", "CUDA: auto, hopper or cublas"},
        {"models", 'm', MOE_OPTION_STRING, &models, 0, 0, "DIR", "folder of the golden models"},
    };
    struct moe_options parsed;
    struct bench b = {0};
    int first;
    must(moe_options_parse(options, sizeof options / sizeof *options, NULL, argc, argv, &first,
                           &parsed));
    b.backend = moe_backend_find(backend);
    enum moe_gemm gemm;
    if (b.backend == NULL || !moe_gemm_parse(gemm_name, &gemm)) {
        fprintf(stderr, "no such backend or gemm in this build\n");
        return 2;
    }
    open_bench(&b, gemm);
    bool good = true;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        good &= check_model(&b, models, families[f]);
    close_bench(&b);
    moe_options_free(&parsed);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
