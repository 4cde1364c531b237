/* SPDX-License-Identifier: Apache-2.0 */
/* moectl bench: load on one layer. Closed loop: each of C clients sends a request, waits for the
 * answer and sends the next one: first in a warm-up that is not counted, then in the measured time.
 * A refused one waits as long as the answer asks. A client is not a thread. It runs in callbacks of
 * the library, so the figures show the service.
 *
 * Open loop: requests begin at random times of a given rate, whether or not earlier ones have been
 * answered. Their latency runs from the intended start, so a service that falls behind shows it. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/io/bench_report.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/size.h"
#include "base/wait.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

enum {
    CONCURRENCY_MAX = 4096,
    ERRORS_MAX = 100, /* per client; then it stops */
    WARM_UP_MAX_MS = 1000,
    OPEN_CONCURRENCY = 256, /* default of the most requests in flight */
};
#define RATE_FIRST     100.0 /* requests a second */
#define RATE_LEAST     0.1
#define RATE_PRECISION 1.05

struct bench {
    struct moectl_common common;
    const char *dtype_name, *concurrency_list, *model_digest;
    uint64_t layer, tokens, seed, connections, spin_us;
    double duration_s;
    bool unary, stream, spread;
    double rate, slo_p99_ms; /* open loop; 0 = none */

    uint32_t concurrency[MOECTL_BENCH_RUNS_MAX];
    size_t concurrency_count;
    enum moe_dtype dtype;
    struct moe_client *client;
    struct moectl_bench_report report;
};

/* ------------------------------------------------------------------ load */

struct load {
    struct moe_client *client;
    uint64_t measure_from_ns, end_ns;
    struct moectl_bench_run *run; /* the lock guards its contents too */
    struct moe_mutex lock;
    pthread_cond_t change;
    MOE_GUARDED_BY(lock) struct {
        uint32_t active;
        SLIST_HEAD(, loop) pausing; /* refused, with a hint when to come again; open loop: idle */
        uint64_t last_answer_ns;
        struct moe_status first_error;
    };
};

/* One closed loop. */
struct loop {
    struct load *load;
    struct moe_client_stream *stream; /* with --stream */
    struct moe_client_forward call;
    void *x, *y;
    uint64_t begin_ns, errors;
    SLIST_ENTRY(loop) pause;
    uint64_t resume_ns;
};

static void send_next(struct loop *l);

static void on_answer(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct loop *l = ctx;
    struct load *load = l->load;
    uint64_t now = moe_clock_ns();
    l->errors += st.code != MOE_OK;
    bool again = now < load->end_ns && l->errors < ERRORS_MAX;
    const bool pauses = again && st.code != MOE_OK && st.retry_after_ms > 0;
    moe_mutex_lock(&load->lock);
    if (st.code != MOE_OK) {
        if (load->run->errors++ == 0)
            load->first_error = st;
    } else if (now >= load->measure_from_ns && now < load->end_ns) {
        moectl_bench_record(load->run, now - l->begin_ns, &f->stages);
        load->last_answer_ns = now;
    }
    if (pauses) {
        l->resume_ns = now + st.retry_after_ms * MOE_NS_PER_MS;
        SLIST_INSERT_HEAD(&load->pausing, l, pause);
    }
    load->active -= !again;
    if (pauses || !again)
        pthread_cond_signal(&load->change);
    moe_mutex_unlock(&load->lock);
    if (again && !pauses)
        send_next(l);
}

static void send_next(struct loop *l)
{
    l->begin_ns = moe_clock_ns();
    if (l->stream != NULL)
        moe_client_stream_forward(l->stream, &l->call, on_answer, l);
    else
        moe_client_forward_async(l->load->client, &l->call, on_answer, l);
}

/* Standard normal numbers from splitmix64 by Box and Muller; the same on every machine. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void fill(void *x, enum moe_dtype dtype, size_t count, uint64_t seed)
{
    const double two_pi = 6.283185307179586;
    const double unit = 1.0 / 9007199254740992.0; /* 2^-53 */
    for (size_t i = 0; i < count; i++) {
        double u = (double)((next_random(&seed) >> 11) + 1) * unit;
        double v = (double)(next_random(&seed) >> 11) * unit;
        float value = (float)(sqrt(-2.0 * log(u)) * cos(two_pi * v));
        if (dtype == MOE_DTYPE_F32)
            ((float *)x)[i] = value;
        else
            ((uint16_t *)x)[i] = moe_f32_to_bf16(value);
    }
}

