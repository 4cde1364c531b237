/* SPDX-License-Identifier: Apache-2.0 */
/* Converts tickets and calls from and to messages of moe.v1.WorkerService. */
#ifndef MOE_LINKS_WIRE_H
#define MOE_LINKS_WIRE_H

#include "links/shm_ring.h"
#include "moe/v1/worker.pb-c.h"
#include "rpc/control.h"
#include "schedule/ticket.h"

/* `to` borrows the body of `from`. */
void moe_wire_descriptor(const struct moe_call_descriptor *from, Moe__V1__CallDescriptor *to);
/* False: the body is too long. */
bool moe_wire_read_descriptor(const Moe__V1__CallDescriptor *from, struct moe_call_descriptor *to);

/* Packs a SequenceResponse, at most MOE_SHM_MESSAGE_MAX bytes. Free `out` with moe_control_free. */
struct moe_status moe_wire_pack_ticket(const struct moe_ticket *t,
                                       struct moe_control_out *out) MOE_CHECKED;
/* False: it is no ticket, or an impossible one. */
bool moe_wire_read_ticket(const Moe__V1__SequenceResponse *r, struct moe_ticket *out);

/* Packs a SequenceWelcome. `reader` may be NULL. */
struct moe_status moe_wire_pack_welcome(const struct moe_shm_reader *reader,
                                        struct moe_control_out *out) MOE_CHECKED;

/* Fills and returns `to`. */
Moe__V1__ShmRings *moe_wire_rings(const struct moe_shm_reader *reader, Moe__V1__ShmRings *to);
struct moe_shm_address moe_wire_read_rings(const Moe__V1__ShmRings *m);

#endif
