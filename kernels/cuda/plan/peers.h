/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which a slot sends to the others. Slots are numbered by distance from the sender, so
 * that senders begin with different peers. A warp has a lane for each of MOE_CUDA_WARP_SLOTS
 * adjacent distances; in larger groups it takes turns. */
#ifndef MOE_CUDA_PEERS_H
#define MOE_CUDA_PEERS_H

#include "cuda/plan/limits.h"

#include "moe/window.h"

enum { MOE_CUDA_WARP_SLOTS = 32 };

/* The slot at a distance below `slots`; the sender itself has distance 0. A lane with a larger
 * distance gets some number below MOE_CUDA_MAX_SLOTS, so that it may use it as an index. */
MOE_WINDOW_INLINE uint32_t moe_cuda_slot_at(uint32_t sender, uint32_t slots, uint32_t distance)
{
    const uint32_t slot = sender + distance;
    return slot >= slots ? slot - slots : slot;
}

#endif
