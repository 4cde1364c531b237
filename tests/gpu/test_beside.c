/* The shared expert beside dispatch and combine (kernels/cuda/step_capture.c), which large steps of
 * wide rows do in groups of four and more: answers are right, whoever brings how many tokens and
 * whoever comes late; every repetition gives the same bits; and a peer that dies in the middle
 * costs the others an error in time, not a hang.
 *
 *     test_beside [SLOTS]
 *
 * Forks one process per slot, one GPU each. In smaller groups the same steps run stage after stage,
 * and the promises are the same. Without a GPU it says so and exits with 77. */
#include "group.h"
#include "plain_layer.h"

#include "base/clock.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SKIP_CODE = 77,
    HIDDEN = 6400, /* rows of 12.8 kB */
    INNER = 64,
    SHARED = 512,
    EXPERTS = 16,
    TOP_K = 4,
    BUCKET = 4096,
    STEPS = 40, /* of a pattern of tokens */
    PATTERNS = 4,
    BUDGET_MS = 20000,
    SHORT_MS = 1500,   /* where a wait is meant to run out */
    BEFORE_DEATH = 10, /* steps */
};

static const double TOLERANCE = 1e-2; /* relative Frobenius, bf16 against exact fp32 */
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
    fprintf(stderr, "test_beside: %s\n", st.text);
    exit(1);
}

/* What one slot works with. */
struct fixture {
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    struct moe_step_args args[2]; /* bf16, of two steps in flight; their tensors are pinned */
    struct moe_step_args exact;   /* the same tokens as F32, with the routing of args[0] */
    uint16_t *first;              /* [BUCKET][HIDDEN] y of a pattern's first step */
};

/* -------------------------------------------------------------------------- setup */

static void upload(struct moe_layer *layer, const struct moe_layer_spec *spec, enum moe_weight w,
                   uint32_t expert)
{
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    if (rows == 0)
        return;
    struct rng r = {.state = seed + (uint64_t)w * 1009 + expert};
    float scale = 2.0f / sqrtf((float)columns);
    uint16_t *data = malloc(rows * columns * sizeof *data);
    if (data == NULL)
        exit(1);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = moe_f32_to_bf16(scale * rng_float(&r));
    ok(backend->layer_upload(layer, w, expert, MOE_DTYPE_BF16, data, rows * columns * 2));
    free(data);
}

