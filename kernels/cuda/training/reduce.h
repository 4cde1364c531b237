/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of gradients over slots, for the optimizer step: tensors that several slots hold are added
 * up in slot order, so the sums are the same bits on all holders, whichever way they travelled.
 *
 * All slots add the same tensors in the same order with the same sizes, also those that they do not
 * hold. What is added travels many tensors at a time, when there is no more room, and at the latest
 * with moe_cuda_reduce_flush. Through windows each holder copies its values into the other holders'
 * and adds theirs itself. Over a network, where bytes are dear, each holder adds up a part of every
 * tensor, and hands it out (reduce_net.c). */
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
    size_t at;        /* floats into the room: where it lies in a region of the windows */
    uint64_t holders; /* at least two */
};

struct moe_cuda_reduce {
    struct moe_session *s;
    size_t room, used; /* floats; the same on all slots, and whole lines of a window */
    uint32_t count;
    bool needs_barrier; /* windows: a batch went before this one, and its last reader may not have
                           finished */
    struct moe_cuda_piece piece[MOE_CUDA_REDUCE_PIECES];
};

/* Takes what memory sums need, so that none fails later for want of it. Between passes. */
struct moe_status moe_cuda_reduce_reserve(struct moe_session *session) MOE_CHECKED;

void moe_cuda_reduce_begin(struct moe_cuda_reduce *r, struct moe_session *session);
/* data [n] of every slot in `holders` becomes the sum over them, in stream order behind the flush;
 * NULL on the other slots. Fewer than two holders: nothing to do. Waits for the other slots when
 * there is no more room. */
struct moe_status moe_cuda_reduce_add(struct moe_cuda_reduce *r, float *data, size_t n,
                                      uint64_t holders) MOE_CHECKED;
/* Through windows, all slots must meet once more before a step runs: readers may not have finished.
 */
struct moe_status moe_cuda_reduce_flush(struct moe_cuda_reduce *r) MOE_CHECKED;

/* reduce_net.c: adds up the pieces that are in *r. */
struct moe_status moe_cuda_reduce_over_network(struct moe_cuda_reduce *r) MOE_CHECKED;
/* Bytes of messages that it needs for pieces of `room` floats. */
size_t moe_cuda_reduce_message_bytes(size_t room);

#ifdef __cplusplus
}
#endif

#endif