static void free_loops(struct loop *loops, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        moe_client_stream_close(loops[i].stream);
        free(loops[i].x);
        free(loops[i].y);
    }
    free(loops);
}

static struct moe_status make_loop(const struct bench *b, struct load *load, uint64_t number,
                                   struct loop *l)
{
    size_t count, bytes;
    uint32_t hidden = b->report.hidden;
    if (!moe_size_mul(b->tokens, hidden, &count) ||
        !moe_size_mul(count, moe_dtype_bytes(b->dtype), &bytes))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "too many tokens");
    l->load = load;
    l->x = malloc(bytes);
    l->y = malloc(bytes);
    if (l->x == NULL || l->y == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "tensors");
    fill(l->x, b->dtype, count, b->seed + (number << 32));
    l->call = (struct moe_client_forward){
        .size = sizeof l->call,
        .layer = (uint32_t)b->layer,
        .tokens = (uint32_t)b->tokens,
        .hidden = hidden,
        .dtype = b->dtype,
        .x = l->x,
        .y = l->y,
    };
    return b->stream ? moe_client_stream_open(b->client, &l->stream) : moe_ok();
}

/* Takes a loop out that has paused long enough, or NULL. *next: when the next one has. */
static struct loop *take_rested(struct load *load, uint64_t *next) MOE_REQUIRES(load->lock)
{
    struct loop *l, *rested = NULL;
    const uint64_t now = moe_clock_ns();
    *next = MOE_NEVER;
    SLIST_FOREACH(l, &load->pausing, pause)
    {
        if (l->resume_ns <= now)
            rested = l;
        *next = moe_earlier(*next, l->resume_ns);
    }
    if (rested != NULL)
        SLIST_REMOVE(&load->pausing, rested, loop, pause);
    return rested;
}

/* Waits for the ends of all loops, and lets those go on that have paused. */
static void wait_for_ends(struct load *load) MOE_REQUIRES(load->lock)
{
    while (load->active > 0) {
        uint64_t next;
        struct loop *rested = take_rested(load, &next);
        if (rested == NULL) {
            (void)moe_wait_until(&load->change, &load->lock, next);
            continue;
        }
        moe_mutex_unlock(&load->lock);
        send_next(rested);
        moe_mutex_lock(&load->lock);
    }
}

/* Runs all loops and waits for their ends. */
static void drive(struct load *load, struct loop *loops, double duration_s)
{
    uint64_t measured = (uint64_t)(duration_s * (double)MOE_NS_PER_S);
    uint64_t warm_up = measured / 4;
    if (warm_up > WARM_UP_MAX_MS * MOE_NS_PER_MS)
        warm_up = WARM_UP_MAX_MS * MOE_NS_PER_MS;
    load->measure_from_ns = moe_clock_ns() + warm_up;
    load->end_ns = load->measure_from_ns + measured;
    uint32_t count = load->run->concurrency;
    moe_mutex_lock(&load->lock);
    load->active = count;
    moe_mutex_unlock(&load->lock);
    for (uint32_t i = 0; i < count; i++)
        send_next(&loops[i]);
    moe_mutex_lock(&load->lock);
    wait_for_ends(load);
    const uint64_t last_ns = load->last_answer_ns;
    moe_mutex_unlock(&load->lock);
    if (moe_clock_ns() < load->end_ns && last_ns != 0) {
        load->run->seconds = (double)(last_ns - load->measure_from_ns) / (double)MOE_NS_PER_S;
        moectl_say("concurrency %" PRIu32 ": every client gave up after %d errors; the figures "
                   "cover %.1f s, up to the last answer",
                   count, ERRORS_MAX, load->run->seconds);
    }
}

/* ------------------------------------------------------------------ open loop */

static void on_open_answer(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct loop *l = ctx;
    struct load *load = l->load;
    uint64_t now = moe_clock_ns();
    moe_mutex_lock(&load->lock);
    if (st.code != MOE_OK) {
        if (load->run->errors++ == 0)
            load->first_error = st;
    } else if (l->begin_ns >= load->measure_from_ns) {
        moectl_bench_record(load->run, now - l->begin_ns, &f->stages);
    }
    SLIST_INSERT_HEAD(&load->pausing, l, pause);
    load->active--;
    pthread_cond_signal(&load->change);
    moe_mutex_unlock(&load->lock);
}

