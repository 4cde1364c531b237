/* Moves one weight from any host memory into its place on the device: through two halves of pinned
 * staging, so that the copy into one overlaps the transfer of the other; a kernel then lays out
 * rows and converts. Knows nothing of layers. */
#ifndef MOE_CUDA_WEIGHTS_H
#define MOE_CUDA_WEIGHTS_H

#include "cuda/layer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A source of `rows` x `columns` of dtype `from`, written as `to` (never from F32 to BF16). */
struct moe_cuda_weight {
    void *dst; /* device: first row of the entry */
    enum moe_dtype from, to;
    enum moe_cuda_rows order;
    size_t rows, columns;
};

/* Returns when `data` may be reused; the weight is in place after moe_cuda_weights_finish. */
struct moe_status moe_cuda_weights_put(struct moe_device *device, const struct moe_cuda_weight *w,
                                       const void *data) MOE_CHECKED;
struct moe_status moe_cuda_weights_finish(struct moe_device *device) MOE_CHECKED;

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
