/* SPDX-License-Identifier: Apache-2.0 */
/* One table: full method name -> the roles that may call it. A method that is not in the table is
 * denied. A test compares the table with the descriptors of all services, so a new method without
 * an entry does not pass. Pure. */
#ifndef MOE_ACCESS_POLICY_H
#define MOE_ACCESS_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bits. A caller may have several roles. */
enum moe_access_role {
    MOE_ROLE_CLIENT = 1 << 0,  /* forward passes, description of the model */
    MOE_ROLE_TRAINER = 1 << 1, /* training calls */
    MOE_ROLE_WORKER = 1 << 2,  /* takes a slot of the group, exchanges tickets */
    MOE_ROLE_ADMIN = 1 << 3,   /* state and control of the group, its checkpoints */
    MOE_ROLE_METRICS = 1 << 4, /* reads the state of the group */
};
#define MOE_ROLES_ALL UINT32_C(0x1f)

enum { MOE_ROLES_TEXT = 48 }; /* all names, with separators and the final 0 */

struct moe_access_policy {
    const char *path; /* "/moe.v1.AdminService/Shutdown" */
    uint32_t roles;   /* any one of these is enough */
    bool public;      /* also for callers without any role: health checks */
    bool audited;     /* each call is a line in the log */
};

/* NULL for an unknown method. */
const struct moe_access_policy *moe_access_policy_find(const char *path);
/* Entry `index` of the table; NULL at its end. */
const struct moe_access_policy *moe_access_policy_at(size_t index);

/* The bit of "client", "trainer", "worker", "admin" or "metrics"; 0 for other names. */
uint32_t moe_access_role_of(const char *name);
/* "client, admin"; "no role" for 0. */
void moe_access_role_names(uint32_t roles, char to[MOE_ROLES_TEXT]);

#endif
