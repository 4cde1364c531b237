/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by model.c, loader.c, digester.c, frame.c and writer.c. Internal to daemon/model. */
#ifndef MOE_MODEL_INTERNAL_H
#define MOE_MODEL_INTERNAL_H

#include "model/layout.h"
#include "model/model.h"
#include "model/sha256.h"

struct moe_model {
    char *name;
    char *path;    /* absolute; NULL where opened below another directory */
    int directory; /* open */
    struct moe_config config;
    struct moe_checkpoint *checkpoint;
    struct moe_layout layout;
    char fingerprint[MOE_SHA256_HEX];
    char quantisation[160]; /* the names of the layout's schemes; empty: there is none */
};

/* The weights of a layer that are not an expert's (with `replicated`), then those of `experts`,
 * ascending, expert by expert: gate and up of a fused expert, which may share a byte range, follow
 * each other, and the pieces of one weight as in moe_layout_visit. Errors: LAYER_NOT_FOUND,
 * EXPERT_INDEX_RANGE, those of locating and of `visit`. */
struct moe_status moe_model__visit_layer(const struct moe_model *m, size_t layer, bool replicated,
                                         const uint32_t *experts, size_t expert_count,
                                         moe_piece_visitor visit, void *ctx) MOE_CHECKED;

/* For loader.c and writer.c: the hashing of one layer (digester.c). Ranges of a unit are added one
 * after the other; a range that is the same as the last one is added once. */

/* Forgets the layer before. With `replicated`, hashes the layer's table of token ids, which no
 * sink gets. */
struct moe_status moe_digester__begin(struct moe_digester *d, size_t layer,
                                      bool replicated) MOE_CHECKED;
/* Adds the range of a piece, and begins to hash it: `data` stays until moe_digester__wait, which
 * returns the first failure. */
struct moe_status moe_digester__hash(struct moe_digester *d, enum moe_weight weight,
                                     uint32_t expert, const struct moe_piece *p,
                                     const void *data) MOE_CHECKED;
struct moe_status moe_digester__wait(struct moe_digester *d) MOE_CHECKED;
/* Adds the range of a piece; reads it to `to` [p->bytes] and hashes it, on all threads. */
struct moe_status moe_digester__read(struct moe_digester *d, enum moe_weight weight,
                                     uint32_t expert, const struct moe_piece *p,
                                     void *to) MOE_CHECKED;
/* Adds a range that a backend reads for itself: replaces `source` by one that hashes what is read.
 * It is valid until the next begin, finish or destroy. */
struct moe_status moe_digester__watch(struct moe_digester *d, enum moe_weight weight,
                                      uint32_t expert, const struct moe_piece *p,
                                      struct moe_weight_source *source) MOE_CHECKED;

#endif
