/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of optimizer steps on GPUs, compared with the fastest copy of the same run.
 *
 *     train_bench [--slots N] [--shapes LIST] [--experts E] [--repeats R]
 *
 * Forks one process per slot. Each has `experts` different experts of a layer, the shared expert
 * and the router, with their training state. Gradients of the last two are summed over the slots.
 * Every timed step gets new gradients: periodic noise, so the norm is known. The oracle checks a
 * few hundred elements of every block after the last timed step.
 *
 * Time is the caller's wait in optimizer_step, the slowest slot's median. Bytes are those that have
 * to move: the gradient twice (norm, step), master and moments in and out, resident weights out.
 * The copy is within device memory and counts bytes read and written. The program fills gradients
 * inside the backend, to avoid the bus; otherwise it uses the backend's interface. */
#include "group.h"
#include "plain_layer.h"

#include "base/clock.h"
#include "cuda/step/backend.h"
#include "cuda/training/trainer.h"
#include "daemon/options.h"
#include "oracle/oracle.h"
#include "support/median.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum {
    PERIOD = 4 * 3999971, /* floats of noise; a prime times four, so that rows differ */
    MAX_REPEATS = 100,
    WARM_UP = 2,
    WINDOWS = 8, /* checked per block */
    WINDOW = 61, /* elements per window */
    COPIES = 9,
    BUDGET_MS = 20000,
    BARRIER_MS = 600000,
};
#define COPY_BYTES ((size_t)2 << 30)

struct shape {
    const char *name;
    uint32_t experts; /* per slot */
    struct moe_layer_spec spec;
};

#define ROUTER                                                                                     \
    {                                                                                              \
        .top_k = 2, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1                      \
    }
static const struct shape shapes[] = {
    {"deepseek-v3",
     64,
     {.hidden = 7168, .intermediate = 2048, .shared_intermediate = 2048, .router = ROUTER}},
    {"qwen3-30b", 128, {.hidden = 2048, .intermediate = 768, .router = ROUTER}},
    {"mixtral-8x7b", 8, {.hidden = 4096, .intermediate = 14336, .router = ROUTER}},
    {"tiny", 5, {.hidden = 37, .intermediate = 11, .shared_intermediate = 9, .router = ROUTER}},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Kinds of steps. */
static const struct way {
    const char *name;
    enum moe_optimizer optimizer;
    bool clips;
} ways[] = {{"AdamW", MOE_OPTIMIZER_ADAMW, false},
            {"AdamW, clipped", MOE_OPTIMIZER_ADAMW, true},
            {"SGD", MOE_OPTIMIZER_SGD, false}};
enum { WAYS = sizeof ways / sizeof *ways };

/* Shared by all slots. */
struct board_of_times {
    double ms[MOE_MAX_SLOTS];
    double copy_gb_s[MOE_MAX_SLOTS];
};

struct plan {
    const struct moe_backend *backend;
    const char *shapes;
    uint64_t slots, experts, repeats;
    struct board_of_times *times;
};

struct bench {
    const struct plan *plan;
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    const struct shape *shape;
    struct moe_layer_spec spec;
    struct moe_layer *layer;
    struct moe_trainer *trainer;
    float *noise;     /* host [PERIOD] */
    float *on_device; /* [PERIOD] */
    double squares;   /* of one period */
};

static void require(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "train_bench: %s\n", st.text);
    exit(1);
}

static void fail(const struct bench *b, const char *what, double got, double want)
{
    fprintf(stderr, "train_bench: slot %u, %s: %s is %.9g and should be %.9g\n", b->member->slot,
            b->shape->name, what, got, want);
    exit(1);
}

static void await_members(struct bench *b)
{
    if (!board_barrier(b->member, BARRIER_MS))
        exit(1);
}

static void *need(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (p == NULL)
        exit(1);
    return p;
}

/* ------------------------------------------------------------------------ setup */

