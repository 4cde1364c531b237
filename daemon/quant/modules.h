/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of modules: `ignore`, `modules_to_not_convert`, `targets` and their like.
 *
 * Entries of one list have one syntax, which depends on the producer:
 *
 *   PATHS   names separated by dots. They match a module that has them in this order, one after the
 *           other, anywhere in its path: "mlp.gate" matches "model.layers.0.mlp.gate" and not
 *           "model.layers.0.mlp.gate_proj". '*' matches any one name.
 *   EXACT   the module's whole path, or "re:" and a regular expression that matches the path's
 *           beginning, as Python's re.match. "Linear" matches all modules.
 *   GLOBS   a shell pattern for the whole path; '*' matches dots too.
 *
 * Regular expressions are POSIX extended ones, plus \d and (?:...). Escapes are \d and punctuation.
 * Others that Python knows (\w, (?=...), *?, {2}, back references) are refused by name.
 *
 * One thread at a time. */
#ifndef MOE_QUANT_MODULES_H
#define MOE_QUANT_MODULES_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

enum moe_modules_syntax { MOE_MODULES_PATHS, MOE_MODULES_EXACT, MOE_MODULES_GLOBS };

struct moe_modules;

struct moe_status moe_modules_create(enum moe_modules_syntax syntax,
                                     struct moe_modules **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_modules_destroy(struct moe_modules *m);

/* Copies `entry`. Errors: MOE_INVALID_ARGUMENT/CONFIG_UNKNOWN_KEY (a regular expression that is not
 * understood, by its text), CONFIG_INVALID (more than 65536 entries, or one of more than 512
 * bytes), OUT_OF_MEMORY. */
struct moe_status moe_modules_add(struct moe_modules *m, const char *entry) MOE_CHECKED;

/* True if an entry matches; NULL has no entries. */
bool moe_modules_match(const struct moe_modules *m, const char *path);

#endif
