/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of gradients over a network; see reduce.h.
 *
 * Each piece is cut into as many parts as it has holders, and each holder owns one part. There are
 * two exchanges. In the first every holder sends each owner the part of that owner. In the second
 * every owner sends the sum to all other holders. So a value crosses the network twice, for any
 * number of holders. A message to a peer in one exchange is as long as the message from it in the
 * other. So two areas of messages serve both exchanges: one for parts that the peer owns, one for
 * own parts.
 */
#include "cuda/plan/limits.h"
#include "cuda/training/reduce.h"

#include "cuda/exchange/ep_net.h"
#include "cuda/training/trainer.h"

enum {
    PART_ALIGN =
        MOE_CUDA_TRAILER_BYTES / sizeof(float), /* floats; parts begin at multiples of it */
};

/* The messages of one exchange, one for each peer. */
struct area {
    uint8_t *message[MOE_CUDA_MAX_SLOTS];
    size_t bytes[MOE_CUDA_MAX_SLOTS]; /* without the trailer */
};

struct sums {
    struct moe_cuda_reduce *r;
    struct area theirs; /* parts that the peer owns */
    struct area mine;   /* parts that this slot owns: the peer's values, or the sums */
};

/* A part of a piece, in floats. */
struct part {
    size_t begin, n;
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* The part of a piece that one of its holders owns. */
static struct part part_of(const struct moe_cuda_piece *piece, uint32_t owner)
{
    size_t holders = (size_t)__builtin_popcountll(piece->holders);
    size_t before = (size_t)__builtin_popcountll(piece->holders & ((UINT64_C(1) << owner) - 1));
    size_t each = round_up((piece->n + holders - 1) / holders, PART_ALIGN);
    size_t begin = before * each < piece->n ? before * each : piece->n;
    return (struct part){begin, piece->n - begin < each ? piece->n - begin : each};
}

static size_t part_bytes(const struct moe_cuda_piece *piece, uint32_t owner)
{
    return round_up(part_of(piece, owner).n, PART_ALIGN) * sizeof(float);
}

static bool is_peer(const struct sums *u, uint32_t slot)
{
    const struct moe_session_config *c = &u->r->s->config;
    return slot != c->slot && (c->live >> slot & 1);
}

/* A piece that this slot and the peer hold. */
static bool is_common(const struct sums *u, const struct moe_cuda_piece *piece, uint32_t peer)
{
    return is_peer(u, peer) && piece->data != NULL && (piece->holders >> peer & 1);
}

/* ---------------------------------------------------------------------- memory */

static size_t area_bytes(size_t room)
{
    size_t padding = sizeof(float) * PART_ALIGN * MOE_CUDA_REDUCE_PIECES * (MOE_CUDA_MAX_SLOTS + 1);
    return room * sizeof(float) + padding + MOE_CUDA_MAX_SLOTS * (size_t)MOE_CUDA_TRAILER_BYTES;
}

size_t moe_cuda_reduce_message_bytes(size_t room)
{
    return 2 * area_bytes(room);
}

/* Lays out both areas, starting at `memory`. */
static void lay_out(struct sums *u, uint8_t *memory)
{
    const struct moe_cuda_reduce *r = u->r;
    uint8_t *theirs = memory, *mine = memory + area_bytes(r->room);
    for (uint32_t p = 0; p < r->s->config.slots; p++) {
        size_t to = 0, from = 0;
        for (uint32_t i = 0; i < r->count; i++) {
            if (!is_common(u, &r->piece[i], p))
                continue;
            to += part_bytes(&r->piece[i], p);
            from += part_bytes(&r->piece[i], r->s->config.slot);
        }
        u->theirs.message[p] = theirs;
        u->theirs.bytes[p] = to;
        u->mine.message[p] = mine;
        u->mine.bytes[p] = from;
        theirs += to + MOE_CUDA_TRAILER_BYTES;
        mine += from + MOE_CUDA_TRAILER_BYTES;
    }
    MOE_INVARIANT(theirs <= memory + area_bytes(r->room) &&
                  mine <= memory + 2 * area_bytes(r->room));
}

/* ------------------------------------------------------------------- exchanges */

enum direction { PACK, UNPACK };

/* Moves the owner's parts from the gradients to the message with a peer, or back. */
static struct moe_status move_parts(const struct sums *u, const struct area *area, uint32_t peer,
                                    uint32_t owner, enum direction direction)
{
    cudaStream_t stream = u->r->s->device->compute;
    uint8_t *at = area->message[peer];
    for (uint32_t i = 0; i < u->r->count; i++) {
        const struct moe_cuda_piece *piece = &u->r->piece[i];
        if (!is_common(u, piece, peer))
            continue;
        struct part part = part_of(piece, owner);
        void *data = piece->data + part.begin;
        if (part.n > 0)
            MOE_TRY(MOE_CUDA(cudaMemcpyAsync(direction == PACK ? at : data,
                                             direction == PACK ? data : at, part.n * sizeof(float),
                                             cudaMemcpyDeviceToDevice, stream)));
        at += part_bytes(piece, owner);
    }
    return moe_ok();
}

static struct moe_status exchange(const struct sums *u, const struct area *out,
                                  const struct area *in)
{
    struct moe_session *s = u->r->s;
    struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS] = {0};
    struct moe_cuda_trailers trailers = {.trailer = moe_cuda_net_next_trailer(s->net)};
    for (uint32_t p = 0; p < s->config.slots; p++) {
        transfer[p] =
            (struct moe_cuda_transfer){.send = out->message[p],
                                       .recv = in->message[p],
                                       .send_bytes = out->bytes[p] + MOE_CUDA_TRAILER_BYTES,
                                       .recv_bytes = in->bytes[p] + MOE_CUDA_TRAILER_BYTES};
        if (is_peer(u, p))
            trailers.at[p] =
                (uint64_t *)(void *)(out->message[p] + out->bytes[p] + MOE_CUDA_TRAILER_BYTES) - 1;
    }
    MOE_TRY(moe_cuda_launch_trailers(&trailers, s->device->compute));
    return moe_cuda_net_exchange(s->net, transfer, NULL);
}

