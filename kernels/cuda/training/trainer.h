/* SPDX-License-Identifier: Apache-2.0 */
/* What training adds to one layer on a GPU: fp32 gradients, masters and moments, in one allocation
 * of device memory. They lie in blocks with the layout of the resident weights (gate and up rows
 * interleaved; padding included, which stays zero). So an optimizer step walks over memory in
 * order. */
#ifndef MOE_CUDA_TRAINER_H
#define MOE_CUDA_TRAINER_H

#include "common/training_rules.h"
#include "cuda/layer/weights.h"
#include "cuda/plan/limits.h"
#include "cuda/training/train_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_block_kind {
    MOE_CUDA_BLOCK_MATRIX,  /* a matrix of the layer; gate and up are one */
    MOE_CUDA_BLOCK_BIAS,    /* a bias of the layer */
    MOE_CUDA_BLOCK_ADAPTER, /* A or B of a target */
};

/* value, grad, moment1 and moment2 are [entries][n] each. */
struct moe_cuda_block {
    enum moe_cuda_block_kind kind;
    enum moe_weight weight; /* of gate and up: MOE_WEIGHT_GATE, or _SHARED_GATE */
    enum moe_train_part part;
    enum moe_cuda_matrices matrix; /* of MATRIX */
    bool expert; /* an entry per local expert; else one, replicated on all slots */
    uint32_t entries, columns;
    size_t n;
    float *value, *grad, *moment1, *moment2; /* moment2: AdamW, else NULL */
    /* All of `grad` counts as zero, whatever its memory has, so no zeros are written that the next
     * pass overwrites. Before adding to it, call moe_cuda_block_clear_grad; or write every element
     * (also for experts without tokens) and set this to false. */
    bool grad_is_zero;
};

enum {
    MOE_CUDA_SUM_PARTS = 1056,     /* partial sums that a norm consists of */
    MOE_CUDA_ADAPTED_MATRICES = 2, /* gate and up; down */
};

/* The two sums of squares to which a slot contributes. */
enum moe_cuda_squares {
    MOE_CUDA_SQUARES_SHARED, /* of replicated weights: the same bits on all slots */
    MOE_CUDA_SQUARES_OWN,    /* of the experts that this slot counts */
    MOE_CUDA_SQUARES
};

struct moe_trainer {
    struct moe_layer *layer;
    struct moe_trainer_config config; /* `frozen`: the initial value */
    uint32_t frozen;                  /* now */
    uint32_t blocks;
    struct moe_cuda_block block[MOE_TRAIN_MAX_PARAMS];
    /* W0 of adapted matrices; no data: not adapted. One of W0 and the resident matrix has its
     * memory here: W0; or, if W0 is quantised, the resident matrix, in BF16. W0 keeps the layer's
     * memory then, and gets its place back at the end. */
    struct moe_cuda_matrix base[MOE_CUDA_ADAPTED_MATRICES];
    uint64_t *loads;   /* device [E] since the last optimizer step */
    uint32_t *counted; /* device [E + 1]: loads and routed tokens of one pass */
    double *sums;      /* device [MOE_CUDA_SQUARES][MOE_CUDA_SUM_PARTS + 1] */
    void *memory;
    size_t bytes;
};

/* Members of struct moe_training. */
struct moe_status moe_cuda_trainer_create(struct moe_layer *layer,
                                          const struct moe_trainer_config *config,
                                          struct moe_trainer **out) MOE_CHECKED;
void moe_cuda_trainer_destroy(struct moe_trainer *trainer);
struct moe_status moe_cuda_trainer_bytes(struct moe_layer *layer,
                                         const struct moe_trainer_config *config,
                                         uint64_t *bytes) MOE_CHECKED;
struct moe_status moe_cuda_trainer_read(struct moe_trainer *trainer,
                                        const struct moe_train_key *key, float *data,
                                        size_t bytes) MOE_CHECKED;
struct moe_status moe_cuda_trainer_write(struct moe_trainer *trainer,
                                         const struct moe_train_key *key, const float *data,
                                         size_t bytes) MOE_CHECKED;
