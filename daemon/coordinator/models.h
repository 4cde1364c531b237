/* SPDX-License-Identifier: Apache-2.0 */
/* The state machine of the added models: loads, adds to the running view, and unloads them, by
 * orders to all slots (moe.v1.ModelOrder). Pure: no I/O, no clock, one thread at a time; it
 * allocates a placement for each model only. Inputs are calls of operators, reports of slots and
 * the state of the group. Outputs are actions, which the caller carries out in order.
 *
 * Rules:
 *  - a number is durable before a worker sees it, and is never given again;
 *  - a model is durable before ADD. Until then a failure anywhere undoes the load on all slots;
 *  - ADD is sent when all slots hold the model, with digests that agree (the caller compares them);
 *  - a view begins without added models; each is added again once all slots of the view hold it.
 *    A load needs a view of all slots;
 *  - CLOSE is sent when no slot can get a ticket of the model any more: ADD was never sent, all
 *    slots have run the REMOVE ticket, or a later view is in force;
 *  - each accepted call of an operator gets one answer. One model is loaded or unloaded at a time;
 *  - no order waits for ever: see the limits below.
 *
 * A repeated order has the same number, and reports of other orders are ignored. ADD and REMOVE are
 * identified by their epoch instead. */
#ifndef MOE_COORDINATOR_MODELS_H
#define MOE_COORDINATOR_MODELS_H

#include "coordinator/membership.h"

enum {
    MOE_ADDED_MAX = 15, /* as many as a worker takes */
    MOE_ADDED_NUMBER_MAX = 65535,
    MOE_ADDED_NAME_BYTES = 64, /* texts, with the final 0 */
    MOE_ADDED_DIRECTORY_BYTES = 1024,
    MOE_ADDED_FINGERPRINT_BYTES = MOE_MEMBERSHIP_ID_BYTES,
};

/* Limits. A worker that passes one has failed the step. */
#define MOE_ADDED_OPEN_NS      (60 * MOE_NS_PER_S)
#define MOE_ADDED_STALL_NS     (300 * MOE_NS_PER_S) /* LOAD: without progress */
#define MOE_ADDED_ADD_NS       (120 * MOE_NS_PER_S) /* then the call is answered; it goes on */
#define MOE_ADDED_QUIESCE_NS   (120 * MOE_NS_PER_S) /* then the unload is undone */
#define MOE_ADDED_CLOSE_NS     (60 * MOE_NS_PER_S)  /* then the call is answered; orders go on */
#define MOE_ADDED_RETRY_NS     (30 * MOE_NS_PER_S)  /* after a failure on a slot; doubles */
#define MOE_ADDED_RETRY_MAX_NS (960 * MOE_NS_PER_S)
#define MOE_ADDED_REPEAT_NS    MOE_NS_PER_S /* an order without report is sent again; LOAD later */

/* ------------------------------------------------------------------ planning (model_plan.c) */

/* moe.v1.LayerMemory: bytes of one layer, in the files and in memory once loaded. */
struct moe_model_layer {
    struct moe_membership_layer info;
    uint64_t common_file, common_resident; /* of what every slot needs */
    uint64_t expert_file, expert_resident; /* of one routed expert */
};

/* Of one slot. */
struct moe_model_plan {
    uint64_t file_bytes;     /* that it reads */
    uint64_t resident_bytes; /* that the weights take */
    uint64_t free_bytes;     /* that were free before */
};

/* Errors: MOE_INVALID_ARGUMENT/MALFORMED (no layers, too many, indices that do not rise or are
 * above 65535, impossible numbers of experts). */
struct moe_status moe_model_check_layers(const struct moe_model_layer *layers,
                                         size_t count) MOE_CHECKED;

/* True if the layers have the same shapes; memory may differ. */
bool moe_model_same_layers(const struct moe_model_layer *a, size_t a_count,
                           const struct moe_model_layer *b, size_t b_count);

/* The rule of the default model: moe_placement_set_linear. `layers` are checked. */
struct moe_status moe_model_place(struct moe_placement *p, uint64_t places, uint32_t replicas,
                                  const struct moe_model_layer *layers, size_t count) MOE_CHECKED;

