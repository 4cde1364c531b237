/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by model.c, loader.c, frame.c and writer.c. Internal to daemon/model. */
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
};

/* Visits one piece. */
typedef struct moe_status (*moe_piece_visitor)(void *ctx, enum moe_weight weight, uint32_t expert,
                                               const struct moe_piece *piece);

/* The weights of a layer that are not an expert's (with `replicated`), then those of `experts`,
 * ascending, expert by expert: gate and up of a fused expert, which may share a byte range, follow
 * each other. Errors: LAYER_NOT_FOUND, EXPERT_INDEX_RANGE, those of locating and of `visit`. */
struct moe_status moe_model__visit_layer(const struct moe_model *m, size_t layer, bool replicated,
                                         const uint32_t *experts, size_t expert_count,
                                         moe_piece_visitor visit, void *ctx) MOE_CHECKED;

#endif
