/* SPDX-License-Identifier: Apache-2.0 */
/* Levelled logging to stderr or to a file, one line per event, safe from any thread.
 *
 * Lines are `2026-01-31T12:00:00.123Z INFO  worker: text` or, with the JSON format, one object:
 *
 *   {"time":"2026-01-31T12:00:00.123Z","level":"info","component":"worker 2","message":"text",
 *    "request":"7","trace":"4bf92f35...","epoch":5,"slot":2,"layer":3}
 *
 * Fields from "request" on are there where they are known. The text format shows those of a single
 * event, at the end of the line. Texts may contain strings from peers: control characters (C0, DEL,
 * C1), format characters of Unicode and bytes that are not UTF-8 are escaped, so each event is one
 * line, cannot control a terminal, and shows its characters in their order.
 *
 *   in the text      text format   JSON format
 *   newline, tab     \n, \t        \n, \t
 *   C0, DEL          \x1b          \u001b
 *   C1               \u009b        \u009b
 *   format           \u202e        \u202e
 *   above U+FFFF     \U000e0001    \udb40\udc01
 *   not UTF-8        \xff          \ufffd
 *   backslash        \\            \\
 *
 * Data on stdout, messages on stderr. Never log secrets. */
#ifndef MOE_BASE_LOG_H
#define MOE_BASE_LOG_H

#include "base/status.h"

#include <stddef.h>

enum moe_log_level { MOE_LOG_ERROR, MOE_LOG_WARN, MOE_LOG_INFO, MOE_LOG_DEBUG };
enum moe_log_format { MOE_LOG_TEXT, MOE_LOG_JSON };

/* Process-wide, settable at any time from any thread. `component` ("worker 2") is static.
 */
void moe_log_set_level(enum moe_log_level level);
void moe_log_set_format(enum moe_log_format format);
void moe_log_set_component(const char *component);
/* "error", "warn", "info", "debug". */
bool moe_log_level_from_name(const char *name, enum moe_log_level *out);
const char *moe_log_level_name(enum moe_log_level level);
enum moe_log_level moe_log_level(void);
/* Whether lines of `level` are written: for callers that would compute much for one. */
bool moe_log_is_on(enum moe_log_level level);
/* Fields of all further lines: the slot of this worker, and the epoch in force (0 = none). */
void moe_log_set_slot(uint32_t slot);
void moe_log_set_epoch(uint64_t epoch);

/* Redirects stderr, which this log and libraries write to, to the end of file `path`; also stdout
 * if it is the same file as stderr. Creates a missing file with mode 0640. `path` is static.
 * Never blocks. Errors: MOE_FAILED_PRECONDITION/IO, and CONFIG_INVALID for a path that is neither a
 * regular file nor a character device (a FIFO may block every line); nothing changes then. */
struct moe_status moe_log_open(const char *path) MOE_CHECKED;
/* NULL until moe_log_open has succeeded. */
const char *moe_log_path(void);
/* Reopens the file by its name, for example after a rename. Does nothing without a file. After an
 * error, lines go to the old file. */
struct moe_status moe_log_reopen(void) MOE_CHECKED;

/* A line that cannot be written, as on a full disk, is lost; once lines can be written again, one
 * says how many are. */
void moe_log_write(enum moe_log_level level, const char *fmt, ...) MOE_PRINTF(2, 3);

/* What a single event is about; zeroes for what is not known. Strings are escaped as texts are. */
struct moe_log_fields {
    const char *request, *trace;
    uint32_t layer_plus_one;
};
void moe_log_write_about(enum moe_log_level level, const struct moe_log_fields *about,
                         const char *fmt, ...) MOE_PRINTF(3, 4);

/* The longest escape of one character, and a zero. An escape is at most four times its text. */
enum { MOE_LOG_ESCAPE_BYTES = 13 };
/* Writes `text` to `to`, escaped as in the text format above, cut where `cap` bytes (at least
 * MOE_LOG_ESCAPE_BYTES) are too few. For other output that shows strings from peers. */
void moe_log_escape(char *to, size_t cap, const char *text);

#define moe_log_error(...) moe_log_write(MOE_LOG_ERROR, __VA_ARGS__)
#define moe_log_warn(...)  moe_log_write(MOE_LOG_WARN, __VA_ARGS__)
#define moe_log_info(...)  moe_log_write(MOE_LOG_INFO, __VA_ARGS__)
#define moe_log_debug(...) moe_log_write(MOE_LOG_DEBUG, __VA_ARGS__)

#endif
