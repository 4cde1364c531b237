/* SPDX-License-Identifier: Apache-2.0 */
/* A listener with a server behind it that echoes frames, is silent or never stops, and clients. The
 * server reads the preface and sends no SETTINGS. */
#ifndef MOE_TEST_LISTENER_FIXTURE_H
#define MOE_TEST_LISTENER_FIXTURE_H

#include "base/clock.h"
#include "base/wait.h"
#include "daemon/metrics.h"
#include "listener/listener.h"
#include "support/check.h"
#include "support/directory.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>

extern const char preface[];
enum {
    PREFACE = 24,
    SOON_MS = 20000,
    OPENED_MAX = 512,
};

enum serving {
    ECHO,   /* a thread sends all frames back */
    SILENT, /* the test has the socket */
    CHATTY, /* a thread sends bytes for as long as they are taken */
};

struct scene {
    enum serving serving;
    struct moe_listener *listener;
    struct moe_metrics *metrics;
    char path[MOE_TEST_DIRECTORY_BYTES + 8]; /* of the Unix socket */
    struct sockaddr_in tcp;
    atomic_uint opened, closed;
    struct {
        struct scene *scene;
        int fd;
        struct moe_rpc_identity who;
        pthread_t thread;
    } connections[OPENED_MAX];
    char directory[MOE_TEST_DIRECTORY_BYTES];
};

/* One relay thread, so `opened` needs no lock. `config` has what differs. */
void start(struct scene *s, struct moe_listener_config config);
void finish(struct scene *s);
/* The value of a series; its name with labels. */
unsigned long figure(struct scene *s, const char *series);
unsigned long closed_by(struct scene *s, const char *reason);
/* Waits until so many were closed for this reason. */
void await_figure(struct scene *s, const char *reason, unsigned long value);
/* Waits until the server has so many connections. */
void await_opened(struct scene *s, unsigned count);

int come_tcp(struct scene *s);
int come_unix(struct scene *s);
/* From another loopback address. */
int come_from(struct scene *s, const char *address);
void say(int fd, const void *bytes, size_t length);
/* Reads exactly so much; false at the end of the connection. */
bool receive(int fd, void *bytes, size_t length);
void expect(int fd, const void *bytes, size_t length);
bool is_over(int fd);

/* Frames of a client, and the answers of the relay to its preface. */
extern const char settings[9], acknowledged[9];
extern const char request[10]; /* HEADERS of stream 1, without an end of the stream */
enum { PING = 17 };
extern const char ping[PING + 1];

/* The end of a preface and a request; the echo comes back. */
void go_on(int fd, size_t from);
void begin(int fd);
/* The same, unanswered so far. */
void say_request(int fd);
/* The bytes that `begin` gets. */
enum { WELCOME = 9 + 9 + 9 + 10 };
extern const char welcome[WELCOME + 1];
void check_alive(int fd);

#endif