/* Own parts become the sums, in slot order. */
static struct moe_status add_parts(const struct sums *u)
{
    const struct moe_session *s = u->r->s;
    const uint8_t *at[MOE_CUDA_MAX_SLOTS];
    for (uint32_t p = 0; p < s->config.slots; p++)
        at[p] = u->mine.message[p];
    for (uint32_t i = 0; i < u->r->count; i++) {
        const struct moe_cuda_piece *piece = &u->r->piece[i];
        if (piece->data == NULL)
            continue;
        struct part part = part_of(piece, s->config.slot);
        struct moe_sources sources = {0};
        for (uint32_t p = 0; p < s->config.slots; p++) {
            if (p == s->config.slot)
                sources.from[sources.count++] = piece->data + part.begin;
            if (!is_common(u, piece, p))
                continue;
            sources.from[sources.count++] = (const float *)(const void *)at[p];
            at[p] += part_bytes(piece, s->config.slot);
        }
        MOE_TRY(
            moe_cuda_sum_sources(&sources, part.n, piece->data + part.begin, s->device->compute));
    }
    return moe_ok();
}

/* ----------------------------------------------------------------------- calls */

/* On the comm thread. */
static struct moe_status add_up(void *ctx)
{
    struct sums *u = ctx;
    const struct moe_session_config *c = &u->r->s->config;
    void *memory;
    MOE_TRY(moe_cuda_ep_net_borrow(u->r->s->ep_net, moe_cuda_reduce_message_bytes(u->r->room),
                                   &memory));
    lay_out(u, memory);
    for (uint32_t p = 0; p < c->slots; p++)
        MOE_TRY(move_parts(u, &u->theirs, p, p, PACK));
    MOE_TRY(exchange(u, &u->theirs, &u->mine));
    MOE_TRY(add_parts(u));
    for (uint32_t p = 0; p < c->slots; p++)
        MOE_TRY(move_parts(u, &u->mine, p, c->slot, PACK));
    MOE_TRY(exchange(u, &u->mine, &u->theirs));
    for (uint32_t p = 0; p < c->slots; p++)
        MOE_TRY(move_parts(u, &u->theirs, p, p, UNPACK));
    return moe_ok();
}

struct moe_status moe_cuda_reduce_over_network(struct moe_cuda_reduce *r)
{
    struct sums sums = {.r = r};
    return moe_cuda_session_run(r->s, add_up, &sums);
}
