/* SPDX-License-Identifier: Apache-2.0 */
/* The state directory of a local group: its daemons (group.json), whether one lives (lock), logs.
 *
 * The idea worth knowing: every daemon of the group inherits the open `lock` file with a lock on
 * it. So the file is locked exactly as long as a process of the group lives, even if moectl has
 * ended, and process ids need not be trusted. The lock is shared, so that a daemon that starts
 * later can lock it too. */
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
    json_t *command; /* restarts it: array of the absolute path of its program and its arguments;
                        NULL = not known. Owned */
};

/* Contents of group.json. processes[0] is the coordinator. Free it with moectl_group_free. */
struct moectl_group {
    struct moectl_process processes[MOECTL_PROCESSES_MAX];
    size_t count;
    char model[MOECTL_PATH_MAX]; /* directory */
    bool foreground; /* `moectl up` waits for the group, and ends it when a daemon dies */
    bool restarts;   /* foreground: that `up` starts a daemon again instead */
};

/* Opens the directory; with `create` makes it (0700) if it does not exist. Refuses one that other
 * users can write to. `path` gets its absolute name; after MOE_NOT_FOUND, the name that was tried.
 * `named` NULL = the default one. */
struct moe_status moectl_state_open(const char *named, bool create, char path[MOECTL_PATH_MAX],
                                    int *directory) MOE_CHECKED;

/* Locks the directory for a new group. Errors: MOE_ALREADY_EXISTS if a group lives. */
struct moe_status moectl_state_lock(int directory, int *lock) MOE_CHECKED;
/* Adds a lock for a daemon that joins the living group. */
struct moe_status moectl_state_join(int directory, int *lock) MOE_CHECKED;
enum moectl_change { MOECTL_CHANGE_REPLACE, MOECTL_CHANGE_DOWN };
/* A replace excludes every other change of the group; two `down` do not exclude each other. Waits
 * until `deadline_ns`. Daemons do not inherit `*lock`, which moectl_state_unlock_changes ends. */
struct moe_status moectl_state_lock_changes(int directory, enum moectl_change change,
                                            uint64_t deadline_ns, int *lock) MOE_CHECKED;
/* Nothing for -1. */
void moectl_state_unlock_changes(int lock);
/* For the holder of a replace's lock: true if a `down` waits for it. */
bool moectl_state_down_waits(int lock);
bool moectl_state_is_alive(int directory);
/* Waits until no process of the group lives; false after `deadline_ns`. */
bool moectl_state_wait_gone(int directory, uint64_t deadline_ns);

/* Fails if the file system has no room for the first files of a group. `path` is for the error. */
struct moe_status moectl_state_check_room(int directory, const char *path) MOE_CHECKED;
struct moe_status moectl_state_write(int directory, const struct moectl_group *group) MOE_CHECKED;
/* Errors: MOE_NOT_FOUND without group.json. After a failure `group` need not be freed. */
struct moe_status moectl_state_read(int directory, struct moectl_group *group) MOE_CHECKED;
/* MOE_NOT_FOUND with advice, for a state directory without group.json. `alive`: daemons run. */
struct moe_status moectl_state_no_group(const char *path, bool alive) MOE_CHECKED;
void moectl_state_remove(int directory);
void moectl_group_free(struct moectl_group *group);

/* `command` in shell syntax, cut to `size`; "" if it is NULL. */
void moectl_command_text(const json_t *command, char *text, size_t size);

/* The group of the state directory, unless common->endpoint names another group. Errors:
 * MOE_NOT_FOUND. */
struct moe_status moectl_state_group(const struct moectl_common *common,
                                     struct moectl_group *group) MOE_CHECKED;

/* common->endpoint, or that of the local group's coordinator. Errors: MOE_NOT_FOUND if there is
 * neither. */
struct moe_status moectl_state_endpoint(const struct moectl_common *common,
                                        char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;
/* The same with the local group's first worker, for forward passes. */
struct moe_status moectl_state_worker(const struct moectl_common *common,
                                      char endpoint[MOECTL_ENDPOINT_MAX]) MOE_CHECKED;

#endif