/* An idle client; NULL when there is none until `until_ns`. */
static struct loop *take_idle(struct load *load, uint64_t until_ns)
{
    moe_mutex_lock(&load->lock);
    while (SLIST_EMPTY(&load->pausing) && moe_clock_ns() < until_ns)
        (void)moe_wait_until(&load->change, &load->lock, until_ns);
    struct loop *l = SLIST_FIRST(&load->pausing);
    if (l != NULL) {
        SLIST_REMOVE_HEAD(&load->pausing, pause);
        load->active++;
    }
    moe_mutex_unlock(&load->lock);
    return l;
}

/* Seconds between two arrivals of a Poisson process. */
static double next_gap(uint64_t *state, double rate)
{
    const double unit = 1.0 / 9007199254740992.0; /* 2^-53 */
    return -log((double)((next_random(state) >> 11) + 1) * unit) / rate;
}

/* Sends at the intended times. A request that finds no idle client starts late; its latency still
 * runs from its intended start. Requests that cannot start for as long as the run lasts are errors.
 */
static void drive_open(struct load *load, struct loop *loops, const struct bench *b)
{
    uint64_t state = b->seed ^ UINT64_C(0xa0761d6478bd642f);
    uint64_t measured = (uint64_t)(b->duration_s * (double)MOE_NS_PER_S);
    uint64_t begin = moe_clock_ns(), warm_up = measured / 4;
    if (warm_up > WARM_UP_MAX_MS * MOE_NS_PER_MS)
        warm_up = WARM_UP_MAX_MS * MOE_NS_PER_MS;
    load->measure_from_ns = begin + warm_up;
    load->end_ns = load->measure_from_ns + measured;
    for (uint32_t i = 0; i < load->run->concurrency; i++)
        SLIST_INSERT_HEAD(&load->pausing, &loops[i], pause);
    double at_s = next_gap(&state, load->run->rate);
    uint64_t at = begin + (uint64_t)(at_s * (double)MOE_NS_PER_S), unsent = 0;
    while (at < load->end_ns) {
        moe_sleep_until(at);
        struct loop *l = take_idle(load, load->end_ns + measured);
        if (l != NULL) {
            l->begin_ns = at;
            if (l->stream != NULL)
                moe_client_stream_forward(l->stream, &l->call, on_open_answer, l);
            else
                moe_client_forward_async(load->client, &l->call, on_open_answer, l);
        }
        unsent += l == NULL;
        at_s += next_gap(&state, load->run->rate);
        at = begin + (uint64_t)(at_s * (double)MOE_NS_PER_S);
    }
    moe_mutex_lock(&load->lock);
    while (load->active > 0)
        (void)moe_wait_until(&load->change, &load->lock, MOE_NEVER);
    load->run->errors += unsent;
    if (unsent > 0 && load->first_error.code == MOE_OK)
        load->first_error = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE,
                                      "%" PRIu64 " requests could not start in time", unsent);
    moe_mutex_unlock(&load->lock);
}

/* `rate` 0: closed loop. */
static struct moe_status measure(struct bench *b, uint32_t concurrency, double rate)
{
    struct load load = {
        .client = b->client, .lock = MOE_MUTEX_INITIALIZER, .first_error = moe_ok()};
    struct loop *loops = calloc(concurrency, sizeof *loops);
    moe_wait_init(&load.change);
    load.run = calloc(1, sizeof *load.run);
    if (loops == NULL || load.run == NULL) {
        free(loops);
        free(load.run);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "clients");
    }
    load.run->concurrency = concurrency;
    load.run->rate = rate;
    load.run->seconds = b->duration_s;
    b->report.runs[b->report.run_count++] = load.run;
    struct moe_status st = moe_ok();
    for (uint32_t i = 0; i < concurrency && st.code == MOE_OK; i++)
        st = make_loop(b, &load, i, &loops[i]);
    if (st.code == MOE_OK && rate > 0)
        drive_open(&load, loops, b);
    else if (st.code == MOE_OK)
        drive(&load, loops, b->duration_s);
    moe_mutex_not_shared(&load.lock); /* all loops have ended */
    if (st.code == MOE_OK)
        st = load.first_error;
    if (st.code == MOE_OK && load.run->latency.count == 0)
        st = moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                       "no answer within the measured time; try a longer --duration");
    free_loops(loops, concurrency);
    pthread_cond_destroy(&load.change);
    moe_mutex_destroy(&load.lock);
    return moe_error_context(st, "concurrency %" PRIu32, concurrency);
}

/* ------------------------------------------------------------------ the command */

