/* See worker/wire.h. Numbers of enums are the same on both sides, by definition (worker/engine.h).
 */
#include "worker/wire.h"

#include <string.h>

/* Every field of a ticket at its longest, tags and lengths included, beside the body. */
enum { TICKET_BYTES_BUT_BODY = 96 };
_Static_assert(TICKET_BYTES_BUT_BODY + MOE_TRAINING_BODY_MAX <= MOE_MAIL_MAX,
               "a ticket fits into a mail");

void moe_wire_order(const struct moe_training_order *from, Moe__V1__TrainingOrder *to)
{
    moe__v1__training_order__init(to);
    to->origin = from->origin;
    to->number = from->number;
    to->body.data = (uint8_t *)(uintptr_t)from->body; /* packing only reads */
    to->body.len = from->length;
}

bool moe_wire_read_order(const Moe__V1__TrainingOrder *from, struct moe_training_order *to)
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
    Moe__V1__TrainingOrder order;
    if (moe_step_has_order(t->kind)) {
        moe_wire_order(&t->order, &order);
        ticket.training = &order;
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
    if (moe_step_has_order(out->kind))
        return r->ticket->training != NULL && moe_wire_read_order(r->ticket->training, &out->order);
    return true;
}

struct moe_status moe_wire_pack_welcome(const struct moe_mailbox *mailbox,
                                        struct moe_control_out *out)
{
    Moe__V1__Mailbox named;
    Moe__V1__SequenceWelcome welcome = MOE__V1__SEQUENCE_WELCOME__INIT;
    if (mailbox != NULL)
        welcome.mailbox = moe_wire_mailbox(mailbox, &named);
    Moe__V1__SequenceResponse response = MOE__V1__SEQUENCE_RESPONSE__INIT;
    response.body_case = MOE__V1__SEQUENCE_RESPONSE__BODY_WELCOME;
    response.welcome = &welcome;
    return moe_control_pack(&response.base, out);
}

Moe__V1__Mailbox *moe_wire_mailbox(const struct moe_mailbox *mailbox, Moe__V1__Mailbox *to)
{
    const struct moe_mail_address at = moe_mailbox_address(mailbox);
    moe__v1__mailbox__init(to);
    to->process = at.process;
    to->mailbox = at.mailbox;
    to->bell = at.bell;
    to->key = at.key;
    return to;
}

struct moe_mail_address moe_wire_read_mailbox(const Moe__V1__Mailbox *m)
{
    return (struct moe_mail_address){
        .process = m->process, .mailbox = m->mailbox, .bell = m->bell, .key = m->key};
}
