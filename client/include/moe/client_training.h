/* SPDX-License-Identifier: Apache-2.0 */
/* Training through libmoeclient: gradients of layers and steps of the optimizer, for groups that
 * were started with --training. moe/v1/training.proto says what each call promises.
 *
 * Shapes, threads, errors and sizes are those of moe/client.h. All calls block; use several threads
 * to have several calls in flight. The library does not send arguments that cannot be right.
 *
 * Ids. Backward is known by (session, micro_batch_id). Every other change is known by step_id, and
 * the whole group shares one sequence of these: begin at last_step_id + 1 of
 * moe_client_get_train_state. Choose an id once. After UNAVAILABLE or DEADLINE_EXCEEDED the call
 * may have run: send it again under the same id.
 *
 * Retries. A call that fails with UNAVAILABLE is sent again under its id, until an answer comes or
 * its time is over. If another worker has the recorded answer (RECORDED_ELSEWHERE), the library
 * asks that worker. A call runs at most once, however often it is sent.
 *
 * One worker. All calls go to one worker of the group: the lowest live slot with `spread`, else the
 * endpoint. They go to another worker only while that one does not answer. Forward passes with
 * retain_session go to that worker too, whole, and to no other.
 *
 * Common failures: FAILED_PRECONDITION with STATE_LOST (the group went back to a checkpoint, or a
 * lost worker has answered one call that is gone: read the state, which has the number of steps,
 * and repeat what came after it), GRADIENTS_LOST (a lost worker had a part of the
 * gradients since the last step, and all else is there: read the state and send its
 * lost_micro_batches again), VERSION_MISMATCH (the weights moved since the forward pass) or
 * GRADIENTS_MISSING; ALREADY_EXISTS with ID_REUSED, ID_TOO_OLD or ANSWER_GONE; UNIMPLEMENTED (the
 * group does not train). */
#ifndef MOE_CLIENT_TRAINING_H
#define MOE_CLIENT_TRAINING_H

#include "moe/client.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CLIENT_NAME_MAX = 64,   /* bytes of a session's or checkpoint's name, without the NUL */
    MOE_CLIENT_NAME_BYTES = 65, /* with the NUL */
    MOE_CLIENT_LORA_TARGETS_MAX = 3, /* "gate", "up", "down" */
    MOE_CLIENT_REMOVED_MAX = 32,     /* removed checkpoints that an answer names */
    MOE_CLIENT_LOST_MAX = 1024,      /* lost Backward calls that a worker names */
};

/* Which load-balance loss aux_coeff is the coefficient of. With T tokens, K choices each and E
 * experts it is the sum over experts of n_e (choices that are e) times p_e (the tokens' scores of
 * e) times: */
enum moe_client_aux_convention {
    MOE_CLIENT_AUX_MEAN = 0,         /* E / (K T^2): 1 when all experts are chosen alike */
    MOE_CLIENT_AUX_TRANSFORMERS = 2, /* E / T^2, K times as much: load_balancing_loss_func of
                                        transformers, so its router_aux_loss_coef fits unchanged.
                                        (It pools all layers; here each layer has its own loss) */
};

