/* SPDX-License-Identifier: Apache-2.0 */
/* Cases of real sizes, on any backend and any number of slots, sampled tokens against the oracle.
 *
 *     large --backend cuda --slots 2 --cases 20 --seed 1 [--first 0] [--training]
 *           [--transport network] [--gemm cublas] [--weights-mib 3072] [--tokens 700]
 *
 * The cases of `conformance` fit into one or two steps of a tile. Here hidden sizes are those of
 * models, up to the allowed maximum, with up to 1024 experts; some slots have few or none. With
 * --training, a backward pass of every case as well; exits with 77 if the backend cannot train.
 * Limits shrink the layers, e.g. for CPUs.
 *
 * Forks one process per slot. Prints each case, its time, and a summary at the end; the same seed
 * and limits with --first N --cases 1 run a case again. */
#include "large.h"

#include "base/clock.h"
#include "daemon/options.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum {
    SKIPPED = 77,       /* "not run" for ctest */
    BUDGET_MS = 120000, /* generous: these tests are not about time */
    TENSORS = 12,       /* tensors of a case in host memory, each as large as x */
};

struct plan {
    const struct moe_backend *backend;
    uint64_t slots, cases, seed, first, timeout_s, weights_mib, mega_products, tokens, samples;
    bool training;
    struct large_limits limits;
};

/* ----------------------------------------------------------------------- layers */

static bool upload(struct large *l, enum moe_weight w, uint32_t expert)
{
    size_t bytes;
    void *data = large_weight(l->c, w, expert, &bytes);
    bool good =
        bytes == 0 || went_well(&l->s, "upload",
                                l->s.backend->layer_upload(l->s.layer, w, expert,
                                                           l->c->weight_dtype, data, bytes));
    free(data);
    return good;
}

static bool make_layer(struct large *l)
{
    const struct moe_backend *b = l->s.backend;
    uint32_t slot = l->s.member->slot;
    bool good =
        went_well(&l->s, "layer",
                  b->layer_create(l->s.device, &l->c->spec, &l->c->placement, slot, &l->s.layer));
    for (uint32_t i = 0; i < MOE_WEIGHT_COUNT && good; i++) {
        enum moe_weight w = (enum moe_weight)i;
        uint32_t entries = moe_weight_is_expert(w) ? l->c->spec.experts : 1;
        for (uint32_t e = 0; e < entries && good; e++)
            if (!moe_weight_is_expert(w) || large_holds(l->c, e, slot))
                good = upload(l, w, e);
    }
    return good && went_well(&l->s, "finish", b->layer_finish(l->s.layer));
}

/* -------------------------------------------------------------------- sessions */

/* As large as the case, and no larger. */
static bool join(struct large *l, const struct plan *plan, uint64_t number)
{
    struct moe_session_config config = member_session(l->s.member, 1 + number, BUDGET_MS);
    config.max_tokens = l->c->bucket;
    config.max_hidden = l->c->spec.hidden;
    config.max_top_k = l->c->spec.router.top_k;
    config.max_experts = l->c->spec.experts;
    config.training = plan->training;
    bool good =
        went_well(&l->s, "join", l->s.backend->session_join(l->s.device, &config, &l->s.session));
    if (good)
        l->s.tally->transport = l->s.backend->session_transport(l->s.session);
    return good;
}

static bool take_arena(struct large *l)
{
    size_t pairs = (size_t)l->in->tokens * l->c->spec.router.top_k;
    size_t bytes = TENSORS * (large_row_bytes(l, l->in->tokens) + 2 * pairs * sizeof(float)) +
                   TENSORS * (size_t)l->in->tokens + (1 << 16);
    void *base = NULL;
    if (!went_well(&l->s, "memory",
                   l->s.backend->mem_alloc(l->s.device, MOE_MEM_HOST, bytes, &base)))
        return false;
    l->s.host = (struct arena){.kind = MOE_MEM_HOST, .base = base, .bytes = bytes};
    return true;
}

static bool run_checks(struct large *l, const struct plan *plan, uint64_t number)
{
    if (!take_arena(l) || !make_layer(l) || !large_await_members(l) || !join(l, plan, number))
        return false;
    bool good = large_check_step(l) && large_await_members(l) &&
                (!plan->training || large_check_backward(l));
    /* The routing of all slots stays on the board until all have read it. */
    good = good && large_await_members(l);
    if (good && l->s.backend->session_lost(l->s.session) != 0)
        good = wrong(&l->s, "slots are lost though all live");
    l->s.backend->session_leave(l->s.session);
    return good;
}

static bool run_case(struct large *l, const struct plan *plan, uint64_t number)
{
    const struct moe_backend *b = l->s.backend;
    uint64_t start = moe_clock_ns();
    struct large_case *c = large_draw(plan->seed, number, l->s.member->slots, &plan->limits);
    char text[512];
    large_describe(c, l->s.member->slots, text, sizeof text);
    l->c = c;
    l->in = &c->input[l->s.member->slot];
    l->samples = (uint32_t)plan->samples;
    l->s.layer = NULL;
    l->s.host = (struct arena){.base = NULL};
    bool good = run_checks(l, plan, number);
    if (l->s.member->slot == 0 && good)
        printf("case %llu, %.1f s: %s\n", (unsigned long long)number,
               (double)(moe_clock_ns() - start) / 1e9, text);
    if (!good)
        fprintf(stderr,
                "slot %u: case %llu failed: %s\nagain: --seed %llu --first %llu --cases 1, and the "
                "same limits\n",
                l->s.member->slot, (unsigned long long)number, text, (unsigned long long)plan->seed,
                (unsigned long long)number);
    b->layer_destroy(l->s.layer);
    b->mem_free(l->s.device, MOE_MEM_HOST, l->s.host.base, l->s.host.bytes);
    large_free(c);
    l->s.tally->cases++;
    return good;
}