static void make_noise(struct bench *b)
{
    struct rng r = {.state = 5};
    void *p;
    b->noise = need(PERIOD * sizeof *b->noise);
    for (uint32_t i = 0; i < PERIOD; i++) {
        b->noise[i] = rng_float(&r);
        b->squares += (double)b->noise[i] * (double)b->noise[i];
    }
    require(b->plan->backend->mem_alloc(b->device, MOE_MEM_DEVICE, PERIOD * sizeof *b->noise, &p));
    require(b->plan->backend->mem_copy(b->device, p, b->noise, PERIOD * sizeof *b->noise));
    b->on_device = p;
}

/* Every weight is a piece of the noise, divided by twenty. */
static void upload(struct bench *b, enum moe_weight w, uint32_t entry, const uint16_t *values)
{
    size_t rows, columns;
    moe_weight_shape(&b->spec, w, &rows, &columns);
    if (rows > 0)
        require(b->plan->backend->layer_upload(b->layer, w, entry, MOE_DTYPE_BF16,
                                               values + (size_t)8 * entry + w,
                                               rows * columns * sizeof *values));
}

static void make_layer(struct bench *b)
{
    const struct plan *p = b->plan;
    uint32_t each = p->experts != 0 ? (uint32_t)p->experts : b->shape->experts;
    struct dealt dealt;
    b->spec = b->shape->spec;
    b->spec.experts = each * (uint32_t)p->slots;
    struct moe_placement placement = deal_experts(&dealt, b->spec.experts, (uint32_t)p->slots);
    size_t most = (size_t)b->spec.hidden * b->spec.intermediate + 8 * MOE_MAX_EXPERTS + 64;
    most += (size_t)b->spec.experts * b->spec.hidden;
    uint16_t *values = need(most * sizeof *values);
    for (size_t i = 0; i < most; i++)
        values[i] = moe_f32_to_bf16(0.05f * b->noise[i % PERIOD]);
    require(p->backend->layer_create(b->device, &b->spec, &placement, b->member->slot, &b->layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? b->spec.experts : 1); e++)
            if (!moe_weight_is_expert(w) || dealt.slot[e] == b->member->slot)
                upload(b, w, e, values);
    require(p->backend->layer_finish(b->layer));
    free(values);
}

/* Fills all elements of a block with whole periods, one after the other. */
static void fill_gradient(const struct bench *b, struct moe_cuda_block *block)
{
    size_t n = block->entries * block->n;
    for (size_t at = 0; at < n; at += PERIOD) {
        size_t part = n - at < PERIOD ? n - at : PERIOD;
        require(MOE_CUDA(cudaMemcpyAsync(block->grad + at, b->on_device, part * sizeof(float),
                                         cudaMemcpyDeviceToDevice, b->device->compute)));
    }
    block->grad_is_zero = false;
}

static void fill_gradients(const struct bench *b)
{
    for (uint32_t i = 0; i < b->trainer->blocks; i++)
        fill_gradient(b, &b->trainer->block[i]);
    require(moe_cuda_device_finish(b->device));
}

/* ------------------------------------------------------------------------- copy */

static double copy_rate(const struct bench *b)
{
    void *from, *to;
    double ms[COPIES];
    cudaEvent_t begin, end;
    cudaStream_t stream = b->device->compute;
    require(b->plan->backend->mem_alloc(b->device, MOE_MEM_DEVICE, COPY_BYTES, &from));
    require(b->plan->backend->mem_alloc(b->device, MOE_MEM_DEVICE, COPY_BYTES, &to));
    for (size_t at = 0; at + PERIOD <= COPY_BYTES / sizeof(float); at += PERIOD)
        require(MOE_CUDA(cudaMemcpyAsync((float *)from + at, b->on_device, PERIOD * sizeof(float),
                                         cudaMemcpyDeviceToDevice, stream)));
    require(MOE_CUDA(cudaEventCreate(&begin)));
    require(MOE_CUDA(cudaEventCreate(&end)));
    for (int i = -WARM_UP; i < COPIES; i++) {
        float took;
        require(MOE_CUDA(cudaEventRecord(begin, stream)));
        require(MOE_CUDA(cudaMemcpyAsync(to, from, COPY_BYTES, cudaMemcpyDeviceToDevice, stream)));
        require(MOE_CUDA(cudaEventRecord(end, stream)));
        require(MOE_CUDA(cudaEventSynchronize(end)));
        require(MOE_CUDA(cudaEventElapsedTime(&took, begin, end)));
        if (i >= 0)
            ms[i] = (double)took;
    }
    require(MOE_CUDA(cudaEventDestroy(begin)));
    require(MOE_CUDA(cudaEventDestroy(end)));
    b->plan->backend->mem_free(b->device, MOE_MEM_DEVICE, from, COPY_BYTES);
    b->plan->backend->mem_free(b->device, MOE_MEM_DEVICE, to, COPY_BYTES);
    return 2.0 * (double)COPY_BYTES / median(ms, COPIES) / 1e6;
}