/* Gradients of one layer for one micro batch. The caller owns all memory. */
struct moe_client_backward {
    size_t size;
    /* request */
    uint32_t layer;            /* the model's layer index */
    uint32_t tokens, hidden;   /* T: 1 to max_tokens_per_step; H */
    enum moe_dtype dtype;      /* of x, dy and dx */
    const char *session;       /* 1 to 64 characters of [A-Za-z0-9._-], no dot first */
    uint64_t micro_batch_id;   /* >= 1; increases with every Backward of the session */
    uint64_t weights_version;  /* of the forward pass; 0 = any, without `retained` */
    uint64_t lineage;          /* of the state; 0 = any */
    const void *dy;            /* [T,H] gradient of the layer's output */
    const void *x;             /* [T,H] the layer's input; NULL = only the retained pass */
    const int32_t *topk_ids;   /* [T,K] of the forward pass; with x */
    const float *topk_weights; /* [T,K] if the forward pass was given weights. NULL = the server
                                  computes them again and the router learns */
    bool retained;             /* use the pass that is retained under this session and id; send x
                                  only if the worker has dropped it */
    bool input_only;           /* leave the gradients of the parameters as they are */
    double aux_coeff;          /* of the load-balance loss; 0 = none. As MOE_CLIENT_AUX_MEAN it is
                                  K times transformers' router_aux_loss_coef for the same loss */
    uint64_t timeout_ms;       /* retries included; 0 = the client's default */
    /* answer */
    void *dx;                /* [T,H] gradient of x */
    float *weight_gradients; /* [T,K] of the routing weights; NULL = not wanted */
    uint64_t answered_epoch, answered_weights_version, answered_lineage;
    double aux_loss;       /* the load-balance loss; 0 = none */
    bool repeated;         /* the answer is that of an earlier call */
    bool used_retained;    /* x and routing came from the retained pass */
    bool used_activations; /* the device of the worker still had gate and up of that pass */
    struct moe_client_stages stages;
    /* request */
    enum moe_client_aux_convention aux_convention;
};

/* Errors besides those above: MOE_INVALID_ARGUMENT (SHAPE_MISMATCH, DTYPE_UNSUPPORTED, TOKEN_LIMIT,
 * TOO_LARGE, ROUTING_INVALID, EXPERT_INDEX_RANGE, NAME_INVALID, VALUE_INVALID), MOE_NOT_FOUND
 * (LAYER_NOT_FOUND), MOE_FAILED_PRECONDITION/RETAINED_PASS_GONE (without x). */
struct moe_status moe_client_backward(struct moe_client *c,
                                      struct moe_client_backward *b) MOE_CHECKED;

/* The common part of all other changes. All clients of the group share one sequence of ids. */
struct moe_client_change {
    uint64_t step_id; /* increases from change to change; last_step_id + 1 of the state is free */
    const char *session; /* the owner of the change, named as in Backward. Another session with the
                            same step_id gets ID_REUSED. NULL = a random name of this client; give
                            a name if the program must find its changes after a restart */
    uint64_t lineage;    /* of the state; 0 = any */
    uint64_t timeout_ms; /* retries included; 0 = the client's default. UINT64_MAX = no limit while
                            workers execute the call; UNAVAILABLE if no worker answers for the
                            client's default time */
    bool repeated;       /* answer: it is that of an earlier call */
    uint64_t reserved[4];
};

enum moe_client_optimizer {
    MOE_CLIENT_OPTIMIZER_ANY = 0, /* the workers' optimizer */
    MOE_CLIENT_OPTIMIZER_ADAMW = 1,
    MOE_CLIENT_OPTIMIZER_SGD = 2,
};

/* Moves all parameters that are not frozen and clears the gradients. */
struct moe_client_optimizer_step {
    size_t size;
    struct moe_client_change change;
    enum moe_client_optimizer optimizer; /* fails unless it is the workers' */
    double learning_rate, weight_decay;
    bool zeros;                   /* a beta1 or beta2 of 0 means 0, not the default */
    double beta1, beta2, epsilon; /* AdamW; 0 = 0.9, 0.999, 1e-8 */
    double momentum;              /* SGD */
    double max_grad_norm;         /* over all parameters of all layers; 0 = no clipping */
    double grad_scale;            /* multiplies all gradients first; 0 = 1 */
    double balance_rate;          /* loss-free balancing of selection biases; 0 = never */
    uint32_t expected_backwards;  /* GRADIENTS_MISSING for any other number; 0 = any number */
    /* answer */
    uint64_t weights_version, answered_lineage;
    bool skipped_nonfinite; /* a gradient was NaN or infinite, and no parameter moved */
    double grad_norm;       /* after grad_scale, before clipping */
    uint32_t backwards;     /* Backward calls that contributed gradients */
    uint64_t steps;         /* steps that moved parameters, since the beginning or the last merge */
};
struct moe_status moe_client_optimizer_step(struct moe_client *c,
                                            struct moe_client_optimizer_step *s) MOE_CHECKED;

