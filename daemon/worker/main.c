/* moe-worker: settings and signals around worker.h. Exit status: 0 drained (or --help, --version),
 * 1 failure, or a drain that was cut short, 2 usage. */
#include "base/log.h"
#include "base/metrics_http.h"
#include "base/options.h"
#include "base/size.h"
#include "worker/worker.h"

#include "rpc/msg.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };
enum { ANY_SLOT = MOE_MAX_SLOTS };

struct settings {
    const char *model, *coordinator, *listen, *advertise, *backend, *worker_id;
    const char *metrics_listen, *log_level, *log_format, *config;
    uint64_t device, threads, slot, ready_fd;
    uint64_t max_message_bytes, max_bytes_in_flight;
    uint64_t max_tokens_per_request, max_tokens_per_step, max_queued_tokens;
    uint64_t wait_budget_ms, drain_ms;
    bool insecure, version, help;
};

static const struct settings defaults = {
    .listen = "127.0.0.1:0",
    .backend = "auto",
    .slot = ANY_SLOT,
    .max_message_bytes = UINT64_C(128) << 20,
    .max_bytes_in_flight = UINT64_C(1) << 30,
    .max_tokens_per_request = 65536,
    .max_tokens_per_step = 4096,
    .max_queued_tokens = 1 << 20,
    .wait_budget_ms = 2000,
    .drain_ms = 10000,
    .log_level = "info",
    .log_format = "text",
};

static int usage(const char *text)
{
    fprintf(stderr, "moe-worker: %s\nTry 'moe-worker --help'.\n", text);
    return EXIT_USAGE;
}

/* ------------------------------------------------------------------------ running */

struct run {
    uv_loop_t loop;
    uv_signal_t signals[2];
    uv_async_t ended;
    struct moe_worker *worker;
    unsigned signals_seen;
    struct moe_status outcome; /* set before `ended` is sent */
};

static void on_seated(void *ctx, uint32_t slot)
{
    static char component[24]; /* the log keeps the pointer */
    (void)ctx;
    (void)snprintf(component, sizeof component, "worker %u", slot);
    moe_log_set_component(component);
}

static void on_ended(void *ctx, struct moe_status why)
{
    struct run *run = ctx;
    run->outcome = why;
    (void)uv_async_send(&run->ended);
}

static void stop_loop(uv_async_t *async)
{
    uv_stop(async->loop);
}

/* The first signal drains, the second gives up waiting, the third finds no handler any more. */
static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *run = handle->data;
    (void)signum;
    if (run->signals_seen++ == 0) {
        moe_worker_drain(run->worker, "stopped by a signal");
        return;
    }
    run->outcome = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "stopped by a second signal");
    for (int i = 0; i < 2; i++)
        (void)uv_signal_stop(&run->signals[i]);
    uv_stop(handle->loop);
}

static struct moe_status check_uv(int rc)
{
    return rc == 0 ? moe_ok()
                   : moe_error(MOE_INTERNAL, MOE_REASON_IO, "event loop: %s", uv_strerror(rc));
}

static struct moe_status watch(struct run *run)
{
    static const int signums[] = {SIGTERM, SIGINT};
    MOE_TRY(check_uv(uv_async_init(&run->loop, &run->ended, stop_loop)));
    for (int i = 0; i < 2; i++) {
        MOE_TRY(check_uv(uv_signal_init(&run->loop, &run->signals[i])));
        run->signals[i].data = run;
        MOE_TRY(check_uv(uv_signal_start(&run->signals[i], on_signal, signums[i])));
    }
    return moe_ok();
}

static void close_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void close_loop(struct run *run)
{
    uv_walk(&run->loop, close_handle, NULL);
    (void)uv_run(&run->loop, UV_RUN_DEFAULT);
    (void)uv_loop_close(&run->loop);
}

/* Tells whoever started this process where it listens. */
static struct moe_status announce(int fd, const char *endpoint)
{
    char line[320];
    int n = snprintf(line, sizeof line, "%s\n", endpoint);
    ssize_t written = write(fd, line, (size_t)n);
    if (close(fd) != 0 || written != n)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot write to --ready-fd");
    return moe_ok();
}

static bool is_healthy(void *ctx)
{
    const struct run *run = ctx;
    return moe_worker_epoch(run->worker) != 0;
}

