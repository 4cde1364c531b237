/* SPDX-License-Identifier: Apache-2.0 */
/* TLS of a server: which files are taken, which clients get a session and under which name, and
 * what a session does with bytes. The other end is OpenSSL's client over a socket pair. */
#include "certificates.h"
#include "support/check.h"
#include "support/random.h"
#include "tls/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HOUR = 3600, DAY = 24 * HOUR };

static char at[CERTIFICATES_PATH];
static char certificate_path[CERTIFICATES_PATH + 64], key_path[CERTIFICATES_PATH + 64],
    ca_path[CERTIFICATES_PATH + 64];
static const struct moe_rpc_tls_files with_ca = {certificate_path, key_path, ca_path},
                                      without_ca = {certificate_path, key_path, NULL};

static void make(const char *name, const char *names)
{
    certificates_make(at, name, names != NULL ? "ca" : NULL, names, -HOUR, HOUR);
}

static int make_files(void **state)
{
    (void)state;
    certificates_directory(at);
    make("ca", NULL);
    make("server", "DNS:localhost");
    snprintf(certificate_path, sizeof certificate_path, "%s/server.pem", at);
    snprintf(key_path, sizeof key_path, "%s/server.key", at);
    snprintf(ca_path, sizeof ca_path, "%s/ca.pem", at);
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    certificates_remove(at);
    return 0;
}

/* ------------------------------------------------------------------ files */

/* The files as they are now are refused, and `text` says why. */
static void check_refused(const char *text)
{
    struct moe_tls *t = NULL;
    struct moe_status st = moe_tls_create(&with_ca, &t);
    print_message("  %s\n", st.text);
    assert_true(moe_failed(&st));
    assert_non_null(strstr(st.text, text));
}

static void a_pair_that_no_client_could_use_is_refused(void **state)
{
    (void)state;
    certificates_make(at, "server", "ca", "DNS:a", -3 * DAY, -DAY);
    check_refused("expired on");
    certificates_make_special(at, "server", "ca", "DNS:a", "clientAuth", 0);
    check_refused("is not for servers");
    certificates_make_special(at, "server", "ca", "DNS:a", NULL, 1024);
    check_refused("too weak");
    certificates_make_special(at, "server", "ca", "DNS:a", "serverAuth", 2048);
    struct moe_tls *t;
    assert_ok(moe_tls_create(&with_ca, &t));
    moe_tls_destroy(t);
    certificates_make(at, "server", "ca", "DNS:a", -DAY, 5 * DAY);
    assert_ok(moe_tls_create(&with_ca, &t));
    assert_in_range(moe_tls_dates(t).certificate, time(NULL) + 4 * DAY, time(NULL) + 6 * DAY);
    moe_tls_destroy(t);
    make("leaf", "DNS:a");
    assert_int_equal(rename(certificates_file(at, "leaf", "pem"), ca_path), 0);
    check_refused("not that of a CA");
}

static void noise_in_files_is_refused(void **state)
{
    static char noise[65536], huge[(1 << 20) + 2];
    static const char *const names[] = {"server", "server", "ca"}, *const ends[] = {"pem", "key",
                                                                                    "pem"};
    (void)state;
    memset(huge, 'x', sizeof huge - 1);
    for (size_t i = 0; i < sizeof noise - 1; i++)
        noise[i] = (char)(1 + random_below(255));
    for (size_t i = 0; i < 3; i++) {
        certificates_write(at, names[i], ends[i], "", 0600);
        check_refused("not a PEM");
        certificates_write(at, names[i], ends[i], noise, 0600);
        check_refused("not a PEM");
        certificates_write(at, names[i], ends[i], huge, 0600);
        check_refused("is larger than");
        assert_int_equal(unlink(certificates_file(at, names[i], ends[i])), 0);
        assert_int_equal(mkdir(certificates_file(at, names[i], ends[i]), 0700), 0);
        check_refused("is not a regular file");
        assert_int_equal(rmdir(certificates_file(at, names[i], ends[i])), 0);
        make("ca", NULL);
        make("server", "DNS:localhost");
    }
}

