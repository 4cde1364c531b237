/* SPDX-License-Identifier: Apache-2.0 */
/* Training of resident layers: gradients, optimizer state, and the passes that make and use them.
 * The second half of the backend interface (moe/backend.h); a backend offers it as one more table,
 * `moe_backend.training`, NULL where it has none.
 *
 * Objects   trainer  what training adds to one layer on one device: fp32 gradients of all trainable
 *                    parameters, and, for the optimizer, fp32 master weights and moments. A layer
 *                    has at most one. The layer outlives its trainer.
 * Threads, time and memory are as in moe/backend.h.
 *
 * Parameters  A weight of the layer (enum moe_weight) is trainable unless its group is frozen or it
 *   is MOE_WEIGHT_SELECT_BIAS, which never has a gradient and is moved by the balance rule only.
 *   Expert weights belong to the slots that hold the expert; all others are resident on every slot
 *   ("replicated") and stay the same bits on all of them: their gradients are summed over the
 *   slots, in slot order, when the optimizer steps. So are gradients of experts with several
 *   copies.
 *
 * Resident weights have the dtype in which the backend keeps them: that of the upload for the
 *   matrices of experts and shared expert; router, gate vector and biases may be F32 though BF16
 *   was uploaded, and matrices that are kept together F32 where one of them is.
 *
 * Low rank    With lora_rank r > 0 the expert matrices in lora_targets get an adapter and are
 *   themselves frozen: W = W0 + (alpha / r) B A, A [r, in], B [out, r], A and B trained. The
 *   resident weight is always the merged W (rounded once to its dtype), so a forward pass is what
 *   it was; dB = (alpha / r) dW A^T and dA = (alpha / r) B^T dW, dW being the gradient of W. Of an
 *   expert nothing but its adapters is trained then: all its matrices and biases are frozen.
 *
 * Gradient of one token x with cotangent dy [H], S its experts:
 *
 *   G    = dy                                                at each expert e of S
 *   weighting OUTPUT (early and late are the same function)
 *     h  = act(g, u), dh = W_d^T G
 *     dw_e = dh . h + G . b_d          dW_d += (w_e G) h^T     db_d += w_e G
 *     dg, du = act'(g, u) * (w_e dh)   dW_g += dg x^T  dW_u += du x^T   db_g += dg   db_u += du
 *     dx += W_g^T dg + W_u^T du
 *   weighting INPUT: x' = w_e x in place of x, w_e = 1 in the lines above,
 *     dx' = W_g^T dg + W_u^T du,  dw_e = dx' . x,  dx += w_e dx'
 *   zero expert: dw_e = dy . x,  dx += w_e dy
 *   router: dw -> dlogit through renormalisation, scale and score; non-selected experts get a
 *     gradient where the score is a softmax over all of them; a CLAMPED divisor is a constant
 *     where renorm_eps is the larger; dW_r += dlogit x^T,
 *     dlogit_bias += dlogit, dx += W_r^T dlogit
 *   shared expert as an expert with weight 1 (times its gate, which has a gradient of its own)
 *   dx is summed in fp32 and rounded once to x's dtype.
 *
 * A clamped activation has zero derivative outside its limits, and its ordinary one on them. A
 * token whose routing was given with weights (MOE_ROUTE_IDS_WEIGHTS) has no gradient through the
 * router; one whose state is not MOE_TOKEN_OK has dx = 0 and adds nothing. Choosing has no
 * gradient.
 *
 * Load balance, over the tokens of all slots in one backward pass:
 *   loss = aux_coeff * E / (K * Tg^2) * sum over e of (sum over t of a[t,e]) * n_e
 *   a    = score of the logit normalised over the E routed experts: softmax, or
 *          s / (sum s + 1e-20). The logit has its bias, selection biases and groups have no part,
 *          nor have zero experts
 *   n_e  = choices (t, k) of the whole group that are expert e, of tokens that went through the
 *          router: MOE_ROUTE_IDS and MOE_TOKEN_OK; Tg = how many such tokens the group has
 *   No gradient through n_e. The same n_e are the loads of the balance rule. transformers'
 *   load_balancing_loss_func has no K in its divisor: aux_coeff is K times its coefficient.
 *
 * Retained  A forward step with moe_step_args.retain leaves gate and up of the rows it computed on
 * the device, before their activation, under that name, for as long as there is room
 * (retained_limit); the oldest go first. A backward pass with moe_backward_args.retained over the
 * same batch (x, ids and weights of the tokens of all slots, dtype and bucket) does not compute
 * them again on a slot that has them, and does on one that has not: the same bits either way, so
 * that each slot decides alone. What is retained stays for further passes, until it is dropped: by
 * retained_drop, by whatever changes a weight of the layer (optimizer_step, trainer_write), with
 * the trainer, and with the session. Nothing is retained for a layer without a trainer, in a
 * session that was not joined for training, and by a step that fails. A name is used for one batch
 * of a layer only; a second step of that name takes the place of the first. */
