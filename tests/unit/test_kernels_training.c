/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of training on the CPU, one slot, whole backward passes: gradients are those of the
 * forward pass (finite differences along random directions), for every kind of layer. Their bits do
 * not depend on the number of threads. Frozen parameters do not change. An optimizer step follows
 * the formula of its header. The comparison with the oracle is in tests/conformance. */
#include "kernels_fixture.h"

#include "base/clock.h"
#include "moe/training.h"

enum { MAX_TOKENS = 64 };

static const struct moe_backend *cpu = &moe_backend_cpu;
static const struct moe_training *training;

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

static void must(struct moe_status st)
{
    if (moe_failed(&st))
        fail_msg("%s", st.text);
}

/* One slot with a layer, a trainer and a batch. */
struct bench {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    struct moe_trainer *trainer;
    uint32_t tokens;
    float *x, *dy, *y, *dx, *weights, *dweights;
    int32_t *ids;
    uint8_t *state, mode[MAX_TOKENS];
    float aux;
    uint64_t retain; /* of forward steps: 0, not */
};

static struct moe_session *join_alone(struct moe_device *device, const struct moe_layer_spec *spec)
{
    struct moe_session_config c = {
        .slots = 2, /* as the fixture places layers; the other slot does not exist */
        .live = 1,
        .epoch = 1,
        .max_tokens = MAX_TOKENS,
        .max_hidden = spec->hidden,
        .max_top_k = spec->router.top_k,
        .max_experts = spec->experts,
        .training = true,
        .wait_budget_ms = 1000,
        .allgather = gather_alone};
    struct moe_session *s;
    must(cpu->session_join(device, &c, &s));
    return s;
}

static void forward(struct bench *b, const uint8_t *mode)
{
    struct moe_step_args a = {.layer = b->layer,
                              .dtype = MOE_DTYPE_F32,
                              .bucket = MAX_TOKENS,
                              .tokens = b->tokens,
                              .x = b->x,
                              .y = b->y,
                              .mode = mode,
                              .ids_in = b->ids,
                              .weights_in = b->weights,
                              .ids_out = b->ids,
                              .weights_out = b->weights,
                              .token_state = b->state,
                              .retain = b->retain};
    struct moe_step *step;
    must(cpu->step_enqueue(b->session, &a, &step));
    must(cpu->step_wait(step, MOE_NEVER, NULL));
}

static void backward(struct bench *b, bool accumulate)
{
    struct moe_backward_args a = {.trainer = b->trainer,
                                  .dtype = MOE_DTYPE_F32,
                                  .bucket = MAX_TOKENS,
                                  .tokens = b->tokens,
                                  .x = b->x,
                                  .dy = b->dy,
                                  .ids = b->ids,
                                  .mode = b->mode,
                                  .weights = b->weights,
                                  .accumulate = accumulate,
                                  .aux_coeff = b->aux,
                                  .dx = b->dx,
                                  .dweights = b->dweights,
                                  .token_state = b->state};
    struct moe_step *step;
    must(training->backward_enqueue(b->session, &a, &step));
    must(cpu->step_wait(step, MOE_NEVER, NULL));
}

static struct bench open_bench(const struct moe_layer_spec *spec, enum moe_dtype weights,
                               const struct moe_trainer_config *config, uint32_t threads,
                               uint32_t tokens)
{
    struct bench b = {.device = open_device(NULL, threads), .tokens = tokens};
    size_t n = (size_t)tokens * spec->hidden, pairs = (size_t)tokens * spec->router.top_k;
    b.layer = random_layer(b.device, spec, weights, true, NULL);
    b.session = join_alone(b.device, spec);
    must(training->trainer_create(b.layer, config, &b.trainer));
    b.x = random_tensor(MOE_DTYPE_F32, n, 1);
    b.dy = random_tensor(MOE_DTYPE_F32, n, 1);
    b.y = random_tensor(MOE_DTYPE_F32, n, 1);
    b.dx = random_tensor(MOE_DTYPE_F32, n, 1);
    b.weights = random_tensor(MOE_DTYPE_F32, pairs, 1);
    b.dweights = random_tensor(MOE_DTYPE_F32, pairs, 1);
    b.ids = calloc(pairs, sizeof *b.ids);
    b.state = calloc(tokens, 1);
    assert_true(b.ids != NULL && b.state != NULL);
    forward(&b, NULL);
    memset(b.mode, MOE_ROUTE_IDS, sizeof b.mode);
    return b;
}

