/* SPDX-License-Identifier: Apache-2.0 */
/* What new sessions use: a context made from checked files, exchanged when they change. A session
 * has a reference to the context that it began with. */
#include "base/mutex.h"
#include "daemon/log.h"
#include "daemon/trusted_file.h"
#include "tls/inside.h"

#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
    FILES = 3,
    CHAIN_MAX_BYTES = 16384, /* of a client's certificates: memory before it is known */
    SECURITY_LEVEL = 2,      /* 112 bits: RSA keys of 2048 bits, no SHA-1 */
};

/* Forward secrecy and authenticated encryption only. */
static const char ciphers_1_2[] = "ECDHE+AESGCM:ECDHE+CHACHA20";
static const char ciphers_1_3[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
static const char groups[] = "X25519:P-256:P-384";

struct moe_tls {
    struct moe_rpc_tls_files files;
    /* Of the refreshing thread. */
    struct moe_trusted_mark marks[FILES];
    bool failed; /* the files were refused at the last look */

    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) SSL_CTX *context; /* one reference */
    MOE_GUARDED_BY(lock) struct moe_tls_dates dates;
};

/* ------------------------------------------------------------------ contexts */

static bool set_protocol(SSL_CTX *c)
{
    SSL_CTX_set_security_level(c, SECURITY_LEVEL);
    SSL_CTX_set_options(c, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET |
                               SSL_OP_CIPHER_SERVER_PREFERENCE);
    SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_max_cert_list(c, CHAIN_MAX_BYTES);
    return SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION) == 1 &&
           SSL_CTX_set_num_tickets(c, 0) == 1 && SSL_CTX_set_cipher_list(c, ciphers_1_2) == 1 &&
           SSL_CTX_set_ciphersuites(c, ciphers_1_3) == 1 &&
           SSL_CTX_set1_groups_list(c, groups) == 1;
}

static bool set_pair(SSL_CTX *c, const struct moe_tls_material *m)
{
    for (int i = 1; i < sk_X509_num(m->chain); i++)
        if (SSL_CTX_add1_chain_cert(c, sk_X509_value(m->chain, i)) != 1)
            return false;
    return SSL_CTX_use_certificate(c, sk_X509_value(m->chain, 0)) == 1 &&
           SSL_CTX_use_PrivateKey(c, m->key) == 1;
}

static bool set_roots(SSL_CTX *c, STACK_OF(X509) * roots)
{
    X509_STORE *store = SSL_CTX_get_cert_store(c);
    for (int i = 0; i < sk_X509_num(roots); i++)
        if (X509_STORE_add_cert(store, sk_X509_value(roots, i)) != 1 ||
            SSL_CTX_add_client_CA(c, sk_X509_value(roots, i)) != 1)
            return false;
    if (roots != NULL)
        SSL_CTX_set_verify(c, SSL_VERIFY_PEER, SSL_CTX_get_verify_callback(c));
    return true;
}

/* What only a server needs. */
static struct moe_status check(const struct moe_rpc_tls_files *files,
                               const struct moe_tls_material *m)
{
    if (X509_check_purpose(sk_X509_value(m->chain, 0), X509_PURPOSE_SSL_SERVER, 0) != 1)
        return moe_tls_bad_file(files->certificate,
                                "the certificate is not for servers (extended key usage)");
    for (int i = 0; i < sk_X509_num(m->roots); i++)
        if (X509_check_ca(sk_X509_value(m->roots, i)) == 0)
            return moe_tls_bad_file(files->ca, "a certificate is not that of a CA");
    return moe_ok();
}

static struct moe_status fill_context(SSL_CTX *c, const struct moe_rpc_tls_files *files,
                                      const struct moe_tls_material *m)
{
    MOE_TRY(check(files, m));
    if (!set_protocol(c) || !moe_tls_prepare_sessions(c))
        return moe_tls_bad_file("TLS", "OpenSSL lacks what moed needs");
    if (!set_pair(c, m))
        return moe_tls_bad_file(files->certificate, "the key or a signature is too weak");
    return set_roots(c, m->roots) ? moe_ok() : moe_tls_bad_file(files->ca, "cannot be used");
}

