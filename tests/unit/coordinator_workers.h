/* SPDX-License-Identifier: Apache-2.0 */
/* Workers of a coordinator's test: each speaks through a separate stream, as the test says. */
#ifndef MOE_TEST_COORDINATOR_WORKERS_H
#define MOE_TEST_COORDINATOR_WORKERS_H

#include "coordinator_fixture.h"
#include "moe/v1/coordinator.pb-c.h"
#include "support/queue.h"

struct worker {
    struct moe_rpc_stream *stream;
    struct queue *inbox;   /* Moe__V1__SessionResponse, then one `the_end` */
    struct moe_status end; /* read after the_end */
    uint32_t id, slot;
    uint64_t incarnation, hash;
    uint64_t heartbeats, answered; /* sequences */
    bool spoilt, silent;           /* has other weights; reports no digests */
    bool other_common;             /* has other routers than the others */
};

extern char the_end; /* its address marks the end of a stream in an inbox */

/* Settings that a test may spoil. */
struct identity {
    const char *fingerprint, *version, *backend;
    uint32_t layers;
    Moe__V1__ActivationEncoding activations; /* of the first layer's experts */
};
enum { LAYERS = 2 };
extern const struct identity honest;

/* A stream and its inbox, without a message. */
void open_stream(struct worker *w);
void free_stream(struct worker *w);
/* Ends the worker's stream, as the end of its process does; returns when the coordinator knows. */
void disconnect(struct worker *w);
/* Sends a message as it is; the stream may be over. */
void send_bytes(struct worker *w, const uint8_t *bytes, size_t length);

/* The next message that is no answer of a heartbeat, or `&the_end`; NULL = none in time. */
void *next_item(struct worker *w);
/* The next message, which must be of this kind; the caller frees it. Passes over orders about
 * models where another message is awaited: the coordinator repeats them. */
Moe__V1__SessionResponse *expect(struct worker *w, Moe__V1__SessionResponse__BodyCase want);
void expect_and_free(struct worker *w, Moe__V1__SessionResponse__BodyCase want);
/* The stream ends so; frees it. */
void expect_end(struct worker *w, enum moe_code code, enum moe_reason reason);

/* The bytes of Register, at most 16 KiB. */
size_t pack_register(const struct worker *w, const struct identity *as, uint8_t *bytes);
/* Opens a stream and sends Register. */
void send_register(struct worker *w, const struct identity *as);
/* Registers a new worker, which gets a slot. */
void join(struct worker *w, uint32_t id, uint64_t incarnation);
void send_heartbeat(struct worker *w, uint64_t epoch);
void send_try_again(struct worker *w);
void send_leaving(struct worker *w);
/* One part of the digests of a model. */
void send_digests(struct worker *w, uint32_t model, const uint8_t *part, size_t length);
/* All digests of a model: the common units, and those of the slot's experts. */
void report_digests(struct worker *w, uint32_t model);

void send_loaded(struct worker *w, uint32_t version, uint64_t order);
/* Answers Assign, unless silent with digests, and reports that it has loaded. */
void load(struct worker *w);
/* From PREPARE to COMMIT of SLOTS workers, with two all-gather rounds; returns the epoch. */
uint64_t form(struct worker *workers);
/* SLOTS new workers join, load and form; returns the epoch. */
uint64_t bring_up(struct worker *workers);
/* All of them serve this epoch, by GetStatus. */
void check_serving(uint64_t epoch);
/* The operator ends the group; returns when the coordinator has ended. */
void shut_down(struct worker *workers);

#endif
