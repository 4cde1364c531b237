/* SPDX-License-Identifier: Apache-2.0 */
/* Training of resident layers: gradients, optimizer state, and the passes that use them. This is
 * the second half of the backend interface (moe/backend.h): the table `moe_backend.training`, NULL
 * if a backend cannot train.
 *
 * Objects   trainer  the training state of one layer on one device: fp32 gradients of all trainable
 *                    parameters, fp32 master weights and moments for the optimizer. A layer has at
 *                    most one. The layer outlives its trainer.
 * Threads, time and memory are as in moe/backend.h.
 *
 * Parameters  A weight of the layer (enum moe_weight) is trainable, with two exceptions: weights of
 *   frozen groups, and MOE_WEIGHT_SELECT_BIAS. The latter has no gradient; only the balance rule
 *   changes it. Expert weights are resident on the slots with a copy of the expert. All others are
 *   resident on every slot ("replicated") and have the same bits on all. The optimizer step sums
 *   the gradients of replicated weights over the slots, in slot order. It does the same for experts
 *   with several copies.
 *
 * Resident weights have the dtype in which the backend stores them. Matrices of experts and of the
 *   shared expert have the dtype of the upload. If a backend stores matrices together, all of them
 *   may be F32 if one is. Router, gate vector and biases may be F32 even if the upload was BF16.
 *
 * Low rank    With lora_rank r > 0 the expert matrices in lora_targets get an adapter and are
 *   frozen: W = W0 + (alpha / r) B A, A [r, in], B [out, r], A and B trained. The resident weight
 *   is always the merged W, rounded once to its dtype, so forward passes do not change.
 *   dB = (alpha / r) dW A^T and dA = (alpha / r) B^T dW, where dW is the gradient of W. In this
 * mode all matrices and biases of experts are frozen; only the adapters are trained.
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
 *   shared expert as an expert with weight 1 (times its gate, which also has a gradient)
 *   dx is summed in fp32 and rounded once to x's dtype.
 *
 * A clamped activation has zero derivative outside its limits, and its ordinary one on them. With
 * given weights (MOE_ROUTE_IDS_WEIGHTS) a token has no gradient through the router. A token that is
 * not MOE_TOKEN_OK has dx = 0 and adds nothing. The choice of experts has no gradient.
 *
 * Load balance, over the tokens of all slots in one backward pass:
 *   loss = aux_coeff * E / (K * Tg^2) * sum over e of (sum over t of a[t,e]) * n_e
 *   a    = score of the logit normalised over the E routed experts: softmax, or
 *          s / (sum s + 1e-20). The logit has its bias; selection biases, groups and zero experts
 *          do not matter
 *   n_e  = choices (t, k) of expert e in the whole group, by tokens that used the router:
 *          MOE_ROUTE_IDS and MOE_TOKEN_OK; Tg = number of such tokens in the group
 *   No gradient through n_e. The same n_e are the loads of the balance rule. transformers'
 *   load_balancing_loss_func has no K in its divisor: aux_coeff is K times its coefficient.
 *
 * Retained  A forward step with moe_step_args.retain stores gate and up of its rows on the device
 * under that name, before the activation. They stay while there is room (retained_limit); the
 * oldest go first. A backward pass with moe_backward_args.retained must be over the same batch: x,
 * ids and weights of the tokens of all slots, dtype and bucket. A slot that has gate and up does
 * not compute them again. The bits are the same either way, so each slot decides alone.
 *   Retained activations serve any number of passes, until they are dropped. These drop them:
 * retained_drop, a change of a weight of the layer (optimizer_step, trainer_write), the end of the
 * trainer, the end of the session. Nothing is retained for a layer without a trainer, in a session
 * without `training`, or by a step that fails. A name stands for one batch of a layer; a second
 * step with the same name replaces the first. */
#ifndef MOE_TRAINING_H
#define MOE_TRAINING_H

#include "moe/backend.h"

struct moe_trainer;

