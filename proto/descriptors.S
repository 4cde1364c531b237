/* SPDX-License-Identifier: Apache-2.0 */
/* Embeds the descriptor set: see descriptors.h. */
    .section .rodata
    .balign 16
    .global moe_proto_descriptors, moe_proto_descriptors_end
moe_proto_descriptors:
    .incbin "descriptors.pb"
moe_proto_descriptors_end:
    .section .note.GNU-stack,"",@progbits
