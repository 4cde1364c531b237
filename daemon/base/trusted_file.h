/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a small file that decides about trust, and notices when it changes. Checks the directories
 * of such files. */
#ifndef MOE_BASE_TRUSTED_FILE_H
#define MOE_BASE_TRUSTED_FILE_H

#include "base/status.h"

#include <stddef.h>
#include <sys/stat.h>

enum { MOE_TRUSTED_FILE_MAX = 1 << 20 };

/* What was seen of a file at the last look. */
struct moe_trusted_mark {
    struct stat stat; /* zero: the file was missing */
};

/* True when the file is another than at the last look: replaced, written, or its mode or owner was
 * changed. Updates the mark. */
bool moe_trusted_file_changed(const char *path, struct moe_trusted_mark *mark);

/* The content with a final 0; free it. Refuses a file that is not regular, that another user than
 * this one or root owns, or with one of the mode bits `forbidden`. `setting` ("--token-file")
 * begins the error text. Errors: MOE_NOT_FOUND/IO, MOE_FAILED_PRECONDITION/IO (unreadable),
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (owner or mode), MOE_INVALID_ARGUMENT/TOO_LARGE. */
struct moe_status moe_trusted_file_read(const char *setting, const char *path, unsigned forbidden,
                                        char **text, size_t *length) MOE_CHECKED;

/* Refuses an open directory in which other users can replace files: that of another user than this
 * one or root, or with write permission for group or others. `path` is for the text. Errors:
 * MOE_PERMISSION_DENIED/IO, MOE_UNAVAILABLE/IO. */
struct moe_status moe_trusted_directory_check(const char *path, int fd) MOE_CHECKED;

/* Characters of a token: printable ASCII without blanks. */
enum { MOE_TOKEN_MIN = 16, MOE_TOKEN_MAX = 512 };
/* Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID (length or characters). The text does not hold the
 * token. */
struct moe_status moe_token_check(const char *token) MOE_CHECKED;
/* A token: the first line of a file that other users cannot read (mode 0600, or 0640 for a group).
 * Free it. Errors: as above, and those of moe_token_check. */
struct moe_status moe_token_read(const char *setting, const char *path, char **token) MOE_CHECKED;

#endif
