/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of which moe_layer_uncommon names something, through whole steps of a backend, on several
 * slots, against the oracle. A token alone has the same bits as in a batch.
 *
 *     test_uncommon [--backend cuda --slots 2 --transport network]
 *
 * --slots: the most; there are also groups with fewer. */
#include "plain_layer.h"
#include "session_fixture.h"

#include "daemon/options.h"
#include "oracle/oracle.h"

#include <setjmp.h>
#include <stdarg.h>
/* cmocka.h needs the headers above before it. */
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>

enum { CASES = 48, MAX_TOKENS = 60, MAX_HIDDEN = 100, DRAWS = 8 };

/* A case: what all members know. */
struct uncommon_case {
    uint64_t seed;
    struct moe_layer_spec spec;
    enum moe_dtype dtype, weights;
    uint32_t max_tokens, max_experts;
};

static struct uncommon_case now;
static uint64_t max_slots = 4;
/* The cases of a group: those drawn from first, first + step, ... below end; without any, `now`. */
static struct {
    uint64_t first, end, step;
} seeds;

/* ------------------------------------------------------------------ drawing */

/* Of eight seeds in a row, one has many experts per token and one SparseMixer; of MOE_ACT_COUNT,
 * each has another activation. */
static void draw_case(uint64_t seed, struct uncommon_case *c)
{
    const bool wide = seed % 8 == 0, mixer = seed % 8 == 1;
    const uint32_t unit = seed % 16 < 8 ? 1 : 8; /* matrix units need whole 16-byte chunks */
    struct rng r = {.state = seed * 53 + 3};
    *c = (struct uncommon_case){.seed = seed, .max_tokens = MAX_TOKENS, .max_experts = 64};
    struct moe_layer_spec *s = &c->spec;
    s->layer = 3;
    s->hidden = rng_range(&r, 8, MAX_HIDDEN) / unit * unit;
    if (rng_chance(&r, 60)) {
        s->latent = rng_chance(&r, 10) ? s->hidden : rng_range(&r, 8, s->hidden) / unit * unit;
        s->latent_norm = rng_chance(&r, 60);
        s->latent_eps = s->latent_norm ? 1e-5f : 0;
    }
    s->experts = rng_range(&r, wide ? MOE_COMMON_TOP_K + 1 : 2, 40);
    s->intermediate = unit * rng_range(&r, 1, 60 / unit);
    s->activation = (enum moe_activation)(seed % MOE_ACT_COUNT);
    s->swiglu_limit = 3.0f;
    s->swiglu_alpha = 1.25f;
    s->gate_up_bias = rng_chance(&r, 30);
    s->down_bias = rng_chance(&r, 30);
    s->weighting = (enum moe_weighting)rng_below(&r, 3);
    s->shared_intermediate = rng_chance(&r, 60) ? unit * rng_range(&r, 1, 40 / unit) : 0;
    s->shared_gated = s->shared_intermediate != 0 && rng_chance(&r, 30);
    s->shared_activation =
        rng_chance(&r, 80) ? s->activation : (enum moe_activation)rng_below(&r, MOE_ACT_COUNT);
    uint32_t most = wide || rng_chance(&r, 30) ? MOE_MAX_TOP_K : 8;
    s->router = (struct moe_router_spec)PLAIN_ROUTER(
        rng_range(&r, wide ? MOE_COMMON_TOP_K + 1 : 1, s->experts < most ? s->experts : most));
    s->router.score = rng_chance(&r, 50) ? MOE_SCORE_SIGMOID : MOE_SCORE_SOFTMAX;
    if (mixer) {
        s->router.score = MOE_SCORE_SPARSEMIXER;
        s->router.top_k = 2;
        s->router.jitter = 0.2f;
        s->router.renorm = MOE_RENORM_NONE;
    }
    s->router.select_bias = rng_chance(&r, 50);
    s->router.scale = 2.5f;
    c->dtype = rng_chance(&r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
    c->weights = rng_chance(&r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
}

static void set_element(enum moe_dtype dtype, void *data, size_t i, float v)
{
    if (dtype == MOE_DTYPE_F32)
        ((float *)data)[i] = v;
    else
        ((uint16_t *)data)[i] = moe_f32_to_bf16(v);
}

static double element(enum moe_dtype dtype, const void *data, size_t i)
{
    return dtype == MOE_DTYPE_F32 ? (double)((const float *)data)[i]
                                  : (double)moe_bf16_to_f32(((const uint16_t *)data)[i]);
}

/* A weight of an expert, or of the layer; the caller frees it. */
static void *draw_weight(enum moe_weight w, uint32_t expert, size_t *bytes)
{
    struct rng r = {.state = now.seed * 1000003 + (uint64_t)w * 4099 + expert};
    size_t rows, columns;
    moe_weight_shape(&now.spec, w, &rows, &columns);
    float scale = columns > 1 ? 1.7f / sqrtf((float)columns) : 0.5f;
    float middle = w == MOE_WEIGHT_LATENT_NORM ? 1 : 0;
    *bytes = rows * columns * moe_dtype_bytes(now.weights);
    void *data = malloc(*bytes);
    MOE_INVARIANT(data != NULL);
    for (size_t i = 0; i < rows * columns; i++)
        set_element(now.weights, data, i, middle + scale * rng_float(&r));
    return data;
}

/* Experts that have this weight; 1 for one of the layer. */
static uint32_t entries_of(enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(&now.spec, w, &rows, &columns);
    return rows == 0 ? 0 : moe_weight_is_expert(w) ? now.spec.experts : 1;
}

/* ------------------------------------------------------------------ the oracle */

/* Changes each value by at most `unit` of itself. */
static void disturb(struct rng *r, double unit, double *value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        value[i] *= 1 + unit * (double)rng_float(r);
}

/* The layer; `unit` above 0: with disturbed weights. */
static struct moe_status load_oracle(struct rng *r, double unit, struct moe_oracle_layer **oracle)
{
    MOE_TRY(moe_oracle_create(&now.spec, oracle));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < entries_of(w); e++) {
            size_t bytes;
            void *data = draw_weight(w, e, &bytes);
            struct moe_status st = moe_oracle_upload(*oracle, w, e, now.weights, data, bytes);
            free(data);
            MOE_TRY(st);
            disturb(r, unit, moe_oracle_weight(*oracle, w, e),
                    bytes / moe_dtype_bytes(now.weights));
        }
    return moe_ok();
}

/* ------------------------------------------------------------------ a member */

struct tensors {
    uint32_t tokens;
    uint8_t x[MAX_TOKENS * MAX_HIDDEN * sizeof(float)], y[MAX_TOKENS * MAX_HIDDEN * 4];
    uint8_t mode[MAX_TOKENS], state[MAX_TOKENS];
    int32_t ids[MAX_TOKENS * MOE_MAX_TOP_K];
    float weights[MAX_TOKENS * MOE_MAX_TOP_K];
};

static void draw_tokens(uint32_t slot, struct tensors *t)
{
    struct rng r = {.state = now.seed * 7919 + slot};
    t->tokens = rng_chance(&r, 20) ? 0 : rng_range(&r, 1, now.max_tokens);
    for (size_t i = 0; i < (size_t)t->tokens * now.spec.hidden; i++)
        set_element(now.dtype, t->x, i, 2 * rng_float(&r));
    for (uint32_t i = 0; i < t->tokens; i++) {
        t->mode[i] = rng_chance(&r, 20) ? MOE_ROUTE_WITHOUT_SHARED : MOE_ROUTE_SERVER;
        if (rng_chance(&r, 4)) /* this token is refused, and no other notices */
            set_element(now.dtype, t->x, (size_t)i * now.spec.hidden, NAN);
    }
}

static struct moe_status load(const struct member *m, struct moe_device *device,
                              struct moe_layer **layer)
{
    static struct dealt dealt;
    struct moe_placement placement = deal_experts(&dealt, now.spec.experts, m->slots);
    MOE_TRY(backend->layer_create(device, &now.spec, &placement, m->slot, layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < entries_of(w); e++) {
            size_t bytes;
            if (moe_weight_is_expert(w) && dealt.slot[e] != m->slot)
                continue;
            void *data = draw_weight(w, e, &bytes);
            struct moe_status st = backend->layer_upload(*layer, w, e, now.weights, data, bytes);
            free(data);
            MOE_TRY(st);
        }
    return backend->layer_finish(*layer);
}

static struct moe_status step(struct moe_session *session, struct moe_layer *layer, uint32_t tokens,
                              struct tensors *t)
{
    const struct moe_step_args args = {.layer = layer,
                                       .dtype = now.dtype,
                                       .bucket = 64,
                                       .tokens = tokens,
                                       .x = t->x,
                                       .y = t->y,
                                       .mode = t->mode,
                                       .ids_out = t->ids,
                                       .weights_out = t->weights,
                                       .token_state = t->state};
    return run_step(session, &args, NULL);
}

/* y [T, H] of x [T, H] with the routing and the modes of the step. */
static struct moe_status forward(const struct moe_oracle_layer *oracle, const struct tensors *t,
                                 const float *x, double *y)
{
    uint8_t given[MAX_TOKENS];
    for (uint32_t i = 0; i < t->tokens; i++)
        given[i] = MOE_ROUTE_IDS_WEIGHTS | (t->mode[i] & MOE_ROUTE_WITHOUT_SHARED);
    return moe_oracle_forward(oracle, MOE_DTYPE_F32, t->tokens, x, given, t->ids, t->weights, NULL,
                              NULL, NULL, NULL, y);
}

/* The squares of differences, summed over all tokens that are not refused. */
static double squares_between(const struct tensors *t, const double *a, const double *b)
{
    double sum = 0;
    for (size_t i = 0; i < (size_t)t->tokens * now.spec.hidden; i++)
        if (t->state[i / now.spec.hidden] == MOE_TOKEN_OK)
            sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum;
}

/* How far rounding may move y: the square.
 *
 * An error is judged by the terms of sums, as these may cancel. A backend rounds to the step's
 * dtype: the row in the latent space, hidden activations, the sums of slots and domains, and y. A
 * rounding changes a value by at most a unit of it: 2^-8 in BF16. The oracle says what such changes
 * do: it computes y again with all inputs and weights disturbed by up to a unit. x, W_to, gate and
 * up, down and W_from stand before one of these roundings each, and reach y through the same terms.
 * So all roundings amount to about the root of the mean square of the differences. On CPUs, which
 * keep hidden activations in F32, the error is 0.46 of that in the median, and 1.1 in the worst of
 * 2,300 cases. The limit is twice that.
 *
 * A unit is 2^-24 in F32. A sum of n terms, one after the other, rounds n partial sums: by some
 * sqrt(n / 2) units of its terms, which is 7 for the widest rows here. On CPUs the error is 2.2 of
 * that root in the median, 5.2 in the worst. The limit is 16 times that. */
static struct moe_status find_limit(const struct tensors *t, const double *want, double *limit)
{
    const double unit = now.dtype == MOE_DTYPE_F32 ? 0x1p-24 : 0x1p-8;
    const size_t n = (size_t)t->tokens * now.spec.hidden;
    static double row[MAX_TOKENS * MAX_HIDDEN], moved[MAX_TOKENS * MAX_HIDDEN];
    static float x[MAX_TOKENS * MAX_HIDDEN];
    struct rng r = {.state = now.seed + 1};
    const double times = now.dtype == MOE_DTYPE_F32 ? 16 : 2;
    *limit = 0;
    for (int draw = 0; draw < DRAWS; draw++) {
        struct moe_oracle_layer *oracle;
        MOE_TRY(load_oracle(&r, unit, &oracle));
        for (size_t i = 0; i < n; i++)
            row[i] = element(now.dtype, t->x, i);
        disturb(&r, unit, row, n);
        for (size_t i = 0; i < n; i++)
            x[i] = (float)row[i];
        MOE_TRY(forward(oracle, t, x, moved));
        *limit += times * times * squares_between(t, moved, want) / (double)DRAWS;
        moe_oracle_destroy(oracle);
    }
    return moe_ok();
}

/* y against the oracle with the routing of the step. */
static int check_y(struct member *m, const struct tensors *t)
{
    static double got[MAX_TOKENS * MAX_HIDDEN], want[MAX_TOKENS * MAX_HIDDEN];
    static float x[MAX_TOKENS * MAX_HIDDEN];
    const size_t hidden = now.spec.hidden, n = t->tokens * hidden;
    struct moe_oracle_layer *oracle;
    double limit;
    EXPECT(good(load_oracle(&(struct rng){0}, 0, &oracle)));
    for (size_t i = 0; i < n; i++) {
        uint8_t state = t->state[i / hidden];
        x[i] = (float)element(now.dtype, t->x, i);
        got[i] = element(now.dtype, t->y, i);
        EXPECT(state == MOE_TOKEN_OK || (state == MOE_TOKEN_NONFINITE_LOGITS && got[i] == 0));
    }
    EXPECT(good(forward(oracle, t, x, want)));
    moe_oracle_destroy(oracle);
    EXPECT(good(find_limit(t, want, &limit)));
    double error = squares_between(t, got, want);
    if (!(error <= limit))
        fprintf(stderr, "seed %llu, slot %u of %u: y is off by %g, and the limit is %g\n",
                (unsigned long long)now.seed, m->slot, m->slots, sqrt(error), sqrt(limit));
    EXPECT(error <= limit);
    return 0;
}

/* Of `now`. */
static int run_case(struct member *m, struct moe_device *device, struct moe_session *session)
{
    static struct tensors t;
    static uint8_t first[MAX_HIDDEN * sizeof(float)];
    struct moe_layer *layer;
    EXPECT(good(load(m, device, &layer)));
    draw_tokens(m->slot, &t);
    EXPECT(good(step(session, layer, t.tokens, &t)));
    EXPECT(check_y(m, &t) == 0);
    size_t row = now.spec.hidden * moe_dtype_bytes(now.dtype);
    memcpy(first, t.y, row);
    EXPECT(good(step(session, layer, t.tokens > 0, &t)));
    EXPECT(t.tokens == 0 || memcmp(first, t.y, row) == 0);
    backend->layer_destroy(layer);
    return 0;
}

static int run_member(struct member *m)
{
    struct moe_device_config config = {
        .ordinal = (int)m->slot, .threads = 1 + m->slot % 2, .settings = group_settings};
    struct moe_session_config join = member_session(m, 7, LONG_MS);
    struct moe_device *device;
    struct moe_session *session;
    join.max_experts = now.max_experts;
    join.max_top_k = MOE_MAX_TOP_K;
    EXPECT(good(backend->device_open(&config, &device)));
    EXPECT(good(backend->session_join(device, &join, &session)));
    if (seeds.first >= seeds.end)
        EXPECT(run_case(m, device, session) == 0);
    for (uint64_t i = seeds.first; i < seeds.end; i += seeds.step) {
        draw_case(i, &now);
        EXPECT(run_case(m, device, session) == 0);
    }
    backend->session_leave(session);
    backend->device_close(device);
    return 0;
}

/* ------------------------------------------------------------------ promises */

static void random_layers_agree_with_the_oracle_on_any_number_of_slots(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint32_t norms = 0, situ = 0, ungated = 0, wide = 0, mixer = 0;
    for (uint64_t i = seed; i < seed + CASES; i++) {
        draw_case(i, &now);
        norms += now.spec.latent_norm;
        situ += now.spec.activation == MOE_ACT_SITU;
        ungated += now.spec.activation == MOE_ACT_RELU2;
        wide += now.spec.router.top_k > MOE_COMMON_TOP_K;
        mixer += now.spec.router.score == MOE_SCORE_SPARSEMIXER;
    }
    for (uint32_t slots = 1; slots <= max_slots; slots++) {
        seeds.first = seed + slots - 1;
        seeds.end = seed + CASES;
        seeds.step = max_slots;
        assert_true(run_group(slots, run_member));
    }
    seeds.end = 0;
    assert_true(norms > 0 && norms < CASES && situ > 0 && ungated > 0 && wide > 0 && mixer > 0);
}

/* A layer in a latent space with narrow matrices and many experts. */
static void draw_narrow(uint64_t seed, uint32_t experts, uint32_t top_k,
                        enum moe_activation activation)
{
    draw_case(seed, &now);
    now.spec.hidden = 24;
    now.spec.latent = 12;
    now.spec.experts = now.max_experts = experts;
    now.spec.intermediate = 10;
    now.spec.activation = now.spec.shared_activation = activation;
    now.spec.router.score = MOE_SCORE_SIGMOID;
    now.spec.router.renorm = MOE_RENORM_SUM;
    now.spec.router.top_k = top_k;
    now.spec.router.select_bias = true;
}

static void run_on_all_numbers_of_slots(void)
{
    for (uint32_t slots = 1; slots <= max_slots; slots++)
        for (int half = 0; half < 2; half++) {
            now.dtype = half == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
            assert_true(run_group(slots, run_member));
        }
}

/* The router and the numbers of Kimi-K3's experts. */
static void layers_with_896_experts_choose_16(void **state)
{
    (void)state;
    draw_narrow(1, 896, 16, MOE_ACT_SITU);
    now.spec.latent_norm = true;
    now.spec.latent_eps = 1e-5f;
    run_on_all_numbers_of_slots();
}

/* Those of Nemotron-3-Super. */
static void ungated_layers_with_512_experts_choose_22(void **state)
{
    (void)state;
    draw_narrow(2, 512, 22, MOE_ACT_RELU2);
    now.spec.latent_norm = false;
    run_on_all_numbers_of_slots();
}

/* More choices than a flag of a window holds; rows of whole 16-byte chunks and others. */
static void layers_with_64_experts_choose_32(void **state)
{
    (void)state;
    draw_narrow(3, 64, MOE_MAX_TOP_K, MOE_ACT_SWIGLU);
    now.spec.latent_norm = false;
    for (now.spec.latent = 12; now.spec.latent <= 16; now.spec.latent += 4)
        run_on_all_numbers_of_slots();
}

#ifdef MOE_HAVE_UCX
/* On CPUs; on GPUs --transport network is such a run. */
static void rows_cross_domains_once(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    if (backend != &moe_backend_cpu)
        skip();
    draw_case(seed, &now);
    for (group_domain_size = 1; group_domain_size <= 2; group_domain_size++) {
        seeds.first = seed + group_domain_size;
        seeds.end = seed + 7;
        seeds.step = 2;
        assert_true(run_group(4, run_member));
    }
    group_domain_size = 0;
    seeds.end = 0;
}
#endif

int main(int argc, char **argv)
{
    const char *name = "cpu", *transport = "auto";
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &name, 0, 0, "NAME", "backend to test"},
        {"slots", 'n', MOE_OPTION_UINT, &max_slots, 1, 4, "N", "processes, at most"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between slots: auto, nvlink or network"},
    };
    const size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first;
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (!moe_failed(&st))
        st = moe_backend_find(name, &backend);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        moe_options_print(stderr, options, count, SIZE_MAX);
        return 2;
    }
    group_set(backend, "transport", transport);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_layers_agree_with_the_oracle_on_any_number_of_slots),
        cmocka_unit_test(layers_with_896_experts_choose_16),
        cmocka_unit_test(ungated_layers_with_512_experts_choose_22),
        cmocka_unit_test(layers_with_64_experts_choose_32),
#ifdef MOE_HAVE_UCX
        cmocka_unit_test(rows_cross_domains_once),
#endif
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    moe_options_free(&parsed);
    return failed;
}
