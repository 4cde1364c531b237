/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of a group in training: weights with Hugging Face names, optimizer state, and a
 * manifest (version, steps, settings, hashes, recorded calls). Each is one directory under the
 * training root, complete or absent.
 *
 * Every slot calls the same function on a separate thread. Between two phases the slots exchange
 * their results; if one failed, all call `abandon`. So a phase waits for no other slot, and may
 * take as long as its disk does. During `load_take` no step may run. Copying, and writing without a
 * copy, read trainers while steps run, as moe/training.h allows: meanwhile weights and training
 * state must not change. Writing from a copy and `load_read` touch no trainer. Slots share a file
 * system, so a phase sees the files of earlier phases of all slots.
 *
 * Names come from clients; only moe_training_name_ok has checked them. Error texts name the
 * checkpoint, not its path. */
#ifndef MOE_CHECKPOINT_CHECKPOINT_H
#define MOE_CHECKPOINT_CHECKPOINT_H

#include "daemon/lease.h"
#include "model/model.h"
#include "moe/training.h"

#include <stdatomic.h>

enum {
    MOE_CHECKPOINT_NAME_MAX = 64,
    MOE_CHECKPOINT_REMOVED_MAX = 32,
    MOE_CHECKPOINT_EXPLICIT_LOADS_MAX = 32
};

struct moe_checkpoint_copy;

/* Settings in the form of options: "--training adamw, no --lora-rank, --freeze router". Truncated
 * to `capacity` bytes (256 suffice). */
void moe_checkpoint_describe(const struct moe_trainer_config *config, char *text, size_t capacity);

/* What a view needs to publish or remove a checkpoint: see moe_checkpoint_raise_fence. */
struct moe_checkpoint_fence {
    uint64_t group;                     /* random number of the group; 0 = no fence */
    uint64_t epoch;                     /* of the view */
    const struct moe_lease_gate *lease; /* NULL = none is needed */
};

/* The root, the model and the slot of a call. Borrowed during the call. */
struct moe_checkpoint_context {
    const char *root; /* the training directory; it exists */
    const struct moe_backend *backend;
    const struct moe_model *model;
    const struct moe_layer_spec *const *specs; /* [layer_count], ascending */
    const struct moe_placement *placements;    /* [layer_count] */
    struct moe_trainer *const *trainers;       /* [layer_count], of this slot */
    size_t layer_count;
    uint32_t slot, slots;
    uint64_t live; /* bit s: slot s takes part; the lowest does work that is done once */
    const struct moe_trainer_config *config;
    const struct moe_checkpoint_copy *copy; /* source of the tensors; NULL: the trainers */
    const atomic_bool *cancel;   /* once true, a phase ends with MOE_CANCELLED soon; NULL = never */
    _Atomic uint64_t *processed; /* bytes that save_write or export_write have read from the copy or
                                    the trainers, or load_read has checked; NULL = not wanted */
    _Atomic uint64_t *expected; /* what `processed` will be at the end; set by copy_take, also if it
                                   has no room, and by load_read. NULL = not wanted */
    _Atomic uint64_t *moved;    /* bytes that load_take has written; NULL = not wanted */
    struct moe_checkpoint_fence fence;
    uint64_t writer; /* random number of the lowest slot's process */
    int *shown; /* descriptor of this process's locked writer file, -1 while it writes nothing: see
                   writers.c */
};

/* Explicit loads: names of checkpoints that clients or operators gave to load or recover, the
 * latest first. When the list is full, the earliest name is dropped. */
struct moe_checkpoint_explicit_loads {
    uint32_t count;
    char names[MOE_CHECKPOINT_EXPLICIT_LOADS_MAX][MOE_CHECKPOINT_NAME_MAX + 1];
};
void moe_checkpoint_explicit_loads_add(struct moe_checkpoint_explicit_loads *loads,
                                       const char *name);
bool moe_checkpoint_explicit_loads_has(const struct moe_checkpoint_explicit_loads *loads,
                                       const char *name);
