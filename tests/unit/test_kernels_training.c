/* Promises of training on the CPU, one slot, whole backward passes: gradients are those of the
 * forward pass (finite differences along random directions), for every kind of layer; their bits do
 * not depend on the number of threads; frozen things stay where they are; an optimizer step is the
 * formula of its header. The oracle's own suite is in tests/conformance. */
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
};

static struct moe_session *join_alone(struct moe_device *device, const struct moe_layer_spec *spec)
{
    struct moe_session_config c = {
        .slots = 2, /* as the fixture places layers; the other one is not there */
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
                              .token_state = b->state};
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

static void compare_slopes(const char *what, double slope, double want, double size)
{
    double error = fabs(slope - want) / (size > 0 ? size : 1);
    if (!(error < 4e-3))
        fail_msg("%s: the loss moves by %g, its gradient says %g", what, slope, want);
}

/* Slope of the loss along a random direction of `value`, against the gradient there. */
static void check_direction(struct bench *b, const char *what, size_t n, float *value,
                            const float *grad, void (*publish)(struct bench *, const void *),
                            const void *ctx)
{
    float *v = random_tensor(MOE_DTYPE_F32, n, 1), *keep = malloc(n * sizeof *keep);
    double want = 0, size = 0, norm = 0, side[2];
    assert_non_null(keep);
    memcpy(keep, value, n * sizeof *keep);
    for (size_t i = 0; i < n; i++) {
        want += (double)v[i] * grad[i];
        size += (double)grad[i] * grad[i];
        norm += (double)v[i] * v[i];
    }
    const float h = 0.004f;
    for (int s = 0; s < 2; s++) {
        for (size_t i = 0; i < n; i++)
            value[i] = keep[i] + (s == 0 ? h : -h) * v[i] / (float)sqrt(norm);
        publish(b, ctx);
        side[s] = loss_of(b);
    }
    memcpy(value, keep, n * sizeof *keep);
    publish(b, ctx);
    /* Differences of a loss of fp32 outputs: its rounding bounds what can be seen. */
    double noise = 2e-6 * (fabs(side[0]) + sqrt((double)b->tokens * b->layer->spec.hidden) * 2) / h;
    compare_slopes(what, (side[0] - side[1]) / (2 * (double)h), want / sqrt(norm),
                   sqrt(size) + 100 * noise);
    free(v);
    free(keep);
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
    s.activation = random_below(3);
    s.gate_up_bias = one_in(2);
    s.down_bias = one_in(2);
    s.shared_intermediate = one_in(2) ? random_between(4, 60) : 0;
    s.shared_gated = s.shared_intermediate > 0 && one_in(2);
    s.shared_activation = random_below(3);
    s.swiglu_limit = 4;
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

int main(void)
{
    seed_random();
    training = cpu->training;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_slopes_of_the_forward_pass),
        cmocka_unit_test(gradients_of_adapters_are_slopes_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