static bool parse_list(struct bench *b)
{
    const char *at = b->concurrency_list;
    for (;;) {
        char *end;
        unsigned long n = *at >= '0' && *at <= '9' ? strtoul(at, &end, 10) : 0;
        if (n == 0 || n > CONCURRENCY_MAX || b->concurrency_count == MOECTL_BENCH_RUNS_MAX)
            return false;
        b->concurrency[b->concurrency_count++] = (uint32_t)n;
        if (*end != ',')
            return *end == '\0';
        at = end + 1;
    }
}

static struct moe_status connect_to_group(struct bench *b)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    MOE_TRY(moectl_worker_endpoint(&b->common, moectl_deadline(&b->common), endpoint));
    struct moe_client_config config = {
        .size = sizeof config,
        .endpoint = endpoint,
        .spread = b->spread,
        .model_digest = b->model_digest,
        .connections = (uint32_t)b->connections,
        .spin_us = (uint32_t)b->spin_us,
        .timeout_ms = moectl_timeout_ms(&b->common),
        .max_attempts = 1, /* a retry would distort the latency */
    };
    MOE_TRY(moe_client_connect(&config, &b->client));
    const struct moe_client_info *info = moe_client_get_info(b->client);
    b->report.info = info;
    for (size_t i = 0; i < info->layer_count; i++)
        if (info->layers[i].layer == b->layer)
            b->report.hidden = info->layers[i].hidden;
    if (b->report.hidden == 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "the model has no MoE layer %" PRIu64, b->layer);
    return moe_ok();
}

/* The last run had no error, its p99 is within the limit, and it kept up with its rate. */
static bool is_within(const struct bench *b)
{
    const struct moectl_bench_run *run = b->report.runs[b->report.run_count - 1];
    double p99_ms = (double)moectl_histogram_percentile(&run->latency, 99) / (double)MOE_NS_PER_MS;
    return run->errors == 0 && run->latency.count > 0 && p99_ms <= b->slo_p99_ms;
}

static bool has_answers(const struct moectl_bench_report *r)
{
    uint64_t answers = 0;
    for (size_t i = 0; i < r->run_count; i++)
        answers += r->runs[i]->latency.count;
    return answers > 0;
}

/* Doubles the rate until the limit is missed, then halves the interval. */
static struct moe_status search(struct bench *b)
{
    double low = 0, high = 0, rate = b->rate > 0 ? b->rate : RATE_FIRST;
    while (b->report.run_count < MOECTL_BENCH_RUNS_MAX && rate >= RATE_LEAST &&
           (low == 0 || high == 0 || high / low > RATE_PRECISION)) {
        struct moe_status st = measure(b, b->concurrency[0], rate);
        bool good = st.code == MOE_OK && is_within(b);
        if (st.code != MOE_OK && low == 0 && st.code != MOE_RESOURCE_EXHAUSTED &&
            st.code != MOE_DEADLINE_EXCEEDED)
            return st; /* not a matter of the rate */
        *(good ? &low : &high) = rate;
        rate = high == 0 ? 2 * low : (low + high) / 2;
    }
    b->report.slo_p99_ms = b->slo_p99_ms;
    b->report.highest_rate = low;
    return has_answers(&b->report)
               ? moe_ok()
               : moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                           "no answer within the measured time; try a longer --duration");
}

static struct moe_status work(struct bench *b)
{
    MOE_TRY(connect_to_group(b));
    if (b->slo_p99_ms > 0)
        return search(b);
    if (b->rate > 0)
        return measure(b, b->concurrency[0], b->rate);
    struct moe_status first = moe_ok();
    for (size_t i = 0; i < b->concurrency_count; i++) {
        struct moe_status st = measure(b, b->concurrency[i], 0);
        if (first.code == MOE_OK)
            first = st;
    }
    return first;
}

static int check(struct bench *b)
{
    int code = moectl_require(&(struct moectl_required){"layer", b->layer != MOE_OPTION_UNSET}, 1);
    if (code != MOECTL_OK)
        return code;
    if (b->unary && b->stream)
        return moectl_usage_error("--unary and --stream exclude each other");
    if (!(b->duration_s > 0))
        return moectl_usage_error("--duration must be more than 0");
    if (strcmp(b->dtype_name, "f32") != 0 && strcmp(b->dtype_name, "bf16") != 0)
        return moectl_usage_error("--dtype must be f32 or bf16, not '%s'", b->dtype_name);
    bool open = b->rate > 0 || b->slo_p99_ms > 0;
    if (b->concurrency_list == NULL && open) {
        b->concurrency[b->concurrency_count++] = OPEN_CONCURRENCY;
        return moectl_check_digest(b->model_digest);
    }
    if (b->concurrency_list == NULL)
        b->concurrency_list = "1";
    if (!parse_list(b) || (open && b->concurrency_count > 1))
        return open ? moectl_usage_error("--concurrency must be one number from 1 to %d",
                                         CONCURRENCY_MAX)
                    : moectl_usage_error("--concurrency must be numbers from 1 to %d, as in 1,8,32",
                                         CONCURRENCY_MAX);
    return moectl_check_digest(b->model_digest);
}