static void close_bench(struct bench *b)
{
    void *const all[] = {b->x, b->dy, b->y, b->dx, b->weights, b->dweights, b->ids, b->state};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    training->trainer_destroy(b->trainer);
    cpu->session_leave(b->session);
    cpu->layer_destroy(b->layer);
    cpu->device_close(b->device);
}

/* ------------------------------------------------------------ finite differences */

static double loss_of(struct bench *b)
{
    double sum = 0;
    size_t n = (size_t)b->tokens * b->layer->spec.hidden;
    forward(b, b->mode);
    for (size_t i = 0; i < n; i++)
        sum += (double)b->y[i] * b->dy[i];
    return sum;
}

/* Slope of the loss at `original` along v [n], from a difference over 2 h. */
static double slope_along(struct bench *b, size_t n, float *value, const float *original,
                          const float *v, double norm, float h,
                          void (*publish)(struct bench *, const void *), const void *ctx)
{
    double side[2];
    for (int s = 0; s < 2; s++) {
        for (size_t i = 0; i < n; i++)
            value[i] = original[i] + (s == 0 ? h : -h) * v[i] / (float)norm;
        publish(b, ctx);
        side[s] = loss_of(b);
    }
    return (side[0] - side[1]) / (2 * (double)h);
}

/* Slope of the loss along a random direction of `value`, against the gradient there. Curvature
 * spoils a long step, and the rounding of fp32 outputs a short one: one of several must agree. */
static void check_direction(struct bench *b, const char *what, size_t n, float *value,
                            const float *grad, void (*publish)(struct bench *, const void *),
                            const void *ctx)
{
    const float steps[] = {0.02f, 0.005f, 0.00125f, 0.0003f};
    float *v = random_tensor(MOE_DTYPE_F32, n, 1), *original = malloc(n * sizeof *original);
    double want = 0, size = 0, norm = 0, best = INFINITY, slope = NAN;
    assert_non_null(original);
    memcpy(original, value, n * sizeof *original);
    for (size_t i = 0; i < n; i++) {
        want += (double)v[i] * grad[i];
        size += (double)grad[i] * grad[i];
        norm += (double)v[i] * v[i];
    }
    norm = sqrt(norm);
    for (size_t i = 0; i < sizeof steps / sizeof *steps && !(best < 0.01); i++) {
        double s = slope_along(b, n, value, original, v, norm, steps[i], publish, ctx);
        double error = fabs(s - want / norm) / (sqrt(size) + 0.05);
        slope = error < best ? s : slope;
        best = error < best ? error : best;
    }
    if (!(best < 0.01))
        fail_msg("%s: the loss changes by %g, its gradient predicts %g", what, slope, want / norm);
    memcpy(value, original, n * sizeof *original);
    publish(b, ctx);
    free(v);
    free(original);
}

struct published {
    struct moe_train_key key;
    size_t n;
    float *value;
};

static void publish_nothing(struct bench *b, const void *ctx)
{
    (void)b;
    (void)ctx;
}

static void publish_param(struct bench *b, const void *ctx)
{
    const struct published *p = ctx;
    must(training->trainer_write(b->trainer, &p->key, p->value, p->n * sizeof(float)));
}

static void check_param(struct bench *b, struct moe_train_key key, uint32_t rank)
{
    size_t rows, columns;
    char what[64];
    moe_weight_shape(&b->layer->spec, key.weight, &rows, &columns);
    size_t n = key.part == MOE_PART_LORA_A   ? rank * columns
               : key.part == MOE_PART_LORA_B ? rows * rank
                                             : rows * columns;
    if (rows == 0)
        return;
    struct published p = {key, n, malloc(n * sizeof(float))};
    float *grad = malloc(n * sizeof *grad);
    assert_true(p.value != NULL && grad != NULL);
    struct moe_train_key k = key;
    k.tensor = MOE_TRAIN_GRAD;
    struct moe_status st = training->trainer_read(b->trainer, &k, grad, n * sizeof *grad);
    if (st.code != MOE_NOT_FOUND) {
        must(st);
        must(training->trainer_read(b->trainer, &key, p.value, n * sizeof(float)));
        snprintf(what, sizeof what, "weight %d of expert %u, part %d", (int)key.weight, key.expert,
                 (int)key.part);
        check_direction(b, what, n, p.value, grad, publish_param, &p);
    }
    free(p.value);
    free(grad);
}

