/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of gradients over slots, for the optimizer step. Tensors that several slots hold are added
 * in slot order, so all holders get the same bits, through windows and over a network.
 *
 * All slots add the same tensors in the same order with the same sizes, also tensors they do not
 * hold. Many tensors travel at a time: when the room is full, and at the latest with
 * moe_cuda_reduce_flush. Through windows each holder copies its values to the other holders and
 * adds theirs itself. Over a network, where bytes are expensive, each holder adds a part of every
 * tensor and sends out the sum (reduce_net.c). */
#ifndef MOE_CUDA_REDUCE_H
#define MOE_CUDA_REDUCE_H

#include "cuda/session/session.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_CUDA_REDUCE_PIECES = 128 }; /* tensors, or pieces of them, that travel at a time */

/* n values of a tensor, in device memory. */
struct moe_cuda_piece {
    float *data; /* NULL: not held here */
    size_t n;
    size_t at;        /* floats into the room: the offset in a region of the windows */
    uint64_t holders; /* at least two */
};

struct moe_cuda_reduce {
    struct moe_session *s;
    size_t room, used; /* floats; the same on all slots, and whole lines of a window */
    uint32_t count;
    bool needs_barrier; /* windows: readers of the last batch may not have finished */
    struct moe_cuda_piece piece[MOE_CUDA_REDUCE_PIECES];
};

/* Takes the memory that sums need, so that none fails later for lack of it. Between passes. */
struct moe_status moe_cuda_reduce_reserve(struct moe_session *session) MOE_CHECKED;

void moe_cuda_reduce_begin(struct moe_cuda_reduce *r, struct moe_session *session);
/* data [n] of every slot in `holders` becomes the sum over them, in stream order after the flush;
 * NULL on the other slots. With fewer than two holders it does nothing. When the room is full, it
 * waits for the other slots. */
struct moe_status moe_cuda_reduce_add(struct moe_cuda_reduce *r, float *data, size_t n,
                                      uint64_t holders) MOE_CHECKED;
/* Through windows, all slots must synchronize once more before a step runs: readers may not have
 * finished. */
struct moe_status moe_cuda_reduce_flush(struct moe_cuda_reduce *r) MOE_CHECKED;

/* reduce_net.c: sums the pieces in *r. */
struct moe_status moe_cuda_reduce_over_network(struct moe_cuda_reduce *r) MOE_CHECKED;
/* Bytes of messages for pieces of `room` floats. */
size_t moe_cuda_reduce_message_bytes(size_t room);

#ifdef __cplusplus
}
#endif

#endif
