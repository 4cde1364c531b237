/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine between processes on CPUs, without products:
 *
 *     ep_cpu_bench [--slots 2] [--transport network] [--hidden 2048] [--tokens 512] [--repeats 50]
 *                  [--rows bf16|fp8]
 *
 * Experts are spread over the slots, 2 of 64 for a token; ids are uniform; tokens are bf16. With
 * fp8, experts are in W8A8, and rows are dispatched as moe/row_format.h says; sums stay bf16.
 * Prints the bytes that the busiest slot sends to others in a pass, the least and the median time
 * of the slowest slot, of dispatch alone and of the pass, and the time of these bytes at 0.6 GB/s
 * plus 200 us. MOE_TEST_HOSTS (group.h) puts the slots into network namespaces. */
#include "group.h"
#include "plain_layer.h"

#include "base/clock.h"
#include "daemon/options.h"
#include "moe/row_format.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EXPERTS = 64,
    TOP_K = 2,
    INNER = 8,
    WARM_UP = 5,
    MAX_REPEATS = 1000,
    BUDGET_MS = 20000,
    MEET_MS = 120000,
};
static const double bytes_per_us = 600, fixed_us = 200; /* the goal */

struct plan {
    uint64_t slots, hidden, tokens, repeats;
    const char *rows;
};

struct bench {
    const struct plan *plan;
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    size_t row_bytes; /* of a dispatched row */
    uint16_t *x, *y;
    int32_t *ids;
    float *weights, *expert_out;
    double wire; /* bytes of a pass from this slot to others, rows and sums */
};

static void require(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "ep_cpu_bench: %s\n", st.text);
    exit(1);
}

static void *take(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (p == NULL)
        exit(1);
    return p;
}

static void meet(struct bench *b)
{
    if (!board_barrier(b->member, MEET_MS))
        exit(1);
}

static void make_layer(struct bench *b, struct dealt *dealt)
{
    static const enum moe_weight of_expert[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN};
    uint32_t hidden = (uint32_t)b->plan->hidden;
    const bool fp8 = strcmp(b->plan->rows, "fp8") == 0;
    struct moe_layer_spec spec = {
        .hidden = hidden, .experts = EXPERTS, .intermediate = INNER, .router = PLAIN_ROUTER(TOP_K)};
    if (fp8)
        spec.routed_format = (struct moe_weight_format){.encoding = MOE_ENC_F8E4M3,
                                                        .block_rows = 128,
                                                        .block_columns = 128,
                                                        .scale = MOE_SCALE_E8M0,
                                                        .activations = MOE_ACTIVATIONS_F8};
    b->row_bytes = moe_row_format(&spec, MOE_DTYPE_BF16).bytes;
    struct moe_placement placement = deal_experts(dealt, EXPERTS, b->member->slots);
    uint16_t *values = take((size_t)EXPERTS * hidden * 2);
    const struct moe_packed_matrix zeros = {.elements = values, .scales = values};
    require(moe_backend_cpu.layer_create(b->device, &spec, &placement, b->member->slot, &b->layer));
    require(moe_backend_cpu.layer_upload(b->layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_BF16, values,
                                         (size_t)EXPERTS * hidden * 2));
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (int i = 0; dealt->slot[e] == b->member->slot && i < 3; i++)
            require(fp8 ? moe_backend_cpu.layer_upload_packed(b->layer, of_expert[i], e, &zeros)
                        : moe_backend_cpu.layer_upload(b->layer, of_expert[i], e, MOE_DTYPE_BF16,
                                                       values, (size_t)INNER * hidden * 2));
    require(moe_backend_cpu.layer_finish(b->layer));
    free(values);
}

/* Distinct ids for each token; counts the rows that leave this slot. */
static void make_input(struct bench *b, const struct dealt *dealt)
{
    size_t tokens = b->plan->tokens, hidden = b->plan->hidden;
    struct rng r = {.state = 17 + b->member->slot};
    uint64_t crossing = 0;
    b->x = take(tokens * hidden * 2);
    b->y = take(tokens * hidden * 2);
    b->ids = take(tokens * TOP_K * sizeof *b->ids);
    b->weights = take(tokens * TOP_K * sizeof *b->weights);
    for (size_t i = 0; i < tokens * hidden; i++)
        b->x[i] = moe_f32_to_bf16(rng_float(&r));
    for (size_t t = 0; t < tokens; t++) {
        uint64_t chosen = 0, slots = 0;
        for (uint32_t k = 0; k < TOP_K;) {
            uint32_t e = rng_below(&r, EXPERTS);
            if (chosen >> e & 1)
                continue;
            chosen |= UINT64_C(1) << e;
            slots |= UINT64_C(1) << dealt->slot[e];
            b->ids[t * TOP_K + k] = (int32_t)e;
            b->weights[t * TOP_K + k++] = 1.0f / (float)TOP_K;
        }
        crossing += (uint64_t)__builtin_popcountll(slots & ~(UINT64_C(1) << b->member->slot));
    }
    b->wire = (double)crossing * (double)(b->row_bytes + hidden * 2); /* rows out, sums back */
}

/* us of dispatch, and of the pass. */
struct times {
    double dispatch, all;
};

