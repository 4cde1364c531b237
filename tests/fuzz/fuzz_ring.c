/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as the requests of a client's ring. A request is refused, or all of its tensors lie in
 * the client's regions, have the bytes of their shapes, and share no output byte with another one
 * in flight. At the end no reference is left. */
#include "driver.h"
#include "moe/types.h"
#include "regions/checks.h"
#include "regions/registry.h"
#include "regions/server.h"

#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 16, FLIGHT = 4 };

static const struct moe_ring_layer layer = {.hidden = 64, .top_k = 2, .max_tokens = 256};
static char memory[2][BYTES];
static uint32_t numbers[2];

struct flight {
    bool used;
    uint32_t use;
    char *from[MOE_RING_ROLES], *to[MOE_RING_ROLES];
};

static struct moe_regions *create(uint32_t *client)
{
    static const struct moe_regions_limits limits = {.bytes = 4 * BYTES,
                                                     .identity_bytes = 4 * BYTES,
                                                     .identity_clients = 1,
                                                     .client_regions = 2};
    struct moe_regions *r = calloc(1, sizeof *r);
    MOE_INVARIANT(r != NULL);
    moe_regions_init(r, &limits);
    struct moe_status st = moe_regions_join(r, "uid:1", client);
    MOE_INVARIANT(!moe_failed(&st));
    for (uint64_t i = 0; i < 2; i++) {
        struct moe_region_spec spec = {.name = i == 0 ? "a" : "b", .bytes = BYTES, .inode = i + 1};
        st = moe_regions_reserve(r, *client, &spec, &numbers[i]);
        MOE_INVARIANT(!moe_failed(&st));
        moe_regions_commit(r, numbers[i], memory[i]);
    }
    return r;
}

static void check_flight(const struct flight *f, const struct flight all[FLIGHT])
{
    for (size_t i = 0; i < MOE_RING_ROLES; i++) {
        if (f->from[i] == NULL)
            continue;
        size_t m = f->from[i] >= memory[1] && f->from[i] <= memory[1] + BYTES;
        MOE_INVARIANT(f->from[i] >= memory[m] && f->to[i] <= memory[m] + BYTES);
        MOE_INVARIANT(f->from[i] < f->to[i]);
        for (size_t n = 0; n < FLIGHT; n++)
            for (size_t j = 0; j < MOE_RING_ROLES; j++)
                if (all[n].used && all[n].from[j] != NULL && !(&all[n] == f && i == j) &&
                    (i >= MOE_RING_INPUTS || j >= MOE_RING_INPUTS))
                    MOE_INVARIANT(f->to[i] <= all[n].from[j] || all[n].to[j] <= f->from[i]);
    }
}

static void take(struct moe_regions *r, uint32_t client, const struct moe_ring_request *q,
                 struct flight all[FLIGHT], size_t n)
{
    struct flight *f = &all[n % FLIGHT];
    void *at[MOE_RING_ROLES];
    if (f->used)
        moe_regions_put(r, client, f->use);
    *f = (struct flight){0};
    struct moe_status st = moe_ring_check(q, &layer);
    if (!moe_failed(&st))
        st = moe_regions_take(r, client, q->tensors, at, &f->use);
    if (moe_failed(&st)) {
        MOE_INVARIANT(st.reason != MOE_REASON_NONE);
        return;
    }
    f->used = true;
    size_t rows = (size_t)q->tokens * layer.hidden * moe_dtype_bytes((enum moe_dtype)q->dtype);
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        if (at[i] != NULL) {
            f->from[i] = at[i];
            f->to[i] = f->from[i] + q->tensors[i].bytes;
        }
    if (q->tokens > 0)
        MOE_INVARIANT(f->to[MOE_RING_Y] == f->from[MOE_RING_Y] + rows &&
                      f->to[MOE_RING_X] == f->from[MOE_RING_X] + rows);
    check_flight(f, all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct moe_ring ring;
    struct flight all[FLIGHT] = {0};
    struct moe_ring_server server;
    struct moe_region_info info;
    uint32_t client, cursor = 0;
    struct moe_regions *r = create(&client);
    memset(&ring, 0, sizeof ring);
    moe_ring_server_init(&server, &ring);
    for (size_t n = 0; n * sizeof(struct moe_ring_request) < size; n++) {
        struct moe_ring_request q;
        size_t first = n * sizeof q, left = size - first;
        uint32_t entry;
        memset(&ring.requests[n % MOE_RING_ENTRIES], 0, sizeof q);
        memcpy(&ring.requests[n % MOE_RING_ENTRIES], data + first,
               left < sizeof q ? left : sizeof q);
        ring.submitted[n % MOE_RING_ENTRIES]++;
        MOE_INVARIANT(moe_ring_server_take(&server, &entry, &q));
        take(r, client, &q, all, n);
        const struct moe_ring_details details = {0};
        MOE_INVARIANT(!moe_ring_server_complete(&server, entry, MOE_OK, &details));
    }
    for (size_t n = 0; n < FLIGHT; n++)
        if (all[n].used)
            moe_regions_put(r, client, all[n].use);
    while (moe_regions_next(r, client, &cursor, &info))
        MOE_INVARIANT(info.references == 0);
    free(r);
    return 0;
}

/* Seeds: one good request; two that do not overlap, the second for shared experts; one with all
 * tensors. The numbers of regions are those of a new registry. */
size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static struct moe_ring_request seed[2];
    const uint32_t region = MOE_REGIONS_MAX, other = 2 * MOE_REGIONS_MAX + 1;
    memset(seed, 0, sizeof seed);
    for (uint32_t n = 0; n < 2; n++) {
        seed[n] = (struct moe_ring_request){.tokens = 8, .hidden = 64, .dtype = MOE_DTYPE_F32};
        seed[n].parts = n == 0 ? MOE_PARTS_BOTH : MOE_PARTS_SHARED;
        seed[n].tensors[MOE_RING_X] =
            (struct moe_ring_tensor){.region = region, .offset = n * 4096, .bytes = 2048};
        seed[n].tensors[MOE_RING_Y] =
            (struct moe_ring_tensor){.region = other, .offset = n * 4096, .bytes = 2048};
    }
    if (i == 2) {
        seed[0].routing = 2;
        seed[0].tensors[MOE_RING_TOKEN_STATE] =
            (struct moe_ring_tensor){.region = other, .offset = 32768, .bytes = 8};
        for (uint32_t n = 0; n < 4; n++) {
            const enum moe_ring_role roles[] = {MOE_RING_IDS, MOE_RING_WEIGHTS, MOE_RING_IDS_OUT,
                                                MOE_RING_WEIGHTS_OUT};
            seed[0].tensors[roles[n]] =
                (struct moe_ring_tensor){.region = other, .offset = 8192 + n * 64, .bytes = 64};
        }
    }
    *data = (const uint8_t *)seed;
    return i > 2 ? 0 : i == 1 ? sizeof seed : sizeof seed[0];
}