static struct moe_status serve_until_ended(struct run *run, const struct settings *s,
                                           struct moe_metrics *metrics)
{
    struct moe_metrics_http *http = NULL;
    struct moe_status st = moe_ok();
    moe_log_info("release %s, listening on %s", MOE_VERSION, moe_worker_endpoint(run->worker));
    if (s->metrics_listen != NULL) {
        const struct moe_metrics_http_config config = {
            .listen = s->metrics_listen, .metrics = metrics, .healthy = is_healthy, .ctx = run};
        MOE_TRY(moe_metrics_http_start(&config, &http));
        moe_log_info("metrics on port %u", moe_metrics_http_port(http));
    }
    if (s->ready_fd != 0)
        st = announce((int)s->ready_fd, moe_worker_endpoint(run->worker));
    if (!moe_failed(&st)) {
        (void)uv_run(&run->loop, UV_RUN_DEFAULT);
        st = run->outcome;
    }
    moe_metrics_http_stop(http);
    return st;
}

static struct moe_status run_worker(const struct settings *s, const struct moe_backend *backend)
{
    struct run run = {0};
    struct moe_metrics *metrics = NULL;
    struct moe_worker_config config = {
        .backend = backend,
        .device = {.ordinal = (int)s->device, .threads = (uint32_t)s->threads},
        .model = s->model,
        .coordinator = s->coordinator,
        .listen = s->listen,
        .advertise = s->advertise,
        .insecure = s->insecure,
        .worker_id = s->worker_id,
        .wanted_slot_plus_one = s->slot == ANY_SLOT ? 0 : (uint32_t)s->slot + 1,
        .max_message_bytes = (uint32_t)s->max_message_bytes,
        .max_bytes_in_flight = s->max_bytes_in_flight,
        .max_tokens_per_request = (uint32_t)s->max_tokens_per_request,
        .max_tokens_per_step = (uint32_t)s->max_tokens_per_step,
        .max_queued_tokens = s->max_queued_tokens,
        .wait_budget_ms = (uint32_t)s->wait_budget_ms,
        .drain_ms = (uint32_t)s->drain_ms,
        .seated = on_seated,
        .ended = on_ended,
        .ctx = &run,
    };
    MOE_TRY(check_uv(uv_loop_init(&run.loop)));
    struct moe_status st;
    MOE_TRY_GOTO(st, watch(&run), out);
    MOE_TRY_GOTO(st, moe_metrics_create(&metrics), out);
    config.metrics = metrics;
    MOE_TRY_GOTO(st, moe_worker_start(&config, &run.worker), out);
    st = serve_until_ended(&run, s, metrics);
out:
    moe_worker_stop(run.worker);
    moe_metrics_destroy(metrics);
    close_loop(&run);
    return st;
}

/* ----------------------------------------------------------------------- settings */

/* NULL, or what is wrong. */
static const char *check_settings(const struct settings *s)
{
    if (s->model == NULL)
        return "--model is required";
    if (s->coordinator == NULL)
        return "--coordinator is required";
    if (strrchr(s->listen, ':') == NULL)
        return "--listen wants HOST:PORT";
    if (moe_pow2_ceil((uint32_t)s->max_tokens_per_step) != s->max_tokens_per_step)
        return "--max-tokens-per-step is a power of two";
    if (s->ready_fd != 0 && fcntl((int)s->ready_fd, F_GETFD) < 0)
        return "--ready-fd is not an open descriptor";
    return NULL;
}

static bool set_log(const struct settings *s)
{
    enum moe_log_level level;
    bool json = strcmp(s->log_format, "json") == 0;
    if (!moe_log_level_from_name(s->log_level, &level) ||
        (!json && strcmp(s->log_format, "text") != 0))
        return false;
    moe_log_set_component("worker");
    moe_log_set_level(level);
    moe_log_set_format(json ? MOE_LOG_JSON : MOE_LOG_TEXT);
    return true;
}

