/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of checkpoints share; only files of this folder include it. */
#ifndef MOE_CHECKPOINT_INTERNAL_H
#define MOE_CHECKPOINT_INTERNAL_H

#include "checkpoint/checkpoint.h"
#include "model/model_write.h"
#include "model/safetensors.h"

#include <dirent.h>
#include <jansson.h>

#define MOE_CKPT_MANIFEST "manifest.json"
#define MOE_CKPT_FORMAT   "moed checkpoint"
#define MOE_CKPT_STATE    "optimizer" /* directory of the training state */
#define MOE_CKPT_RECORDS  "records.bin"
#define MOE_CKPT_LOADS    "told"         /* the manifest's member for explicit loads */
#define MOE_CKPT_DIGESTS  "digests"      /* a slot's list: digests of the weights that it wrote */
#define MOE_CKPT_DIGEST   "model_digest" /* the manifest's member: digest of all of them */

enum {
    MOE_CKPT_FORMAT_VERSION = 1,
    MOE_CKPT_HIDDEN_MAX = MOE_CHECKPOINT_NAME_MAX + 32,
    MOE_CKPT_FILE_MAX = 32,
    MOE_CKPT_TENSOR_MAX = 80,
    MOE_CKPT_JSON_BYTES_MAX = 256 << 20
};

/* --------------------------------------------------------------------- failures (errors.c) */

struct moe_status moe_ckpt__io(const char *what) MOE_CHECKED; /* from errno */
struct moe_status moe_ckpt__no_memory(void) MOE_CHECKED;
/* [for errors of reading] Turns any error of a damaged checkpoint into DATA_LOSS/MALFORMED. */
struct moe_status moe_ckpt__damaged(struct moe_status st) MOE_CHECKED;
/* MOE_CANCELLED once the phase has been cancelled. */
struct moe_status moe_ckpt__go_on(const struct moe_checkpoint_context *c) MOE_CHECKED;

/* ------------------------------------------------------------- directories (files.c)
 *
 * Every name is opened inside an open directory and never through a link. */

struct moe_status moe_ckpt__open_root(const char *root, int *fd) MOE_CHECKED;
/* NOT_FOUND/IO if there is none; FAILED_PRECONDITION/IO, by name, of a link. */
struct moe_status moe_ckpt__open_dir(int at, const char *name, int *fd) MOE_CHECKED;
/* Makes the hidden directory ".NAME.WRITER.saving": no client can name it, and no earlier writer
 * touches it. CHECKPOINT_EXISTS if the name is taken. Removes hidden leftovers of crashed
 * processes; failures of that are logged. */
struct moe_status moe_ckpt__begin(const struct moe_checkpoint_context *c, const char *name,
                                  int *hidden) MOE_CHECKED;
/* Opens the hidden directory of `name`. */
struct moe_status moe_ckpt__join(const struct moe_checkpoint_context *c, const char *name,
                                 int *hidden) MOE_CHECKED;
/* The hidden directory becomes `name`, durably. */
struct moe_status moe_ckpt__publish(const struct moe_checkpoint_context *c,
                                    const char *name) MOE_CHECKED;
/* The names in the training directory: *names, which the caller closes with closedir. */
struct moe_status moe_ckpt__open_names(int root, DIR **names) MOE_CHECKED;
/* Removes `name` in `at` with all its contents. */
struct moe_status moe_ckpt__remove_tree(int at, const char *name) MOE_CHECKED;
/* A new file, synced. `sha256` may be NULL. */
struct moe_status moe_ckpt__write_file(int at, const char *name, const void *data, size_t bytes,
                                       char *sha256) MOE_CHECKED;
struct moe_status moe_ckpt__write_json(int at, const char *name, const json_t *json,
                                       char *sha256) MOE_CHECKED;
struct moe_status moe_ckpt__sync(int directory) MOE_CHECKED;
/* [counts as processed; ends when cancelled] Hash of bytes [offset, offset + bytes) of a file, all
 * of it with bytes = UINT64_MAX. */
