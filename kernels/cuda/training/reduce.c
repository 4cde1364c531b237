/* SPDX-License-Identifier: Apache-2.0 */
/* What is summed together, and the sums through windows; see reduce.h. */
#include "cuda/training/reduce.h"

#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/exchange.h"
#include "cuda/plan/limits.h"
#include "cuda/training/trainer.h"

enum {
    PIECE_ALIGN = MOE_WINDOW_LINE / sizeof(float), /* floats; pieces begin at multiples of it */
    /* Floats that travel at a time over a network: large compared with the cost of an exchange,
     * small compared with the memory of training. */
    NETWORK_ROOM = 4 << 20,
};
static_assert(NETWORK_ROOM % PIECE_ALIGN == 0, "whole lines");

/* --------------------------------------------------------------------- windows */

/* A barrier: every slot waits for every other. */
static struct moe_status barrier(struct moe_session *s)
{
    uint8_t nothing = 0, all[MOE_CUDA_MAX_SLOTS];
    return moe_cuda_session_exchange_inside(s, &nothing, all, sizeof nothing);
}

/* In the regions of rows; no step runs at the same time. */
static float *region_of(const struct moe_session *s, uint32_t owner, uint32_t source, size_t at)
{
    return (float *)moe_window_row_of(&s->layout, s->window.base[owner], source, 0, 0) + at;
}

static struct moe_status send_piece(struct moe_session *s, const struct moe_cuda_piece *piece)
{
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (p != s->config.slot && (piece->holders >> p & 1))
            MOE_TRY(MOE_CUDA(cudaMemcpyAsync(region_of(s, p, s->config.slot, piece->at),
                                             piece->data, piece->n * sizeof *piece->data,
                                             cudaMemcpyDeviceToDevice, s->device->compute)));
    return moe_ok();
}

static struct moe_status add_piece(struct moe_session *s, const struct moe_cuda_piece *piece)
{
    struct moe_sources sources = {0};
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (piece->holders >> p & 1)
            sources.from[sources.count++] =
                p == s->config.slot ? piece->data : region_of(s, s->config.slot, p, piece->at);
    return moe_cuda_sum_sources(&sources, piece->n, piece->data, s->device->compute);
}

static struct moe_status sum_through_windows(struct moe_cuda_reduce *r)
{
    if (r->needs_barrier)
        MOE_TRY(barrier(r->s));
    for (uint32_t i = 0; i < r->count; i++)
        if (r->piece[i].data != NULL)
            MOE_TRY(send_piece(r->s, &r->piece[i]));
    MOE_TRY(barrier(r->s));
    for (uint32_t i = 0; i < r->count; i++)
        if (r->piece[i].data != NULL)
            MOE_TRY(add_piece(r->s, &r->piece[i]));
    r->needs_barrier = true;
    return moe_ok();
}

/* ----------------------------------------------------------------------- calls */

struct moe_status moe_cuda_reduce_reserve(struct moe_session *session)
{
    void *messages;
    if (session->net == NULL)
        return moe_ok();
    return moe_cuda_ep_net_borrow(session->ep_net, moe_cuda_reduce_message_bytes(NETWORK_ROOM),
                                  &messages);
}

void moe_cuda_reduce_begin(struct moe_cuda_reduce *r, struct moe_session *session)
{
    size_t region = session->layout.row_region / sizeof(float) / PIECE_ALIGN * PIECE_ALIGN;
    r->s = session;
    r->room = session->net != NULL ? NETWORK_ROOM : region;
    r->used = r->count = 0;
    r->needs_barrier = false;
}

struct moe_status moe_cuda_reduce_flush(struct moe_cuda_reduce *r)
{
    if (r->count == 0)
        return moe_ok();
    MOE_TRY(r->s->net != NULL ? moe_cuda_reduce_over_network(r) : sum_through_windows(r));
    r->used = r->count = 0;
    return moe_ok();
}

struct moe_status moe_cuda_reduce_add(struct moe_cuda_reduce *r, float *data, size_t n,
                                      uint64_t holders)
{
    if (__builtin_popcountll(holders) < 2)
        return moe_ok();
    for (size_t done = 0; done < n;) {
        size_t part = n - done < r->room - r->used ? n - done : r->room - r->used;
        r->piece[r->count++] = (struct moe_cuda_piece){.data = data == NULL ? NULL : data + done,
                                                       .n = part,
                                                       .at = r->used,
                                                       .holders = holders};
        r->used += (part + PIECE_ALIGN - 1) / PIECE_ALIGN * PIECE_ALIGN;
        done += part;
        if (r->used == r->room || r->count == MOE_CUDA_REDUCE_PIECES)
            MOE_TRY(moe_cuda_reduce_flush(r));
    }
    return moe_ok();
}
