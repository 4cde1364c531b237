/* SPDX-License-Identifier: Apache-2.0 */
#include "tls/pem.h"

#include "daemon/trusted_file.h"
#include "tls/inside.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY_FORBIDDEN = 0037,    /* a group may read it, others may do nothing */
    PUBLIC_FORBIDDEN = 0022, /* others must not write it */
    CHAIN_MAX = 16,
};

struct moe_status moe_tls_bad_file(const char *path, const char *why)
{
    ERR_clear_error();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID, "%.160s: %s", path, why);
}
/* A key with a passphrase is refused. Without this, the library would ask at the terminal. */
static int no_passphrase(char *buffer, int size, int writing, void *ctx)
{
    (void)buffer, (void)size, (void)writing, (void)ctx;
    return -1;
}

static struct moe_status check_dates(const char *path, const X509 *certificate)
{
    char when[64] = "";
    bool begun = X509_cmp_current_time(X509_get0_notBefore(certificate)) < 0;
    bool over = X509_cmp_current_time(X509_get0_notAfter(certificate)) <= 0;
    if (begun && !over)
        return moe_ok();
    BIO *text = BIO_new(BIO_s_mem());
    const ASN1_TIME *limit =
        over ? X509_get0_notAfter(certificate) : X509_get0_notBefore(certificate);
    if (text != NULL && ASN1_TIME_print(text, limit) == 1)
        when[BIO_read(text, when, sizeof when - 1)] = '\0';
    BIO_free(text);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                     over ? "%.160s: a certificate expired on %s"
                          : "%.160s: a certificate is not valid before %s",
                     path, when);
}

/* All certificates of a file. Free them with sk_X509_pop_free. */
static struct moe_status parse_certificates(const char *path, const char *pem,
                                            STACK_OF(X509) * *out)
{
    STACK_OF(X509) *all = sk_X509_new_null();
    BIO *from = BIO_new_mem_buf(pem, -1);
    X509 *one = NULL;
    bool room = all != NULL && from != NULL;
    while (room && (one = PEM_read_bio_X509(from, NULL, no_passphrase, NULL)) != NULL) {
        room = sk_X509_push(all, one) > 0;
        if (!room)
            X509_free(one);
    }
    bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    ERR_clear_error();
    BIO_free(from);
    *out = all;
    if (!room)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for certificates");
    return ended && sk_X509_num(all) > 0
               ? moe_ok()
               : moe_tls_bad_file(path,
                                  "not a PEM file with certificates, or one of them is damaged");
}

static struct moe_status check_roots(const char *path, const STACK_OF(X509) * roots)
{
    struct moe_status st = moe_ok();
    for (int i = 0; i < sk_X509_num(roots); i++) {
        st = check_dates(path, sk_X509_value(roots, i));
        if (!moe_failed(&st))
            return st; /* others may be old or new ones, for a change */
    }
    return st;
}

static struct moe_status check_chain(const char *path, const STACK_OF(X509) * chain)
{
    if (sk_X509_num(chain) > CHAIN_MAX)
        return moe_tls_bad_file(path, "the chain is too long");
    for (int i = 0; i < sk_X509_num(chain); i++) {
        X509 *one = sk_X509_value(chain, i);
        MOE_TRY(check_dates(path, one));
        X509 *before = sk_X509_value(chain, i - 1); /* NULL at the start */
        if (before != NULL && (X509_check_issued(one, before) != X509_V_OK ||
                               X509_verify(before, X509_get0_pubkey(one)) != 1))
            return moe_tls_bad_file(path,
                                    "a certificate of the chain has not signed the one before it");
    }
    return moe_ok();
}

static struct moe_status parse_key(const struct moe_rpc_tls_files *files, const char *pem,
                                   X509 *certificate, EVP_PKEY **out)
{
    BIO *from = BIO_new_mem_buf(pem, -1);
    *out = from != NULL ? PEM_read_bio_PrivateKey(from, NULL, no_passphrase, NULL) : NULL;
    BIO_free(from);
    if (*out == NULL)
        return moe_tls_bad_file(files->key, "not a PEM private key without a passphrase");
    return X509_check_private_key(certificate, *out) == 1
               ? moe_ok()
               : moe_tls_bad_file(files->key, "the key is not that of the certificate");
}

