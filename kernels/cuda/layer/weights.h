/* SPDX-License-Identifier: Apache-2.0 */
/* Moves weights from host memory or files to the device, and back.
 *
 * A few threads (at most MOE_CUDA_UPLOAD_THREADS, and at most one per core of the process) each
 * have two pieces of pinned memory. One fills (by a copy or a read) while the other is sent.
 * Together they keep the bus busy; one thread cannot. Data that keeps its dtype goes directly to
 * its place, gate and up by copies that skip every other block of rows. Other data goes to a
 * landing buffer, and a kernel converts it. This file knows nothing of layers.
 *
 * Reading back happens while steps run; their rows leave through the same copy engine. So pieces
 * are small, and a thread asks for the next one only after it has stored the last. A step's rows
 * wait for a few pieces (some 10 us each), never for all. */
#ifndef MOE_CUDA_WEIGHTS_H
#define MOE_CUDA_WEIGHTS_H

#include "base/thread_pool.h"
#include "cuda/core/device.h"
#include "cuda/gemm/packed.h"
#include "cuda/layer/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CUDA_UPLOAD_THREADS = 16,    /* digests take most of their time */
    MOE_CUDA_PIECE_BYTES = 2 << 20,  /* of pinned memory; each thread has two */
    MOE_CUDA_READ_BYTES = 512 << 10, /* per piece that is read back */
};

enum moe_cuda_packed_part { MOE_CUDA_ELEMENTS, MOE_CUDA_SCALES, MOE_CUDA_ZEROS };

/* `rows` x `columns` of dtype `from`, stored as `to` (never from F32 to BF16). */
struct moe_cuda_weight {
    void *dst; /* device: first row of the entry */
    enum moe_dtype from, to;
    enum moe_cuda_rows order;
    size_t rows, columns;
    /* With a packing: a packed weight; dst, from, to and order are unused. `rows` of `columns`
     * bytes are this part of it. Elements need no format, which must stay until the weight is in
     * place. Reading: rows and columns are the weight's; part and format are unused. */
    struct moe_cuda_packed_weight packed;
    enum moe_cuda_packed_part part;
    const struct moe_weight_format *format;
    bool by_turns; /* rows of gate, which `packed` is, and of up by turns; an even number */
};

/* The threads and their memory; for device_open and device_close. */
struct moe_status moe_cuda_uploads_open(struct moe_device *device) MOE_CHECKED;
void moe_cuda_uploads_close(struct moe_device *device);

/* Returns when `data` may be reused. The weight is in place after moe_cuda_weights_finish. */
struct moe_status moe_cuda_weights_put(struct moe_device *device, const struct moe_cuda_weight *w,
                                       const void *data) MOE_CHECKED;
/* The same, but the threads read the weight from `source`, possibly after the return: the source
 * must stay until `batch` has been finished. Errors: also an earlier one of the batch. */
struct moe_status moe_cuda_weights_fetch(struct moe_device *device, const struct moe_cuda_weight *w,
                                         const struct moe_weight_source *source,
                                         struct moe_thread_pool_batch *batch) MOE_CHECKED;
/* Waits until all puts and the whole batch are in place. Returns the batch's error, if any. */
struct moe_status moe_cuda_weights_finish(struct moe_device *device,
                                          struct moe_thread_pool_batch *batch) MOE_CHECKED;

/* Reads a weight back, widened to fp32, into `data` [rows, columns]; complete on return. Uses dst,
 * to, order, rows and columns of `w`, or `packed`; `from` is ignored. It does not wait for enqueued
 * work: the caller has waited for the writer of the weight. Any thread, also while steps run. */
struct moe_status moe_cuda_weights_read(struct moe_device *device, const struct moe_cuda_weight *w,
                                        float *data) MOE_CHECKED;

/* Enqueues: moves elements [first, first + n) of the source, from `src` on the device, to their
 * places. */
struct moe_status moe_cuda_weights_place(const struct moe_cuda_weight *w, const void *src,
                                         size_t first, size_t n, cudaStream_t stream) MOE_CHECKED;

/* Enqueues: moves rows 0, 2, ... of `count` rows of `bytes` to `dst`, and rows 1, 3, ... behind
 * them, to moe_cuda_second_half. Both are on the device, and smaller than 2^31 bytes. */
struct moe_status moe_cuda_weights_part(const void *src, uint32_t count, uint32_t bytes, void *dst,
                                        cudaStream_t stream) MOE_CHECKED;
/* Byte offset of the odd rows, aligned for packed weights. */
static inline uint32_t moe_cuda_second_half(uint32_t count, uint32_t bytes)
{
    return (count / 2 * bytes + 15) / 16 * 16;
}

/* Enqueues: splits n F32 values into sums of three bf16, at dst[part * n + i]. */
struct moe_status moe_cuda_weights_split(const void *src, size_t n, void *dst,
                                         cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
