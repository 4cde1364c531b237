/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of a decode step of one layer: the host's time to enqueue it, its time on the device, and
 * the time to its answer.
 *
 *     step_bench [SLOTS] [BACKEND]
 *
 * Forks one process per slot; the layers have the shape of Qwen3-30B-A3B (H 2048, E 128, K 8, I
 * 768, bf16). The very first step is enqueued while the other slots sleep for a second: enqueueing
 * must not wait for them. Figures are medians of slot 0, in microseconds. */
#include "group.h"
#include "plain_layer.h"

#include "base/clock.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HIDDEN = 2048,
    INNER = 768,
    EXPERTS = 128,
    TOP_K = 8,
    LAYERS = 2,
    BUCKET = 32,
    WARM_UP = 20,
    STEPS = 400,
    BUDGET_MS = 20000,
    SLEEP_S = 1,
};

static const struct moe_backend *backend;

static void require(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "step_bench: %s\n", st.text);
    exit(1);
}

static void await_members(struct member *m)
{
    if (!board_barrier(m, 120000))
        exit(1);
}

/* One slot: its layers, and the tensors of two steps. */
struct bench {
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer[LAYERS];
    struct moe_step_args args[2];
};

/* ------------------------------------------------------------------------ setup */

static struct moe_layer *make_layer(const struct bench *b, uint32_t number, const uint16_t *values)
{
    struct moe_layer_spec spec = {.layer = number,
                                  .hidden = HIDDEN,
                                  .experts = EXPERTS,
                                  .intermediate = INNER,
                                  .router = PLAIN_ROUTER(TOP_K)};
    struct dealt dealt;
    struct moe_placement placement = deal_experts(&dealt, EXPERTS, b->member->slots);
    static const enum moe_weight of_expert[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN};
    struct moe_layer *layer;
    require(backend->layer_create(b->device, &spec, &placement, b->member->slot, &layer));
    require(backend->layer_upload(layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_BF16, values,
                                  (size_t)EXPERTS * HIDDEN * 2));
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (int i = 0; dealt.slot[e] == b->member->slot && i < 3; i++)
            require(backend->layer_upload(layer, of_expert[i], e, MOE_DTYPE_BF16, values + e,
                                          (size_t)INNER * HIDDEN * 2));
    require(backend->layer_finish(layer));
    return layer;
}

static uint16_t *random_values(size_t n, float scale, uint64_t seed)
{
    uint16_t *values = malloc(n * sizeof *values);
    struct rng r = {.state = seed};
    if (values == NULL)
        exit(1);
    for (size_t i = 0; i < n; i++)
        values[i] = moe_f32_to_bf16(scale * rng_float(&r));
    return values;
}

static void *pinned(const struct bench *b, size_t bytes)
{
    void *p;
    require(backend->mem_alloc(b->device, MOE_MEM_HOST, bytes, &p));
    return p;
}

static void make_tensors(struct bench *b)
{
    uint16_t *x = random_values((size_t)BUCKET * HIDDEN, 1.0f, 7 + b->member->slot);
    for (int i = 0; i < 2; i++) {
        void *rows = pinned(b, (size_t)BUCKET * HIDDEN * 2);
        memcpy(rows, x, (size_t)BUCKET * HIDDEN * 2);
        b->args[i] = (struct moe_step_args){.dtype = MOE_DTYPE_BF16,
                                            .bucket = BUCKET,
                                            .x = rows,
                                            .y = pinned(b, (size_t)BUCKET * HIDDEN * 2),
                                            .ids_out = pinned(b, BUCKET * TOP_K * 4),
                                            .weights_out = pinned(b, BUCKET * TOP_K * 4),
                                            .token_state = pinned(b, BUCKET)};
    }
    free(x);
}

static void setup(struct bench *b)
{
    struct moe_device_config device = {.ordinal = (int)b->member->slot};
    struct moe_session_config config = member_session(b->member, 1, BUDGET_MS);
    uint16_t *values = random_values((size_t)INNER * HIDDEN + EXPERTS, 0.05f, 1);
    config.max_tokens = BUCKET;
    config.max_hidden = HIDDEN;
    config.max_top_k = TOP_K;
    config.max_experts = EXPERTS;
    require(backend->device_open(&device, &b->device));
    for (uint32_t l = 0; l < LAYERS; l++)
        b->layer[l] = make_layer(b, l, values);
    free(values);
    make_tensors(b);
    require(backend->session_join(b->device, &config, &b->session));
}

/* ---------------------------------------------------------------------- measuring */

static struct moe_step *start(struct bench *b, uint32_t i, uint32_t tokens)
{
    struct moe_step *step;
    b->args[i % 2].layer = b->layer[i % LAYERS];
    b->args[i % 2].tokens = tokens;
    require(backend->step_enqueue(b->session, &b->args[i % 2], &step));
    return step;
}

