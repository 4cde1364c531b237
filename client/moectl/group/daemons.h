/* SPDX-License-Identifier: Apache-2.0 */
/* The daemons of a local group as child processes: finds, starts, awaits and ends them.
 *
 * Fork them before moectl uses gRPC for the first time. With threads of gRPC, a child may do
 * nothing but start a program: moectl_daemons_restart does no more.
 * Each gets a new session, so that Ctrl-C reaches moectl alone. Unless the group is detached, the
 * kernel kills them when moectl dies. */
#ifndef MOECTL_DAEMONS_H
#define MOECTL_DAEMONS_H

#include "moectl/group/state.h"

struct moectl_daemon {
    struct moectl_process process;
    char log[MOECTL_PATH_MAX];
    char control_endpoint[MOECTL_ENDPOINT_MAX]; /* for workers, of a coordinator; "" = none */
    int ready; /* read end: the daemon writes its endpoints here; -1 = read or closed */
    bool running;
    int wait_status; /* of waitpid; valid if not running */
};

enum { MOECTL_COORDINATOR = 0 }; /* its place among a group's daemons; the others are workers */

struct moectl_daemons {
    struct moectl_daemon all[MOECTL_PROCESSES_MAX];
    size_t count;
    int signals;   /* signalfd of SIGINT, SIGTERM, SIGHUP and SIGCHLD */
    int directory; /* state directory and its name; the logs are in it */
    const char *path;
    bool detached;
    bool keep_logs; /* append to existing logs instead of truncating them */
};

enum moectl_event {
    MOECTL_EVENT_TIME,  /* the deadline has passed */
    MOECTL_EVENT_READY, /* a daemon has reported its endpoint */
    MOECTL_EVENT_ENDED, /* a daemon has ended */
    MOECTL_EVENT_STOP,  /* a signal asks moectl to end */
};

/* Path of a daemon's program: in moectl's folder, in the build tree, in libexec, or in PATH. */
struct moe_status moectl_daemons_find(const char *name, char path[MOECTL_PATH_MAX]) MOE_CHECKED;

/* Blocks the signals and opens the descriptor for them. */
struct moe_status moectl_daemons_init(struct moectl_daemons *d, int directory, const char *path,
                                      bool detached) MOE_CHECKED;
void moectl_daemons_free(struct moectl_daemons *d);

/* Value of --ready-fd: the descriptor on which a daemon reports its endpoint. */
#define MOECTL_READY_FD "3"

/* Starts a program with arguments (NULL-terminated, argv[0] included); its log is NAME.log. Stores
 * the command line for a restart in process.command; `d` owns it. */
struct moe_status moectl_daemons_start(struct moectl_daemons *d, const char *name,
                                       const char *program, const char *const *argv) MOE_CHECKED;

/* The command line that starts a daemon again; its strings belong to `p`. */
void moectl_daemons_command(const struct moectl_process *p,
                            const char *argv[MOECTL_ARGUMENTS_MAX + 3]);
/* Starts daemon `i`, which has ended, with its command line. */
struct moe_status moectl_daemons_restart(struct moectl_daemons *d, size_t i) MOE_CHECKED;

/* Waits for the next event. */
enum moectl_event moectl_daemons_wait(struct moectl_daemons *d, uint64_t deadline_ns);
size_t moectl_daemons_running(const struct moectl_daemons *d);
/* The first daemon that ended with a failure or by a signal, or NULL. */
const struct moectl_daemon *moectl_daemons_failed(const struct moectl_daemons *d);
/* Prints on stderr how `daemon` ended, and the last lines of its log. If its address was taken,
 * prints `advice` too. */
void moectl_daemons_report(const struct moectl_daemon *daemon, const char *advice);
void moectl_daemons_signal(const struct moectl_daemons *d, int signal_number);

#endif
