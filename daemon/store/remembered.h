/* SPDX-License-Identifier: Apache-2.0 */
/* The group that a coordinator belongs to, in a file of its state directory: so a coordinator
 * notices that the keys of its prefix are those of another group. */
#ifndef MOE_STORE_REMEMBERED_H
#define MOE_STORE_REMEMBERED_H

#include "base/status.h"

/* The name of the file. A directory with it is no directory of a store of kind `file`. */
#define MOE_STORE_GROUP_ID "group.id"

/* Compares `group_id` with the file in `directory`; writes the file, and the directory, where there
 * is none. `group_id` 0 means that the prefix has no group: then there must be no file.
 * Errors: MOE_FAILED_PRECONDITION/CONFIG_INVALID (another group, or none), MOE_DATA_LOSS (not such
 * a file), MOE_PERMISSION_DENIED (others may write to the directory), MOE_UNAVAILABLE/IO. */
struct moe_status moe_store_remember(const char *directory, uint64_t group_id) MOE_CHECKED;

#endif
