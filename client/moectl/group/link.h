/* SPDX-License-Identifier: Apache-2.0 */
/* A connection to one daemon, and control calls on it. */
#ifndef MOECTL_LINK_H
#define MOECTL_LINK_H

#include "moe/v1/admin.pb-c.h"
#include "moe/v1/expert.pb-c.h"
#include "moectl/group/state.h"
#include "moectl/io/samples.h"

struct moectl_link;

struct moe_status moectl_link_open(const char *endpoint, struct moectl_link **out) MOE_CHECKED;
/* To a worker that the daemon at `by` lists. Errors: also INVALID_ARGUMENT if the worker is at a
 * loopback address and `by` is not, nor a name for loopback addresses only: such an address is one
 * of the daemon's host. */
struct moe_status moectl_link_open_worker(const char *by, const char *worker,
                                          struct moectl_link **out) MOE_CHECKED;
/* Only checks that. */
struct moe_status moectl_link_check_worker(const char *by, const char *worker) MOE_CHECKED;
/* As it was opened with. */
const char *moectl_link_endpoint(const struct moectl_link *link);
/* NULL is ignored. */
void moectl_link_close(struct moectl_link *link);

/* Calls `path` and unpacks the answer as `type`; free it with protobuf_c_message_free_unpacked. */
struct moe_status moectl_link_call(struct moectl_link *link, const char *path,
                                   const ProtobufCMessage *request, uint64_t deadline_ns,
                                   const ProtobufCMessageDescriptor *type,
                                   ProtobufCMessage **out) MOE_CHECKED;

struct moe_status moectl_link_server_info(struct moectl_link *link, uint64_t deadline_ns,
                                          Moe__V1__GetServerInfoResponse **out) MOE_CHECKED;
struct moe_status moectl_link_status(struct moectl_link *link, uint64_t deadline_ns,
                                     Moe__V1__GetStatusResponse **out) MOE_CHECKED;

/* Which slots hold which experts of a layer. `model` "" = the default model. */
struct moe_status moectl_link_placement(struct moectl_link *link, const char *model, uint32_t layer,
                                        uint64_t deadline_ns,
                                        Moe__V1__GetPlacementResponse **out) MOE_CHECKED;

/* The daemon's metrics; free `out` also after a failure. Errors: also MOE_UNIMPLEMENTED, of an
 * older release. */
struct moe_status moectl_link_samples(struct moectl_link *link, uint64_t deadline_ns,
                                      struct moectl_samples *out) MOE_CHECKED;
/* Adds the rows that a worker has computed with each expert of a layer to `rows`, the first `count`
 * experts. */
struct moe_status moectl_link_add_expert_rows(struct moectl_link *link, uint32_t layer,
                                              uint64_t deadline_ns, uint64_t *rows,
                                              size_t count) MOE_CHECKED;
/* The page itself; free `*page`. */
struct moe_status moectl_link_metrics(struct moectl_link *link, uint64_t deadline_ns,
                                      char **page) MOE_CHECKED;

/* Whether a daemon answers at `endpoint`, even with an error. */
bool moectl_link_answers(const char *endpoint, uint64_t deadline_ns);

/* The deadline of the next of `left` calls that share the time until `deadline_ns`. */
uint64_t moectl_share(uint64_t deadline_ns, size_t left);
/* The deadline of one call of a command that has more to do until `deadline_ns`. */
uint64_t moectl_call_deadline(uint64_t deadline_ns);

/* Opens a link to the coordinator of a group and asks for the group's state. `endpoint` is that of
 * a coordinator or of any worker, or a list of them: the first that answers counts. A worker names
 * its coordinator; it is asked again until the deadline while that one does not lead. A coordinator
 * that does not lead names the one that does; the link goes there only if the list has it. If one
 * of several says nothing, all are asked again until the deadline: another one leads when the lease
 * of that one is over. */
struct moe_status moectl_admin_open(const char *endpoint, uint64_t deadline_ns,
                                    struct moectl_link **out,
                                    Moe__V1__GetStatusResponse **status) MOE_CHECKED;

/* The same for the group of the command's options. */
struct moe_status moectl_admin_find(const struct moectl_common *common, uint64_t deadline_ns,
                                    struct moectl_link **out,
                                    Moe__V1__GetStatusResponse **status) MOE_CHECKED;

/* The endpoint for forward passes: a worker's, because a coordinator serves none. */
struct moe_status moectl_worker_endpoint(const struct moectl_common *common, uint64_t deadline_ns,
                                         char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;
/* The endpoint for training: that of a worker, or its separate one (--admin-listen). */
struct moe_status moectl_training_endpoint(const struct moectl_common *common, uint64_t deadline_ns,
                                           char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;
/* Where `worker` offers training. A worker that does not answer keeps its endpoint, and the call
 * that follows reports it. Errors: INVALID_ARGUMENT if what it names is no HOST:PORT or too long,
 * or a loopback address or wildcard although the worker is not at a loopback address. */
struct moe_status moectl_trainer_endpoint(const char *worker, uint64_t deadline_ns,
                                          char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;

#endif
