/* Tickets and what belongs to them as messages of moe.v1.WorkerService, both ways. */
#ifndef MOE_WORKER_WIRE_H
#define MOE_WORKER_WIRE_H

#include "moe/v1/worker.pb-c.h"
#include "worker/control.h"
#include "worker/engine.h"
#include "worker/mailbox.h"

/* `to` borrows the body of `from`. */
void moe_wire_order(const struct moe_training_order *from, Moe__V1__TrainingOrder *to);
/* False: the body is too long. */
bool moe_wire_read_order(const Moe__V1__TrainingOrder *from, struct moe_training_order *to);

/* A SequenceResponse; give `out` back with moe_control_free. A ticket fits into a mail. */
struct moe_status moe_wire_pack_ticket(const struct moe_ticket *t,
                                       struct moe_control_out *out) MOE_CHECKED;
/* False: it is no ticket, or one that cannot be. */
bool moe_wire_read_ticket(const Moe__V1__SequenceResponse *r, struct moe_ticket *out);

/* The same of a welcome; `mailbox` may be NULL. */
struct moe_status moe_wire_pack_welcome(const struct moe_mailbox *mailbox,
                                        struct moe_control_out *out) MOE_CHECKED;

/* Fills and returns `to`. */
Moe__V1__Mailbox *moe_wire_mailbox(const struct moe_mailbox *mailbox, Moe__V1__Mailbox *to);
struct moe_mail_address moe_wire_read_mailbox(const Moe__V1__Mailbox *m);

#endif
