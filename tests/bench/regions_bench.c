/* SPDX-License-Identifier: Apache-2.0 */
/* Forward over gRPC against a request through shared memory, of one worker of this host, in turn
 * and one at a time, because the machine's speed drifts.
 *
 *     regions_bench ENDPOINT [ROUNDS [TOKENS ...]]    default 200 rounds of 1, 16, 256, 1024 tokens
 *
 * The worker needs --allow-client-memory. Prints medians in microseconds: at the client, on the
 * worker (from the request's arrival), of the step alone; and the client's time less the step. */
#include "base/clock.h"
#include "moe/regions.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS_MAX = 10001, SPIN_US = 50, WAYS = 2 };

static struct moe_client *client;
static struct moe_client_session *session;
static struct moe_client_region *region;

/* One request's figures, ns. */
struct times {
    double client, server, step;
};

static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s %s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    exit(1);
}

static struct times run_inline(const struct moe_client_layer *l, uint32_t tokens, float *x,
                               float *y)
{
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = l->layer,
                                   .tokens = tokens,
                                   .hidden = l->hidden,
                                   .dtype = MOE_DTYPE_F32,
                                   .x = x,
                                   .y = y};
    const uint64_t begin = moe_clock_ns();
    must(moe_client_forward(client, &f));
    return (struct times){(double)(moe_clock_ns() - begin), (double)f.stages.server_ns,
                          (double)f.stages.step_ns};
}

static struct times run_shared(const struct moe_client_layer *l, uint32_t tokens, size_t y_at)
{
    struct moe_client_session_forward f = {.size = sizeof f,
                                           .layer = l->layer,
                                           .tokens = tokens,
                                           .hidden = l->hidden,
                                           .dtype = MOE_DTYPE_F32,
                                           .x = {region, 0},
                                           .y = {region, y_at}};
    struct moe_client_session_answer a = {.size = sizeof a};
    uint64_t id;
    const uint64_t begin = moe_clock_ns();
    must(moe_session_submit(session, &f, &id));
    must(moe_session_wait(session, id, &a));
    return (struct times){(double)(moe_clock_ns() - begin), (double)a.server_ns, (double)a.step_ns};
}

static void print(const char *way, uint32_t tokens, const struct times *t, size_t rounds)
{
    static double client_ns[ROUNDS_MAX], server_ns[ROUNDS_MAX], step_ns[ROUNDS_MAX],
        rest_ns[ROUNDS_MAX];
    for (size_t i = 0; i < rounds; i++) {
        client_ns[i] = t[i].client;
        server_ns[i] = t[i].server;
        step_ns[i] = t[i].step;
        rest_ns[i] = t[i].client - t[i].step;
    }
    printf("%6u  %-6s  %10.1f  %10.1f  %10.1f  %10.1f\n", tokens, way,
           median(client_ns, rounds) / 1e3, median(server_ns, rounds) / 1e3,
           median(step_ns, rounds) / 1e3, median(rest_ns, rounds) / 1e3);
}

static void compare(const struct moe_client_layer *l, uint32_t tokens, size_t rounds)
{
    static struct times all[WAYS][ROUNDS_MAX];
    const size_t bytes = (size_t)tokens * l->hidden * sizeof(float);
    const size_t y_at = (bytes + 4095) / 4096 * 4096;
    float *x = malloc(bytes), *y = malloc(bytes);
    must(moe_region_create(session, "bench", 2 * y_at, &region));
    if (x == NULL || y == NULL)
        exit(1);
    for (size_t i = 0; i < bytes / sizeof *x; i++)
        x[i] = (float)((i * 2654435761U) % 2000) / 1000.0F - 1.0F;
    memcpy(moe_region_data(region), x, bytes);
    for (size_t i = 0; i <= rounds; i++) { /* the first round is not counted */
        size_t at = i == 0 ? 0 : i - 1;
        all[0][at] = run_inline(l, tokens, x, y);
        all[1][at] = run_shared(l, tokens, y_at);
    }
    if (memcmp((const char *)moe_region_data(region) + y_at, y, bytes) != 0) {
        fprintf(stderr, "the answers differ\n");
        exit(1);
    }
    print("inline", tokens, all[0], rounds);
    print("shm", tokens, all[1], rounds);
    must(moe_region_destroy(region));
    free(x);
    free(y);
}

int main(int argc, char **argv)
{
    static const uint32_t usual[] = {1, 16, 256, 1024};
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 200;
    if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "usage: regions_bench ENDPOINT [ROUNDS [TOKENS ...]]\n");
        return 2;
    }
    const struct moe_client_config config = {
        .size = sizeof config, .endpoint = argv[1], .spin_us = SPIN_US};
    const struct moe_client_session_config shared = {.size = sizeof shared, .spin_us = SPIN_US};
    must(moe_client_connect(&config, &client));
    must(moe_session_open(client, &shared, &session));
    const struct moe_client_layer *l = &moe_client_get_info(client)->layers[0];
    printf("hidden %u, F32, %zu rounds; medians in us\n", l->hidden, rounds);
    printf("tokens  way         client      worker        step  less step\n");
    if (argc > 3)
        for (int i = 3; i < argc; i++)
            compare(l, (uint32_t)strtoul(argv[i], NULL, 10), rounds);
    else
        for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
            compare(l, usual[i], rounds);
    moe_session_close(session);
    moe_client_close(client);
    return 0;
}