static int start(const struct settings *s)
{
    const char *wrong = check_settings(s);
    if (wrong != NULL)
        return usage(wrong);
    if (!set_log(s))
        return usage("--log-level is error, warn, info or debug; --log-format is text or json");
    bool known = strcmp(s->backend, "cpu") == 0 || strcmp(s->backend, "cuda") == 0 ||
                 strcmp(s->backend, "auto") == 0;
    if (!known)
        return usage("--backend is cpu, cuda or auto");
    const struct moe_backend *backend = moe_backend_find(s->backend);
    if (backend == NULL) {
        moe_log_error("this build has no backend \"%s\"", s->backend);
        return EXIT_FAILED;
    }
    signal(SIGPIPE, SIG_IGN);
    moe_rpc_tune_allocator();
    struct moe_status st = run_worker(s, backend);
    if (moe_failed(&st))
        moe_log_error("%s", st.text);
    return moe_failed(&st) ? EXIT_FAILED : EXIT_OK;
}

#define OPTION(NAME, LETTER, KIND, FIELD, LOW, HIGH, META, HELP)                                   \
    {                                                                                              \
        NAME, LETTER, MOE_OPTION_##KIND, &(FIELD), LOW, HIGH, META, HELP                           \
    }

int main(int argc, char **argv)
{
    struct settings s = defaults;
    const struct moe_option table[] = {
        OPTION("model", 'm', STRING, s.model, 0, 0, "DIR",
               "Model directory: config.json and safetensors"),
        OPTION("coordinator", 'C', STRING, s.coordinator, 0, 0, "HOST:PORT",
               "The group's coordinator"),
        OPTION("listen", 'l', STRING, s.listen, 0, 0, "HOST:PORT",
               "Address for clients and peers; port 0 = any"),
        OPTION("advertise", 0, STRING, s.advertise, 0, 0, "HOST:PORT",
               "Address that clients and peers are told, where it is another"),
        OPTION("backend", 'b', STRING, s.backend, 0, 0, "NAME", "cpu, cuda or auto"),
        OPTION("device", 'd', UINT, s.device, 0, 255, "N",
               "GPU to use; ignored by the CPU backend"),
        OPTION("threads", 't', UINT, s.threads, 0, 1024, "N",
               "Compute threads of the CPU backend; 0 = all cores"),
        OPTION("worker-id", 0, STRING, s.worker_id, 0, 0, "NAME",
               "Stable identity; host name and port when not given"),
        OPTION("slot", 0, UINT, s.slot, 0, ANY_SLOT, "N", "Seat to ask for; 16 = any"),
        OPTION("max-message-bytes", 0, BYTES, s.max_message_bytes, 4096, INT32_MAX, "BYTES",
               "Largest message, in and out"),
        OPTION("max-bytes-in-flight", 0, BYTES, s.max_bytes_in_flight, 65536, 0, "BYTES",
               "Memory for requests and answers; more is refused with RESOURCE_EXHAUSTED"),
        OPTION("max-tokens-per-request", 0, UINT, s.max_tokens_per_request, 1, INT32_MAX, "N",
               "Tokens of one request"),
        OPTION("max-tokens-per-step", 0, UINT, s.max_tokens_per_step, 1, 65536, "N",
               "Tokens that this worker brings to a step at most; a power of two"),
        OPTION("max-queued-tokens", 0, UINT, s.max_queued_tokens, 1, 0, "N",
               "Tokens that may wait for a step"),
        OPTION("wait-budget-ms", 0, UINT, s.wait_budget_ms, 10, 600000, "MS",
               "How long a step waits for a peer before it is lost"),
        OPTION("drain-ms", 0, UINT, s.drain_ms, 0, 3600000, "MS",
               "Time to finish requests after SIGTERM"),
        OPTION("metrics-listen", 0, STRING, s.metrics_listen, 0, 0, "HOST:PORT",
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
    struct moe_options owned;
    int first, code;
    struct moe_status st = moe_options_parse(table, OPTIONS, "config", argc, argv, &first, &owned);
    if (moe_failed(&st))
        return usage(st.text);
    if (s.help) {
        s = defaults; /* the help text prints the values */
        printf("Usage: moe-worker --model DIR --coordinator HOST:PORT [options]\n"
               "One device's share of a model's experts, served over gRPC.\n\n");
        moe_options_print(stdout, table, OPTIONS);
        code = EXIT_OK;
    } else if (s.version) {
        printf("moe-worker %s\n", MOE_VERSION);
        code = EXIT_OK;
    } else if (first < argc) {
        code = usage("takes no arguments");
    } else {
        code = start(&s);
    }
    moe_options_free(&owned);
    return code;
}
