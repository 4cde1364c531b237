/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of captured steps (kernels/cuda/step/graph.h). After warm-up a step allocates nothing,
 * waits for nothing and captures nothing, for any layer, bucket and number of tokens. Layers of a
 * shape share graphs. Graphs survive the clearing of flags, growing memory and eviction. Every
 * step's answer must equal the first one of its layer and bucket, bit by bit. Rows of segments are
 * copied once each way.
 *
 *     test_steady [SLOTS]
 *
 * Forks one process per slot, one GPU each. The linker wraps calls of the CUDA runtime (--wrap) to
 * count them. Without a GPU it prints a message and exits with 77. */
#include "group.h"

#include "cuda/plan/limits.h"
#include "cuda/session/session.h"
#include "cuda/step/backend.h"
#include "cuda/step/graph.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

enum {
    SKIP_CODE = 77,
    HIDDEN = 256,
    INNER = 96,
    SHARED = 64,
    EXPERTS = 16,
    TOP_K = 4,
    LAYERS = 3,
    BUCKETS = 2,
    STEPS = 200,
    MOST = 64, /* largest bucket */
    BUDGET_MS = 20000,
    MANY = MOE_CUDA_MAX_GRAPHS + 6, /* shapes */
};

static const uint32_t bucket_of[BUCKETS] = {8, MOST};
static const struct moe_backend *backend;
static uint64_t seed;

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", f->member->slot, __LINE__, #cond);  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void ok(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "test_steady: %s\n", st.text);
    exit(1);
}

/* ------------------------------------------------------------------------ counting */

/* Calls since the start of the program. */
static struct {
    uint64_t allocations, synchronisations, captures, instantiations, launches, kernels, copies;
    uint64_t copied_bytes;
} calls;

#define COUNTED(counter, name, parameters, arguments)                                              \
    cudaError_t __real_##name parameters;                                                          \
    cudaError_t __wrap_##name parameters;                                                          \
    cudaError_t __wrap_##name parameters                                                           \
    {                                                                                              \
        calls.counter++;                                                                           \
        return __real_##name arguments;                                                            \
    }

COUNTED(allocations, cudaMalloc, (void **p, size_t n), (p, n))
COUNTED(allocations, cudaFree, (void *p), (p))
COUNTED(allocations, cudaHostAlloc, (void **p, size_t n, unsigned flags), (p, n, flags))
COUNTED(allocations, cudaFreeHost, (void *p), (p))
COUNTED(synchronisations, cudaStreamSynchronize, (cudaStream_t s), (s))
COUNTED(synchronisations, cudaDeviceSynchronize, (void), ())
COUNTED(synchronisations, cudaEventSynchronize, (cudaEvent_t e), (e))
COUNTED(synchronisations, cudaMemcpy, (void *to, const void *from, size_t n, enum cudaMemcpyKind k),
        (to, from, n, k))
COUNTED(captures, cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode m), (s, m))
COUNTED(instantiations, cudaGraphInstantiate,
        (cudaGraphExec_t * e, cudaGraph_t g, unsigned long long flags), (e, g, flags))
COUNTED(launches, cudaGraphLaunch, (cudaGraphExec_t e, cudaStream_t s), (e, s))
COUNTED(kernels, cudaLaunchKernel,
        (const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s),
        (kernel, grid, block, args, shared, s))

#if CUDART_VERSION >= 13000 /* what <<< >>> calls from then on */
COUNTED(kernels, __cudaLaunchKernel,
        (cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s),
        (kernel, grid, block, args, shared, s))
#endif

cudaError_t __real_cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind,
                                   cudaStream_t stream);
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind,
                                   cudaStream_t stream);
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    calls.copies++;
    calls.copied_bytes += n;
    return __real_cudaMemcpyAsync(to, from, n, kind, stream);
}

/* -------------------------------------------------------------------------- layers */