/* Clears all gradients since the last step. `backwards` (may be NULL): Backward calls that lost
 * their gradients. */
struct moe_status moe_client_zero_grad(struct moe_client *c, struct moe_client_change *change,
                                       uint32_t *backwards) MOE_CHECKED;

/* Groups of parameters that do not learn. */
struct moe_client_frozen {
    bool router;  /* router weights and logit biases */
    bool experts; /* routed experts, or their adapters */
    bool shared;  /* shared experts and their gate */
    bool reserved[5];
};
/* Replaces the whole setting: every group that is not set here learns. */
struct moe_status moe_client_set_frozen(struct moe_client *c, struct moe_client_change *change,
                                        struct moe_client_frozen frozen) MOE_CHECKED;

/* A Backward call. */
struct moe_client_micro_batch {
    char session[MOE_CLIENT_NAME_MAX + 1];
    uint64_t micro_batch_id;
};

/* The state of training. */
struct moe_client_train_state {
    size_t size;
    uint64_t lineage;         /* of one history of the weights. It changes when the group loads a
                                 checkpoint or goes back to one; each group has its own */
    uint64_t weights_version; /* 1 after loading the model */
    uint64_t steps;         /* steps that moved parameters, since the beginning or the last merge */
    uint64_t unsaved_steps; /* of these, the ones after `checkpoint`, or after the model was loaded;
                               they are lost when the group ends */
    uint64_t last_step_id;  /* the highest id that ran or runs */
    uint32_t backwards;     /* since the last step */
    enum moe_client_optimizer optimizer;
    struct moe_client_frozen frozen;
    uint32_t lora_rank;                                /* 0 = full training */
    double lora_scale;                                 /* alpha / r */
    char lora_targets[MOE_CLIENT_LORA_TARGETS_MAX][8]; /* "" = the list is over */
    char checkpoint[MOE_CLIENT_NAME_MAX + 1];          /* last saved or loaded; "" = none */
    uint64_t state_bytes, retained_bytes, retained_bytes_limit;  /* on the worker that answers */
    uint64_t retained_device_bytes, retained_device_bytes_limit; /* activations on its device */
    /* A checkpoint that is written, or that is checked before it is loaded; "" = none. Then how far
     * this worker is, in bytes; a total of 0 = not known. */
    char saving[MOE_CLIENT_NAME_MAX + 1], loading[MOE_CLIENT_NAME_MAX + 1];
    uint64_t progress_bytes, progress_bytes_total;
    char problem[MOE_STATUS_TEXT]; /* why the group could not go back to `checkpoint`; "" = none */
    /* Backward calls to send again after GRADIENTS_LOST, under this lineage and the same ids. The
     * caller owns the array and says how many entries it has: MOE_CLIENT_LOST_MAX take all names.
     * The library writes entries during the call only, and leaves address and capacity. */
    struct moe_client_micro_batch *lost_micro_batches; /* NULL = no room */
    uint32_t lost_capacity;                            /* entries of it */
    uint32_t lost_count;                               /* answer: entries that were written */
    /* All Backward calls that have lost their gradients. If it is more than what
     * MOE_CLIENT_LOST_MAX entries got, send all calls since the last step again, under new ids. */
    uint64_t lost_backwards;
};
/* timeout_ms 0 = the client's default. The caller sets out->size, and may give room for
 * `lost_micro_batches`; all other fields are answers. */
struct moe_status moe_client_get_train_state(struct moe_client *c, uint64_t timeout_ms,
                                             struct moe_client_train_state *out) MOE_CHECKED;

