/* SPDX-License-Identifier: Apache-2.0 */
/* A coordinator on a real server that says what the test tells it to, and a journal of events. */
#ifndef MOE_TEST_SCRIPTED_COORDINATOR_H
#define MOE_TEST_SCRIPTED_COORDINATOR_H

#include "base/mutex.h"
#include "moe/v1/coordinator.pb-c.h"
#include "rpc/server.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WAIT_MS = 20000, INCARNATION = 4711, EXPERTS = 4, LINE = 96, LINES = 64 };

/* Events as text lines, in order; tests wait for lines. */
struct journal {
    struct moe_mutex lock;
    pthread_cond_t changed;
    char lines[LINES][LINE];
    size_t count, read;
};

struct coordinator {
    struct journal received; /* heartbeats only when their epoch is new */
    struct moe_rpc_server *server;
    char endpoint[32];
    struct moe_mutex lock;
    struct moe_rpc_call *call; /* of the session; one reference */
    uint64_t last_epoch;       /* the server's thread only, while it runs */
    atomic_bool silent;        /* does not answer TryAgain */
    atomic_bool answers;       /* heartbeats */
};

void note(struct journal *j, const char *fmt, ...) MOE_PRINTF(2, 3);
/* Reads on until a line that begins with `want`; a hang fails the test. */
void await_line(struct journal *j, const char *want);
/* The next line is this one. */
void assert_next(struct journal *j, const char *want);
unsigned count_lines(struct journal *j, const char *want);
bool has_line(struct journal *j, const char *want);
void init_journal(struct journal *j);
void free_journal(struct journal *j);
/* A new server, without a session. */
void start_server(struct coordinator *c, const char *listen);
void stop_server(struct coordinator *c);
/* Ends the session with this status. */
void close_session(struct coordinator *c, struct moe_status why);
/* Each sends this message over the session. */
void say_registered(struct coordinator *c);
void say_assign(struct coordinator *c, uint32_t version);
void say_read_checkpoint(struct coordinator *c, uint64_t order, const char *checkpoint);
void say_model_order(struct coordinator *c, Moe__V1__ModelStep step, uint64_t order);
void say_prepare_of(struct coordinator *c, uint64_t epoch, uint64_t incarnation,
                    uint64_t session_epoch);
void say_prepare(struct coordinator *c, uint64_t epoch, uint64_t incarnation);
void say_blobs(struct coordinator *c, uint64_t epoch, uint32_t round);
void say_commit(struct coordinator *c, uint64_t epoch);
void say_abort(struct coordinator *c, uint64_t epoch);
void say_drain(struct coordinator *c, uint32_t limit_ms, bool experts_move);

#endif
