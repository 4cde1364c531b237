/* SPDX-License-Identifier: Apache-2.0 */
/* Names that clients give to sessions, checkpoints and models. A checkpoint's name is a
 * directory name: every allowed name is a visible entry of its parent directory. */
#ifndef MOE_BASE_NAME_H
#define MOE_BASE_NAME_H

#include <stdbool.h>

enum { MOE_TRAINING_NAME_MAX = 64 }; /* characters */

/* 1 to 64 characters of [A-Za-z0-9._-], not beginning with a dot. */
bool moe_training_name_ok(const char *name);

#endif
