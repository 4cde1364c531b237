/* SPDX-License-Identifier: Apache-2.0 */
/* One MoE layer on a GPU: its spec, the placement of its experts, and the resident weights of this
 * slot's experts. Read-only after moe_cuda_layer_finish.
 *
 * Weights keep the dtype they came in: BF16 with BF16 tokens runs on tensor cores, every other
 * combination in exact fp32. Quantised matrices stay quantised (cuda/plan/packing.h): on Hopper
 * BF16 tokens run on tensor cores, everything else in exact fp32. Gate and up are one matrix; its
 * rows alternate in blocks of MOE_CUDA_INTERLEAVE: gate 0-7, up 0-7, gate 8-15, ... So one tile
 * holds both inputs of an activation. Without a gate, the matrix has the rows of up alone. */
#ifndef MOE_CUDA_LAYER_H
#define MOE_CUDA_LAYER_H

#include "base/thread_pool.h"
#include "cuda/core/device.h"
#include "cuda/gemm/ggemm.h"
#include "cuda/layer/matrix.h"
#include "moe/packed_matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_matrices {
    MOE_CUDA_ROUTER,         /* [1][E+Z][H] */
    MOE_CUDA_ROUTER_PARTS,   /* [3][E+Z][H] bf16: an F32 router as a sum; see router_logits.cu */
    MOE_CUDA_GATE_UP,        /* [local][2 * round_up(I, 8)][W], interleaved; or up [local][I][W] */
    MOE_CUDA_DOWN,           /* [local][W][I] */
    MOE_CUDA_SHARED_GATE_UP, /* [1][2 * round_up(Is, 8)][H], interleaved; or up [1][Is][H] */
    MOE_CUDA_SHARED_DOWN,    /* [1][H][Is] */
    MOE_CUDA_SHARED_VECTOR,  /* [1][1][H] */
    MOE_CUDA_TO_LATENT,      /* [1][L][H] */
    MOE_CUDA_FROM_LATENT,    /* [1][H][L] */
    MOE_CUDA_MATRICES
};

/* Whether a product with the matrix ends with the activation of routed or shared experts. */
static inline bool moe_cuda_is_first(enum moe_cuda_matrices which)
{
    return which == MOE_CUDA_GATE_UP || which == MOE_CUDA_SHARED_GATE_UP;
}

/* Whether it has gates too. */
static inline bool moe_cuda_is_gated(const struct moe_layer_spec *s, enum moe_cuda_matrices which)
{
    return moe_cuda_is_first(which) &&
           moe_activation_has_gate(which == MOE_CUDA_GATE_UP ? s->activation
                                                             : s->shared_activation);
}

/* Columns of a product with the matrix, after the activation. */
static inline uint32_t moe_cuda_product_columns(const struct moe_layer_spec *s,
                                                enum moe_cuda_matrices which)
{
    switch (which) {
    case MOE_CUDA_GATE_UP: return s->intermediate;
    case MOE_CUDA_SHARED_GATE_UP: return s->shared_intermediate;
    case MOE_CUDA_DOWN: return moe_expert_width(s);
    case MOE_CUDA_TO_LATENT: return s->latent;
    default: return s->hidden;
    }
}

/* The active placement in device memory. */
struct moe_cuda_placement {
    uint32_t *offset;     /* [E+1] as in struct moe_placement */
    uint16_t *slot;       /* [offset[E]] */
    uint32_t *local;      /* [local_experts] global ids, ascending */
    int32_t *local_index; /* [E] global id -> index into `local`, -1 when placed elsewhere */
};

/* The layer as kernels see it. Also in device memory: a captured graph reads it through a pointer,
 * and so serves every layer of the same shape. */
struct moe_cuda_layer_desc {
    /* By enum moe_cuda_matrices, for matrices in `served`. First, because the copy engine needs the
     * alignment that the descriptor has. */
    struct moe_cuda_ggemm_weights product[MOE_CUDA_MATRICES];
    bool served[MOE_CUDA_MATRICES]; /* tensor cores can multiply bf16 rows by this matrix */
    struct moe_layer_spec spec;
    uint32_t slot, slots, local_experts;
    struct moe_cuda_placement placement;
    struct moe_cuda_matrix matrix[MOE_CUDA_MATRICES];
    /* F32 [entries][n]; expert biases have one entry per local expert. NULL: none. */
    float *bias[MOE_WEIGHT_COUNT];
};