/* Parameters that are frozen together. */
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
    uint32_t frozen;       /* bit g: enum moe_param_group g has no gradient and does not change */
    uint32_t lora_rank;    /* r, 0 = full training; at most min(in, out) of each target, and 512 */
    float lora_alpha;      /* the adapters' scale is alpha / r */
    uint32_t lora_targets; /* bits of enum moe_lora_target; not 0 when lora_rank > 0 */
    uint64_t lora_seed;    /* for the initial values of A */
};

/* A tensor of a trainer. `part` is the weight or a factor of its adapter. Elements are fp32, in the
 * canonical form of moe/layer_spec.h; A is [r, in], B [out, r]. */
enum moe_train_part { MOE_PART_WEIGHT, MOE_PART_LORA_A, MOE_PART_LORA_B };
enum moe_train_tensor {
    /* The fp32 master, or the resident value if there is no master (frozen from the beginning,
     * selection bias). A write also changes the resident value. For a target of an adapter, a write
     * sets W0 and merges the adapter again; a read returns the merged W. */
    MOE_TRAIN_VALUE,
    MOE_TRAIN_GRAD,
    MOE_TRAIN_MOMENT1,
    MOE_TRAIN_MOMENT2, /* AdamW only */
    /* W0 of a target of an adapter (MOE_PART_WEIGHT). Read-only; write VALUE. */
    MOE_TRAIN_BASE,
};
struct moe_train_key {
    enum moe_weight weight;
    uint32_t expert; /* global id; ignored for weights that are not an expert's */
    enum moe_train_part part;
    enum moe_train_tensor tensor;
};

/* One backward pass of one layer over a batch, group-wide like a step. Memory is as in
 * moe_step_args: tensors in MOE_MEM_HOST, valid until the step is finished; T may be 0. The pass
 * recomputes the forward part from x with the routing given here. */
struct moe_backward_args {
    struct moe_trainer *trainer;
    enum moe_dtype dtype; /* of x, dy and dx, the same on all slots */
    uint32_t bucket;      /* as in moe_step_args */
    uint32_t tokens;      /* T of this slot */
    const void *x;        /* [T,H] */
    const void *dy;       /* [T,H] */
    const uint8_t *mode;  /* [T] MOE_ROUTE_IDS: weights are recomputed and the router learns;
                             MOE_ROUTE_IDS_WEIGHTS: they are constants. NULL = all MOE_ROUTE_IDS */
    const int32_t *ids;   /* [T,K] the routing of the forward pass */
    const float *weights; /* [T,K], read if mode == MOE_ROUTE_IDS_WEIGHTS */
    float aux_coeff;      /* load-balance loss; 0 = none. The same on all slots */
    bool accumulate;      /* false: only dx and dweights; gradients and counted loads do not change.
                             The same on all slots */
    void *dx;             /* [T,H] */
    float *dweights;      /* [T,K] gradient of each weight, in both modes; 0 if a k is not routed or
                             the token is not OK; or NULL */
    uint8_t *token_state; /* [T] */
    double *aux_loss;     /* one number, or NULL: the group's loss, the same on all slots */
    uint64_t retained;    /* moe_step_args.retain of the forward step over this batch, or 0 (see
                             "Retained"). The same on all slots */
};

/* Hyper-parameters of one optimizer step. */
struct moe_optimizer_args {
    double learning_rate;
    double weight_decay;          /* decoupled: value -= learning_rate * weight_decay * value */
    double beta1, beta2, epsilon; /* AdamW */
    double momentum;              /* SGD: m = momentum * m + g; value -= lr * m */
    double max_grad_norm;         /* clips all gradients by their common norm: times
                                     max_grad_norm / (norm + 1e-6) if that is below 1;
                                     0 = never */
    double grad_scale;            /* multiplies gradients first, e.g. 1 / micro batches; not 0 */
    double balance_rate; /* select_bias_e += rate * sign(mean load - load_e) for the routed experts,
                            in an fp32 master, even if the router is frozen; 0 = off. Loads are
                            those of all slots since the last optimizer step; the mean is over the
                            routed experts */
    uint64_t number;     /* t of AdamW's bias correction: 1 for the first step */
};