#ifndef MOE_TRAINING_H
#define MOE_TRAINING_H

#include "moe/backend.h"

struct moe_trainer;

/* What can be frozen as a whole. */
enum moe_param_group {
    MOE_PARAMS_ROUTER,  /* MOE_WEIGHT_ROUTER, MOE_WEIGHT_LOGIT_BIAS */
    MOE_PARAMS_EXPERTS, /* MOE_WEIGHT_GATE .. MOE_WEIGHT_DOWN_BIAS, or their adapters */
    MOE_PARAMS_SHARED,  /* MOE_WEIGHT_SHARED_* */
    MOE_PARAMS_COUNT
};

static inline enum moe_param_group moe_weight_group(enum moe_weight w)
{
    return moe_weight_is_expert(w)       ? MOE_PARAMS_EXPERTS
           : w >= MOE_WEIGHT_SHARED_GATE ? MOE_PARAMS_SHARED
                                         : MOE_PARAMS_ROUTER;
}

enum moe_optimizer {
    MOE_OPTIMIZER_ADAMW = 1, /* two moments */
    MOE_OPTIMIZER_SGD = 2,   /* one moment */
};

/* Bits of lora_targets. */
enum moe_lora_target { MOE_LORA_GATE = 1, MOE_LORA_UP = 2, MOE_LORA_DOWN = 4 };

struct moe_trainer_config {
    enum moe_optimizer optimizer;
    uint32_t frozen;       /* bit g: enum moe_param_group g has no gradient and does not move */
    uint32_t lora_rank;    /* r, 0 = full training; at most min(in, out) of each target, and 512 */
    float lora_alpha;      /* the adapters' scale is alpha / r */
    uint32_t lora_targets; /* bits of enum moe_lora_target; not 0 when lora_rank > 0 */
    uint64_t lora_seed;    /* of A's first values */
};

/* A tensor of a trainer. `part` says which of a weight's tensors: the weight itself, or an
 * adapter's factor. Elements are fp32, in the canonical form of moe/layer_spec.h; A is [r, in], B
 * [out, r]. */
enum moe_train_part { MOE_PART_WEIGHT, MOE_PART_LORA_A, MOE_PART_LORA_B };
enum moe_train_tensor {
    /* The fp32 master; of a weight that has none (frozen from the beginning, selection bias) the
     * resident value. Written, it becomes the resident value too. Written for a target of an
     * adapter it becomes W0, to which the adapter is added; read, it is the merged W. */
    MOE_TRAIN_VALUE,
    MOE_TRAIN_GRAD,
    MOE_TRAIN_MOMENT1,
    MOE_TRAIN_MOMENT2, /* AdamW only */
    /* Of a target of an adapter (MOE_PART_WEIGHT): W0. Only read; VALUE is what is written. */
    MOE_TRAIN_BASE,
};
struct moe_train_key {
    enum moe_weight weight;
    uint32_t expert; /* global id; ignored for weights that are not an expert's */
    enum moe_train_part part;
    enum moe_train_tensor tensor;
};

/* One backward pass of one layer over a batch, group-wide like a step. Memory as in moe_step_args:
 * tensors in MOE_MEM_HOST, the caller's until the step is finished; T may be 0. The forward part is
 * recomputed from x with the routing given here. */
struct moe_backward_args {
    struct moe_trainer *trainer;
    enum moe_dtype dtype; /* of x, dy and dx, the same on all slots */
    uint32_t bucket;      /* as in moe_step_args */
    uint32_t tokens;      /* T of this slot */
    const void *x;        /* [T,H] */
    const void *dy;       /* [T,H] */
    const uint8_t *mode;  /* [T] MOE_ROUTE_IDS: weights are recomputed and the router learns;
                             MOE_ROUTE_IDS_WEIGHTS: they are constants. NULL = all MOE_ROUTE_IDS */
    const int32_t *ids;   /* [T,K] the routing that the forward pass used */
    const float *weights; /* [T,K], read where mode == MOE_ROUTE_IDS_WEIGHTS */
    float aux_coeff;      /* load-balance loss; 0 = none. The same on all slots */
    bool accumulate;      /* false: dx and dweights only, gradients and counted loads stay as they
                             are. The same on all slots */
    void *dx;             /* [T,H] */
    float *dweights;      /* [T,K] gradient of each weight, in both modes; 0 where a k is not routed
                             or the token is not OK; or NULL */
    uint8_t *token_state; /* [T] */
    double *aux_loss;     /* one number, or NULL: the group's loss, the same on all slots */
    uint64_t retained;    /* moe_step_args.retain of the forward step over this batch, or 0 (see
                          "Retained").    The same on all slots */
};