/* Appends names of `older` that are not listed yet. */
void moe_checkpoint_explicit_loads_join(struct moe_checkpoint_explicit_loads *loads,
                                        const struct moe_checkpoint_explicit_loads *older);

/* Copies this slot's part of a Save to host memory, so that training goes on while files are
 * written. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY (the host has no room; checked before and
 * during the copy), MOE_CANCELLED, those of reading. */
struct moe_status moe_checkpoint_copy_take(const struct moe_checkpoint_context *c,
                                           struct moe_checkpoint_copy **out) MOE_CHECKED;
void moe_checkpoint_copy_free(struct moe_checkpoint_copy *copy); /* NULL is ignored */

/* Training state of a checkpoint besides its tensors. The same on all slots. */
struct moe_checkpoint_state {
    uint64_t lineage, weights_version;
    uint64_t steps;   /* t of AdamW */
    uint32_t frozen;  /* bits of enum moe_param_group */
    uint64_t save[5]; /* the Save that writes it: id and content. Unset after read */
    char parent[MOE_CHECKPOINT_NAME_MAX + 1]; /* the last checkpoint that this training saved or
                                                 loaded; "" = none. Unset after read */
    struct moe_checkpoint_explicit_loads explicit_loads; /* of the group that writes it */
    const uint8_t *records; /* the ledger, packed (training/ledger.h); opaque. Only for commit and
                               after read */
    size_t record_bytes;
    uint8_t *owned; /* of a state that was read: free with moe_checkpoint_state_free */
};
void moe_checkpoint_state_free(struct moe_checkpoint_state *s);

/* The view of `epoch` takes the training directory, before it is in force: from then on no earlier
 * view of the group publishes or removes a checkpoint there. Errors: UNAVAILABLE/LEASE_LOST (a
 * later view has it), UNAVAILABLE/IO, DATA_LOSS/MALFORMED (the fence file is damaged). */
struct moe_status moe_checkpoint_raise_fence(const char *root, uint64_t group,
                                             uint64_t epoch) MOE_CHECKED;

/* Save, four phases.
 *   begin   lowest slot: refuses an existing name (MOE_ALREADY_EXISTS / CHECKPOINT_EXISTS),
 *           removes leftovers of ended processes, makes the hidden directory for all slots.
 *           Nothing on the other slots. `*found`: the checkpoint exists, complete, and this same
 *           Save (writer, lineage and state->save) wrote it, but it was not recorded. Then no
 *           file is written, and version and steps in `state` become the checkpoint's.
 *   write   every slot: its part, synced to disk; `*bytes` = bytes written by this slot
 *   commit  lowest slot: index, manifest, sync, rename behind the fence. The checkpoint exists from
 *           the rename on: a later failure is logged and not reported
 *   tidy    lowest slot, once all slots know that they would recover to `name`: removes all but
 *           the `keep` newest (0 = removes none) of the checkpoints that count. A checkpoint
 *           counts if this process has written it, or if it is an ancestor of `name` below an
 *           explicit load. Explicit loads, their ancestors, and checkpoints of other processes
 *           stay and do not count. Logs each removal and failure */
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
/* Removed checkpoints, newest first: `count` is of all, `names` has the first ones. */
struct moe_checkpoint_removed {
    uint32_t count;
    char names[MOE_CHECKPOINT_REMOVED_MAX][MOE_CHECKPOINT_NAME_MAX + 1];
};
void moe_checkpoint_save_tidy(const struct moe_checkpoint_context *c, const char *name,
                              uint32_t keep, struct moe_checkpoint_removed *removed);
/* Lowest slot, for a checkpoint or an export: removes the hidden directory; failures are logged. */
void moe_checkpoint_abandon(const struct moe_checkpoint_context *c, const char *name);

/* A directory of this name is there; whether it loads is not checked. Errors: MOE_NOT_FOUND /
 * CHECKPOINT_NOT_FOUND, FAILED_PRECONDITION for a symbolic link, others of opening it. */
