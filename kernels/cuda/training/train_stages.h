/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a backward pass on a GPU, which the backend also offers separately. They are
 * enqueued on the device's compute stream, one pass at a time per device. Scratch grows with the
 * largest pass seen and belongs to the device. This header has scratch, times and the stages around
 * the router; the feed-forward networks are in train_ffn.h. */
#ifndef MOE_CUDA_TRAIN_STAGES_H
#define MOE_CUDA_TRAIN_STAGES_H

#include "cuda/layer/step_params.h"
#include "cuda/session/session.h"
#include "cuda/training/train_kernels.h"
#include "cuda/training/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_scratch_use {
    MOE_CUDA_SCRATCH_LOGITS,
    MOE_CUDA_SCRATCH_X_DY,        /* [T, 2H]; the rows of a pass are in the session */
    MOE_CUDA_SCRATCH_X,           /* [rows, H] */
    MOE_CUDA_SCRATCH_DY,          /* [rows, H] */
    MOE_CUDA_SCRATCH_PRE,         /* [rows, 2 * round_up(I, 8)] f32 */
    MOE_CUDA_SCRATCH_DH,          /* [rows, I] f32 or bf16 */
    MOE_CUDA_SCRATCH_DGU,         /* [rows, 2 I] bf16, on tensor cores */
    MOE_CUDA_SCRATCH_ADDEND,      /* [T, H] f32: one part of dx, on tensor cores */
    MOE_CUDA_SCRATCH_ROUTER,      /* the router's products on tensor cores: train_logits.c */
    MOE_CUDA_SCRATCH_HALF,        /* [rows, I] f32: dg or du alone, for an adapter */
    MOE_CUDA_SCRATCH_LOW,         /* [rows, r] f32, twice: an adapter's inner products */
    MOE_CUDA_SCRATCH_DX,          /* [rows, H + MOE_CUDA_WEIGHT_COLUMNS] f32 */
    MOE_CUDA_SCRATCH_COMBINED,    /* [T, H + MOE_CUDA_WEIGHT_COLUMNS] f32 */
    MOE_CUDA_SCRATCH_TOKENS,      /* the shared expert's gates; masks */
    MOE_CUDA_SCRATCH_PASS_PARAMS, /* of a pass, from its dispatch to its combine */
    MOE_CUDA_SCRATCH_FFN_PARAMS,  /* of the routed experts' network */
    MOE_CUDA_SCRATCH_PASS,        /* tensors of a whole pass: backward.c */
    /* The shared expert's own, since both networks may run at the same time: as PRE, DH, DGU,
     * FFN_PARAMS. */
    MOE_CUDA_SCRATCH_SHARED_PRE,
    MOE_CUDA_SCRATCH_SHARED_DH,
    MOE_CUDA_SCRATCH_SHARED_DGU,
    MOE_CUDA_SCRATCH_SHARED_PARAMS,
    MOE_CUDA_SCRATCHES
};

/* Of one device. event[i] marks the start of stage[i], in the order of time. The last stage is
 * MOE_BACKWARD_STAGE_COUNT, the end of the pass. */
enum { MOE_CUDA_TRAIN_MARKS = 2 * MOE_BACKWARD_STAGE_COUNT };
struct moe_cuda_train_scratch {
    struct moe_cuda_buffer buffer[MOE_CUDA_SCRATCHES];
    cudaEvent_t event[MOE_CUDA_TRAIN_MARKS];
    enum moe_backward_stage stage[MOE_CUDA_TRAIN_MARKS];
    uint32_t marks; /* recorded in this pass */
};
/* Frees it; NULL is ignored. moe_cuda_device_close calls this. */
void moe_cuda_train_scratch_free(struct moe_device *device);
/* *out: at least `bytes` for this use, valid until the next call with the same use. */
struct moe_status moe_cuda_train_scratch_take(struct moe_device *device,
                                              enum moe_cuda_scratch_use use, size_t bytes,
                                              void **out) MOE_CHECKED;

/* Times of the stages of a pass. marks_begin drops the marks of the last pass. mark records the
 * start of a stage on the compute stream (MOE_BACKWARD_STAGE_COUNT: the end). marks_read, once that
 * mark has been waited for, returns the time of each stage. A stage lasts until the next mark; if
 * it has several marks, their times are added. Work on the branch counts only while the compute
 * stream waits for it. If a clock fails, times are zero. */
void moe_cuda_train_marks_begin(struct moe_device *device);
/* Waits for the marks in turn, and counts each as progress of the device. */
void moe_cuda_train_marks_follow(struct moe_device *device);
void moe_cuda_train_mark(struct moe_device *device, enum moe_backward_stage stage);
void moe_cuda_train_marks_read(const struct moe_device *device,
                               uint64_t ns[MOE_BACKWARD_STAGE_COUNT]);

/* Enqueues on `stream`: copies *f to *on_device, valid until the next call with the same `use`,
 * which is one of the PARAMS. */
struct moe_status moe_cuda_train_upload_params(struct moe_device *device,
                                               enum moe_cuda_scratch_use use,
                                               const struct moe_cuda_step_params *f,
                                               const struct moe_cuda_step_params **on_device,
                                               cudaStream_t stream) MOE_CHECKED;

/* The router's logits of these tokens, in scratch; `slices` as the kernels need them. */
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
/* The router's own products (train_logits.c): dx [T, H] f32 = W_r^T dlogit, added if `add`. If
 * `accumulate`, adds to the gradients of router and logit bias. Rows of x that `use` excludes may
 * have any value. BF16 tokens use tensor cores if Hopper's kernels serve the shape, as sums of
 * parts (train_kernels.h) to 16 bits; else exact fp32. */
struct moe_cuda_logits_backward {
    enum moe_dtype dtype;
    uint32_t tokens;
    const void *x;      /* [T, H] */
    const uint8_t *use; /* [T], NULL = all */
    const float *dlogits;
    bool accumulate, add;
    float *dx;
};
struct moe_status
moe_cuda_train_logits_backward(struct moe_trainer *t,
                               const struct moe_cuda_logits_backward *a) MOE_CHECKED;
/* Scratch for it. */
struct moe_status moe_cuda_train_reserve_logits(struct moe_trainer *t, enum moe_dtype dtype,
                                                uint32_t tokens) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
