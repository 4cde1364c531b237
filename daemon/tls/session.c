/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions over non-blocking sockets. */
#include "tls/inside.h"

#include <errno.h>
#include <openssl/err.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum {
    RECORD_HEAD = 5,
    HELLO_HEAD = 9,        /* of a record, and of the message in it */
    HELLO_MAX = 16384,     /* bytes of a ClientHello */
    READ_AHEAD = 64 << 10, /* bytes that one call of the system may read */
    EXTRA_MESSAGES = 32,   /* after the handshake, and one more per EXTRA_BYTES */
};
#define EXTRA_BYTES (UINT64_C(1) << 20)

struct moe_tls_session {
    SSL *ssl;
    int fd;
    bool established;
    bool hung_up;      /* the socket has ended */
    bool drained;      /* the last read of the socket took all that was there */
    bool second_hello; /* a HelloRetryRequest was sent */
    bool bad_name;     /* of the client's certificate */
    uint64_t received; /* bytes of the peer, without TLS */
    uint64_t extra;    /* messages that carry none: new keys, attempts to renegotiate */
    uint8_t first[MOE_TLS_PEEK_MAX]; /* bytes first_at..first_length come before what is read */
    size_t first_at, first_length;
    enum moe_tls_failure failure;
    const char *text;
    char name[sizeof((struct moe_rpc_identity *)0)->name];
};

/* ------------------------------------------------------------------ the socket */

/* Each such message costs a server far more than a client. */
static bool has_too_many_extras(const struct moe_tls_session *s)
{
    return s->extra > EXTRA_MESSAGES + s->received / EXTRA_BYTES;
}

/* The library reads on until bytes of the peer come. So it is here that a flood ends. */
static int socket_read(BIO *b, char *bytes, size_t capacity, size_t *count)
{
    struct moe_tls_session *s = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    *count = 0;
    if (has_too_many_extras(s))
        return 0;
    ssize_t n = recv(s->fd, bytes, capacity, MSG_DONTWAIT);
    *count = n > 0 ? (size_t)n : 0;
    s->drained = n > 0 && (size_t)n < capacity;
    if (n == 0)
        s->hung_up = true;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_read(b);
    return n > 0;
}

static int socket_write(BIO *b, const char *bytes, size_t length, size_t *count)
{
    struct moe_tls_session *s = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    ssize_t n = send(s->fd, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    *count = n > 0 ? (size_t)n : 0;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_write(b);
    return n > 0;
}

static long socket_control(BIO *b, int what, long number, void *pointer)
{
    const struct moe_tls_session *s = BIO_get_data(b);
    (void)number;
    (void)pointer;
    return what == BIO_CTRL_FLUSH ? 1 : what == BIO_CTRL_EOF ? s->hung_up : 0;
}

static BIO_METHOD *socket_method; /* lives as long as the process */

static void make_method(void)
{
    socket_method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "moed socket");
    if (socket_method == NULL)
        return;
    (void)BIO_meth_set_read_ex(socket_method, socket_read);
    (void)BIO_meth_set_write_ex(socket_method, socket_write);
    (void)BIO_meth_set_ctrl(socket_method, socket_control);
}

enum moe_tls_outcome moe_tls_hello(int fd)
{
    uint8_t head[HELLO_HEAD];
    ssize_t n = recv(fd, head, sizeof head, MSG_DONTWAIT | MSG_PEEK);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? MOE_TLS_WAITS_TO_READ
                                                                         : MOE_TLS_ENDED;
    if (n == 0)
        return MOE_TLS_ENDED;
    /* A record of the type "handshake", version 3.x, with a message of the type "ClientHello". */
    if (head[0] != 22 || (n > 1 && head[1] != 3) || (n > 5 && head[5] != 1))
        return MOE_TLS_FAILED;
    if (n < HELLO_HEAD)
        return MOE_TLS_WAITS_TO_READ;
    const uint32_t length = (uint32_t)head[6] << 16 | (uint32_t)head[7] << 8 | head[8];
    const int record = RECORD_HEAD + (head[3] << 8 | head[4]);
    int arrived;
    if (length > HELLO_MAX || record > RECORD_HEAD + HELLO_MAX ||
        ioctl(fd, FIONREAD, &arrived) != 0)
        return MOE_TLS_FAILED;
    return arrived >= record ? MOE_TLS_DONE : MOE_TLS_WAITS_TO_READ;
}

/* ------------------------------------------------------------------ callbacks of the library */

