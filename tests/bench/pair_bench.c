/* SPDX-License-Identifier: Apache-2.0 */
/* Latencies of several groups in turn: short blocks of Forward requests, one at a time, first to
 * the one group and then to the next, so that other load of the machine affects all of them.
 *
 *     pair_bench LAYER TOKENS ROUNDS REQUESTS ENDPOINT ENDPOINT ...
 *
 * In each round every endpoint gets a block of REQUESTS, in a random order. Prints one line for
 * each block: round, number of the endpoint, and in ns the medians of the client's latency and of
 * the server's time. tracing.py shows how to compare them. */
#include "base/clock.h"
#include "moe/client.h"
#include "support/median.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>

enum { ENDPOINTS_MAX = 16, REQUESTS_MAX = 100000, UNCOUNTED = 5 /* of each block */ };

static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s: %s\n", moe_code_name(st.code), st.text);
    exit(1);
}

/* The layer's hidden width. */
static uint32_t width_of(struct moe_client *c, uint32_t layer)
{
    const struct moe_client_info *info = moe_client_get_info(c);
    for (size_t i = 0; i < info->layer_count; i++)
        if (info->layers[i].layer == layer)
            return info->layers[i].hidden;
    fprintf(stderr, "no layer %u\n", layer);
    exit(1);
}

struct block {
    double latency[REQUESTS_MAX], server[REQUESTS_MAX];
};

static void run_block(struct moe_client *c, struct moe_client_forward *f, size_t requests,
                      struct block *b)
{
    for (size_t i = 0; i < requests + UNCOUNTED; i++) {
        uint64_t begin = moe_clock_ns();
        must(moe_client_forward(c, f));
        if (i < UNCOUNTED)
            continue;
        b->latency[i - UNCOUNTED] = (double)(moe_clock_ns() - begin);
        b->server[i - UNCOUNTED] = (double)f->stages.server_ns;
    }
}

static size_t number(const char *text, size_t largest)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end == '\0' && n <= largest)
        return n;
    fprintf(stderr, "%s: not a number up to %zu\n", text, largest);
    exit(2);
}

int main(int argc, char **argv)
{
    enum { FIRST = 5 };
    static struct block block;
    struct moe_client *clients[ENDPOINTS_MAX];
    size_t order[ENDPOINTS_MAX], count = (size_t)argc - FIRST;
    if (argc < FIRST + 2 || count > ENDPOINTS_MAX) {
        fprintf(stderr, "usage: pair_bench LAYER TOKENS ROUNDS REQUESTS ENDPOINT ENDPOINT ...\n");
        return 2;
    }
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = (uint32_t)number(argv[1], UINT32_MAX),
                                   .tokens = (uint32_t)number(argv[2], 65536),
                                   .dtype = MOE_DTYPE_F32};
    const size_t rounds = number(argv[3], 1000000), requests = number(argv[4], REQUESTS_MAX);
    for (size_t i = 0; i < count; i++) {
        const struct moe_client_config config = {
            .size = sizeof config, .endpoint = argv[FIRST + i], .max_attempts = 1};
        must(moe_client_connect(&config, &clients[i]));
        f.hidden = width_of(clients[i], f.layer);
        order[i] = i;
    }
    const size_t values = (size_t)f.tokens * f.hidden;
    float *x = calloc(2 * values, sizeof *x);
    if (x == NULL || requests == 0)
        return 2;
    for (size_t i = 0; i < values; i++)
        x[i] = random_normal();
    f.x = x;
    f.y = x + values;
    for (size_t r = 0; r < rounds; r++) {
        for (size_t i = count; i > 1; i--) {
            size_t other = random_below((uint32_t)i), last = order[i - 1];
            order[i - 1] = order[other];
            order[other] = last;
        }
        for (size_t i = 0; i < count; i++) {
            run_block(clients[order[i]], &f, requests, &block);
            printf("%zu %zu %.0f %.0f\n", r, order[i], median(block.latency, requests),
                   median(block.server, requests));
        }
    }
    for (size_t i = 0; i < count; i++)
        moe_client_close(clients[i]);
    free(x);
    return 0;
}
