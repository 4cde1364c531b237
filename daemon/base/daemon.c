/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/daemon.h"
#include "base/build.h"

#include "base/clock.h"
#include "base/restart.h"
#include "daemon/endpoint.h"
#include "daemon/hangup.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, CREDENTIAL_BYTES = 512 };

/* A file of settings may have any bytes. */
static void complain(const struct moe_daemon *d, const char *text)
{
    char escaped[4 * MOE_STATUS_TEXT];
    moe_log_escape(escaped, sizeof escaped, text);
    fprintf(stderr, "%s: %s\n", d->name, escaped);
}

static int usage(const struct moe_daemon *d, const char *text)
{
    complain(d, text);
    fprintf(stderr, "Try '%s --help'.\n", d->name);
    return EXIT_USAGE;
}

/* Joins the daemon's options and the common ones; returns their number. */
static size_t join_options(const struct moe_daemon *d, struct moe_daemon_settings *s,
                           struct moe_option table[MOE_OPTIONS_MAX])
{
    const struct moe_option common[] = {
        {"metrics-listen", d->metrics_letter, MOE_OPTION_STRING, &s->metrics_listen, 0, 0,
         "HOST:PORT", "Address of /metrics, /livez and /readyz, never with TLS; off by default"},
        {"health-step-ms", 0, MOE_OPTION_UINT, &s->health_step_ms, 10, 3600000, "MS",
         "An idle loop turns this often, and an idle group runs a step without tokens. A loop that "
         "rests for longer than this and --wait-budget-ms (coordinator: 2 s) is stuck: see "
         "/readyz"},
        {"log-level", 0, MOE_OPTION_STRING, &s->log_level, 0, 0, "LEVEL",
         "error, warn, info or debug"},
        {"log-format", 0, MOE_OPTION_STRING, &s->log_format, 0, 0, "FORMAT", "text or json"},
        {"log-file", 0, MOE_OPTION_STRING, &s->log_file, 0, 0, "FILE",
         "Append the log to FILE, which SIGHUP opens anew; stderr when not given"},
        {"insecure", 0, MOE_OPTION_BOOL, &s->insecure, 0, 0, NULL,
         "Allow an address that is not loopback, without encryption; without --access-file and "
         "--token-file, every caller may do everything"},
        {"access-file", 0, MOE_OPTION_STRING, &s->access_file, 0, 0, "FILE",
         "JSON: the roles of identities and tokens; changes count within 10 s"},
        {"admin-socket-dir", 0, MOE_OPTION_STRING, &s->admin_socket_dir, 0, 0, "DIR",
         "Directory for a second local socket: members of the directory's group, who reach it, "
         "have "
         "the role admin"},
        {"token-file", 0, MOE_OPTION_STRING, &s->token_file, 0, 0, "FILE",
         "Token that this daemon shows to others, mode 0600. Without --access-file, a caller with "
         "the same token may do everything"},
        {"tls-certificate", 0, MOE_OPTION_STRING, &s->tls_certificate, 0, 0, "FILE",
         "PEM: this daemon's certificate, then its chain. All its TCP addresses but "
         "--metrics-listen use TLS; it shows the certificate to other daemons too. Changes of this "
         "and the next three count within 10 s"},
        {"tls-key", 0, MOE_OPTION_STRING, &s->tls_key, 0, 0, "FILE",
         "PEM: the key of --tls-certificate, without a passphrase, mode 0600"},
        {"tls-client-ca", 0, MOE_OPTION_STRING, &s->tls_client_ca, 0, 0, "FILE",
         "PEM: roots of clients' certificates; a client may show one and gets its roles"},
        {"tls-ca", 0, MOE_OPTION_STRING, &s->tls_ca, 0, 0, "FILE",
         "PEM: roots of other daemons' certificates; this daemon calls them by TLS only"},
        {"ready-fd", 0, MOE_OPTION_UINT, &s->ready_fd, 0, INT32_MAX, "FD",
         "Write the address to this descriptor once listening; 0 = none"},
        {"config", 'c', MOE_OPTION_STRING, &s->config, 0, 0, "FILE",
         "Lines 'name = value', names as here without --; # opens a comment line"},
        {"check-config", 0, MOE_OPTION_BOOL, &s->check_config, 0, 0, NULL,
         "Check the settings and the files that trust needs, and end: 0 = valid"},
        {"version", 'V', MOE_OPTION_BOOL, &s->version, 0, 0, NULL, "Print the release"},
        {"help", 'h', MOE_OPTION_BOOL, &s->help, 0, 0, NULL, "Print this text"},
    };
    MOE_INVARIANT(d->option_count + sizeof common / sizeof *common <= MOE_OPTIONS_MAX);
    memcpy(table, d->options, d->option_count * sizeof *table);
    memcpy(table + d->option_count, common, sizeof common);
    return d->option_count + sizeof common / sizeof *common;
}

