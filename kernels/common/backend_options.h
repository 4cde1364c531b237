/* SPDX-License-Identifier: Apache-2.0 */
/* Settings against a backend's table of options: the one check for all backends. */
#ifndef MOE_BACKEND_OPTIONS_H
#define MOE_BACKEND_OPTIONS_H

#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks `settings` and finds their values.
 *
 * options   the backend's table; NULL = it has none, so that each setting is refused
 * settings  NULL = none; of two for one option the later counts
 * chosen    one entry per option: the place of its value among the option's words, 0 if not set.
 *           Written only for a table.
 * Errors: MOE_INVALID_ARGUMENT with CONFIG_UNKNOWN_KEY (no such option) or CONFIG_INVALID (no such
 *         value), with the name. */
struct moe_status moe_backend_choose(const struct moe_backend_option *options,
                                     const struct moe_backend_setting *settings,
                                     uint32_t *chosen) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
