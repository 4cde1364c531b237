/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by both roles: losses, and rings of peers on this host. */
#include "links/peers_state.h"

#include "base/clock.h"
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
    if (named == NULL || p->reader == NULL || p->view.members[slot].elsewhere)
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

/* ------------------------------------------------------------------- beats */

void moe_peers__begin_beats(struct moe_peers *p, uint32_t slot, bool understands)
{
    moe_beats_begin(&p->beats[slot]);
    if (understands && p->view.may_shrink && p->writers[slot] == NULL)
        p->beating |= UINT64_C(1) << slot;
}

void moe_peers__receive_beat(struct moe_peers *p, uint32_t slot, const Moe__V1__Beat *beat)
{
    const struct moe_beat in = {beat->number, beat->seen, beat->held_ns};
    if ((p->beating >> slot & 1) != 0)
        moe_beats_receive(&p->beats[slot], &in, moe_clock_ns());
}

static struct moe_status send_beat(struct moe_peers *p, uint32_t slot, const struct moe_beat *beat)
    MOE_REQUIRES(p->lock)
{
    struct moe_control_out packed;
    Moe__V1__Beat body = MOE__V1__BEAT__INIT;
    body.number = beat->number;
    body.seen = beat->seen;
    body.held_ns = beat->held_ns;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    Moe__V1__SequenceResponse r = MOE__V1__SEQUENCE_RESPONSE__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_BEAT;
    r.body_case = MOE__V1__SEQUENCE_RESPONSE__BODY_BEAT;
    q.beat = r.beat = &body;
    MOE_TRY(moe_control_pack(p->role == MEMBER ? &q.base : &r.base, &packed));
    struct moe_status st = moe_ok();
    if (p->role == MEMBER)
        st = moe_rpc_stream_send(p->stream, &packed.out);
    else
        moe_rpc_send(p->calls[slot], &packed.out);
    moe_control_free(&packed);
    return st;
}

/* A stream that is over has its own end: see call_done and stream_closed. */
static void take_turn(struct moe_peers *p) MOE_REQUIRES(p->lock)
{
    uint64_t lost = 0, now = moe_clock_ns();
    struct moe_beat beat;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        bool open = p->role == MEMBER ? p->stream != NULL : p->calls[s] != NULL;
        if ((p->beating >> s & 1) == 0 || !open)
            continue;
        if (moe_beats_judge(&p->beats[s]))
            lost |= UINT64_C(1) << s;
        if (moe_beats_next(&p->beats[s], now, &beat)) {
            struct moe_status st = send_beat(p, s, &beat);
            if (moe_failed(&st))
                moe_log_debug("slot %u gets no beat: %s", s, st.text);
        }
    }
    if (lost == 0)
        return;
    uint32_t first = (uint32_t)__builtin_ctzll(lost);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((p->beating >> s & 1) != 0 && moe_beats_is_late(&p->beats[s]))
            lost |= UINT64_C(1) << s;
    p->beating = 0; /* said once */
    moe_peers__lost(p, lost,
                    moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                              "slot %u%s: no sign of life over the network for %u ms", first,
                              (lost & (lost - 1)) != 0 ? ", and others" : "",
                              p->beats[first].silent * MOE_BEATS_TURN_MS));
}

void moe_peers__turn(void *ctx)
{
    struct moe_peers *p = ctx;
    /* The thread of the pulse, which does not wait: the peers of this host look at its beats. */
    if (!moe_mutex_try_lock(&p->lock))
        return;
    p->turns++;
    if (p->phase == STARTED && p->beating != 0 &&
        p->turns % (MOE_BEATS_TURN_MS / MOE_PULSE_TURN_MS) == 0)
        take_turn(p);
    moe_mutex_unlock(&p->lock);
}
