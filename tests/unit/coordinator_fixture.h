/* SPDX-License-Identifier: Apache-2.0 */
/* A coordinator on a thread of this process, its folder of state, and calls of an operator. */
#ifndef MOE_TEST_COORDINATOR_FIXTURE_H
#define MOE_TEST_COORDINATOR_FIXTURE_H

#include "coordinator/service.h"
#include "moe/v1/admin.pb-c.h"
#include "rpc/client.h"

enum { SLOTS = 3 };

extern char directory[]; /* the state */
extern struct moe_coordinator *coordinator;
extern struct moe_rpc_client *client;
extern struct moe_rpc_channel *channel; /* to the coordinator */

/* cmocka's set-up and tear-down: a new folder of state, and its removal. */
int make_directory(void **unused);
int remove_directory(void **unused);

/* Starts a coordinator on the folder, and opens the channel to it. */
void start_coordinator(uint32_t slots, uint32_t lease_ms);
/* Waits until it has ended by itself, with this code. */
void join_coordinator(enum moe_code want);
/* Stops it, twice: the second request changes nothing. */
void quit_coordinator(void);
/* Ends it and leaves the log as a crash at this moment would: a coordinator that stops shuts its
 * group down, and writes that too. */
void crash_coordinator(void);

/* When a wait that begins now has failed. */
uint64_t time_limit(void);

/* The answer's bytes; the call's end in `*st`. */
size_t call_admin(const char *path, const ProtobufCMessage *request, uint8_t *bytes,
                  size_t capacity, struct moe_status *st);
/* The caller frees it. */
Moe__V1__GetStatusResponse *get_status(void);
void wait_for_state(Moe__V1__GroupState want);
struct moe_status drain(uint32_t slot, const char *reason);
/* The page of metrics over HTTP has this text. */
void check_metrics(const char *want);

#endif