static int report(struct bench *b)
{
    struct moectl_bench_report *r = &b->report;
    r->dtype = b->dtype_name;
    r->mode = b->stream ? "stream" : "unary";
    r->spread = b->spread;
    r->layer = (uint32_t)b->layer;
    r->tokens = (uint32_t)b->tokens;
    r->seed = b->seed;
    return b->common.document ? moectl_bench_print_json(r) : moectl_bench_print_table(r);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct bench b = {
        .common = {.format = "table", .timeout_s = 10},
        .dtype_name = "bf16",
        .layer = MOE_OPTION_UNSET,
        .tokens = 1,
        .seed = 1,
        .connections = 1,
        .duration_s = 5,
    };
    const struct moe_option options[] = {
        {"layer", 'l', MOE_OPTION_UINT, &b.layer, 0, UINT32_MAX, "L",
         "layer index in the model (required)"},
        {"tokens", 'T', MOE_OPTION_UINT, &b.tokens, 1, 1 << 20, "T", "tokens per request"},
        {"concurrency", 'c', MOE_OPTION_STRING, &b.concurrency_list, 0, 0, "C[,C..]",
         "number of clients, each with one request in flight; one run per number [1]; with --rate: "
         "the most requests in flight [256]"},
        {"rate", 0, MOE_OPTION_DOUBLE, &b.rate, 0, 10000000, "R",
         "open loop: requests a second that begin at random times; latency from the intended "
         "start"},
        {"slo-p99", 0, MOE_OPTION_DOUBLE, &b.slo_p99_ms, 0, 3600000, "MS",
         "search the highest rate with a p99 latency of at most this, from --rate or 100 on"},
        {"duration", 0, MOE_OPTION_DOUBLE, &b.duration_s, 0, 86400, "SECONDS",
         "measured time of each run; a warm-up of a quarter of it, at most 1 s, comes first"},
        {"dtype", 0, MOE_OPTION_STRING, &b.dtype_name, 0, 0, "f32|bf16", "dtype of x and y"},
        {"unary", 0, MOE_OPTION_BOOL, &b.unary, 0, 0, NULL, "one call per request (default)"},
        {"stream", 0, MOE_OPTION_BOOL, &b.stream, 0, 0, NULL, "one stream per client"},
        {"model-digest", 0, MOE_OPTION_STRING, &b.model_digest, 0, 0, "HEX",
         "fail unless the group serves the model with this digest (see moectl status)"},
        {"spread", 0, MOE_OPTION_BOOL, &b.spread, 0, 0, NULL,
         "send requests to all workers in turn, and split large batches"},
        {"connections", 0, MOE_OPTION_UINT, &b.connections, 1, 64, "N", "connections per worker"},
        {"spin-us", 0, MOE_OPTION_UINT, &b.spin_us, 0, 1000000, "US",
         "microseconds that a connection's thread spins for an answer before it sleeps"},
        {"seed", 0, MOE_OPTION_UINT, &b.seed, 0, UINT32_MAX, "N", "seed of the random inputs"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &b.common, argc, argv,
                      &code))
        return code;
    code = check(&b);
    if (code != MOECTL_OK)
        return code;
    b.dtype = b.dtype_name[0] == 'f' ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    struct moe_status st = work(&b);
    if (has_answers(&b.report))
        code = report(&b);
    if (st.code != MOE_OK)
        code = moectl_fail(&st);
    moe_client_close(b.client);
    for (size_t i = 0; i < b.report.run_count; i++)
        free(b.report.runs[i]);
    return code;
}

const struct moectl_command moectl_bench = {
    .name = "bench",
    .summary = "Measures latency, throughput and the time of each stage.",
    .usage = "--layer L [--tokens T] [--concurrency C[,C..] | --rate R] [--duration S] [options]",
    .examples =
        "  moectl bench --endpoint 127.0.0.1:7600 --layer 3 --tokens 1 --concurrency 1,8,32\n"
        "  moectl bench --layer 3 --rate 500\n"
        "  moectl bench --layer 3 --slo-p99 5 --duration 10\n"
        "  moectl bench --layer 3 --tokens 2048 --stream --spread -o json\n",
    .run = run,
};
