/* Writing weights back under the names, in the layout and in the dtype in which they were read.
 *
 * The result is a directory of the same files as the model's: same shards, same headers, same
 * places. So whatever loads the one loads the other, and a model that nothing was learnt by is
 * written bit for bit. One process makes the frame (moe_model_write_frame): every file, at its full
 * length, with all that is not a weight of a MoE layer. Then any number of processes write the
 * weights that are theirs into it (moe_model_write_layer), each byte range once and by one of them.
 *
 * Everything is synced to disk before a function returns success. Threads: as in model.h. */
#ifndef MOE_MODEL_WRITE_H
#define MOE_MODEL_WRITE_H

#include "model/model.h"
#include "model/sha256.h"

/* Makes, in the empty open directory `to`: every shard, its MoE weights as zeros, and copies of the
 * small files beside them (configuration, index, tokenizer; by their extensions), except one called
 * `except` (or NULL). Room for all of it is taken from the disk here. `*bytes`: copied.
 * Errors: MOE_RESOURCE_EXHAUSTED/IO (disk full), IO, OUT_OF_MEMORY. */
struct moe_status moe_model_write_frame(const struct moe_model *m, int to, const char *except,
                                        uint64_t *bytes) MOE_CHECKED;

/* Brings one weight, canonical (moe/layer_spec.h), as fp32 [count]. */
typedef struct moe_status (*moe_weight_source)(void *ctx, enum moe_weight weight, uint32_t expert,
                                               float *to, size_t count);

/* A byte range that was written. */
struct moe_model_range {
    const char *shard;
    uint64_t offset, bytes; /* offset from the start of the file */
    char sha256[MOE_SHA256_HEX];
};
typedef struct moe_status (*moe_range_sink)(void *ctx, const struct moe_model_range *range);

/* Writes weights of layer `i` into a frame: with `replicated` all that are not an expert's, and
 * those of `experts` (ascending). Values are rounded to nearest even into BF16 and F16 files; what
 * came from such a file is written as it was. `written` is told of every range; both callbacks get
 * `ctx`. Errors: those of the callbacks, IO, disk full as above, OUT_OF_MEMORY; MOE_DATA_LOSS
 * where a file of the frame is not as long as it was made. */
struct moe_status moe_model_write_layer(const struct moe_model *m, int to, size_t i,
                                        bool replicated, const uint32_t *experts,
                                        size_t expert_count, moe_weight_source source,
                                        moe_range_sink written, void *ctx) MOE_CHECKED;

enum { MOE_MODEL_NAME_MAX = 192 };
/* Name of the tensor that holds a weight: this one alone, or fused with others (below). */
struct moe_status moe_model_weight_name(const struct moe_model *m, size_t i, enum moe_weight weight,
                                        uint32_t expert, char name[MOE_MODEL_NAME_MAX]) MOE_CHECKED;

/* How layer `i` keeps its experts. */
struct moe_model_fusion {
    bool fused;       /* gate and up of all experts are one tensor, all downs another */
    bool interleaved; /* rows of gate and up alternate, gate first; else gate is above up */
    bool input_first; /* transformers has them as [E, in, out], and without the mark is_transposed
                         that says so elsewhere */
};
struct moe_model_fusion moe_model_layer_fusion(const struct moe_model *m, size_t i);

#endif
