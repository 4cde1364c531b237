/* SPDX-License-Identifier: Apache-2.0 */
/* Training on this slot: the trainers of its layers, the lineage and version of the weights, and
 * the record of calls. Decides the effect of a ticket of training. The sequencer decides when
 * tickets come, and the service writes the answers to clients.
 *
 * The one idea: tickets come in one order on all slots. State changes at tickets only, by rules
 * that depend on the ticket and the state alone. So the state is the same on all slots at every
 * ticket. Tensors, answers and retained passes belong to the called slot, and decide nothing that
 * other slots have to know.
 *
 * Threads: tickets run on the engine's thread. Attach, agreement and restart happen while no view
 * is in force. All other functions are safe from any thread. */
#ifndef MOE_TRAINING_TRAINING_H
#define MOE_TRAINING_TRAINING_H

#include "activations/activations.h"
#include "activations/pass_store.h"
#include "checkpoint/checkpoint.h"
#include "daemon/metrics.h"
#include "model/model.h"
#include "moe/training.h"
#include "schedule/ticket.h"
#include "training/ledger.h"
#include "training/recovery.h"

struct moe_train;
struct moe_call_ops;

/* For moe_engine_config.calls; its ctx is a struct moe_train. */
extern const struct moe_call_ops moe_train_call_ops;

struct moe_train_config {
    const struct moe_backend *backend; /* with a training table */
    struct moe_device *device;
    const struct moe_model *model;
    const struct moe_layer_spec *const *specs; /* [layer_count], ascending; borrowed */
    size_t layer_count;
    struct moe_trainer_config trainer;  /* `frozen`: parameters that never learn */
    uint64_t retained_bytes;            /* budget of retained passes, and of cached answers, each */
    uint64_t retained_device_bytes;     /* device memory for activations of retained forward steps;
                                        0 = none */
    uint64_t retained_ns;               /* life of each of these */
    const char *directory;              /* root of checkpoints; NULL = none */
    const struct moe_lease_gate *lease; /* of this worker; NULL = none is needed. Borrowed */
    struct moe_metrics *metrics;        /* NULL = none */
};

/* Errors: CONFIG_INVALID for a LoRA rank above a matrix, a backend that cannot train, or a model
 * with quantised experts of which more than adapters would learn; UNSUPPORTED for layers of which
 * moe_layer_uncommon names something. */
struct moe_status moe_train_create(const struct moe_train_config *config,
                                   struct moe_train **out) MOE_CHECKED;
/* After the engine, the service and the rpc server. NULL is ignored. */
void moe_train_destroy(struct moe_train *t);

/* ------------------------------------------------------------- layers come and go */

/* Makes a trainer for each layer; `layers` and `placements` ([layer_count]) live until detach. */
struct moe_status moe_train_attach(struct moe_train *t, struct moe_layer *const *layers,
                                   const struct moe_placement *placements) MOE_CHECKED;
/* Frees the trainers, before their layers. Learnt weights are lost: the state is inconsistent. */
void moe_train_detach(struct moe_train *t);
bool moe_train_attached(const struct moe_train *t);
/* Bytes that the trainers of such layers will take; for a check in advance. */
struct moe_status moe_train_bytes(const struct moe_train *t, struct moe_layer *const *layers,
                                  uint64_t *bytes) MOE_CHECKED;

/* --------------------------------------------------------- agreeing, as a view forms */

/* `t` may be NULL: no training. */
void moe_train_read_digest(struct moe_train *t, struct moe_train_digest *out);
/* [any thread] The next recovery goes to this checkpoint, not to the last one; "" = the model as
 * loaded. The target is dropped when a view is in force. */
void moe_train_set_recovery_target(struct moe_train *t, const char *checkpoint);
/* Why the group does not continue, for a reason found outside this room; "": it continues. */
void moe_train_note_problem(struct moe_train *t, const char *why);
/* These slots hold all experts, and the backend can train without the others. */
bool moe_train_covers(const struct moe_train *t, uint64_t slots);
/* Takes the chosen state. For a restart, and for a slot that joins, the layers are those of the
 * model as loaded, and attached; then this reads the checkpoint. After a failure the state is
 * inconsistent. After a restart, the caller ends the old problem by moe_train_note_problem once all
 * slots have succeeded. */
struct moe_status moe_train_adopt(struct moe_train *t, const struct moe_train_recovery *r,
                                  uint32_t slot, uint32_t slots, uint64_t live) MOE_CHECKED;
/* No view is in force here: this slot reads a state before it joins the others, who go on. The
 * layers are those of the model as loaded, and attached. Until it has joined, or reloads, the state
 * is inconsistent, and goes into no view. Errors: those of reading; MOE_CANCELLED after
 * moe_train_allow_read; FAILED_PRECONDITION/MODEL_MISMATCH (another checkpoint of this name). */
struct moe_status moe_train_read_ahead(struct moe_train *t, const struct moe_saved_training *state,
                                       uint32_t slot, uint32_t slots) MOE_CHECKED;
/* [any thread] If not, moe_train_read_ahead ends soon. At first it may run. */
void moe_train_allow_read(struct moe_train *t, bool allowed);
/* This state has been read, or is this slot's: it has joined, and the view did not form. */
bool moe_train_has_ahead(struct moe_train *t, const struct moe_saved_training *state);
/* The state that a slot joins with has been read: adopt reads nothing. */
bool moe_train_is_joined(const struct moe_train *t, const struct moe_train_recovery *r);
/* The view that forms takes the training directory (moe_checkpoint_raise_fence, lowest slot), and
 * later Saves and Exports are of this view. After adopt. Errors: those of the fence. */
