/* SPDX-License-Identifier: Apache-2.0 */
/* Which names are legal. */
#ifndef MOE_BASE_NAME_H
#define MOE_BASE_NAME_H

#include <stdbool.h>
#include <stddef.h>

/* Names that clients give to sessions, checkpoints and models. A checkpoint's name is a directory
 * name: every allowed name is a visible entry of its parent directory. */
enum { MOE_TRAINING_NAME_MAX = 64 }; /* characters */
/* 1 to 64 characters of [A-Za-z0-9._-], not beginning with a dot. */
bool moe_training_name_ok(const char *name);

/* 1 to `max` printable ASCII characters, none of them a blank, a quote or a backslash: the text may
 * stand in logs, documents and commands as it is. */
bool moe_word_ok(const char *text, size_t max);

/* The name of a worker is such a word. */
enum { MOE_WORKER_ID_MAX = 127 }; /* characters */

#endif
