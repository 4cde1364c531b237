/* SPDX-License-Identifier: Apache-2.0 */
/* A model directory as Hugging Face writes it: config.json, safetensors, index.
 *
 * Opening reads the configuration and the headers of the tensor files into one `struct
 * moe_layer_spec` per MoE layer. Only moe_model_load_layer reads weights. Unknown settings that
 * could change results are refused by name. daemon/model/README.md lists families and tensor names.
 */
#ifndef MOE_MODEL_H
#define MOE_MODEL_H

#include "base/status.h"
#include "model/digest_table.h"
#include "moe/layer_spec.h"
#include "moe/packed_matrix.h"
#include "moe/weight_source.h"

#include <stdatomic.h>

struct moe_device;
struct moe_model;

/* Errors: MOE_NOT_FOUND/IO (no such directory or file), MOE_INVALID_ARGUMENT with reason
 * CONFIG_UNKNOWN_KEY, CONFIG_INVALID, MALFORMED, TENSOR_MISSING, TENSOR_INVALID; texts name the key
 * or tensor, not the path. Threads: one model object per thread at a time. */
struct moe_status moe_model_open(const char *directory, struct moe_model **out) MOE_CHECKED;
/* The same for `name` inside the open directory `at`; not through a link. */
struct moe_status moe_model_open_at(int at, const char *name, struct moe_model **out) MOE_CHECKED;
void moe_model_close(struct moe_model *m);

const char *moe_model_name(const struct moe_model *m);   /* last component of the directory */
const char *moe_model_path(const struct moe_model *m);   /* of the directory, absolute and without
                                                            links; of moe_model_open_at, the name */
const char *moe_model_family(const struct moe_model *m); /* model_type */
/* Hex digest over the configuration and the names, dtypes, shapes and places of the layers'
 * tensors: equal on all workers that read the same checkpoint. */
const char *moe_model_fingerprint(const struct moe_model *m);

/* The schemes of quantised matrices, for people: "NVFP4 of ModelOpt, FP8". NULL: none is quantised.
 */
const char *moe_model_quantisation(const struct moe_model *m);

/* Keeps quantised matrices as they are in the formats that `computes` accepts (moe/backend.h): the
 * specs get these formats, and moe_model_stream_layer gives such matrices to `packed`. Without
 * this call, or with NULL, all matrices are decoded. Call it before anyone reads a spec.
 *
 * device  what `computes` is asked for
 * w8a8  FP8 matrices get the arithmetic that the checkpoint asks for. MOE_FAILED_PRECONDITION with
 *       UNSUPPORTED if it asks for none that is known, or if `computes` refuses it. Other matrices
 *       are as without it.
 * Errors: also as moe_model_open. */
struct moe_status moe_model_keep_quantised(struct moe_model *m, moe_computes_fn computes,
                                           const struct moe_device *device, bool w8a8) MOE_CHECKED;
/* Whether quantised matrices of routed or of shared experts are decoded, in any layer. */
bool moe_model_decodes(const struct moe_model *m);
/* Whether projections of a latent space are quantised, in any layer: they are always decoded. */
bool moe_model_decodes_projections(const struct moe_model *m);

/* MoE layers, ascending by spec.layer. */
size_t moe_model_layer_count(const struct moe_model *m);
const struct moe_layer_spec *moe_model_layer(const struct moe_model *m, size_t i);

/* The experts of each token id, in a layer with router.by_token. */
struct moe_token_table {
    uint32_t layer;      /* the model's layer index */
    uint32_t vocabulary; /* rows */
    uint32_t top_k;      /* K, columns */
    uint16_t *ids;       /* [vocabulary, K]: experts of the layer, one perhaps twice in a row */
};
/* Those of all such layers of a model; of zeros: none. */
struct moe_token_tables {
    struct moe_token_table *of; /* [count] */
    size_t count;
};

/* Reads the tables into memory of 2 bytes for each id, which does not need the model later. Errors:
 * MOE_INVALID_ARGUMENT/TENSOR_INVALID by the tensor's name (an id is no expert of the layer),
 * those of reading, OUT_OF_MEMORY. `*out` is to be freed on success only.
 */
struct moe_status moe_model_read_token_tables(const struct moe_model *m,
                                              struct moe_token_tables *out) MOE_CHECKED;
void moe_token_tables_free(struct moe_token_tables *t);
/* The table of a layer, by its index in the model; NULL: it has none. */
const struct moe_token_table *moe_token_tables_find(const struct moe_token_tables *t,
                                                    uint32_t layer);

/* Receives one weight in canonical form (moe/layer_spec.h); `data` is valid during the call. A
 * quantised weight comes as BF16, rounded to nearest even. */
typedef struct moe_status (*moe_weight_sink)(void *ctx, enum moe_weight weight, uint32_t expert,
                                             enum moe_dtype dtype, const void *data, size_t bytes);

