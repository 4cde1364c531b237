/* Training through libmoeclient: gradients of layers and steps of the optimizer, for groups whose
 * workers were started with --training. What the calls promise is in moe/v1/training.proto; this
 * is how they are made.
 *
 * Shapes, threads and errors are those of moe/client.h. All calls block; call from threads of your
 * own to have more than one under way. Arguments that cannot be right are not sent.
 *
 * Ids. Backward is known by (session, micro_batch_id), every other change by step_id, which is the
 * whole group's: begin at last_step_id + 1 of moe_client_get_train_state. Choose an id once, keep
 * it, and ask again under it after a failure that leaves open whether the call was run
 * (UNAVAILABLE, DEADLINE_EXCEEDED). The library does so by itself: a call that fails with
 * UNAVAILABLE is sent again, under its id, until it is answered or its time is over; and where the
 * answer is recorded on another worker (RECORDED_ELSEWHERE), that worker is asked. So a call is run
 * at most once, however often it was sent.
 *
 * One worker. All calls go to one worker of the group (the lowest live slot with `spread`, else the
 * endpoint), and to the others only while that one does not answer. Forward passes that are kept
 * for Backward (save_session in moe_client_forward) go there too, whole, and never elsewhere.
 *
 * Other failures worth knowing: FAILED_PRECONDITION with STATE_LOST (the group went back to a
 * checkpoint: read the state, send again what came after it), VERSION_MISMATCH (the weights moved
 * since the forward pass), GRADIENTS_MISSING; ALREADY_EXISTS with ID_REUSED, ID_TOO_OLD or
 * ANSWER_GONE; UNIMPLEMENTED (the group does not train). */
#ifndef MOE_CLIENT_TRAINING_H
#define MOE_CLIENT_TRAINING_H

#include "moe/client.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CLIENT_NAME_MAX = 64,        /* bytes of a session or checkpoint name, without its end */
    MOE_CLIENT_LORA_TARGETS_MAX = 3, /* "gate", "up", "down" */
};

/* Gradients of one layer for one micro batch. All memory is the caller's. */
struct moe_client_backward {
    /* request */
    uint32_t layer;            /* the model's layer index */
    uint32_t tokens, hidden;   /* T: 1 to max_tokens_per_step; H */
    enum moe_dtype dtype;      /* of x, dy and dx */
    const char *session;       /* 1 to 64 characters of [A-Za-z0-9._-], no dot first */
    uint64_t micro_batch_id;   /* >= 1; rises with every Backward of the session */
    uint64_t weights_version;  /* that the forward pass used; 0 = any, without `saved` */
    uint64_t lineage;          /* as the state told; 0 = any */
    const void *dy;            /* [T,H] gradient of the layer's output */
    const void *x;             /* [T,H] the layer's input; NULL = only the saved pass */
    const int32_t *topk_ids;   /* [T,K] that the forward pass used; with x */
    const float *topk_weights; /* [T,K], where the forward pass was given them; else NULL:
                                  weights are computed anew and the router learns */
    bool saved;                /* a forward pass was kept under this session and id: use it,
                                  and send x only if the worker no longer has it */
    bool input_only;           /* gradients of the parameters stay as they are */
    double aux_coeff;          /* of the load-balance loss; 0 = none */
    uint64_t timeout_ms;       /* tries included; 0 = the client's default */
    /* answer */
    void *dx;                /* [T,H] gradient of x */
    float *weight_gradients; /* [T,K] of the routing weights; NULL when not wanted */
    uint64_t answered_epoch, answered_weights_version, answered_lineage;
    double aux_loss;       /* the load-balance loss; 0 without */
    bool repeated;         /* the answer is that of an earlier call */
    bool used_saved;       /* x and routing came from the saved pass */
    bool used_activations; /* and the worker that was asked still had gate and up of it on its
                              device, instead of computing them again */
    struct moe_client_stages stages;
};

/* Errors besides those above: MOE_INVALID_ARGUMENT (SHAPE_MISMATCH, DTYPE_UNSUPPORTED, TOKEN_LIMIT,
 * TOO_LARGE, ROUTING_INVALID, EXPERT_INDEX_RANGE, NAME_INVALID, VALUE_INVALID), MOE_NOT_FOUND
 * (LAYER_NOT_FOUND), MOE_FAILED_PRECONDITION/SAVED_STATE_GONE (without x). */
struct moe_status moe_client_backward(struct moe_client *c,
                                      struct moe_client_backward *b) MOE_CHECKED;