/* State of one slot. */
struct fixture {
    struct member *member;
    struct moe_device *device;
    uint64_t opened_bytes; /* memory of an open device */
    uint32_t copies;       /* of each expert, on slots that follow each other; set before setup */
    struct moe_session *session;
    struct moe_layer *layer[LAYERS];
    uint16_t *x;                        /* pinned [MOST][HIDDEN] */
    struct moe_step_args args[2];       /* of two steps in flight, with their tensors */
    struct moe_step *running[2];        /* NULL: none */
    uint32_t layer_of[2], bucket_of[2]; /* of the running steps: indices */
    uint64_t started;
    uint16_t *first[LAYERS][BUCKETS]; /* [MOST][HIDDEN] the first answers */
};

static struct moe_layer_spec spec_of(uint32_t number)
{
    return (struct moe_layer_spec){.layer = number,
                                   .hidden = HIDDEN,
                                   .experts = EXPERTS,
                                   .intermediate = INNER,
                                   .router = {.score = MOE_SCORE_SIGMOID,
                                              .top_k = TOP_K,
                                              .logit_bias = true,
                                              .select_bias = true,
                                              .groups = 1,
                                              .topk_group = 1,
                                              .group_best = 1,
                                              .renorm = MOE_RENORM_SUM,
                                              .scale = 1},
                                   .activation = MOE_ACT_SWIGLU_OAI,
                                   .swiglu_limit = 7,
                                   .swiglu_alpha = 1.702f,
                                   .gate_up_bias = true,
                                   .down_bias = true,
                                   .shared_intermediate = SHARED,
                                   .shared_gated = true};
}

static void upload(struct moe_layer *layer, const struct moe_layer_spec *spec, enum moe_weight w,
                   uint32_t expert)
{
    static uint16_t data[HIDDEN * HIDDEN];
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = seed + spec->layer * 100003u + (uint64_t)w * 1009 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = moe_f32_to_bf16(0.3f * rng_float(&r));
    if (rows != 0)
        ok(backend->layer_upload(layer, w, expert, MOE_DTYPE_BF16, data, rows * columns * 2));
}

/* In ascending order of each expert's slots. */
static void place_experts(const struct fixture *f, uint32_t *offset, uint16_t *slot)
{
    uint32_t slots = f->member->slots, n = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        uint32_t home = e % slots, next = (e + 1) % slots;
        if (f->copies == 1)
            slot[n++] = (uint16_t)home;
        if (f->copies == 2) {
            slot[n++] = (uint16_t)(home < next ? home : next);
            slot[n++] = (uint16_t)(home < next ? next : home);
        }
        offset[e + 1] = n;
    }
}

