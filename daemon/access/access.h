/* SPDX-License-Identifier: Apache-2.0 */
/* Decides who may call what: the policy table, the rules of an access file, and the group's token.
 *
 * A daemon has one. The files are read at the start, and again by moe_access_refresh when they have
 * changed; a file that does not validate leaves the old rules in force. This room has no thread. */
#ifndef MOE_ACCESS_ACCESS_H
#define MOE_ACCESS_ACCESS_H

#include "access/policy.h"
#include "access/rules.h"

struct moe_access;

struct moe_access_config {
    /* Every caller may do everything (`--insecure` without files). */
    bool open;
    /* Roles of a connection without certificate, Unix socket and token. An entry "anonymous" of the
     * access file replaces them. */
    uint32_t anonymous_roles;
    const char *access_file; /* see rules.h; NULL: none. Borrowed */
    /* Without an access file, a caller with the token of this file has all roles: the token of the
     * group. With one, only the access file decides. NULL: none. Borrowed */
    const char *token_file;
    uint32_t own_uid; /* this user, and root, have all roles on a Unix socket */
};

/* Errors: those of reading and parsing the files. */
struct moe_status moe_access_create(const struct moe_access_config *config,
                                    struct moe_access **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_access_destroy(struct moe_access *a);

enum moe_access_link { MOE_ACCESS_TCP, MOE_ACCESS_TLS, MOE_ACCESS_UNIX };

struct moe_access_caller {
    enum moe_access_link link;
    const char *name; /* of the certificate; "" = none */
    uint32_t uid;     /* UNIX */
    bool is_operator; /* UNIX: came by a socket for operators */
};

/* What was found about a caller. Zeros: no role. */
struct moe_access_grant {
    uint32_t roles;
    char
        who[MOE_ACCESS_NAME_BYTES]; /* "uid:1000", "token:ops", a certificate's name, "anonymous" */
};

/* [any thread] Decides about one call. `token` is "" without one, NULL for a malformed one; a token
 * decides alone, also where the connection has roles. Fills `grant` in every case. Errors:
 * MOE_UNIMPLEMENTED/UNSUPPORTED (a method that the policy does not know), MOE_UNAUTHENTICATED (the
 * token is malformed or not known; the caller has no identity, and the method needs a role),
 * MOE_PERMISSION_DENIED (it lacks the role). */
struct moe_status moe_access_decide(struct moe_access *a, const struct moe_access_caller *caller,
                                    const char *path, const char *token,
                                    struct moe_access_grant *grant) MOE_CHECKED;

/* [any thread] Decides about one more method for a caller that moe_access_decide has let in: what
 * a message asks for may need another role than the method it came by. Errors as there. */
struct moe_status moe_access_may_call(const struct moe_access_caller *caller,
                                      const struct moe_access_grant *grant,
                                      const char *path) MOE_CHECKED;

/* [any thread] True if a caller with this grant may register as `worker_id`. */
bool moe_access_speaks_for(struct moe_access *a, const struct moe_access_grant *grant,
                           const char *worker_id);

/* [any thread, one at a time] Reads the files that have changed, and those that the last look has
 * refused. Call every few seconds and on SIGHUP. Logs what it did; of a refused file, once. True if
 * callers may have lost roles: then drop the connections of those for which moe_access_has_lost
 * holds. */
bool moe_access_refresh(struct moe_access *a, uint64_t now_ns);
/* Which files the last look has refused; what was read of them before is in force. */
struct moe_access_refused {
    bool rules, token; /* --access-file, --token-file */
};
/* [the thread that calls moe_access_refresh] */
struct moe_access_refused moe_access_refused(struct moe_access *a);
/* [any thread] True if the last refresh has taken a role or a worker_id from this connection, or
 * from some token, where the connection may have used one. */
bool moe_access_has_lost(struct moe_access *a, const struct moe_access_caller *caller);

#endif
