/* SPDX-License-Identifier: Apache-2.0 */
/* See reach.h. */
#include "common/reach.h"

#include <string.h>

/* FNV-1a: not a secret, only short. */
static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t moe_reach_host(const char *id)
{
    return hash_of(id, strlen(id));
}

uint64_t moe_reach_machine(const char *id)
{
    return hash_of(id, strcspn(id, "-"));
}

/* How far apart two slots with different hosts or domains are. */
static const char *apart(const struct moe_reach_slot *a, const struct moe_reach_slot *b)
{
    bool namespaces = a->host != b->host && a->machine == b->machine;
    return namespaces ? "are in different network namespaces of one host"
                      : "are on different hosts";
}

static struct moe_status no_network(uint32_t a, uint32_t b, const struct moe_reach_slot *slot,
                                    bool network_only)
{
    uint32_t without = slot[a].network ? b : a;
    if (network_only)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "slot %u's build has no network transport", without);
    if (slot[a].host != slot[b].host || slot[a].domain != slot[b].domain)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "slots %u and %u %s and slot %u's build has no network transport", a, b,
                         apart(&slot[a], &slot[b]), without);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "slot %u runs as another user than slot %u (%u, not %u) and slot %u's build "
                     "has no network transport",
                     b, a, slot[b].user, slot[a].user, without);
}

static struct moe_status check_pair(uint32_t a, uint32_t b, const struct moe_reach_slot *slot,
                                    bool network_only)
{
    if (!slot[a].network || !slot[b].network)
        return no_network(a, b, slot, network_only);
    if (slot[a].host != slot[b].host && (slot[a].loopback || slot[b].loopback))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "slots %u and %u %s and slot %u offers a loopback address "
                         "(--net-interface)",
                         a, b, apart(&slot[a], &slot[b]), slot[a].loopback ? a : b);
    return moe_ok();
}

struct moe_status moe_reach_plan(uint64_t live, uint32_t slots, const struct moe_reach_slot *slot,
                                 bool network_only, struct moe_reach *out)
{
    *out = (struct moe_reach){0};
    for (uint32_t a = 0; a < slots; a++)
        if (live >> a & 1)
            out->sharing[a] = UINT64_C(1) << a;
    for (uint32_t a = 0; a < slots; a++)
        for (uint32_t b = a + 1; b < slots; b++) {
            if (!(live >> a & 1) || !(live >> b & 1))
                continue;
            bool together = !network_only && slot[a].host == slot[b].host &&
                            slot[a].domain == slot[b].domain && slot[a].user == slot[b].user;
            if (together) {
                out->sharing[a] |= UINT64_C(1) << b;
                out->sharing[b] |= UINT64_C(1) << a;
                continue;
            }
            MOE_TRY(check_pair(a, b, slot, network_only));
            out->network = true;
        }
    return moe_ok();
}
