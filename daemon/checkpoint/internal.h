/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of checkpoints share; nobody else includes this. */
#ifndef MOE_CHECKPOINT_INTERNAL_H
#define MOE_CHECKPOINT_INTERNAL_H

#include "checkpoint/checkpoint.h"
#include "model/model_write.h"
#include "model/safetensors.h"

#include <dirent.h>
#include <jansson.h>

#define MOE_CKPT_MANIFEST "manifest.json"
#define MOE_CKPT_FORMAT   "moed checkpoint"
#define MOE_CKPT_STATE    "optimizer" /* directory of everything that is not the model's */
#define MOE_CKPT_RECORDS  "records.bin"

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
/* [call with errors of reading] A damaged checkpoint is DATA_LOSS/MALFORMED, whatever the reader
 * called it. */
struct moe_status moe_ckpt__damaged(struct moe_status st) MOE_CHECKED;
/* MOE_CANCELLED once the phase has been called off. */
struct moe_status moe_ckpt__go_on(const struct moe_checkpoint_context *c) MOE_CHECKED;

/* ------------------------------------------------------------- directories (files.c)
 *
 * Every name is opened inside an open directory and never through a link. */

struct moe_status moe_ckpt__open_root(const char *root, int *fd) MOE_CHECKED;
/* NOT_FOUND/IO where there is none. */
struct moe_status moe_ckpt__open_dir(int at, const char *name, int *fd) MOE_CHECKED;
/* A fresh hidden directory for `name`, ".NAME.WRITER.saving": no client can name it, and no process
 * that was the writer before touches it. CHECKPOINT_EXISTS where the name is taken. What crashed
 * processes left under hidden names is removed; failures of that are logged. */
struct moe_status moe_ckpt__begin(const struct moe_checkpoint_context *c, const char *name,
                                  int *hidden) MOE_CHECKED;
/* Opens the hidden directory of `name`. */
struct moe_status moe_ckpt__join(const struct moe_checkpoint_context *c, const char *name,
                                 int *hidden) MOE_CHECKED;
/* The hidden directory becomes `name`, durably. */
struct moe_status moe_ckpt__publish(const struct moe_checkpoint_context *c,
                                    const char *name) MOE_CHECKED;
/* Removes the hidden directory; failures are logged. */
void moe_ckpt__abandon(const struct moe_checkpoint_context *c, const char *name);
/* The names in the training directory: *names, which the caller closes with closedir. */
struct moe_status moe_ckpt__open_names(int root, DIR **names) MOE_CHECKED;
/* Removes `name` in `at` with all that it holds. */
struct moe_status moe_ckpt__remove_tree(int at, const char *name) MOE_CHECKED;
/* A new file, synced. `sha256` may be NULL. */
struct moe_status moe_ckpt__write_file(int at, const char *name, const void *data, size_t bytes,
                                       char *sha256) MOE_CHECKED;
struct moe_status moe_ckpt__write_json(int at, const char *name, const json_t *json,
                                       char *sha256) MOE_CHECKED;
struct moe_status moe_ckpt__sync(int directory) MOE_CHECKED;
/* [counts as processed; ends when called off] Hash of bytes [offset, offset + bytes) of a file, all
 * of it with bytes = UINT64_MAX. */
struct moe_status moe_ckpt__hash(const struct moe_checkpoint_context *c, int at, const char *name,
                                 uint64_t offset, uint64_t bytes,
                                 char sha256[MOE_SHA256_HEX]) MOE_CHECKED;
/* ---------------------------------------------------------------- writers (writers.c)
 *
 * Several groups may write below one root. The process that writes for one holds a lock on a file
 * there, ".WRITER.writer", which the kernel gives back whatever its end: what has that writer's
 * number in its name and no such lock is nobody's any more. */

#define MOE_CKPT_WRITER ".writer" /* how the name of such a file ends */

/* This process's file is there and locked until it is hidden. Where the file system has no locks,
 * the log says so. */
struct moe_status moe_ckpt__show_writer(const struct moe_checkpoint_context *c,
                                        int root) MOE_CHECKED;
void moe_ckpt__hide_writer(const struct moe_checkpoint_context *c, int root);
/* Whether the writer of the hidden `name` may still be writing it: another process that holds its
 * lock, or of which nobody can tell. */