/* Hyper-parameters of one optimizer step. */
struct moe_optimizer_args {
    double learning_rate;
    double weight_decay;          /* decoupled: value -= learning_rate * weight_decay * value */
    double beta1, beta2, epsilon; /* AdamW */
    double momentum;              /* SGD: m = momentum * m + g; value -= lr * m */
    double max_grad_norm;         /* clips all gradients by their common norm: times
                                     max_grad_norm / (norm + 1e-6) where that is below 1;
                                     0 = never */
    double grad_scale;            /* multiplies gradients first, e.g. 1 / micro batches; not 0 */
    double balance_rate; /* select_bias_e += rate * sign(mean load - load_e) for the routed experts,
                            the mean being theirs, with the loads counted since the last optimizer
                            step over all slots, in an fp32 master, whether or not the router is
                            frozen; 0 = off */
    uint64_t number;     /* t of AdamW's bias correction: 1 for the first step */
};

struct moe_optimizer_result {
    double grad_norm; /* after grad_scale, before clipping: over all layers and slots */
    bool nonfinite;   /* some gradient is NaN or infinite: nothing was changed but the gradients and
                         counted loads, which are zero now */
};

struct moe_training {
    /* Takes all its memory at once: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY before anything is
     * changed. Masters start as the resident weights, gradients and moments as zeros; LoRA's A is
     * uniform in +-1 / sqrt(in) (kaiming with a = sqrt(5), as PEFT does) from a counter-based
     * generator over (lora_seed, layer, expert, weight, element), the same on every placement; B
     * is zero. Only for finished layers without a trainer; no step may run meanwhile. */
    struct moe_status (*trainer_create)(struct moe_layer *, const struct moe_trainer_config *,
                                        struct moe_trainer **out);
    /* The layer keeps the weights that it has. NULL is ignored. */
    void (*trainer_destroy)(struct moe_trainer *);
    /* Bytes that a trainer takes for this layer, exactly. */
    struct moe_status (*trainer_bytes)(struct moe_layer *, const struct moe_trainer_config *,
                                       uint64_t *bytes);

    /* Copies one tensor to or from host fp32 memory of exactly `bytes`. Writing
     * MOE_TRAIN_VALUE also renews the resident weight (rounded to its dtype; merged for an
     * adapter). Errors: MOE_NOT_FOUND for what this trainer does not hold (another slot's expert,
     * moments of a frozen weight, W0 of what has no adapter), MOE_INVALID_ARGUMENT for a wrong size
     * and for writing W0.
     *
     * Between steps only (a backward pass lasts until step_wait has said that it ended), with one
     * exception: what steps leave alone, all but gradients, may be read by one thread at a time of
     * the whole device while another one uses session and device as if nobody read: starts and
     * waits for steps of any kind, drops what they retained, calls zero_grad and set_frozen. The
     * read neither waits for a step nor keeps one waiting, but for its share of the memory's
     * bandwidth. optimizer_step, trainer_write, trainer_destroy and what else changes or frees
     * weights wait until it has returned. */
    struct moe_status (*trainer_read)(struct moe_trainer *, const struct moe_train_key *,
                                      float *data, size_t bytes);
    struct moe_status (*trainer_write)(struct moe_trainer *, const struct moe_train_key *,
                                       const float *data, size_t bytes);

    /* Gradients and counted loads become zero. No backward pass of this trainer may be unfinished,
     * here and in set_frozen. */
    struct moe_status (*zero_grad)(struct moe_trainer *);
    /* Gradients of a group that becomes frozen are dropped, its moments stay. Frozen from the
     * beginning means no memory was taken: such a group cannot be thawed
     * (MOE_FAILED_PRECONDITION). */
    struct moe_status (*set_frozen)(struct moe_trainer *, uint32_t frozen);

    /* Starts one backward pass, and returns before its peers have come; to be waited for with
     * moe_backend.step_wait, in one queue of two with the forward steps. As for those, the args
     * struct is copied, and what it points to is the pass's until then; so are trainer, layer and
     * gradients. Until then trainer_read of gradients, trainer_write, zero_grad, set_frozen,
     * optimizer_step, trainer_destroy and the parts below must not be called for that trainer.
     * All live slots must enqueue the same. The session must have been joined with `training` set:
     * windows are larger then. Wrong arguments are errors of this call; that the session has ended
     * may be the answer of either call; all else is that of step_wait. A pass that all slots refuse
     * (moe_step_result.refused) changes nothing; one that fails otherwise leaves the gradients
     * undefined (zero_grad). A slot that finds no memory before it has told the others anything
     * tells them so, and all refuse with MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; one that runs out of
     * memory later ends the session. */
    struct moe_status (*backward_enqueue)(struct moe_session *, const struct moe_backward_args *,
                                          struct moe_step **out);