/* Receives the source of one weight in canonical form, for any number of threads. The caller of
 * moe_model_stream_layer keeps a source valid: it does not close the model, nor free `sources` of
 * its sinks (weights that were gathered, scales). With a digester it also neither streams the next
 * layer nor calls moe_digester_finish or moe_digester_destroy. With a digester no byte of a source
 * is read twice: digests are of the bytes that were delivered. */
typedef struct moe_status (*moe_weight_source_sink)(void *ctx, enum moe_weight weight,
                                                    uint32_t expert, enum moe_dtype dtype,
                                                    const struct moe_weight_source *source,
                                                    size_t bytes);

/* Receives a matrix that has a format in its spec; the arrays are valid during the call. */
typedef struct moe_status (*moe_packed_sink)(void *ctx, enum moe_weight weight, uint32_t expert,
                                             const struct moe_packed_matrix *matrix);

/* The same for a source. One with gate and up by turns is given for gate, and none for up. */
typedef struct moe_status (*moe_packed_source_sink)(void *ctx, enum moe_weight weight,
                                                    uint32_t expert,
                                                    const struct moe_packed_source *source);

/* What sources need besides the model. Zeroed before the first use. */
struct moe_model_sources {
    struct moe_model_source *first; /* model room only */
};
/* Frees it, and makes it usable again. No source may be in use. */
void moe_model_sources_free(struct moe_model_sources *s);

/* Who takes the weights of a layer. */
struct moe_model_sinks {
    moe_weight_sink weight;
    moe_packed_sink packed; /* NULL: matrices with a format are decoded, and go to `weight` */
    /* Of a backend that reads for itself, else NULL: of weights that are in canonical form in the
     * file, and small ones that are not; of matrices that have rows in the form of
     * moe/packed_matrix.h there. All other weights are read, gathered or converted before. */
    moe_weight_source_sink source;
    moe_packed_source_sink packed_source; /* only with `packed` */
    void *ctx;                            /* of all four */
    struct moe_model_sources *sources;    /* must stay as long as the sources; not NULL with them */
};

/* Progress: bytes read from disk in this call, or passed to a moe_weight_source_sink. Called after
 * each weight. */
typedef void (*moe_load_progress)(void *ctx, uint64_t read_bytes);

/* Bytes that moe_model_load_layer will read from disk for these experts; 0 for arguments that it
 * refuses. */
uint64_t moe_model_layer_bytes(const struct moe_model *m, size_t i, const uint32_t *experts,
                               size_t expert_count);

/* Bytes of the same weights as they are given to the sinks: packed, where the spec has a format,
 * and else in canonical form; 0 as above. */
uint64_t moe_model_layer_memory(const struct moe_model *m, size_t i, const uint32_t *experts,
                                size_t expert_count);

/* Reads the weights of layer `i` that one slot needs, router, biases and shared experts included,
 * and only the rows of `experts` (ascending global ids) out of fused tensors. `sink` gets each
 * weight of the spec exactly once (experts: once per listed expert), decoded if it is quantised. */
struct moe_status moe_model_load_layer(const struct moe_model *m, size_t i, const uint32_t *experts,
                                       size_t expert_count, moe_weight_sink sink, void *ctx,
                                       moe_load_progress progress, void *progress_ctx) MOE_CHECKED;
/* Computes digests (model/digest.h) of the layers that it is given to moe_model_stream_layer for.
 */
struct moe_digester;

/* Its `threads` threads (1..64) read and hash the weights that the model room reads; weights that a
 * backend reads for itself are hashed by the backend's threads. Errors: OUT_OF_MEMORY. */
struct moe_status moe_digester_create(const struct moe_model *m, uint32_t threads,
                                      struct moe_digester **out) MOE_CHECKED;
/* Once `*cancelled` is true, reads of the digester's sources fail with MOE_ABORTED. It must stay as
 * long as the digester. No read is under way. */
void moe_digester_heed(struct moe_digester *d, const atomic_bool *cancelled);
/* No source of its layer may be in use. NULL is ignored. */
void moe_digester_destroy(struct moe_digester *d);
/* Adds the units of the layer that was streamed last to `table`. The backend has finished the
 * layer: no read is under way. Errors: OUT_OF_MEMORY, those of reading. */
struct moe_status moe_digester_finish(struct moe_digester *d,
                                      struct moe_digest_table *table) MOE_CHECKED;

/* The same for `sinks`. `digester` hashes all bytes as they are read; NULL = none. */
struct moe_status moe_model_stream_layer(const struct moe_model *m, size_t i,
                                         const uint32_t *experts, size_t expert_count,
                                         const struct moe_model_sinks *sinks,
                                         struct moe_digester *digester, moe_load_progress progress,
                                         void *progress_ctx) MOE_CHECKED;

#endif
