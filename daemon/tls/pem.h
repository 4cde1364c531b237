/* SPDX-License-Identifier: Apache-2.0 */
/* The PEM files of TLS, read and checked before anything uses them. */
#ifndef MOE_TLS_PEM_H
#define MOE_TLS_PEM_H

#include "base/status.h"
#include "daemon/identity.h"

/* Contents of the files; NULL for a file that is not given. */
struct moe_tls_pem {
    char *certificate, *key, *ca;
};

/* Reads all files that are given, and checks them together: each holds what it should, the key is
 * that of the certificate, each certificate of the chain has signed the one before it, all dates
 * hold now, and other users can read no key and write no file. The text of an error begins with the
 * path. Errors: MOE_NOT_FOUND/IO, MOE_FAILED_PRECONDITION/IO (unreadable),
 * MOE_FAILED_PRECONDITION/CONFIG_INVALID (owner, mode, content), MOE_INVALID_ARGUMENT/TOO_LARGE. */
struct moe_status moe_tls_pem_read(const struct moe_rpc_tls_files *files,
                                   struct moe_tls_pem *out) MOE_CHECKED;
/* Clears the key. */
void moe_tls_pem_free(struct moe_tls_pem *pem);

#endif