    /* Collective and synchronous, no step may run: sums gradients of replicated weights and of
     * experts with several copies over the slots, takes the norm over all `count` trainers and all
     * slots, and moves every parameter that is not frozen, in fp32, then rounds it into the
     * resident weight; gradients and loads are zero afterwards. Experts that no token met have zero
     * gradients and are stepped like all others (as torch does). AdamW is torch's:
     *   m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
     *   value -= lr wd value,  value -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
     * The trainers must be those of the same layers, in the same order, on all slots. Slots tell
     * each other first what they are about to do: where one cannot, or means another step, all
     * refuse (it with its own error, the others with MOE_FAILED_PRECONDITION/SHAPE_MISMATCH),
     * nothing has changed and the session goes on. Any other failure ends the session; a peer that
     * is lost at the very end may leave some slots with the step taken and others without. An
     * element's bits do not depend on its place: copies of an expert stay the same. */
    struct moe_status (*optimizer_step)(struct moe_session *, struct moe_trainer *const *trainers,
                                        size_t count, const struct moe_optimizer_args *,
                                        struct moe_optimizer_result *result);

    /* Most device memory for what forward steps retain, over all layers; it counts as used from the
     * first step that retains. 0, the beginning: nothing is retained. What is retained now is
     * dropped. No step may run. Never fails: room that cannot be had when it is wanted means that
     * nothing is retained. */
    void (*retained_limit)(struct moe_device *, uint64_t bytes);
    /* Drops what has this name; 0 = all of this layer. Unknown names are no error. Not while a step
     * of that name is unfinished. */
    void (*retained_drop)(struct moe_trainer *, uint64_t name);
    /* Bytes of what is retained on the device now, over all layers. */
    uint64_t (*retained_bytes)(struct moe_device *);

    /* Parts: what backward_enqueue is made of, callable alone, synchronous; tensors are device
     * memory. They add to the trainer's gradients where they say so. */

    /* dlogits [T, E+Z] f32 from dweights [T,K] f32: through scale, renormalisation and score. */
    struct moe_status (*router_backward)(struct moe_trainer *, enum moe_dtype, uint32_t tokens,
                                         const void *x, const int32_t *ids, const float *dweights,
                                         float *dlogits);
    /* Adds the gradient of the load-balance loss to dlogits, and adds the loss of these tokens to
     * *loss (host). n [E]: tokens of the group per expert; group_tokens: Tg. */
    struct moe_status (*aux_backward)(struct moe_trainer *, enum moe_dtype, uint32_t tokens,
                                      const void *x, const uint32_t *n, uint64_t group_tokens,
                                      float aux_coeff, float *dlogits, double *loss);
    /* From dlogits: adds to the gradients of router and logit bias; dx [T,H] f32 += W_r^T dlogit.
     */
    struct moe_status (*logits_backward)(struct moe_trainer *, enum moe_dtype, uint32_t tokens,
                                         const void *x, const float *dlogits, float *dx);
    /* Collective: dispatch of two rows per token at once, x and dy, in one exchange of counts.
     * `out` describes x's rows; *dy_rows [start[local], H] of the step's dtype has dy at the same
     * rows. Valid until the session's next dispatch or step. */
    struct moe_status (*dispatch)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                  uint32_t bucket, uint32_t tokens, const void *x, const void *dy,
                                  const int32_t *ids, const float *weights, struct moe_rows *out,
                                  const void **dy_rows);
    /* dx_rows [start[local], H] f32, dweight_rows [start[local]] f32; adds to the gradients of the
     * experts. */
    struct moe_status (*experts_backward)(struct moe_trainer *, enum moe_dtype,
                                          const struct moe_rows *, const void *dy_rows,
                                          float *dx_rows, float *dweight_rows);
    /* Collective, after `dispatch` with the same arguments: dx [T,H] f32 = sums of dx_rows, in the
     * fixed order of combine, and of the zero experts; dweights [T,K] f32 = each row's own value,
     * exactly; 0 where a k is not routed. Rows travel in fp32. */
    struct moe_status (*combine)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                 uint32_t bucket, uint32_t tokens, const void *x, const void *dy,
                                 const int32_t *ids, const float *weights, const struct moe_rows *,
                                 const float *dx_rows, const float *dweight_rows, float *dx,
                                 float *dweights);
    /* dx [T,H] f32 += the shared expert's; adds to its gradients. Nothing without one. */
    struct moe_status (*shared_backward)(struct moe_trainer *, enum moe_dtype, uint32_t tokens,
                                         const void *x, const void *dy, float *dx);
};

#endif
