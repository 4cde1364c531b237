/* SPDX-License-Identifier: Apache-2.0 */
/* One hundred steps of AdamW on small layers must give the loss curves that torch gave
 * (tests/golden/training): forward, backward, clipping, moments and resident weights in one loop.
 *
 *     curve --backend cpu --slots 2 --data tests/golden/training
 *
 * Tokens and experts are spread over the slots. Every loss must be within 1e-3 of torch's
 * (relative), and the last weights within 1e-3 (relative Frobenius norm). Exits with 0 only then,
 * and with 77 if the backend cannot train. */
#include "golden_bench.h"
#include "plain_layer.h"

#include "base/clock.h"
#include "moe/training.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    TOKENS = 32,
    HIDDEN = 16,
    INNER = 24,
    EXPERTS = 8,
    TOP_K = 2,
    STEPS = 100,
    BUDGET_MS = 60000
};

static const double allowed = 1e-3;

/* The names and values of make_curves.py. */
struct curve {
    const char *name;
    struct moe_layer_spec spec;
    struct moe_optimizer_args optimizer;
    float aux_coeff;
};

static const struct curve curves[] = {
    {.name = "softmax",
     .spec = {.hidden = HIDDEN,
              .experts = EXPERTS,
              .intermediate = INNER,
              .router = PLAIN_ROUTER(TOP_K),
              .activation = MOE_ACT_SWIGLU,
              .shared_intermediate = INNER,
              .shared_gated = true,
              .shared_activation = MOE_ACT_SWIGLU},
     .optimizer = {.learning_rate = 1e-3,
                   .weight_decay = 0.01,
                   .beta1 = 0.9,
                   .beta2 = 0.999,
                   .epsilon = 1e-8,
                   .max_grad_norm = 0.05,
                   .grad_scale = 1}},
    {.name = "sigmoid",
     .spec = {.hidden = HIDDEN,
              .experts = EXPERTS,
              .intermediate = INNER,
              .router = {.score = MOE_SCORE_SIGMOID,
                         .top_k = TOP_K,
                         .logit_bias = true,
                         .groups = 1,
                         .topk_group = 1,
                         .group_best = 1,
                         .renorm = MOE_RENORM_SUM,
                         .renorm_eps = 1e-20f,
                         .scale = 1.5f},
              .weighting = MOE_WEIGHT_OUTPUT_EARLY,
              .activation = MOE_ACT_SWIGLU_OAI,
              .swiglu_limit = 7,
              .swiglu_alpha = 1.702f,
              .gate_up_bias = true,
              .down_bias = true},
     .optimizer = {.learning_rate = 2e-3,
                   .weight_decay = 0.1,
                   .beta1 = 0.9,
                   .beta2 = 0.95,
                   .epsilon = 1e-6,
                   .grad_scale = 1},
     .aux_coeff = 0.1f},
};

static const char *const weight_names[MOE_WEIGHT_COUNT] = {
    "router",  "logit_bias", NULL,          "gate",      "up",          "down",       "gate_bias",
    "up_bias", "down_bias",  "shared_gate", "shared_up", "shared_down", "gate_vector"};

/* A member shows this to the others. */
struct share {
    double loss;       /* of the own tokens */
    double weights[2]; /* squares: of differences, of what torch has */
};

struct run {
    const struct training_program *plan;
    struct share *share; /* [slots] */
    struct member *member;
    const struct moe_backend *backend;
    const struct curve *curve;
    struct moe_st_file *file;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    struct moe_trainer *trainer;
    struct dealt homes;
    uint32_t first, tokens; /* of this slot */
    float *host; /* x, y, dy, dx [TOKENS, HIDDEN], then weights and ids [TOKENS, TOP_K] */
    float *target, *loss;
};

enum {
    ROWS = TOKENS * HIDDEN,
    PAIRS = TOKENS * TOP_K,
    HOST_FLOATS = 4 * ROWS + 2 * PAIRS + TOKENS
};

