/* SPDX-License-Identifier: Apache-2.0 */
/* Packets of the socket between a client and a daemon: one message each, with at most one
 * descriptor. Both sides use this file. moe/v1/regions.proto has the messages. Any thread. */
#ifndef MOE_REGIONS_PACKET_H
#define MOE_REGIONS_PACKET_H

#include "base/status.h"

#include <stddef.h>

enum { MOE_PACKET_BYTES = 16384 }; /* of a message, at most */

enum moe_packet {
    MOE_PACKET_NONE,    /* nothing has arrived */
    MOE_PACKET_WAKE,    /* one byte: look at the ring */
    MOE_PACKET_MESSAGE, /* two bytes or more */
    MOE_PACKET_END,     /* the other side has closed the socket, or broke these rules */
};

/* Receives one packet without waiting. `*descriptor` is -1 if none came; else the caller closes it.
 */
enum moe_packet moe_packet_receive(int socket, uint8_t bytes[MOE_PACKET_BYTES], size_t *length,
                                   int *descriptor);
/* Sends a packet, with a descriptor unless that is -1, without waiting. Errors: MOE_UNAVAILABLE/IO
 * (the other side has gone, or does not read). */
struct moe_status moe_packet_send(int socket, const void *bytes, size_t length,
                                  int descriptor) MOE_CHECKED;
/* Sends a packet of one byte. If the other side has not read earlier ones, none is needed. */
void moe_packet_wake(int socket);

#endif
