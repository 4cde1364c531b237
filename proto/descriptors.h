/* SPDX-License-Identifier: Apache-2.0 */
/* The serialised FileDescriptorSet of all protos here, imports included, as read-only bytes. */
#ifndef MOE_PROTO_DESCRIPTORS_H
#define MOE_PROTO_DESCRIPTORS_H

extern const unsigned char moe_proto_descriptors[];
extern const unsigned char moe_proto_descriptors_end[]; /* one past the last byte */

#endif