static void an_encrypted_key_is_refused_and_asks_nobody(void **state)
{
    BIO *text = BIO_new(BIO_s_mem());
    EVP_PKEY *key = EVP_EC_gen("P-256");
    char *data;
    (void)state;
    assert_int_equal(
        PEM_write_bio_PKCS8PrivateKey(text, key, EVP_aes_128_cbc(), "secret", 6, NULL, NULL), 1);
    assert_int_equal(BIO_write(text, "", 1), 1);
    (void)BIO_get_mem_data(text, &data);
    certificates_write(at, "server", "key", data, 0600);
    check_refused("without a passphrase");
    BIO_free(text);
    EVP_PKEY_free(key);
}

/* ------------------------------------------------------------------ sessions */

struct pair {
    struct moe_tls *tls;
    int fds[2];
    SSL *client;
    struct moe_tls_session *session;
    enum moe_tls_outcome outcome; /* of the handshake */
    bool client_done;
};

static void start_pair(struct pair *p, struct moe_tls *tls, const char *own, const char *protocol)
{
    *p = (struct pair){.tls = tls};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, p->fds), 0);
    p->client = certificates_client(p->fds[0], at, "ca", own, protocol);
    p->session = moe_tls_accept(tls, p->fds[1]);
    assert_non_null(p->session);
}

static void end_pair(struct pair *p)
{
    SSL_free(p->client);
    moe_tls_close(p->session);
    close(p->fds[0]);
    close(p->fds[1]);
}

/* Both sides, until both have finished or the server has failed. */
static void shake(struct pair *p)
{
    p->outcome = MOE_TLS_WAITS_TO_READ;
    for (int i = 0; i < 20; i++) {
        p->client_done = SSL_do_handshake(p->client) == 1;
        if (p->outcome != MOE_TLS_DONE && p->outcome != MOE_TLS_FAILED)
            p->outcome = moe_tls_handshake(p->session);
        if (p->outcome == MOE_TLS_FAILED || (p->outcome == MOE_TLS_DONE && p->client_done))
            break;
    }
    ERR_clear_error();
}

static enum moe_tls_failure failure_of(struct pair *p)
{
    shake(p);
    if (p->outcome == MOE_TLS_FAILED)
        print_message("  %s\n", moe_tls_failure_text(p->session));
    return moe_tls_failure(p->session);
}

static struct moe_tls *create(const struct moe_rpc_tls_files *files)
{
    struct moe_tls *t;
    assert_ok(moe_tls_create(files, &t));
    return t;
}

static void check_name(struct moe_tls *tls, const char *names, const char *want)
{
    struct pair p;
    if (names != NULL)
        make("client", names);
    start_pair(&p, tls, names != NULL ? "client" : NULL, "h2");
    assert_int_equal(failure_of(&p), MOE_TLS_NO_FAILURE);
    assert_int_equal(p.outcome, MOE_TLS_DONE);
    assert_string_equal(moe_tls_name(p.session), want);
    end_pair(&p);
}

static void the_certificate_says_who_connects(void **state)
{
    struct moe_tls *asks = create(&with_ca), *does_not_ask = create(&without_ca);
    (void)state;
    check_name(asks, NULL, "");
    check_name(asks, "URI:spiffe://moed/ops", "spiffe://moed/ops");
    check_name(asks, "DNS:a.example,URI:spiffe://moed/w,DNS:b.example", "spiffe://moed/w");
    check_name(asks, "IP:127.0.0.1,DNS:a.example,DNS:b.example", "a.example");
    check_name(asks, "IP:127.0.0.1", "");
    check_name(does_not_ask, "URI:spiffe://moed/ops", "");
    moe_tls_destroy(asks);
    moe_tls_destroy(does_not_ask);
}

/* A client with the pair "client" gets no session. */
static void check_bad_client(struct moe_tls *tls, enum moe_tls_failure why)
{
    struct pair p;
    start_pair(&p, tls, "client", "h2");
    assert_int_equal(failure_of(&p), why);
    assert_int_equal(moe_tls_handshake(p.session), MOE_TLS_FAILED);
    end_pair(&p);
}

