/* The stages of a backward pass on a GPU, which are also the parts that the backend offers alone.
 * Enqueued on the device's compute stream, one pass at a time per device; scratch grows with the
 * largest pass seen and belongs to the device.
 *
 * All products are in exact fp32 (train_gemm.h) but where dtype, shape and device allow tensor
 * cores. */
#ifndef MOE_CUDA_TRAIN_STAGES_H
#define MOE_CUDA_TRAIN_STAGES_H

#include "cuda/facts.h"
#include "cuda/session.h"
#include "cuda/train_kernels.h"
#include "cuda/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_scratch_use {
    MOE_CUDA_SCRATCH_LOGITS,
    MOE_CUDA_SCRATCH_PAIRS,    /* [T, 2H]; rows of a pass are in the session */
    MOE_CUDA_SCRATCH_X,        /* [rows, H] */
    MOE_CUDA_SCRATCH_DY,       /* [rows, H] */
    MOE_CUDA_SCRATCH_PRE,      /* [rows, 2 * round_up(I, 8)] f32 */
    MOE_CUDA_SCRATCH_DH,       /* [rows, I] f32 */
    MOE_CUDA_SCRATCH_HALF,     /* [rows, I] f32: dg or du alone, for an adapter */
    MOE_CUDA_SCRATCH_LOW,      /* [rows, r] f32, twice: an adapter's inner products */
    MOE_CUDA_SCRATCH_DX,       /* [rows, H + MOE_CUDA_WEIGHT_COLUMNS] f32 */
    MOE_CUDA_SCRATCH_COMBINED, /* [T, H + MOE_CUDA_WEIGHT_COLUMNS] f32 */
    MOE_CUDA_SCRATCH_TOKENS,   /* gates, losses, masks, ids */
    MOE_CUDA_SCRATCH_FACTS,
    MOE_CUDA_SCRATCH_PASS, /* tensors of a whole pass: backward.c */
    MOE_CUDA_SCRATCHES
};

/* Of one device. */
struct moe_cuda_train_scratch {
    struct moe_cuda_buffer buffer[MOE_CUDA_SCRATCHES];
};
/* Frees it; NULL is ignored. For moe_cuda_device_close. */
void moe_cuda_train_scratch_free(struct moe_device *device);
/* At least `bytes` for this use: *out, valid until the next call with the same use. */
struct moe_status moe_cuda_train_scratch_take(struct moe_device *device,
                                              enum moe_cuda_scratch_use use, size_t bytes,
                                              void **out) MOE_CHECKED;

/* Scratch for the stages below, so that none of them fails for want of memory when peers wait. */
struct moe_status moe_cuda_train_reserve(struct moe_trainer *t, uint32_t rows,
                                         uint32_t tokens) MOE_CHECKED;

/* Enqueues: *f becomes the facts at *on_device, for what is enqueued until the next call. */
struct moe_status moe_cuda_train_tell(struct moe_device *device, const struct moe_cuda_facts *f,
                                      const struct moe_cuda_facts **on_device) MOE_CHECKED;

/* The router's logits of these tokens, from scratch; `slices` as the kernels want it. */
struct moe_status moe_cuda_train_logits(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, float **logits) MOE_CHECKED;
/* `use` [T]: tokens that went through the router; NULL = all. */
struct moe_status moe_cuda_train_router(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const float *logits, const uint8_t *use,
                                        const int32_t *ids, const float *dweights,
                                        float *dlogits) MOE_CHECKED;
/* loads: device [E]. loss: device [T] double. */
struct moe_status moe_cuda_train_aux(struct moe_trainer *t, enum moe_dtype dtype, uint32_t tokens,
                                     const float *logits, const uint8_t *use, const uint32_t *loads,
                                     double factor, float *dlogits, double *loss) MOE_CHECKED;
/* Waits. *sum += the losses of `tokens` tokens, in their order. */
struct moe_status moe_cuda_train_sum_losses(struct moe_device *device, const double *losses,
                                            uint32_t tokens, double *sum) MOE_CHECKED;
struct moe_status moe_cuda_train_logits_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                                 uint32_t tokens, const void *x, const uint8_t *use,
                                                 const float *dlogits, bool accumulate,
                                                 float *dx) MOE_CHECKED;
/* `rows`: all pointers to device memory; at most `capacity` rows. dx_rows [capacity, dx_stride]. */
struct moe_status moe_cuda_train_experts(struct moe_trainer *t, enum moe_dtype dtype,
                                         const struct moe_rows *rows, uint32_t capacity,
                                         const void *dy_rows, bool accumulate, float *dx_rows,
                                         uint32_t dx_stride, float *dweight_rows) MOE_CHECKED;
struct moe_status moe_cuda_train_shared(struct moe_trainer *t, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, const void *dy,
                                        const uint8_t *ok, bool accumulate, float *dx) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
