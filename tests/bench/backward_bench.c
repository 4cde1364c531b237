/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of a backward pass relative to the forward pass of the same tokens, on one slot.
 *
 *     backward_bench [--backend cpu] [--threads N] [--tokens N] [--shared]
 *
 * A layer of width 2048 with 16 experts of width 768, four per token, and with --shared a shared
 * expert; F32 and BF16. Prints medians of the process's processor time in milliseconds; the
 * machine's other load hardly changes them. A backward pass that computes gate and up again has 8
 * products, the forward pass 3: at equal speed the ratio is 2.67. A pass that uses retained values
 * has 6 products. */
#include "group.h"
#include "plain_layer.h"

#include "base/clock.h"
#include "daemon/options.h"
#include "moe/training.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { HIDDEN = 2048, INNER = 768, EXPERTS = 16, TOP_K = 4, REPEATS = 9, BUDGET_MS = 60000 };

enum { RETAINED_NAME = 1, RETAINED_BYTES = 1 << 30 };

struct bench {
    const struct moe_backend *backend;
    uint64_t threads, tokens;
    bool shared;
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    struct moe_trainer *trainer;
    enum moe_dtype dtype;
    void *x, *dy, *y; /* [tokens, HIDDEN] */
    int32_t *ids;
    float *weights;
    uint8_t *state;
};

/* No clean-up: the end of the program does it. */
static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "backward_bench: %s\n", st.text);
    exit(1);
}

static void fill(enum moe_dtype dtype, void *to, size_t n, float scale, uint64_t seed)
{
    struct rng r = {.state = seed};
    for (size_t i = 0; i < n; i++) {
        float value = scale * rng_float(&r);
        if (dtype == MOE_DTYPE_F32)
            ((float *)to)[i] = value;
        else
            ((uint16_t *)to)[i] = moe_f32_to_bf16(value);
    }
}

static void *random_rows(struct bench *b, uint64_t seed)
{
    void *rows;
    must(b->backend->mem_alloc(b->device, MOE_MEM_HOST, b->tokens * HIDDEN * sizeof(float), &rows));
    fill(b->dtype, rows, b->tokens * HIDDEN, 1.0f, seed);
    return rows;
}

static void upload(struct bench *b, enum moe_weight weight, uint32_t expert,
                   const struct moe_layer_spec *spec)
{
    size_t rows, columns;
    moe_weight_shape(spec, weight, &rows, &columns);
    if (rows == 0)
        return;
    void *data = malloc(rows * columns * sizeof(float));
    if (data == NULL)
        exit(1);
    fill(b->dtype, data, rows * columns, 0.05f, 1000 * weight + expert);
    must(b->backend->layer_upload(b->layer, weight, expert, b->dtype, data,
                                  rows * columns * moe_dtype_bytes(b->dtype)));
    free(data);
}

static void make_layer(struct bench *b)
{
    struct moe_layer_spec spec = {.hidden = HIDDEN,
                                  .experts = EXPERTS,
                                  .intermediate = INNER,
                                  .shared_intermediate = b->shared ? INNER : 0,
                                  .router = PLAIN_ROUTER(TOP_K)};
    struct dealt dealt;
    struct moe_placement placement = deal_experts(&dealt, EXPERTS, 1);
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    must(b->backend->layer_create(b->device, &spec, &placement, 0, &b->layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? EXPERTS : 1U); e++)
            upload(b, w, e, &spec);
    must(b->backend->layer_finish(b->layer));
    must(b->backend->training->trainer_create(b->layer, &config, &b->trainer));
}

static double processor_ms(void)
{
    struct timespec t;
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) != 0)
        exit(1);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* `name`: of the forward pass to retain, or to use in the backward pass; 0 = neither. */
static double run(struct bench *b, bool backward, uint64_t name)
{
    struct moe_step *step;
    uint32_t tokens = (uint32_t)b->tokens;
    struct moe_step_args forward = {.layer = b->layer,
                                    .dtype = b->dtype,
                                    .bucket = tokens,
                                    .tokens = tokens,
                                    .x = b->x,
                                    .y = b->y,
                                    .ids_out = b->ids,
                                    .weights_out = b->weights,
                                    .token_state = b->state,
                                    .retain = name};
    struct moe_backward_args back = {.trainer = b->trainer,
                                     .dtype = b->dtype,
                                     .bucket = tokens,
                                     .tokens = tokens,
                                     .x = b->x,
                                     .dy = b->dy,
                                     .ids = b->ids,
                                     .accumulate = true,
                                     .dx = b->y,
                                     .token_state = b->state,
                                     .retained = name};
    struct moe_step_result result;
    double begin = processor_ms();
    must(backward ? b->backend->training->backward_enqueue(b->session, &back, &step)
                  : b->backend->step_enqueue(b->session, &forward, &step));
    must(b->backend->step_wait(step, MOE_NEVER, &result));
    double took = processor_ms() - begin;
    if (name != 0 && !(backward ? result.used_retained : result.retained)) {
        fprintf(stderr, "backward_bench: this backend retains nothing of this layer\n");
        exit(1);
    }
    return took;
}

