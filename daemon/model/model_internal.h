/* What model.c and loader.c share. Internal to daemon/model. */
#ifndef MOE_MODEL_INTERNAL_H
#define MOE_MODEL_INTERNAL_H

#include "model/layout.h"
#include "model/model.h"
#include "model/sha256.h"

struct moe_model {
    char *name;
    struct moe_config config;
    struct moe_checkpoint *checkpoint;
    struct moe_layout layout;
    char fingerprint[MOE_SHA256_HEX];
};

#endif