/* The text of --help, made before parsing overwrites the defaults that it shows. NULL when out of
 * memory. */
static char *describe(const struct moe_daemon *d, const struct moe_option *table, size_t count)
{
    char *text = NULL;
    size_t length;
    FILE *to = open_memstream(&text, &length);
    if (to == NULL)
        return NULL;
    fprintf(to, "Usage: %s %s\n%s\n\n", d->name, d->synopsis, d->purpose);
    moe_options_print(to, table, count, moe_options_columns(STDOUT_FILENO));
    if (fclose(to) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static bool set_log(const struct moe_daemon *d, const struct moe_daemon_settings *s)
{
    enum moe_log_level level;
    bool json = strcmp(s->log_format, "json") == 0;
    if (!moe_log_level_from_name(s->log_level, &level) ||
        (!json && strcmp(s->log_format, "text") != 0))
        return false;
    moe_log_set_component(d->component);
    moe_log_set_level(level);
    moe_log_set_format(json ? MOE_LOG_JSON : MOE_LOG_TEXT);
    return true;
}

/* Raises the limit of descriptors to the maximum: each connection needs one, and the default is for
 * shells. */
static void raise_descriptor_limit(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= files.rlim_max)
        return;
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0)
        moe_log_warn("the limit of open files stays as it is: %s", strerror(errno));
}

/* Names of the files that take_credentials has found: "token-file, tls-key"; "" = none. */
static char credentials[128];

/* A file of trust that no setting names, and that the service manager has passed on as the
 * credential "moed.NAME" (LoadCredential=). `path` outlives the settings. */
static void take_credential(const char *name, const char **setting, char path[CREDENTIAL_BYTES])
{
    const char *directory = getenv("CREDENTIALS_DIRECTORY");
    if (*setting != NULL || directory == NULL)
        return;
    int n = snprintf(path, CREDENTIAL_BYTES, "%s/moed.%s", directory, name);
    if (n <= 0 || n >= CREDENTIAL_BYTES || access(path, F_OK) != 0)
        return;
    *setting = path;
    size_t used = strlen(credentials);
    (void)snprintf(credentials + used, sizeof credentials - used, "%s%s", used > 0 ? ", " : "",
                   name);
}

static void take_credentials(struct moe_daemon_settings *s)
{
    const struct {
        const char *name, **setting;
    } all[] = {
        {"access-file", &s->access_file},         {"token-file", &s->token_file},
        {"tls-certificate", &s->tls_certificate}, {"tls-key", &s->tls_key},
        {"tls-client-ca", &s->tls_client_ca},     {"tls-ca", &s->tls_ca},
    };
    enum { COUNT = sizeof all / sizeof *all };
    static char paths[COUNT][CREDENTIAL_BYTES];
    credentials[0] = '\0';
    for (size_t i = 0; i < COUNT; i++)
        take_credential(all[i].name, all[i].setting, paths[i]);
}

/* NULL, or one line for the user. */
static const char *check_tls(const struct moe_daemon_settings *s)
{
    if ((s->tls_certificate == NULL) != (s->tls_key == NULL))
        return "--tls-certificate and --tls-key come together";
    if (s->tls_client_ca != NULL && s->tls_certificate == NULL)
        return "--tls-client-ca needs --tls-certificate and --tls-key";
    return NULL;
}

