/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the feed-forward networks, of the routed experts and of the shared expert: stages of
 * a backward pass, enqueued on the device's compute stream (train_stages.h). The part of the shared
 * expert that changes no gradient may be enqueued on another stream.
 *
 * BF16 tokens with BF16 or packed weights use tensor cores if Hopper's kernels serve the shape
 * (train_ffn_tensor.c): pre and sums in fp32; dh, dgu and the weighted activation in bf16, each
 * rounded once. Everything else is exact fp32 (train_gemm.h). Both ways do the same in the same
 * order:
 *
 *   pre = x W_gu^T, dh = dy W_d            then, element by element, dg, du and the activation
 *   dx  = dgu W_gu                         dW_gu += dgu^T x    dW_d += dy^T (weighted activation)
 */
#ifndef MOE_CUDA_TRAIN_FFN_H
#define MOE_CUDA_TRAIN_FFN_H

#include "cuda/plan/backward_plan.h"
#include "cuda/training/train_stages.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of the routed experts and their results; all pointers are to device memory. */
struct moe_cuda_train_rows {
    const struct moe_rows *rows; /* its x [capacity, stride] */
    const void *dy;              /* [capacity, stride] */
    uint32_t stride;             /* elements from row to row: H, or more (see below) */
    uint32_t capacity;           /* maximum number of rows */
    uint32_t bucket, slots;      /* of the pass: the choice of a tile depends on them */
    bool accumulate;             /* adds to the gradients of weights; else they do not change */
    float *dx;                   /* [capacity, dx_stride] */
    uint32_t dx_stride;
    float *dweight;  /* [capacity] */
    float *retained; /* gate and up that a forward step retained, [capacity, 2 I]; NULL: computed
                        here. Only on tensor cores */
};

/* Whether a network's backward pass runs on tensor cores. */
bool moe_cuda_train_routed_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype);
bool moe_cuda_train_shared_on_tensor_cores(const struct moe_layer *layer, enum moe_dtype dtype);
/* The same for the routed experts. */
bool moe_cuda_train_on_tensor_cores(const struct moe_trainer *t, enum moe_dtype dtype);
/* Whether rows of x and dy may have a stride other than H: in a pass they lie next to each other.
 */
bool moe_cuda_train_reads_x_dy_rows(const struct moe_trainer *t, enum moe_dtype dtype);

/* Scratch for both networks, for so many rows and tokens. */
struct moe_status moe_cuda_train_reserve_ffn(struct moe_trainer *t, enum moe_dtype dtype,
                                             uint32_t rows, uint32_t tokens) MOE_CHECKED;

/* In three parts. The first changes no gradient: the host reads meanwhile whether all slots agree
 * to the pass. After the second, dx and dweight are there. The third computes the weights'
 * gradients, which wait for no peer and for which no peer waits. */
struct moe_cuda_train_ffn;
struct moe_status moe_cuda_train_experts_begin(struct moe_trainer *t, enum moe_dtype dtype,
                                               const struct moe_cuda_train_rows *rows,
                                               struct moe_cuda_train_ffn *f) MOE_CHECKED;
/* After the first part, if `retained` turns out to be wrong. */
struct moe_status moe_cuda_train_experts_without_retained(struct moe_cuda_train_ffn *f) MOE_CHECKED;
struct moe_status moe_cuda_train_experts_rows(struct moe_cuda_train_ffn *f) MOE_CHECKED;
/* overlap: only on tensor cores; NULL = none. */
struct moe_status
moe_cuda_train_experts_weights(struct moe_cuda_train_ffn *f,
                               const struct moe_cuda_overlap_plan *overlap) MOE_CHECKED;