static double median_of(struct bench *b, bool backward, uint64_t name)
{
    double times[REPEATS];
    for (int i = -1; i < REPEATS; i++) {
        double t = run(b, backward, name);
        if (i >= 0)
            times[i] = t;
    }
    return median(times, REPEATS);
}

static void measure(struct bench *b)
{
    b->x = random_rows(b, 7);
    b->dy = random_rows(b, 8);
    b->y = random_rows(b, 9);
    make_layer(b);
    b->backend->training->retained_limit(b->device, RETAINED_BYTES);
    double forward = median_of(b, false, 0), backward = median_of(b, true, 0);
    double retaining = median_of(b, false, RETAINED_NAME),
           retained = median_of(b, true, RETAINED_NAME);
    printf("%-4s T %4u%s: forward %8.2f ms, backward %8.2f ms, ratio %.2f; retaining %.2f ms, from "
           "retained "
           "%.2f ms, ratio %.2f\n",
           b->dtype == MOE_DTYPE_F32 ? "F32" : "BF16", (unsigned)b->tokens,
           b->shared ? " shared" : "", forward, backward, backward / forward, retaining, retained,
           retained / forward);
    b->backend->training->trainer_destroy(b->trainer);
    b->backend->layer_destroy(b->layer);
    void *const rows[] = {b->x, b->dy, b->y};
    for (int i = 0; i < 3; i++)
        b->backend->mem_free(b->device, MOE_MEM_HOST, rows[i], b->tokens * HIDDEN * sizeof(float));
}

static int run_member(struct member *m)
{
    struct bench b = *(const struct bench *)m->ctx;
    struct moe_device_config device = {.threads = (uint32_t)b.threads};
    struct moe_session_config config = member_session(m, 1, BUDGET_MS);
    void *ids, *weights, *state;
    size_t pairs = b.tokens * TOP_K * sizeof(float);
    b.member = m;
    config.training = true;
    config.max_tokens = (uint32_t)b.tokens;
    config.max_hidden = HIDDEN;
    config.max_top_k = TOP_K;
    config.max_experts = EXPERTS;
    must(b.backend->device_open(&device, &b.device));
    must(b.backend->session_join(b.device, &config, &b.session));
    must(b.backend->mem_alloc(b.device, MOE_MEM_HOST, pairs, &ids));
    must(b.backend->mem_alloc(b.device, MOE_MEM_HOST, pairs, &weights));
    must(b.backend->mem_alloc(b.device, MOE_MEM_HOST, b.tokens, &state));
    b.ids = ids;
    b.weights = weights;
    b.state = state;
    for (int i = 0; i < 2; i++) {
        b.dtype = i == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
        measure(&b);
    }
    b.backend->session_leave(b.session);
    b.backend->mem_free(b.device, MOE_MEM_HOST, ids, pairs);
    b.backend->mem_free(b.device, MOE_MEM_HOST, weights, pairs);
    b.backend->mem_free(b.device, MOE_MEM_HOST, state, b.tokens);
    b.backend->device_close(b.device);
    return 0;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu";
    struct bench b = {.threads = 1, .tokens = 256};
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to measure"},
        {"threads", 't', MOE_OPTION_UINT, &b.threads, 1, 1024, "N", "threads of a CPU"},
        {"tokens", 'n', MOE_OPTION_UINT, &b.tokens, 1, 4096, "N", "tokens of a pass"},
        {"shared", 0, MOE_OPTION_BOOL, &b.shared, 0, 0, "", "a shared expert as well"},
    };
    struct moe_options parsed;
    struct group group;
    int first, status[MOE_MAX_SLOTS] = {0};
    must(moe_options_parse(options, sizeof options / sizeof *options, NULL, argc, argv, &first,
                           &parsed));
    must(moe_backend_find(backend, &b.backend));
    if (b.backend->training == NULL) {
        fprintf(stderr, "this backend cannot train\n");
        return 2;
    }
    group_start(&group, 1, run_member, &b);
    bool good = group_finish(&group, 600, status);
    moe_options_free(&parsed);
    return good ? 0 : 1;
}