struct moe_optimizer_result {
    double grad_norm; /* after grad_scale, before clipping: over all layers and slots */
    bool nonfinite;   /* a gradient is NaN or infinite: gradients and counted loads are zero now,
                         nothing else has changed */
    double squares;   /* of the gradients of all slots, before grad_scale */
    bool unchanged;   /* of a failure that is no refusal: weights and moments are as they were, and
                         gradients undefined (zero_grad). False: this slot may have taken it */
    bool can_finish;  /* with `unchanged`: only the squares of other slots are missing. So others
                         may have taken the step, and optimizer_finish can complete it here */
};

struct moe_training {
    bool live_copies;    /* an optimizer step sums over the live copies of an expert, and needs one;
                            zero_grad works without a session, also after a pass that failed.
                            Else all copies must be live */
    bool quantised_base; /* adapters train on layers with quantised matrices. Otherwise
                            trainer_create refuses such layers, and those that train are loaded with
                            decoded weights */
    /* Allocates all memory of a trainer at once. MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY: nothing has
     * changed. Masters start as the resident weights, gradients and moments as zeros. LoRA's A is
     * uniform in +-1 / sqrt(in) (kaiming with a = sqrt(5), as PEFT does), B is zero. A comes from a
     * counter-based generator over (lora_seed, layer, expert, weight, element), the same on every
     * placement. Only for finished layers without a trainer; no step may run during the call. */
    struct moe_status (*trainer_create)(struct moe_layer *, const struct moe_trainer_config *,
                                        struct moe_trainer **out);
    /* The layer's weights do not change. NULL is ignored. */
    void (*trainer_destroy)(struct moe_trainer *);
    /* The exact size in bytes of a trainer for this layer. */
    struct moe_status (*trainer_bytes)(struct moe_layer *, const struct moe_trainer_config *,
                                       uint64_t *bytes);

    /* Copies one tensor to or from host fp32 memory of exactly `bytes`. Writing MOE_TRAIN_VALUE
     * also updates the resident weight (rounded to its dtype; merged for an adapter). Errors:
     * MOE_NOT_FOUND for a tensor that this trainer does not have (another slot's expert, moments of
     * a frozen weight, W0 without an adapter), MOE_INVALID_ARGUMENT for a wrong size and for
     * writing W0. A quantised weight takes only the values that it has, or these in BF16:
     * MOE_FAILED_PRECONDITION/MODEL_MISMATCH.
     *
     * Only between steps; a backward pass lasts until step_wait has returned its result. The
     * exception is a read of any tensor but a gradient: one thread of the whole device may run it
     * during steps. During the read, another thread may enqueue and wait for steps of any kind,
     * and drop retained activations. It may also call zero_grad and set_frozen. Read and steps do
     * not wait for each other; they share only the memory's bandwidth. The caller must not change
     * or free weights (optimizer_step, trainer_write, trainer_destroy) before the read has
     * returned. */
    struct moe_status (*trainer_read)(struct moe_trainer *, const struct moe_train_key *,
                                      float *data, size_t bytes);
    struct moe_status (*trainer_write)(struct moe_trainer *, const struct moe_train_key *,
                                       const float *data, size_t bytes);

    /* Sets gradients and counted loads to zero. Here and in set_frozen, no backward pass of this
     * trainer may be unfinished. */
    struct moe_status (*zero_grad)(struct moe_trainer *);
    /* Drops the gradients of a group that becomes frozen; its moments stay. A group that was frozen
     * from the beginning has no memory and cannot be thawed (MOE_FAILED_PRECONDITION). */
    struct moe_status (*set_frozen)(struct moe_trainer *, uint32_t frozen);