static float *read_tensor(const struct run *r, const char *kind, const char *name, size_t n)
{
    char full[64];
    snprintf(full, sizeof full, "%s%s", kind, name);
    return read_floats(r->file, full, n);
}

/* Calls fn for every tensor of a weight that this slot holds: `data` is the file's. */
static void for_weights(struct run *r, const char *kind,
                        void (*fn)(struct run *, enum moe_weight, uint32_t, size_t, const float *))
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns, entries = moe_weight_is_expert(w) ? EXPERTS : 1;
        moe_weight_shape(&r->curve->spec, w, &rows, &columns);
        if (rows == 0)
            continue;
        size_t n = rows * columns;
        float *data = read_tensor(r, kind, weight_names[w], entries * n);
        for (uint32_t e = 0; e < entries; e++)
            if (entries == 1 || r->homes.slot[e] == r->member->slot)
                fn(r, w, e, n, data + e * n);
        free(data);
    }
}

static void upload(struct run *r, enum moe_weight w, uint32_t expert, size_t n, const float *data)
{
    must(r->backend->layer_upload(r->layer, w, expert, MOE_DTYPE_F32, data, n * sizeof *data));
}

static void compare(struct run *r, enum moe_weight w, uint32_t expert, size_t n, const float *data)
{
    struct moe_train_key key = {.weight = w, .expert = expert, .tensor = MOE_TRAIN_VALUE};
    float *got = malloc(n * sizeof *got);
    double *sums = r->share[r->member->slot].weights;
    MOE_INVARIANT(got != NULL);
    must(r->backend->training->trainer_read(r->trainer, &key, got, n * sizeof *got));
    for (size_t i = 0; i < n; i++) {
        sums[0] += pow((double)got[i] - (double)data[i], 2);
        sums[1] += pow((double)data[i], 2);
    }
    free(got);
}

static void load_layer(struct run *r)
{
    struct moe_placement placement = deal_experts(&r->homes, EXPERTS, (uint32_t)r->plan->slots);
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    must(r->backend->layer_create(r->device, &r->curve->spec, &placement, r->member->slot,
                                  &r->layer));
    for_weights(r, "first.", upload);
    must(r->backend->layer_finish(r->layer));
    must(r->backend->training->trainer_create(r->layer, &config, &r->trainer));
}

/* The mean squared error of the group, and dy of this slot's tokens. */
static double loss_of(struct run *r, const float *y, float *dy)
{
    const float *target = r->target + (size_t)r->first * HIDDEN;
    double mine = 0, all = 0;
    for (size_t i = 0; i < (size_t)r->tokens * HIDDEN; i++) {
        double d = (double)y[i] - (double)target[i];
        mine += d * d / (double)ROWS;
        dy[i] = (float)(2 * d / (double)ROWS);
    }
    r->share[r->member->slot].loss = mine;
    await_members(r->member);
    for (uint64_t s = 0; s < r->plan->slots; s++)
        all += r->share[s].loss;
    await_members(r->member);
    return all;
}

/* The loss before this step. */
static double train(struct run *r, uint64_t number)
{
    float *x = r->host, *y = x + ROWS, *dy = y + ROWS, *dx = dy + ROWS, *weights = dx + ROWS;
    int32_t *ids = (int32_t *)(void *)(weights + PAIRS);
    uint8_t *state = (uint8_t *)(void *)(ids + PAIRS);
    struct moe_step_args forward = {.layer = r->layer,
                                    .dtype = MOE_DTYPE_F32,
                                    .bucket = TOKENS,
                                    .tokens = r->tokens,
                                    .x = x,
                                    .y = y,
                                    .ids_out = ids,
                                    .weights_out = weights,
                                    .token_state = state};
    double aux = 0;
    struct moe_backward_args backward = {.trainer = r->trainer,
                                         .dtype = MOE_DTYPE_F32,
                                         .bucket = TOKENS,
                                         .tokens = r->tokens,
                                         .x = x,
                                         .dy = dy,
                                         .ids = ids,
                                         .aux_coeff = r->curve->aux_coeff,
                                         .accumulate = true,
                                         .dx = dx,
                                         .token_state = state,
                                         .aux_loss = &aux};
    struct moe_optimizer_args args = r->curve->optimizer;
    struct moe_optimizer_result result;
    struct moe_step *step;
    args.number = number;
    must(r->backend->step_enqueue(r->session, &forward, &step));
    must(r->backend->step_wait(step, MOE_NEVER, NULL));
    double loss = loss_of(r, y, dy);
    must(r->backend->training->backward_enqueue(r->session, &backward, &step));
    must(r->backend->step_wait(step, MOE_NEVER, NULL));
    must(r->backend->training->optimizer_step(r->session, &r->trainer, 1, &args, &result));
    return loss + (r->curve->aux_coeff != 0 ? aux : 0);
}

