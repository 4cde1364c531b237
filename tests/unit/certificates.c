/* SPDX-License-Identifier: Apache-2.0 */
#include "certificates.h"

#include "support/check.h"

#include <dirent.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void certificates_directory(char path[CERTIFICATES_PATH])
{
    snprintf(path, CERTIFICATES_PATH, "/tmp/moed-tls-XXXXXX");
    assert_non_null(mkdtemp(path));
}

void certificates_remove(const char *directory)
{
    DIR *d = opendir(directory);
    assert_non_null(d);
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        if (e->d_name[0] != '.')
            (void)unlinkat(dirfd(d), e->d_name, 0);
    closedir(d);
    assert_int_equal(rmdir(directory), 0);
}

const char *certificates_file(const char *directory, const char *name, const char *what)
{
    static char paths[32][CERTIFICATES_PATH + 64];
    static unsigned next;
    char *path = paths[next++ % 32];
    snprintf(path, sizeof paths[0], "%s/%s.%s", directory, name, what);
    return path;
}

static void put(const char *directory, const char *name, const char *what, BIO *text, unsigned mode)
{
    char *data, fresh[CERTIFICATES_PATH + 80];
    const char *path = certificates_file(directory, name, what);
    long length = BIO_get_mem_data(text, &data);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *to = fopen(fresh, "w");
    assert_non_null(to);
    assert_int_equal(fwrite(data, 1, (size_t)length, to), length);
    assert_int_equal(fclose(to), 0);
    assert_int_equal(chmod(fresh, mode), 0);
    assert_int_equal(rename(fresh, path), 0);
    BIO_free(text);
}

void certificates_write(const char *directory, const char *name, const char *what, const char *text,
                        unsigned mode)
{
    BIO *b = BIO_new_mem_buf(text, -1);
    put(directory, name, what, b, mode);
}

static void add(X509 *to, X509 *issuer, int kind, const char *value)
{
    X509V3_CTX ctx;
    X509V3_set_ctx(&ctx, issuer, to, NULL, NULL, 0);
    X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &ctx, kind, value);
    assert_non_null(e);
    assert_int_equal(X509_add_ext(to, e, -1), 1);
    X509_EXTENSION_free(e);
}

static X509 *read_certificate(const char *directory, const char *name)
{
    FILE *from = fopen(certificates_file(directory, name, "pem"), "r");
    assert_non_null(from);
    X509 *c = PEM_read_X509(from, NULL, NULL, NULL);
    fclose(from);
    assert_non_null(c);
    return c;
}

static EVP_PKEY *read_key(const char *directory, const char *name)
{
    FILE *from = fopen(certificates_file(directory, name, "key"), "r");
    assert_non_null(from);
    EVP_PKEY *k = PEM_read_PrivateKey(from, NULL, NULL, NULL);
    fclose(from);
    assert_non_null(k);
    return k;
}

static void make(const char *directory, const char *name, const char *issuer,
                 const char *alternative, const char *usages, EVP_PKEY *key, long begin, long end)
{
    uint32_t serial;
    X509 *c = X509_new();
    assert_true(c != NULL && key != NULL);
    assert_int_equal(RAND_bytes((unsigned char *)&serial, sizeof serial), 1);
    X509_set_version(c, X509_VERSION_3);
    ASN1_INTEGER_set_uint64(X509_get_serialNumber(c), serial);
    X509_gmtime_adj(X509_getm_notBefore(c), begin);
    X509_gmtime_adj(X509_getm_notAfter(c), end);
    X509_set_pubkey(c, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(c), "CN", MBSTRING_ASC,
                               (const unsigned char *)name, -1, -1, 0);
    X509 *by = issuer != NULL ? read_certificate(directory, issuer) : c;
    EVP_PKEY *with = issuer != NULL ? read_key(directory, issuer) : key;
    X509_set_issuer_name(c, X509_get_subject_name(by));
    add(c, by, NID_basic_constraints, alternative == NULL ? "critical,CA:TRUE" : "CA:FALSE");
    if (alternative != NULL)
        add(c, by, NID_subject_alt_name, alternative);
    if (usages != NULL)
        add(c, by, NID_ext_key_usage, usages);
    assert_true(X509_sign(c, with, EVP_sha256()) > 0);
    BIO *pem = BIO_new(BIO_s_mem()), *secret = BIO_new(BIO_s_mem());
    assert_int_equal(PEM_write_bio_X509(pem, c), 1);
    assert_int_equal(PEM_write_bio_PrivateKey(secret, key, NULL, NULL, 0, NULL, NULL), 1);
    put(directory, name, "pem", pem, 0644);
    put(directory, name, "key", secret, 0600);
    if (issuer != NULL) {
        X509_free(by);
        EVP_PKEY_free(with);
    }
    X509_free(c);
    EVP_PKEY_free(key);
}

void certificates_make(const char *directory, const char *name, const char *issuer,
                       const char *alternative, long begin, long end)
{
    make(directory, name, issuer, alternative, NULL, EVP_EC_gen("P-256"), begin, end);
}

void certificates_make_special(const char *directory, const char *name, const char *issuer,
                               const char *alternative, const char *usages, unsigned rsa_bits)
{
    enum { HOUR_S = 3600 };
    make(directory, name, issuer, alternative, usages,
         rsa_bits > 0 ? EVP_RSA_gen(rsa_bits) : EVP_EC_gen("P-256"), -HOUR_S, HOUR_S);
}

SSL *certificates_client(int fd, const char *directory, const char *root, const char *own,
                         const char *protocol)
{
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    assert_non_null(context);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    assert_int_equal(SSL_CTX_load_verify_file(context, certificates_file(directory, root, "pem")),
                     1);
    if (own != NULL) {
        const char *pem = certificates_file(directory, own, "pem");
        assert_int_equal(SSL_CTX_use_certificate_file(context, pem, SSL_FILETYPE_PEM), 1);
        const char *key = certificates_file(directory, own, "key");
        assert_int_equal(SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM), 1);
    }
    SSL *ssl = SSL_new(context);
    SSL_CTX_free(context);
    assert_true(ssl != NULL && SSL_set_fd(ssl, fd) == 1);
    if (protocol != NULL) {
        unsigned char list[32];
        const size_t length = strlen(protocol);
        assert_true(length < sizeof list);
        list[0] = (unsigned char)length;
        memcpy(list + 1, protocol, length);
        assert_int_equal(SSL_set_alpn_protos(ssl, list, (unsigned)length + 1), 0);
    }
    SSL_set_connect_state(ssl);
    return ssl;
}

void certificates_join(const char *directory, const char *to, const char *first, const char *second)
{
    const char *const names[] = {first, second};
    char text[16384];
    size_t length = 0;
    for (int i = 0; i < 2; i++) {
        FILE *from = fopen(certificates_file(directory, names[i], "pem"), "r");
        assert_non_null(from);
        length += fread(text + length, 1, sizeof text - 1 - length, from);
        fclose(from);
    }
    text[length] = '\0';
    certificates_write(directory, to, "pem", text, 0644);
}