static int choose_protocol(SSL *ssl, const unsigned char **out, unsigned char *out_length,
                           const unsigned char *offered, unsigned offered_length, void *ctx)
{
    static const unsigned char h2[] = "\2h2";
    unsigned char *chosen = NULL;
    (void)ssl;
    (void)ctx;
    if (SSL_select_next_proto(&chosen, out_length, h2, sizeof h2 - 1, offered, offered_length) !=
        OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_ALERT_FATAL;
    *out = chosen;
    return SSL_TLSEXT_ERR_OK;
}

/* Refuses a client by its name while the handshake can still say so. */
static int verify(int accepted, X509_STORE_CTX *store)
{
    if (accepted != 1 || X509_STORE_CTX_get_error_depth(store) != 0)
        return accepted;
    SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct moe_tls_session *s = SSL_get_app_data(ssl);
    s->bad_name = !moe_tls_name_of(X509_STORE_CTX_get_current_cert(store), s->name);
    if (!s->bad_name)
        return 1;
    X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
    return 0;
}

static bool is_retry_request(const uint8_t *message, size_t length)
{
    static const uint8_t random[32] = {/* RFC 8446, 4.1.3 */
                                       0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11,
                                       0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
                                       0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e,
                                       0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c};
    return length >= 6 + sizeof random && message[0] == SSL3_MT_SERVER_HELLO &&
           memcmp(message + 6, random, sizeof random) == 0;
}

/* Sees every message of both sides that is about the session itself. */
static void note_message(int written, int version, int type, const void *bytes, size_t length,
                         SSL *ssl, void *ctx)
{
    struct moe_tls_session *s = SSL_get_app_data(ssl);
    const uint8_t *message = bytes;
    (void)version;
    (void)ctx;
    if (s == NULL || (type != SSL3_RT_HANDSHAKE && type != SSL3_RT_ALERT))
        return;
    if (s->established)
        s->extra++;
    else if (written && type == SSL3_RT_HANDSHAKE && is_retry_request(message, length))
        s->second_hello = true;
}

bool moe_tls_prepare_sessions(SSL_CTX *c)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_method);
    /* HTTP/2 says itself where a message ends: an end without close_notify cuts nothing off. */
    SSL_CTX_set_options(c, SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                            SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_verify(c, SSL_VERIFY_NONE, verify);
    SSL_CTX_set_alpn_select_cb(c, choose_protocol, NULL);
    SSL_CTX_set_msg_callback(c, note_message);
    return socket_method != NULL;
}

/* ------------------------------------------------------------------ life */

struct moe_tls_session *moe_tls_accept(struct moe_tls *t, int fd)
{
    struct moe_tls_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    SSL_CTX *context = moe_tls_current(t);
    s->fd = fd;
    s->ssl = SSL_new(context); /* takes another reference */
    SSL_CTX_free(context);
    BIO *bio = BIO_new(socket_method);
    if (s->ssl == NULL || bio == NULL || SSL_set_app_data(s->ssl, s) != 1) {
        BIO_free(bio);
        moe_tls_close(s);
        ERR_clear_error();
        return NULL;
    }
    BIO_set_data(bio, s);
    BIO_set_init(bio, 1);
    SSL_set_bio(s->ssl, bio, bio);
    SSL_set_accept_state(s->ssl);
    return s;
}

void moe_tls_close(struct moe_tls_session *s)
{
    if (s == NULL)
        return;
    SSL_free(s->ssl);
    free(s);
}

const char *moe_tls_name(const struct moe_tls_session *s)
{
    return s->name;
}

enum moe_tls_failure moe_tls_failure(const struct moe_tls_session *s)
{
    return s->failure;
}

const char *moe_tls_failure_text(const struct moe_tls_session *s)
{
    return s->text != NULL ? s->text : "";
}

/* ------------------------------------------------------------------ handshake */

static enum moe_tls_outcome fail(struct moe_tls_session *s, enum moe_tls_failure failure,
                                 const char *text)
{
    s->failure = failure;
    s->text = text;
    ERR_clear_error();
    return MOE_TLS_FAILED;
}

/* What the library's error means. */
static enum moe_tls_outcome explain(struct moe_tls_session *s)
{
    const unsigned long error = ERR_peek_last_error();
    const long verified = SSL_get_verify_result(s->ssl);
    const char *reason = ERR_reason_error_string(error);
    if (has_too_many_extras(s))
        return fail(s, MOE_TLS_PROTOCOL, "too many messages without data");
    if (s->bad_name)
        return fail(s, MOE_TLS_NAME, "the name in the client's certificate is not usable");
    if (verified != X509_V_OK)
        return fail(s, MOE_TLS_CERTIFICATE, X509_verify_cert_error_string(verified));
    if (error == 0 || s->hung_up)
        return fail(s, MOE_TLS_LEFT, "the client left");
    if (ERR_GET_REASON(error) >= SSL_AD_REASON_OFFSET) /* an alert of the peer */
        return fail(s, MOE_TLS_LEFT, reason != NULL ? reason : "the client left");
    return fail(s, MOE_TLS_PROTOCOL, reason != NULL ? reason : "not TLS");
}

