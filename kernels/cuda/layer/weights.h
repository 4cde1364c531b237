/* SPDX-License-Identifier: Apache-2.0 */
/* Moves weights from host memory or files into their places on the device, and back.
 *
 * A few threads, at most MOE_CUDA_UPLOAD_THREADS and no more than the process has cores, each have
 * two pieces of pinned memory: a piece is filled (copied or read) while the other is on its way, so
 * that together they keep the bus busy, which one thread cannot. What keeps its
 * dtype goes straight to its place, gate and up by copies that leave out every other block of rows;
 * what changes it lands beside first and is converted by a kernel. Knows nothing of layers.
 *
 * The way back is taken beside steps, whose rows come home through the same copy engine: pieces are
 * small, and a thread asks for the next when it has put its last one away, so that a step's rows
 * wait for a few of them (some 10 us each) and never for all. */
#ifndef MOE_CUDA_WEIGHTS_H
#define MOE_CUDA_WEIGHTS_H

#include "base/thread_pool.h"
#include "cuda/core/device.h"
#include "cuda/layer/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CUDA_UPLOAD_THREADS = 8,
    MOE_CUDA_PIECE_BYTES = 2 << 20,  /* of pinned memory; a thread has two */
    MOE_CUDA_READ_BYTES = 512 << 10, /* of a piece on its way back */
};

/* A source of `rows` x `columns` of dtype `from`, written as `to` (never from F32 to BF16). */
struct moe_cuda_weight {
    void *dst; /* device: first row of the entry */
    enum moe_dtype from, to;
    enum moe_cuda_rows order;
    size_t rows, columns;
};

/* The threads and their memory; for device_open and device_close. */
struct moe_status moe_cuda_uploads_open(struct moe_device *device) MOE_CHECKED;
void moe_cuda_uploads_close(struct moe_device *device);

/* Returns when `data` may be reused; the weight is in place after moe_cuda_weights_finish. */
struct moe_status moe_cuda_weights_put(struct moe_device *device, const struct moe_cuda_weight *w,
                                       const void *data) MOE_CHECKED;
/* The same for a weight that the threads read themselves, which may still be going on afterwards:
 * the source stays until `batch` has been finished. Errors: an earlier one of the batch's, too. */
struct moe_status moe_cuda_weights_fetch(struct moe_device *device, const struct moe_cuda_weight *w,
                                         const struct moe_weight_source *source,
                                         struct moe_thread_pool_batch *batch) MOE_CHECKED;
/* Waits until everything that was put, and all of the batch, is in place; tells what went wrong
 * with the batch. */
struct moe_status moe_cuda_weights_finish(struct moe_device *device,
                                          struct moe_thread_pool_batch *batch) MOE_CHECKED;

/* The way back: a weight's place (`dst`, `to`, `order`, `rows`, `columns`; `from` is not looked
 * at), widened to fp32, into `data` [rows, columns]; done on return. Not behind anything that is
 * enqueued: what wrote the weight has been waited for. Any thread, also while steps run. */
struct moe_status moe_cuda_weights_read(struct moe_device *device, const struct moe_cuda_weight *w,
                                        float *data) MOE_CHECKED;

/* Enqueues: elements [first, first + n) of the source, which lie at `src` on the device, into their
 * places. */
struct moe_status moe_cuda_weights_place(const struct moe_cuda_weight *w, const void *src,
                                         size_t first, size_t n, cudaStream_t stream) MOE_CHECKED;

/* Enqueues: n F32 values as the sum of three bf16, each at dst[part * n + i]. */
struct moe_status moe_cuda_weights_split(const void *src, size_t n, void *dst,
                                         cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