/* What all other changes have in common: one sequence of ids for all of them, and for all clients
 * of the group. */
struct moe_client_change {
    uint64_t step_id;    /* rises from change to change; the first free one is last_step_id + 1 of
                            the state */
    const char *session; /* whose change it is, named as in Backward: the answer of another
                            session's is never taken for its own (ID_REUSED). NULL = the client's
                            own, which no other client has; a program that is to know its changes
                            again after a restart names one */
    uint64_t lineage;    /* as the state told; 0 = any */
    uint64_t timeout_ms; /* tries included; 0 = the client's default; UINT64_MAX = none, as long as
                            workers are at it: nobody there for the client's default time is
                            UNAVAILABLE all the same */
    bool repeated;       /* answer: that of an earlier call */
};

enum moe_client_optimizer {
    MOE_CLIENT_OPTIMIZER_ANY = 0, /* the workers' own */
    MOE_CLIENT_OPTIMIZER_ADAMW = 1,
    MOE_CLIENT_OPTIMIZER_SGD = 2,
};

/* Moves all parameters that are not frozen, and forgets the gradients. */
struct moe_client_optimizer_step {
    struct moe_client_change change;
    enum moe_client_optimizer optimizer; /* another than the workers' is refused */
    double learning_rate, weight_decay;
    bool zeros;                   /* 0 of beta1 and beta2 is 0, and not the default */
    double beta1, beta2, epsilon; /* AdamW; 0 = 0.9, 0.999, 1e-8 */
    double momentum;              /* SGD */
    double max_grad_norm;         /* over all parameters of all layers; 0 = no clipping */
    double grad_scale;            /* multiplies all gradients first; 0 = 1 */
    double balance_rate;          /* loss-free balancing of selection biases; 0 = never */
    uint32_t expected_backwards;  /* GRADIENTS_MISSING otherwise; 0 = any number */
    /* answer */
    uint64_t weights_version, answered_lineage;
    bool skipped_nonfinite; /* a gradient was NaN or infinite: nothing moved */
    double grad_norm;       /* after grad_scale, before clipping */
    uint32_t backwards;     /* calls whose gradients went in */
    uint64_t steps;         /* that moved something, since the beginning or the last merge */
};
struct moe_status moe_client_optimizer_step(struct moe_client *c,
                                            struct moe_client_optimizer_step *s) MOE_CHECKED;

/* Forgets all gradients since the last step. `backwards` (may be NULL): calls that were dropped. */
struct moe_status moe_client_zero_grad(struct moe_client *c, struct moe_client_change *change,
                                       uint32_t *backwards) MOE_CHECKED;

/* Which groups of parameters do not learn. */
struct moe_client_frozen {
    bool router;  /* router weights and logit biases */
    bool experts; /* routed experts, or their adapters */
    bool shared;  /* shared experts and their gate */
};
/* The whole setting: what is not named learns. */
struct moe_status moe_client_set_frozen(struct moe_client *c, struct moe_client_change *change,
                                        struct moe_client_frozen frozen) MOE_CHECKED;

/* Where training stands. */
struct moe_client_train_state {
    uint64_t lineage;         /* of one history of the weights; another when the group went back
                                 to a checkpoint, loaded one, or is another group */
    uint64_t weights_version; /* 1 after loading the model */
    uint64_t steps;           /* that moved something, since the beginning or the last merge */
    uint64_t unsaved_steps;   /* of those since what `checkpoint` holds, or since the model was
                                 loaded: lost when the group ends */
    uint64_t last_step_id;    /* the highest that was run, or is under way */
    uint32_t backwards;       /* since the last step */
    enum moe_client_optimizer optimizer;
    struct moe_client_frozen frozen;
    uint32_t lora_rank;                                /* 0 = full training */
    double lora_scale;                                 /* alpha / r */
    char lora_targets[MOE_CLIENT_LORA_TARGETS_MAX][8]; /* "" = no further one */
    char checkpoint[MOE_CLIENT_NAME_MAX + 1]; /* the weights last came from or went to; "" = none */
    uint64_t state_bytes, saved_bytes, saved_bytes_limit;  /* on the worker that was asked */
    uint64_t saved_device_bytes, saved_device_bytes_limit; /* of activations on its device */
    /* A checkpoint that is being written, or checked before it is taken, while everything else goes
     * on; "" = none. How far that worker is, in bytes; a total of 0 = not known. */
    char saving[MOE_CLIENT_NAME_MAX + 1], loading[MOE_CLIENT_NAME_MAX + 1];
    uint64_t progress_bytes, progress_bytes_total;
    char problem[MOE_STATUS_TEXT]; /* why the group could not go back to `checkpoint`; "" = it
                                      could, or did not have to */
};
/* timeout_ms 0 = the client's default. */
struct moe_status moe_client_get_train_state(struct moe_client *c, uint64_t timeout_ms,
                                             struct moe_client_train_state *out) MOE_CHECKED;

