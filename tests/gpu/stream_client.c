/* SPDX-License-Identifier: Apache-2.0 */
/* A client of moe/client_cuda.h, for streams.py: a worker with --allow-client-memory is there.
 *
 *     stream_client ENDPOINT DEVICE sleep|spin COMMAND
 *
 *     check            requests of all layers and formats, without a graph, against Forward; errors
 *     graph ROUNDS     one captured graph with two requests in flight, launched ROUNDS times; every
 *                      y is checked on the device
 *     bench TOKENS ... times of submit and wait as a graph, one request at a time and two in flight
 *     frozen           prints "ready", launches ALONE requests after a line of input, prints
 *                      "launched", and checks them when they have ended
 *     killed           prints "ready", launches graphs, and checks what they find after the worker
 *                      has been killed; prints how long the last one took
 *
 * Exits with 77 if there is no such device. */
#include "base/clock.h"
#include "moe/client_cuda.h"
#include "stream_kernels.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PATTERNS = 16,
    SKIPPED = 77,
    LANES = 2,
    ROUNDS_MAX = 1000,
    PAIRS = 16,   /* requests of a lane in a graph with two in flight */
    ALONE = 4000, /* requests without a call of the host */
    CHAIN = 100,  /* of them, in one graph */
};

static struct moe_client *client;
static struct moe_client_session *session;
static struct moe_stream_session *streams;
static cudaStream_t stream;
static size_t patterns = PATTERNS;

static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s %s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    exit(1);
}

static void cuda(cudaError_t rc, const char *what)
{
    if (rc == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(rc));
    exit(1);
}