struct moe_status moe_ckpt__hash(const struct moe_checkpoint_context *c, int at, const char *name,
                                 uint64_t offset, uint64_t bytes,
                                 char sha256[MOE_SHA256_HEX]) MOE_CHECKED;

/* ---------------------------------------------------------------- writers (writers.c)
 *
 * Several groups may write below one root. The writing process of a group holds a lock on a file
 * there, ".WRITER.writer". The kernel releases the lock however the process ends: a hidden
 * directory with that writer's number is abandoned once the lock is gone. */

#define MOE_CKPT_WRITER ".writer" /* suffix of such a file */

/* Creates and locks this process's file, until moe_ckpt__hide_writer. If the file system has no
 * locks, logs a warning. */
struct moe_status moe_ckpt__show_writer(const struct moe_checkpoint_context *c,
                                        int root) MOE_CHECKED;
void moe_ckpt__hide_writer(const struct moe_checkpoint_context *c, int root);
/* True if another process may still be writing the hidden `name`: its lock is held, or cannot be
 * checked. */
bool moe_ckpt__is_written(const struct moe_checkpoint_context *c, int root, const char *name);
/* Removes a file ".WRITER.writer" if its writer has ended. */
void moe_ckpt__sweep_writer(int root, const char *file);

/* ----------------------------------------------------------------------- fence (fence.c) */

/* Begins an act that makes a change durable: the view of `c` has a lease, and no later one has the
 * directory. Until moe_ckpt__leave_fence no later one gets it. Errors: UNAVAILABLE/LEASE_LOST. */
struct moe_status moe_ckpt__pass_fence(const struct moe_checkpoint_context *c, int root,
                                       int *fd) MOE_CHECKED;
void moe_ckpt__leave_fence(int fd);

/* ----------------------------------------------------------------------- tensors (tensors.c) */

/* One tensor of the training state, with its name in a file. */
struct moe_ckpt_tensor {
    size_t layer; /* index */
    struct moe_train_key key;
    bool base; /* W0 of an adapted weight: the value below the adapter */
    uint64_t rows, columns;
    char name[MOE_CKPT_TENSOR_MAX];
};

struct moe_ckpt_tensors {
    struct moe_ckpt_tensor *list;
    size_t count, room;
};
/* "layers.3.experts.5.gate.lora_A.value"; `base` as above. */
void moe_ckpt__tensor_name(char name[MOE_CKPT_TENSOR_MAX], const struct moe_layer_spec *spec,
                           const struct moe_train_key *key, bool base);
/* With `writing`: the tensors that this slot writes; each tensor of the group has one writing slot.
 * Without: the tensors that this slot loads, in the order of writing them to trainers. */
struct moe_status moe_ckpt__list(const struct moe_checkpoint_context *c, bool writing,
                                 struct moe_ckpt_tensors *out) MOE_CHECKED;
/* The tensors that this slot writes, and the values of all weights that it writes into the model's
 * files, each once. */
struct moe_status moe_ckpt__list_copied(const struct moe_checkpoint_context *c,
                                        struct moe_ckpt_tensors *out) MOE_CHECKED;
void moe_ckpt__list_free(struct moe_ckpt_tensors *t);
/* Writes the file `file` of these tensors, synced; `*bytes` is its size. `sha256` may be NULL. */
struct moe_status moe_ckpt__write_tensors(const struct moe_checkpoint_context *c, int at,
                                          const char *file, const struct moe_ckpt_tensors *tensors,
                                          uint64_t *bytes, char *sha256) MOE_CHECKED;
extern const char *const moe_ckpt__metadata[]; /* of all files of tensors */
/* Reads one tensor from the copy, or from its trainer (copy.c). */
struct moe_status moe_ckpt__read(const struct moe_checkpoint_context *c,
                                 const struct moe_ckpt_tensor *t, float *to,
                                 size_t bytes) MOE_CHECKED;