static struct moe_layer *make_layer(const struct fixture *f, const struct moe_layer_spec *spec)
{
    uint32_t offset[EXPERTS + 1] = {0};
    uint16_t slot[2 * EXPERTS];
    place_experts(f, offset, slot);
    struct moe_placement placement = {.version = 1,
                                      .experts = EXPERTS,
                                      .slots = f->member->slots,
                                      .offset = offset,
                                      .slot = slot};
    struct moe_layer *layer;
    ok(backend->layer_create(f->device, spec, &placement, f->member->slot, &layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        if (!moe_weight_is_expert(w))
            upload(layer, spec, w, 0);
        for (uint32_t e = 0; moe_weight_is_expert(w) && e < EXPERTS; e++)
            for (uint32_t c = offset[e]; c < offset[e + 1]; c++)
                if (slot[c] == f->member->slot)
                    upload(layer, spec, w, e);
    }
    ok(backend->layer_finish(layer));
    return layer;
}

static void *pinned(const struct fixture *f, size_t bytes)
{
    void *p;
    ok(backend->mem_alloc(f->device, MOE_MEM_HOST, bytes, &p));
    return p;
}

enum { ROWS_BYTES = MOST * HIDDEN * 2, PAIRS_BYTES = MOST * TOP_K * 4 };

static void make_tensors(struct fixture *f)
{
    struct rng r = {.state = seed + 77 * f->member->slot};
    f->x = pinned(f, ROWS_BYTES);
    for (size_t i = 0; i < (size_t)MOST * HIDDEN; i++)
        f->x[i] = moe_f32_to_bf16(rng_float(&r));
    for (int i = 0; i < 2; i++)
        f->args[i] = (struct moe_step_args){.dtype = MOE_DTYPE_BF16,
                                            .x = f->x,
                                            .y = pinned(f, ROWS_BYTES),
                                            .ids_out = pinned(f, PAIRS_BYTES),
                                            .weights_out = pinned(f, PAIRS_BYTES),
                                            .token_state = pinned(f, MOST)};
}

/* False if this slot has no GPU. */
static bool setup_with(struct fixture *f, struct member *m, uint32_t copies)
{
    *f = (struct fixture){.member = m, .copies = copies};
    struct moe_device_config device = {.ordinal = (int)m->slot};
    struct moe_session_config config = member_session(m, 1, BUDGET_MS);
    config.max_tokens = MOST;
    config.max_hidden = HIDDEN;
    config.max_top_k = TOP_K;
    config.max_experts = EXPERTS;
    struct moe_status st = backend->device_open(&device, &f->device);
    if (moe_failed(&st)) {
        printf("skipped: %s\n", st.text);
        return false;
    }
    struct moe_device_info info;
    backend->device_info(f->device, &info);
    f->opened_bytes = info.used_bytes;
    for (uint32_t l = 0; l < LAYERS; l++) {
        struct moe_layer_spec spec = spec_of(l);
        f->layer[l] = make_layer(f, &spec);
    }
    make_tensors(f);
    ok(backend->session_join(f->device, &config, &f->session));
    return true;
}

static bool setup(struct fixture *f, struct member *m)
{
    return setup_with(f, m, 1);
}

static void teardown(struct fixture *f)
{
    struct moe_device_info info;
    backend->session_leave(f->session);
    for (uint32_t l = 0; l < LAYERS; l++) {
        backend->layer_destroy(f->layer[l]);
        for (uint32_t b = 0; b < BUCKETS; b++)
            free(f->first[l][b]);
    }
    backend->mem_free(f->device, MOE_MEM_HOST, f->x, ROWS_BYTES);
    for (int i = 0; i < 2; i++) {
        backend->mem_free(f->device, MOE_MEM_HOST, f->args[i].y, ROWS_BYTES);
        backend->mem_free(f->device, MOE_MEM_HOST, f->args[i].ids_out, PAIRS_BYTES);
        backend->mem_free(f->device, MOE_MEM_HOST, f->args[i].weights_out, PAIRS_BYTES);
        backend->mem_free(f->device, MOE_MEM_HOST, f->args[i].token_state, MOST);
    }
    backend->device_info(f->device, &info);
    EXPECT(info.used_bytes == f->opened_bytes); /* nothing leaks */
    backend->device_close(f->device);
}

/* --------------------------------------------------------------------------- steps */

/* Waits for the step in this step slot, if there is one, and checks its answer. */
static void finish(struct fixture *f, uint32_t step_slot)
{
    const struct moe_step_args *a = &f->args[step_slot];
    struct moe_step_result result;
    if (f->running[step_slot] == NULL)
        return;
    ok(backend->step_wait(f->running[step_slot], UINT64_MAX, &result));
    f->running[step_slot] = NULL;
    EXPECT(result.total_ns > 0 && result.stage_ns[MOE_STAGE_COMBINE] > 0);
    for (uint32_t t = 0; t < a->tokens; t++)
        EXPECT(a->token_state[t] == MOE_TOKEN_OK);
    uint16_t **first = &f->first[f->layer_of[step_slot]][f->bucket_of[step_slot]];
    size_t bytes = (size_t)a->tokens * HIDDEN * 2;
    if (*first == NULL) {
        EXPECT(a->tokens == a->bucket);
        *first = malloc(ROWS_BYTES);
        EXPECT(*first != NULL);
        memcpy(*first, a->y, bytes);
    }
    EXPECT(memcmp(*first, a->y, bytes) == 0);
}

/* Starts a step behind the running one; layer and bucket are indices. */
static void start(struct fixture *f, uint32_t layer, uint32_t bucket, uint32_t tokens)
{
    uint32_t step_slot = f->started++ % 2;
    struct moe_step_args *a = &f->args[step_slot];
    finish(f, step_slot);
    a->layer = f->layer[layer];
    a->bucket = bucket_of[bucket];
    a->tokens = tokens;
    memset(a->y, 0xff, ROWS_BYTES);
    f->layer_of[step_slot] = layer;
    f->bucket_of[step_slot] = bucket;
    ok(backend->step_enqueue(f->session, a, &f->running[step_slot]));
}

static void finish_all(struct fixture *f)
{
    finish(f, 0);
    finish(f, 1);
}

/* Every layer and bucket twice, the largest bucket first: growing later would discard the
 * graphs. */
static void warm_up(struct fixture *f)
{
    for (uint32_t b = BUCKETS; b-- > 0;)
        for (uint32_t l = 0; l < LAYERS; l++) {
            start(f, l, b, bucket_of[b]);
            start(f, l, b, bucket_of[b]);
        }
    finish_all(f);
}

/* The same layers and buckets on all slots, different tokens on each. */
static void random_steps(struct fixture *f, uint32_t steps)
{
    struct rng common = {.state = seed}, own = {.state = seed + 1 + f->member->slot};
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t layer = (uint32_t)rng_below(&common, LAYERS);
        uint32_t bucket = (uint32_t)rng_below(&common, BUCKETS);
        start(f, layer, bucket, (uint32_t)rng_below(&own, bucket_of[bucket] + 1));
    }
    finish_all(f);
}

