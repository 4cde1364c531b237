/* SPDX-License-Identifier: Apache-2.0 */
/* Writes weights back with the names, layout and dtypes of the model.
 *
 * The result is a directory with the files of the model: same shards, headers and places. A program
 * that loads the model also loads the result, and unchanged weights are written bit for bit. One
 * process creates the frame (moe_model_write_frame): every file at its full length, with all data
 * except weights of MoE layers. Then any number of processes write their weights into it
 * (moe_model_write_layer); exactly one process writes each byte range.
 *
 * Everything is synced to disk before a function returns success. Threads: as in model.h. */
#ifndef MOE_MODEL_WRITE_H
#define MOE_MODEL_WRITE_H

#include "model/model.h"
#include "model/sha256.h"

/* Creates in the empty open directory `to`: every shard, with MoE weights as zeros, and copies of
 * the small files of the model (configuration, index, tokenizer; by extension), except the file
 * `except` (or NULL). Allocates the disk space for all files. `*bytes`: copied bytes. Errors:
 * MOE_RESOURCE_EXHAUSTED/IO (disk full), IO, OUT_OF_MEMORY. */
struct moe_status moe_model_write_frame(const struct moe_model *m, int to, const char *except,
                                        uint64_t *bytes) MOE_CHECKED;

/* Provides one canonical weight (moe/layer_spec.h) as fp32 [count]. */
typedef struct moe_status (*moe_weight_source)(void *ctx, enum moe_weight weight, uint32_t expert,
                                               float *to, size_t count);

/* A byte range that was written. */
struct moe_model_range {
    const char *shard;
    uint64_t offset, bytes; /* offset from the start of the file */
    char sha256[MOE_SHA256_HEX];
};
typedef struct moe_status (*moe_range_sink)(void *ctx, const struct moe_model_range *range);

/* Writes weights of layer `i` into a frame: those of `experts` (ascending), and with `replicated`
 * also all weights that do not belong to an expert. `digester` hashes what is written, for
 * moe_digester_finish, as if it had been loaded; NULL = none. Rounds to nearest even into BF16 and
 * F16 files, which is exact for values read from such a file. Calls `written` for every range; both
 * callbacks get `ctx`. Errors: those of the callbacks, IO, disk full as above, OUT_OF_MEMORY;
 * MOE_DATA_LOSS if a file of the frame has changed its length. */
struct moe_status moe_model_write_layer(const struct moe_model *m, int to, size_t i,
                                        bool replicated, const uint32_t *experts,
                                        size_t expert_count, moe_weight_source source,
                                        moe_range_sink written, void *ctx,
                                        struct moe_digester *digester) MOE_CHECKED;

enum { MOE_MODEL_NAME_MAX = 192 };
/* Name of the tensor of a weight; a fused one contains others, too (below). */
struct moe_status moe_model_weight_name(const struct moe_model *m, size_t i, enum moe_weight weight,
                                        uint32_t expert, char name[MOE_MODEL_NAME_MAX]) MOE_CHECKED;

/* Layout of the experts of layer `i`. */
struct moe_model_fusion {
    bool fused;       /* gate and up of all experts are one tensor, all downs another */
    bool interleaved; /* rows of gate and up alternate, gate first; else gate is above up */
    bool input_first; /* transformers has them as [E, in, out], and without the mark is_transposed
                         that says so elsewhere */
};
struct moe_model_fusion moe_model_layer_fusion(const struct moe_model *m, size_t i);

#endif
