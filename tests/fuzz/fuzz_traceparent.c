/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a traceparent header. What is accepted is exactly the text that its context prints
 * to; what is refused leaves no context. */
#include "driver.h"
#include "trace/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const seeds[] = {
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "00-ffffffffffffffffffffffffffffffff-ffffffffffffffff-ff",
    "00-00000000000000000000000000000001-0000000000000001-00",
    "00-00000000000000000000000000000000-0000000000000000-00",
};

static void check_text(const struct moe_trace_context *c, const uint8_t *data)
{
    char text[MOE_TRACE_PARENT_LENGTH + 1], trace[MOE_TRACE_ID_TEXT], parent[17];
    moe_trace_id_text(c, trace);
    for (int i = 0; i < 8; i++)
        (void)snprintf(parent + 2 * i, 3, "%02x", (unsigned)c->parent_id[i]);
    (void)snprintf(text, sizeof text, "00-%s-%s-", trace, parent);
    MOE_INVARIANT(memcmp(text, data, MOE_TRACE_PARENT_LENGTH - 2) == 0);
    unsigned flags =
        (unsigned)strtoul((const char[]){(char)data[53], (char)data[54], '\0'}, NULL, 16);
    MOE_INVARIANT(c->sampled == (flags & 1));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct moe_trace_context none;
    struct moe_trace_context c;
    char *exact = malloc(size > 0 ? size : 1); /* so that a read behind the end is seen */
    if (exact == NULL)
        abort();
    if (size > 0)
        memcpy(exact, data, size);
    bool good = moe_trace_parse(exact, size, &c);
    free(exact);
    MOE_INVARIANT(!good || size == MOE_TRACE_PARENT_LENGTH);
    if (good)
        check_text(&c, data);
    else
        MOE_INVARIANT(memcmp(c.trace_id, none.trace_id, sizeof c.trace_id) == 0 &&
                      memcmp(c.parent_id, none.parent_id, sizeof c.parent_id) == 0 && !c.sampled);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    if (i >= sizeof seeds / sizeof *seeds)
        return 0;
    *data = (const uint8_t *)seeds[i];
    return strlen(seeds[i]);
}