static void log_pair(const struct moe_rpc_tls_files *files, const X509 *leaf)
{
    char name[sizeof((struct moe_rpc_identity *)0)->name], until[32];
    struct tm date;
    bool named = moe_tls_name_of(leaf, name) && name[0] != '\0';
    if (ASN1_TIME_to_tm(X509_get0_notAfter(leaf), &date) != 1 ||
        strftime(until, sizeof until, "%Y-%m-%d %H:%M UTC", &date) == 0)
        (void)snprintf(until, sizeof until, "an unknown time");
    moe_log_info("TLS: the certificate %s is for %s and valid until %s; clients %s",
                 files->certificate, named ? name : "no name", until,
                 files->ca != NULL ? "may show one" : "are asked for none");
}

static struct moe_status load(const struct moe_rpc_tls_files *files, SSL_CTX **out,
                              struct moe_tls_dates *dates)
{
    struct moe_tls_material m;
    MOE_TRY(moe_tls_material_read(files, &m));
    SSL_CTX *c = SSL_CTX_new(TLS_server_method());
    struct moe_status st = c != NULL ? fill_context(c, files, &m)
                                     : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                                 "no memory for TLS");
    if (moe_failed(&st)) {
        SSL_CTX_free(c);
    } else {
        log_pair(files, sk_X509_value(m.chain, 0));
        *out = c;
        *dates = moe_tls_dates_of(&m);
    }
    moe_tls_material_free(&m);
    return st;
}

/* ------------------------------------------------------------------ life */

/* Looks at all files, so that one look sees all that has changed. */
static bool have_changed(struct moe_tls *t)
{
    const char *paths[FILES] = {t->files.certificate, t->files.key, t->files.ca};
    bool changed = false;
    for (size_t i = 0; i < FILES; i++)
        if (paths[i] != NULL)
            changed = moe_trusted_file_changed(paths[i], &t->marks[i]) || changed;
    return changed;
}

struct moe_status moe_tls_create(const struct moe_rpc_tls_files *files, struct moe_tls **out)
{
    struct moe_tls *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for TLS");
    moe_mutex_init(&t->lock);
    moe_mutex_not_shared(&t->lock);
    t->files = *files;
    (void)have_changed(t);
    struct moe_status st = load(files, &t->context, &t->dates);
    if (moe_failed(&st))
        moe_tls_destroy(t);
    else
        *out = t;
    return st;
}

void moe_tls_destroy(struct moe_tls *t)
{
    if (t == NULL)
        return;
    moe_mutex_not_shared(&t->lock);
    SSL_CTX_free(t->context);
    moe_mutex_destroy(&t->lock);
    free(t);
}

bool moe_tls_refresh(struct moe_tls *t)
{
    SSL_CTX *newer;
    struct moe_tls_dates dates;
    const bool changed = have_changed(t);
    if (!changed && !t->failed)
        return false;
    struct moe_status st = load(&t->files, &newer, &dates);
    t->failed = moe_failed(&st);
    if (t->failed && changed)
        moe_log_error("%s; the certificate and roots read before stay in use", st.text);
    if (t->failed)
        return false;
    moe_mutex_lock(&t->lock);
    SSL_CTX *older = t->context;
    t->context = newer;
    t->dates = dates;
    moe_mutex_unlock(&t->lock);
    SSL_CTX_free(older);
    return true;
}

bool moe_tls_refused(const struct moe_tls *t)
{
    return t->failed;
}

struct moe_tls_dates moe_tls_dates(struct moe_tls *t)
{
    moe_mutex_lock(&t->lock);
    struct moe_tls_dates dates = t->dates;
    moe_mutex_unlock(&t->lock);
    return dates;
}

SSL_CTX *moe_tls_current(struct moe_tls *t)
{
    moe_mutex_lock(&t->lock);
    SSL_CTX *c = t->context;
    (void)SSL_CTX_up_ref(c);
    moe_mutex_unlock(&t->lock);
    return c;
}
