/* SPDX-License-Identifier: Apache-2.0 */
/* The Unix sockets by which processes of this host reach its daemons: those of the daemons' user,
 * and those of its operators.
 *
 * A daemon that listens on TCP port P of a loopback address also listens at the socket
 * DIRECTORY/P-NETWORK.sock. NETWORK is the inode of its network namespace: port P means another
 * daemon elsewhere. The kernel tells the daemon which user connects; that needs no password.
 *
 * DIRECTORY is $MOED_RUNTIME_DIR; if that is not set, the first of $XDG_RUNTIME_DIR/moed,
 * /run/user/UID/moed and /tmp/moed-UID that can be used; a name of more than 85 bytes leaves no
 * room for that of a socket. It belongs to the user and has mode 0700. A client looks in all of
 * them, because it may run in another session than the daemon. */
#ifndef MOE_BASE_LOCAL_H
#define MOE_BASE_LOCAL_H

#include "base/status.h"

enum { MOE_LOCAL_PATH_BYTES = 108 }; /* of sockaddr_un, with the final 0 */

/* Makes the directory if it is missing, and writes the path of a daemon's socket with a '*' in
 * place of the port, which a listener fills in. Removes sockets of daemons that were killed, if
 * they are older than a minute. Errors: MOE_FAILED_PRECONDITION/IO (no directory can be used; the
 * text says why of the last one), MOE_INVALID_ARGUMENT/CONFIG_INVALID (MOED_RUNTIME_DIR is too
 * long), MOE_UNAVAILABLE/IO (no /proc). */
struct moe_status moe_local_listen_path(char path[MOE_LOCAL_PATH_BYTES]) MOE_CHECKED;

/* True if `endpoint` ("127.0.0.1:7700", "localhost:7700", "[::1]:7700") has a socket of this user;
 * `path` is its place. A socket of another user, in a directory that others can use, or without a
 * listener, does not count. */
bool moe_local_find(const char *endpoint, char path[MOE_LOCAL_PATH_BYTES]);

/* The sockets for operators: other users, who may administrate. The mode and the group of their
 * directory say who. An administrator makes it: it belongs to the daemons' user or root, and only
 * they may write to it. Its sockets have its group, and mode 0660. */

/* As moe_local_listen_path, for such a directory. Errors: MOE_FAILED_PRECONDITION/IO (no such
 * directory, or others may write to it), MOE_INVALID_ARGUMENT/CONFIG_INVALID (the path is too long,
 * not absolute, or has a comma or an asterisk). */
struct moe_status moe_local_admin_path(const char *directory,
                                       char path[MOE_LOCAL_PATH_BYTES]) MOE_CHECKED;
/* As moe_local_find, in $MOED_ADMIN_DIR or else /run/moed-admin. The socket belongs to the owner of
 * the directory. */
bool moe_local_find_admin(const char *endpoint, char path[MOE_LOCAL_PATH_BYTES]);

#endif