/* Experts of a layer that this slot writes, or holds; ascending. Returns how many. */
size_t moe_ckpt__experts(const struct moe_checkpoint_context *c, size_t layer, bool writing,
                         uint32_t experts[MOE_MAX_EXPERTS]);
bool moe_ckpt__is_lowest(const struct moe_checkpoint_context *c);

/* True if the trainer's state has the value of this weight (a master, or W0 and an adapter);
 * otherwise the model's file has it exactly. */
bool moe_ckpt__has_value(const struct moe_checkpoint_context *c, size_t layer,
                         enum moe_weight weight);

/* True only for the weight itself, not for an adapter of it. */
bool moe_ckpt__has_master(const struct moe_checkpoint_context *c, size_t layer,
                          enum moe_weight weight);

/* ------------------------------------------------------------- settings (settings.c) */

/* One more than the highest of the root: newer checkpoints have higher ones. */
struct moe_status moe_ckpt__next_sequence(const char *root, json_int_t *sequence) MOE_CHECKED;
/* Retention (moe_checkpoint_save_tidy); `keep` is above 0. */
struct moe_status moe_ckpt__keep_newest(const struct moe_checkpoint_context *c, const char *newest,
                                        uint32_t keep,
                                        struct moe_checkpoint_removed *removed) MOE_CHECKED;
/* Explicit loads as JSON; NULL without memory. Reading skips malformed names: a listed name is only
 * spared from removal. */
json_t *moe_ckpt__loads(const struct moe_checkpoint_explicit_loads *loads);
void moe_ckpt__read_loads(const json_t *manifest, struct moe_checkpoint_explicit_loads *out);
/* The manifest's settings: model, optimizer and adapters; compared as JSON when they are read. */
json_t *moe_ckpt__settings(const struct moe_checkpoint_context *c);
/* Checks that a checkpoint was made with the settings of these workers. Errors:
 * FAILED_PRECONDITION/VERSION_MISMATCH; the text has both settings, as options of moe-worker. */
struct moe_status moe_ckpt__check_settings(const struct moe_checkpoint_context *c,
                                           const json_t *manifest) MOE_CHECKED;
/* Checks that an open directory has a manifest, so is a checkpoint. Errors: FAILED_PRECONDITION;
 * the text names what it is instead. */
struct moe_status moe_ckpt__check_kind(int directory) MOE_CHECKED;

/* --------------------------------------------------------------------- manifest (manifest.c) */

void moe_ckpt__state_file(char name[MOE_CKPT_FILE_MAX], uint32_t slot, const char *extension);
/* Sizes of the files of an open checkpoint, for the manifest's member "files": {NAME: BYTES}, with
 * "optimizer/NAME" for those of the training state. Only regular files with plain names. On
 * failure, `*sizes` has some of them, or is NULL; the caller frees it. */
struct moe_status moe_ckpt__file_sizes(int directory, json_t **sizes) MOE_CHECKED;
/* Hash of the manifest without the member "sha256". */
struct moe_status moe_ckpt__manifest_hash(const json_t *manifest,
                                          char sha256[MOE_SHA256_HEX]) MOE_CHECKED;
/* Reads an opened checkpoint's manifest and checks its hash and format. Errors:
 * DATA_LOSS/MALFORMED. */
struct moe_status moe_ckpt__read_manifest(int directory, json_t **out) MOE_CHECKED;
/* The same of directory `name` in the root. */
struct moe_status moe_ckpt__read_manifest_of(int root, const char *name, json_t **out) MOE_CHECKED;

/* ---------------------------------------------------------------------- digests (digests.c) */

/* The table's units as JSON, for a slot's list; NULL without memory. */
json_t *moe_ckpt__digests(const struct moe_digest_table *table);
/* Puts the digest of the written model into the manifest, from the lists of its slots in the open
 * directory `state`. Errors: DATA_LOSS/MALFORMED (a list is damaged). */
struct moe_status moe_ckpt__add_model_digest(int state, json_t *manifest) MOE_CHECKED;

#endif