/* The end of --check-config: all settings are valid. */
static int check_files(const struct moe_daemon *d, const struct moe_daemon_settings *s)
{
    struct moe_status st = d->check_files != NULL ? d->check_files(s) : moe_ok();
    if (moe_failed(&st))
        complain(d, st.text);
    else
        printf("%s: the settings are valid\n", d->name);
    return moe_failed(&st) ? EXIT_FAILED : EXIT_OK;
}

/* ------------------------------------------------------------------ starts in a row */

/* The file of $MOED_START_RECORD, which a unit of systemd names; NULL: none. */
static const char *start_record;

/* Waits before this start if the last ones ended soon. A daemon that is stopped meanwhile starts at
 * once the next time. */
static void hold_start(void)
{
    uint64_t wait_ns;
    uint32_t ends;
    sigset_t set;
    struct moe_status st = moe_restart_note(start_record, &wait_ns, &ends);
    if (moe_failed(&st))
        moe_log_warn("%s; this start does not wait", st.text);
    if (wait_ns == 0)
        return;
    struct timespec rest = {.tv_sec = (time_t)(wait_ns / MOE_NS_PER_S),
                            .tv_nsec = (long)(wait_ns % MOE_NS_PER_S)};
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    moe_log_warn("%u starts in a row ended within a minute: this one waits %.1f s", ends,
                 (double)wait_ns / (double)MOE_NS_PER_S);
    if (sigtimedwait(&set, NULL, &rest) > 0) {
        moe_restart_forget(start_record);
        _exit(EXIT_OK);
    }
    (void)sigprocmask(SIG_UNBLOCK, &set, NULL);
}

struct moe_status moe_daemon_check_listen(const struct moe_daemon_settings *common,
                                          const char *setting, const char *listen)
{
    if (listen == NULL)
        return moe_ok();
    MOE_TRY(moe_endpoint_check_listen(setting, listen));
    return common->insecure || common->tls_certificate != NULL
               ? moe_ok()
               : moe_endpoint_check_loopback(listen);
}

