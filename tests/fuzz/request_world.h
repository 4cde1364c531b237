/* SPDX-License-Identifier: Apache-2.0 */
/* The world for requests of a worker: one layer, and a backend with memory only. */
#ifndef MOE_FUZZ_REQUEST_WORLD_H
#define MOE_FUZZ_REQUEST_WORLD_H

#include "service/request.h"

#include <stdlib.h>

enum { TOKENS = 3, HIDDEN = 4, TOP_K = 2, MESSAGE = 1 << 16 };

static struct moe_status take(struct moe_device *device, enum moe_mem kind, size_t bytes,
                              void **out)
{
    (void)device;
    (void)kind;
    *out = calloc(1, bytes);
    MOE_INVARIANT(*out != NULL);
    return moe_ok();
}

static void give(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes)
{
    (void)device;
    (void)kind;
    (void)bytes;
    free(p);
}

static const struct moe_layer_spec spec = {
    .layer = 2, .hidden = HIDDEN, .experts = 8, .intermediate = 4, .router = {.top_k = TOP_K}};
static const struct moe_layer_spec *const specs[] = {&spec};
static uint16_t experts[] = {0, 1, 2, 7}; /* of two token ids */
static struct moe_token_table table = {.layer = 2, .vocabulary = 2, .top_k = TOP_K, .ids = experts};
static const struct moe_service_info info = {.model = "m",
                                             .layers = specs,
                                             .layer_count = 1,
                                             .token_tables = {&table, 1},
                                             .max_message_bytes = MESSAGE,
                                             .max_tokens_per_request = 64,
                                             .max_tokens_per_step = 32};

static const struct moe_served_model served = {"m", "70"};

static struct moe_staging *staging;

static void open_staging(const struct moe_backend *memory)
{
    struct moe_status st = moe_staging_create(memory, NULL, 1 << 20, &staging);
    MOE_INVARIANT(!moe_failed(&st));
}

static void check_memory_is_back(void)
{
    struct moe_staging_counters c;
    moe_staging_read_counters(staging, &c);
    MOE_INVARIANT(c.in_use_bytes == 0);
}

#endif
