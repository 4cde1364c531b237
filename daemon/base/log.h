/* Levelled logging to stderr, one line per event, safe from any thread.
 *
 * Lines are `2026-01-31T12:00:00.123Z INFO  worker: text` or, with the JSON format, one object with
 * the same fields. Data on stdout, messages on stderr. Secrets are never logged. */
#ifndef MOE_BASE_LOG_H
#define MOE_BASE_LOG_H

#include "base/status.h"

enum moe_log_level { MOE_LOG_ERROR, MOE_LOG_WARN, MOE_LOG_INFO, MOE_LOG_DEBUG };
enum moe_log_format { MOE_LOG_TEXT, MOE_LOG_JSON };

/* Process-wide, settable at any time from any thread. `component` ("worker 2") must live for ever.
 */
void moe_log_set_level(enum moe_log_level level);
void moe_log_set_format(enum moe_log_format format);
void moe_log_set_component(const char *component);
/* "error", "warn", "info", "debug". */
bool moe_log_level_from_name(const char *name, enum moe_log_level *out);

void moe_log_write(enum moe_log_level level, const char *fmt, ...) MOE_PRINTF(2, 3);

#define moe_log_error(...) moe_log_write(MOE_LOG_ERROR, __VA_ARGS__)
#define moe_log_warn(...)  moe_log_write(MOE_LOG_WARN, __VA_ARGS__)
#define moe_log_info(...)  moe_log_write(MOE_LOG_INFO, __VA_ARGS__)
#define moe_log_debug(...) moe_log_write(MOE_LOG_DEBUG, __VA_ARGS__)

#endif
