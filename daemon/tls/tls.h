/* SPDX-License-Identifier: Apache-2.0 */
/* TLS of a server: its files, read again when they change, and sessions over non-blocking sockets.
 * All of OpenSSL's TLS is in this room; there is no thread.
 *
 * TLS 1.2 and 1.3, for HTTP/2 only (ALPN "h2"). No resumption, renegotiation or compression, and no
 * second ClientHello, so a client that stops in the middle costs little memory. */
#ifndef MOE_TLS_TLS_H
#define MOE_TLS_TLS_H

#include "base/status.h"
#include "daemon/identity.h"

#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------ files */

struct moe_tls;

/* Reads and checks the files; the paths are borrowed. With `ca`, clients are asked for a
 * certificate; they may show none. Errors: those of moe_tls_pem_read; also
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID for a certificate that is not for servers or too weak, and
 * a root that is no CA. */
struct moe_status moe_tls_create(const struct moe_rpc_tls_files *files,
                                 struct moe_tls **out) MOE_CHECKED;
/* Sessions may live on. NULL is ignored. */
void moe_tls_destroy(struct moe_tls *t);
/* [any thread, one at a time] Reads the files again if one has changed. Sessions that begin from
 * now on use them; others stay as they are. Files that do not pass the checks are logged, and those
 * read before stay in use. Call every few seconds. True if new files are in use. */
bool moe_tls_refresh(struct moe_tls *t);

/* [the thread that calls moe_tls_refresh] True if the last look has refused the files, and those
 * read before are in use. */
bool moe_tls_refused(const struct moe_tls *t);

/* When the files end, in Unix seconds; 0 for one that is not given. A certificate ends with the
 * first of its chain. Roots end with the last one: a file may hold old and new ones. */
struct moe_tls_dates {
    int64_t certificate, ca;
};
/* [any thread] Of the files in use. */
struct moe_tls_dates moe_tls_dates(struct moe_tls *t);
/* Of files that are not those of a server. Errors: those of moe_tls_pem_read. */
struct moe_status moe_tls_dates_read(const struct moe_rpc_tls_files *files,
                                     struct moe_tls_dates *out) MOE_CHECKED;

/* ------------------------------------------------------------------ sessions */

/* What a session needs to go on. */
enum moe_tls_outcome {
    MOE_TLS_DONE,
    MOE_TLS_WAITS_TO_READ,  /* until the socket is readable */
    MOE_TLS_WAITS_TO_WRITE, /* until the socket is writable */
    MOE_TLS_ENDED,          /* the peer sends no more */
    MOE_TLS_FAILED,         /* for good: moe_tls_failure says why */
};

/* Why a session failed. */
enum moe_tls_failure {
    MOE_TLS_NO_FAILURE,
    MOE_TLS_PROTOCOL,    /* not TLS, an old version, no cipher in common, not for HTTP/2 */
    MOE_TLS_CERTIFICATE, /* the client's certificate is not accepted */
    MOE_TLS_NAME,        /* ... its name is not */
    MOE_TLS_LEFT,        /* the client left, for example because it does not accept ours */
    MOE_TLS_FAILURES
};

struct moe_tls_session;

/* Looks at the first bytes of a connection without taking them. DONE: the first record has come,
 * and begins a ClientHello of bounded length. FAILED: it is something else. */
enum moe_tls_outcome moe_tls_hello(int fd);

/* [any thread] A session over a non-blocking socket, which stays the caller's. NULL when out of
 * memory. All other functions belong to one thread at a time. */
struct moe_tls_session *moe_tls_accept(struct moe_tls *t, int fd);
/* Does not touch the socket. NULL is ignored. */
void moe_tls_close(struct moe_tls_session *s);

/* One step. Until it is DONE, nothing else. */
enum moe_tls_outcome moe_tls_handshake(struct moe_tls_session *s);
/* The name in the client's certificate (struct moe_rpc_identity.name); "" without one. After the
 * handshake. */
const char *moe_tls_name(const struct moe_tls_session *s);
/* The reason of FAILED, and the same for a person: "certificate has expired". */
enum moe_tls_failure moe_tls_failure(const struct moe_tls_session *s);
const char *moe_tls_failure_text(const struct moe_tls_session *s);

/* Reads until `bytes` is full or nothing is left. `*count` bytes were read, whatever the outcome
 * is; DONE means that more may be there. WAITS_TO_READ can come before the end of the connection is
 * seen: if the peer is known to have gone, read again. */
enum moe_tls_outcome moe_tls_read(struct moe_tls_session *s, void *bytes, size_t capacity,
                                  size_t *count);
/* The first bytes of all, at most MOE_TLS_PEEK_MAX, which moe_tls_read gives again. */
enum { MOE_TLS_PEEK_MAX = 24 };
enum moe_tls_outcome moe_tls_peek(struct moe_tls_session *s, const uint8_t **bytes, size_t *count);
/* Writes until all is written or the socket is full. `*count` bytes were taken. After
 * WAITS_TO_WRITE, the next call begins with the same bytes after these. */
enum moe_tls_outcome moe_tls_write(struct moe_tls_session *s, const void *bytes, size_t length,
                                   size_t *count);
/* Tells the peer that nothing follows, if the socket takes it. */
void moe_tls_end(struct moe_tls_session *s);

#endif
