/* The golden models' gradients through a backend, on one slot or several: dx of every MoE layer and
 * the gradient of every parameter of the last one must be what transformers' autograd gave.
 *
 *     golden_training --backend cpu --slots 2 --models tests/golden/models
 *
 * The tokens are dealt out over the slots, as are the experts; gradients of replicated weights are
 * added up here. F32 within 1e-5, BF16 within 1e-2 (relative Frobenius norm). Exits with 0 only
 * when everything is right, and with 77 where the backend cannot train. */
#include "golden_gradients.h"
#include "group.h"

#include "base/clock.h"
#include "base/options.h"
#include "moe/training.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    MOST_TOKENS = 37,
    MOST_HIDDEN = 64,
    BUCKET = 64,
    BUDGET_MS = 20000,
    SHARE_FLOATS = 1 << 20, /* of one slot */
    SKIPPED = 77
};

static const char *const families[] = {"mixtral", "qwen2_moe",   "qwen3_moe",   "qwen3_next",
                                       "olmoe",   "deepseek_v2", "deepseek_v3", "glm4_moe",
                                       "gpt_oss", "llama4",      "minimax_m2",  "ernie4_5_moe"};

struct plan {
    const struct moe_backend *backend;
    const char *models;
    uint64_t slots;
    float *share; /* [slots, SHARE_FLOATS]: dx of the own tokens, then gradients */
};

struct bench {
    const struct plan *plan;
    struct member *member;
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    struct moe_trainer *trainer;
    const struct moe_layer_spec *spec;
    const char *family;
    uint32_t first, tokens; /* of this slot */
    void *x, *dy, *y;       /* [MOST_TOKENS, MOST_HIDDEN] F32, host memory of the backend */
    int32_t *ids;
    float *weights;
    uint8_t *state;
    bool good;
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

static void open_bench(struct bench *b)
{
    struct moe_device_config device = {.ordinal = (int)b->member->slot, .threads = 1};
    struct moe_session_config config = member_session(b->member, 1, BUDGET_MS);
    config.training = true;
    config.max_tokens = BUCKET;
    must(b->backend->device_open(&device, &b->device));
    must(b->backend->session_join(b->device, &config, &b->session));
    size_t rows = (size_t)MOST_TOKENS * MOST_HIDDEN * sizeof(float);
    b->x = host_memory(b, rows);
    b->dy = host_memory(b, rows);
    b->y = host_memory(b, rows);
    b->ids = host_memory(b, MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->ids);
    b->weights = host_memory(b, MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->weights);
    b->state = host_memory(b, MOST_TOKENS);
    b->good = true;
}

static void close_bench(struct bench *b)
{
    size_t rows = (size_t)MOST_TOKENS * MOST_HIDDEN * sizeof(float);
    const struct moe_backend *backend = b->backend;
    backend->session_leave(b->session);
    backend->mem_free(b->device, MOE_MEM_HOST, b->x, rows);
    backend->mem_free(b->device, MOE_MEM_HOST, b->dy, rows);
    backend->mem_free(b->device, MOE_MEM_HOST, b->y, rows);
    backend->mem_free(b->device, MOE_MEM_HOST, b->ids,
                      MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->ids);
    backend->mem_free(b->device, MOE_MEM_HOST, b->weights,
                      MOST_TOKENS * MOE_MAX_TOP_K * sizeof *b->weights);
    backend->mem_free(b->device, MOE_MEM_HOST, b->state, MOST_TOKENS);
    backend->device_close(b->device);
}

/* ----------------------------------------------------------------------- layers */

static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct bench *b = ctx;
    return b->backend->layer_upload(b->layer, weight, expert, dtype, data, bytes);
}

static uint32_t home_of(const struct bench *b, uint32_t expert)
{
    return (uint32_t)(expert * b->plan->slots / b->spec->experts);
}

static void load_layer(struct bench *b, const struct moe_model *m, size_t i)
{
    uint32_t local[MOE_MAX_EXPERTS], n = 0, offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[MOE_MAX_EXPERTS];
    b->spec = moe_model_layer(m, i);
    for (uint32_t e = 0; e < b->spec->experts; e++) {
        offset[e] = e;
        slot[e] = (uint16_t)home_of(b, e);
        if (slot[e] == b->member->slot)
            local[n++] = e;
    }
    offset[b->spec->experts] = b->spec->experts;
    struct moe_placement placement = {.version = 1,
                                      .experts = b->spec->experts,
                                      .slots = (uint32_t)b->plan->slots,
                                      .offset = offset,
                                      .slot = slot};
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    must(b->backend->layer_create(b->device, b->spec, &placement, b->member->slot, &b->layer));
    must(moe_model_load_layer(m, i, local, n, upload, b, NULL, NULL));
    must(b->backend->layer_finish(b->layer));
    must(b->backend->training->trainer_create(b->layer, &config, &b->trainer));
}

