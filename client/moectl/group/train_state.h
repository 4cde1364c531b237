/* SPDX-License-Identifier: Apache-2.0 */
/* Where training stands, asked of one worker, and what of it is in the workers' memory alone. */
#ifndef MOECTL_TRAIN_STATE_H
#define MOECTL_TRAIN_STATE_H

#include "moe/v1/training.pb-c.h"
#include "moectl/group/link.h"
#include "moectl/io/cli.h"

/* Asks over `link`; free `*out` with moe__v1__get_train_state_response__free_unpacked.
 * Errors: MOE_UNIMPLEMENTED where the workers do not train. */
struct moe_status moectl_train_state(struct moectl_link *link, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out) MOE_CHECKED;
/* The same of the worker at an address. For a remark that nobody has asked for: it does not wait
 * for long, nor past `deadline_ns`. */
struct moe_status moectl_train_probe(const char *worker, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out) MOE_CHECKED;

/* Says on stderr which optimizer steps no checkpoint has; nothing where there are none. */
void moectl_train_say_unsaved(const Moe__V1__GetTrainStateResponse *s);

/* The same of the group of the worker at that address, as it ends, and how to go on from its last
 * checkpoint. Only a remark: whoever does not answer at once is not waited for, and nothing is said
 * of a failure. True when the worker answered, be it that it does not train. */
bool moectl_train_tell_unsaved(const char *worker, uint64_t deadline_ns);

/* Says on stderr what is at stake for a group without a view in force: what is lost where a worker
 * has to be started anew, or, where the group cannot go back, between what an operator chooses. */
void moectl_train_say_at_stake(const Moe__V1__GetTrainStateResponse *s);

#endif