/* Sets file_bytes and resident_bytes of `slot`. `p` is the placement of `layers`; free_bytes is
 * given. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY (not enough is free; the text has the bytes),
 * MOE_INVALID_ARGUMENT/MALFORMED (sums above 2^64). */
struct moe_status moe_model_plan_slot(const struct moe_placement *p,
                                      const struct moe_model_layer *layers, uint32_t slot,
                                      struct moe_model_plan *plan) MOE_CHECKED;

/* ------------------------------------------------------------------ lifetime */

struct moe_added;

/* The durable state. */
struct moe_added_saved {
    uint32_t highest; /* number that was ever given; 0 = none */
    uint32_t count;
    struct moe_added_entry {
        uint32_t number;
        bool leaving; /* it is being unloaded */
        char name[MOE_ADDED_NAME_BYTES];
        char directory[MOE_ADDED_DIRECTORY_BYTES];
        char fingerprint[MOE_ADDED_FINGERPRINT_BYTES]; /* "": that of the next load counts */
    } models[MOE_ADDED_MAX];                           /* in the order of their numbers */
};

struct moe_added_config {
    uint32_t slots;       /* that workers can have, 1..MOE_PLACEMENT_SLOTS_MAX */
    uint32_t replicas;    /* 1 .. slots with experts */
    uint64_t first_order; /* orders are numbered from here; above those of earlier coordinators */
};

/* `saved`: from the store; zeroes for a new group. `epoch`: the highest one ever announced. Errors:
 * OUT_OF_MEMORY, MOE_DATA_LOSS (impossible `saved`). */