/* Of the shared expert. */
struct moe_cuda_train_tokens {
    enum moe_dtype dtype;
    uint32_t tokens, bucket; /* bucket: the choice of a tile depends on it */
    const void *x, *dy;      /* [T, H] */
    const uint8_t *ok;   /* [T] tokens that count, NULL = all; on tensor cores, rows of x and dy of
                            other tokens must be zeros */
    bool accumulate;     /* as in struct moe_cuda_train_rows */
    bool add;            /* to dx */
    float *dx;           /* [T, H] */
    float *retained;     /* [T, 2 I] as in struct moe_cuda_train_rows; rows of tokens that do not
                         count become zeros */
    cudaStream_t stream; /* of the first part, on tensor cores; NULL = the compute stream */
    uint32_t processors; /* maximum for products of the first part; 0 = all */
};
/* In two parts. The first changes no gradient. The second, on the compute stream, computes the
 * weights' gradients and what the gate adds to dx. */
struct moe_status moe_cuda_train_shared_begin(struct moe_trainer *t,
                                              const struct moe_cuda_train_tokens *a,
                                              struct moe_cuda_train_ffn *f) MOE_CHECKED;
struct moe_status moe_cuda_train_shared_end(struct moe_cuda_train_ffn *f) MOE_CHECKED;

/* ------------------------------------------------------- between train_ffn*.c */

/* The state of one network's pass. */
struct moe_cuda_train_ffn {
    struct moe_trainer *t;
    bool shared, accumulate, tensor;
    cudaStream_t stream; /* the weights' gradients use the compute stream instead */
    uint32_t processors; /* maximum before the weights' gradients; 0 = all. Tensor cores */
    struct moe_cuda_row_groups rows;           /* tensor cores: no `use` */
    const uint8_t *ok;                         /* shared: [rows], NULL = all */
    const struct moe_cuda_step_params *params; /* tensor cores: device memory */
    uint32_t bucket, slots;                    /* tensor cores: as in struct moe_cuda_train_rows */
    enum moe_dtype dtype;
    const void *x, *dy;  /* [rows, stride] */
    uint32_t stride;     /* of x and dy; exact products: H */
    const float *weight; /* [rows] or NULL = 1 */
    uint32_t inner, padded;
    enum moe_weight first, last; /* gate, and with it up; down */
    enum moe_cuda_matrices gate_up, down;
    enum moe_dtype row_dtype; /* of dh and dgu: BF16 on tensor cores, else F32 */
    float *retained;          /* pre of a forward step, or NULL */
    float *pre;               /* scratch [rows, 2 padded], or `retained` */
    void *dh;                 /* scratch [rows, I]; becomes the weighted activation */
    void *dgu;                /* scratch [rows, 2 padded]; exact: pre, in its place */
    float *dx;
    uint32_t dx_stride;
    bool add; /* to dx */
    float *dweight;
};

/* Marks the start of a stage of the pass; the shared expert counts as one stage. */
static inline void moe_cuda_train_ffn_mark(const struct moe_cuda_train_ffn *f,
                                           enum moe_backward_stage stage)
{
    if (!f->shared)
        moe_cuda_train_mark(f->t->layer->device, stage);
}

/* The block of one of the network's weights if this pass adds to it, else NULL. */
static inline struct moe_cuda_block *moe_cuda_train_moving(const struct moe_cuda_train_ffn *f,
                                                           enum moe_weight w)
{
    struct moe_cuda_block *b = moe_cuda_trainer_block(f->t, w, MOE_PART_WEIGHT);
    return f->accumulate && b != NULL && moe_cuda_block_moves(f->t, b) ? b : NULL;
}

/* pre; dh; dx; gradients of both matrices: on tensor cores. `overlap` as above, or NULL. */
struct moe_status moe_cuda_train_tensor_pre(const struct moe_cuda_train_ffn *f) MOE_CHECKED;
struct moe_status moe_cuda_train_tensor_dh(const struct moe_cuda_train_ffn *f) MOE_CHECKED;
struct moe_status moe_cuda_train_tensor_dx(const struct moe_cuda_train_ffn *f) MOE_CHECKED;
struct moe_status
moe_cuda_train_tensor_weights(const struct moe_cuda_train_ffn *f,
                              const struct moe_cuda_overlap_plan *overlap) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
