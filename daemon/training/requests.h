/* SPDX-License-Identifier: Apache-2.0 */
/* Training calls without tensors: a row for each kind has the type of its message, and functions
 * that read and check it. The message travels with the ticket as the client wrote it. So a new
 * field of a request is known to requests.c and to the code that uses it, and to nothing between.
 */
#ifndef MOE_TRAINING_REQUESTS_H
#define MOE_TRAINING_REQUESTS_H

#include "training/training.h"

struct ProtobufCMessage;
struct ProtobufCMessageDescriptor;

/* The message of a kind, of training.proto; NULL for kinds with tensors. */
const struct ProtobufCMessageDescriptor *moe_train_request_type(enum moe_step_kind kind);
/* Fills `out` with the fields of `message`, and with the message, packed. Pure: all slots read the
 * same. Errors: MOE_INVALID_ARGUMENT, with text for the client. */
struct moe_status moe_train_read_request(enum moe_step_kind kind,
                                         const struct ProtobufCMessage *message,
                                         struct moe_train_call *out) MOE_CHECKED;
/* Compares the message with the settings of the workers. Errors: as above. */
struct moe_status moe_train_check_request(const struct moe_train_config *config,
                                          enum moe_step_kind kind,
                                          const struct ProtobufCMessage *message) MOE_CHECKED;

#endif
