/* SPDX-License-Identifier: Apache-2.0 */
/* The acts of both clients: one keeps the rules, one writes what it likes to its memory. */
#include "simulation/world.h"

/* The place of an entry's rows. */
static uint32_t place_of(uint32_t client, uint32_t entry)
{
    return client == HONEST && w.one_memory ? 0 : entry;
}

static struct moe_ring_request request_of(uint32_t client, uint32_t entry)
{
    const uint32_t at = 32 * place_of(client, entry);
    struct moe_ring_request q = {.tokens = PARTS, .hidden = 1, .dtype = MOE_DTYPE_F32};
    uint32_t region = w.clients[client].region;
    q.tensors[MOE_RING_X] =
        (struct moe_ring_tensor){.region = region, .offset = at, .bytes = 4 * PARTS};
    q.tensors[MOE_RING_Y] =
        (struct moe_ring_tensor){.region = region, .offset = at + 16, .bytes = 4 * PARTS};
    return q;
}

uint32_t *x_of(uint32_t client, uint32_t entry)
{
    return &w.memory[client][8 * place_of(client, entry)];
}

void lend(uint32_t entry, bool lent)
{
    for (uint32_t t = 0; t < PARTS; t++)
        w.lent[8 * place_of(HONEST, entry) + 4 + t] = lent;
}

/* The daemon has completed the last request of an entry of the honest client's device. */
static bool lane_is_done(uint32_t entry)
{
    uint32_t sequence = w.lanes[entry].sequence;
    return sequence == 0 || moe_ring_sequence_of(w.rings[HONEST].completed[entry].word) == sequence;
}

static void submit_by_device(uint32_t entry, const struct moe_ring_request *q)
{
    bool done = lane_is_done(entry);
    w.lanes[entry].request = *q;
    moe_ring_device_submit(&w.lanes[entry], &w.rings[HONEST], entry);
    check(done || w.lanes[entry].refused != 0,
          "a device submits nothing before the daemon is done with what it gave up");
    if (w.lanes[entry].refused == 0)
        lend(entry, true);
}

void submit(uint32_t entry)
{
    struct client *c = &w.clients[HONEST];
    struct moe_ring_request q = request_of(HONEST, entry);
    c->value[entry] = ++c->made;
    for (uint32_t t = 0; t < PARTS; t++)
        x_of(HONEST, entry)[t] = c->value[entry] * PARTS + t;
    w.left.requests[HONEST]--;
    if (w.by_device) {
        submit_by_device(entry, &q);
        return;
    }
    lend(entry, true);
    moe_ring_caller_submit(&w.callers[HONEST], entry, &q);
}

static bool take_result(uint32_t entry, enum moe_code *code)
{
    struct moe_ring_device_entry *lane = &w.lanes[entry];
    if (!w.by_device)
        return moe_ring_caller_poll(&w.callers[HONEST], entry, code);
    if (!moe_ring_device_poll(lane, &w.rings[HONEST], entry))
        return false;
    *code = moe_ring_code_of(lane->result);
    return true;
}

bool is_free(uint32_t entry)
{
    return w.by_device ? w.lanes[entry].waiting == 0 && lane_is_done(entry)
                       : moe_ring_caller_is_free(&w.callers[HONEST], entry);
}

bool memory_is_free(uint32_t entry)
{
    bool all = is_free(entry);
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++)
        all = all && (!w.one_memory || is_free(e));
    return all;
}

void poll_result(uint32_t entry)
{
    enum moe_code code;
    if (!take_result(entry, &code))
        return;
    const uint32_t *y = x_of(HONEST, entry) + 4;
    for (uint32_t t = 0; t < PARTS && code == MOE_OK; t++)
        check(y[t] == layer_of(w.clients[HONEST].value[entry] * PARTS + t),
              "a good answer has all rows of its request");
    check(code == MOE_OK || w.excused, "no request fails without a cause");
    if (is_free(entry))
        lend(entry, false);
}

struct moe_ring_request rogue_request(enum rogue kind, uint32_t entry)
{
    struct moe_ring_request q = request_of(ROGUE, entry);
    struct moe_ring_tensor *y = &q.tensors[MOE_RING_Y];
    switch (kind) {
    case ROGUE_PAST_END: y->offset = sizeof w.memory[0]; break;
    case ROGUE_WRAPS: y->offset = UINT64_MAX - 15; break;
    case ROGUE_FOREIGN: y->region = w.clients[HONEST].region; break;
    case ROGUE_OVERLAP: y->offset = 16; break;
    case ROGUE_ALIAS:
        y->region = w.clients[ROGUE].alias;
        y->offset = 16;
        break;
    default: break;
    }
    return q;
}