/* ------------------------------------------------------------------------ check */

/* A window of a block's tensors, in double. */
struct window {
    size_t first, n;
    double value[WINDOW], moment1[WINDOW], moment2[WINDOW];
};

static void read_floats(const struct bench *b, const float *from, size_t n, double *out)
{
    float values[WINDOW];
    require(b->plan->backend->mem_copy(b->device, values, from, n * sizeof *values));
    for (size_t i = 0; i < n; i++)
        out[i] = (double)values[i];
}

static void read_window(const struct bench *b, const struct moe_cuda_block *block, uint32_t number,
                        struct window *w)
{
    size_t n = block->entries * block->n;
    w->n = n < WINDOW ? n : WINDOW;
    w->first = (n - w->n) / (WINDOWS - 1) * number; /* spread from the beginning to the end */
    if (number == WINDOWS - 1)
        w->first = n - w->n;
    read_floats(b, block->value + w->first, w->n, w->value);
    read_floats(b, block->moment1 + w->first, w->n, w->moment1);
    if (block->moment2 != NULL)
        read_floats(b, block->moment2 + w->first, w->n, w->moment2);
}

/* Replicated gradients are equal on all slots, so their sum is a multiple. */
static double copies_of(const struct bench *b, const struct moe_cuda_block *block)
{
    return block->expert ? 1 : (double)b->plan->slots;
}

static double all_squares(const struct bench *b)
{
    double sum = 0;
    for (uint32_t i = 0; i < b->trainer->blocks; i++) {
        const struct moe_cuda_block *block = &b->trainer->block[i];
        size_t n = block->entries * block->n, rest = n % PERIOD;
        double copies = copies_of(b, block), part = (double)(n / PERIOD) * b->squares;
        for (size_t j = 0; j < rest; j++)
            part += (double)b->noise[j] * (double)b->noise[j];
        /* Every slot has the same number of experts, with the same gradients. */
        sum += block->expert ? part * (double)b->plan->slots : part * copies * copies;
    }
    return sum;
}

static void check_resident(const struct bench *b, const struct moe_cuda_block *block,
                           const struct window *w)
{
    const struct moe_cuda_matrix *m = &b->layer->desc.matrix[block->matrix];
    uint16_t got[WINDOW];
    if (block->kind != MOE_CUDA_BLOCK_MATRIX || m->dtype != MOE_DTYPE_BF16)
        return;
    require(b->plan->backend->mem_copy(b->device, got, (const uint16_t *)m->data + w->first,
                                       w->n * sizeof *got));
    for (size_t i = 0; i < w->n; i++)
        if (got[i] != moe_f32_to_bf16((float)w->value[i]))
            fail(b, "a resident weight", (double)moe_bf16_to_f32(got[i]), w->value[i]);
}

static void compare(const struct bench *b, const char *what, size_t n, const double *got,
                    const double *want)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(want[i]));
    for (size_t i = 0; i < n; i++) /* where terms cancel, the largest ones set the error */
        if (!(fabs(got[i] - want[i]) <= 1e-5 * fabs(want[i]) + 1e-6 * largest))
            fail(b, what, got[i], want[i]);
}

