/* SPDX-License-Identifier: Apache-2.0 */
/* Where this worker runs, for the coordinator and its peers: the host, and the address where rows
 * from other hosts arrive. */
#ifndef MOE_WORKER_HOST_H
#define MOE_WORKER_HOST_H

#include "moe/backend.h"

/* A network interface of this host. */
struct moe_worker_interface {
    char name[16];
    char address[48]; /* numeric */
};

/* Finds an interface by its name or by one of its addresses. A name stands for its first IPv4
 * address, or else its first IPv6 address that is not link-local.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID, with the setting's name. */
struct moe_status moe_worker_find_interface(const char *wanted,
                                            struct moe_worker_interface *out) MOE_CHECKED;

/* Finds the interface that has the address of the host in `endpoint` ("host:port"). False if none
 * has: a wildcard, or an address that is translated on the way here. */
bool moe_worker_find_interface_of(const char *endpoint, struct moe_worker_interface *out);

/* Describes this host. `network_address`: numeric; NULL = the address of the host in `endpoint`.
 * `out->domain` stays empty. `name` becomes the host's name.
 * Errors: MOE_UNAVAILABLE/IO. */
struct moe_status moe_worker_describe_host(const char *network_address, const char *endpoint,
                                           struct moe_session_host *out, char *name,
                                           size_t name_size) MOE_CHECKED;

#endif
