/* SPDX-License-Identifier: Apache-2.0 */
/* A tar archive (ustar) of texts without secrets. */
#ifndef MOECTL_ARCHIVE_H
#define MOECTL_ARCHIVE_H

#include "base/status.h"

#include <stddef.h>

struct moectl_archive;

/* Creates `path`, mode 0600, with all entries below the folder `folder`. Errors:
 * MOE_ALREADY_EXISTS; those of the file system. */
struct moe_status moectl_archive_create(const char *path, const char *folder,
                                        struct moectl_archive **out) MOE_CHECKED;
/* A text that no later entry may contain: it is replaced by [removed]. Copied; shorter ones than 8
 * bytes are ignored. */
void moectl_archive_hide(struct moectl_archive *a, const char *secret);
/* Adds a text. Removes private keys, the words after "Bearer", and hidden texts from it. A failure
 * is reported by moectl_archive_close. */
void moectl_archive_add(struct moectl_archive *a, const char *name, const char *text);
/* Ends the archive and frees `a`. After a failure, the file is removed. */
struct moe_status moectl_archive_close(struct moectl_archive *a) MOE_CHECKED;

#endif