static struct moe_layer_spec random_spec(void)
{
    struct moe_layer_spec s = plain_spec();
    s.hidden = random_between(4, 70);
    s.experts = 8;
    s.intermediate = random_between(4, 70);
    s.weighting = random_below(3);
    s.activation = random_below(MOE_ACT_COMMON_COUNT);
    s.gate_up_bias = one_in(2);
    s.down_bias = one_in(2);
    s.shared_intermediate = one_in(2) ? random_between(4, 60) : 0;
    s.shared_gated = s.shared_intermediate > 0 && one_in(2);
    s.shared_activation = random_below(MOE_ACT_COMMON_COUNT);
    s.swiglu_limit =
        1e9f; /* differences across a limit are no slopes: the test of the isa table covers them */
    s.swiglu_alpha = 1.7f;
    s.router.score = random_below(4);
    s.router.top_k = random_between(1, 4);
    s.router.renorm = random_below(3);
    s.router.renorm_eps = s.router.renorm == MOE_RENORM_NONE ? 0 : 1e-20f;
    s.router.scale = 1.5f;
    s.router.logit_bias = one_in(2);
    s.router.select_bias = one_in(2);
    s.router.zero_experts = one_in(3) ? 3 : 0;
    return s;
}

static void check_layer(const struct moe_layer_spec *spec, const struct moe_trainer_config *config)
{
    struct bench b = open_bench(spec, MOE_DTYPE_F32, config, 2, random_between(1, MAX_TOKENS));
    for (uint32_t t = 0; t < b.tokens; t++)
        b.mode[t] = one_in(3) ? MOE_ROUTE_IDS_WEIGHTS : MOE_ROUTE_IDS;
    if (config->lora_rank > 0) /* B = 0 would hide A's gradient */
        for (uint32_t e = 0; e < spec->experts; e++)
            for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++) {
                size_t rows, columns;
                moe_weight_shape(spec, w, &rows, &columns);
                struct moe_train_key key = {w, e, MOE_PART_LORA_B, MOE_TRAIN_VALUE};
                float *v = random_tensor(MOE_DTYPE_F32, rows * config->lora_rank, 0.3f);
                (void)training->trainer_write(b.trainer, &key, v,
                                              rows * config->lora_rank * sizeof *v);
                free(v);
            }
    forward(&b, b.mode);
    backward(&b, true);
    check_direction(&b, "x", (size_t)b.tokens * spec->hidden, b.x, b.dx, publish_nothing, NULL);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? spec->experts : 1); e++)
            for (enum moe_train_part part = MOE_PART_WEIGHT; part <= MOE_PART_LORA_B; part++)
                check_param(&b, (struct moe_train_key){w, e, part, MOE_TRAIN_VALUE},
                            config->lora_rank);
    close_bench(&b);
}

static void gradients_are_the_slopes_of_the_forward_pass(void **state)
{
    (void)state;
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    for (int i = 0; i < 30; i++) {
        struct moe_layer_spec spec = random_spec();
        check_layer(&spec, &config);
    }
}

static void gradients_of_adapters_are_slopes_too(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++) {
        struct moe_layer_spec spec = random_spec();
        struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW,
                                            .lora_rank = random_between(1, 4),
                                            .lora_alpha = 6,
                                            .lora_targets = random_between(1, 7)};
        check_layer(&spec, &config);
    }
}

/* The value and both derivatives of an activation in double precision. `gate_terms` is the sum of
 * the sizes of the terms of `gate`: they may cancel, and each has a separate rounding error. */
struct slopes {
    double value, gate, up, gate_terms;
};

