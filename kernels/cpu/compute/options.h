/* SPDX-License-Identifier: Apache-2.0 */
/* The options of this backend. */
#ifndef MOE_CPU_OPTIONS_H
#define MOE_CPU_OPTIONS_H

#include "moe/backend.h"

enum { MOE_CPU_OPTION_TRANSPORT, MOE_CPU_OPTION_COUNT };

/* Indexed by MOE_CPU_OPTION_*; the last entry ends it. */
extern const struct moe_backend_option moe_cpu_options[MOE_CPU_OPTION_COUNT + 1];

/* Values of `transport`, in the order of the table. */
enum moe_cpu_transport {
    MOE_CPU_TRANSPORT_AUTO,    /* shared memory where a pair can, else the network */
    MOE_CPU_TRANSPORT_NVLINK,  /* refused */
    MOE_CPU_TRANSPORT_NETWORK, /* the network for all pairs */
};

#endif
