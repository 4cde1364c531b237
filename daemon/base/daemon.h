/* What the `main` of every daemon does in the same way: the options that all have, --help and
 * --version, the log, the line that says where the daemon listens, exit codes.
 *
 * Exit status: 0 the daemon ended as asked (or --help, --version), 1 it failed, 2 usage. A daemon
 * brings a table of its own options and two functions; loops and signals stay its own affair. */
#ifndef MOE_BASE_DAEMON_H
#define MOE_BASE_DAEMON_H

#include "base/options.h"
#include "base/status.h"

/* Values of the common options, checked. */
struct moe_daemon_settings {
    const char *metrics_listen; /* HOST:PORT, or NULL: no metrics */
    bool insecure;              /* addresses that are not loopback may go without encryption */
    /* Only for base/daemon.c. */
    const char *log_level, *log_format, *config;
    uint64_t ready_fd;
    bool version, help;
};

struct moe_daemon {
    const char *name;      /* "moe-worker" */
    const char *component; /* in the log: "worker"; lives for ever */
    const char *synopsis;  /* behind the name in the help text: "--model DIR [options]" */
    const char *purpose;   /* one sentence for the help text */
    const struct moe_option *options; /* of its own; the common ones come after them */
    size_t option_count;
    char metrics_letter; /* short flag of --metrics-listen, or 0 */
    /* NULL, or what is wrong with the daemon's own settings: one line for the user. `given` has an
     * entry for each of `options`: it was set, by a flag or in the file. */
    const char *(*check)(const void *ctx, const bool *given);
    /* Everything else; SIGPIPE and SIGXFSZ are ignored by now. The text of a failure is logged. */
    struct moe_status (*run)(const struct moe_daemon_settings *common, void *ctx);
    void *ctx;
};

/* The exit status. Settings that are strings live until `run` has returned. */
int moe_daemon_main(const struct moe_daemon *d, int argc, char **argv);

/* Writes `endpoint` as a line to --ready-fd and closes it; without that option, does nothing. */
struct moe_status moe_daemon_announce(const struct moe_daemon_settings *common,
                                      const char *endpoint) MOE_CHECKED;

#endif
