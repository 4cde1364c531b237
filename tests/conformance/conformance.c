/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance suite: any backend, any number of slots, random layers, against the oracle.
 *
 *     conformance --backend cpu --slots 3 --cases 500 --seed 7 [--first 0] [--skewed]
 *                 [--transport network]
 *
 * With --skewed, large batches with crowded experts: all to one expert, all to one slot, by Zipf's
 * law, all from one slot, one after the other.
 *
 * With --training, the backward pass, its parts and optimizer steps of every case as well; exits
 * with 77 if the backend cannot train.
 *
 * Forks one process per slot; each runs the same cases on its own part of the tokens and checks its
 * own results. Prints seed and number of a failing case: the same seed with --first N --cases 1
 * runs it again. Exits with 0 only when every slot found every case right.
 *
 * The last line of each slot ends with a hash of all of its y. With --training, a second hash of
 * gradients and values follows. The same cases must give the same bits through every transport. */
#include "trained.h"

#include "daemon/options.h"

#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum {
    CASES_PER_SESSION = 25,
    PLACES_PER_SESSION = 8,
    HOST_BYTES = 16 << 20,
    DEVICE_BYTES = 96 << 20,
    SKIPPED = 77,      /* "not run" for ctest */
    BUDGET_MS = 60000, /* generous: these tests are not about time */
};

struct plan {
    const struct moe_backend *backend;
    uint64_t slots, cases, seed, first, timeout_s;
    bool skewed, training;
    void *share; /* for training: SHARE_BYTES for each slot */
};

static enum case_skew skew_of(const struct plan *plan, uint64_t number)
{
    return plan->skewed ? (enum case_skew)(1 + number % (CASE_SKEWS - 1)) : CASE_PLAIN;
}

static uint64_t case_seed(uint64_t seed, uint64_t number)
{
    struct rng r = {.state = seed * UINT64_C(0x100000001b3) + number};
    return rng_next(&r);
}

/* moe_weight_source.read */
static struct moe_status read_memory(const void *data, uint64_t at, size_t bytes, void *to)
{
    memcpy(to, (const char *)data + at, bytes);
    return moe_ok();
}

/* The backend reads every other weight itself, if it can. */
static struct moe_status upload(struct subject *s, enum moe_weight w, uint32_t e, enum moe_dtype d,
                                const void *data, size_t bytes)
{
    struct moe_weight_source source = {.read = read_memory, .ctx = data};
    return s->backend->layer_fetch != NULL && (w + e) % 2 == 0
               ? s->backend->layer_fetch(s->layer, w, e, d, &source, bytes)
               : s->backend->layer_upload(s->layer, w, e, d, data, bytes);
}

static struct moe_status upload_packed(struct subject *s, enum moe_weight w, uint32_t e,
                                       const struct moe_packed_matrix *m)
{
    const struct moe_packed_source source = {.elements = {.read = read_memory, .ctx = m->elements},
                                             .scales = {.read = read_memory, .ctx = m->scales},
                                             .global = m->global};
    return s->backend->layer_fetch_packed != NULL && m->zeros == NULL && (w + e) % 2 == 0
               ? s->backend->layer_fetch_packed(s->layer, w, e, &source)
               : s->backend->layer_upload_packed(s->layer, w, e, m);
}

/* To the oracle, and to the backend if it is `local`. */
static bool upload_entry(struct subject *s, enum moe_weight w, uint32_t e, bool local)
{
    const struct test_case *c = s->c;
    size_t bytes;
    const void *data = case_weight(c, w, e, &bytes);
    enum moe_dtype d = c->weight_dtype[w];
    if (moe_weight_format_of(&c->spec, w) == NULL)
        return went_well(s, "oracle", moe_oracle_upload(s->oracle, w, e, d, data, bytes)) &&
               (!local || went_well(s, "upload", upload(s, w, e, d, data, bytes)));
    const struct moe_packed_matrix *m = &c->packed[w][e].matrix;
    s->tally->packed++;
    s->tally->w8a8 += moe_weight_format_of(&c->spec, w)->activations != MOE_ACTIVATIONS_PLAIN;
    return went_well(s, "oracle", moe_oracle_upload_packed(s->oracle, w, e, m)) &&
           (!local || went_well(s, "upload", upload_packed(s, w, e, m)));
}

