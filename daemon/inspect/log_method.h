/* SPDX-License-Identifier: Apache-2.0 */
/* AdminService.SetLogLevel: which lines the daemon logs from now on. */
#ifndef MOE_INSPECT_LOG_METHOD_H
#define MOE_INSPECT_LOG_METHOD_H

#include "rpc/server.h"

/* The method to start a server with. */
struct moe_rpc_method moe_inspect_log_method(void);

#endif
