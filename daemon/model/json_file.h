/* Reading whole, small files of a model directory, and strict JSON.
 *
 * One place decides what is refused everywhere: duplicate keys, bad UTF-8, trailing bytes, nesting
 * without end, links, names that leave the directory. Internal to daemon/model. */
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

/* An object from `length` bytes; `what` ("config.json") names it in the error text. Free with
 * json_decref. Errors: MOE_INVALID_ARGUMENT/MALFORMED. */
struct moe_status moe_json_parse(const char *text, size_t length, const char *what,
                                 json_t **out) MOE_CHECKED;

/* The same from a file. Errors: also TOO_LARGE (more than `limit` bytes) and those of opening. */
struct moe_status moe_json_read_at(int directory, const char *name, size_t limit,
                                   json_t **out) MOE_CHECKED;

#endif