bool moe_ckpt__is_written(const struct moe_checkpoint_context *c, int root, const char *name);
/* Removes a file ".WRITER.writer" whose writer has gone. */
void moe_ckpt__sweep_writer(int root, const char *file);

/* ---------------------------------------------------------------- tensors (tensors.c)
 */

/* One tensor of the training state, as it is called in a file. */
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
/* With `writing` those that this slot writes: each tensor of the group is one slot's. Without:
 * those that this slot has to be given, in the order in which they are to be written to trainers.
 */
struct moe_status moe_ckpt__list(const struct moe_checkpoint_context *c, bool writing,
                                 struct moe_ckpt_tensors *out) MOE_CHECKED;
/* Those that this slot writes, and the values of all weights that it writes into the model's files,
 * each once. */
struct moe_status moe_ckpt__list_copied(const struct moe_checkpoint_context *c,
                                        struct moe_ckpt_tensors *out) MOE_CHECKED;
void moe_ckpt__list_free(struct moe_ckpt_tensors *t);
/* Reads one from the copy, or from its trainer. copy.c. */
struct moe_status moe_ckpt__read(const struct moe_checkpoint_context *c,
                                 const struct moe_ckpt_tensor *t, float *to,
                                 size_t bytes) MOE_CHECKED;
/* Experts of a layer that this slot writes, or holds; ascending. Returns how many. */
size_t moe_ckpt__experts(const struct moe_checkpoint_context *c, size_t layer, bool writing,
                         uint32_t experts[MOE_MAX_EXPERTS]);
bool moe_ckpt__is_lowest(const struct moe_checkpoint_context *c);

/* True when the trainer's state has the value of this weight (a master, or W0 and an adapter);
 * otherwise the model's file has it exactly. */
bool moe_ckpt__has_value(const struct moe_checkpoint_context *c, size_t layer,
                         enum moe_weight weight);

/* The same of the weight itself, not only an adapter of it. */
bool moe_ckpt__has_master(const struct moe_checkpoint_context *c, size_t layer,
                          enum moe_weight weight);

/* ------------------------------------------------------------- settings (settings.c) */

/* One more than the highest of the root: newer checkpoints have higher ones. */
struct moe_status moe_ckpt__next_sequence(const char *root, json_int_t *sequence) MOE_CHECKED;
/* Retention (moe_checkpoint_save_tidy); `keep` is above 0. */
struct moe_status moe_ckpt__keep_newest(const struct moe_checkpoint_context *c, const char *newest,
                                        uint32_t keep,
                                        struct moe_checkpoint_removed *removed) MOE_CHECKED;
/* A list of names; NULL without memory. Reading takes what is sound, for it only spares. */
json_t *moe_ckpt__explicit_loads(const struct moe_checkpoint_explicit_loads *loads);
void moe_ckpt__read_explicit_loads(const json_t *manifest,
                                   struct moe_checkpoint_explicit_loads *out);
/* What the manifest says of model, optimizer and adapters; compared as JSON when it is read. */
json_t *moe_ckpt__settings(const struct moe_checkpoint_context *c);
/* Whether a checkpoint of this manifest was made with the settings of these workers. Errors:
 * FAILED_PRECONDITION/VERSION_MISMATCH, whose text has both, as options of moe-worker. */
struct moe_status moe_ckpt__check_settings(const struct moe_checkpoint_context *c,
                                           const json_t *manifest) MOE_CHECKED;
/* Whether an open directory is a checkpoint, by its manifest's being there. Errors:
 * FAILED_PRECONDITION, whose text says what it is instead. */
struct moe_status moe_ckpt__check_kind(int directory) MOE_CHECKED;
/* Whether `at` holds `name`; links are not followed. */
bool moe_ckpt__is_there(int at, const char *name);

/* --------------------------------------------------------------------- manifest (manifest.c) */

void moe_ckpt__state_file(char name[MOE_CKPT_FILE_MAX], uint32_t slot, const char *extension);
/* Hash of the manifest without the member "sha256". */
struct moe_status moe_ckpt__manifest_hash(const json_t *manifest,
                                          char sha256[MOE_SHA256_HEX]) MOE_CHECKED;
/* An opened checkpoint's manifest, whole and of this format. Errors: DATA_LOSS/MALFORMED. */
struct moe_status moe_ckpt__read_manifest(int directory, json_t **out) MOE_CHECKED;

#endif