static struct slopes slopes_of(enum moe_activation activation, double limit, double alpha, double g,
                               double u)
{
    bool clamped = activation != MOE_ACT_SWIGLU;
    bool gate_moves = !clamped || g <= limit, up_moves = !clamped || fabs(u) <= limit;
    g = gate_moves ? g : limit;
    u = up_moves ? u : u > 0 ? limit : -limit;
    double a = activation == MOE_ACT_SWIGLU_OAI ? alpha : 1, s = 1 / (1 + exp(-a * g));
    double factor = activation == MOE_ACT_SWIGLU_OAI ? u + 1 : u;
    double terms = (fabs(u) + 1) * s * (1 + fabs(a * g) * (1 - s));
    return (struct slopes){g * s * factor, gate_moves ? factor * s * (1 + a * g * (1 - s)) : 0,
                           up_moves ? g * s : 0, terms};
}

static void check_activation(const struct moe_cpu_isa *isa, enum moe_activation activation)
{
    const size_t n = random_between(1, 200);
    float *g = random_tensor(MOE_DTYPE_F32, n, 3), *u = random_tensor(MOE_DTYPE_F32, n, 3);
    float *d = random_tensor(MOE_DTYPE_F32, n, 1), *want[4], sum_size = 0;
    double sum = 0;
    for (int i = 0; i < 4; i++)
        want[i] = random_tensor(MOE_DTYPE_F32, n, 1);
    for (size_t i = 0; i < n; i++) {
        struct slopes s = slopes_of(activation, 2.5, 1.7, g[i], u[i]);
        want[0][i] = (float)(0.7 * d[i] * s.gate);
        want[1][i] = (float)(0.7 * d[i] * s.up);
        want[2][i] = (float)s.value;
        want[3][i] = (float)(0.7 * fabs(d[i]) * s.gate_terms);
        sum += d[i] * s.value;
        sum_size += (float)fabs(d[i] * s.value);
    }
    float dot = isa->activate_backward(activation, 2.5f, 1.7f, n, 0.7f, g, u, d);
    assert_true(fabs(dot - sum) <= 1e-5 * sum_size);
    for (size_t i = 0; i < n; i++) {
        assert_true(fabsf(g[i] - want[0][i]) <= 1e-5f * fabsf(want[0][i]) + 1e-6f * want[3][i]);
        assert_true(fabsf(u[i] - want[1][i]) <= 1e-5f * (fabsf(want[1][i]) + 1e-2f));
        assert_true(fabsf(d[i] - want[2][i]) <= 1e-5f * (fabsf(want[2][i]) + 1e-2f));
    }
    for (int i = 0; i < 4; i++)
        free(want[i]);
    free(g);
    free(u);
    free(d);
}

static void activations_have_their_derivatives_on_both_sides_of_their_limits(void **state)
{
    (void)state;
    uint32_t count;
    const struct moe_cpu_isa *const *isas = moe_cpu_isa_list(&count);
    for (uint32_t i = 0; i < count; i++)
        for (enum moe_activation a = MOE_ACT_SWIGLU; a < MOE_ACT_COMMON_COUNT; a++)
            for (int n = 0; n < 50; n++)
                check_activation(isas[i], a);
}

/* ---------------------------------------------------------------- bits and steps */

static float *read_tensor(struct bench *b, struct moe_train_key key, size_t *n)
{
    size_t rows, columns;
    moe_weight_shape(&b->layer->spec, key.weight, &rows, &columns);
    *n = rows * columns;
    float *v = malloc(*n * sizeof *v);
    assert_non_null(v);
    must(training->trainer_read(b->trainer, &key, v, *n * sizeof *v));
    return v;
}

/* A layer large enough for several items, blocks and panels everywhere. */
static struct moe_layer_spec wide_spec(void)
{
    struct moe_layer_spec s = random_spec();
    s.hidden = 300;
    s.intermediate = 270;
    s.shared_intermediate = 290;
    s.shared_gated = true;
    s.router.logit_bias = true;
    return s;
}

static struct bench wide_bench(const struct moe_layer_spec *spec, uint32_t threads,
                               enum moe_optimizer optimizer)
{
    struct moe_trainer_config config = {.optimizer = optimizer};
    struct bench b = open_bench(spec, MOE_DTYPE_BF16, &config, threads, MAX_TOKENS);
    b.aux = 0.1f;
    return b;
}

static struct bench trained_bench(const struct moe_layer_spec *spec, enum moe_optimizer optimizer)
{
    struct bench b = wide_bench(spec, 2, optimizer);
    backward(&b, true);
    return b;
}