/* What must follow a call that returned `result`. */
static enum moe_tls_outcome outcome_of(struct moe_tls_session *s, int result)
{
    switch (SSL_get_error(s->ssl, result)) {
    case SSL_ERROR_NONE: return MOE_TLS_DONE;
    case SSL_ERROR_WANT_READ: return MOE_TLS_WAITS_TO_READ;
    case SSL_ERROR_WANT_WRITE: return MOE_TLS_WAITS_TO_WRITE;
    case SSL_ERROR_ZERO_RETURN: return MOE_TLS_ENDED;
    default: return explain(s);
    }
}

static enum moe_tls_outcome finish_handshake(struct moe_tls_session *s)
{
    const unsigned char *protocol;
    unsigned length;
    SSL_get0_alpn_selected(s->ssl, &protocol, &length);
    if (length == 0)
        return fail(s, MOE_TLS_PROTOCOL, "the client does not ask for HTTP/2 (ALPN)");
    /* Only now: an unfinished handshake costs no large buffer. */
    SSL_set_read_ahead(s->ssl, 1);
    SSL_set_default_read_buffer_len(s->ssl, READ_AHEAD);
    s->established = true;
    return MOE_TLS_DONE;
}

enum moe_tls_outcome moe_tls_handshake(struct moe_tls_session *s)
{
    if (s->failure != MOE_TLS_NO_FAILURE)
        return MOE_TLS_FAILED;
    ERR_clear_error();
    enum moe_tls_outcome outcome = outcome_of(s, SSL_do_handshake(s->ssl));
    /* A second ClientHello could announce any length; only the first one was looked at. */
    if (s->second_hello && outcome != MOE_TLS_FAILED)
        return fail(s, MOE_TLS_PROTOCOL, "the client offers no key of a group in common");
    if (outcome == MOE_TLS_ENDED)
        return fail(s, MOE_TLS_LEFT, "the client left");
    return outcome == MOE_TLS_DONE ? finish_handshake(s) : outcome;
}

/* ------------------------------------------------------------------ bytes */

static enum moe_tls_outcome read_some(struct moe_tls_session *s, uint8_t *bytes, size_t capacity,
                                      size_t *count)
{
    enum moe_tls_outcome outcome = MOE_TLS_DONE;
    *count = 0;
    if (s->failure != MOE_TLS_NO_FAILURE)
        return MOE_TLS_FAILED;
    ERR_clear_error();
    s->drained = false;
    while (*count < capacity && outcome == MOE_TLS_DONE) {
        size_t n = 0;
        /* A small message would cost half as much again to learn that nothing follows. */
        if (s->drained && SSL_has_pending(s->ssl) == 0)
            return MOE_TLS_WAITS_TO_READ;
        outcome = outcome_of(s, SSL_read_ex(s->ssl, bytes + *count, capacity - *count, &n));
        *count += n;
        s->received += n;
    }
    return outcome;
}

enum moe_tls_outcome moe_tls_peek(struct moe_tls_session *s, const uint8_t **bytes, size_t *count)
{
    size_t n;
    enum moe_tls_outcome outcome =
        read_some(s, s->first + s->first_length, sizeof s->first - s->first_length, &n);
    s->first_length += n;
    *bytes = s->first;
    *count = s->first_length;
    return outcome;
}

enum moe_tls_outcome moe_tls_read(struct moe_tls_session *s, void *bytes, size_t capacity,
                                  size_t *count)
{
    size_t n = s->first_length - s->first_at, rest;
    n = n < capacity ? n : capacity;
    memcpy(bytes, s->first + s->first_at, n);
    s->first_at += n;
    enum moe_tls_outcome outcome = read_some(s, (uint8_t *)bytes + n, capacity - n, &rest);
    *count = n + rest;
    return outcome;
}

enum moe_tls_outcome moe_tls_write(struct moe_tls_session *s, const void *bytes, size_t length,
                                   size_t *count)
{
    enum moe_tls_outcome outcome = MOE_TLS_DONE;
    *count = 0;
    if (s->failure != MOE_TLS_NO_FAILURE)
        return MOE_TLS_FAILED;
    ERR_clear_error();
    while (*count < length && outcome == MOE_TLS_DONE) {
        size_t n = 0;
        const uint8_t *from = bytes;
        outcome = outcome_of(s, SSL_write_ex(s->ssl, from + *count, length - *count, &n));
        *count += n;
    }
    return outcome;
}

void moe_tls_end(struct moe_tls_session *s)
{
    if (s->failure != MOE_TLS_NO_FAILURE || SSL_in_init(s->ssl))
        return;
    ERR_clear_error();
    (void)SSL_shutdown(s->ssl); /* once, so it waits for no answer */
    ERR_clear_error();
}