static bool follow(struct run *r)
{
    double worst = 0, first = 0, last = 0, off = 0, size = 0;
    for (uint64_t i = 0; i < STEPS; i++) {
        last = train(r, i + 1);
        first = i == 0 ? last : first;
        worst = fmax(worst, fabs(last - (double)r->loss[i]) / (double)r->loss[i]);
    }
    for_weights(r, "last.", compare);
    await_members(r->member);
    for (uint64_t s = 0; s < r->plan->slots; s++) {
        off += r->share[s].weights[0];
        size += r->share[s].weights[1];
    }
    bool good = worst <= allowed && sqrt(off / size) <= allowed;
    if (r->member->slot == 0)
        printf("%s: %u slots, loss %.4g -> %.4g, off by at most %.1e; last weights off by %.1e%s\n",
               r->curve->name, r->member->slots, first, last, worst, sqrt(off / size),
               good ? "" : "  WRONG");
    await_members(r->member);
    r->share[r->member->slot].weights[0] = r->share[r->member->slot].weights[1] = 0;
    return good;
}

static bool run_curve(struct run *r, const struct curve *curve)
{
    char path[1024];
    r->curve = curve;
    snprintf(path, sizeof path, "%s/%s.safetensors", r->plan->data, curve->name);
    must(moe_st_open(path, &r->file));
    float *x = read_tensor(r, "", "x", ROWS);
    r->target = read_tensor(r, "", "target", ROWS);
    r->loss = read_tensor(r, "", "loss", STEPS);
    memcpy(r->host, x + (size_t)r->first * HIDDEN, (size_t)r->tokens * HIDDEN * sizeof *x);
    load_layer(r);
    bool good = follow(r);
    r->backend->training->trainer_destroy(r->trainer);
    r->backend->layer_destroy(r->layer);
    free(x);
    free(r->target);
    free(r->loss);
    moe_st_close(r->file);
    return good;
}

static int run_member(struct member *m)
{
    const struct training_program *plan = m->ctx;
    struct run r = {.plan = plan, .share = plan->share, .member = m, .backend = plan->backend};
    struct moe_device_config device = {.ordinal = (int)m->slot, .threads = 1};
    struct moe_session_config config = member_session(m, 1, BUDGET_MS);
    void *host;
    config.training = true;
    must(r.backend->device_open(&device, &r.device));
    must(r.backend->session_join(r.device, &config, &r.session));
    must(r.backend->mem_alloc(r.device, MOE_MEM_HOST, HOST_FLOATS * sizeof *r.host, &host));
    r.host = host;
    r.first = (uint32_t)(TOKENS * m->slot / plan->slots);
    r.tokens = (uint32_t)(TOKENS * (m->slot + 1) / plan->slots) - r.first;
    bool good = true;
    for (size_t i = 0; i < sizeof curves / sizeof *curves; i++)
        good = run_curve(&r, &curves[i]) && good;
    r.backend->session_leave(r.session);
    r.backend->mem_free(r.device, MOE_MEM_HOST, host, HOST_FLOATS * sizeof *r.host);
    r.backend->device_close(r.device);
    return good ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct training_program p = {.data = "tests/golden/training",
                                 .option = "data",
                                 .max_slots = EXPERTS,
                                 .share_bytes = sizeof(struct share),
                                 .run = run_member};
    return training_main(&p, argc, argv);
}
