/* SPDX-License-Identifier: Apache-2.0 */
/* The state of training, from one worker, and reports of the part that no checkpoint has. */
#ifndef MOECTL_TRAIN_STATE_H
#define MOECTL_TRAIN_STATE_H

#include "moe/v1/training.pb-c.h"
#include "moectl/group/link.h"
#include "moectl/io/cli.h"

/* Asks over `link`; free `*out` with moe__v1__get_train_state_response__free_unpacked.
 * Errors: MOE_UNIMPLEMENTED if the workers do not train. */
struct moe_status moectl_train_state(struct moectl_link *link, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out) MOE_CHECKED;
/* The same from the worker at `worker`, or at the endpoint for training that it names; waits at
 * most 0.5 s, and not past `deadline_ns`. Errors: also MOE_INVALID_ARGUMENT if it names an endpoint
 * that is not to be called; the text says why. */
struct moe_status moectl_train_probe(const char *worker, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out) MOE_CHECKED;

/* Reports on stderr how many optimizer steps no checkpoint has, if any. */
void moectl_train_report_unsaved_steps(const Moe__V1__GetTrainStateResponse *s);

/* The same for a group that is about to end, from the worker at `worker`, and how to continue from
 * its last checkpoint. Waits at most 0.5 s; ignores failures. True if the worker answered, also if
 * it does not train. */
bool moectl_train_report_unsaved(const char *worker, uint64_t deadline_ns);

/* For a group without a view in force: reports on stderr the state that is lost if a worker is
 * restarted; or, if the group cannot go back to its checkpoint, the operator's choices. */
void moectl_train_report_at_stake(const Moe__V1__GetTrainStateResponse *s);

#endif