/* Floats of one entry of a weight, and where entry `e` is in a slot's share. */
static size_t size_of(const struct bench *b, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(b->spec, w, &rows, &columns);
    return rows * columns;
}

static size_t entries_of(const struct bench *b, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? b->spec->experts : 1;
}

static size_t place_of(const struct bench *b, enum moe_weight w)
{
    size_t at = (size_t)MOST_TOKENS * MOST_HIDDEN;
    for (enum moe_weight k = 0; k < w; k++)
        at += size_of(b, k) * entries_of(b, k);
    return at;
}

/* ----------------------------------------------------------------------- one pass */

static void put(void *to, enum moe_dtype dtype, size_t n, const float *from)
{
    for (size_t i = 0; i < n; i++)
        if (dtype == MOE_DTYPE_F32)
            ((float *)to)[i] = from[i];
        else
            ((uint16_t *)to)[i] = moe_f32_to_bf16(from[i]);
}

static void finish(struct bench *b, struct moe_step *step)
{
    must(b->backend->step_wait(step, MOE_NEVER, NULL));
}

/* Routes the own tokens with a forward step, and runs the backward pass with that routing. */
static void run_pass(struct bench *b, enum moe_dtype dtype)
{
    struct moe_step *step;
    struct moe_step_args forward = {.layer = b->layer,
                                    .dtype = dtype,
                                    .bucket = BUCKET,
                                    .tokens = b->tokens,
                                    .x = b->x,
                                    .y = b->y,
                                    .ids_out = b->ids,
                                    .weights_out = b->weights,
                                    .token_state = b->state};
    struct moe_backward_args backward = {.trainer = b->trainer,
                                         .dtype = dtype,
                                         .bucket = BUCKET,
                                         .tokens = b->tokens,
                                         .x = b->x,
                                         .dy = b->dy,
                                         .ids = b->ids,
                                         .accumulate = true,
                                         .dx = b->y,
                                         .token_state = b->state};
    must(b->backend->step_enqueue(b->session, &forward, &step));
    finish(b, step);
    must(b->backend->training->zero_grad(b->trainer));
    must(b->backend->training->backward_enqueue(b->session, &backward, &step));
    finish(b, step);
}

/* dx and all local gradients, for slot 0 to look at. */
static void show_results(struct bench *b, enum moe_dtype dtype)
{
    float *mine = b->plan->share + (size_t)b->member->slot * SHARE_FLOATS;
    size_t n = (size_t)b->tokens * b->spec->hidden;
    for (size_t i = 0; i < n; i++)
        mine[i] =
            dtype == MOE_DTYPE_F32 ? ((float *)b->y)[i] : moe_bf16_to_f32(((uint16_t *)b->y)[i]);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t size = size_of(b, w);
        if (size == 0 || w == MOE_WEIGHT_SELECT_BIAS)
            continue;
        for (uint32_t e = 0; e < entries_of(b, w); e++) {
            struct moe_train_key key = {.weight = w, .expert = e, .tensor = MOE_TRAIN_GRAD};
            if (!moe_weight_is_expert(w) || home_of(b, e) == b->member->slot)
                must(b->backend->training->trainer_read(
                    b->trainer, &key, mine + place_of(b, w) + e * size, size * sizeof *mine));
        }
    }
}

static double relative_error(size_t n, const double *got, const float *want)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - (double)want[i]) * (got[i] - (double)want[i]);
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static void judge(struct bench *b, enum moe_dtype dtype, const char *what, double error)
{
    bool fits = error <= (dtype == MOE_DTYPE_F32 ? 1e-5 : 1e-2);
    b->good = b->good && fits;
    printf("%-13s layer %u %-4s %-12s error %.1e%s\n", b->family, b->spec->layer,
           dtype == MOE_DTYPE_F32 ? "F32" : "BF16", what, error, fits ? "" : "  WRONG");
}

static void compare_dx(struct bench *b, enum moe_dtype dtype, uint32_t tokens, const float *want)
{
    size_t hidden = b->spec->hidden;
    double *got = calloc(tokens * hidden, sizeof *got);
    MOE_INVARIANT(got != NULL);
    for (uint64_t s = 0; s < b->plan->slots; s++) {
        size_t first = tokens * s / b->plan->slots, end = tokens * (s + 1) / b->plan->slots;
        for (size_t i = 0; i < (end - first) * hidden; i++)
            got[first * hidden + i] = (double)b->plan->share[s * SHARE_FLOATS + i];
    }
    judge(b, dtype, tokens == 1 ? "dx, T = 1" : "dx", relative_error(tokens * hidden, got, want));
    free(got);
}

