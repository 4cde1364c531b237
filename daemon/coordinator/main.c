/* moe-coordinator: settings, then moe_coordinator_run. Exit status: 0 the group was shut down (or
 * --help, --version), 1 failure, 2 usage. */
#include "base/log.h"
#include "base/options.h"
#include "coordinator/placement.h"
#include "coordinator/service.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct settings {
    const char *listen, *state_dir, *metrics_listen, *log_level, *log_format, *config;
    uint64_t workers, lease_ms, form_timeout_ms, ready_fd;
    bool insecure, version, help;
};

#define OPTION(NAME, LETTER, KIND, FIELD, LOW, HIGH, META, HELP)                                   \
    {                                                                                              \
        NAME, LETTER, MOE_OPTION_##KIND, &(FIELD), LOW, HIGH, META, HELP                           \
    }

static int usage(const char *text)
{
    fprintf(stderr, "moe-coordinator: %s\nTry 'moe-coordinator --help'.\n", text);
    return EXIT_USAGE;
}

/* Tells whoever started this process where it listens. */
static struct moe_status announce(int fd, const char *listen, uint16_t port)
{
    const char *colon = strrchr(listen, ':');
    char line[128];
    int n = snprintf(line, sizeof line, "%.*s:%u\n", (int)(colon - listen), listen, port);
    ssize_t written = write(fd, line, (size_t)n);
    if (close(fd) != 0 || written != n)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot write to --ready-fd");
    return moe_ok();
}

static struct moe_status serve(const struct settings *s)
{
    struct moe_coordinator_config config = {.listen = s->listen,
                                            .insecure = s->insecure,
                                            .slots = (uint32_t)s->workers,
                                            .lease_ms = (uint32_t)s->lease_ms,
                                            .form_timeout_ms = (uint32_t)s->form_timeout_ms,
                                            .state_dir = s->state_dir,
                                            .metrics_listen = s->metrics_listen,
                                            .handle_signals = true};
    struct moe_coordinator *c;
    MOE_TRY(moe_coordinator_create(&config, &c));
    moe_log_info("release %s, listening on port %u for %u workers", MOE_VERSION,
                 moe_coordinator_port(c), config.slots);
    if (s->metrics_listen != NULL)
        moe_log_info("metrics on port %u", moe_coordinator_metrics_port(c));
    struct moe_status st = moe_ok();
    if (s->ready_fd != 0)
        st = announce((int)s->ready_fd, s->listen, moe_coordinator_port(c));
    if (st.code == MOE_OK)
        st = moe_coordinator_run(c);
    moe_coordinator_destroy(c);
    return st;
}

static bool set_log(const struct settings *s)
{
    enum moe_log_level level;
    bool json = strcmp(s->log_format, "json") == 0;
    if (!moe_log_level_from_name(s->log_level, &level))
        return false;
    if (!json && strcmp(s->log_format, "text") != 0)
        return false;
    moe_log_set_component("coordinator");
    moe_log_set_level(level);
    moe_log_set_format(json ? MOE_LOG_JSON : MOE_LOG_TEXT);
    return true;
}

int main(int argc, char **argv)
{
    struct settings s = {.listen = "127.0.0.1:7700",
                         .log_level = "info",
                         .log_format = "text",
                         .workers = 1,
                         .lease_ms = 5000,
                         .form_timeout_ms = 60000};
    const struct moe_option table[] = {
        OPTION("listen", 'l', STRING, s.listen, 0, 0, "HOST:PORT",
               "Address for workers and moectl"),
        OPTION("workers", 'n', UINT, s.workers, 1, MOE_PLACEMENT_SLOTS_MAX, "N",
               "Seats of the group"),
        OPTION("state-dir", 's', STRING, s.state_dir, 0, 0, "DIR",
               "Where epochs outlive a restart; without it nothing is kept"),
        OPTION("lease-ms", 0, UINT, s.lease_ms, 100, 600000, "MS",
               "A worker not heard of for this long loses its seat"),
        OPTION("form-timeout-ms", 0, UINT, s.form_timeout_ms, 100, 3600000, "MS",
               "Time to form the group once all workers have loaded"),
        OPTION("metrics-listen", 'm', STRING, s.metrics_listen, 0, 0, "HOST:PORT",
               "Address of /metrics and /healthz; off by default"),
        OPTION("log-level", 0, STRING, s.log_level, 0, 0, "LEVEL", "error, warn, info or debug"),
        OPTION("log-format", 0, STRING, s.log_format, 0, 0, "FORMAT", "text or json"),
        OPTION("insecure", 0, BOOL, s.insecure, 0, 0, NULL,
               "Allow an address that is not loopback, without encryption"),
        OPTION("ready-fd", 0, UINT, s.ready_fd, 0, INT32_MAX, "FD",
               "Write the address to this descriptor once listening; 0 = none"),
        OPTION("config", 'c', STRING, s.config, 0, 0, "FILE", "Settings as 'name = value' lines"),
        OPTION("version", 'V', BOOL, s.version, 0, 0, NULL, "Print the release"),
        OPTION("help", 'h', BOOL, s.help, 0, 0, NULL, "Print this text"),
    };
    enum { OPTIONS = sizeof table / sizeof *table };
    /* The help text prints the values: the defaults have to be read before they are overwritten. */
    struct settings given = s;
    struct moe_options owned;
    int first, code;
    struct moe_status st = moe_options_parse(table, OPTIONS, "config", argc, argv, &first, &owned);
    if (st.code != MOE_OK)
        return usage(st.text);
    if (s.help) {
        s = given;
        printf("Usage: moe-coordinator [options]\n"
               "Seats, leases, epochs and expert placement of one group of moe-workers.\n\n");
        moe_options_print(stdout, table, OPTIONS);
        code = EXIT_OK;
    } else if (s.version) {
        printf("moe-coordinator %s\n", MOE_VERSION);
        code = EXIT_OK;
    } else if (first < argc) {
        code = usage("takes no arguments");
    } else if (strrchr(s.listen, ':') == NULL) {
        code = usage("--listen wants HOST:PORT");
    } else if (!set_log(&s)) {
        code = usage("--log-level is error, warn, info or debug; --log-format is text or json");
    } else if (s.ready_fd != 0 && fcntl((int)s.ready_fd, F_GETFD) < 0) {
        code = usage("--ready-fd is not an open descriptor");
    } else {
        signal(SIGPIPE, SIG_IGN);
        st = serve(&s);
        if (st.code != MOE_OK)
            moe_log_error("%s", st.text);
        code = st.code == MOE_OK ? EXIT_OK : EXIT_FAILED;
    }
    moe_options_free(&owned);
    return code;
}