static struct moe_layer *make_layer(const struct fixture *f)
{
    struct moe_layer_spec spec = {.hidden = HIDDEN,
                                  .experts = EXPERTS,
                                  .intermediate = INNER,
                                  .router = PLAIN_ROUTER(TOP_K),
                                  .shared_intermediate = SHARED,
                                  .shared_gated = true};
    struct dealt dealt;
    struct moe_placement placement = deal_experts(&dealt, EXPERTS, f->member->slots);
    struct moe_layer *layer;
    ok(backend->layer_create(f->device, &spec, &placement, f->member->slot, &layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        if (!moe_weight_is_expert(w))
            upload(layer, &spec, w, 0);
        for (uint32_t e = 0; moe_weight_is_expert(w) && e < EXPERTS; e++)
            if (dealt.slot[e] == f->member->slot)
                upload(layer, &spec, w, e);
    }
    ok(backend->layer_finish(layer));
    return layer;
}

/* Given back when the device is closed. */
static void *pinned(const struct fixture *f, size_t bytes)
{
    void *p;
    ok(backend->mem_alloc(f->device, MOE_MEM_HOST, bytes, &p));
    return p;
}

static struct moe_step_args tensors(const struct fixture *f, enum moe_dtype dtype)
{
    size_t row = HIDDEN * moe_dtype_bytes(dtype);
    return (struct moe_step_args){.layer = f->layer,
                                  .dtype = dtype,
                                  .bucket = BUCKET,
                                  .x = pinned(f, BUCKET * row),
                                  .y = pinned(f, BUCKET * row),
                                  .ids_out = pinned(f, BUCKET * TOP_K * sizeof(int32_t)),
                                  .weights_out = pinned(f, BUCKET * TOP_K * sizeof(float)),
                                  .token_state = pinned(f, BUCKET)};
}

static void make_tensors(struct fixture *f)
{
    struct rng r = {.state = seed + 77 * f->member->slot};
    uint8_t *mode = pinned(f, BUCKET);
    f->args[0] = tensors(f, MOE_DTYPE_BF16);
    f->args[1] = tensors(f, MOE_DTYPE_BF16);
    f->exact = tensors(f, MOE_DTYPE_F32);
    f->first = pinned(f, (size_t)BUCKET * HIDDEN * 2);
    uint16_t *x = (uint16_t *)f->args[0].x;
    float *exact = (float *)f->exact.x;
    for (size_t i = 0; i < (size_t)BUCKET * HIDDEN; i++) {
        x[i] = moe_f32_to_bf16(rng_float(&r));
        exact[i] = moe_bf16_to_f32(x[i]);
    }
    memcpy((void *)f->args[1].x, x, (size_t)BUCKET * HIDDEN * 2);
    memset(mode, MOE_ROUTE_IDS_WEIGHTS, BUCKET);
    f->exact.mode = mode;
    f->exact.ids_in = f->args[0].ids_out;
    f->exact.weights_in = f->args[0].weights_out;
}

/* False where there is no GPU for this slot. */
static bool setup(struct fixture *f, struct member *m, uint32_t budget_ms)
{
    *f = (struct fixture){.member = m};
    struct moe_device_config device = {.ordinal = (int)m->slot};
    struct moe_session_config config = member_session(m, 1, budget_ms);
    config.max_tokens = BUCKET;
    config.max_hidden = HIDDEN;
    config.max_top_k = TOP_K;
    config.max_experts = EXPERTS;
    struct moe_status st = backend->device_open(&device, &f->device);
    if (moe_failed(&st)) {
        printf("skipped: %s\n", st.text);
        return false;
    }
    f->layer = make_layer(f);
    make_tensors(f);
    ok(backend->session_join(f->device, &config, &f->session));
    return true;
}

/* -------------------------------------------------------------------------- steps */

/* Tokens of a slot: full batches, ragged ones, one token or none beside full ones. */
static uint32_t tokens_of(uint32_t pattern, uint32_t slot)
{
    static const uint32_t tokens[PATTERNS][4] = {{BUCKET, BUCKET, BUCKET, BUCKET},
                                                 {4000, 0, 1, 3077},
                                                 {0, 129, BUCKET, 128},
                                                 {2049, 600, 0, 0}};
    return tokens[pattern][slot % 4];
}

static void run(const struct fixture *f, const struct moe_step_args *args)
{
    struct moe_step *step;
    memset(args->y, 0xff, (size_t)BUCKET * HIDDEN * moe_dtype_bytes(args->dtype));
    ok(backend->step_enqueue(f->session, args, &step));
    ok(backend->step_wait(step, MOE_NEVER, NULL));
}

static double error_of(const struct fixture *f)
{
    const uint16_t *got = f->args[0].y;
    const float *want = f->exact.y;
    double difference = 0, norm = 1e-30;
    for (size_t i = 0; i < (size_t)f->exact.tokens * HIDDEN; i++) {
        double d = (double)moe_bf16_to_f32(got[i]) - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / norm);
}

static void set_tokens(struct fixture *f, uint32_t pattern)
{
    f->args[0].tokens = f->args[1].tokens = f->exact.tokens = tokens_of(pattern, f->member->slot);
}

/* Slots dawdle, each at other steps. */
static void repeat(struct fixture *f, struct rng *r)
{
    struct moe_step *step[2] = {NULL, NULL};
    size_t bytes = (size_t)f->args[0].tokens * HIDDEN * 2;
    for (uint32_t i = 0; i < STEPS + 2; i++) {
        const uint32_t lane = i % 2;
        if (step[lane] != NULL) {
            ok(backend->step_wait(step[lane], MOE_NEVER, NULL));
            EXPECT(memcmp(f->args[lane].y, f->first, bytes) == 0);
            step[lane] = NULL;
        }
        if (i >= STEPS)
            continue;
        if (rng_chance(r, 20))
            usleep((useconds_t)rng_below(r, 3000));
        memset(f->args[lane].y, 0xff, bytes);
        ok(backend->step_enqueue(f->session, &f->args[lane], &step[lane]));
    }
}

/* ---------------------------------------------------------------------- scenarios */

static int answers_are_right_and_the_same_every_time(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    struct rng r = {.state = seed + 5 * m->slot};
    if (!setup(f, m, BUDGET_MS))
        return SKIP_CODE;
    for (uint32_t pattern = 0; pattern < PATTERNS; pattern++) {
        set_tokens(f, pattern);
        run(f, &f->args[0]);
        memcpy(f->first, f->args[0].y, (size_t)f->args[0].tokens * HIDDEN * 2);
        run(f, &f->exact);
        double error = error_of(f);
        printf("slot %u, %u tokens: relative error %.1e\n", m->slot, f->exact.tokens, error);
        EXPECT(error < TOLERANCE);
        repeat(f, &r);
    }
    backend->session_leave(f->session);
    backend->layer_destroy(f->layer);
    backend->device_close(f->device);
    return 0;
}

/* The last slot dies while steps are in flight. */
static int a_dead_peer_is_named_in_time(struct member *m)
{
    static struct fixture fixture, *const f = &fixture;
    const uint32_t victim = m->slots - 1;
    struct moe_step *step[2];
    struct moe_step_result result = {.missing_slot = -1};
    struct moe_status st = moe_ok();
    if (!setup(f, m, SHORT_MS))
        return SKIP_CODE;
    set_tokens(f, 0);
    run(f, &f->args[0]);
    EXPECT(board_barrier(m, BUDGET_MS));
    for (uint32_t i = 0; !moe_failed(&st); i++) {
        const uint32_t lane = i % 2;
        if (m->slot == victim && i == BEFORE_DEATH)
            (void)raise(SIGKILL);
        if (i >= 2)
            st = backend->step_wait(step[lane], MOE_NEVER, &result);
        if (!moe_failed(&st))
            st = backend->step_enqueue(f->session, &f->args[lane], &step[lane]);
    }
    printf("slot %u: %s\n", m->slot, st.text);
    EXPECT(st.code == MOE_UNAVAILABLE && st.reason == MOE_REASON_PEER_LOST);
    EXPECT(backend->session_lost(f->session) == UINT64_C(1) << victim);
    _exit(0); /* the other step in flight is the session's to end */
}

int main(int argc, char **argv)
{
    uint32_t slots = argc > 1 ? (uint32_t)atoi(argv[1]) : 4;
    int status[MOE_MAX_SLOTS] = {0};
    struct group group;
    backend = moe_backend_find("cuda");
    if (slots < 2 || slots > MOE_MAX_SLOTS || backend == NULL)
        return 2;
    seed = seed_from_environment(1);
    printf("seed %llu\n", (unsigned long long)seed);
    group_start(&group, slots, answers_are_right_and_the_same_every_time, NULL);
    bool good = group_finish(&group, 120, status);
    if (WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == SKIP_CODE)
        return SKIP_CODE;
    group_start(&group, slots, a_dead_peer_is_named_in_time, NULL);
    (void)group_finish(&group, 60, status); /* the victim does not end well */
    for (uint32_t s = 0; s < slots; s++)
        good = good && (s == slots - 1 ? WIFSIGNALED(status[s]) && WTERMSIG(status[s]) == SIGKILL
                                       : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
