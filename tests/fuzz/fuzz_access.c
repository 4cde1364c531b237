/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as an access file. It is refused, or it gives roles to its own names only, and no
 * caller speaks for a worker without the role. */
#include "access/access.h"
#include "driver.h"

#include <string.h>

static void check_name(const struct moe_access_rules *rules, const char *name)
{
    const struct moe_access_entry *e = moe_access_rules_find(rules, name);
    bool token = strncmp(name, "token:", 6) == 0; /* found by its hash, not as an identity */
    bool worker = token || (e != NULL && (e->roles & MOE_ROLE_WORKER) != 0);
    MOE_INVARIANT(e == NULL || (e->roles != 0 && (e->roles & ~MOE_ROLES_ALL) == 0));
    MOE_INVARIANT(e == NULL || strlen(name) >= strlen(e->name) - 1);
    MOE_INVARIANT(worker || !moe_access_rules_speaks_for(rules, name, "w1"));
    MOE_INVARIANT(!moe_access_rules_speaks_for(rules, name, ""));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"",
                                        "anonymous",
                                        "uid:0",
                                        "token:ops",
                                        "*",
                                        "w1",
                                        "spiffe://moed/worker/w1",
                                        "spiffe://moed/worker/"};
    static const uint8_t hash[MOE_ACCESS_HASH_BYTES];
    struct moe_access_rules *rules = NULL;
    struct moe_status st = moe_access_rules_parse((const char *)data, size, "access.json", &rules);
    if (moe_failed(&st)) {
        MOE_INVARIANT(rules == NULL && st.text[0] != '\0');
        return 0;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        check_name(rules, names[i]);
    const struct moe_access_entry *e = moe_access_rules_find_token(rules, hash);
    MOE_INVARIANT(e == NULL || strncmp(e->name, "token:", 6) == 0);
    MOE_INVARIANT(!moe_access_rules_lost_token(rules, rules));
    moe_access_rules_free(rules);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const char *const seeds[] = {
        "{\"identities\":{\"spiffe://moed/worker/*\":{\"roles\":[\"worker\"]},"
        "\"anonymous\":{\"roles\":[\"client\"]},\"uid:0\":{\"roles\":[\"admin\",\"metrics\"]}}}",
        "{\"tokens\":{\"ops\":{\"sha256\":"
        "\"0000000000000000000000000000000000000000000000000000000000000000\","
        "\"roles\":[\"worker\"],\"worker_ids\":[\"w1\"]}}}",
        "{\"identities\":{\"*\":{\"roles\":[\"worker\"]}}}",
        "{}",
    };
    if (i >= sizeof seeds / sizeof seeds[0])
        return 0;
    *data = (const uint8_t *)seeds[i];
    return strlen(seeds[i]);
}
