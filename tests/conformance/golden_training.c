/* SPDX-License-Identifier: Apache-2.0 */
/* The golden models' gradients through a backend, on one slot or several. dx of every MoE layer and
 * the gradient of every parameter of the last one must match transformers' autograd.
 *
 *     golden_training --backend cpu --slots 2 --models tests/golden/models
 *
 * Tokens and experts are spread over the slots; gradients of replicated weights are summed here.
 * F32 within 1e-5, BF16 within 1e-2 (relative Frobenius norm). Exits with 0 only if everything is
 * right, and with 77 if the backend cannot train. */
#include "golden_bench.h"
#include "golden_gradients.h"

#include "base/clock.h"
#include "moe/training.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHARE_FLOATS = 1 << 20 /* of one slot */ };

struct bench {
    struct golden_bench g;
    struct member *member;
    struct moe_trainer *trainer;
    const char *models;
    float *share; /* [slots, SHARE_FLOATS]: dx of the slot's tokens, then gradients */
    const char *family;
    uint32_t first, tokens; /* of this slot */
    bool good;
};

static void open_bench(struct bench *b)
{
    struct moe_device_config device = {.ordinal = (int)b->member->slot, .threads = 1};
    struct moe_session_config config = member_session(b->member, 1, GOLDEN_BUDGET_MS);
    config.training = true;
    config.max_tokens = GOLDEN_BUCKET;
    golden_open(&b->g, &device, &config);
}

static void load_layer(struct bench *b, const struct moe_model *m, size_t i)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    golden_load_layer(&b->g, m, i);
    must(b->g.backend->training->trainer_create(b->g.layer, &config, &b->trainer));
}

/* Floats of one entry of a weight, and the place of entry `e` in a slot's share. */
static size_t size_of(const struct bench *b, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(b->g.spec, w, &rows, &columns);
    return rows * columns;
}

static size_t entries_of(const struct bench *b, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? b->g.spec->experts : 1;
}

static size_t place_of(const struct bench *b, enum moe_weight w)
{
    size_t at = (size_t)GOLDEN_TOKENS * GOLDEN_HIDDEN;
    for (enum moe_weight k = 0; k < w; k++)
        at += size_of(b, k) * entries_of(b, k);
    return at;
}

/* ----------------------------------------------------------------------- one pass */

/* Routes this slot's tokens with a forward step, and runs the backward pass with that routing. */
static void run_pass(struct bench *b, enum moe_dtype dtype)
{
    struct moe_step *step;
    struct moe_backward_args backward = {.trainer = b->trainer,
                                         .dtype = dtype,
                                         .bucket = GOLDEN_BUCKET,
                                         .tokens = b->tokens,
                                         .x = b->g.x,
                                         .dy = b->g.dy,
                                         .ids = b->g.ids,
                                         .accumulate = true,
                                         .dx = b->g.y,
                                         .token_state = b->g.state};
    golden_forward(&b->g, dtype, b->tokens);
    must(b->g.backend->training->zero_grad(b->trainer));
    must(b->g.backend->training->backward_enqueue(b->g.session, &backward, &step));
    must(b->g.backend->step_wait(step, MOE_NEVER, NULL));
}