/* ----------------------------------------------------------------------- scenarios */

static int a_steady_step_allocates_and_waits_for_nothing(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    if (!setup(f, m))
        return SKIP_CODE;
    warm_up(f);
    EXPECT(calls.captures == BUCKETS * MOE_CUDA_STEP_SLOTS); /* BUCKETS only, not times LAYERS */
    EXPECT(memcmp(f->first[0][0], f->first[1][0], 8 * HIDDEN * 2) != 0);
    EXPECT(memcmp(f->first[1][0], f->first[2][0], 8 * HIDDEN * 2) != 0);
    __typeof__(calls) before = calls;
    random_steps(f, STEPS);
    printf("slot %u: %d steps over %d layers and %d buckets: %" PRIu64 " allocations, %" PRIu64
           " synchronisations, %" PRIu64 " captures, %" PRIu64 " kernels outside of %" PRIu64
           " graphs\n",
           m->slot, STEPS, LAYERS, BUCKETS, calls.allocations - before.allocations,
           calls.synchronisations - before.synchronisations, calls.captures - before.captures,
           calls.kernels - before.kernels, calls.launches - before.launches);
    EXPECT(calls.allocations == before.allocations);
    EXPECT(calls.synchronisations == before.synchronisations);
    EXPECT(calls.captures == before.captures && calls.instantiations == before.instantiations);
    EXPECT(calls.kernels == before.kernels);
    EXPECT(calls.launches == before.launches + STEPS);
    teardown(f);
    return 0;
}

/* Two requests of 24 and 40 tokens, with rows in memory of the device; `steps` times. */
static void segment_steps(struct fixture *f, struct moe_step_segment segments[2], uint32_t steps)
{
    struct moe_step_args a = f->args[0];
    struct moe_step_result result;
    struct moe_step *step;
    a.layer = f->layer[0];
    a.bucket = a.tokens = MOST;
    a.x = NULL;
    a.y = NULL;
    a.segments = segments;
    a.segment_count = 2;
    for (uint32_t i = 0; i < steps; i++) {
        ok(backend->step_enqueue(f->session, &a, &step));
        ok(backend->step_wait(step, UINT64_MAX, &result));
        EXPECT(result.stage_ns[MOE_STAGE_COMBINE] > 0);
    }
}

/* One kernel takes the rows and the step's parameters, one gives y back; the copy of a step carries
 * the routing. */
