/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of a group in training: weights with Hugging Face names, optimizer state beside them,
 * and a manifest (version, steps, settings, hashes, what was recorded). One directory each under
 * the training root, complete or not there at all.
 *
 * Every slot calls the same function, each on a thread of its own; between two phases all slots
 * tell each other how theirs ended, and when one failed, all call the `abandon` of what they began.
 * So a phase never waits for another slot, and may take as long as its disk does. `load_take` needs
 * that no step runs. Copying, and writing without a copy, read trainers as moe/training.h allows
 * beside steps: nothing that changes weights or training state may happen meanwhile. What has a
 * copy, and `load_read`, touch no trainer. What a phase of one slot wrote is seen by the next phase
 * of another: they share a file system.
 *
 * Names come from clients: moe_training_name_ok has passed, nothing else has. Texts of errors name
 * the checkpoint, never a path. */
#ifndef MOE_CHECKPOINT_CHECKPOINT_H
#define MOE_CHECKPOINT_CHECKPOINT_H

#include "model/model.h"
#include "moe/training.h"

#include <stdatomic.h>

enum {
    MOE_CHECKPOINT_NAME_MAX = 64,
    MOE_CHECKPOINT_REMOVED_MAX = 32,
    MOE_CHECKPOINT_EXPLICIT_LOADS_MAX = 32
};

struct moe_checkpoint_copy;

/* Settings as options say them, "--training adamw, no --lora-rank, --freeze router"; cut where
 * `capacity` bytes are not enough (256 are). */
void moe_checkpoint_describe(const struct moe_trainer_config *config, char *text, size_t capacity);

/* Where and of what. Borrowed during the call. */
struct moe_checkpoint_context {
    const char *root; /* the training directory; it exists */
    const struct moe_backend *backend;
    const struct moe_model *model;
    const struct moe_layer_spec *const *specs; /* [layer_count], ascending */
    const struct moe_placement *placements;    /* [layer_count] */
    struct moe_trainer *const *trainers;       /* [layer_count], of this slot */
    size_t layer_count;
    uint32_t slot, slots;
    uint64_t live; /* bit s: slot s takes part; the lowest does what is done once */
    const struct moe_trainer_config *config;
    const struct moe_checkpoint_copy *copy; /* to be written in place of the trainers' tensors;
                                               NULL: those */
    const atomic_bool *cancel; /* once true, a phase ends with MOE_CANCELLED soon; NULL = never */
    _Atomic uint64_t
        *processed;  /* bytes taken from the copy, or checked, so far; NULL = not wanted */
    uint64_t writer; /* a number of the lowest slot's process's own: says who writes it */
    int *shown; /* this process's, -1 while it writes nothing: by what others of the root see that
                   the writer of a hidden directory lives */
};

/* Checkpoints that the group was told to load by their names, the latest first; of more than these
 * the earliest are forgotten. */
struct moe_checkpoint_explicit_loads {
    uint32_t count;
    char names[MOE_CHECKPOINT_EXPLICIT_LOADS_MAX][MOE_CHECKPOINT_NAME_MAX + 1];
};
void moe_checkpoint_explicit_loads_add(struct moe_checkpoint_explicit_loads *loads,
                                       const char *name);
bool moe_checkpoint_explicit_loads_has(const struct moe_checkpoint_explicit_loads *loads,
                                       const char *name);
/* `older` behind those that are there. */
void moe_checkpoint_explicit_loads_join(struct moe_checkpoint_explicit_loads *loads,
                                        const struct moe_checkpoint_explicit_loads *older);

/* What this slot would write, in host memory, so that the files can be written while what it is a
 * copy of goes on learning. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY (the host has no room: it
 * is asked first, and again and again), MOE_CANCELLED, those of reading. */
struct moe_status moe_checkpoint_copy_take(const struct moe_checkpoint_context *c,
                                           struct moe_checkpoint_copy **out) MOE_CHECKED;
void moe_checkpoint_copy_free(struct moe_checkpoint_copy *copy); /* NULL is ignored */
/* What `processed` will have come to when all of it has been written. */
uint64_t moe_checkpoint_copy_bytes(const struct moe_checkpoint_copy *copy);

/* What a checkpoint says about training beside its tensors. The same on all slots. */
struct moe_checkpoint_state {
    uint64_t lineage, weights_version;
    uint64_t steps;   /* t of AdamW */
    uint32_t frozen;  /* bits of enum moe_param_group */
    uint64_t save[5]; /* the Save that writes it: id and content. Not after read */
    char parent[MOE_CHECKPOINT_NAME_MAX + 1]; /* the checkpoint that the state came from or went to
                                                 last; "" = none. Not after read */
    struct moe_checkpoint_explicit_loads
        explicit_loads;     /* by the group that writes it, up to then */
    const uint8_t *records; /* the ledger, packed (training/ledger.h); opaque. Only for commit and
                               after read */
    size_t record_bytes;
    uint8_t *owned; /* of a state that was read: free with moe_checkpoint_state_free */
};
void moe_checkpoint_state_free(struct moe_checkpoint_state *s);