struct moe_status moe_train_fence(struct moe_train *t, uint64_t group, uint64_t epoch) MOE_CHECKED;
/* The view is in force. If training went back, the log says so. */
void moe_train_in_force(struct moe_train *t);

/* [any thread] This worker begins to leave. If a checkpoint lacks optimizer steps, the log says how
 * many. `t` may be NULL. */
void moe_train_log_leaving(struct moe_train *t);

/* -------------------------------------------------------------------------- calls */

enum { MOE_TRAINING_REQUEST_MAX = 320 };

/* A training call as all slots see it: TrainingBody, checked. */
struct moe_train_call {
    enum moe_step_kind kind;
    char session[MOE_TRAINING_NAME_MAX + 1]; /* of Backward and retained Forward; else "" */
    uint64_t id;
    struct moe_content content;
    uint64_t lineage, weights_version; /* 0 = any */
    float aux_coeff;
    bool input_only;
    /* Backward: the retained forward step of the same batch, by ticket and epoch; 0 = none. Other
     * epochs have left nothing. */
    uint64_t retained, retained_epoch;
    /* Kinds without tensors: the client's message, and below its fields. */
    uint32_t request_length;
    uint8_t request[MOE_TRAINING_REQUEST_MAX];
    struct moe_optimizer_args optimizer; /* all but `number` */
    uint32_t expected_backwards;
    uint32_t frozen;
    char name[MOE_TRAINING_NAME_MAX + 1];
    uint32_t keep;
    bool merge;
    /* Not of the message. */
    bool is_progress; /* no client waits: all slots report on the job of this id */
};

/* Folds `bytes` of `data` into a content hash of 16 bytes; {0, 0} at first. Not cryptographic: an
 * attacker can find collisions. */
void moe_content_mix(uint64_t hash[2], const void *data, size_t bytes);

void moe_train_call_pack(const struct moe_train_call *call, uint8_t body[MOE_TRAINING_BODY_MAX],
                         uint32_t *length);
/* The ticket came from another process. Errors: MOE_INTERNAL/MALFORMED. */
struct moe_status moe_train_call_read(const struct moe_ticket *ticket,
                                      struct moe_train_call *out) MOE_CHECKED;

/* The answer to a call, next to its status. */
struct moe_train_answer {
    struct moe_ledger_outcome outcome;
    bool repeated;
    uint32_t recorded_at;                  /* slot, with RECORDED_ELSEWHERE */
    struct moe_checkpoint_removed removed; /* of a Save, as it ends */
    struct moe_pass_record *record; /* repeated Backward: the cached answer, with a reference */
};

/* [any thread] The answer to a call that has been run, if it is known here without a ticket. False:
 * this worker does not know; send the call for a ticket. */
bool moe_train_recall(struct moe_train *t, const struct moe_train_call *call,
                      struct moe_train_answer *answer);
/* [any thread] The same for a Backward without x, which can only be a repeat: compares the header's
 * hash. A failure is the answer. */
struct moe_status moe_train_recall_header(struct moe_train *t, const struct moe_train_call *call,
                                          struct moe_train_answer *answer) MOE_CHECKED;

/* ----------------------------------------------------------------- for the service */

/* A Backward call. */
struct moe_train_micro_batch {
    char session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t id;
};

enum {
    MOE_TRAIN_LOST_MAX = 1024
}; /* that are named, and no more of a session than its ledger has */

struct moe_train_state {
    uint64_t lineage; /* 0: of no view yet, also after moe_train_read_ahead */
    uint64_t weights_version, steps, last_step_id, state_bytes, retained_bytes,
        retained_bytes_limit, activation_bytes, activation_bytes_limit;
    uint64_t unsaved; /* steps since the state of `checkpoint`, or since the model was loaded */
    uint32_t backwards, frozen;
    char checkpoint[MOE_TRAINING_NAME_MAX + 1];
    uint64_t lost_total;    /* all Backward calls to send again: moe_train_read_lost */
    enum moe_step_kind job; /* kind of the job under way; 0 = none */
    char job_name[MOE_TRAINING_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT];       /* why the group cannot go back; "" = none */
    uint64_t job_bytes, job_bytes_total; /* of this slot: written or checked; total 0 =
                                            not known */
};
void moe_train_read_state(struct moe_train *t, struct moe_train_state *out);
/* Backward calls to send again after GRADIENTS_LOST; returns their number. Calls that the ledger
 * has forgotten are not named. */
uint32_t moe_train_read_lost(struct moe_train *t,
                             struct moe_train_micro_batch out[MOE_TRAIN_LOST_MAX]);
/* A process waits to join the view: until it has, changes wait as soon as a checkpoint has the
 * state, or while one is being written. They do not wait in the state with `released_calls` records
 * (0 = in all). Any thread. The end of the view ends it. True: that is new. */
bool moe_train_set_joiner(struct moe_train *t, bool waits, uint64_t released_calls);
/* `t` may be NULL. */
enum moe_hold moe_train_find_hold(struct moe_train *t);
/* A process waits, and changes wait, as the checkpoint that the group would go back to has its
 * present state: that state. Else `calls` is 0. `t` may be NULL. */
void moe_train_read_saved(struct moe_train *t, struct moe_saved_training *out);
const struct moe_train_config *moe_train_configured(const struct moe_train *t);
/* Retained forward passes, answers of Backward, and activations on the device. */
struct moe_pass_store *moe_train_passes(struct moe_train *t);
struct moe_pass_store *moe_train_answers(struct moe_train *t);
struct moe_activations *moe_train_activations(struct moe_train *t);

#endif
