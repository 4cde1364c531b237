/* SPDX-License-Identifier: Apache-2.0 */
/* Training calls without tensors, as clients write them: one row for each kind says what its
 * message is, what it means, and what may be wrong with it. The message itself travels with the
 * ticket, so a new field of a request is known here and to whoever uses it, and nowhere between. */
#ifndef MOE_TRAINING_REQUESTS_H
#define MOE_TRAINING_REQUESTS_H

#include "training/training.h"

struct ProtobufCMessage;
struct ProtobufCMessageDescriptor;

/* The message of a kind, of training.proto; NULL for kinds with tensors. */
const struct ProtobufCMessageDescriptor *moe_train_request_type(enum moe_step_kind kind);
/* Fills `out` with what `message` says, and with the message, packed. Pure: every slot reads the
 * same. Errors: MOE_INVALID_ARGUMENT, with text for the client. */
struct moe_status moe_train_read_request(enum moe_step_kind kind,
                                         const struct ProtobufCMessage *message,
                                         struct moe_train_call *out) MOE_CHECKED;
/* What the workers' settings say against it. Errors: as above. */
struct moe_status moe_train_check_request(const struct moe_train_config *config,
                                          enum moe_step_kind kind,
                                          const struct ProtobufCMessage *message) MOE_CHECKED;

#endif