static void report(const struct large *l)
{
    const struct tally *t = l->s.tally;
    struct rusage usage = {0};
    getrusage(RUSAGE_SELF, &usage);
    printf(
        "%s, slot %u of %u: %llu cases, %llu tokens, %llu of them and %llu inner units against "
        "the oracle (%llu near ties), %llu rows, worst error of y: f32 %.1e, bf16 %.1e, of "
        "gradients: f32 %.1e, bf16 %.1e, %llu passes on tensor cores, rows over %s, bits %016llx "
        "%016llx, at most %ld MiB of host memory\n",
        l->s.backend->name, l->s.member->slot, l->s.member->slots, (unsigned long long)t->cases,
        (unsigned long long)t->tokens, (unsigned long long)l->oracle_tokens,
        (unsigned long long)l->oracle_units, (unsigned long long)t->swaps,
        (unsigned long long)t->rows, t->worst[MOE_DTYPE_F32], t->worst[MOE_DTYPE_BF16],
        l->worst_dx[MOE_DTYPE_F32], l->worst_dx[MOE_DTYPE_BF16],
        (unsigned long long)t->tensor_cases, t->transport == NULL ? "nothing" : t->transport,
        (unsigned long long)t->bits, (unsigned long long)t->trained_bits, usage.ru_maxrss / 1024);
}

static int run_member(struct member *m)
{
    const struct plan *plan = m->ctx;
    struct tally tally = {0};
    struct large l = {.s = {.backend = plan->backend, .member = m, .tally = &tally}};
    struct moe_device_config config = {
        .ordinal = (int)m->slot, .threads = 1 + m->slot % 2, .settings = group_settings};
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* matrices are freed often: keep their pages */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    m->board->gather_ms = 600000; /* others may still be busy with the oracle or an upload */
    if (!went_well(&l.s, "device", plan->backend->device_open(&config, &l.s.device)))
        return 1;
    bool good = true;
    for (uint64_t i = plan->first; i < plan->first + plan->cases && good; i++)
        good = run_case(&l, plan, i);
    report(&l);
    plan->backend->device_close(l.s.device);
    return good ? 0 : 1;
}

/* ------------------------------------------------------------------------ main */

static int run(struct plan *plan)
{
    if (plan->training && plan->backend->training == NULL) {
        printf("SKIPPED: the backend %s cannot train\n", plan->backend->name);
        return SKIPPED;
    }
    plan->limits = (struct large_limits){.weight_bytes = plan->weights_mib << 20,
                                         .products = plan->mega_products * 1000000,
                                         .tokens = (uint32_t)plan->tokens,
                                         .pool = large_pool()};
    printf("seed %llu\n", (unsigned long long)plan->seed);
    struct group group;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&group, (uint32_t)plan->slots, run_member, plan);
    bool good = group_finish(&group, (uint32_t)plan->timeout_s, status);
    for (uint32_t s = 0; s < plan->slots; s++)
        if (WIFSIGNALED(status[s]))
            fprintf(stderr, "slot %u was ended by signal %d\n", s, WTERMSIG(status[s]));
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu", *gemm = "auto", *transport = "auto";
    struct plan plan = {.slots = 2,
                        .cases = 20,
                        .seed = seed_from_environment(1),
                        .timeout_s = 600,
                        .weights_mib = 3072,
                        .mega_products = 75,
                        .tokens = LARGE_MAX_TOKENS,
                        .samples = 16};
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"gemm", 0, MOE_OPTION_STRING, &gemm, 0, 0, "NAME", "CUDA: auto, hopper or cublas"},
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "processes"},
        {"cases", 'c', MOE_OPTION_UINT, &plan.cases, 1, 0, "M", "cases to run"},
        {"seed", 's', MOE_OPTION_UINT, &plan.seed, 0, 0, "S", "which cases"},
        {"first", 'f', MOE_OPTION_UINT, &plan.first, 0, 0, "I", "number of the first case"},
        {"training", 0, MOE_OPTION_BOOL, &plan.training, 0, 0, NULL, "a backward pass as well"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between GPUs: auto, nvlink or network"},
        {"weights-mib", 0, MOE_OPTION_UINT, &plan.weights_mib, 1, 1 << 20, "MIB",
         "most weights of a layer's experts"},
        {"mega-products", 0, MOE_OPTION_UINT, &plan.mega_products, 1, 100000, "N",
         "most million multiplications for a token, which the oracle does one by one"},
        {"tokens", 0, MOE_OPTION_UINT, &plan.tokens, 1, LARGE_MAX_TOKENS, "T", "most of a slot"},
        {"samples", 0, MOE_OPTION_UINT, &plan.samples, 1, LARGE_MAX_TOKENS, "N",
         "tokens of a slot that the oracle computes"},
        {"timeout", 't', MOE_OPTION_UINT, &plan.timeout_s, 1, 86400, "SECONDS", "watchdog"},
    };
    size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first;
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (!moe_failed(&st))
        st = moe_backend_find(backend, &plan.backend);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        moe_options_print(stderr, options, count, SIZE_MAX);
        return 2;
    }
    group_set(plan.backend, "gemm", gemm);
    group_set(plan.backend, "transport", transport);
    int rc = run(&plan);
    moe_options_free(&parsed);
    return rc;
}
