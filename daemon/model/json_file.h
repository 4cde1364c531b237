/* SPDX-License-Identifier: Apache-2.0 */
/* Reads small files of a model directory, and strict JSON.
 *
 * Refuses duplicate keys, bad UTF-8, trailing bytes, deep nesting, links, and names outside the
 * directory. Internal to daemon/model. */
#ifndef MOE_MODEL_JSON_FILE_H
#define MOE_MODEL_JSON_FILE_H

#include "base/status.h"

#include <jansson.h>
#include <stddef.h>

/* [A-Za-z0-9._-]{1,128} without a leading dot: such a name cannot leave its directory. */
bool moe_file_name_is_plain(const char *name);

/* A regular file `name` inside `directory`, opened for reading; links are refused. Errors:
 * MOE_INVALID_ARGUMENT/MALFORMED (name), MOE_NOT_FOUND/IO, MOE_INVALID_ARGUMENT/IO (a link, or not
 * a regular file). */
struct moe_status moe_file_open_at(int directory, const char *name, int *fd,
                                   uint64_t *size) MOE_CHECKED;

/* `length` bytes from `offset`. Errors: MOE_DATA_LOSS/TRUNCATED (the file became shorter), IO. */
struct moe_status moe_file_read(int fd, uint64_t offset, void *to, uint64_t length) MOE_CHECKED;

/* Maximum values of a document: about 100 MB of memory. The index of a model has one value for each
 * tensor. */
enum { MOE_JSON_VALUES_MAX = 1 << 19 };

/* A member of a JSON object: the text of its name, in quotes, and of its value. */
struct moe_json_member {
    const char *name, *value;
    size_t name_length, value_length;
};

/* Walks the members of the object in `text` without a tree, for objects too large for one. `*at` is
 * 0 for the first call. False at the end (`*at` is `length` then), or when the text is not an
 * object
 * (`*at` is less). Checks only separators: the caller parses names and values with
 * moe_json_parse_piece, which refuses invalid JSON. */
bool moe_json_next_member(const char *text, size_t length, size_t *at, struct moe_json_member *out);

/* Any value, not only an object. Errors: as moe_json_parse. */
struct moe_status moe_json_parse_piece(const char *text, size_t length, const char *what,
                                       json_t **out) MOE_CHECKED;

/* An object from `length` bytes; `what` ("config.json") names it in the error text. Free with
 * json_decref. Errors: MOE_INVALID_ARGUMENT with MALFORMED or TOO_LARGE (more than
 * MOE_JSON_VALUES_MAX values). */
struct moe_status moe_json_parse(const char *text, size_t length, const char *what,
                                 json_t **out) MOE_CHECKED;

/* The same from a file. Further errors: TOO_LARGE (more than `limit` bytes), and those of opening.
 */
struct moe_status moe_json_read_at(int directory, const char *name, size_t limit,
                                   json_t **out) MOE_CHECKED;

#endif