static void expect(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

static void sync_stream(void)
{
    cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

static void *on_device(size_t bytes)
{
    void *p;
    cuda(cudaMalloc(&p, bytes), "cudaMalloc");
    cuda(cudaMemset(p, 0, bytes), "cudaMemset");
    return p;
}

/* ------------------------------------------------------------------- requests */

/* A request with its memory: x and y in one region; the inputs and expected outputs of PATTERNS. */
struct lane {
    const struct moe_client_layer *layer;
    struct moe_client_region *region;
    struct moe_stream_request *request;
    struct moe_client_session_forward forward;
    size_t bytes, y_at;
    void *inputs, *outputs; /* on the device */
    struct stream_counts *counts;
};

static void fill(void *x, size_t elements, enum moe_dtype dtype, uint32_t seed)
{
    for (size_t i = 0; i < elements; i++) {
        seed = seed * 1664525u + 1013904223u;
        float v = (float)(int32_t)seed / 2147483648.0F;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        if (dtype == MOE_DTYPE_F32)
            ((float *)x)[i] = v;
        else
            ((uint16_t *)x)[i] = (uint16_t)(bits >> 16);
    }
}

/* The worker's answer over gRPC. */
static void forward(const struct lane *l, const void *x, void *y)
{
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = l->forward.layer,
                                   .tokens = l->forward.tokens,
                                   .hidden = l->forward.hidden,
                                   .dtype = l->forward.dtype,
                                   .x = x,
                                   .y = y};
    must(moe_client_forward(client, &f));
}

static void make_patterns(struct lane *l, uint32_t seed)
{
    char *x = malloc(l->bytes), *y = malloc(l->bytes);
    expect(x != NULL && y != NULL, "there is memory");
    l->inputs = on_device(patterns * l->bytes);
    l->outputs = on_device(patterns * l->bytes);
    for (size_t i = 0; i < patterns; i++) {
        fill(x, l->bytes / moe_dtype_bytes(l->forward.dtype), l->forward.dtype, seed + (uint32_t)i);
        forward(l, x, y);
        cuda(cudaMemcpy((char *)l->inputs + i * l->bytes, x, l->bytes, cudaMemcpyHostToDevice),
             "cudaMemcpy");
        cuda(cudaMemcpy((char *)l->outputs + i * l->bytes, y, l->bytes, cudaMemcpyHostToDevice),
             "cudaMemcpy");
    }
    free(x);
    free(y);
}

static void open_lane(struct lane *l, const char *name, const struct moe_client_layer *layer,
                      uint32_t tokens, enum moe_dtype dtype, uint32_t seed)
{
    *l = (struct lane){.layer = layer};
    l->bytes = (size_t)tokens * layer->hidden * moe_dtype_bytes(dtype);
    l->y_at = (l->bytes + 255) / 256 * 256;
    must(moe_region_alloc(streams, name, 2 * l->y_at + 256, &l->region));
    expect(moe_region_bytes(l->region) >= 2 * l->y_at, "a region has the bytes asked for");
    l->forward = (struct moe_client_session_forward){.size = sizeof l->forward,
                                                     .layer = layer->layer,
                                                     .tokens = tokens,
                                                     .hidden = layer->hidden,
                                                     .dtype = dtype};
    if (tokens > 0) {
        l->forward.x = (struct moe_client_tensor){l->region, 0};
        l->forward.y = (struct moe_client_tensor){l->region, l->y_at};
        make_patterns(l, seed);
    }
    l->counts = on_device(sizeof *l->counts);
    must(moe_stream_request_create(streams, &l->forward, &l->request));
}

static void close_lane(struct lane *l)
{
    sync_stream();
    moe_stream_request_destroy(l->request);
    must(moe_region_destroy(l->region));
    (void)cudaFree(l->inputs);
    (void)cudaFree(l->outputs);
    (void)cudaFree(l->counts);
}

static char *y_of(const struct lane *l)
{
    return (char *)moe_region_data(l->region) + l->y_at;
}

static void put_input(const struct lane *l)
{
    if (l->bytes > 0)
        cuda(stream_next_input(l->counts, l->inputs, (uint32_t)patterns, moe_region_data(l->region),
                               l->bytes, stream),
             "stream_next_input");
}

static void check_output(const struct lane *l)
{
    if (l->bytes > 0)
        cuda(stream_check_output(l->counts, l->outputs, (uint32_t)patterns, y_of(l), l->bytes,
                                 stream),
             "stream_check_output");
}

static struct stream_counts counts_of(const struct lane *l)
{
    struct stream_counts c;
    cuda(cudaMemcpy(&c, l->counts, sizeof c, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return c;
}

static struct moe_stream_status status_of(const struct lane *l)
{
    struct moe_stream_status s;
    cuda(cudaMemcpy(&s, moe_stream_request_status(l->request), sizeof s, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    return s;
}

static bool y_is_nan(const struct lane *l)
{
    unsigned char *y = malloc(l->bytes);
    bool all = y != NULL;
    cuda(cudaMemcpy(y, y_of(l), l->bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t i = 0; all && i < l->bytes; i++)
        all = y[i] == 0xff;
    free(y);
    return all;
}

static void submit(const struct lane *l)
{
    must(moe_session_submit_on_stream(l->request, stream));
}

static void await(const struct lane *l)
{
    must(moe_session_wait_on_stream(l->request, stream));
}

/* --------------------------------------------------------------------- check */

static void check_layer(const struct moe_client_layer *layer, uint32_t tokens, enum moe_dtype dtype)
{
    struct lane l;
    struct moe_client_session_answer a = {.size = sizeof a};
    open_lane(&l, "check", layer, tokens, dtype, layer->layer + tokens);
    for (int i = 0; i < PATTERNS + 3; i++) {
        put_input(&l);
        submit(&l);
        await(&l);
        check_output(&l);
    }
    sync_stream();
    const struct stream_counts c = counts_of(&l);
    const struct moe_stream_status s = status_of(&l);
    printf("layer %u, %u tokens, %s: %u of %u answers differ, in %u bytes\n", layer->layer, tokens,
           dtype == MOE_DTYPE_F32 ? "F32" : "BF16", c.wrong_turns, c.turn, c.wrong_bytes);
    expect(s.code == MOE_OK && s.results == PATTERNS + 3 && s.failures == 0,
           "all requests succeed");
    expect(c.wrong_turns == 0, "y has the bits of Forward");
    must(moe_stream_request_result(l.request, &a));
    expect(tokens == 0 || a.step_ns > 0, "the worker tells its times");
    close_lane(&l);
}

/* A bad id on the device: one typed error, y is NaN, and the next request is good. */
static void check_errors(const struct moe_client_layer *layer)
{
    enum { T = 3 };
    struct lane l;
    struct moe_client_region *ids;
    struct moe_stream_request *bad, *wild;
    int32_t values[T * 64];
    open_lane(&l, "errors", layer, T, MOE_DTYPE_F32, 5);
    must(moe_region_alloc(streams, "ids", sizeof values, &ids));
    struct moe_client_session_forward f = l.forward;
    f.ids_in = (struct moe_client_tensor){ids, 0};
    for (size_t i = 0; i < (size_t)T * layer->top_k && i < T * 64; i++)
        values[i] = i == 1 ? INT32_MAX : (int32_t)(i % layer->top_k);
    cuda(cudaMemcpy(moe_region_data(ids), values, (size_t)T * layer->top_k * sizeof *values,
                    cudaMemcpyHostToDevice),
         "cudaMemcpy");
    must(moe_stream_request_create(streams, &f, &bad));
    must(moe_session_submit_on_stream(bad, stream));
    must(moe_session_wait_on_stream(bad, stream));
    sync_stream();
    struct moe_status st = moe_stream_request_result(bad, NULL);
    expect(st.code == MOE_INVALID_ARGUMENT && st.reason == MOE_REASON_EXPERT_INDEX_RANGE,
           "a bad id is refused");
    expect(y_is_nan(&l), "y is NaN after an error");
    moe_stream_request_destroy(bad);
    f = l.forward; /* the worker checks the place */
    f.x.offset = moe_region_bytes(l.region) - 16;
    must(moe_stream_request_create(streams, &f, &wild));
    must(moe_session_submit_on_stream(wild, stream));
    must(moe_session_wait_on_stream(wild, stream));
    must(moe_session_wait_on_stream(wild, stream)); /* without a submit */
    sync_stream();
    st = moe_stream_request_result(wild, NULL);
    expect(st.code == MOE_FAILED_PRECONDITION, "a wait without a submit fails");
    moe_stream_request_destroy(wild);
    put_input(&l);
    submit(&l);
    await(&l);
    check_output(&l);
    sync_stream();
    expect(counts_of(&l).wrong_turns == 0, "the next request is good");
    must(moe_region_destroy(ids));
    close_lane(&l);
}

/* Two objects with the same x and y, in turns: memory of a request serves the next one as soon as
 * the wait for it has ended, though the worker's host may not have seen that end. */
static void check_turns(const struct moe_client_layer *layer)
{
    enum { T = 5, TURNS = 400 };
    struct lane l;
    struct moe_stream_request *twin;
    open_lane(&l, "turns", layer, T, MOE_DTYPE_BF16, 77);
    must(moe_stream_request_create(streams, &l.forward, &twin));
    for (int i = 0; i < TURNS; i++) {
        struct moe_stream_request *r = i % 2 == 0 ? l.request : twin;
        put_input(&l);
        must(moe_session_submit_on_stream(r, stream));
        must(moe_session_wait_on_stream(r, stream));
        check_output(&l);
    }
    sync_stream();
    const struct stream_counts c = counts_of(&l);
    struct moe_stream_status s;
    cuda(cudaMemcpy(&s, moe_stream_request_status(twin), sizeof s, cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    printf("in turns: %u of %u answers differ, %llu and %llu failed\n", c.wrong_turns, c.turn,
           (unsigned long long)status_of(&l).failures, (unsigned long long)s.failures);
    expect(c.wrong_turns == 0, "y has the bits of Forward in turns");
    expect(status_of(&l).failures == 0 && s.failures == 0, "no turn is refused");
    moe_stream_request_destroy(twin);
    close_lane(&l);
}

static void check(void)
{
    const struct moe_client_info *info = moe_client_get_info(client);
    const uint32_t tokens[] = {1, 0, 7, 64, 300};
    for (size_t i = 0; i < info->layer_count && i < 2; i++)
        for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++)
            for (int d = 0; d < 2; d++)
                if (tokens[t] <= info->max_tokens_per_request)
                    check_layer(&info->layers[i], tokens[t],
                                d == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16);
    check_errors(&info->layers[0]);
    check_turns(&info->layers[0]);
    printf("same\n");
}

/* --------------------------------------------------------------------- graphs */

static cudaGraphExec_t end_capture(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return exec;
}

static cudaGraphExec_t capture(const struct lane *lanes, size_t count, bool checks)
{
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    for (size_t i = 0; i < count; i++) {
        if (checks)
            put_input(&lanes[i]);
        submit(&lanes[i]);
    }
    for (size_t i = 0; i < count; i++) {
        await(&lanes[i]);
        if (checks)
            check_output(&lanes[i]);
    }
    return end_capture();
}

static void run_graph(unsigned long rounds)
{
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    struct lane lanes[LANES];
    open_lane(&lanes[0], "one", layer, 16, MOE_DTYPE_BF16, 100);
    open_lane(&lanes[1], "two", layer, 32, MOE_DTYPE_BF16, 200);
    cudaGraphExec_t exec = capture(lanes, LANES, true);
    const uint64_t begin = moe_clock_ns();
    for (unsigned long i = 0; i < rounds; i++) {
        cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
        if (i % 64 == 63)
            sync_stream(); /* bounds what is queued */
    }
    sync_stream();
    printf("%lu launches in %.3f s\n", rounds, (double)(moe_clock_ns() - begin) / 1e9);
    for (size_t i = 0; i < LANES; i++) {
        const struct stream_counts c = counts_of(&lanes[i]);
        const struct moe_stream_status s = status_of(&lanes[i]);
        printf("request %zu: %u answers, %u differ in %u bytes, %llu failed\n", i, c.turn,
               c.wrong_turns, c.wrong_bytes, (unsigned long long)s.failures);
        expect(c.turn == rounds && s.results == rounds && s.failures == 0, "all succeed");
        expect(c.wrong_turns == 0, "every y has the bits of Forward");
    }
    cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    for (size_t i = 0; i < LANES; i++)
        close_lane(&lanes[i]);
    printf("same\n");
}

static void run_killed(void)
{
    enum { LIMIT_S = 30 };
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    struct lane lane;
    uint64_t took = 0;
    const uint64_t end = moe_clock_ns() + LIMIT_S * MOE_NS_PER_S;
    open_lane(&lane, "killed", layer, 16, MOE_DTYPE_BF16, 1);
    cudaGraphExec_t exec = capture(&lane, 1, false);
    struct moe_stream_status s = {0};
    bool said = false;
    while (s.code == MOE_OK) {
        expect(moe_clock_ns() < end, "the worker is killed in time");
        const uint64_t begin = moe_clock_ns();
        cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
        sync_stream();
        took = moe_clock_ns() - begin;
        s = status_of(&lane);
        if (!said) {
            printf("ready\n");
            (void)fflush(stdout);
            said = true;
        }
    }
    printf("%s after %llu ms, %llu good\n", moe_code_name((enum moe_code)s.code),
           (unsigned long long)(took / MOE_NS_PER_MS), (unsigned long long)(s.results - 1));
    expect(s.code == MOE_UNAVAILABLE, "the code is UNAVAILABLE");
    expect(took < 2 * MOE_NS_PER_S, "the wait is released in time");
    expect(y_is_nan(&lane), "y is NaN");
    for (int i = 0; i < 3; i++) {
        cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
        sync_stream();
        expect(status_of(&lane).code == MOE_UNAVAILABLE, "later requests fail too");
    }
    cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    moe_stream_request_destroy(lane.request);
    printf("released\n");
}

/* -------------------------------------------------------------------- frozen */

/* Once "launched" is printed, this process may be stopped: no call is left to make. */
static void run_frozen(void)
{
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    struct lane lane;
    open_lane(&lane, "frozen", layer, 16, MOE_DTYPE_BF16, 1);
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    for (int i = 0; i < CHAIN; i++) {
        put_input(&lane);
        submit(&lane);
        await(&lane);
        check_output(&lane);
    }
    cudaGraphExec_t exec = end_capture();
    cuda(cudaGraphUpload(exec, stream), "cudaGraphUpload");
    sync_stream();
    printf("ready\n");
    (void)fflush(stdout);
    expect(getchar() == '\n', "there is a line of input");
    for (int i = 0; i < ALONE / CHAIN; i++)
        cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    printf("launched\n");
    (void)fflush(stdout);
    sync_stream();
    const struct stream_counts c = counts_of(&lane);
    expect(c.turn == ALONE && c.wrong_turns == 0, "every y has the bits of Forward");
    expect(status_of(&lane).failures == 0, "all succeed");
    cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    close_lane(&lane);
    printf("same\n");
}

/* --------------------------------------------------------------------- bench */

/* A graph of one request between two stamps. */
static cudaGraphExec_t capture_timed(const struct lane *lane, uint64_t *stamps)
{
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    cuda(stream_stamp(&stamps[0], stream), "stream_stamp");
    submit(lane);
    await(lane);
    cuda(stream_stamp(&stamps[1], stream), "stream_stamp");
    return end_capture();
}

/* 2 * PAIRS requests, always two in flight. */
static cudaGraphExec_t capture_pairs(const struct lane lanes[LANES], uint64_t *stamps)
{
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    cuda(stream_stamp(&stamps[0], stream), "stream_stamp");
    for (int i = 0; i < PAIRS; i++)
        for (int n = 0; n < LANES; n++) {
            if (i > 0)
                await(&lanes[n]);
            submit(&lanes[n]);
        }
    for (int n = 0; n < LANES; n++)
        await(&lanes[n]);
    cuda(stream_stamp(&stamps[1], stream), "stream_stamp");
    return end_capture();
}

/* Launches once; us between the stamps. */
static double run_timed(cudaGraphExec_t exec, const uint64_t *stamps)
{
    uint64_t at[2];
    cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    sync_stream();
    cuda(cudaMemcpy(at, stamps, sizeof at, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return (double)(at[1] - at[0]) / 1e3;
}

static struct moe_client_session_answer answer_of(const struct lane *lane)
{
    struct moe_client_session_answer a = {.size = sizeof a};
    must(moe_stream_request_result(lane->request, &a));
    return a;
}

static double p99(const double *sorted, size_t count)
{
    return sorted[(size_t)((double)count * 0.99)];
}

static size_t rounds_of(uint32_t tokens)
{
    return tokens > 128 ? ROUNDS_MAX / 10 : ROUNDS_MAX;
}

static void bench_one(const struct lane *lane, uint64_t *stamps)
{
    enum { FIRST = 20 }; /* rounds that do not count */
    static double total_us[ROUNDS_MAX], step_us[ROUNDS_MAX], layer_us[ROUNDS_MAX],
        rest_us[ROUNDS_MAX], beyond_us[ROUNDS_MAX], server_us[ROUNDS_MAX];
    const size_t rounds = rounds_of(lane->forward.tokens);
    cudaGraphExec_t exec = capture_timed(lane, stamps);
    for (size_t i = 0; i < rounds + FIRST; i++) {
        const size_t n = i < FIRST ? 0 : i - FIRST;
        total_us[n] = run_timed(exec, stamps);
        const struct moe_client_session_answer a = answer_of(lane);
        step_us[n] = (double)a.step_ns / 1e3;
        layer_us[n] = (double)a.layer_ns / 1e3;
        server_us[n] = (double)a.server_ns / 1e3;
        rest_us[n] = total_us[n] - step_us[n];
        beyond_us[n] = total_us[n] - layer_us[n];
    }
    const double p50 = median(total_us, rounds); /* sorts */
    printf("%6u  1  %9.1f %9.1f  %9.1f %9.1f %9.1f  %9.1f %9.1f\n", lane->forward.tokens, p50,
           p99(total_us, rounds), median(server_us, rounds), median(step_us, rounds),
           median(layer_us, rounds), median(rest_us, rounds), median(beyond_us, rounds));
    cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
}

/* Times of one request: those of the graph over their number. */
static void bench_two(const struct lane lanes[LANES], uint64_t *stamps)
{
    enum { FIRST = 2 };
    static double each_us[ROUNDS_MAX], layer_us[ROUNDS_MAX], step_us[ROUNDS_MAX];
    const uint32_t tokens = lanes[0].forward.tokens;
    const size_t rounds = rounds_of(tokens) / 10 < 20 ? 10 : 20;
    uint32_t step_tokens = 0;
    cudaGraphExec_t exec = capture_pairs(lanes, stamps);
    for (size_t i = 0; i < rounds + FIRST; i++) {
        const size_t n = i < FIRST ? 0 : i - FIRST;
        each_us[n] = run_timed(exec, stamps) / (LANES * PAIRS);
        const struct moe_client_session_answer a = answer_of(&lanes[0]);
        layer_us[n] = (double)a.layer_ns / 1e3;
        step_us[n] = (double)a.step_ns / 1e3;
        step_tokens = a.step_tokens;
    }
    const double p50 = median(each_us, rounds), layer = median(layer_us, rounds);
    const double steps = (double)step_tokens / tokens; /* requests of a step */
    printf(
        "%6u  2  %9.1f %9.1f  %9s %9.1f %9.1f  a step of %u tokens each %.1f, %.3f of its layer\n",
        tokens, p50, p99(each_us, rounds), "", median(step_us, rounds), layer, step_tokens,
        p50 * steps, p50 * steps / layer);
    cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
}

static void bench(uint32_t tokens)
{
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    struct lane lanes[LANES];
    uint64_t *stamps = on_device(2 * sizeof *stamps);
    for (int n = 0; n < LANES; n++) {
        open_lane(&lanes[n], n == 0 ? "one" : "two", layer, tokens, MOE_DTYPE_BF16, 9);
        put_input(&lanes[n]);
    }
    bench_one(&lanes[0], stamps);
    bench_two(lanes, stamps);
    for (int n = 0; n < LANES; n++)
        close_lane(&lanes[n]);
    (void)cudaFree(stamps);
}

/* ---------------------------------------------------------------------- main */

static void open_all(const char *endpoint, int device, bool spin)
{
    const struct moe_client_config config = {.size = sizeof config, .endpoint = endpoint};
    const struct moe_client_session_config limits = {.size = sizeof limits, .timeout_ms = 10000};
    const struct moe_stream_session_config how = {
        .size = sizeof how, .device = device, .spin = spin};
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        printf("there is no device %d\n", device);
        exit(SKIPPED);
    }
    must(moe_client_connect(&config, &client));
    must(moe_session_open(client, &limits, &session));
    must(moe_stream_session_open(session, &how, &streams));
    cuda(cudaSetDevice(device), "cudaSetDevice");
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "usage: stream_client ENDPOINT DEVICE sleep|spin COMMAND ...\n");
        return 2;
    }
    const char *command = argv[4];
    open_all(argv[1], atoi(argv[2]), strcmp(argv[3], "spin") == 0);
    if (strcmp(command, "check") == 0) {
        check();
    } else if (strcmp(command, "graph") == 0 && argc == 6) {
        run_graph(strtoul(argv[5], NULL, 10));
    } else if (strcmp(command, "killed") == 0) {
        run_killed();
    } else if (strcmp(command, "frozen") == 0) {
        run_frozen();
    } else if (strcmp(command, "bench") == 0) {
        patterns = 1;
        printf(
            "tokens  in flight: client p50, p99; server, step, layer; less step, less layer; us\n");
        for (int i = 5; i < argc; i++)
            bench((uint32_t)strtoul(argv[i], NULL, 10));
    } else {
        return 2;
    }
    cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    moe_stream_session_close(streams);
    moe_session_close(session);
    moe_client_close(client);
    return 0;
}