static struct times pass(struct bench *b)
{
    struct moe_rows rows;
    uint32_t tokens = (uint32_t)b->plan->tokens, bucket = 1;
    while (bucket < tokens)
        bucket *= 2;
    uint64_t begin = moe_clock_ns();
    require(moe_backend_cpu.dispatch(b->session, b->layer, MOE_DTYPE_BF16, bucket, tokens, b->x,
                                     b->ids, b->weights, &rows));
    struct times us = {.dispatch = (double)(moe_clock_ns() - begin) / 1000};
    if (b->expert_out == NULL) /* the same rows in every pass */
        b->expert_out = take(rows.start[rows.local_experts] * b->plan->hidden * sizeof(float));
    require(moe_backend_cpu.combine(b->session, b->layer, MOE_DTYPE_BF16, bucket, tokens, b->x,
                                    b->ids, b->weights, &rows, b->expert_out, b->y));
    us.all = (double)(moe_clock_ns() - begin) / 1000;
    return us;
}

static void measure(struct bench *b)
{
    static double us[MAX_REPEATS], dispatch[MAX_REPEATS];
    uint32_t repeats = (uint32_t)b->plan->repeats;
    for (uint32_t i = 0; i < WARM_UP; i++)
        (void)pass(b);
    for (uint32_t i = 0; i < repeats; i++) {
        meet(b);
        struct times t = pass(b);
        us[i] = t.all;
        dispatch[i] = t.dispatch;
    }
    double middle = median(us, repeats), of_dispatch = median(dispatch, repeats); /* sort them */
    enum { FIGURES = 5 };
    double mine[FIGURES] = {us[0], middle, b->wire, dispatch[0], of_dispatch};
    double all[MOE_MAX_SLOTS][FIGURES], most[FIGURES] = {0};
    require(board_allgather(b->member, mine, all, sizeof mine));
    for (uint32_t s = 0; s < b->member->slots; s++)
        for (int i = 0; i < FIGURES; i++)
            most[i] = all[s][i] > most[i] ? all[s][i] : most[i];
    if (b->member->slot == 0)
        printf("%2u slots, %s, %s: H %llu, %4llu tokens: %7.3f MB, least %8.1f us, median %8.1f "
               "us, goal %8.1f us; dispatch: least %8.1f us, median %8.1f us\n",
               b->member->slots, moe_backend_cpu.session_transport(b->session), b->plan->rows,
               (unsigned long long)b->plan->hidden, (unsigned long long)b->plan->tokens,
               most[2] / 1e6, most[0], most[1], most[2] / bytes_per_us + fixed_us, most[3],
               most[4]);
}

static int run_member(struct member *m)
{
    struct bench b = {.plan = m->ctx, .member = m};
    struct moe_device_config device = {.threads = 1};
    struct moe_session_config config = member_session(m, 1, BUDGET_MS);
    struct dealt dealt;
    config.max_tokens = 1;
    while (config.max_tokens < b.plan->tokens)
        config.max_tokens *= 2;
    config.max_hidden = (uint32_t)b.plan->hidden;
    config.max_top_k = TOP_K;
    config.max_experts = EXPERTS;
    require(moe_backend_cpu.device_open(&device, &b.device));
    make_layer(&b, &dealt);
    make_input(&b, &dealt);
    require(moe_backend_cpu.session_join(b.device, &config, &b.session));
    measure(&b);
    meet(&b);
    moe_backend_cpu.session_leave(b.session);
    moe_backend_cpu.layer_destroy(b.layer);
    moe_backend_cpu.device_close(b.device);
    free(b.x);
    free(b.y);
    free(b.ids);
    free(b.weights);
    free(b.expert_out);
    return 0;
}

int main(int argc, char **argv)
{
    const char *transport = "auto";
    uint64_t domain_size = 0;
    struct plan plan = {.slots = 2, .hidden = 2048, .tokens = 512, .repeats = 50, .rows = "bf16"};
    const struct moe_option options[] = {
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "processes"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME", "auto or network"},
        {"domain-size", 0, MOE_OPTION_UINT, &domain_size, 0, MOE_MAX_SLOTS, "N",
         "N slots each count as a host; 0 = all are on one"},
        {"hidden", 0, MOE_OPTION_UINT, &plan.hidden, 8, MOE_MAX_HIDDEN, "H", "width of a row"},
        {"tokens", 't', MOE_OPTION_UINT, &plan.tokens, 1, 65536, "T", "tokens of each slot"},
        {"rows", 0, MOE_OPTION_CHOICE, &plan.rows, 0, 0, "bf16|fp8", "rows for the experts"},
        {"repeats", 'c', MOE_OPTION_UINT, &plan.repeats, 1, MAX_REPEATS, "R", "timed passes"},
    };
    struct moe_options parsed;
    struct group group;
    int first, status[MOE_MAX_SLOTS] = {0};
    require(moe_options_parse(options, sizeof options / sizeof *options, NULL, argc, argv, &first,
                              &parsed));
    group_set(&moe_backend_cpu, "transport", transport);
    group_domain_size = (uint32_t)domain_size;
    group_start(&group, (uint32_t)plan.slots, run_member, &plan);
    bool good = group_finish(&group, MEET_MS / 1000, status);
    moe_options_free(&parsed);
    return good ? 0 : 1;
}
