/* SPDX-License-Identifier: Apache-2.0 */
/* Certificates for tests, as PEM files in a directory, and a client of TLS. P-256 keys, no
 * passphrase, mode 0600. */
#ifndef CERTIFICATES_H
#define CERTIFICATES_H

#include <openssl/ssl.h>

enum { CERTIFICATES_PATH = 256 };

/* Makes a new directory; remove it with certificates_remove. */
void certificates_directory(char path[CERTIFICATES_PATH]);
void certificates_remove(const char *directory);

/* "DIRECTORY/NAME.pem" or ".key" (`what`). The text lives until the 32nd call after this. */
const char *certificates_file(const char *directory, const char *name, const char *what);

/* Writes NAME.pem and NAME.key. Replaces files by rename, as a rotation does: first the
 * certificate, then the key.
 * issuer      name of a pair in `directory` that signs; NULL: signed by its own key
 * alternative names as in openssl.cnf ("DNS:localhost,IP:127.0.0.1"); NULL: a CA
 * begin, end  seconds from now on */
void certificates_make(const char *directory, const char *name, const char *issuer,
                       const char *alternative, long begin, long end);

/* The same with extended key usages ("clientAuth") or an RSA key of so many bits, where given. */
void certificates_make_special(const char *directory, const char *name, const char *issuer,
                               const char *alternative, const char *usages, unsigned rsa_bits);

/* Writes `text` to NAME.WHAT with this mode, by rename. */
void certificates_write(const char *directory, const char *name, const char *what, const char *text,
                        unsigned mode);

/* Writes TO.pem with the certificates of both pairs, in this order. */
void certificates_join(const char *directory, const char *to, const char *first,
                       const char *second);

/* A client over `fd` that trusts the pair `root`, shows the pair `own` and offers `protocol`
 * ("h2"); both may be NULL. Free it with SSL_free. */
SSL *certificates_client(int fd, const char *directory, const char *root, const char *own,
                         const char *protocol);

#endif