    /* Enqueues one backward pass, and does not wait for peers. It shares one queue of two with the
     * forward steps, and moe_backend.step_wait waits for it. The args struct is copied. Until
     * step_wait returns its result, the pass owns the memory behind its pointers, the trainer, the
     * layer and the gradients. Until then do not call for this trainer: trainer_read of
     * gradients, trainer_write, zero_grad, set_frozen, optimizer_step, trainer_destroy, the parts
     * below. All live slots must enqueue the same pass, in a session with `training`.
     *
     * This call returns errors for wrong arguments. Either call may report that the session has
     * ended; step_wait reports everything else. If all slots refuse a pass
     * (moe_step_result.refused), nothing has changed. Any other failure leaves the gradients
     * undefined (zero_grad). A slot may lack memory before it has sent anything for the pass: then
     * all slots refuse with MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. A lack of memory later ends the
     * session. */
    struct moe_status (*backward_enqueue)(struct moe_session *, const struct moe_backward_args *,
                                          struct moe_step **out);

    /* Collective and synchronous; no step may run. Sums gradients of replicated weights and of
     * experts with several copies over the slots. Takes the norm over all `count` trainers and all
     * slots. Updates every parameter that is not frozen, in fp32, and rounds it into the
     * resident weight. Gradients and loads are zero afterwards. Experts without tokens have zero
     * gradients and are updated like all others (as torch does). AdamW is torch's:
     *   m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
     *   value -= lr wd value,  value -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
     * The trainers must be those of the same layers, in the same order, on all slots. First the
     * slots vote. If a slot cannot take the step, or votes for a different step, all refuse.
     * Then nothing has changed and the session goes on. A slot that cannot take the step returns
     * its error, the others MOE_FAILED_PRECONDITION/SHAPE_MISMATCH. Any other failure ends the
     * session. If a peer is lost at the very end, some slots may have taken the step and others
     * not (moe_optimizer_result.unchanged). An element's bits do not depend on its place, so copies
     * of an expert stay equal. */
    struct moe_status (*optimizer_step)(struct moe_session *, struct moe_trainer *const *trainers,
                                        size_t count, const struct moe_optimizer_args *,
                                        struct moe_optimizer_result *result);
    /* Completes a step that failed with `can_finish`, without a session. The same trainers and
     * args; `squares` is the result of a slot that has taken it. Nothing that changes gradients may
     * have been called since. The bits are those of the other slots. A failure leaves the trainers
     * undefined. NULL: no step fails with `can_finish`. */
    struct moe_status (*optimizer_finish)(struct moe_trainer *const *trainers, size_t count,
                                          const struct moe_optimizer_args *, double squares,
                                          struct moe_optimizer_result *result);

    /* Sets the largest device memory for retained activations, over all layers; 0, the initial
     * value, means none. Drops all retained activations. The first step that retains allocates the
     * memory; if that fails, nothing is retained. No step may run during this call. */
    void (*retained_limit)(struct moe_device *, uint64_t bytes);
    /* Drops the retained activations of this name; 0 = all of this layer. Unknown names are no
     * error. No step of that name may be unfinished. */
    void (*retained_drop)(struct moe_trainer *, uint64_t name);
    /* Bytes of retained activations on the device now, over all layers. */
    uint64_t (*retained_bytes)(struct moe_device *);

    /* Parts: the code of a backward pass, each part callable alone, synchronous; tensors are in
     * device memory. Each part states the gradients that it adds to. */

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
     * fixed order of combine, and of the zero experts; dweights [T,K] f32 = the exact value of each
     * row; 0 if a k is not routed. Rows travel in fp32. */
    struct moe_status (*combine)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                 uint32_t bucket, uint32_t tokens, const void *x, const void *dy,
                                 const int32_t *ids, const float *weights, const struct moe_rows *,
                                 const float *dx_rows, const float *dweight_rows, float *dx,
                                 float *dweights);
    /* dx [T,H] f32 += the shared expert's dx; adds to its gradients. Does nothing without one. */
    struct moe_status (*shared_backward)(struct moe_trainer *, enum moe_dtype, uint32_t tokens,
                                         const void *x, const void *dy, float *dx);
};

#endif
