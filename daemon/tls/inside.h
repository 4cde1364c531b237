/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this room share: pem.c (files and their checks), context.c (what new sessions
 * use), session.c, name.c (the name in a certificate). */
#ifndef MOE_TLS_INSIDE_H
#define MOE_TLS_INSIDE_H

#include "tls/tls.h"

#include <openssl/ssl.h>
#include <openssl/x509.h>

/* What checked files hold; NULL for what is not given. */
struct moe_tls_material {
    STACK_OF(X509) * chain; /* begins with the own certificate */
    EVP_PKEY *key;
    STACK_OF(X509) * roots;
};

/* Errors: those of moe_tls_pem_read. On failure `m` needs no moe_tls_material_free. */
struct moe_status moe_tls_material_read(const struct moe_rpc_tls_files *files,
                                        struct moe_tls_material *m) MOE_CHECKED;
void moe_tls_material_free(struct moe_tls_material *m);
struct moe_tls_dates moe_tls_dates_of(const struct moe_tls_material *m);
/* "PATH: WHY". Empties the library's queue of errors. */
struct moe_status moe_tls_bad_file(const char *path, const char *why) MOE_CHECKED;

/* The URI of the alternative names, else the first DNS name; "" if there is neither. False if that
 * name is too long or has other characters than printable ASCII, or if there are two URIs. */
bool moe_tls_name_of(const X509 *certificate,
                     char name[sizeof((struct moe_rpc_identity *)0)->name]);

/* Sets the parts of a context that sessions need (session.c). */
bool moe_tls_prepare_sessions(SSL_CTX *context);
/* A reference to the context for new sessions (context.c). */
SSL_CTX *moe_tls_current(struct moe_tls *t);

#endif
