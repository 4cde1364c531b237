/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by both roles: losses, and rings of peers on this host. */
#include "links/peers_state.h"

#include "daemon/log.h"

const char moe_peers__path[] = "/moe.v1.WorkerService/Sequence";

void moe_peers__lost(struct moe_peers *p, uint64_t slots, struct moe_status why)
{
    p->config.lost(p->config.ctx, p->view.epoch, slots, why);
}

void moe_peers__lose_slot(struct moe_peers *p, uint32_t slot, struct moe_status why)
{
    moe_peers__lost(p, UINT64_C(1) << slot, why);
}

struct moe_shm_writer *moe_peers__open_writer(const struct moe_peers *p, uint32_t slot,
                                              const Moe__V1__ShmRings *named)
{
    struct moe_shm_writer *writer = NULL;
    if (named == NULL || p->reader == NULL)
        return NULL;
    const struct moe_shm_address to = moe_wire_read_rings(named);
    struct moe_status st = moe_shm_writer_open(&to, p->view.slot, &writer);
    if (moe_failed(&st))
        moe_log_debug("a peer is reached over gRPC: %s", st.text);
    else if (p->view.may_shrink)
        moe_pulse_watch(p->pulse, slot, writer);
    return writer;
}

void moe_peers__read_ring(struct moe_peers *p, uint32_t slot, moe_peers__read_fn read,
                          struct moe_rpc_arena *arena)
{
    uint8_t bytes[MOE_SHM_MESSAGE_MAX];
    size_t length = 0;
    for (int i = 0; i < MOE_SHM_RING_CELLS; i++) /* later messages notify again */
        switch (moe_shm_reader_read(p->reader, slot, bytes, &length)) {
        case MOE_SHM_READ_NONE: return;
        case MOE_SHM_READ_MESSAGE: read(p, slot, bytes, length, arena); break;
        case MOE_SHM_READ_BROKEN:
            moe_peers__lose_slot(p, slot,
                                 moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                                           "slot %u wrote a malformed ring", slot));
            return;
        }
}