static void finish(struct moe_step *step, struct moe_step_result *r)
{
    require(backend->step_wait(step, UINT64_MAX, r));
}

enum { ENQUEUE, DEVICE, ANSWER, STAGES, FIGURES = STAGES + MOE_STAGE_COUNT };

/* One step after the other. */
static void measure_alone(struct bench *b, uint32_t tokens, double out[FIGURES])
{
    static double v[FIGURES][STEPS];
    for (uint32_t i = 0; i < WARM_UP + STEPS; i++) {
        struct moe_step_result r;
        uint64_t begin = moe_clock_ns();
        struct moe_step *step = start(b, i, tokens);
        uint64_t enqueued = moe_clock_ns();
        finish(step, &r);
        if (i < WARM_UP)
            continue;
        double *at = &v[0][i - WARM_UP];
        at[ENQUEUE * STEPS] = (double)(enqueued - begin) / 1e3;
        at[DEVICE * STEPS] = (double)r.total_ns / 1e3;
        at[ANSWER * STEPS] = (double)(moe_clock_ns() - begin) / 1e3;
        for (int s = 0; s < MOE_STAGE_COUNT; s++)
            at[(STAGES + s) * STEPS] = (double)r.stage_ns[s] / 1e3;
    }
    for (int f = 0; f < FIGURES; f++)
        out[f] = median(v[f], STEPS);
}

/* Microseconds per step with two steps always in flight. */
static double measure_two(struct bench *b, uint32_t tokens)
{
    struct moe_step *step[2] = {start(b, 0, tokens), NULL};
    uint64_t begin = 0;
    for (uint32_t i = 1; i <= WARM_UP + STEPS; i++) {
        if (i == WARM_UP)
            begin = moe_clock_ns();
        step[i % 2] = start(b, i, tokens);
        finish(step[(i + 1) % 2], NULL);
    }
    double us = (double)(moe_clock_ns() - begin) / 1e3;
    finish(step[(WARM_UP + STEPS) % 2], NULL);
    return us / (STEPS + 1);
}

static void measure(struct bench *b, uint32_t tokens)
{
    double f[FIGURES];
    measure_alone(b, tokens, f);
    double two = measure_two(b, tokens);
    if (b->member->slot != 0)
        return;
    printf("T %2u: enqueue %6.1f, device %6.1f, answer %6.1f, two in flight %6.1f a step;", tokens,
           f[ENQUEUE], f[DEVICE], f[ANSWER], two);
    for (int s = 0; s < MOE_STAGE_COUNT; s++)
        printf(" %s %.1f", moe_stage_names[s], f[STAGES + s]);
    printf("\n");
    fflush(stdout);
}

static void measure_first(struct bench *b)
{
    uint64_t begin = moe_clock_ns();
    if (b->member->slot != 0)
        sleep(SLEEP_S);
    struct moe_step *step = start(b, 0, 1);
    uint64_t enqueued = moe_clock_ns();
    finish(step, NULL);
    if (b->member->slot == 0)
        printf("first step: enqueue %.1f, answer %.1f (peers come after %d s)\n",
               (double)(enqueued - begin) / 1e3, (double)(moe_clock_ns() - begin) / 1e3, SLEEP_S);
}

static int run(struct member *m)
{
    struct bench b = {.member = m};
    setup(&b);
    await_members(m);
    measure_first(&b);
    measure(&b, 1);
    measure(&b, BUCKET);
    await_members(m);
    backend->session_leave(b.session);
    for (uint32_t l = 0; l < LAYERS; l++)
        backend->layer_destroy(b.layer[l]);
    for (int i = 0; i < 2; i++) {
        backend->mem_free(b.device, MOE_MEM_HOST, (void *)b.args[i].x, (size_t)BUCKET * HIDDEN * 2);
        backend->mem_free(b.device, MOE_MEM_HOST, b.args[i].y, (size_t)BUCKET * HIDDEN * 2);
        backend->mem_free(b.device, MOE_MEM_HOST, b.args[i].ids_out, BUCKET * TOP_K * 4);
        backend->mem_free(b.device, MOE_MEM_HOST, b.args[i].weights_out, BUCKET * TOP_K * 4);
        backend->mem_free(b.device, MOE_MEM_HOST, b.args[i].token_state, BUCKET);
    }
    backend->device_close(b.device);
    return 0;
}

int main(int argc, char **argv)
{
    struct group group;
    int status[MOE_MAX_SLOTS] = {0};
    uint32_t slots = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    struct moe_status st = moe_backend_find(argc > 2 ? argv[2] : "cuda", &backend);
    if (moe_failed(&st) || slots < 1 || slots > MOE_MAX_SLOTS) {
        fprintf(stderr, "step_bench [SLOTS] [cuda|cpu]: %s\n", moe_failed(&st) ? st.text : "slots");
        return 2;
    }
    group_start(&group, slots, run, NULL);
    return group_finish(&group, 300, status) ? 0 : 1;
}
