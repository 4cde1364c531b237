/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct moe_status make(enum moe_code code, enum moe_reason reason, uint32_t retry_after_ms,
                              const char *fmt, va_list args)
{
    struct moe_status s = {.code = code, .reason = reason, .retry_after_ms = retry_after_ms};
    if (vsnprintf(s.text, sizeof s.text, fmt, args) < 0)
        s.text[0] = '\0';
    return s;
}

struct moe_status moe_error(enum moe_code code, enum moe_reason reason, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    struct moe_status s = make(code, reason, 0, fmt, args);
    va_end(args);
    return s;
}

struct moe_status moe_error_retry(enum moe_code code, enum moe_reason reason,
                                  uint32_t retry_after_ms, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    struct moe_status s = make(code, reason, retry_after_ms, fmt, args);
    va_end(args);
    return s;
}

struct moe_status moe_error_context(struct moe_status s, const char *fmt, ...)
{
    if (s.code == MOE_OK)
        return s;
    va_list args;
    va_start(args, fmt);
    struct moe_status out = make(s.code, s.reason, s.retry_after_ms, fmt, args);
    va_end(args);
    size_t n = strlen(out.text);
    snprintf(out.text + n, sizeof out.text - n, ": %s", s.text);
    return out;
}

const char *moe_code_name(enum moe_code code)
{
    static const char *const names[] = {"OK",
                                        "CANCELLED",
                                        "UNKNOWN",
                                        "INVALID_ARGUMENT",
                                        "DEADLINE_EXCEEDED",
                                        "NOT_FOUND",
                                        "ALREADY_EXISTS",
                                        "PERMISSION_DENIED",
                                        "RESOURCE_EXHAUSTED",
                                        "FAILED_PRECONDITION",
                                        "ABORTED",
                                        "OUT_OF_RANGE",
                                        "UNIMPLEMENTED",
                                        "INTERNAL",
                                        "UNAVAILABLE",
                                        "DATA_LOSS",
                                        "UNAUTHENTICATED"};
    size_t i = (size_t)code;
    return i < sizeof names / sizeof *names ? names[i] : "?";
}

static const char *const reason_names[] = {
#define X(name) #name,
    MOE_REASONS(X)
#undef X
};

const char *moe_reason_name(enum moe_reason reason)
{
    size_t i = (size_t)reason;
    return i < MOE_REASON_COUNT ? reason_names[i] : "?";
}

enum moe_reason moe_reason_from_name(const char *name)
{
    for (size_t i = 0; i < MOE_REASON_COUNT; i++)
        if (strcmp(name, reason_names[i]) == 0)
            return (enum moe_reason)i;
    return MOE_REASON_NONE;
}

void moe_invariant_failed(const char *file, int line, const char *cond)
{
    fprintf(stderr, "moed: broken invariant at %s:%d: %s\n", file, line, cond);
    abort();
}