struct moe_status moe_cuda_zero_grad(struct moe_trainer *trainer) MOE_CHECKED;
struct moe_status moe_cuda_set_frozen(struct moe_trainer *trainer, uint32_t frozen) MOE_CHECKED;

/* The block with this tensor (for gate or up: with both), or NULL. */
struct moe_cuda_block *moe_cuda_trainer_block(struct moe_trainer *trainer, enum moe_weight weight,
                                              enum moe_train_part part);
/* Enqueues: gradients that only count as zero (grad_is_zero) become zeros in memory, so that they
 * can be added to or read. */
struct moe_status moe_cuda_block_clear_grad(struct moe_trainer *trainer,
                                            struct moe_cuda_block *block) MOE_CHECKED;
/* Enqueues: gradients count as zero, counted loads become zero. */
struct moe_status moe_cuda_trainer_forget_grads(struct moe_trainer *trainer) MOE_CHECKED;
bool moe_cuda_block_moves(const struct moe_trainer *trainer, const struct moe_cuda_block *block);

/* Enqueues: updates the resident weights from this block's values. */
struct moe_status moe_cuda_trainer_renew(struct moe_trainer *trainer,
                                         const struct moe_cuda_block *block,
                                         cudaStream_t stream) MOE_CHECKED;

/* ------------------------------------------------------- kernels: train_state.cu */

/* n values, rounded to `dtype`. */
struct moe_status moe_cuda_store_values(const float *values, size_t n, enum moe_dtype dtype,
                                        void *to, cudaStream_t stream) MOE_CHECKED;
/* Sums of squares, in double: cleared, added to, then read, all in one stream. Each launch adds to
 * MOE_CUDA_SUM_PARTS partial sums of one of the two (`which`). Reading adds those in a fixed order
 * and waits. sums [MOE_CUDA_SQUARES][MOE_CUDA_SUM_PARTS + 1]. */
struct moe_status moe_cuda_clear_squares(double *sums, cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_add_squares(const float *v, size_t n, double *sums,
                                       enum moe_cuda_squares which,
                                       cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_read_squares(double *sums, double squares[MOE_CUDA_SQUARES],
                                        cudaStream_t stream) MOE_CHECKED;
/* An optimizer step of n elements, 16-byte aligned; grad is only read. moment2 may be NULL for SGD;
 * resident (in dtype) may be NULL. */
struct moe_status moe_cuda_update(const struct moe_train_update *u, size_t n, float *value,
                                  const float *grad, float *moment1, float *moment2,
                                  enum moe_dtype dtype, void *resident,
                                  cudaStream_t stream) MOE_CHECKED;
/* to[i] = sum of from[j][i], in this order; `to` may be one of them. At least one. */
struct moe_sources {
    uint32_t count;
    const float *from[MOE_CUDA_MAX_SLOTS];
};
struct moe_status moe_cuda_sum_sources(const struct moe_sources *sources, size_t n, float *to,
                                       cudaStream_t stream) MOE_CHECKED;
/* loads[e] += counted[e] */
struct moe_status moe_cuda_add_loads(uint32_t experts, const uint32_t *counted, uint64_t *loads,
                                     cudaStream_t stream) MOE_CHECKED;
/* Rows of one adapted weight: resident = W0 + scale * B A, for all entries. */
struct moe_cuda_merge {
    uint32_t entries, out, in, rank; /* W [out, in] */
    uint32_t stored_rows;            /* of the resident matrix of an entry */
    enum moe_cuda_rows order;        /* where row i of W lies in it */
    float scale;
    const float *a, *b;            /* [entries][rank, in], [entries][out, rank] */
    enum moe_dtype dtype;          /* of both; BF16 if W0 is packed */
    enum moe_cuda_packing packing; /* of W0 */
    size_t base_bytes;             /* of an entry of a packed W0 */
    const void *base;
    void *resident;
};
struct moe_status moe_cuda_merge_adapter(const struct moe_cuda_merge *m,
                                         cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