bool upload_all(struct subject *s)
{
    const struct test_case *c = s->c;
    for (uint32_t i = 0; i < MOE_WEIGHT_COUNT; i++) {
        enum moe_weight w = (enum moe_weight)i;
        uint32_t entries = moe_weight_is_expert(w) ? c->spec.experts : 1;
        for (uint32_t e = 0; e < entries && c->weight[w] != NULL; e++) {
            bool local = entries == 1 && !moe_weight_is_expert(w);
            for (uint32_t j = c->offset[e]; !local && j < c->offset[e + 1]; j++)
                local = c->slot[j] == s->member->slot;
            if (!upload_entry(s, w, e, local))
                return false;
        }
    }
    return went_well(s, "finish", s->backend->layer_finish(s->layer));
}

static bool run_case(struct subject *s, const struct plan *plan, uint64_t number)
{
    struct test_case *c =
        case_draw(case_seed(plan->seed, number), s->member->slots, skew_of(plan, number));
    /* Quantised weights do not learn. */
    if (!plan->training || (adapters_alone(c) && s->backend->training->quantised_base))
        case_quantise(c, s->backend->computes, s->device, !plan->training);
    s->c = c;
    s->in = &c->input[s->member->slot];
    s->layer = NULL;
    s->oracle = NULL;
    s->host.used = s->dev.used = 0;
    bool good = went_well(s, "oracle", moe_oracle_create(&c->spec, &s->oracle)) &&
                went_well(s, "layer",
                          s->backend->layer_create(s->device, &c->spec, &c->placement,
                                                   s->member->slot, &s->layer)) &&
                upload_all(s) && check_step(s) &&
                (plan->training ? check_training(s) : check_parts(s));
    if (!good) {
        char text[512];
        case_describe(c, s->member->slots, text, sizeof text);
        fprintf(stderr,
                "slot %u: case %llu failed: %s\nagain: --backend %s --slots %llu --seed %llu "
                "--first %llu --cases 1%s%s\n",
                s->member->slot, (unsigned long long)number, text, plan->backend->name,
                (unsigned long long)plan->slots, (unsigned long long)plan->seed,
                (unsigned long long)number, plan->skewed ? " --skewed" : "",
                plan->training ? " --training" : "");
    }
    s->tally->cases++;
    s->backend->layer_destroy(s->layer);
    moe_oracle_destroy(s->oracle);
    case_free(c);
    return good;
}

/* One session and its cases; first, an exchange proves that every slot reaches every other. */
static bool run_session(struct subject *s, const struct plan *plan, uint64_t first, uint64_t end)
{
    struct moe_session_config config = member_session(s->member, 1 + first * 7919, BUDGET_MS);
    config.training = plan->training;
    /* Half of the sessions have windows with room for fewer tokens in F32 than in BF16. */
    if ((plan->seed + first / CASES_PER_SESSION) % 2 != 0) {
        config.max_tokens_f32 = config.max_tokens;
        config.max_tokens *= 2;
    }
    if (!went_well(s, "join", s->backend->session_join(s->device, &config, &s->session)))
        return false;
    uint64_t mine = first * 100 + s->member->slot, all[MOE_MAX_SLOTS];
    s->tally->transport = s->backend->session_transport(s->session);
    bool good =
        went_well(s, "exchange", s->backend->session_exchange(s->session, &mine, all, sizeof mine));
    for (uint32_t p = 0; p < s->member->slots && good; p++)
        good = all[p] == first * 100 + p || wrong(s, "the exchange mixed up slot %u", p);
    for (uint64_t i = 0; i < PLACES_PER_SESSION && plan->training && good; i++)
        good = check_places(s, case_seed(plan->seed, first) + i);
    for (uint64_t i = first; i < end && good; i++)
        good = run_case(s, plan, i);
    if (good && s->backend->session_lost(s->session) != 0)
        good = wrong(s, "slots are lost though all live");
    s->backend->session_leave(s->session);
    return good;
}

