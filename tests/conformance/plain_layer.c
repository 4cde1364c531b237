/* SPDX-License-Identifier: Apache-2.0 */
/* See plain_layer.h. */
#include "plain_layer.h"

#include "base/status.h"

struct moe_placement deal_experts(struct dealt *d, uint32_t experts, uint32_t slots)
{
    MOE_INVARIANT(experts <= MOE_MAX_EXPERTS);
    d->offset[0] = 0;
    for (uint32_t e = 0; e < experts; e++) {
        d->offset[e + 1] = e + 1;
        d->slot[e] = (uint16_t)(e * slots / experts);
    }
    return (struct moe_placement){
        .version = 1, .experts = experts, .slots = slots, .offset = d->offset, .slot = d->slot};
}
