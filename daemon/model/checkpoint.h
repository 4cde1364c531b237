/* SPDX-License-Identifier: Apache-2.0 */
/* All tensors of a model directory, in one file or many shards.
 *
 * Owns the open shards. Never reads tensor bytes. Internal to daemon/model. */
#ifndef MOE_MODEL_CHECKPOINT_H
#define MOE_MODEL_CHECKPOINT_H

#include "model/safetensors.h"

#include <jansson.h>

struct moe_checkpoint;

struct moe_checkpoint_tensor {
    const struct moe_st_file *file;
    const char *shard; /* file name */
    const struct moe_tensor *tensor;
};

/* Opens the shards that model.safetensors.index.json names, or model.safetensors.
 * Errors: those of moe_st_open_at; MALFORMED (index), TENSOR_MISSING (a shard lacks a tensor that
 * the index lists), MOE_NOT_FOUND/IO (neither file exists). */
struct moe_status moe_checkpoint_open(int directory, struct moe_checkpoint **out) MOE_CHECKED;
void moe_checkpoint_close(struct moe_checkpoint *c);

/* False when there is no such tensor. */
bool moe_checkpoint_find(const struct moe_checkpoint *c, const char *name,
                         struct moe_checkpoint_tensor *out);

/* All tensors, by name. */
size_t moe_checkpoint_count(const struct moe_checkpoint *c);
const struct moe_tensor *moe_checkpoint_tensor(const struct moe_checkpoint *c, size_t i);

/* The files, in no order. */
size_t moe_checkpoint_shards(const struct moe_checkpoint *c);
const struct moe_st_file *moe_checkpoint_shard(const struct moe_checkpoint *c, size_t i,
                                               const char **name);

/* Checks a parsed index: {"weight_map": {tensor: file name}}, file names plain. `*map` is borrowed
 * from `index`. */
struct moe_status moe_checkpoint_check_index(const json_t *index, json_t **map) MOE_CHECKED;

#endif