static struct moe_status parse_all(const struct moe_rpc_tls_files *files,
                                   const struct moe_tls_pem *pem, struct moe_tls_material *m)
{
    if (files->certificate != NULL) {
        MOE_TRY(parse_certificates(files->certificate, pem->certificate, &m->chain));
        MOE_TRY(check_chain(files->certificate, m->chain));
        MOE_TRY(parse_key(files, pem->key, sk_X509_value(m->chain, 0), &m->key));
    }
    if (files->ca != NULL) {
        MOE_TRY(parse_certificates(files->ca, pem->ca, &m->roots));
        MOE_TRY(check_roots(files->ca, m->roots));
    }
    return moe_ok();
}

static struct moe_status read_all(const struct moe_rpc_tls_files *files, struct moe_tls_pem *out)
{
    size_t length;
    if (files->certificate != NULL)
        MOE_TRY(moe_trusted_file_read("TLS certificate", files->certificate, PUBLIC_FORBIDDEN,
                                      &out->certificate, &length));
    if (files->key != NULL)
        MOE_TRY(moe_trusted_file_read("TLS key", files->key, KEY_FORBIDDEN, &out->key, &length));
    if (files->ca != NULL)
        MOE_TRY(moe_trusted_file_read("TLS CA", files->ca, PUBLIC_FORBIDDEN, &out->ca, &length));
    return moe_ok();
}

static struct moe_status read_both(const struct moe_rpc_tls_files *files, struct moe_tls_pem *pem,
                                   struct moe_tls_material *m)
{
    *pem = (struct moe_tls_pem){0};
    *m = (struct moe_tls_material){0};
    MOE_TRY(read_all(files, pem));
    return parse_all(files, pem, m);
}

struct moe_status moe_tls_pem_read(const struct moe_rpc_tls_files *files, struct moe_tls_pem *out)
{
    struct moe_tls_material m;
    struct moe_status st = read_both(files, out, &m);
    moe_tls_material_free(&m);
    if (moe_failed(&st))
        moe_tls_pem_free(out);
    return st;
}

struct moe_status moe_tls_material_read(const struct moe_rpc_tls_files *files,
                                        struct moe_tls_material *m)
{
    struct moe_tls_pem pem;
    struct moe_status st = read_both(files, &pem, m);
    moe_tls_pem_free(&pem);
    if (moe_failed(&st))
        moe_tls_material_free(m);
    return st;
}

static int64_t end_of(const X509 *certificate)
{
    struct tm date;
    return ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &date) == 1 ? (int64_t)timegm(&date)
                                                                        : 0;
}

struct moe_tls_dates moe_tls_dates_of(const struct moe_tls_material *m)
{
    struct moe_tls_dates d = {0};
    for (int i = 0; i < sk_X509_num(m->chain); i++) {
        int64_t end = end_of(sk_X509_value(m->chain, i));
        d.certificate = i == 0 || end < d.certificate ? end : d.certificate;
    }
    for (int i = 0; i < sk_X509_num(m->roots); i++) {
        int64_t end = end_of(sk_X509_value(m->roots, i));
        d.ca = end > d.ca ? end : d.ca;
    }
    return d;
}

struct moe_status moe_tls_dates_read(const struct moe_rpc_tls_files *files,
                                     struct moe_tls_dates *out)
{
    struct moe_tls_material m;
    MOE_TRY(moe_tls_material_read(files, &m));
    *out = moe_tls_dates_of(&m);
    moe_tls_material_free(&m);
    return moe_ok();
}

void moe_tls_material_free(struct moe_tls_material *m)
{
    sk_X509_pop_free(m->chain, X509_free);
    EVP_PKEY_free(m->key);
    sk_X509_pop_free(m->roots, X509_free);
    *m = (struct moe_tls_material){0};
}

void moe_tls_pem_free(struct moe_tls_pem *pem)
{
    if (pem->key != NULL)
        explicit_bzero(pem->key, strlen(pem->key));
    free(pem->certificate);
    free(pem->key);
    free(pem->ca);
    *pem = (struct moe_tls_pem){0};
}
