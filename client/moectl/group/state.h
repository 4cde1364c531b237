/* SPDX-License-Identifier: Apache-2.0 */
/* The state directory of a local group: who it is (group.json), whether it lives (lock), its logs.
 *
 * The idea worth knowing: every daemon of the group inherits an open, locked `lock` file. So the
 * lock is held exactly as long as any process of the group lives, whatever became of moectl, and no
 * process id has to be trusted to find that out. It is a shared lock, so that a daemon that is
 * started later can hold one too. */
#ifndef MOECTL_STATE_H
#define MOECTL_STATE_H

#include "moe/types.h"
#include "moectl/io/cli.h"

#include <limits.h>
#include <sys/types.h>

enum {
    MOECTL_ENDPOINT_MAX = 280,
    MOECTL_PROCESSES_MAX = MOE_MAX_SLOTS + 1,
    MOECTL_PATH_MAX = PATH_MAX,
    MOECTL_ARGUMENTS_MAX = 64, /* of a daemon's command line */
};

struct moectl_process {
    char name[24]; /* "coordinator", "worker-0" */
    pid_t pid;
    char endpoint[MOECTL_ENDPOINT_MAX];
    json_t *command; /* what starts it again in its place: array of its program, by its absolute
                        name, and arguments; NULL = not known. Owned */
};

/* What group.json holds. processes[0] is the coordinator. Freed with moectl_group_free. */
struct moectl_group {
    struct moectl_process processes[MOECTL_PROCESSES_MAX];
    size_t count;
    char model[MOECTL_PATH_MAX]; /* directory */
};

/* Creates the directory (0700) if need be and opens it; refuses one that others could write to.
 * `path` gets its absolute name. `named` NULL = the default one. */
struct moe_status moectl_state_open(const char *named, bool create, char path[MOECTL_PATH_MAX],
                                    int *directory) MOE_CHECKED;

/* The open lock file. Errors: MOE_ALREADY_EXISTS when a group lives. */
struct moe_status moectl_state_lock(int directory, int *lock) MOE_CHECKED;
/* The same for a daemon that joins the group that lives there. */
struct moe_status moectl_state_join(int directory, int *lock) MOE_CHECKED;
/* For who reads group.json, starts daemons and writes it again: one at a time. Waits for its turn
 * until `deadline_ns`. `*turn`, which daemons do not inherit, is the caller's to close. */
struct moe_status moectl_state_take_turn(int directory, uint64_t deadline_ns,
                                         int *turn) MOE_CHECKED;
bool moectl_state_is_alive(int directory);
/* Waits until no process of the group is left; false when `deadline_ns` has passed. */
bool moectl_state_wait_gone(int directory, uint64_t deadline_ns);

struct moe_status moectl_state_write(int directory, const struct moectl_group *group) MOE_CHECKED;
/* MOE_NOT_FOUND when there is no group.json; `group` need not be freed after a failure. */
struct moe_status moectl_state_read(int directory, struct moectl_group *group) MOE_CHECKED;
void moectl_state_remove(int directory);
void moectl_group_free(struct moectl_group *group);

/* `command` as one types it in a shell, cut where it does not fit; "" where it is NULL. */
void moectl_command_text(const json_t *command, char *text, size_t size);

/* The local group that a command is about: that of the state directory, where no endpoint was given
 * or it is one of that group's. MOE_NOT_FOUND when there is none. */
struct moe_status moectl_state_group(const struct moectl_common *common,
                                     struct moectl_group *group) MOE_CHECKED;

/* The endpoint that a command is about: the one given, or that of the local group's coordinator.
 * MOE_NOT_FOUND when there is neither. */
struct moe_status moectl_state_endpoint(const struct moectl_common *common,
                                        char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;
/* The same, but a worker's, for forward passes. */
struct moe_status moectl_state_worker(const struct moectl_common *common,
                                      char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;

#endif
