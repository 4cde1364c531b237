/* SPDX-License-Identifier: Apache-2.0 */
/* moectl bench: load on one layer. Closed loop: each of C clients sends a request, waits for the
 * answer and sends the next one: first in a warm-up that is not counted, then in the measured time.
 * A refused one waits as long as the answer asks. A client is not a thread. It runs in callbacks of
 * the library, so the figures show the service.
 *
 * Open loop: requests begin at random times of a given rate, whether or not earlier ones have been
 * answered. Their latency runs from the intended start, so a service that falls behind shows it.
 *
 * Several transports are measured in turn, with the same requests. Those to a layer that routes by
 * token id have random token ids.
 *
 * Through shared memory (--transport shm, cuda) the main thread submits the requests of all
 * clients, and looks for their ends. With cuda it looks in the order of submission. */
#include "commands.h"
#include "moe/regions.h"
#include "moectl/group/cuda_calls.h"
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
    SHARED_MAX = 64, /* requests in flight through shared memory */
    PAGE = 4096,
    ERRORS_MAX = 100, /* per client; then it stops */
    WARM_UP_MAX_MS = 1000,
    OPEN_CONCURRENCY = 256, /* default of the most requests in flight */
    SLO_REQUESTS = 500,     /* of a run: five of them are above its p99 */
};
#define RATE_FIRST     100.0 /* requests a second */
#define RATE_PRECISION 1.05

enum transport { INLINE, TCP, UNIX, SHM, CUDA, TRANSPORTS };
static const char *const transport_names[TRANSPORTS] = {"inline", "tcp", "unix", "shm", "cuda"};

struct bench {
    struct moectl_common common;
    const char *dtype_name, *concurrency_list, *model, *model_digest, *transport_list;
    enum transport transports[TRANSPORTS];
    size_t transport_count;
    uint64_t layer, tokens, seed, connections, spin_us, device;
    double duration_s;
    bool unary, stream, spread;
    double rate, slo_p99_ms; /* open loop; 0 = none */
    uint32_t vocabulary;     /* of a layer that routes by token id; else 0 */

    uint32_t concurrency[MOECTL_BENCH_RUNS_MAX];
    size_t concurrency_count;
    enum moe_dtype dtype;
    struct moe_client *client;
    struct moe_client_session *session; /* with SHM */
    struct moe_client_config config;    /* of this turn, and its endpoint */
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moectl_bench_report report;
};

static bool is_shared(enum transport t)
{
    return t == SHM || t == CUDA;
}

/* ------------------------------------------------------------------ load */

struct load {
    struct moe_client *client;
    struct moe_client_session *session; /* shm */
    struct moe_client_region *region;   /* x and y of all loops */
    struct moectl_cuda *cuda;           /* cuda. Without both: by gRPC */
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
    int64_t *token_ids; /* NULL: the layer's router chooses */
    /* Through shared memory: places in the region; the request, or why it was not submitted. */
    uint64_t x_at, y_at, token_ids_at, request;
    bool submitted;
    struct moe_status refused;
    uint64_t begin_ns, errors;
    uint64_t layer_ns, device_ns; /* of the last answer; 0 = not known */
    SLIST_ENTRY(loop) pause;
    uint64_t resume_ns;
};

static void send_next(struct loop *l);

