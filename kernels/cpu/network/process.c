/* SPDX-License-Identifier: Apache-2.0 */
/* The environment that UCX finds when it is loaded; see network.h. */
#include "cpu/network/network.h"

#include <stdlib.h>

/* UCX must not catch the daemon's signals, replace its allocator or write to stdout. A message is
 * one segment, and goes to the socket from where it lies. */
static const char *const defaults[][2] = {
    {"UCX_HANDLE_ERRORS", "none"},   {"UCX_ERROR_SIGNALS", ""},
    {"UCX_MEM_EVENTS", "n"},         {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_LOG_LEVEL", "fatal"},      {"UCX_LOG_FILE", "stderr"},
    {"UCX_TCP_TX_SEG_SIZE", "192k"}, {"UCX_TCP_RX_SEG_SIZE", "192k"},
    {"UCX_ZCOPY_THRESH", "16k"}};

static struct moe_status set(const char *variable, const char *value, int override)
{
    if (setenv(variable, value, override) == 0)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the variable %s", variable);
}

struct moe_status moe_cpu_network_prepare(const char *interface, const char *suggested)
{
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        MOE_TRY(set(defaults[i][0], defaults[i][1], 0));
    if (interface != NULL)
        return set("UCX_NET_DEVICES", interface, 1);
    return suggested == NULL ? moe_ok() : set("UCX_NET_DEVICES", suggested, 0);
}