static int rows_of_segments_are_copied_once_each_way(struct member *m)
{
    enum { STEPS_EACH = 20, FIRST_TOKENS = 24 };
    static struct fixture fixture, *const f = &fixture;
    char *x, *y, got[ROWS_BYTES];
    const size_t at = (size_t)FIRST_TOKENS * HIDDEN * 2;
    if (!setup(f, m))
        return SKIP_CODE;
    ok(backend->mem_alloc(f->device, MOE_MEM_DEVICE, ROWS_BYTES, (void **)&x));
    ok(backend->mem_alloc(f->device, MOE_MEM_DEVICE, ROWS_BYTES, (void **)&y));
    ok(moe_cuda_mem_copy(f->device, x, f->x, ROWS_BYTES));
    struct moe_step_segment segments[2] = {
        {.tokens = FIRST_TOKENS, .x = x, .y = y},
        {.tokens = MOST - FIRST_TOKENS, .x = x + at, .y = y + at}};
    __typeof__(calls) before = calls;
    segment_steps(f, segments, STEPS_EACH); /* captures too: no copy is in a graph */
    EXPECT(calls.captures > before.captures && calls.copies - before.copies == STEPS_EACH);
    before = calls;
    segment_steps(f, segments, STEPS_EACH);
    const uint64_t bytes = (calls.copied_bytes - before.copied_bytes) / STEPS_EACH;
    printf("slot %u: a step of 2 segments, %d bytes of rows: %" PRIu64 " graph, %" PRIu64
           " kernels outside of it, %" PRIu64 " copies with %" PRIu64 " bytes\n",
           m->slot, ROWS_BYTES, (calls.launches - before.launches) / STEPS_EACH,
           (calls.kernels - before.kernels) / STEPS_EACH,
           (calls.copies - before.copies) / STEPS_EACH, bytes);
    EXPECT(calls.launches - before.launches == STEPS_EACH);
    EXPECT(calls.kernels - before.kernels == 2 * STEPS_EACH);
    EXPECT(calls.copies - before.copies == STEPS_EACH && bytes < ROWS_BYTES / 2);
    ok(moe_cuda_mem_copy(f->device, got, y, ROWS_BYTES));
    start(f, 0, 1, MOST); /* the same rows from the host */
    finish_all(f);
    EXPECT(memcmp(got, f->first[0][1], ROWS_BYTES) == 0);
    backend->mem_free(f->device, MOE_MEM_DEVICE, x, ROWS_BYTES);
    backend->mem_free(f->device, MOE_MEM_DEVICE, y, ROWS_BYTES);
    teardown(f);
    return 0;
}

/* Pretends that `step` steps have been run: sets the numbers, and the peers' flags that the last
 * one is done. Nothing is in flight. */
static void pretend_steps(struct fixture *f, uint32_t step)
{
    struct moe_session *s = f->session;
    const uint64_t done = moe_window_flag(moe_window_stamp(s->config.epoch, step), 0);
    s->step = step;
    ok(moe_cuda_mem_copy(f->device, &s->control->step, &step, sizeof step));
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (p != s->config.slot)
            ok(moe_cuda_mem_copy(f->device,
                                 moe_window_done_of(&s->layout, s->window.base[s->config.slot], p),
                                 &done, sizeof done));
}

static int the_wipe_of_the_words_is_not_noticed(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    if (!setup(f, m))
        return SKIP_CODE;
    warm_up(f);
    EXPECT(board_barrier(m, BUDGET_MS));
    pretend_steps(f, (1u << MOE_WINDOW_STEP_BITS) - 8);
    EXPECT(board_barrier(m, BUDGET_MS));
    random_steps(f, 30);
    EXPECT(f->session->step < 30);
    printf("slot %u: 30 steps across the wipe\n", m->slot);
    teardown(f);
    return 0;
}

/* Partial sums of tokens are by slot, so bits may differ without a slot. */
static void forget_answers(struct fixture *f)
{
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t b = 0; b < BUCKETS; b++) {
            free(f->first[l][b]);
            f->first[l][b] = NULL;
        }
}