static void compare_weight(struct bench *b, enum moe_dtype dtype, enum moe_weight w,
                           const float *want)
{
    size_t size = size_of(b, w), n = size * entries_of(b, w);
    double *got = calloc(n, sizeof *got);
    MOE_INVARIANT(got != NULL);
    for (uint64_t s = 0; s < b->plan->slots; s++)
        for (size_t i = 0; i < n; i++)
            if (!moe_weight_is_expert(w) || home_of(b, (uint32_t)(i / size)) == s)
                got[i] += (double)b->plan->share[s * SHARE_FLOATS + place_of(b, w) + i];
    judge(b, dtype, golden_weight_name(w), relative_error(n, got, want));
    free(got);
}

static void compare_weights(struct bench *b, enum moe_dtype dtype, const struct moe_st_file *golden)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        if (size_of(b, w) == 0 || w == MOE_WEIGHT_SELECT_BIAS)
            continue;
        float *want = golden_gradient(golden, b->family, b->spec, w);
        if (want == NULL) {
            printf("%-13s has no golden gradient of %s  WRONG\n", b->family, golden_weight_name(w));
            b->good = false;
            continue;
        }
        compare_weight(b, dtype, w, want);
        free(want);
    }
}

/* ------------------------------------------------------------------------- models */

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

static void meet(struct bench *b)
{
    if (!board_barrier(b->member, 60000)) {
        fprintf(stderr, "slot %u: another slot gave up\n", b->member->slot);
        exit(1);
    }
}

static void check_batch(struct bench *b, enum moe_dtype dtype, uint32_t tokens,
                        const struct moe_st_file *golden, bool last)
{
    size_t hidden = b->spec->hidden, n = tokens * hidden;
    float *x = read_tensor(golden, b->spec->layer, tokens, "x", n);
    float *dy = read_tensor(golden, b->spec->layer, tokens, "dy", n);
    float *dx = read_tensor(golden, b->spec->layer, tokens, "dx", n);
    uint64_t s = b->member->slot;
    b->first = (uint32_t)(tokens * s / b->plan->slots);
    b->tokens = (uint32_t)(tokens * (s + 1) / b->plan->slots) - b->first;
    put(b->x, dtype, b->tokens * hidden, x + b->first * hidden);
    put(b->dy, dtype, b->tokens * hidden, dy + b->first * hidden);
    run_pass(b, dtype);
    show_results(b, dtype);
    meet(b);
    if (s == 0)
        compare_dx(b, dtype, tokens, dx);
    if (s == 0 && last && tokens == MOST_TOKENS)
        compare_weights(b, dtype, golden);
    meet(b);
    free(x);
    free(dy);
    free(dx);
}

static void check_model(struct bench *b, const char *family)
{
    char path[1024];
    struct moe_model *m;
    struct moe_st_file *golden;
    b->family = family;
    snprintf(path, sizeof path, "%s/%s", b->plan->models, family);
    must(moe_model_open(path, &m));
    snprintf(path, sizeof path, "%s/%s/golden.safetensors", b->plan->models, family);
    must(moe_st_open(path, &golden));
    size_t layers = moe_model_layer_count(m);
    for (size_t i = 0; i < layers; i++) {
        load_layer(b, m, i);
        for (int d = 0; d < 2; d++) {
            enum moe_dtype dtype = d == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
            check_batch(b, dtype, 1, golden, i + 1 == layers);
            check_batch(b, dtype, MOST_TOKENS, golden, i + 1 == layers);
        }
        b->backend->training->trainer_destroy(b->trainer);
        b->backend->layer_destroy(b->layer);
    }
    moe_st_close(golden);
    moe_model_close(m);
}

static int run_member(struct member *m)
{
    const struct plan *plan = m->ctx;
    struct bench b = {.plan = plan, .member = m, .backend = plan->backend};
    open_bench(&b);
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        check_model(&b, families[f]);
    close_bench(&b);
    return b.good ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu";
    struct plan plan = {.slots = 1, .models = "tests/golden/models"};
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "processes"},
        {"models", 'm', MOE_OPTION_STRING, &plan.models, 0, 0, "DIR", "folder of golden models"},
    };
    struct moe_options parsed;
    struct group group;
    int first, status[MOE_MAX_SLOTS] = {0};
    must(moe_options_parse(options, 3, NULL, argc, argv, &first, &parsed));
    plan.backend = moe_backend_find(backend);
    if (plan.backend == NULL) {
        fprintf(stderr, "this build has no such backend\n");
        return 2;
    }
    if (plan.backend->training == NULL) {
        printf("SKIPPED: the backend %s cannot train\n", backend);
        return SKIPPED;
    }
    plan.share = mmap(NULL, plan.slots * SHARE_FLOATS * sizeof(float), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MOE_INVARIANT(plan.share != MAP_FAILED);
    group_start(&group, (uint32_t)plan.slots, run_member, &plan);
    bool good = group_finish(&group, 300, status);
    moe_options_free(&parsed);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
