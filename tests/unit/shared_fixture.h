/* SPDX-License-Identifier: Apache-2.0 */
/* A service that shares memory with clients, for tests of sessions and of clients that break the
 * rules. */
#ifndef MOE_TEST_SHARED_FIXTURE_H
#define MOE_TEST_SHARED_FIXTURE_H

#include "moe/regions.h"
#include "moe/v1/regions.pb-c.h"
#include "regions/caller.h"
#include "service_fixture.h"

enum { SHARED_BYTES = 64 << 20, SHARED_IDENTITY_BYTES = 16 << 20 };

extern struct service shared;
extern struct moe_progress *shared_progress; /* with the loop of the thread for regions alone */
/* cmocka's set-up and tear-down. The latter checks that nothing is mapped any more. */
int shared_open(void **state);
int shared_close(void **state);

/* For tests that close the service themselves. */
int shared_remove_directory(void);

/* No view is in force, and requests wait for the next one; then a view that serves them. */
void shared_pause_view(void);
void shared_resume_view(void);

/* What the metrics say of shared memory. */
double shared_metric(const char *name);
/* Waits until it has this value; fails the test after ten seconds. */
void shared_await_metric(const char *name, double value);

/* Waits until ListRegions tells this of a region; UNSPECIFIED: it has none of that name. */
void shared_await_status(const char *name, Moe__V1__RegionStatus status);

/* Whether GetServerInfo lists the extension "regions". */
bool shared_is_offered(void);

/* A client of the service by libmoeclient; the caller closes it. */
struct moe_client *shared_client(void);

/* A client without libmoeclient: it may send anything. */
struct raw {
    int socket;
    struct moe_ring_caller caller;
    uint64_t id;
};

/* A ticket of a call of OpenRegions, over the fixture's connection or another one. */
void raw_ticket(uint8_t ticket[16]);
void raw_ticket_over(struct moe_rpc_channel *channel, uint8_t ticket[16]);
/* Connects to the socket, and no more. */
void raw_connect(struct raw *r);
/* Connects and joins with a new ring. */
void raw_join(struct raw *r);
/* Closes the socket and unmaps the ring. */
void raw_leave(struct raw *r);
/* Sends a message and waits for its reply. MOE_UNAVAILABLE: the worker has closed the connection.
 * The caller keeps the descriptor. */
struct moe_status raw_ask(struct raw *r, Moe__V1__RegionsRequest *q, int descriptor,
                          uint32_t *number);
struct moe_status raw_send_join(struct raw *r, const uint8_t *ticket, size_t length,
                                int descriptor);
struct moe_status raw_add(struct raw *r, const char *name, int descriptor, uint32_t *number);
struct moe_status raw_remove(struct raw *r, const char *name);
/* A new region of `bytes`, registered. */
void *raw_region(struct raw *r, const char *name, size_t bytes, uint32_t *number);
/* True if the worker closes the connection within ten seconds. */
bool raw_has_ended(struct raw *r);

/* Submits in an entry, and wakes the worker. */
void raw_submit(struct raw *r, uint32_t entry, const struct moe_ring_request *q);
/* Submits in entry 0, and waits for the result, with the reason. */
struct moe_status raw_forward(struct raw *r, const struct moe_ring_request *q);
struct moe_status raw_await(struct raw *r, uint32_t entry);

#endif
