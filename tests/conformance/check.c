/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the checks; see check.h. */
#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

bool wrong(const struct subject *s, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "slot %u: %s\n", s->member->slot, text);
    return false;
}

bool went_well(const struct subject *s, const char *what, struct moe_status st)
{
    return !moe_failed(&st) || wrong(s, "%s: %s/%s: %s", what, moe_code_name(st.code),
                                     moe_reason_name(st.reason), st.text);
}

void *take(struct arena *a, size_t bytes)
{
    void *p = a->base + a->used;
    a->used += (bytes + 255) & ~(size_t)255;
    MOE_INVARIANT(a->used <= a->bytes);
    return p;
}

double frobenius(size_t n, const double *got, const double *want)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

double frobenius_of_summands(size_t n, const double *got, const double *want, const double *size)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += size[i] * size[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

/* FNV-1a. */
void add_to_hash(uint64_t *hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    uint64_t h = *hash != 0 ? *hash : UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    *hash = h;
}

double tolerance(enum moe_dtype dtype)
{
    return dtype == MOE_DTYPE_F32 ? 1e-5 : 1e-2;
}

double output_tolerance(const struct test_case *c)
{
    return case_is_w8a8(c) ? tolerance(MOE_DTYPE_BF16) : tolerance(c->dtype);
}

size_t tensor_bytes(const struct test_case *c, uint32_t tokens)
{
    return (size_t)tokens * c->spec.hidden * moe_dtype_bytes(c->dtype);
}

void *must(size_t bytes)
{
    void *p = calloc(1, bytes > 0 ? bytes : 1);
    MOE_INVARIANT(p != NULL);
    return p;
}