static void a_bad_certificate_of_a_client_gets_no_session(void **state)
{
    struct moe_tls *tls = create(&with_ca);
    char lengthy[320] = "DNS:";
    (void)state;
    make("other", NULL);
    certificates_make(at, "client", "other", "URI:a:b", -HOUR, HOUR);
    check_bad_client(tls, MOE_TLS_CERTIFICATE);
    certificates_make(at, "client", "ca", "URI:a:b", -3 * DAY, -DAY);
    check_bad_client(tls, MOE_TLS_CERTIFICATE);
    certificates_make(at, "client", "ca", "URI:a:b", DAY, 3 * DAY);
    check_bad_client(tls, MOE_TLS_CERTIFICATE);
    certificates_make_special(at, "client", "ca", "URI:a:b", "serverAuth", 0);
    check_bad_client(tls, MOE_TLS_CERTIFICATE);
    make("client", "URI:a b");
    check_bad_client(tls, MOE_TLS_NAME);
    make("client", "URI:spiffe://moed/w,DNS:a.example,URI:spiffe://moed/x");
    check_bad_client(tls, MOE_TLS_NAME);
    make("client", "URI:a\x7f");
    check_bad_client(tls, MOE_TLS_NAME);
    memset(lengthy + 4, 'a', 255);
    check_name(tls, lengthy, lengthy + 4);
    lengthy[4 + 255] = 'a';
    make("client", lengthy);
    check_bad_client(tls, MOE_TLS_NAME);
    moe_tls_destroy(tls);
}

/* The text "ops", NUL, ".x" as the DNS name: as a C string it would be "ops". */
static void a_name_with_a_nul_is_refused(void **state)
{
    static const unsigned char hidden[] = "ops\0.x";
    struct moe_tls *tls = create(&with_ca);
    (void)state;
    make("client", "IP:127.0.0.1");
    FILE *file = fopen(certificates_file(at, "client", "pem"), "r+");
    FILE *secret = fopen(certificates_file(at, "ca", "key"), "r");
    assert_true(file != NULL && secret != NULL);
    X509 *x = PEM_read_X509(file, NULL, NULL, NULL);
    EVP_PKEY *key = PEM_read_PrivateKey(secret, NULL, NULL, NULL);
    GENERAL_NAMES *names = sk_GENERAL_NAME_new_null();
    GENERAL_NAME *name = GENERAL_NAME_new();
    ASN1_IA5STRING *text = ASN1_IA5STRING_new();
    assert_int_equal(ASN1_STRING_set(text, hidden, sizeof hidden - 1), 1);
    GENERAL_NAME_set0_value(name, GEN_DNS, text);
    assert_true(sk_GENERAL_NAME_push(names, name) > 0);
    assert_int_equal(X509_add1_ext_i2d(x, NID_subject_alt_name, names, 0, X509V3_ADD_REPLACE), 1);
    assert_true(X509_sign(x, key, EVP_sha256()) > 0);
    rewind(file);
    assert_int_equal(PEM_write_X509(file, x), 1);
    fclose(file);
    fclose(secret);
    GENERAL_NAMES_free(names);
    X509_free(x);
    EVP_PKEY_free(key);
    check_bad_client(tls, MOE_TLS_NAME);
    moe_tls_destroy(tls);
}

static void only_http2_over_a_current_version_gets_a_session(void **state)
{
    struct moe_tls *tls = create(&with_ca);
    struct pair p;
    (void)state;
    start_pair(&p, tls, NULL, NULL);
    assert_int_equal(failure_of(&p), MOE_TLS_PROTOCOL);
    end_pair(&p);
    start_pair(&p, tls, NULL, "http/1.1");
    assert_int_equal(failure_of(&p), MOE_TLS_PROTOCOL);
    end_pair(&p);
    start_pair(&p, tls, NULL, "h2");
    SSL_set_security_level(p.client, 0);
    SSL_set_min_proto_version(p.client, TLS1_VERSION);
    SSL_set_max_proto_version(p.client, TLS1_1_VERSION);
    assert_int_equal(failure_of(&p), MOE_TLS_PROTOCOL);
    end_pair(&p);
    start_pair(&p, tls, NULL, "h2");
    SSL_set_max_proto_version(p.client, TLS1_2_VERSION);
    assert_int_equal(SSL_set_cipher_list(p.client, "AES128-SHA"), 1); /* no forward secrecy */
    assert_int_equal(failure_of(&p), MOE_TLS_PROTOCOL);
    end_pair(&p);
    start_pair(&p, tls, NULL, "h2");
    assert_int_equal(SSL_set1_groups_list(p.client, "P-521:X25519"), 1); /* needs a second hello */
    assert_int_equal(failure_of(&p), MOE_TLS_PROTOCOL);
    end_pair(&p);
    start_pair(&p, tls, NULL, "h2");
    SSL_set_max_proto_version(p.client, TLS1_2_VERSION);
    assert_int_equal(failure_of(&p), MOE_TLS_NO_FAILURE);
    assert_string_equal(SSL_get_version(p.client), "TLSv1.2");
    end_pair(&p);
    moe_tls_destroy(tls);
}

