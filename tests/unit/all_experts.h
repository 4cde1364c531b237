/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment of all experts of a model to the only slot of a group of one. */
#ifndef MOE_TEST_ALL_EXPERTS_H
#define MOE_TEST_ALL_EXPERTS_H

#include "group/group.h"

struct moe_group_assignment assign_all_experts(const char *directory);
void free_assignment(const struct moe_group_assignment *a);

#endif