/* dx and all local gradients, for slot 0 to check. */
static void show_results(struct bench *b, enum moe_dtype dtype)
{
    float *mine = b->share + (size_t)b->member->slot * SHARE_FLOATS;
    size_t n = (size_t)b->tokens * b->g.spec->hidden;
    for (size_t i = 0; i < n; i++)
        mine[i] = element(dtype, b->g.y, i);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t size = size_of(b, w);
        if (size == 0 || w == MOE_WEIGHT_SELECT_BIAS)
            continue;
        for (uint32_t e = 0; e < entries_of(b, w); e++) {
            struct moe_train_key key = {.weight = w, .expert = e, .tensor = MOE_TRAIN_GRAD};
            if (!moe_weight_is_expert(w) || b->g.homes.slot[e] == b->member->slot)
                must(b->g.backend->training->trainer_read(
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
    printf("%-13s layer %u %-4s %-12s error %.1e%s\n", b->family, b->g.spec->layer,
           dtype == MOE_DTYPE_F32 ? "F32" : "BF16", what, error, fits ? "" : "  WRONG");
}

static void compare_dx(struct bench *b, enum moe_dtype dtype, uint32_t tokens, const float *want)
{
    size_t hidden = b->g.spec->hidden;
    double *got = calloc(tokens * hidden, sizeof *got);
    MOE_INVARIANT(got != NULL);
    for (uint64_t s = 0; s < b->g.slots; s++) {
        size_t first = tokens * s / b->g.slots, end = tokens * (s + 1) / b->g.slots;
        for (size_t i = 0; i < (end - first) * hidden; i++)
            got[first * hidden + i] = (double)b->share[s * SHARE_FLOATS + i];
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
    for (uint64_t s = 0; s < b->g.slots; s++)
        for (size_t i = 0; i < n; i++)
            if (!moe_weight_is_expert(w) || b->g.homes.slot[i / size] == s)
                got[i] += (double)b->share[s * SHARE_FLOATS + place_of(b, w) + i];
    judge(b, dtype, golden_weight_name(w), relative_error(n, got, want));
    free(got);
}

static void compare_weights(struct bench *b, enum moe_dtype dtype, const struct moe_st_file *golden)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        if (size_of(b, w) == 0 || w == MOE_WEIGHT_SELECT_BIAS)
            continue;
        float *want = golden_gradient(golden, b->family, b->g.spec, w);
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

static void check_batch(struct bench *b, enum moe_dtype dtype, uint32_t tokens,
                        const struct moe_st_file *golden, bool last)
{
    size_t hidden = b->g.spec->hidden, n = tokens * hidden;
    float *x = read_golden(golden, b->g.spec->layer, tokens, "x", n);
    float *dy = read_golden(golden, b->g.spec->layer, tokens, "dy", n);
    float *dx = read_golden(golden, b->g.spec->layer, tokens, "dx", n);
    uint64_t s = b->member->slot;
    b->first = (uint32_t)(tokens * s / b->g.slots);
    b->tokens = (uint32_t)(tokens * (s + 1) / b->g.slots) - b->first;
    put_elements(b->g.x, dtype, b->tokens * hidden, x + b->first * hidden);
    put_elements(b->g.dy, dtype, b->tokens * hidden, dy + b->first * hidden);
    run_pass(b, dtype);
    show_results(b, dtype);
    await_members(b->member);
    if (s == 0)
        compare_dx(b, dtype, tokens, dx);
    if (s == 0 && last && tokens == GOLDEN_TOKENS)
        compare_weights(b, dtype, golden);
    await_members(b->member);
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
    snprintf(path, sizeof path, "%s/%s", b->models, family);
    must(moe_model_open(path, &m));
    snprintf(path, sizeof path, "%s/%s/golden.safetensors", b->models, family);
    must(moe_st_open(path, &golden));
    size_t layers = moe_model_layer_count(m);
    for (size_t i = 0; i < layers; i++) {
        load_layer(b, m, i);
        for (int d = 0; d < 2; d++) {
            enum moe_dtype dtype = d == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
            check_batch(b, dtype, 1, golden, i + 1 == layers);
            check_batch(b, dtype, GOLDEN_TOKENS, golden, i + 1 == layers);
        }
        b->g.backend->training->trainer_destroy(b->trainer);
        b->g.backend->layer_destroy(b->g.layer);
    }
    moe_st_close(golden);
    moe_model_close(m);
}

static int run_member(struct member *m)
{
    const struct training_program *p = m->ctx;
    struct bench b = {.g = {.backend = p->backend, .slot = m->slot, .slots = (uint32_t)p->slots},
                      .member = m,
                      .models = p->data,
                      .share = p->share,
                      .good = true};
    open_bench(&b);
    struct golden_models all;
    golden_models_list(p->data, &all);
    for (size_t f = 0; f < all.count; f++)
        check_model(&b, all.names[f]);
    golden_close(&b.g);
    return b.good ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct training_program p = {.data = "tests/golden/models",
                                 .option = "models",
                                 .max_slots = MOE_MAX_SLOTS,
                                 .share_bytes = SHARE_FLOATS * sizeof(float),
                                 .run = run_member};
    return training_main(&p, argc, argv);
}