/* A size that cannot fit is refused before any allocation. */
static bool refuses_too_much(struct subject *s)
{
    struct moe_device_info before, after;
    void *p = NULL;
    s->backend->device_info(s->device, &before);
    struct moe_status st =
        s->backend->mem_alloc(s->device, MOE_MEM_DEVICE, (size_t)before.memory_bytes, &p);
    s->backend->device_info(s->device, &after);
    return (st.code == MOE_RESOURCE_EXHAUSTED && p == NULL &&
            after.used_bytes == before.used_bytes) ||
           wrong(s, "all memory of a device that is in use was answered with %s",
                 moe_code_name(st.code));
}

static bool open_device(struct subject *s, const struct plan *plan)
{
    struct moe_device_config config = {.ordinal = (int)s->member->slot,
                                       .threads = 1 + (uint32_t)(plan->seed + s->member->slot) % 2,
                                       .settings = group_settings};
    void *host, *dev;
    if (!went_well(s, "device", s->backend->device_open(&config, &s->device)) ||
        !went_well(s, "memory",
                   s->backend->mem_alloc(s->device, MOE_MEM_HOST, HOST_BYTES, &host)) ||
        !went_well(s, "memory",
                   s->backend->mem_alloc(s->device, MOE_MEM_DEVICE, DEVICE_BYTES, &dev)))
        return false;
    s->host = (struct arena){.kind = MOE_MEM_HOST, .base = host, .bytes = HOST_BYTES};
    s->dev = (struct arena){.kind = MOE_MEM_DEVICE, .base = dev, .bytes = DEVICE_BYTES};
    return refuses_too_much(s);
}

static void report(const struct subject *s)
{
    const struct tally *t = s->tally;
    printf("%s, slot %u of %u: %llu cases, %llu tokens (%llu refused, %llu near ties), %llu rows, "
           "%llu quantised matrices (%llu in W8A8), worst error of y: f32 %.1e, bf16 %.1e, rows "
           "over %s, bits of y "
           "%016llx\n",
           s->backend->name, s->member->slot, s->member->slots, (unsigned long long)t->cases,
           (unsigned long long)t->tokens, (unsigned long long)t->refused,
           (unsigned long long)t->swaps, (unsigned long long)t->rows, (unsigned long long)t->packed,
           (unsigned long long)t->w8a8, t->worst[MOE_DTYPE_F32], t->worst[MOE_DTYPE_BF16],
           t->transport, (unsigned long long)t->bits);
}

static void report_training(const struct tally *t)
{
    printf(
        "    %llu gradients compared, %llu within rounding alone, %llu of experts without "
        "tokens; %llu cases on tensor cores, %llu from retained steps, bits of training %016llx\n",
        (unsigned long long)t->tensors, (unsigned long long)t->rough,
        (unsigned long long)t->idle_experts, (unsigned long long)t->tensor_cases,
        (unsigned long long)t->retained, (unsigned long long)t->trained_bits);
}

