/* SPDX-License-Identifier: Apache-2.0 */
/* Makes and passes on the errors of moe/status.h, inside moed.
 *
 * Texts never name internal paths, shared-memory names, pointers or secrets: they reach clients. */
#ifndef MOE_BASE_STATUS_H
#define MOE_BASE_STATUS_H

#include "moe/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* A failure with a formatted sentence (cut at MOE_STATUS_TEXT - 1 bytes). */
struct moe_status moe_error(enum moe_code code, enum moe_reason reason, const char *fmt, ...)
    MOE_PRINTF(3, 4) MOE_CHECKED;

/* The same with a retry hint. */
struct moe_status moe_error_retry(enum moe_code code, enum moe_reason reason,
                                  uint32_t retry_after_ms, const char *fmt, ...)
    MOE_PRINTF(4, 5) MOE_CHECKED;

/* `s` with "context: " before its text; success stays success. */
struct moe_status moe_error_context(struct moe_status s, const char *fmt, ...)
    MOE_PRINTF(2, 3) MOE_CHECKED;

#define MOE_GLUE2(a, b) a##b
#define MOE_GLUE(a, b)  MOE_GLUE2(a, b)

/* Returns a failure of `expr` to the caller. For functions that own nothing at that point. */
#define MOE_TRY(expr)                                                                              \
    do {                                                                                           \
        struct moe_status MOE_GLUE(moe_try_, __LINE__) = (expr);                                   \
        if (MOE_GLUE(moe_try_, __LINE__).code != MOE_OK)                                           \
            return MOE_GLUE(moe_try_, __LINE__);                                                   \
    } while (0)

/* Stores the status in `st` and jumps to the cleanup label on failure. */
#define MOE_TRY_GOTO(st, expr, label)                                                              \
    do {                                                                                           \
        (st) = (expr);                                                                             \
        if ((st).code != MOE_OK)                                                                   \
            goto label;                                                                            \
    } while (0)

/* An invariant of this project's code, always checked: logs file, line and condition, then aborts.
 * Never for input, sizes, or results of a library or peer. */
#define MOE_INVARIANT(cond)                                                                        \
    ((cond) ? (void)0 : moe_invariant_failed(__FILE_NAME__, __LINE__, #cond))
__attribute__((noreturn)) void moe_invariant_failed(const char *file, int line, const char *cond);

#ifdef __cplusplus
}
#endif

#endif