enum { MOE_CLIENT_NAME_BYTES = 65, MOE_CLIENT_REMOVED_MAX = 32 };

/* A checkpoint by its name: a directory of the workers' training root. */
struct moe_client_checkpoint {
    struct moe_client_change change;
    const char *name; /* 1 to 64 characters of [A-Za-z0-9._-], no dot first */
    uint32_t keep;    /* save: only this many newest stay of those the group saved; 0 = all */
    /* answer */
    uint64_t weights_version;  /* save, load: of the weights in it; from now on */
    uint64_t answered_lineage; /* save: of the state in it; load: the new one */
    uint64_t steps;            /* save, load: optimizer steps in it */
    uint64_t lost_steps;       /* load: that were thrown away, for no checkpoint had them */
    uint32_t lost_backwards;   /* load: Backward calls whose gradients were thrown away */
    uint64_t bytes;            /* save, export: written by all workers */
    uint32_t removed_count;    /* save: older ones that `keep` removed; the first are named, newest
                                  first. The answer of an earlier call has none, unless its
                                  Save was still under way as this call was made */
    char removed[MOE_CLIENT_REMOVED_MAX][MOE_CLIENT_NAME_BYTES];
};
/* GRADIENTS_PENDING between a Backward and the next step; CHECKPOINT_EXISTS; SAVE_RUNNING while a
 * checkpoint is written or loaded. Written while everything else goes on, and called off when
 * timeout_ms is over. */
struct moe_status moe_client_save_checkpoint(struct moe_client *c,
                                             struct moe_client_checkpoint *s) MOE_CHECKED;
/* CHECKPOINT_NOT_FOUND, SAVE_RUNNING. Called off when timeout_ms is over. */
struct moe_status moe_client_load_checkpoint(struct moe_client *c,
                                             struct moe_client_checkpoint *s) MOE_CHECKED;
/* Adapters, as PEFT reads them; with name NULL they are merged into the weights instead, and new
 * ones begin. */
struct moe_status moe_client_export_adapter(struct moe_client *c,
                                            struct moe_client_checkpoint *s) MOE_CHECKED;

/* One entry of the training root, as its manifest and the names of its files tell; hashes are only
 * checked as it is loaded. */
struct moe_client_checkpoint_info {
    char name[MOE_CLIENT_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT]; /* why these workers cannot load it (damaged, made with other
                                      settings, no checkpoint at all); "" = nothing is known against
                                      it */
    bool readable; /* its manifest is whole; where it is not, everything below is 0 */
    uint64_t steps, weights_version, lineage; /* of the state in it */
    char parent[MOE_CLIENT_NAME_MAX +
                1];  /* where its training went to or came from last; "" = none */
    uint64_t made_s; /* seconds since 1970, by the clock of the host that wrote it; 0 = not known */
    uint64_t bytes;  /* of its files */
    enum moe_client_optimizer optimizer;
    struct moe_client_frozen frozen;
    uint32_t lora_rank;                                /* 0 = no adapters */
    double lora_alpha;                                 /* as --lora-alpha */
    char lora_targets[MOE_CLIENT_LORA_TARGETS_MAX][8]; /* "" = no further one */
};
struct moe_client_checkpoint_list {
    struct moe_client_checkpoint_info *entries; /* the caller's, room for `capacity` */
    uint32_t capacity;                          /* the workers tell of 1000 at most */
    /* answer */
    uint32_t
        filled;     /* entries that were written: checkpoints first, the newest before the others */
    uint32_t count; /* how many there are; more than `filled` where there was no room */
    char checkpoint[MOE_CLIENT_NAME_MAX + 1]; /* as in the state */
};
/* Which checkpoints there are. Changes nothing, and works where the group does not serve. Errors:
 * FAILED_PRECONDITION/UNSUPPORTED (workers without --training-dir). timeout_ms 0 = the client's
 * default. */
struct moe_status moe_client_list_checkpoints(struct moe_client *c, uint64_t timeout_ms,
                                              struct moe_client_checkpoint_list *list) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