/* Gives `to` the weights and the batch of `from`. */
static void copy_bench(struct bench *from, struct bench *to)
{
    const struct moe_layer_spec *spec = &from->layer->spec;
    size_t n = (size_t)from->tokens * spec->hidden;
    memcpy(to->x, from->x, n * sizeof *to->x);
    memcpy(to->dy, from->dy, n * sizeof *to->dy);
    memcpy(to->ids, from->ids, (size_t)from->tokens * spec->router.top_k * sizeof *to->ids);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? spec->experts : 1); e++) {
            struct moe_train_key key = {w, e, MOE_PART_WEIGHT, MOE_TRAIN_VALUE};
            size_t rows, columns, count;
            moe_weight_shape(spec, w, &rows, &columns);
            if (rows == 0)
                continue;
            float *v = read_tensor(from, key, &count);
            must(training->trainer_write(to->trainer, &key, v, count * sizeof *v));
            free(v);
        }
}

static struct moe_optimizer_result move(struct bench *b, const struct moe_optimizer_args *args)
{
    struct moe_optimizer_result result;
    must(training->optimizer_step(b->session, &b->trainer, 1, args, &result));
    return result;
}

static const struct moe_optimizer_args usual = {.learning_rate = 0.01,
                                                .weight_decay = 0.1,
                                                .beta1 = 0.9,
                                                .beta2 = 0.95,
                                                .epsilon = 1e-8,
                                                .momentum = 0.9,
                                                .max_grad_norm = 1,
                                                .grad_scale = 0.5,
                                                .balance_rate = 0.01,
                                                .number = 1};

static void check_equal_tensors(struct bench b[2])
{
    const struct moe_layer_spec *spec = &b[0].layer->spec;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (enum moe_train_tensor tensor = MOE_TRAIN_VALUE; tensor <= MOE_TRAIN_MOMENT2;
             tensor++) {
            struct moe_train_key key = {w, 2, MOE_PART_WEIGHT, tensor};
            size_t rows, columns, count;
            moe_weight_shape(spec, w, &rows, &columns);
            if (rows == 0 || w == MOE_WEIGHT_SELECT_BIAS)
                continue;
            float *v[2] = {read_tensor(&b[0], key, &count), read_tensor(&b[1], key, &count)};
            assert_memory_equal(v[0], v[1], count * sizeof(float));
            free(v[0]);
            free(v[1]);
        }
}

static void the_number_of_threads_changes_no_bit(void **state)
{
    (void)state;
    struct moe_layer_spec spec = wide_spec();
    struct bench b[2];
    struct moe_optimizer_result result[2];
    size_t n = (size_t)MAX_TOKENS * spec.hidden;
    for (int i = 0; i < 2; i++)
        b[i] = wide_bench(&spec, i == 0 ? 1 : 5, MOE_OPTIMIZER_ADAMW);
    copy_bench(&b[0], &b[1]);
    for (int i = 0; i < 2; i++) {
        backward(&b[i], true);
        result[i] = move(&b[i], &usual);
    }
    assert_memory_equal(b[0].dx, b[1].dx, n * sizeof(float));
    assert_true(result[0].grad_norm == result[1].grad_norm && result[0].grad_norm > 0);
    check_equal_tensors(b);
    close_bench(&b[0]);
    close_bench(&b[1]);
}

/* As a slot does that has missed the last exchange: from the squares of one that has not. */
static void a_step_can_be_finished_from_the_squares_of_its_gradients(void **state)
{
    (void)state;
    struct moe_layer_spec spec = random_spec();
    struct bench b[2];
    struct moe_optimizer_result result[2];
    struct moe_optimizer_args args = usual;
    for (int i = 0; i < 2; i++)
        b[i] = wide_bench(&spec, 2, MOE_OPTIMIZER_ADAMW);
    copy_bench(&b[0], &b[1]);
    for (args.number = 1; args.number <= 2; args.number++) {
        for (int i = 0; i < 2; i++)
            backward(&b[i], true);
        result[0] = move(&b[0], &args);
        must(training->optimizer_finish(&b[1].trainer, 1, &args, result[0].squares, &result[1]));
        assert_true(result[0].grad_norm == result[1].grad_norm && result[0].grad_norm > 0);
        check_equal_tensors(b);
    }
    for (int i = 0; i < 2; i++)
        backward(&b[i], true);
    must(training->optimizer_finish(&b[1].trainer, 1, &args, INFINITY, &result[1]));
    assert_true(result[1].nonfinite);
    must(training->zero_grad(b[0].trainer));
    check_equal_tensors(b); /* it was skipped */
    close_bench(&b[0]);
    close_bench(&b[1]);
}

