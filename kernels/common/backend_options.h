/* SPDX-License-Identifier: Apache-2.0 */
/* Checks settings against a backend's table of options, for all backends. */
#ifndef MOE_BACKEND_OPTIONS_H
#define MOE_BACKEND_OPTIONS_H

#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks `settings` and finds their values.
 *
 * options   the backend's table; NULL = no options, so every setting is refused
 * settings  NULL = none; the last setting of an option counts
 * chosen    one entry per option: the index of its value in option.values, 0 if not set. Not
 *           written if `options` is NULL.
 * Errors: MOE_INVALID_ARGUMENT with CONFIG_UNKNOWN_KEY (no such option) or CONFIG_INVALID (no such
 *         value); the text has the name. */
struct moe_status moe_backend_choose(const struct moe_backend_option *options,
                                     const struct moe_backend_setting *settings,
                                     uint32_t *chosen) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