struct moe_status moe_added_create(const struct moe_added_config *config,
                                   const struct moe_added_saved *saved, uint64_t epoch,
                                   struct moe_added **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_added_destroy(struct moe_added *m);

/* ------------------------------------------------------------------ inputs
 *
 * `now_ns`: the present. The caller carries out all actions of an input before the next input. */

struct moe_added_slot {
    uint64_t process; /* incarnation of the process that has the slot; 0 = none */
    uint64_t stream;  /* of its session; 0 = not connected */
    uint32_t memory;  /* slots with the same number share one memory; 0 = a separate one */
};

/* The state of the group; after every input of the membership machine. `view`: epoch in force,
 * 0 = none. `live`: bit s: slot s is in that view; those slots are taken. `places`: the slots that
 * hold experts; it does not change while the group has added models. */
void moe_added_on_group(struct moe_added *m, uint64_t now_ns, uint64_t view, uint64_t live,
                        uint64_t places, const struct moe_added_slot *slots);

/* An operator loads a model. `call`: above 0, and no call that is not answered. `name`: "" = the
 * last component of `directory`; `taken`: name of the default model.
 * A failure is the answer. Otherwise MOE_ADDED_ANSWER follows. Errors: MOE_INVALID_ARGUMENT,
 * MOE_ALREADY_EXISTS, MOE_FAILED_PRECONDITION (no view is in force), MOE_UNAVAILABLE (another
 * change is under way), MOE_RESOURCE_EXHAUSTED (too many models, no number is left, no memory). */
struct moe_status moe_added_load(struct moe_added *m, uint64_t now_ns, uint64_t call,
                                 const char *directory, const char *name, const char *taken,
                                 bool dry_run) MOE_CHECKED;
/* As above. `drain`: wait for requests of the model, instead of failing. Errors: MOE_NOT_FOUND,
 * MOE_UNAVAILABLE. */
struct moe_status moe_added_unload(struct moe_added *m, uint64_t now_ns, uint64_t call,
                                   const char *name, bool drain) MOE_CHECKED;
/* The operator does not wait any more, and gets no answer. A load that has not ended on all slots
 * is undone. Nothing for an unknown call. */
void moe_added_cancel(struct moe_added *m, uint64_t now_ns, uint64_t call);

enum moe_added_step { /* values of moe.v1.ModelStep, and one more */
                      MOE_ADDED_OPEN = 1,
                      MOE_ADDED_LOAD,
                      MOE_ADDED_ADD,
                      MOE_ADDED_QUIESCE,
                      MOE_ADDED_REMOVE,
                      MOE_ADDED_CLOSE,
                      MOE_ADDED_RESUME, /* QUIESCE with `resume` */
};

struct moe_added_report { /* moe.v1.ModelReport; texts are copied */
    uint32_t number;
    enum moe_added_step step;
    uint64_t order, epoch;
    const struct moe_status *error; /* code MOE_OK on success. Of LOAD: also that digests differ */
    const char *fingerprint, *family;
    const struct moe_model_layer *layers;
    size_t layer_count;
    uint64_t free_bytes;
};

void moe_added_on_report(struct moe_added *m, uint64_t now_ns, uint32_t slot,
                         const struct moe_added_report *r);
void moe_added_on_progress(struct moe_added *m, uint64_t now_ns, uint32_t slot, uint32_t number,
                           uint64_t loaded_bytes, uint64_t total_bytes);
/* Answer to MOE_ADDED_SAVE; allowed while actions are being carried out. */
void moe_added_on_saved(struct moe_added *m, uint64_t now_ns, uint64_t sequence,
                        const struct moe_status *status);
void moe_added_on_tick(struct moe_added *m, uint64_t now_ns);
/* Latest time of the next tick; MOE_NEVER when nothing is under way. */
uint64_t moe_added_deadline(const struct moe_added *m);

/* The next load of the model may find other files. The caller makes to_save durable. False: no such
 * model. */
bool moe_added_forget_files(struct moe_added *m, const char *name, uint32_t *number);

/* ------------------------------------------------------------------ actions */

enum moe_added_action_kind {
    MOE_ADDED_ORDER,  /* `step` of model `number`, to `stream` */
    MOE_ADDED_SAVE,   /* make moe_added_to_save() durable, then on_saved(sequence) */
    MOE_ADDED_ANSWER, /* `call` ends with `status`; on success of a load see moe_added_info */
    MOE_ADDED_LOG,    /* `event`: status.text at `level`, about `slot` */
    MOE_ADDED_FORGET, /* digests of model `number` are of no use any more */
};

struct moe_added_action {
    enum moe_added_action_kind kind;
    enum moe_added_step step;
    enum moe_membership_event event;
    enum moe_log_level level;
    uint32_t number, slot;
    uint64_t stream, order, epoch, sequence, call;
    bool if_idle; /* QUIESCE */
    bool again;   /* CLOSE: the model stays, and is to be loaded again */
    struct moe_status status;
};

/* Removes the oldest action; false when there is none. */
bool moe_added_next_action(struct moe_added *m, struct moe_added_action *out);

/* ------------------------------------------------------------------ reading
 *
 * Pointers are valid until the next input. */

enum moe_model_state { /* values of moe.v1.ModelState */
                       MOE_MODEL_PLANNING = 1,
                       MOE_MODEL_LOADING,
                       MOE_MODEL_SERVING,
                       MOE_MODEL_UNLOADING,
                       MOE_MODEL_FAILED,
                       MOE_MODEL_WAITING,
};

struct moe_added_info {
    uint32_t number;
    enum moe_model_state state;
    bool closed; /* no CLOSE comes any more: Registered leaves it out, so that a worker frees it */
    const char *name, *directory, *family, *fingerprint, *reason;
    const struct moe_model_layer *layers; /* none until a worker has opened it */
    size_t layer_count;
    const struct moe_placement *placement; /* of `layers` */
    uint64_t loaded_bytes, total_bytes;
    struct moe_model_plan plans[MOE_PLACEMENT_SLOTS_MAX]; /* zeroes until the slot has opened it */
};

/* Models in the order of their numbers, without one that was answered and is gone; false when there
 * are no more. */
bool moe_added_info(const struct moe_added *m, size_t index, struct moe_added_info *out);
/* False: no such model. Until the next input, finds one that was answered and is gone. */
bool moe_added_find(const struct moe_added *m, uint32_t number, struct moe_added_info *out);
bool moe_added_find_name(const struct moe_added *m, const char *name, struct moe_added_info *out);
/* True if the slot was asked by this order (0: by any) to load the model. */
bool moe_added_awaits_load(const struct moe_added *m, uint32_t slot, uint32_t number,
                           uint64_t order);
const struct moe_added_saved *moe_added_to_save(struct moe_added *m);

#endif