struct moe_layer {
    struct moe_device *device;
    struct moe_layer_spec spec;
    /* On the host: all copies of its experts, and those on the slots of `live`, to which steps send
     * rows. The device has the latter. The arrays belong to this layer. */
    struct moe_placement placement, active;
    uint64_t live;
    uint32_t slot;
    bool finished;
    bool trained; /* it has a trainer */
    /* Rows per token of earlier steps that were to retain (activation_sizing.h); 0: none yet.
     * Atomic: over a network, one thread writes it and another reads it. */
    double retained_rows_per_token;
    uint32_t local_experts;          /* experts placed on `slot`; may be 0 */
    uint32_t *local;                 /* host [local_experts] */
    int32_t *local_index;            /* host [E] */
    struct moe_cuda_layer_desc desc; /* host copy; the pointers in it are to the device */
    const struct moe_cuda_layer_desc *on_device; /* valid after finish */
    struct moe_cuda_buffer params;               /* for parts that wait; see step_params.h */
    void *tables;                                /* device memory of the placement and on_device */
    size_t tables_bytes;
    bool *uploaded[MOE_WEIGHT_COUNT]; /* [entries] */
    uint32_t *wrong; /* device: a packed weight had a value that it cannot hold; NULL: none yet */
    struct moe_thread_pool_batch coming; /* uploads still running */
};

/* Members of struct moe_backend. */
struct moe_status moe_cuda_layer_create(struct moe_device *device,
                                        const struct moe_layer_spec *spec,
                                        const struct moe_placement *placement, uint32_t slot,
                                        struct moe_layer **out) MOE_CHECKED;
struct moe_status moe_cuda_layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                        uint32_t expert, enum moe_dtype dtype, const void *data,
                                        size_t bytes) MOE_CHECKED;
/* Only on Hopper: elsewhere decoded weights are many times faster than exact fp32. */
bool moe_cuda_layer_computes(const struct moe_device *device,
                             const struct moe_weight_format *format);
struct moe_status moe_cuda_layer_upload_packed(struct moe_layer *layer, enum moe_weight weight,
                                               uint32_t expert,
                                               const struct moe_packed_matrix *m) MOE_CHECKED;
struct moe_status moe_cuda_layer_fetch_packed(struct moe_layer *layer, enum moe_weight weight,
                                              uint32_t expert,
                                              const struct moe_packed_source *source) MOE_CHECKED;
struct moe_status moe_cuda_layer_fetch(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, enum moe_dtype dtype,
                                       const struct moe_weight_source *source,
                                       size_t bytes) MOE_CHECKED;
struct moe_status moe_cuda_layer_finish(struct moe_layer *layer) MOE_CHECKED;
void moe_cuda_layer_destroy(struct moe_layer *layer); /* NULL is ignored */

/* Steps send rows to copies on these slots only, from the next one on. Between steps, on a finished
 * layer. If the slots are others than before, it waits for earlier uploads of the device. */
struct moe_status moe_cuda_layer_activate(struct moe_layer *layer, uint64_t live) MOE_CHECKED;

/* For the trainer. The matrix that holds a weight (not a bias), and its rows there, with a gate. */
enum moe_cuda_matrices moe_cuda_layer_matrix(enum moe_weight weight, enum moe_cuda_rows *order);
/* Puts another matrix in place of one of a finished layer, of the same shape: packed or not. The
 * caller owns the memory of both. No step may run. */
struct moe_status moe_cuda_layer_replace(struct moe_layer *layer, enum moe_cuda_matrices which,
                                         const struct moe_cuda_matrix *matrix) MOE_CHECKED;
/* Enqueues: updates the router's bf16 parts, if the layer has them. */
struct moe_status moe_cuda_layer_split_router(struct moe_layer *layer,
                                              cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