/* Save, four phases.
 *   begin   lowest slot: refuses a name that exists (MOE_ALREADY_EXISTS / CHECKPOINT_EXISTS),
 * removes what Saves of processes that have gone left, makes the hidden directory that the others
 *           write into; nothing on the other slots. `*found`: the checkpoint exists, whole, and is
 *           what this very Save (writer, lineage and state->save) has written, before something
 * kept it from being recorded: nothing is to be written, and version and steps in `state` are the
 * checkpoint's write   every slot: its part, synced to disk; `*bytes` = bytes written by this slot
 *   commit  lowest slot: index, manifest, sync, rename. The checkpoint exists from the rename on:
 *           a failure after it is logged and not reported
 *   tidy    lowest slot, once all slots know that `name` is where they would go back to: removes
 *           all but the `keep` newest (0 = nothing is removed) of those that this process has
 *           written and those that `name` came from without anybody's telling (its parent, which
 *           was saved or gone back to before, the parent's, ...). What the group was told to load,
 *           what that came from, and what others have written stay, and do not count. What is
 *           removed, and failures, are logged */
struct moe_status moe_checkpoint_save_begin(const struct moe_checkpoint_context *c,
                                            const char *name, struct moe_checkpoint_state *state,
                                            bool *found) MOE_CHECKED;
struct moe_status moe_checkpoint_save_write(const struct moe_checkpoint_context *c,
                                            const char *name,
                                            const struct moe_checkpoint_state *state,
                                            uint64_t *bytes) MOE_CHECKED;
struct moe_status moe_checkpoint_save_commit(const struct moe_checkpoint_context *c,
                                             const char *name,
                                             const struct moe_checkpoint_state *state) MOE_CHECKED;
/* What went, newest first: all are counted, the first ones named. */
struct moe_checkpoint_removed {
    uint32_t count;
    char names[MOE_CHECKPOINT_REMOVED_MAX][MOE_CHECKPOINT_NAME_MAX + 1];
};
void moe_checkpoint_save_tidy(const struct moe_checkpoint_context *c, const char *name,
                              uint32_t keep, struct moe_checkpoint_removed *removed);
/* Lowest slot: removes what the phases left behind. */
void moe_checkpoint_save_abandon(const struct moe_checkpoint_context *c, const char *name);

/* Load, two phases.
 *   read  every slot: manifest and headers; everything that can be refused is refused here
 *         (MOE_NOT_FOUND / CHECKPOINT_NOT_FOUND; FAILED_PRECONDITION / VERSION_MISMATCH for another
 *         model, optimizer or adapter; DATA_LOSS / MALFORMED for bad hashes). Nothing is changed;
 *         `*state` is the caller's to free.
 *   take  every slot: values and moments into the trainers; gradients become zero. After a failure
 *         the trainers are undefined. */
struct moe_status moe_checkpoint_load_read(const struct moe_checkpoint_context *c, const char *name,
                                           struct moe_checkpoint_state *state) MOE_CHECKED;
struct moe_status moe_checkpoint_load_take(const struct moe_checkpoint_context *c,
                                           const char *name) MOE_CHECKED;

/* One directory of the root, as its manifest and the names of its files tell; hashes are not
 * checked. */
struct moe_checkpoint_listed {
    char name[MOE_CHECKPOINT_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT]; /* why it cannot be taken by these workers; "" = nothing known */
    bool readable;                 /* it has a whole manifest: all but `name` and `problem` is 0
                                      otherwise */
    char parent[MOE_CHECKPOINT_NAME_MAX + 1]; /* "" = none */
    uint64_t lineage, weights_version, steps;
    uint64_t sequence;              /* higher = newer, within a root */
    uint64_t made_s;                /* seconds since 1970, UTC; 0 = not known */
    uint64_t bytes;                 /* of all its files */
    enum moe_optimizer optimizer;   /* 0 = not known */
    uint32_t frozen, never_trained; /* bits of enum moe_param_group */
    uint32_t lora_rank, lora_targets;
    double lora_alpha;
};

/* What lies in the root: directories and links whose names a client may use, the checkpoints
 * first, the newest before the others. Reads the disk; any thread. Of `c` only root, model and
 * config are used. `*list` is the caller's to free. Errors: those of opening the root,
 * OUT_OF_MEMORY. */
struct moe_status moe_checkpoint_list(const struct moe_checkpoint_context *c,
                                      struct moe_checkpoint_listed **list,
                                      size_t *count) MOE_CHECKED;

/* Adapters as PEFT reads them (adapter_model.safetensors, adapter_config.json) in a directory of
 * the root; phases as in save. Errors as there. */
struct moe_status moe_checkpoint_export_begin(const struct moe_checkpoint_context *c,
                                              const char *name) MOE_CHECKED;
struct moe_status moe_checkpoint_export_write(const struct moe_checkpoint_context *c,
                                              const char *name, uint64_t *bytes) MOE_CHECKED;
struct moe_status moe_checkpoint_export_commit(const struct moe_checkpoint_context *c,
                                               const char *name) MOE_CHECKED;
void moe_checkpoint_export_abandon(const struct moe_checkpoint_context *c, const char *name);

#endif