/* value, m1 and m2 after one step in double precision. */
static void reference_step(enum moe_optimizer optimizer, double g, double v[3])
{
    const struct moe_optimizer_args *a = &usual;
    v[0] *= 1 - a->learning_rate * a->weight_decay;
    if (optimizer == MOE_OPTIMIZER_SGD) {
        v[1] = a->momentum * v[1] + g;
        v[0] -= a->learning_rate * v[1];
        return;
    }
    v[1] = a->beta1 * v[1] + (1 - a->beta1) * g;
    v[2] = a->beta2 * v[2] + (1 - a->beta2) * g * g;
    v[0] -= a->learning_rate * (v[1] / (1 - a->beta1)) / (sqrt(v[2] / (1 - a->beta2)) + a->epsilon);
}

static void check_step(struct bench *b, enum moe_optimizer optimizer, enum moe_weight w)
{
    size_t n;
    struct moe_train_key key = {w, 1, MOE_PART_WEIGHT, MOE_TRAIN_VALUE};
    float *before = read_tensor(b, key, &n);
    key.tensor = MOE_TRAIN_GRAD;
    float *grad = read_tensor(b, key, &n);
    struct moe_optimizer_result result = move(b, &usual);
    double clip = usual.max_grad_norm / (result.grad_norm + 1e-6);
    float *zero = read_tensor(b, key, &n), *after[3];
    for (int i = 0; i < (optimizer == MOE_OPTIMIZER_ADAMW ? 3 : 2); i++) {
        const enum moe_train_tensor which[] = {MOE_TRAIN_VALUE, MOE_TRAIN_MOMENT1,
                                               MOE_TRAIN_MOMENT2};
        key.tensor = which[i];
        after[i] = read_tensor(b, key, &n);
    }
    assert_true(clip < 1);
    for (size_t i = 0; i < n; i++) {
        double v[3] = {before[i], 0, 0};
        reference_step(optimizer, grad[i] * usual.grad_scale * clip, v);
        assert_true(zero[i] == 0);
        assert_true(fabs(after[0][i] - v[0]) <= 1e-5 * (fabs(v[0]) + usual.learning_rate));
        assert_true(fabs(after[1][i] - v[1]) <= 1e-5 * fabs(v[1]) + 1e-12);
        if (optimizer == MOE_OPTIMIZER_ADAMW)
            assert_true(fabs(after[2][i] - v[2]) <= 1e-5 * fabs(v[2]) + 1e-12);
    }
    for (int i = 0; i < (optimizer == MOE_OPTIMIZER_ADAMW ? 3 : 2); i++)
        free(after[i]);
    free(before);
    free(grad);
    free(zero);
}

static void a_step_is_the_formula(void **state)
{
    (void)state;
    const enum moe_weight some[] = {MOE_WEIGHT_ROUTER, MOE_WEIGHT_DOWN, MOE_WEIGHT_SHARED_UP};
    for (enum moe_optimizer o = MOE_OPTIMIZER_ADAMW; o <= MOE_OPTIMIZER_SGD; o++)
        for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
            struct moe_layer_spec spec = wide_spec();
            struct bench b = trained_bench(&spec, o);
            check_step(&b, o, some[i]);
            close_bench(&b);
        }
}

static void a_gradient_that_is_not_finite_moves_nothing(void **state)
{
    (void)state;
    struct moe_layer_spec spec = wide_spec();
    struct bench b = trained_bench(&spec, MOE_OPTIMIZER_ADAMW);
    struct moe_train_key key = {MOE_WEIGHT_UP, 3, MOE_PART_WEIGHT, MOE_TRAIN_GRAD};
    size_t n;
    float *grad = read_tensor(&b, key, &n);
    grad[n / 2] = INFINITY;
    must(training->trainer_write(b.trainer, &key, grad, n * sizeof *grad));
    forward(&b, b.mode);
    size_t bytes = (size_t)b.tokens * spec.hidden * sizeof(float);
    float *before = malloc(bytes);
    assert_non_null(before);
    memcpy(before, b.y, bytes);
    assert_true(move(&b, &usual).nonfinite);
    forward(&b, b.mode);
    assert_memory_equal(before, b.y, bytes);
    free(grad);
    grad = read_tensor(&b, key, &n);
    for (size_t i = 0; i < n; i++)
        assert_true(grad[i] == 0);
    free(grad);
    free(before);
    close_bench(&b);
}

