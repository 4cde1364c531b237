/* SPDX-License-Identifier: Apache-2.0 */
/* The enums of schedule/ticket.h and moe/types.h have the numbers of the proto's enums. */
#include "links/wire.h"

#include <string.h>

/* Every field of a ticket but the body, at its longest, with tags and lengths. */
enum { TICKET_BYTES_BUT_BODY = 96 };
_Static_assert(TICKET_BYTES_BUT_BODY + MOE_TRAINING_BODY_MAX <= MOE_SHM_MESSAGE_MAX,
               "a ticket fits into a message");

void moe_wire_descriptor(const struct moe_call_descriptor *from, Moe__V1__CallDescriptor *to)
{
    moe__v1__call_descriptor__init(to);
    to->origin = from->origin;
    to->number = from->number;
    to->body.data = (uint8_t *)(uintptr_t)from->body; /* packing only reads */
    to->body.len = from->length;
}

bool moe_wire_read_descriptor(const Moe__V1__CallDescriptor *from, struct moe_call_descriptor *to)
{
    if (from->body.len > sizeof to->body)
        return false;
    to->origin = from->origin;
    to->number = from->number;
    to->length = (uint32_t)from->body.len;
    if (from->body.len > 0)
        memcpy(to->body, from->body.data, from->body.len);
    return true;
}

struct moe_status moe_wire_pack_ticket(const struct moe_ticket *t, struct moe_control_out *out)
{
    Moe__V1__Ticket ticket = MOE__V1__TICKET__INIT;
    ticket.epoch = t->epoch;
    ticket.seq = t->seq;
    ticket.layer = t->layer;
    ticket.kind = (Moe__V1__StepKind)t->kind;
    ticket.dtype = (Moe__V1__DataType)t->dtype;
    ticket.bucket = t->bucket;
    Moe__V1__CallDescriptor descriptor;
    if (moe_step_traits(t->kind)->has_descriptor) {
        moe_wire_descriptor(&t->descriptor, &descriptor);
        ticket.training = &descriptor;
    }
    Moe__V1__SequenceResponse response = MOE__V1__SEQUENCE_RESPONSE__INIT;
    response.body_case = MOE__V1__SEQUENCE_RESPONSE__BODY_TICKET;
    response.ticket = &ticket;
    return moe_control_pack(&response.base, out);
}

bool moe_wire_read_ticket(const Moe__V1__SequenceResponse *r, struct moe_ticket *out)
{
    if (r->body_case != MOE__V1__SEQUENCE_RESPONSE__BODY_TICKET)
        return false;
    *out = (struct moe_ticket){
        .epoch = r->ticket->epoch,
        .seq = r->ticket->seq,
        .layer = r->ticket->layer,
        .kind = (enum moe_step_kind)r->ticket->kind,
        .dtype = (enum moe_dtype)r->ticket->dtype,
        .bucket = r->ticket->bucket,
    };
    if (moe_step_traits(out->kind)->has_descriptor)
        return r->ticket->training != NULL &&
               moe_wire_read_descriptor(r->ticket->training, &out->descriptor);
    return true;
}

struct moe_status moe_wire_pack_welcome(const struct moe_shm_reader *reader,
                                        struct moe_control_out *out)
{
    Moe__V1__ShmRings named;
    Moe__V1__SequenceWelcome welcome = MOE__V1__SEQUENCE_WELCOME__INIT;
    welcome.beats = true;
    if (reader != NULL)
        welcome.rings = moe_wire_rings(reader, &named);
    Moe__V1__SequenceResponse response = MOE__V1__SEQUENCE_RESPONSE__INIT;
    response.body_case = MOE__V1__SEQUENCE_RESPONSE__BODY_WELCOME;
    response.welcome = &welcome;
    return moe_control_pack(&response.base, out);
}

Moe__V1__ShmRings *moe_wire_rings(const struct moe_shm_reader *reader, Moe__V1__ShmRings *to)
{
    const struct moe_shm_address at = moe_shm_reader_address(reader);
    moe__v1__shm_rings__init(to);
    to->process = at.process;
    to->memory = at.memory;
    to->eventcount = at.eventcount;
    to->key = at.key;
    return to;
}

struct moe_shm_address moe_wire_read_rings(const Moe__V1__ShmRings *m)
{
    return (struct moe_shm_address){
        .process = m->process, .memory = m->memory, .eventcount = m->eventcount, .key = m->key};
}
