/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations for tests: those of the golden models, and what must have become of one. */
#ifndef MOE_TEST_CONFIG_FIXTURE_H
#define MOE_TEST_CONFIG_FIXTURE_H

#include "model/config.h"
#include "support/check.h"

#include <jansson.h>

struct moe_status read_text(const char *text, struct moe_config *out);

/* config.json of a golden model; the caller's to free. */
json_t *golden(const char *family);

/* Layers `first`, first + 1, ... `count` of them, all like `want`. */
void check_config(const struct moe_config *c, uint32_t first, size_t count,
                  struct moe_layer_spec want);
/* The same of a golden model. */
void check_golden(const char *family, uint32_t first, size_t count, struct moe_layer_spec want);

/* Reads `root` with another setting in `object`, a part of it. `value` is JSON; NULL: without the
 * key. Frees `root`. */
struct moe_status read_with(json_t *root, json_t *object, const char *key, const char *value);

/* What most families have in common: no groups. */
#define ROUTER(...)                                                                                \
    {                                                                                              \
        .groups = 1, .topk_group = 1, .group_best = 1, __VA_ARGS__                                 \
    }

#endif