static void check_window(const struct bench *b, const struct moe_cuda_block *block, uint32_t number,
                         struct window *before, const struct moe_optimizer_args *args,
                         double factor)
{
    struct window after;
    double grad[WINDOW];
    read_window(b, block, number, &after);
    for (size_t i = 0; i < after.n; i++)
        grad[i] = (double)b->noise[(after.first + i) % PERIOD] * copies_of(b, block);
    bool adamw = block->moment2 != NULL;
    moe_oracle_optimizer_step(adamw ? MOE_OPTIMIZER_ADAMW : MOE_OPTIMIZER_SGD, args, factor,
                              after.n, grad, before->value, before->moment1,
                              adamw ? before->moment2 : NULL);
    compare(b, "a master", after.n, after.value, before->value);
    compare(b, "a first moment", after.n, after.moment1, before->moment1);
    if (adamw)
        compare(b, "a second moment", after.n, after.moment2, before->moment2);
    check_resident(b, block, &after);
}

/* ----------------------------------------------------------------------- timing */

static struct moe_optimizer_args args_of(const struct way *way, uint64_t number)
{
    return (struct moe_optimizer_args){.learning_rate = 1e-3,
                                       .weight_decay = 0.01,
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .epsilon = 1e-8,
                                       .momentum = 0.9,
                                       .grad_scale = 0.5,
                                       .max_grad_norm = way->clips ? 1 : 0,
                                       .number = number};
}

/* Milliseconds of one step; all slots begin it at the same time. */
static double step(struct bench *b, const struct way *way, uint64_t number)
{
    struct moe_optimizer_args args = args_of(way, number);
    struct moe_optimizer_result result = {.nonfinite = true};
    double norm;
    (void)moe_oracle_gradient_factor(&args, all_squares(b), &norm);
    fill_gradients(b);
    await_members(b);
    uint64_t begin = moe_clock_ns();
    require(b->plan->backend->training->optimizer_step(b->session, &b->trainer, 1, &args, &result));
    double took = (double)(moe_clock_ns() - begin) / 1e6;
    if (result.nonfinite || !(fabs(result.grad_norm - norm) <= 1e-6 * norm))
        fail(b, "the norm", result.grad_norm, norm);
    return took;
}

static void checked_step(struct bench *b, const struct way *way, uint64_t number, double *ms)
{
    struct window(*before)[WINDOWS] = need(b->trainer->blocks * sizeof *before);
    struct moe_optimizer_args args = args_of(way, number);
    double norm, factor = moe_oracle_gradient_factor(&args, all_squares(b), &norm);
    for (uint32_t i = 0; i < b->trainer->blocks; i++)
        for (uint32_t w = 0; w < WINDOWS; w++)
            read_window(b, &b->trainer->block[i], w, &before[i][w]);
    *ms = step(b, way, number);
    for (uint32_t i = 0; i < b->trainer->blocks; i++)
        for (uint32_t w = 0; w < WINDOWS; w++)
            check_window(b, &b->trainer->block[i], w, &before[i][w], &args, factor);
    free(before);
}

static double measure(struct bench *b, const struct way *way)
{
    double ms[MAX_REPEATS];
    uint32_t n = (uint32_t)b->plan->repeats;
    for (uint32_t i = 0; i < WARM_UP + n; i++) {
        double took;
        if (i + 1 == WARM_UP + n)
            checked_step(b, way, i + 1, &took);
        else
            took = step(b, way, i + 1);
        if (i >= WARM_UP)
            ms[i - WARM_UP] = took;
    }
    return median(ms, n);
}

/* Bytes that have to move on this slot, and its number of parameters. */
static double bytes_of(const struct bench *b, enum moe_optimizer optimizer, double *parameters)
{
    double bytes = 0;
    *parameters = 0;
    for (uint32_t i = 0; i < b->trainer->blocks; i++) {
        const struct moe_cuda_block *block = &b->trainer->block[i];
        double n = (double)block->entries * (double)block->n;
        double resident = block->kind == MOE_CUDA_BLOCK_MATRIX
                              ? (double)moe_dtype_bytes(b->layer->desc.matrix[block->matrix].dtype)
                              : 4;
        *parameters += n;
        bytes += n * (2 * 4 + 2 * (optimizer == MOE_OPTIMIZER_ADAMW ? 12 : 8) + resident);
    }
    return bytes;
}

static double slowest(const struct bench *b, const double *of_slot)
{
    double most = 0;
    for (uint32_t s = 0; s < b->plan->slots; s++)
        most = fmax(most, of_slot[s]);
    return most;
}