/* A checkpoint by its name: a directory of the workers' training root. */
struct moe_client_checkpoint {
    size_t size;
    struct moe_client_change change;
    const char *name; /* 1 to 64 characters of [A-Za-z0-9._-], no dot first */
    uint32_t keep;    /* save: keep only this many of the group's newest checkpoints; 0 = all */
    /* answer */
    uint64_t weights_version;  /* save: of the saved weights; load: the new one */
    uint64_t answered_lineage; /* save: of the saved state; load: the new one */
    uint64_t steps;            /* save, load: optimizer steps in the checkpoint */
    uint64_t lost_steps;       /* load: unsaved steps that were discarded */
    uint32_t lost_backwards;   /* load: Backward calls that lost their gradients */
    uint64_t bytes;            /* save, export: written by all workers */
    uint32_t removed_count;    /* save: older checkpoints that `keep` removed. The first are named,
                                  newest first; a repeated answer names none, unless the Save was
                                  still running when the call came */
    char removed[MOE_CLIENT_REMOVED_MAX][MOE_CLIENT_NAME_BYTES];
};
/* Writes a checkpoint while forward passes and training go on. Cancelled when timeout_ms is over.
 * Errors: GRADIENTS_PENDING between a Backward and the next step, CHECKPOINT_EXISTS, SAVE_RUNNING
 * while another checkpoint is written or loaded. */
struct moe_status moe_client_save_checkpoint(struct moe_client *c,
                                             struct moe_client_checkpoint *s) MOE_CHECKED;
/* Loads a checkpoint. Cancelled when timeout_ms is over. Errors: CHECKPOINT_NOT_FOUND,
 * SAVE_RUNNING. */
struct moe_status moe_client_load_checkpoint(struct moe_client *c,
                                             struct moe_client_checkpoint *s) MOE_CHECKED;
/* Writes the adapters for PEFT. With name NULL, merges them into the weights and starts new
 * adapters. */
struct moe_status moe_client_export_adapter(struct moe_client *c,
                                            struct moe_client_checkpoint *s) MOE_CHECKED;

/* One entry of the training root, from its manifest and the names of its files. Only a load checks
 * the hashes. */
struct moe_client_checkpoint_info {
    char name[MOE_CLIENT_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT]; /* why these workers cannot load it; "" = none known */
    bool readable;                 /* the manifest is whole; else all below is 0 */
    uint64_t steps, weights_version, lineage; /* of the state in it */
    char parent[MOE_CLIENT_NAME_MAX + 1];     /* the checkpoint before it in its training, or "" */
    uint64_t made_s; /* seconds since 1970 by the clock of the host that wrote it; 0 = not known */
    uint64_t bytes;  /* of its files */
    enum moe_client_optimizer optimizer;
    struct moe_client_frozen frozen;
    uint32_t lora_rank;                                /* 0 = no adapters */
    double lora_alpha;                                 /* as --lora-alpha */
    char lora_targets[MOE_CLIENT_LORA_TARGETS_MAX][8]; /* "" = the list is over */
};
struct moe_client_checkpoint_list {
    size_t size;
    struct moe_client_checkpoint_info *entries; /* the caller's, room for `capacity` */
    size_t entry_size; /* sizeof entries[0]: the distance between two entries */
    uint32_t capacity; /* workers list at most 1000 entries */
    /* answer */
    uint32_t filled; /* entries that were written: checkpoints first, newest first */
    uint32_t count;  /* entries that exist; more than `filled` if room was lacking */
    char checkpoint[MOE_CLIENT_NAME_MAX + 1]; /* as in the state */
};
/* Lists the checkpoints. Changes nothing, and works while the group does not serve. Errors:
 * FAILED_PRECONDITION/UNSUPPORTED (workers without --training-dir). timeout_ms 0 = the client's
 * default. */
struct moe_status moe_client_list_checkpoints(struct moe_client *c, uint64_t timeout_ms,
                                              struct moe_client_checkpoint_list *list) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
