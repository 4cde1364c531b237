/* SPDX-License-Identifier: Apache-2.0 */
/* The daemons of a local group as child processes: found, started, awaited, ended.
 *
 * They are forked before moectl uses gRPC for the first time (gRPC and fork do not mix). Each gets
 * a session of its own, so that Ctrl-C reaches moectl alone, and unless the group is detached the
 * kernel kills them when moectl dies. */
#ifndef MOECTL_DAEMONS_H
#define MOECTL_DAEMONS_H

#include "moectl/group/state.h"

struct moectl_daemon {
    struct moectl_process process;
    char log[MOECTL_PATH_MAX];
    int ready; /* read end: the daemon writes its endpoint here; -1 = read or closed */
    bool running;
    int wait_status; /* of waitpid, once it is no longer running */
};

struct moectl_daemons {
    struct moectl_daemon all[MOECTL_PROCESSES_MAX];
    size_t count;
    int signals;   /* signalfd of SIGINT, SIGTERM, SIGHUP and SIGCHLD */
    int directory; /* state directory, and its name: where the logs go */
    const char *path;
    bool detached;
    bool keep_logs; /* append to the logs that are there instead of beginning anew */
};

enum moectl_event {
    MOECTL_EVENT_TIME,  /* the deadline has passed */
    MOECTL_EVENT_READY, /* a daemon has said its endpoint */
    MOECTL_EVENT_ENDED, /* a daemon has ended */
    MOECTL_EVENT_STOP,  /* the user wants an end */
};

/* Path of a daemon's program: beside moectl, in the build tree, in libexec, or in PATH. */
struct moe_status moectl_daemons_find(const char *name, char path[MOECTL_PATH_MAX]) MOE_CHECKED;

/* Blocks the signals and opens the descriptor for them. */
struct moe_status moectl_daemons_init(struct moectl_daemons *d, int directory, const char *path,
                                      bool detached) MOE_CHECKED;
void moectl_daemons_free(struct moectl_daemons *d);

/* The number of the descriptor on which a daemon says that it is ready: for its command line. */
#define MOECTL_READY_FD "3"

/* Starts a program with arguments (NULL-terminated, argv[0] included); its log is NAME.log. The
 * daemon's process.command, which is freed with `d`, is what starts it again in its place. */
struct moe_status moectl_daemons_start(struct moectl_daemons *d, const char *name,
                                       const char *program, const char *const *argv) MOE_CHECKED;

/* Waits for the next thing to happen. */
enum moectl_event moectl_daemons_wait(struct moectl_daemons *d, uint64_t deadline_ns);
size_t moectl_daemons_running(const struct moectl_daemons *d);
/* Of those that have ended, the first that did not end well; NULL when there is none. */
const struct moectl_daemon *moectl_daemons_failed(const struct moectl_daemons *d);
/* Says how `daemon` ended, and the last lines of its log. */
void moectl_daemons_report(const struct moectl_daemon *daemon);
void moectl_daemons_signal(const struct moectl_daemons *d, int signal_number);

#endif
