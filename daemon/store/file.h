/* SPDX-License-Identifier: Apache-2.0 */
/* The store in a directory: a log (store/records.h) with the record at its end, and a file for each
 * image. Each append writes the record with a checksum and syncs. Opening it never loses an
 * acknowledged record silently: a bad end of the file is reported, other damage is refused. */
#ifndef MOE_STORE_FILE_H
#define MOE_STORE_FILE_H

#include "store/store.h"

#include <stdbool.h>

/* Above this size, a file with only the last record replaces the log. */
enum { MOE_STORE_COMPACT_BYTES = 65536 };

/* The file of image 0; that of image N > 0 has ".N" behind. */
#define MOE_STORE_IMAGE "model.digests"

/* Opens the store in `directory` (made, if its parent exists) and locks it. Nothing is written: the
 * next append makes the log where there is none, and replaces one with an incomplete end or an
 * older format.
 *
 * If the log was removed, also with its directory, append creates it again and logs a warning.
 * After a failure the old content stays, and the next append starts a new file.
 *
 * format  borrowed
 * Errors: MOE_ALREADY_EXISTS (another process has it open), those of moe_records_read,
 * MOE_PERMISSION_DENIED (others may write to the directory), MOE_UNAVAILABLE/IO, OUT_OF_MEMORY. */
struct moe_status moe_store_file_open(const char *directory, const struct moe_store_format *format,
                                      struct moe_store **out,
                                      struct moe_store_found *found) MOE_CHECKED;

#endif
