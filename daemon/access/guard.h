/* SPDX-License-Identifier: Apache-2.0 */
/* What a daemon does about trust: TLS, local sockets, the decision about each call, the record of
 * those that change something, and files that are read anew.
 *
 * One thread looks at the files every few seconds, and at once after SIGHUP. A process has one
 * guard. */
#ifndef MOE_ACCESS_GUARD_H
#define MOE_ACCESS_GUARD_H

#include "access/access.h"
#include "daemon/daemon.h"
#include "rpc/server.h"

struct moe_guard;

/* Uses `insecure`, `access_file`, `token_file` and those of TLS servers of the settings, which
 * outlive the guard.
 * From now on, SIGHUP also looks at the files. Errors: those of reading the files. */
struct moe_status moe_guard_create(const struct moe_daemon_settings *settings,
                                   struct moe_guard **out) MOE_CHECKED;
/* The errors that moe_guard_create would have with these settings. */
struct moe_status moe_guard_check(const struct moe_daemon_settings *settings) MOE_CHECKED;
/* All servers are removed. NULL is ignored. */
void moe_guard_destroy(struct moe_guard *g);

/* moe_rpc_server_start with this guard: TLS, the local socket of this user's processes (where the
 * address is a loopback or wildcard one), a decision about each call, and a line in the log for
 * each call that the policy table wants recorded. From then on, connections of identities that lose
 * a role are ended. `config->listen` is one "host:port". `g` NULL: moe_rpc_server_start alone.
 * Errors: those of moe_rpc_server_start; MOE_FAILED_PRECONDITION/IO (no directory for the socket,
 * and no other way for the group's own processes). */
enum { MOE_GUARD_SERVERS_MAX = 4 };
struct moe_status moe_guard_start_server(struct moe_guard *g,
                                         const struct moe_rpc_server_config *config,
                                         struct moe_rpc_server **out) MOE_CHECKED;
/* Before the server is drained and stopped. Waits for a look at the files that is under way. A
 * server of no guard, and a NULL guard, are ignored. */
void moe_guard_remove(struct moe_guard *g, struct moe_rpc_server *server);

/* [any thread] Whether a call that the guard has let in may also do what `path` does; without a
 * guard always. Errors: those of moe_access_decide. */
struct moe_status moe_guard_may_call(struct moe_guard *g, const struct moe_rpc_call *call,
                                     const char *path) MOE_CHECKED;

/* [any thread] True if the caller may register as this worker; without a guard always. */
bool moe_guard_speaks_for(struct moe_guard *g, const struct moe_rpc_grant *grant,
                          const char *worker_id);

#endif