/* Without the last slot, which runs no more steps. Its experts have copies. */
static int a_mask_keeps_graphs_and_memory(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    const uint64_t last = UINT64_C(1) << (m->slots - 1);
    if (m->slots == 1)
        return 0;
    if (!setup_with(f, m, 2))
        return SKIP_CODE;
    warm_up(f);
    EXPECT(calls.captures == BUCKETS * MOE_CUDA_STEP_SLOTS);
    __typeof__(calls) before = calls;
    if ((last >> m->slot & 1) == 0) {
        forget_answers(f);
        ok(backend->session_mask(f->session, 2, m->live & ~last));
        ok(backend->session_exchange(f->session, NULL, NULL, 0));
        warm_up(f);
        random_steps(f, STEPS);
        EXPECT(calls.captures == before.captures && calls.instantiations == before.instantiations);
        EXPECT(calls.allocations == before.allocations);
        EXPECT(calls.launches == before.launches + STEPS + 2 * LAYERS * BUCKETS);
        printf("slot %u: a mask without slot %u, no capture\n", m->slot, m->slots - 1);
    } else {
        backend->session_abort(f->session); /* the others have left it */
    }
    EXPECT(board_barrier(m, BUDGET_MS));
    teardown(f);
    return 0;
}

static int growing_memory_voids_graphs(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    if (!setup(f, m))
        return SKIP_CODE;
    start(f, 0, 0, bucket_of[0]);
    start(f, 1, 1, bucket_of[1]); /* grows while the other step is in flight */
    start(f, 0, 0, bucket_of[0]);
    start(f, 1, 1, bucket_of[1]);
    finish_all(f);
    EXPECT(calls.captures == 3 * MOE_CUDA_STEP_SLOTS);
    teardown(f);
    return 0;
}

/* Layers that differ in one argument of the kernels. */
static int more_shapes_than_are_kept_still_run(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    static struct moe_layer *layer[MANY];
    if (!setup(f, m))
        return SKIP_CODE;
    for (uint32_t i = 0; i < MANY; i++) {
        struct moe_layer_spec spec = spec_of(0);
        spec.router.scale = 1.0f + (float)i;
        layer[i] = make_layer(f, &spec);
    }
    struct moe_layer *plain = f->layer[0];
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < MANY; i++) {
            finish_all(f);
            f->layer[0] = layer[i];
            free(f->first[0][0]);
            f->first[0][0] = NULL;
            start(f, 0, 0, bucket_of[0]);
            finish_all(f);
            start(f, 0, 0, bucket_of[0]); /* in the other step slot: the same bits */
        }
    finish_all(f);
    EXPECT(calls.captures == 2 * MANY * MOE_CUDA_STEP_SLOTS); /* each shape was evicted before it
                                                                 came again */
    f->layer[0] = plain;
    for (uint32_t i = 0; i < MANY; i++)
        backend->layer_destroy(layer[i]);
    printf("slot %u: %d shapes through room for %d\n", m->slot, MANY, MOE_CUDA_MAX_GRAPHS);
    teardown(f);
    return 0;
}

/* -------------------------------------------------------------------------- main */

static int run(const char *name, int (*scenario)(struct member *), uint32_t slots)
{
    struct group group;
    int status[MOE_MAX_SLOTS] = {0};
    printf("%s\n", name);
    group_start(&group, slots, scenario, NULL);
    if (group_finish(&group, 60, status))
        return 0;
    for (uint32_t s = 0; s < slots; s++)
        if (WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == SKIP_CODE)
            return SKIP_CODE;
    printf("%s FAILED\n", name);
    return 1;
}

int main(int argc, char **argv)
{
    const char *replay = getenv("MOE_SEED");
    uint32_t slots = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    backend = &moe_backend_cuda;
    if (slots < 1 || slots > MOE_MAX_SLOTS)
        return 2;
    seed = replay != NULL ? strtoull(replay, NULL, 10) : (uint64_t)time(NULL);
    printf("MOE_SEED=%" PRIu64 "\n", seed);
    int rc = 0;
#define RUN(scenario) rc = rc != 0 ? rc : run(#scenario, scenario, slots)
    RUN(a_steady_step_allocates_and_waits_for_nothing);
    RUN(rows_of_segments_are_copied_once_each_way);
    RUN(the_wipe_of_the_words_is_not_noticed);
    RUN(a_mask_keeps_graphs_and_memory);
    RUN(growing_memory_voids_graphs);
    RUN(more_shapes_than_are_kept_still_run);
    return rc;
}