static void print(const struct bench *b, const struct way *way)
{
    double parameters, bytes = bytes_of(b, way->optimizer, &parameters);
    double ms = slowest(b, b->plan->times->ms), copy = b->plan->times->copy_gb_s[0];
    double rate = bytes / ms / 1e6;
    printf("| %s x %u | %.0f M | %s | %.3f | %.2f | %.0f | %.0f | %.3f |\n", b->shape->name,
           b->layer->local_experts, parameters / 1e6, way->name, ms, bytes / 1e9, rate, copy,
           rate / copy);
    fflush(stdout);
}

static void run_way(struct bench *b, const struct way *way)
{
    struct moe_trainer_config config = {.optimizer = way->optimizer};
    require(b->plan->backend->training->trainer_create(b->layer, &config, &b->trainer));
    b->plan->times->ms[b->member->slot] = measure(b, way);
    await_members(b);
    if (b->member->slot == 0)
        print(b, way);
    await_members(b);
    b->plan->backend->training->trainer_destroy(b->trainer);
}

/* ------------------------------------------------------------------------- main */

static bool is_chosen(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)) != NULL; at += n)
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ','))
            return true;
    return false;
}

static void run_shape(struct bench *b)
{
    struct moe_session_config config = member_session(b->member, 1, BUDGET_MS);
    make_layer(b);
    config.max_tokens = 4096; /* space for sums, as in a serving session */
    config.max_hidden = b->spec.hidden;
    config.max_experts = b->spec.experts;
    config.training = true;
    require(b->plan->backend->session_join(b->device, &config, &b->session));
    for (uint32_t i = 0; i < WAYS; i++)
        run_way(b, &ways[i]);
    b->plan->backend->session_leave(b->session);
    b->plan->backend->layer_destroy(b->layer);
}

static int run_member(struct member *m)
{
    const struct plan *plan = m->ctx;
    struct bench b = {.plan = plan, .member = m};
    struct moe_device_config device = {.ordinal = (int)m->slot};
    require(plan->backend->device_open(&device, &b.device));
    make_noise(&b);
    plan->times->copy_gb_s[m->slot] = copy_rate(&b);
    await_members(&b);
    for (uint32_t i = 0; i < SHAPES; i++) {
        b.shape = &shapes[i];
        if (is_chosen(plan->shapes, b.shape->name))
            run_shape(&b);
    }
    plan->backend->mem_free(b.device, MOE_MEM_DEVICE, b.on_device, PERIOD * sizeof *b.on_device);
    free(b.noise);
    plan->backend->device_close(b.device);
    return 0;
}

int main(int argc, char **argv)
{
    struct plan plan = {.shapes = "deepseek-v3,qwen3-30b,mixtral-8x7b", .slots = 1, .repeats = 7};
    const struct moe_option options[] = {
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "GPUs"},
        {"shapes", 0, MOE_OPTION_STRING, &plan.shapes, 0, 0, "LIST",
         "of deepseek-v3, qwen3-30b, mixtral-8x7b, tiny"},
        {"experts", 'e', MOE_OPTION_UINT, &plan.experts, 0, 256, "E",
         "experts of a slot (0: the shape's own)"},
        {"repeats", 'r', MOE_OPTION_UINT, &plan.repeats, 1, MAX_REPEATS, "R", "timed steps"},
    };
    size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first, status[MOE_MAX_SLOTS] = {0};
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        moe_options_print(stderr, options, count, SIZE_MAX);
        return 2;
    }
    plan.backend = &moe_backend_cuda;
    plan.times =
        mmap(NULL, sizeof *plan.times, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (plan.times == MAP_FAILED)
        return 1;
    printf("| shape x experts | parameters | optimizer | ms | GB | GB/s | copy GB/s | of copy |\n"
           "|---|---|---|---|---|---|---|---|\n");
    fflush(stdout);
    struct group group;
    group_start(&group, (uint32_t)plan.slots, run_member, &plan);
    bool good = group_finish(&group, 600, status);
    moe_options_free(&parsed);
    return good ? 0 : 1;
}