struct moe_status moe_checkpoint_check_there(const char *root, const char *name) MOE_CHECKED;

/* Load, two phases.
 *   read  every slot: checks manifest, headers and hashes; all refusals happen here
 *         (MOE_NOT_FOUND / CHECKPOINT_NOT_FOUND; FAILED_PRECONDITION / VERSION_MISMATCH for another
 *         model, optimizer or adapter; DATA_LOSS / MALFORMED for bad hashes). Nothing is changed;
 *         `*state` is the caller's to free.
 *   take  every slot: values and moments into the trainers; gradients become zero. After a failure
 *         the trainers are undefined. */
struct moe_status moe_checkpoint_load_read(const struct moe_checkpoint_context *c, const char *name,
                                           struct moe_checkpoint_state *state) MOE_CHECKED;
struct moe_status moe_checkpoint_load_take(const struct moe_checkpoint_context *c,
                                           const char *name) MOE_CHECKED;

/* One directory of the root, from its manifest, and the names and sizes of its files; no hash but
 * the manifest's is checked. */
struct moe_checkpoint_listed {
    char name[MOE_CHECKPOINT_NAME_MAX + 1];
    char problem[MOE_STATUS_TEXT]; /* why these workers cannot load it; "" = no known problem */
    bool readable; /* its manifest is complete; otherwise only `name` and `problem` are set */
    char parent[MOE_CHECKPOINT_NAME_MAX + 1]; /* "" = none */
    uint64_t lineage, weights_version, steps;
    uint64_t sequence;              /* higher = newer, within a root */
    uint64_t made_s;                /* seconds since 1970, UTC; 0 = not known */
    uint64_t bytes;                 /* of its files */
    enum moe_optimizer optimizer;   /* 0 = not known */
    uint32_t frozen, never_trained; /* bits of enum moe_param_group */
    uint32_t lora_rank, lora_targets;
    double lora_alpha;
};

/* Lists directories and links of the root with valid names: checkpoints first, the newest before
 * older ones. Reads the disk; any thread. Of `c` only root, model and config are used. The caller
 * frees `*list`. Errors: those of opening the root, OUT_OF_MEMORY. */
struct moe_status moe_checkpoint_list(const struct moe_checkpoint_context *c,
                                      struct moe_checkpoint_listed **list,
                                      size_t *count) MOE_CHECKED;

/* Digests of the weights of a model directory, if that is a checkpoint: those that its manifest and
 * the lists of its slots have. What is found:
 *   MOE_CHECKPOINT_DIGESTS_NONE     no checkpoint of moed
 *   MOE_CHECKPOINT_DIGESTS_UNKNOWN  a checkpoint without digests (of an earlier release), or
 *                                   without its directory of training state
 *   MOE_CHECKPOINT_DIGESTS_FOUND    `table` is complete
 * Errors: DATA_LOSS/MALFORMED (manifest or lists are damaged), IO, OUT_OF_MEMORY. */
enum moe_checkpoint_digests {
    MOE_CHECKPOINT_DIGESTS_NONE,
    MOE_CHECKPOINT_DIGESTS_UNKNOWN,
    MOE_CHECKPOINT_DIGESTS_FOUND
};
struct moe_status moe_checkpoint_read_digests(const char *directory, struct moe_digest_table *table,
                                              enum moe_checkpoint_digests *found) MOE_CHECKED;

/* Adapters as PEFT reads them (adapter_model.safetensors, adapter_config.json) in a directory of
 * the root; phases as in save. Errors as there. */
struct moe_status moe_checkpoint_export_begin(const struct moe_checkpoint_context *c,
                                              const char *name) MOE_CHECKED;
struct moe_status moe_checkpoint_export_write(const struct moe_checkpoint_context *c,
                                              const char *name, uint64_t *bytes) MOE_CHECKED;
struct moe_status moe_checkpoint_export_commit(const struct moe_checkpoint_context *c,
                                               const char *name) MOE_CHECKED;

#endif
