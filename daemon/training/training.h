/* SPDX-License-Identifier: Apache-2.0 */
/* Training on this slot: the trainers of its layers, the lineage and version of the weights, and
 * the record of calls. Owns what training has beyond serving, and decides what a ticket of training
 * does; when tickets come, and what a client is told, is decided elsewhere.
 *
 * One idea carries everything: tickets come in one order on all slots, so state that changes at
 * tickets only, by rules that look at nothing but the ticket and the state, is the same on all
 * slots at every ticket. What is different (tensors, answers, saved passes) belongs to the slot
 * that was asked and never decides anything that others have to know.
 *
 * Threads: what a ticket does runs on the engine's thread; attaching, agreeing and restarting while
 * no view is in force; the rest is safe from any thread. */
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
    struct moe_trainer_config trainer; /* `frozen`: what never learns */
    uint64_t retained_bytes;           /* budget of saved passes, and of kept answers, each */
    uint64_t saved_device_bytes; /* of the device, for what saving forward steps leave there; 0 =
                                    nothing is kept there */
    uint64_t retained_ns;        /* how long any of these is kept */
    const char *directory;       /* root of checkpoints; NULL = none */
    struct moe_metrics *metrics; /* NULL = none */
};

/* Refuses what cannot work: LoRA with a rank above a matrix, a backend that cannot train. */
struct moe_status moe_train_create(const struct moe_train_config *config,
                                   struct moe_train **out) MOE_CHECKED;
/* After the engine, the service and the rpc server. NULL is ignored. */
void moe_train_destroy(struct moe_train *t);

/* ------------------------------------------------------------- layers come and go */

/* Makes a trainer for each layer; `layers` and `placements` ([layer_count]) live until detach. */
struct moe_status moe_train_attach(struct moe_train *t, struct moe_layer *const *layers,
                                   const struct moe_placement *placements) MOE_CHECKED;
/* Frees the trainers, before their layers go. What was learnt is lost, and remembered as lost. */
void moe_train_detach(struct moe_train *t);
bool moe_train_attached(const struct moe_train *t);
/* Bytes that the trainers of layers like these will take; for a check before memory is taken. */
struct moe_status moe_train_bytes(const struct moe_train *t, struct moe_layer *const *layers,
                                  uint64_t *bytes) MOE_CHECKED;

/* --------------------------------------------------------- agreeing, as a view forms */

/* `t` may be NULL: no training. */
void moe_train_read_digest(struct moe_train *t, struct moe_train_digest *out);
/* [any thread] In place of the last checkpoint, the next time that the group has to go back; "" =
 * the model as loaded. Forgotten as soon as a view is agreed on. */
void moe_train_set_recovery_target(struct moe_train *t, const char *checkpoint);
/* Why the group did not go on, where that was found elsewhere. */
void moe_train_note_problem(struct moe_train *t, const char *why);
/* Takes the decision. For a restart the layers are those of the model as loaded, and attached; then
 * this reads the checkpoint and its part of the state. After a failure the state counts as torn. */
struct moe_status moe_train_adopt(struct moe_train *t, const struct moe_train_recovery *d,
                                  uint32_t slot, uint32_t slots, uint64_t live) MOE_CHECKED;
/* The view that was agreed on is in force: says in the log that training went back, if it did. */
void moe_train_in_force(struct moe_train *t);

/* -------------------------------------------------------------------------- calls */

enum { MOE_TRAINING_REQUEST_MAX = 320 };

/* What a training call is for all slots: TrainingBody, checked. */
struct moe_train_call {
    enum moe_step_kind kind;
    char session[MOE_TRAINING_NAME_MAX + 1]; /* "" but for Backward, and Forward to be saved */
    uint64_t id;
    struct moe_content content;
    uint64_t lineage, weights_version; /* 0 = any */
    float aux_coeff;
    bool input_only;
    /* Backward: the step, in the session of this epoch, that was saved of the same batch; 0 = none.
     * Of other epochs nothing is left. */
    uint64_t retained, retained_epoch;
    /* Of kinds without tensors: the client's message, which all below is read from. */
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

/* Folds `bytes` of `data` into a content hash, 16 bytes wide; {0, 0} at first. It tells different
 * contents apart; it does not withstand somebody who looks for two that collide. */
void moe_content_mix(uint64_t hash[2], const void *data, size_t bytes);

void moe_train_call_pack(const struct moe_train_call *call, uint8_t body[MOE_TRAINING_BODY_MAX],
                         uint32_t *length);
/* Of a ticket, which came from another process. Errors: MOE_INTERNAL/MALFORMED. */
struct moe_status moe_train_call_read(const struct moe_ticket *ticket,
                                      struct moe_train_call *out) MOE_CHECKED;

/* The answer to a call, next to its status. */
struct moe_train_answer {
    struct moe_ledger_outcome outcome;
    bool repeated;
    uint32_t recorded_at;                  /* slot, with RECORDED_ELSEWHERE */
    struct moe_checkpoint_removed removed; /* of a Save, as it ends */
    struct moe_pass_record
        *record; /* of a repeated Backward: the cached answer, with a reference */
};

/* [any thread] The answer to a call that has been run, if it is known here without a ticket; false
 * means nothing. */
bool moe_train_recall(struct moe_train *t, const struct moe_train_call *call,
                      struct moe_train_answer *answer);
/* [any thread] The same for a Backward without x, which can only be a repeat: compares the header's
 * hash. A failure is the answer. */
struct moe_status moe_train_recall_header(struct moe_train *t, const struct moe_train_call *call,
                                          struct moe_train_answer *answer) MOE_CHECKED;

/* ----------------------------------------------------------------- for the service */

struct moe_train_state {
    uint64_t lineage, weights_version, steps, last_step_id, state_bytes, retained_bytes,
        saved_bytes_limit, activation_bytes, activation_bytes_limit;
    uint64_t unsaved; /* steps since the state of `checkpoint`, or since the model was loaded */
    uint32_t backwards, frozen;
    char checkpoint[MOE_TRAINING_NAME_MAX + 1];
    enum moe_step_kind job; /* MOE_STEP_SAVE or MOE_STEP_LOAD while one is under way; 0 = none */
    char job_name[MOE_TRAINING_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT];       /* of going back; "" = none */
    uint64_t job_bytes, job_bytes_total; /* of this slot's part: written or checked; total 0 = not
                                            known */
};
void moe_train_read_state(struct moe_train *t, struct moe_train_state *out);
const struct moe_train_config *moe_train_configured(const struct moe_train *t);
/* Saved forward passes, answers of Backward, and what devices keep. */
struct moe_pass_store *moe_train_passes(struct moe_train *t);
struct moe_pass_store *moe_train_answers(struct moe_train *t);
struct moe_activations *moe_train_activations(struct moe_train *t);

#endif
