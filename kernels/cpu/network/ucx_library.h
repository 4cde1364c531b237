/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of UCX that this room uses, from a library that is opened at run time: a group on
 * one host needs no UCX. */
#ifndef MOE_CPU_UCX_LIBRARY_H
#define MOE_CPU_UCX_LIBRARY_H

#include "base/status.h"

#include <ucp/api/ucp.h>

/* All that is used, as X(name). */
#define MOE_UCX_FUNCTIONS(X)                                                                       \
    X(ucp_config_read)                                                                             \
    X(ucp_config_modify)                                                                           \
    X(ucp_config_release)                                                                          \
    X(ucp_init_version)                                                                            \
    X(ucp_cleanup)                                                                                 \
    X(ucp_worker_create)                                                                           \
    X(ucp_worker_destroy)                                                                          \
    X(ucp_worker_progress)                                                                         \
    X(ucp_worker_get_efd)                                                                          \
    X(ucp_worker_arm)                                                                              \
    X(ucp_worker_set_am_recv_handler)                                                              \
    X(ucp_listener_create)                                                                         \
    X(ucp_listener_query)                                                                          \
    X(ucp_listener_reject)                                                                         \
    X(ucp_listener_destroy)                                                                        \
    X(ucp_ep_create)                                                                               \
    X(ucp_ep_close_nbx)                                                                            \
    X(ucp_am_send_nbx)                                                                             \
    X(ucp_request_check_status)                                                                    \
    X(ucp_request_free)                                                                            \
    X(ucs_status_string)

struct moe_ucx_library {
#define X(name) __typeof__(&name) name;
    MOE_UCX_FUNCTIONS(X)
#undef X
};

/* The functions; opened once, never closed. Threads: any.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED with the name of the package. */
struct moe_status moe_ucx_library_open(const struct moe_ucx_library **out) MOE_CHECKED;

#endif
