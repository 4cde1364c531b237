/* SPDX-License-Identifier: Apache-2.0 */
/* Common parts of each daemon's `main`: common options, --help and --version, the log, the ready
 * line with the address, exit codes.
 *
 * Exit status: 0 regular end (or --help, --version, --check-config), 1 failure, 2 usage. A daemon
 * supplies a table of options and two functions; it owns its loops and signals. */
#ifndef MOE_BASE_DAEMON_H
#define MOE_BASE_DAEMON_H

#include "base/status.h"
#include "daemon/options.h"
#include "daemon/progress.h"

#include <uv.h>

/* Values of the common options, checked. */
struct moe_daemon_settings {
    const char *metrics_listen;   /* HOST:PORT, or NULL: no metrics */
    uint64_t health_step_ms;      /* see struct moe_progress_config */
    bool insecure;                /* allow addresses that are not loopback without encryption */
    const char *access_file;      /* who may do what; NULL: none */
    const char *token_file;       /* what this daemon shows to others; NULL: nothing */
    const char *admin_socket_dir; /* of the sockets for operators (local.h); NULL: none */
    /* PEM files. The first two come together; the third needs them. */
    const char *tls_certificate, *tls_key; /* its servers use TLS, and it shows the same certificate
                                              to servers; NULL: plain TCP */
    const char *tls_client_ca;             /* roots of its clients; NULL: it asks for none */
    const char *tls_ca; /* roots of the servers that it calls, by TLS; NULL: plain TCP */
    /* Only for base/daemon.c. */
    const char *log_level, *log_format, *log_file, *config;
    uint64_t ready_fd;
    bool check_config, version, help;
};

struct moe_daemon {
    const char *name;                 /* "moe-worker" */
    const char *component;            /* in the log: "worker"; static */
    const char *synopsis;             /* after the name in the help text: "--model DIR [options]" */
    const char *purpose;              /* one sentence for the help text */
    const struct moe_option *options; /* of this daemon; the common ones follow */
    size_t option_count;
    char metrics_letter; /* short flag of --metrics-listen, or 0 */
    /* Checks the daemon's settings: returns NULL, or one line for the user. `given` has an entry
     * for each of `options`: true if a flag or the file has set it. */
    const char *(*check)(const struct moe_daemon_settings *common, const void *ctx,
                         const bool *given);
    /* Runs the daemon. SIGPIPE and SIGXFSZ are ignored, and SIGHUP is blocked until
     * moe_hangup_watch. The text of a failure is logged. */
    struct moe_status (*run)(const struct moe_daemon_settings *common, void *ctx);
    /* For --check-config, after `check`: reads the files that common settings name. NULL = none. */
    struct moe_status (*check_files)(const struct moe_daemon_settings *common);
    void *ctx;
};

/* The exit status. Settings that are strings live until `run` has returned. */
int moe_daemon_main(const struct moe_daemon *d, int argc, char **argv);

/* Checks an address to listen at; `setting` is the option, for the text. Without TLS and --insecure
 * it must be loopback. NULL is valid. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_daemon_check_listen(const struct moe_daemon_settings *common,
                                          const char *setting, const char *listen) MOE_CHECKED;

/* Adds the loop "main" to `p`, and turns it from `loop` often enough. Close `timer` like any handle
 * of the loop. Errors: MOE_INTERNAL/IO. */
struct moe_status moe_daemon_turn(struct moe_progress *p, uv_loop_t *loop,
                                  uv_timer_t *timer) MOE_CHECKED;

/* The daemon listens: tells the service manager (notify.h), and writes `endpoints` (one, or several
 * with a blank between) as a line to --ready-fd and closes it, where that option is given. */
struct moe_status moe_daemon_announce(const struct moe_daemon_settings *common,
                                      const char *endpoints) MOE_CHECKED;

#endif