static void a_client_that_leaves_is_not_one_that_is_wrong(void **state)
{
    struct moe_tls *tls = create(&with_ca);
    struct pair p;
    (void)state;
    start_pair(&p, tls, NULL, "h2");
    assert_int_not_equal(SSL_do_handshake(p.client), 1);
    shutdown(p.fds[0], SHUT_WR);
    assert_int_equal(moe_tls_handshake(p.session), MOE_TLS_FAILED);
    assert_int_equal(moe_tls_failure(p.session), MOE_TLS_LEFT);
    end_pair(&p);
    start_pair(&p, tls, NULL, "h2");
    SSL_free(p.client); /* one that trusts another root */
    make("other", NULL);
    p.client = certificates_client(p.fds[0], at, "other", NULL, "h2");
    assert_int_equal(failure_of(&p), MOE_TLS_LEFT);
    end_pair(&p);
    moe_tls_destroy(tls);
}

/* What the first bytes of a connection are taken for. */
static enum moe_tls_outcome hello_of(const char *bytes, size_t length)
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(send(fds[0], bytes, length, 0), (ssize_t)length);
    enum moe_tls_outcome outcome = moe_tls_hello(fds[1]);
    shutdown(fds[0], SHUT_WR);
    assert_true(length > 0 || moe_tls_hello(fds[1]) == MOE_TLS_ENDED);
    close(fds[0]);
    close(fds[1]);
    return outcome;
}

static void only_a_client_hello_of_some_length_costs_a_session(void **state)
{
    static const char good[] = "\26\3\1\0\6\1\0\0\2ab", lengthy[] = "\26\3\1\2\0\1\0\100\1";
    (void)state;
    for (size_t i = 0; i < 11; i++)
        assert_int_equal(hello_of(good, i), MOE_TLS_WAITS_TO_READ);
    assert_int_equal(hello_of(good, 11), MOE_TLS_DONE);
    assert_int_equal(hello_of(lengthy, 9), MOE_TLS_FAILED);
    assert_int_equal(hello_of("PRI * HTTP/2.0", 14), MOE_TLS_FAILED);
    assert_int_equal(hello_of("\26\2", 2), MOE_TLS_FAILED);
    assert_int_equal(hello_of("\26\3\1\2\0\2", 6), MOE_TLS_FAILED);
}

static void noise_in_a_handshake_is_refused(void **state)
{
    struct moe_tls *tls = create(&with_ca);
    (void)state;
    for (int i = 0; i < 200; i++) {
        struct pair p;
        char bytes[600];
        start_pair(&p, tls, NULL, "h2");
        (void)SSL_do_handshake(p.client);
        ssize_t n = recv(p.fds[1], bytes, sizeof bytes, 0);
        assert_true(n > 20);
        for (int flips = 0; flips < 4; flips++)
            bytes[random_below((unsigned)n)] ^= (char)(1 + random_below(255));
        assert_int_equal(send(p.fds[0], bytes, (size_t)n, 0), n);
        shutdown(p.fds[0], SHUT_WR);
        for (int step = 0; step < 4; step++)
            p.outcome = moe_tls_handshake(p.session);
        assert_int_equal(p.outcome, MOE_TLS_FAILED);
        end_pair(&p);
    }
    ERR_clear_error();
    moe_tls_destroy(tls);
}

/* ------------------------------------------------------------------ bytes */