static void on_answer(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct loop *l = ctx;
    struct load *load = l->load;
    uint64_t now = moe_clock_ns();
    const bool polled = load->session != NULL || load->cuda != NULL;
    l->errors += st.code != MOE_OK;
    bool again = now < load->end_ns && l->errors < ERRORS_MAX;
    const bool pauses = again && st.code != MOE_OK && st.retry_after_ms > 0 && !polled;
    moe_mutex_lock(&load->lock);
    if (st.code != MOE_OK) {
        if (load->run->errors++ == 0)
            load->first_error = st;
    } else if (now >= load->measure_from_ns && now < load->end_ns) {
        moectl_bench_record(load->run, l->device_ns > 0 ? l->device_ns : now - l->begin_ns,
                            &f->stages, l->layer_ns);
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

/* The end of the request, also of a refused one, is found by end_shared. */
static void submit_shared(struct loop *l)
{
    const struct moe_client_session_forward f = {
        .size = sizeof f,
        .layer = l->call.layer,
        .tokens = l->call.tokens,
        .hidden = l->call.hidden,
        .dtype = l->call.dtype,
        .x = {l->load->region, l->x_at},
        .y = {l->load->region, l->y_at},
        .token_ids_in = {l->token_ids != NULL ? l->load->region : NULL,
                         l->token_ids != NULL ? l->token_ids_at : 0},
    };
    l->refused = moe_session_submit(l->load->session, &f, &l->request);
    l->submitted = true;
}

static void submit_to_stream(struct loop *l)
{
    l->refused = moectl_cuda_submit(l->load->cuda, (uint32_t)l->request);
    l->submitted = true;
}

static void send_next(struct loop *l)
{
    l->begin_ns = moe_clock_ns();
    if (l->load->session != NULL)
        submit_shared(l);
    else if (l->load->cuda != NULL)
        submit_to_stream(l);
    else if (l->stream != NULL)
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

/* Random ids of a vocabulary; NULL without memory. */
static int64_t *make_token_ids(const struct bench *b, uint64_t seed)
{
    int64_t *ids = calloc(b->tokens, sizeof *ids);
    for (uint64_t t = 0; ids != NULL && t < b->tokens; t++)
        ids[t] = (int64_t)(next_random(&seed) % b->vocabulary);
    return ids;
}

/* A loop's request has ended. */
static void take_answer(struct loop *l, const struct moe_client_session_answer *a,
                        struct moe_status st)
{
    l->call.stages = (struct moe_client_stages){.queue_ns = a->queue_ns,
                                                .copy_in_ns = a->copy_in_ns,
                                                .step_ns = a->step_ns,
                                                .copy_out_ns = a->copy_out_ns,
                                                .server_ns = a->server_ns,
                                                .step_tokens = a->step_tokens,
                                                .steps = a->steps};
    l->layer_ns = a->layer_ns;
    l->device_ns = a->stream_ns;
    l->submitted = false;
    if (st.code != MOE_OK && st.retry_after_ms > 0)
        moe_sleep_until(moe_clock_ns() + st.retry_after_ms * MOE_NS_PER_MS);
    on_answer(l, &l->call, st);
}

/* Handles the end of a loop's request; false if it is still in flight. `waits`: it ends first. */
static bool end_shared(struct loop *l, bool waits)
{
    struct moe_client_session *s = l->load->session;
    struct moe_client_session_answer a = {.size = sizeof a};
    struct moe_status st = l->refused;
    bool done = true;
    if (st.code == MOE_OK && waits)
        st = moe_session_wait(s, l->request, &a);
    else if (st.code == MOE_OK)
        st = moe_session_poll(s, l->request, &done, &a);
    if (done)
        take_answer(l, &a, st);
    return done;
}

/* Looks for ends until no loop goes on. If it finds none, it waits for that of one loop. */
static void serve_shared(struct loop *loops, uint32_t count)
{
    struct loop *waiting;
    do {
        bool found = false;
        waiting = NULL;
        for (uint32_t i = 0; i < count; i++) {
            if (!loops[i].submitted)
                continue;
            if (end_shared(&loops[i], false))
                found = true;
            if (loops[i].submitted && (waiting == NULL || loops[i].begin_ns < waiting->begin_ns))
                waiting = &loops[i];
        }
        if (!found && waiting != NULL)
            (void)end_shared(waiting, true);
    } while (waiting != NULL);
}

/* Waits for the loops in turn, until none goes on. */
static void serve_stream(struct loop *loops, uint32_t count)
{
    bool waits = true;
    while (waits) {
        waits = false;
        for (uint32_t i = 0; i < count; i++) {
            struct moe_client_session_answer a = {.size = sizeof a};
            struct loop *l = &loops[i];
            if (!l->submitted)
                continue;
            waits = true;
            struct moe_status st = l->refused;
            if (st.code == MOE_OK)
                st = moectl_cuda_await(l->load->cuda, (uint32_t)l->request, &a);
            take_answer(l, &a, st);
        }
    }
}

static struct moe_status share_with_stream(const struct bench *b, struct load *load,
                                           struct loop *loops, size_t all)
{
    const struct moectl_cuda_config config = {
        .client = &b->config, .device = (int)b->device, .spin = b->spin_us > 0};
    if (b->vocabulary != 0)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "layer %" PRIu64
                         " routes by token id, and token ids in a device's memory are not "
                         "looked up: choose another --transport",
                         b->layer);
    MOE_TRY(moectl_cuda_open(&config, all, &load->cuda));
    for (uint32_t i = 0; i < load->run->concurrency; i++) {
        uint32_t request;
        struct loop *l = &loops[i];
        MOE_TRY(moectl_cuda_add(load->cuda, &l->call, l->x_at, l->y_at, &request));
        l->request = request;
    }
    return moe_ok();
}

/* Memory for x, y and token ids of all loops. */
static struct moe_status share_loops(const struct bench *b, struct load *load, struct loop *loops)
{
    const uint32_t count = load->run->concurrency;
    const size_t token_bytes = b->vocabulary != 0 ? b->tokens * sizeof(int64_t) : 0;
    size_t bytes, each, tokens_each, loop_bytes, all;
    if (!moe_size_mul3(b->tokens, b->report.hidden, moe_dtype_bytes(b->dtype), &bytes) ||
        !moe_size_round_up(bytes, PAGE, &each) ||
        !moe_size_round_up(token_bytes, PAGE, &tokens_each) ||
        !moe_size_mul(each, 2, &loop_bytes) ||
        !moe_size_add(loop_bytes, tokens_each, &loop_bytes) ||
        !moe_size_mul(loop_bytes, count, &all))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "too many tokens");
    for (uint32_t i = 0; i < count; i++) {
        loops[i].x_at = (uint64_t)i * loop_bytes;
        loops[i].y_at = loops[i].x_at + each;
        loops[i].token_ids_at = loops[i].y_at + each;
    }
    if (b->session == NULL)
        return share_with_stream(b, load, loops, all);
    MOE_TRY(moe_region_create(b->session, "bench", all, &load->region));
    load->session = b->session;
    for (uint32_t i = 0; i < count; i++) {
        char *data = moe_region_data(load->region);
        memcpy(data + loops[i].x_at, loops[i].x, bytes);
        if (loops[i].token_ids != NULL)
            memcpy(data + loops[i].token_ids_at, loops[i].token_ids, token_bytes);
    }
    return moe_ok();
}

static void free_loops(struct loop *loops, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        moe_client_stream_close(loops[i].stream);
        free(loops[i].x);
        free(loops[i].y);
        free(loops[i].token_ids);
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
    if (b->vocabulary != 0)
        l->token_ids = make_token_ids(b, ~(b->seed + (number << 32)));
    if (l->x == NULL || l->y == NULL || (b->vocabulary != 0 && l->token_ids == NULL))
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
        .token_ids_in = l->token_ids,
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
    if (load->session != NULL)
        serve_shared(loops, count);
    if (load->cuda != NULL)
        serve_stream(loops, count);
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
        moectl_bench_record(load->run, now - l->begin_ns, &f->stages, 0);
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

/* With the transport of that turn. `rate` 0: closed loop. */
static struct moe_status measure(struct bench *b, size_t turn, uint32_t concurrency, double rate)
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
    load.run->transport = b->transport_count > 1 ? transport_names[b->transports[turn]] : NULL;
    load.run->concurrency = concurrency;
    load.run->rate = rate;
    load.run->seconds = b->duration_s;
    b->report.runs[b->report.run_count++] = load.run;
    struct moe_status st = moe_ok();
    for (uint32_t i = 0; i < concurrency && st.code == MOE_OK; i++)
        st = make_loop(b, &load, i, &loops[i]);
    if (st.code == MOE_OK && is_shared(b->transports[turn]))
        st = share_loops(b, &load, loops);
    const bool ready = st.code == MOE_OK;
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
    if (load.region != NULL) {
        struct moe_status freed = moe_region_destroy(load.region);
        st = st.code == MOE_OK ? freed : st;
    }
    moectl_cuda_close(load.cuda);
    free_loops(loops, concurrency);
    pthread_cond_destroy(&load.change);
    moe_mutex_destroy(&load.lock);
    if (!ready) { /* nothing was measured */
        free(load.run);
        b->report.run_count--;
    }
    return moe_error_context(st, "%s, concurrency %" PRIu32, transport_names[b->transports[turn]],
                             concurrency);
}

/* ------------------------------------------------------------------ the command */

static bool has_shared(const struct bench *b)
{
    for (size_t i = 0; i < b->transport_count; i++)
        if (is_shared(b->transports[i]))
            return true;
    return false;
}

static bool has_transport(const struct bench *b, enum transport which)
{
    for (size_t i = 0; i < b->transport_count; i++)
        if (b->transports[i] == which)
            return true;
    return false;
}

/* False: a name is none, or comes twice. */
static bool parse_transports(struct bench *b)
{
    for (const char *at = b->transport_list;; at++) {
        const size_t length = strcspn(at, ",");
        enum transport t = INLINE;
        while (t < TRANSPORTS && (strlen(transport_names[t]) != length ||
                                  strncmp(transport_names[t], at, length) != 0))
            t++;
        if (t == TRANSPORTS || has_transport(b, t))
            return false;
        b->transports[b->transport_count++] = t;
        at += length;
        if (*at == '\0')
            return true;
    }
}

static uint32_t client_limit(const struct bench *b)
{
    return has_shared(b) ? SHARED_MAX : CONCURRENCY_MAX;
}

/* The runs of all transports fit the report. */
static bool parse_list(struct bench *b)
{
    const char *at = b->concurrency_list;
    const uint32_t most = client_limit(b);
    for (;;) {
        char *end;
        unsigned long n = *at >= '0' && *at <= '9' ? strtoul(at, &end, 10) : 0;
        if (n == 0 || n > most ||
            b->concurrency_count == MOECTL_BENCH_RUNS_MAX / b->transport_count)
            return false;
        b->concurrency[b->concurrency_count++] = (uint32_t)n;
        if (*end != ',')
            return *end == '\0';
        at = end + 1;
    }
}

static void disconnect(struct bench *b)
{
    moe_session_close(b->session);
    moe_client_close(b->client);
    b->session = NULL;
    b->client = NULL;
}

static struct moe_status connect_to_group(struct bench *b, enum transport t)
{
    disconnect(b);
    MOE_TRY(moectl_worker_endpoint(&b->common, moectl_deadline(&b->common), b->endpoint));
    b->config = (struct moe_client_config){
        .size = sizeof b->config,
        .endpoint = b->endpoint,
        .way = t == TCP    ? MOE_CLIENT_WAY_TCP
               : t == UNIX ? MOE_CLIENT_WAY_UNIX
                           : MOE_CLIENT_WAY_ANY,
        .spread = b->spread,
        .model = b->model,
        .model_digest = b->model_digest,
        .connections = (uint32_t)b->connections,
        .spin_us = (uint32_t)b->spin_us,
        .timeout_ms = moectl_timeout_ms(&b->common),
        .max_attempts = 1, /* a retry would distort the latency */
    };
    MOE_TRY(moe_client_connect(&b->config, &b->client));
    const struct moe_client_info *info = moe_client_get_info(b->client);
    b->report.info = info;
    for (size_t i = 0; i < info->layer_count; i++)
        if (info->layers[i].layer == b->layer) {
            b->report.hidden = info->layers[i].hidden;
            b->vocabulary = info->layers[i].vocabulary;
        }
    if (b->report.hidden == 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "the model has no MoE layer %" PRIu64, b->layer);
    const struct moe_client_session_config session = {.size = sizeof session,
                                                      .spin_us = (uint32_t)b->spin_us};
    return t == SHM ? moe_session_open(b->client, &session, &b->session) : moe_ok();
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

/* With fewer requests a p99 is one of the few slowest, and says nothing of the rate. */
static double least_rate(const struct bench *b)
{
    return (double)SLO_REQUESTS / b->duration_s;
}

static double first_rate(const struct bench *b)
{
    return b->rate > 0 ? b->rate : RATE_FIRST;
}

/* Doubles the rate until the limit is missed, then halves the interval. */
static struct moe_status search(struct bench *b)
{
    double low = 0, high = 0, rate = first_rate(b);
    while (b->report.run_count < MOECTL_BENCH_RUNS_MAX && rate >= least_rate(b) &&
           (low == 0 || high == 0 || high / low > RATE_PRECISION)) {
        struct moe_status st = measure(b, 0, b->concurrency[0], rate);
        bool good = st.code == MOE_OK && is_within(b);
        if (st.code != MOE_OK && low == 0 && st.code != MOE_RESOURCE_EXHAUSTED &&
            st.code != MOE_DEADLINE_EXCEEDED)
            return st; /* not a matter of the rate */
        *(good ? &low : &high) = rate;
        rate = high == 0 ? 2 * low : (low + high) / 2;
    }
    b->report.slo_p99_ms = b->slo_p99_ms;
    b->report.highest_rate = low;
    if (low == 0 && high > 0)
        moectl_say("no rate from %.1f requests/s on keeps the limit; lower ones need a longer "
                   "--duration, because a p99 of fewer than %d requests says little",
                   high, SLO_REQUESTS);
    return has_answers(&b->report)
               ? moe_ok()
               : moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                           "no answer within the measured time; try a longer --duration");
}

static struct moe_status work(struct bench *b)
{
    struct moe_status first = moe_ok();
    for (size_t turn = 0; turn < b->transport_count; turn++) {
        struct moe_status connected = connect_to_group(b, b->transports[turn]);
        if (connected.code == MOE_FAILED_PRECONDITION && turn + 1 < b->transport_count) {
            first = first.code == MOE_OK ? connected : first; /* others may be there */
            continue;
        }
        MOE_TRY(connected);
        if (b->slo_p99_ms > 0)
            return search(b);
        if (b->rate > 0)
            return measure(b, turn, b->concurrency[0], b->rate);
        for (size_t i = 0; i < b->concurrency_count; i++) {
            struct moe_status st = measure(b, turn, b->concurrency[i], 0);
            if (first.code == MOE_OK)
                first = st;
        }
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
    if (!parse_transports(b))
        return moectl_usage_error("--transport must be inline, tcp, unix, shm or cuda, or several "
                                  "of them, as in unix,shm; not '%s'",
                                  b->transport_list);
    if (has_shared(b) && (b->unary || b->stream || b->spread || b->rate > 0 || b->slo_p99_ms > 0))
        return moectl_usage_error("--transport shm and cuda take no --unary, --stream, --spread, "
                                  "--rate and --slo-p99");
    if (b->transport_count > 1 && (b->rate > 0 || b->slo_p99_ms > 0))
        return moectl_usage_error("--rate and --slo-p99 take one --transport");
    if (!(b->duration_s > 0))
        return moectl_usage_error("--duration must be more than 0");
    if (strcmp(b->dtype_name, "f32") != 0 && strcmp(b->dtype_name, "bf16") != 0)
        return moectl_usage_error("--dtype must be f32 or bf16, not '%s'", b->dtype_name);
    if (b->slo_p99_ms > 0 && first_rate(b) < least_rate(b))
        return moectl_usage_error("--slo-p99 needs %d requests in each run, for a p99 that is no "
                                  "accident: --duration %.0f, or --rate %.0f",
                                  SLO_REQUESTS, ceil((double)SLO_REQUESTS / first_rate(b)),
                                  ceil(least_rate(b)));
    bool open = b->rate > 0 || b->slo_p99_ms > 0;
    if (b->concurrency_list == NULL && open) {
        b->concurrency[b->concurrency_count++] = OPEN_CONCURRENCY;
        return moectl_check_digest(b->model_digest);
    }
    if (b->concurrency_list == NULL)
        b->concurrency_list = "1";
    if (!parse_list(b) || (open && b->concurrency_count > 1))
        return open ? moectl_usage_error("--concurrency must be one number from 1 to %u",
                                         client_limit(b))
                    : moectl_usage_error("--concurrency must be numbers from 1 to %u, as in 1,8,32",
                                         client_limit(b));
    return moectl_check_digest(b->model_digest);
}

static int report(struct bench *b)
{
    struct moectl_bench_report *r = &b->report;
    r->dtype = b->dtype_name;
    r->mode = has_shared(b) && b->transport_count == 1 ? transport_names[b->transports[0]]
              : b->stream                              ? "stream"
                                                       : "unary";
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
        .transport_list = "inline",
        .layer = MOE_OPTION_UNSET,
        .tokens = 1,
        .seed = 1,
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
         "search the highest rate with a p99 latency of at most this, from --rate or 100 on; each "
         "run has 500 requests or more"},
        {"duration", 0, MOE_OPTION_DOUBLE, &b.duration_s, 0, 86400, "SECONDS",
         "measured time of each run; a warm-up of a quarter of it, at most 1 s, comes first"},
        {"dtype", 0, MOE_OPTION_STRING, &b.dtype_name, 0, 0, "f32|bf16", "dtype of x and y"},
        {"unary", 0, MOE_OPTION_BOOL, &b.unary, 0, 0, NULL, "one call per request (default)"},
        {"stream", 0, MOE_OPTION_BOOL, &b.stream, 0, 0, NULL, "one stream per client"},
        {"transport", 0, MOE_OPTION_STRING, &b.transport_list, 0, 0, "T[,T..]",
         "inline: gRPC, by a Unix socket if there is one; unix, tcp: gRPC that way; shm: through "
         "memory shared with a worker of this host, which needs --allow-client-memory, for at most "
         "64 clients; cuda: the same with a GPU's memory and stream, times by its clock; several "
         "are "
         "measured in turn"},
        {"device", 0, MOE_OPTION_UINT, &b.device, 0, 1023, "N",
         "the client's GPU of --transport cuda; best another one than the worker's"},
        {"model", 0, MOE_OPTION_STRING, &b.model, 0, 0, "NAME",
         "model of the group; default: the default model"},
        {"model-digest", 0, MOE_OPTION_STRING, &b.model_digest, 0, 0, "HEX",
         "fail unless the group serves the model with this digest (see moectl status)"},
        {"spread", 0, MOE_OPTION_BOOL, &b.spread, 0, 0, NULL,
         "send requests to all workers in turn, and split large batches"},
        {"connections", 0, MOE_OPTION_UINT, &b.connections, 1, 64, "N",
         "connections per worker [1, and up to 4 for parts of large batches]"},
        {"spin-us", 0, MOE_OPTION_UINT, &b.spin_us, 0, 1000000, "US",
         "microseconds that a connection's thread spins for an answer before it sleeps; with cuda, "
         "more than 0: a kernel polls for it"},
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
    disconnect(&b);
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
        "  moectl bench --layer 3 --tokens 4096 --transport inline,unix,shm,cuda --device 1\n"
        "  moectl bench --layer 3 --rate 500\n"
        "  moectl bench --layer 3 --slo-p99 5 --duration 10\n"
        "  moectl bench --layer 3 --tokens 2048 --stream --spread -o json\n",
    .run = run,
};