static int start(const struct moe_daemon *d, const struct moe_daemon_settings *s, const bool *given)
{
    const char *wrong = d->check(s, d->ctx, given);
    if (wrong == NULL)
        wrong = check_tls(s);
    if (wrong != NULL)
        return usage(d, wrong);
    /* Figures never go over TLS. Who has TLS on the other addresses has looked at the network. */
    struct moe_status st = moe_daemon_check_listen(s, "--metrics-listen", s->metrics_listen);
    if (moe_failed(&st))
        return usage(d, st.text);
    if (s->ready_fd != 0 && fcntl((int)s->ready_fd, F_GETFD) < 0)
        return usage(d, "--ready-fd is not an open descriptor");
    if (!set_log(d, s))
        return usage(d, "--log-level is error, warn, info or debug; --log-format is text or json");
    if (s->check_config)
        return check_files(d, s);
    if (start_record != NULL)
        hold_start();
    st = moe_hangup_hold();
    if (!moe_failed(&st) && s->log_file != NULL)
        st = moe_log_open(s->log_file);
    if (moe_failed(&st)) {
        moe_log_error("%s", st.text);
        return EXIT_FAILED;
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* writes over the file size limit fail with an error instead */
    raise_descriptor_limit();
    st = moe_notify_open();
    if (moe_failed(&st))
        moe_log_warn("without a service manager: %s", st.text);
    if (credentials[0] != '\0')
        moe_log_info("credentials of the service manager: %s. They are copies of this start: after "
                     "a change of the files, restart this daemon",
                     credentials);
    st = d->run(s, d->ctx);
    moe_notify_stopping();
    /* The process exits now: a further signal would only change the exit status. */
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    if (moe_failed(&st))
        moe_log_error("%s", st.text);
    else if (start_record != NULL)
        moe_restart_forget(start_record);
    return moe_failed(&st) ? EXIT_FAILED : EXIT_OK;
}

/* ------------------------------------------------------------------ SIGHUP */

/* What a second look at the settings needs. */
struct arguments {
    const struct moe_option *table;
    size_t count;
    const struct moe_daemon_settings *settings;
    int argc;
    char **argv;
};

/* At SIGHUP. Reads all settings as at the start, into a separate table, and takes the log level
 * of it: the only setting that may change while a daemon runs. */
static void read_level_again(void *ctx)
{
    const struct arguments *a = ctx;
    struct moe_option table[MOE_OPTIONS_MAX];
    union {
        bool flag;
        uint64_t number;
        double real;
        const char *text;
    } values[MOE_OPTIONS_MAX] = {0};
    const char *text = "info";
    enum moe_log_level level;
    int first;
    memcpy(table, a->table, a->count * sizeof *table);
    for (size_t i = 0; i < a->count; i++)
        table[i].value =
            a->table[i].value == &a->settings->log_level ? (void *)&text : (void *)&values[i];
    struct moe_options owned;
    struct moe_status st =
        moe_options_parse(table, a->count, "config", a->argc, a->argv, &first, &owned);
    if (moe_failed(&st)) {
        moe_log_error("SIGHUP: %s; the log level stays", st.text);
        return;
    }
    if (moe_log_level_from_name(text, &level))
        moe_log_set_level(level);
    else
        moe_log_error("SIGHUP: log-level is error, warn, info or debug, not '%.32s'", text);
    moe_options_free(&owned);
}

int moe_daemon_main(const struct moe_daemon *d, int argc, char **argv)
{
    start_record = getenv("MOED_START_RECORD");
    struct moe_daemon_settings s = {
        .log_level = "info", .log_format = "text", .health_step_ms = 500};
    struct moe_option table[MOE_OPTIONS_MAX];
    size_t count = join_options(d, &s, table);
    char *help = describe(d, table, count);
    struct moe_options owned = {0};
    int first, code;
    struct moe_status st = moe_options_parse(table, count, "config", argc, argv, &first, &owned);
    if (moe_failed(&st)) {
        code = usage(d, st.text);
    } else if (s.help) {
        code = help != NULL && fputs(help, stdout) >= 0 ? EXIT_OK : EXIT_FAILED;
    } else if (s.version) {
        printf("%s %s (commit %s)\n", d->name, moe_build_version(), moe_build_commit());
        code = EXIT_OK;
    } else if (first < argc) {
        code = usage(d, "takes no arguments");
    } else {
        struct arguments arguments = {table, count, &s, argc, argv};
        take_credentials(&s);
        moe_hangup_call(MOE_HANGUP_SETTINGS, read_level_again, &arguments);
        code = start(d, &s, owned.given);
        moe_hangup_call(MOE_HANGUP_SETTINGS, NULL, NULL);
    }
    free(help);
    moe_options_free(&owned);
    return code;
}

static void on_turn(uv_timer_t *timer)
{
    moe_loop_turn(timer->data);
}

struct moe_status moe_daemon_turn(struct moe_progress *p, uv_loop_t *loop, uv_timer_t *timer)
{
    const struct moe_loop_config config = {.name = "main", .code = "MAIN_STUCK", .always = true};
    uint64_t period_ms = moe_progress_step_ns(p) / (2 * MOE_NS_PER_MS);
    timer->data = moe_progress_add(p, &config);
    int wrong = uv_timer_init(loop, timer);
    if (wrong == 0)
        wrong = uv_timer_start(timer, on_turn, 0, period_ms > 0 ? period_ms : 1);
    return wrong == 0
               ? moe_ok()
               : moe_error(MOE_INTERNAL, MOE_REASON_IO, "event loop: %s", uv_strerror(wrong));
}

struct moe_status moe_daemon_announce(const struct moe_daemon_settings *common,
                                      const char *endpoints)
{
    moe_notify_ready();
    if (common->ready_fd == 0)
        return moe_ok();
    char line[640];
    int fd = (int)common->ready_fd, n = snprintf(line, sizeof line, "%s\n", endpoints);
    if (n < 0 || (size_t)n >= sizeof line)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "the address is too long to announce");
    ssize_t written = write(fd, line, (size_t)n);
    if (close(fd) != 0 || written != n)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot write to --ready-fd");
    return moe_ok();
}