static void bytes_arrive_whole_and_in_order_both_ways(void **state)
{
    enum { LENGTH = 8 << 20 };
    uint8_t *bytes = malloc(LENGTH), *there = malloc(LENGTH), *back = malloc(LENGTH);
    struct moe_tls *tls = create(&with_ca);
    const uint8_t *first;
    struct pair p;
    size_t sent = 0, arrived = 0, returned = 0, received = 0, n;
    bool waited = false;
    (void)state;
    assert_true(bytes != NULL && there != NULL && back != NULL);
    fill_random(bytes, LENGTH);
    start_pair(&p, tls, NULL, "h2");
    shake(&p);
    SSL_set_mode(p.client, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    assert_int_equal(SSL_write(p.client, bytes, 10), 10);
    assert_int_equal(moe_tls_peek(p.session, &first, &n), MOE_TLS_WAITS_TO_READ);
    assert_int_equal(n, 10);
    assert_int_equal(SSL_write(p.client, bytes + 10, 100), 100);
    assert_int_equal(moe_tls_peek(p.session, &first, &n), MOE_TLS_DONE);
    assert_int_equal(n, MOE_TLS_PEEK_MAX);
    assert_memory_equal(first, bytes, n);
    sent = 110;
    while (received < LENGTH) {
        const size_t part = 1 + random_below(100000), rest = LENGTH - sent;
        if (rest > 0 && SSL_write_ex(p.client, bytes + sent, part < rest ? part : rest, &n) == 1)
            sent += n;
        assert_int_not_equal(moe_tls_read(p.session, there + arrived, LENGTH - arrived, &n),
                             MOE_TLS_FAILED);
        arrived += n;
        enum moe_tls_outcome outcome =
            moe_tls_write(p.session, there + returned, arrived - returned, &n);
        assert_int_not_equal(outcome, MOE_TLS_FAILED);
        waited = waited || outcome == MOE_TLS_WAITS_TO_WRITE;
        returned += n;
        if (random_below(3) == 0 &&
            SSL_read_ex(p.client, back + received, LENGTH - received, &n) == 1)
            received += n;
    }
    assert_true(waited);
    assert_memory_equal(bytes, back, LENGTH);
    assert_int_equal(SSL_shutdown(p.client), 0);
    assert_int_equal(moe_tls_read(p.session, there, 1, &n), MOE_TLS_ENDED);
    moe_tls_end(p.session);
    assert_int_equal(SSL_shutdown(p.client), 1); /* close_notify has come */
    end_pair(&p);
    moe_tls_destroy(tls);
    free(bytes);
    free(there);
    free(back);
}

static void a_flood_of_new_keys_or_handshakes_is_ended(void **state)
{
    struct moe_tls *tls = create(&with_ca);
    struct pair p;
    char bytes[100];
    size_t n;
    (void)state;
    start_pair(&p, tls, NULL, "h2");
    shake(&p);
    enum moe_tls_outcome outcome = MOE_TLS_DONE;
    int updates = 0;
    for (; outcome != MOE_TLS_FAILED && updates < 1000; updates++) {
        assert_int_equal(SSL_key_update(p.client, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
        assert_int_equal(SSL_write(p.client, "a", 1), 1);
        outcome = moe_tls_read(p.session, bytes, sizeof bytes, &n);
    }
    print_message("  ended after %d new keys: %s\n", updates, moe_tls_failure_text(p.session));
    assert_in_range(updates, 16, 64);
    assert_int_equal(moe_tls_failure(p.session), MOE_TLS_PROTOCOL);
    end_pair(&p);

    start_pair(&p, tls, NULL, "h2");
    SSL_set_max_proto_version(p.client, TLS1_2_VERSION);
    shake(&p);
    assert_int_equal(p.outcome, MOE_TLS_DONE);
    (void)SSL_renegotiate(p.client);
    assert_int_not_equal(SSL_do_handshake(p.client), 1);
    (void)moe_tls_read(p.session, bytes, sizeof bytes, &n);
    assert_int_not_equal(SSL_do_handshake(p.client), 1); /* no second handshake */
    ERR_clear_error();
    end_pair(&p);
    moe_tls_destroy(tls);
}

/* ------------------------------------------------------------------ new files */

/* The server shows the certificate in NAME.pem. */
static void check_shown(struct moe_tls *tls, const char *name)
{
    struct pair p;
    FILE *file = fopen(certificates_file(at, name, "pem"), "r");
    assert_non_null(file);
    X509 *want = PEM_read_X509(file, NULL, NULL, NULL);
    fclose(file);
    start_pair(&p, tls, NULL, "h2");
    shake(&p);
    assert_int_equal(p.outcome, MOE_TLS_DONE);
    X509 *shown = SSL_get1_peer_certificate(p.client);
    assert_int_equal(X509_cmp(shown, want), 0);
    X509_free(shown);
    X509_free(want);
    end_pair(&p);
}

static void replace(const char *path, const char *by_name, const char *end)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(link(certificates_file(at, by_name, end), path), 0);
}

static void new_files_are_used_and_sessions_go_on(void **state)
{
    struct pair old;
    char bytes[8];
    size_t n;
    (void)state;
    make("next", "DNS:localhost");
    assert_int_equal(link(certificate_path, certificates_file(at, "first", "pem")), 0);
    struct moe_tls *tls = create(&with_ca);
    start_pair(&old, tls, NULL, "h2");
    shake(&old);
    assert_false(moe_tls_refresh(tls));
    replace(certificate_path, "next", "pem");
    assert_false(moe_tls_refresh(tls)); /* half of the pair */
    check_shown(tls, "first");
    replace(key_path, "next", "key");
    assert_true(moe_tls_refresh(tls));
    assert_false(moe_tls_refresh(tls));
    check_shown(tls, "next");
    certificates_write(at, "server", "pem", "garbage", 0644);
    assert_false(moe_tls_refresh(tls));
    assert_int_equal(unlink(key_path), 0);
    assert_false(moe_tls_refresh(tls));
    check_shown(tls, "next");
    assert_int_equal(SSL_write(old.client, "a", 1), 1);
    assert_int_equal(moe_tls_read(old.session, bytes, sizeof bytes, &n), MOE_TLS_WAITS_TO_READ);
    assert_int_equal(n, 1);
    make("server", "DNS:localhost");
    assert_true(moe_tls_refresh(tls));
    check_shown(tls, "server");
    moe_tls_destroy(tls);
    assert_int_equal(moe_tls_write(old.session, "b", 1, &n), MOE_TLS_DONE); /* outlives it */
    end_pair(&old);
}

static void read_root(const char *name, char *to, size_t capacity)
{
    FILE *file = fopen(certificates_file(at, name, "pem"), "r");
    assert_non_null(file);
    to[fread(to, 1, capacity - 1, file)] = '\0';
    fclose(file);
}

/* Clients of both roots connect while both are in the file. */
static void roots_may_overlap(void **state)
{
    char roots[3][8192], path[sizeof ca_path];
    (void)state;
    make("new", NULL);
    make("of-old", "URI:a:b");
    certificates_make(at, "of-new", "new", "URI:a:b", -HOUR, HOUR);
    read_root("ca", roots[0], 4096);
    read_root("new", roots[2], 4096);
    snprintf(roots[1], sizeof roots[1], "%s%s", roots[0], roots[2]);
    certificates_write(at, "roots", "pem", roots[0], 0644);
    snprintf(path, sizeof path, "%s", certificates_file(at, "roots", "pem"));
    const struct moe_rpc_tls_files files = {certificate_path, key_path, path};
    struct moe_tls *tls = create(&files);
    for (int stage = 0; stage < 3; stage++) {
        if (stage > 0)
            certificates_write(at, "roots", "pem", roots[stage], 0644);
        assert_int_equal(moe_tls_refresh(tls), stage > 0);
        for (int who = 0; who < 2; who++) {
            struct pair p;
            start_pair(&p, tls, who == 0 ? "of-old" : "of-new", "h2");
            shake(&p);
            assert_int_equal(p.outcome == MOE_TLS_DONE, stage == 1 || (stage == 2) == (who == 1));
            end_pair(&p);
        }
    }
    moe_tls_destroy(tls);
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        WITH_FILES(a_pair_that_no_client_could_use_is_refused),
        WITH_FILES(noise_in_files_is_refused),
        WITH_FILES(an_encrypted_key_is_refused_and_asks_nobody),
        WITH_FILES(the_certificate_says_who_connects),
        WITH_FILES(a_bad_certificate_of_a_client_gets_no_session),
        WITH_FILES(a_name_with_a_nul_is_refused),
        WITH_FILES(only_http2_over_a_current_version_gets_a_session),
        WITH_FILES(a_client_that_leaves_is_not_one_that_is_wrong),
        WITH_FILES(only_a_client_hello_of_some_length_costs_a_session),
        WITH_FILES(noise_in_a_handshake_is_refused),
        WITH_FILES(bytes_arrive_whole_and_in_order_both_ways),
        WITH_FILES(a_flood_of_new_keys_or_handshakes_is_ended),
        WITH_FILES(new_files_are_used_and_sessions_go_on),
        WITH_FILES(roots_may_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