static void frozen_parameters_do_not_change(void **state)
{
    (void)state;
    struct moe_layer_spec spec = wide_spec();
    struct bench b = trained_bench(&spec, MOE_OPTIMIZER_ADAMW);
    struct moe_train_key experts = {MOE_WEIGHT_GATE, 1, MOE_PART_WEIGHT, MOE_TRAIN_VALUE};
    struct moe_train_key shared = {MOE_WEIGHT_SHARED_GATE, 0, MOE_PART_WEIGHT, MOE_TRAIN_VALUE};
    size_t n, m;
    must(training->set_frozen(b.trainer, 1u << MOE_PARAMS_EXPERTS));
    float *gate = read_tensor(&b, experts, &n), *up = read_tensor(&b, shared, &m);
    backward(&b, true);
    move(&b, &usual);
    float *gate_after = read_tensor(&b, experts, &n), *up_after = read_tensor(&b, shared, &m);
    assert_memory_equal(gate, gate_after, n * sizeof *gate);
    assert_memory_not_equal(up, up_after, m * sizeof *up);
    free(gate);
    free(up);
    free(gate_after);
    free(up_after);
    close_bench(&b);
}

static void a_trainer_takes_what_it_says_and_gives_it_back(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct moe_layer_spec spec = random_spec();
        struct moe_trainer_config config = {.optimizer = random_between(1, 2),
                                            .frozen = random_below(8)};
        if (one_in(2)) {
            config.lora_rank = 2;
            config.lora_targets = random_between(1, 7);
        }
        struct moe_device *device = open_device(NULL, 2);
        struct moe_layer *layer = random_layer(device, &spec, MOE_DTYPE_NONE, true, NULL);
        struct moe_device_info before, during, after;
        struct moe_trainer *trainer, *second;
        uint64_t bytes;
        cpu->device_info(device, &before);
        must(training->trainer_bytes(layer, &config, &bytes));
        must(training->trainer_create(layer, &config, &trainer));
        cpu->device_info(device, &during);
        assert_true(during.used_bytes == before.used_bytes + bytes);
        struct moe_status st = training->trainer_create(layer, &config, &second);
        assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
        training->trainer_destroy(trainer);
        cpu->device_info(device, &after);
        assert_true(after.used_bytes == before.used_bytes);
        cpu->layer_destroy(layer);
        cpu->device_close(device);
    }
}

/* A later session may have the same address: it must find nothing. */
static void retained_activations_go_with_their_session(void **state)
{
    (void)state;
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_SGD};
    struct moe_layer_spec spec = plain_spec();
    struct bench b = open_bench(&spec, MOE_DTYPE_F32, &config, 1, 8);
    training->retained_limit(b.device, 1 << 20);
    b.retain = 1;
    forward(&b, NULL);
    assert_true(training->retained_bytes(b.device) > 0);
    cpu->session_leave(b.session);
    assert_int_equal(training->retained_bytes(b.device), 0);
    b.session = join_alone(b.device, &spec);
    assert_int_equal(training->retained_bytes(b.device), 0);
    close_bench(&b);
}

int main(void)
{
    seed_random();
    training = cpu->training;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_slopes_of_the_forward_pass),
        cmocka_unit_test(gradients_of_adapters_are_slopes_too),
        cmocka_unit_test(activations_have_their_derivatives_on_both_sides_of_their_limits),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(a_step_can_be_finished_from_the_squares_of_its_gradients),
        cmocka_unit_test(a_step_is_the_formula),
        cmocka_unit_test(a_gradient_that_is_not_finite_moves_nothing),
        cmocka_unit_test(frozen_parameters_do_not_change),
        cmocka_unit_test(retained_activations_go_with_their_session),
        cmocka_unit_test(a_trainer_takes_what_it_says_and_gives_it_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
