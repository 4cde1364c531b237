/* SPDX-License-Identifier: Apache-2.0 */
/* One MoE layer on the CPU: its spec, its placement, and the resident weights of its slot.
 * Read-only after moe_cpu_layer_finish, but between steps a trainer changes weights, and a session
 * with other live slots changes `active`. */
#ifndef MOE_CPU_LAYER_H
#define MOE_CPU_LAYER_H

#include "cpu/compute/device.h"
#include "cpu/compute/matrix.h"

struct moe_layer {
    struct moe_device *device;
    struct moe_layer_spec spec;
    /* All copies of its experts, and those on the slots of `live`, to which steps send rows. The
     * layer owns the arrays. */
    struct moe_placement placement, active;
    uint64_t live;
    uint32_t slot;
    bool finished;
    bool has_trainer;

    /* The layer that this one takes the place of, or that takes its place, while both exist. The
     * former owns the matrices that both have; as it is destroyed, its heir gets them. */
    struct moe_layer *forebear, *heir;

    uint32_t local_experts; /* experts placed on `slot`; may be 0 */
    uint32_t *local;        /* [local_experts] global ids, ascending */
    int32_t *local_index;   /* [E] global id -> index into `local`, -1 if placed elsewhere */

    /* Matrices are packed; biases are plain F32 [entries][n]. Expert weights have an entry for each
     * local expert, the others one. NULL for weights that the layer does not have. */
    struct moe_cpu_matrix *matrix[MOE_WEIGHT_COUNT];
    float *bias[MOE_WEIGHT_COUNT];
    bool *uploaded[MOE_WEIGHT_COUNT]; /* [entries] */
    bool *borrowed[MOE_WEIGHT_COUNT]; /* [entries] matrices that `forebear` owns */
};

/* Entries of a weight; 1 also for a weight that the layer does not have. */
static inline uint32_t moe_cpu_layer_entries(const struct moe_layer *layer, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? layer->local_experts : 1;
}

/* Entry `index` of a bias vector, or NULL if the layer has no such bias. */
static inline const float *moe_cpu_layer_bias(const struct moe_layer *layer, enum moe_weight weight,
                                              uint32_t index)
{
    size_t n, columns;
    moe_weight_shape(&layer->spec, weight, &n, &columns);
    return layer->bias[weight] == NULL ? NULL : layer->bias[weight] + index * n;
}

/* Members of struct moe_backend. */
struct moe_status moe_cpu_layer_create(struct moe_device *device, const struct moe_layer_spec *spec,
                                       const struct moe_placement *placement, uint32_t slot,
                                       struct moe_layer **out) MOE_CHECKED;
struct moe_status moe_cpu_layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, enum moe_dtype dtype, const void *data,
                                       size_t bytes) MOE_CHECKED;
struct moe_status moe_cpu_layer_upload_packed(struct moe_layer *layer, enum moe_weight weight,
                                              uint32_t expert,
                                              const struct moe_packed_matrix *data) MOE_CHECKED;
struct moe_status moe_cpu_layer_finish(struct moe_layer *layer) MOE_CHECKED;
void moe_cpu_layer_destroy(struct moe_layer *layer); /* NULL is ignored */
struct moe_status moe_cpu_layer_succeed(struct moe_layer *from,
                                        const struct moe_placement *placement,
                                        struct moe_layer **out) MOE_CHECKED;

/* Steps send rows to copies on these slots only, from the next one on. Between steps. */
void moe_cpu_layer_activate(struct moe_layer *layer, uint64_t live);

/* The parts below need a finished layer. They do not change it, so several threads may run them on
 * one layer at the same time. */

/* router.c. A token that is not OK gets ids -1 and weights 0. T = 0 is legal. */
struct moe_status moe_cpu_router_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, const uint8_t *mode,
                                         const int32_t *ids_in, const float *weights_in,
                                         int32_t *ids, float *weights,
                                         uint8_t *token_state) MOE_CHECKED;

/* Gate and up with their biases, before the activation; a forward pass can retain them for a
 * backward pass. fp32 [rows, I] each, rows as in struct moe_rows, or tokens. */
struct moe_cpu_pre {
    float *gate, *up;
};

/* Checks that the experts of `rows` are here. Errors: MOE_INVALID_ARGUMENT with SHAPE_MISMATCH,
 * EXPERT_INDEX_RANGE. */
struct moe_status moe_cpu_check_rows(const struct moe_layer *layer,
                                     const struct moe_rows *rows) MOE_CHECKED;

/* ffn.c. Rows of x [T, W] as moe/row_format.h says: *rows [T, *row_bytes], scratch of the device,
 * or NULL for T = 0. *row_bytes = 0: rows go to the experts as they are, and *rows = NULL. */
struct moe_status moe_cpu_quantise_rows(const struct moe_layer *layer, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, void **rows,
                                        size_t *row_bytes) MOE_CHECKED;

/* ffn.c. These functions apply input weighting: rows->x has the token without its weight. They
 * neither read nor write padding rows. */
struct moe_status moe_cpu_gemm_gate_up(struct moe_layer *layer, enum moe_dtype dtype,
                                       const struct moe_rows *rows, float *hidden) MOE_CHECKED;
struct moe_status moe_cpu_gemm_down(struct moe_layer *layer, enum moe_dtype dtype,
                                    const struct moe_rows *rows, const float *hidden,
                                    float *out) MOE_CHECKED;
struct moe_status moe_cpu_shared_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, float *y) MOE_CHECKED;

/* The same, and they store gate and up at *pre, unless it is NULL. */
struct moe_status moe_cpu_gate_up_retaining(struct moe_layer *layer, enum moe_dtype dtype,
                                            const struct moe_rows *rows,
                                            const struct moe_cpu_pre *pre,
                                            float *hidden) MOE_CHECKED;
struct moe_status moe_cpu_shared_retaining(struct moe_layer *layer, enum moe_dtype dtype,
                                           uint32_t tokens, const void *x,
                                           const struct moe_cpu_pre *pre, float *y) MOE_CHECKED;

/* latent.c; of a layer with a latent space. x, z, u and y are of the dtype. z [T, L] = W_to x
 * [T, H]. y [T, H] = W_from u [T, L], with the norm if the layer has one, plus `base` [T, H] (NULL:
 * zeros), rounded once. A token with a `mode` [T] without the shared expert gets no base. A token
 * that is not OK in `token_state` [T] gets zeros. Errors: OUT_OF_MEMORY. */
struct moe_status moe_cpu_to_latent(const struct moe_layer *layer, enum moe_dtype dtype,
                                    uint32_t tokens, const void *x, void *z) MOE_CHECKED;
struct moe_status moe_cpu_from_latent(const struct moe_layer *layer, enum moe_dtype dtype,
                                      uint32_t tokens, const void *u, const float *base,
                                      const uint8_t *mode, const uint8_t *token_state,
                                      void *y) MOE_CHECKED;

#endif
