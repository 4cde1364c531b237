/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions over several domains: GPUs of one domain store into each other's shared memory, and only
 * slots of equal index exchange messages over the network (kernels/decisions/0009).
 *
 * The shared memory of such a session is no window of moe/window.h. It begins with a window's
 * header; its `waiting` flag has the same meaning. Flags and two blocks of regions follow, one
 * region per slot of the group in each block:
 *
 * in    [source] records of that slot's tokens for the owner, stored by the source, or by the
 *       owner's domain's gateway of the source
 * back  [slot] sums: region slot_at(d, i) has those that the slot of index i in the owner's domain
 *       computed for tokens of the owner's partner in domain d, the owner included
 *
 * All slots give a region the same size in a pass. Flags carry the number of the exchange that the
 * stored data belong to; numbers rise. A slot stores for a pass after it has the control messages
 * of all slots for it. Each slot sends its own when it has read everything of the pass before. */
#ifndef MOE_CUDA_RELAY_H
#define MOE_CUDA_RELAY_H

#include "cuda/plan/limits.h"

#include "moe/window.h"

enum {
    MOE_CUDA_SHARED_FLAGS = 4096,  /* offsets in shared memory: the flags, */
    MOE_CUDA_SHARED_REGIONS = 8192 /* and the first region */
};

struct moe_cuda_shared_flags {
    uint64_t in[MOE_CUDA_MAX_SLOTS];   /* [source]: its records are there */
    uint64_t back[MOE_CUDA_MAX_SLOTS]; /* [slot of the domain]: all its sums are there */
};

/* The map of a session (common/domains.h), small enough for arguments of kernels. */
struct moe_cuda_relay {
    uint32_t domains; /* 0: the session has no shared memory */
    uint32_t size;    /* slots of a domain, at least 2 */
    uint32_t slots;   /* of the group: regions of a block */
    uint32_t own;     /* domain of this slot */
    uint32_t index;   /* of this slot in its domain */
    uint8_t domain_of[MOE_CUDA_MAX_SLOTS], index_of[MOE_CUDA_MAX_SLOTS];
    uint8_t slot_at[MOE_CUDA_MAX_SLOTS]; /* [domains][size] */
    uint8_t *shared[MOE_CUDA_MAX_SLOTS]; /* device addresses of slots of the own domain, or NULL */
};

#endif