static int run_member(struct member *m)
{
    const struct plan *plan = m->ctx;
    struct tally tally = {0};
    struct subject s = {
        .backend = plan->backend, .member = m, .tally = &tally, .share = plan->share};
    if (!open_device(&s, plan))
        return 1;
    bool good = true;
    uint64_t end = plan->first + plan->cases;
    for (uint64_t at = plan->first; at < end && good; at += CASES_PER_SESSION)
        good =
            run_session(&s, plan, at, at + CASES_PER_SESSION < end ? at + CASES_PER_SESSION : end);
    if (good && tally.swaps * 200 > tally.tokens + 1000)
        good = wrong(&s, "too many choices differ from the oracle's: %llu of %llu",
                     (unsigned long long)tally.swaps, (unsigned long long)tally.tokens);
    struct moe_weight_format format = {
        .encoding = MOE_ENC_F8E4M3, .block_rows = 128, .block_columns = 128};
    bool quantises = plan->backend->computes != NULL &&
                     plan->backend->computes(s.device, &format) &&
                     (!plan->training || plan->backend->training->quantised_base);
    if (good && tally.packed == 0 && plan->cases >= 100 && quantises)
        good = wrong(&s, "no case had quantised matrices");
    format.activations = MOE_ACTIVATIONS_F8;
    if (good && tally.w8a8 == 0 && plan->cases >= 100 && quantises && !plan->training &&
        plan->backend->computes(s.device, &format))
        good = wrong(&s, "no case was in W8A8");
    if (good && tally.w8a8 != 0 && tally.quantised_rows == 0 && plan->cases >= 100)
        good = wrong(&s, "no row was quantised before it was dispatched");
    report(&s);
    if (plan->training)
        report_training(&tally);
    s.backend->mem_free(s.device, MOE_MEM_HOST, s.host.base, HOST_BYTES);
    s.backend->mem_free(s.device, MOE_MEM_DEVICE, s.dev.base, DEVICE_BYTES);
    s.backend->device_close(s.device);
    return good ? 0 : 1;
}

/* The kernel allocates pages when they are written, so most of this costs no memory. */
static void *share_memory(uint64_t slots)
{
    void *p = mmap(NULL, (size_t)slots * SHARE_BYTES, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MOE_INVARIANT(p != MAP_FAILED);
    return p;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu", *gemm = "auto", *transport = "auto";
    uint64_t domain_size = 0;
    struct plan plan = {
        .slots = 2, .cases = 100, .seed = seed_from_environment(1), .timeout_s = 600};
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"gemm", 0, MOE_OPTION_STRING, &gemm, 0, 0, "NAME", "CUDA: auto, hopper or cublas"},
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "processes"},
        {"cases", 'c', MOE_OPTION_UINT, &plan.cases, 1, 0, "M", "random cases to run"},
        {"seed", 's', MOE_OPTION_UINT, &plan.seed, 0, 0, "S", "which cases"},
        {"first", 'f', MOE_OPTION_UINT, &plan.first, 0, 0, "I", "number of the first case"},
        {"skewed", 0, MOE_OPTION_BOOL, &plan.skewed, 0, 0, NULL, "crowded experts and slots only"},
        {"training", 0, MOE_OPTION_BOOL, &plan.training, 0, 0, NULL, "backward and optimizer"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between slots: auto, nvlink or network"},
        {"domain-size", 0, MOE_OPTION_UINT, &domain_size, 0, MOE_MAX_SLOTS, "N",
         "N slots each count as a host; 0 = all are on one"},
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
    if (plan.training && plan.backend->training == NULL) {
        printf("SKIPPED: the backend %s cannot train\n", plan.backend->name);
        return SKIPPED;
    }
    if (plan.training)
        plan.share = share_memory(plan.slots);
    group_set(plan.backend, "gemm", gemm);
    group_set(plan.backend, "transport", transport);
    group_domain_size = (uint32_t)domain_size;
    printf("seed %llu\n", (unsigned long long)plan.seed);
    struct group group;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&group, (uint32_t)plan.slots, run_member, &plan);
    bool good = group_finish(&group, (uint32_t)plan.timeout_s, status);
    for (uint32_t s = 0; s < plan.slots; s++)
        if (WIFSIGNALED(status[s]))
            fprintf(stderr, "slot %u was ended by signal %d\n", s, WTERMSIG(status[s]));
    moe_options_free(&parsed);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
