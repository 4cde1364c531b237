/* SPDX-License-Identifier: Apache-2.0 */
/* moe-worker: settings and signals around worker.h. A drain that was cut short is a failure. */
#include "access/guard.h"
#include "base/build.h"
#include "base/clock.h"
#include "base/cores.h"
#include "base/size.h"
#include "daemon/daemon.h"
#include "daemon/endpoint.h"
#include "daemon/hangup.h"
#include "daemon/log.h"
#include "daemon/metrics_http.h"
#include "daemon/notify.h"
#include "daemon/process_metrics.h"
#include "rpc/msg.h"
#include "trace/trace.h"
#include "worker/host.h"
#include "worker/worker.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>

enum { ANY_SLOT = MOE_MAX_SLOTS, REPORT_MS = 1000 };

#define ECHO_NS (100 * MOE_NS_PER_MS)

struct settings {
    const char *model, *weights, *fp8_compute, *coordinator, *listen, *control_listen,
        *admin_listen, *advertise, *backend, *worker_id;
    uint64_t device, threads, slot;
    uint64_t max_message_bytes, max_bytes_in_flight;
    uint64_t max_tokens_per_request, max_tokens_per_step, max_queued_tokens;
    uint64_t max_hidden, max_experts, max_top_k;
    uint64_t wait_budget_ms, drain_ms, spin_us;
    const char *training, *lora_targets, *freeze, *training_dir;
    uint64_t lora_rank, retained_bytes, retained_device_bytes, retained_seconds;
    double lora_alpha, training_share;
    uint64_t client_memory, client_memory_each;
    const char *client_memory_socket;
    const char *net_interface, *otlp;
    double trace_sample;
    uint64_t domain_size, rebalance_share;
};

/* ----------------------------------------------------------------------- training */

/* Bits of a list "a,b,c" by the indices in `words`; false for an unknown word. */
static bool read_list(const char *list, const char *const *words, size_t count, uint32_t *bits)
{
    *bits = 0;
    for (const char *at = list; *at != '\0';) {
        size_t length = strcspn(at, ","), i = 0;
        while (i < count && (strlen(words[i]) != length || memcmp(words[i], at, length) != 0))
            i++;
        if (i == count)
            return false;
        *bits |= UINT32_C(1) << i;
        at += length;
        if (*at == ',' && *++at == '\0')
            return false;
    }
    return true;
}

static bool read_frozen(const struct settings *s, uint32_t *bits)
{
    static const char *const groups[] = {"router", "experts", "shared"};
    return read_list(s->freeze, groups, 3, bits);
}

static bool read_targets(const struct settings *s, uint32_t *bits)
{
    static const char *const targets[] = {"gate", "up", "down"};
    return read_list(s->lora_targets, targets, 3, bits);
}

/* Checked at the start: a failure of the first Save would lose all training until then. */
static bool can_keep_checkpoints(const char *directory)
{
    struct stat st;
    return stat(directory, &st) == 0 && S_ISDIR(st.st_mode) && access(directory, W_OK) == 0;
}

/* No error of the settings: it may appear later, as a file system that is not mounted yet. */
static struct moe_status no_training_directory(const struct settings *s)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                     "--training-dir: %.240s is not a writable directory", s->training_dir);
}

enum { ALL_PARTS = 1 << MOE_PARAMS_ROUTER | 1 << MOE_PARAMS_EXPERTS | 1 << MOE_PARAMS_SHARED };

static bool is_w8a8(const struct settings *s)
{
    return strcmp(s->fp8_compute, "w8a8") == 0;
}

/* NULL, or the error. */
static const char *check_training(const struct settings *s)
{
    uint32_t bits;
    if (is_w8a8(s) && strcmp(s->training, "off") != 0)
        return "--fp8-compute w8a8 does not go with --training: adapters see rows as they are";
    if (!read_frozen(s, &bits))
        return "--freeze must be a list of router, experts, shared";
    if (bits == ALL_PARTS)
        return "--freeze must leave something to learn: router, experts or shared";
    if (!read_targets(s, &bits) || bits == 0)
        return "--lora-targets must be a list of gate, up, down";
    if (!(s->training_share >= 0.01) || !(s->training_share <= 0.99))
        return "--training-share must be from 0.01 to 0.99";
    if (s->lora_rank > 0 && !(s->lora_alpha > 0))
        return "--lora-alpha must be above 0";
    return NULL;
}

/* Settings that were checked. */
static void configure_training(const struct settings *s, struct moe_worker_config *c)
{
    uint32_t targets = 0;
    c->training = strcmp(s->training, "off") != 0;
    c->trainer.optimizer =
        strcmp(s->training, "sgd") == 0 ? MOE_OPTIMIZER_SGD : MOE_OPTIMIZER_ADAMW;
    (void)read_frozen(s, &c->trainer.frozen);
    (void)read_targets(s, &targets);
    c->trainer.lora_rank = (uint32_t)s->lora_rank;
    c->trainer.lora_alpha = (float)s->lora_alpha;
    c->trainer.lora_targets = s->lora_rank > 0 ? targets : 0;
    c->training_permille = (uint32_t)(s->training_share * 1000 + 0.5);
    c->retained_bytes = s->retained_bytes;
    c->retained_device_bytes = s->retained_device_bytes;
    c->retained_ns = s->retained_seconds * MOE_NS_PER_S;
    c->training_directory = s->training_dir;
}

/* ------------------------------------------------------------------------ backends */

/* The options of moe_backend_option_tables, each name once, with the values that were given. */
static struct moe_backend_setting backend_settings[MOE_OPTIONS_MAX];

/* The entry of a name, or the end of the list. */
static struct moe_backend_setting *find_setting(const char *name)
{
    struct moe_backend_setting *s = backend_settings;
    while (s->name != NULL && strcmp(s->name, name) != 0)
        s++;
    MOE_INVARIANT(s < backend_settings + MOE_OPTIONS_MAX - 1);
    return s;
}

/* Those that the backend has; settings of other backends mean nothing to it. */
static const struct moe_backend_setting *settings_of(const struct moe_backend *backend)
{
    static struct moe_backend_setting own[MOE_OPTIONS_MAX];
    const struct moe_backend_option *o = backend->options;
    size_t count = 0;
    for (; o != NULL && o[count].name != NULL; count++) {
        MOE_INVARIANT(count < MOE_OPTIONS_MAX - 1);
        own[count] = *find_setting(o[count].name);
    }
    own[count] = (struct moe_backend_setting){0};
    return own;
}

/* May start the driver of a GPU, which has threads. */
static struct moe_status choose_backend(const char *name, struct moe_worker_config *c)
{
    static char problem[MOE_STATUS_TEXT]; /* outlives the worker */
    c->backend_asked = name;
    if (strcmp(name, "auto") != 0) {
        struct moe_status st = moe_backend_find(name, &c->backend);
        if (!moe_failed(&st))
            st = c->backend->available();
        c->cuda_module = strcmp(name, "cuda") == 0 ? "opened" : "";
        return moe_error_context(st, "--backend %s", name);
    }
    struct moe_status why;
    c->backend = moe_backend_auto(&why);
    c->cuda_module = !moe_failed(&why) ? "opened" : why.code == MOE_NOT_FOUND ? "absent" : "failed";
    if (!moe_failed(&why))
        return why;
    (void)snprintf(problem, sizeof problem, "%s", why.text);
    c->cuda_problem = problem;
    moe_log_info("--backend auto takes the CPU: %s", why.text);
    return moe_ok();
}

/* ------------------------------------------------------------------------ running */

struct run {
    uv_loop_t loop;
    uv_signal_t signals[2];
    uv_poll_t hangup;
    uv_timer_t watchdog, turn, report;
    uv_async_t ended;
    struct moe_progress *progress;
    struct moe_worker *worker;
    struct moe_process_metrics process;
    unsigned signals_seen;
    uint64_t first_signal_ns;
    struct moe_status outcome; /* set before `ended` is sent */
};

static void on_slot_assigned(void *ctx, uint32_t slot)
{
    static char component[24]; /* the log keeps the pointer */
    (void)ctx;
    (void)snprintf(component, sizeof component, "worker %u", slot);
    moe_log_set_component(component);
    moe_log_set_slot(slot);
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

/* The first signal drains; the second cuts the drain short and removes the handlers, so that a
 * third ends the process. A second one within ECHO_NS counts as the first: a shell may signal both
 * a process group and its leader. */
static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *run = handle->data;
    (void)signum;
    uint64_t now = moe_clock_ns();
    if (run->signals_seen > 0 && now - run->first_signal_ns < ECHO_NS)
        return;
    if (run->signals_seen++ == 0) {
        run->first_signal_ns = now;
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
    MOE_TRY(check_uv(uv_timer_init(&run->loop, &run->report)));
    run->report.data = run;
    MOE_TRY(moe_daemon_turn(run->progress, &run->loop, &run->turn));
    MOE_TRY(moe_notify_watch(run->progress, &run->loop, &run->watchdog));
    return moe_hangup_watch(&run->loop, &run->hangup);
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

static void on_report(uv_timer_t *timer)
{
    const struct run *run = timer->data;
    moe_worker_report(run->worker);
}

static struct moe_status serve_until_ended(struct run *run,
                                           const struct moe_daemon_settings *common,
                                           struct moe_metrics *metrics)
{
    struct moe_metrics_http *http = NULL;
    moe_log_info("release %s (commit %s), listening on %s", moe_build_version(), moe_build_commit(),
                 moe_worker_endpoint(run->worker));
    if (common->metrics_listen != NULL) {
        const struct moe_metrics_http_config config = {
            .listen = common->metrics_listen, .metrics = metrics, .progress = run->progress};
        MOE_TRY(moe_metrics_http_start(&config, &http));
        moe_log_info("metrics on port %u", moe_metrics_http_port(http));
    }
    struct moe_status st = moe_daemon_announce(common, moe_worker_endpoint(run->worker));
    if (!moe_failed(&st))
        st = check_uv(uv_timer_start(&run->report, on_report, REPORT_MS, REPORT_MS));
    if (!moe_failed(&st)) {
        (void)uv_run(&run->loop, UV_RUN_DEFAULT);
        st = run->outcome;
    }
    (void)uv_timer_stop(&run->report);
    moe_metrics_http_stop(http);
    return st;
}

/* Nanoseconds. On the CPU backend a polling thread would take a processor from the computation. */
static uint64_t spin_of(const struct settings *s, bool cuda)
{
    enum { SPIN_US = 1000, CORES = 8 };
    bool spare = cuda && moe_usable_cores() >= CORES;
    uint64_t us = s->spin_us != MOE_OPTION_UNSET ? s->spin_us : spare ? SPIN_US : 0;
    return us * MOE_NS_PER_MS / 1000;
}

/* Without --tls-ca, links to other daemons are plain, and show no certificate. */
static struct moe_rpc_trust trust_of(const struct moe_daemon_settings *s)
{
    struct moe_rpc_trust trust = {.token_file = s->token_file, .insecure = s->insecure};
    if (s->tls_ca != NULL)
        trust.tls = (struct moe_rpc_tls_files){
            .certificate = s->tls_certificate, .key = s->tls_key, .ca = s->tls_ca};
    return trust;
}

/* `interface`: of --net-interface, or "". */
static struct moe_status prepare_network(const struct settings *s, const char *interface)
{
    const char *endpoint = s->advertise != NULL ? s->advertise : s->listen;
    struct moe_worker_interface own = {0};
    if (interface[0] != '\0')
        return moe_backends_prepare(interface, NULL);
    if (!moe_worker_find_interface_of(endpoint, &own))
        moe_log_info("rows from other hosts may come in on every interface: this host has no "
                     "address of %.200s; --net-interface chooses one",
                     endpoint);
    return moe_backends_prepare(NULL, own.name[0] != '\0' ? own.name : NULL);
}

static struct moe_status run_worker(const struct moe_daemon_settings *common, void *ctx)
{
    const struct settings *s = ctx;
    /* Before the search for a GPU, which may start threads. */
    moe_rpc_tune_allocator();
    MOE_TRY(moe_rpc_force_polling());
    static struct moe_worker_interface interface; /* "": not chosen */
    if (s->training_dir != NULL && !can_keep_checkpoints(s->training_dir))
        return no_training_directory(s);
    if (s->net_interface != NULL)
        MOE_TRY(moe_worker_find_interface(s->net_interface, &interface));
    MOE_TRY(prepare_network(s, interface.name));
    struct run run = {0};
    struct moe_metrics *metrics = NULL;
    struct moe_worker_config config = {
        .device = {.ordinal = (int)s->device, .threads = (uint32_t)s->threads},
        .model = s->model,
        .coordinator = s->coordinator,
        .listen = s->listen,
        .control_listen = s->control_listen,
        .admin_listen = s->admin_listen,
        .advertise = s->advertise,
        .insecure = common->insecure,
        .trust = trust_of(common),
        .worker_id = s->worker_id,
        .wanted_slot_plus_one = s->slot == ANY_SLOT ? 0 : (uint32_t)s->slot + 1,
        .max_message_bytes = (uint32_t)s->max_message_bytes,
        .max_bytes_in_flight = s->max_bytes_in_flight,
        .max_tokens_per_request = (uint32_t)s->max_tokens_per_request,
        .max_tokens_per_step = (uint32_t)s->max_tokens_per_step,
        .max_queued_tokens = s->max_queued_tokens,
        .max_hidden = (uint32_t)s->max_hidden,
        .max_experts = (uint32_t)s->max_experts,
        .max_top_k = (uint32_t)s->max_top_k,
        .domain_size = (uint32_t)s->domain_size,
        .rebalance_share = (uint32_t)s->rebalance_share,
        .wait_budget_ms = (uint32_t)s->wait_budget_ms,
        .drain_ms = (uint32_t)s->drain_ms,
        .slot_assigned = on_slot_assigned,
        .ended = on_ended,
        .client_memory = s->client_memory,
        .client_memory_each = s->client_memory_each,
        .client_memory_socket = s->client_memory_socket,
        .otlp = s->otlp,
        .trace_sample = s->trace_sample,
        .ctx = &run,
    };
    MOE_TRY(choose_backend(s->backend, &config));
    config.device.settings = settings_of(config.backend);
    bool on_gpu = strcmp(config.backend->name, "cuda") == 0;
    config.spin_ns = spin_of(s, on_gpu);
    config.decode_weights = strcmp(s->weights, "bf16") == 0;
    config.w8a8 = is_w8a8(s);
    configure_training(s, &config);
    if (interface.name[0] != '\0')
        config.network_address = interface.address;
    const struct moe_progress_config progress = {
        .step_ns = common->health_step_ms * MOE_NS_PER_MS,
        .limit_ns = (common->health_step_ms + s->wait_budget_ms) * MOE_NS_PER_MS};
    MOE_TRY(check_uv(uv_loop_init(&run.loop)));
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_progress_create(&progress, &run.progress), out);
    MOE_TRY_GOTO(st, watch(&run), out);
    MOE_TRY_GOTO(st, moe_metrics_create(&metrics), out);
    MOE_TRY_GOTO(st, moe_process_metrics_add(metrics, &run.process), out);
    MOE_TRY_GOTO(st, moe_guard_create(common, &config.guard), out);
    config.metrics = metrics;
    config.progress = run.progress;
    st = moe_worker_start(&config, &run.worker);
    if (moe_failed(&st))
        goto out;
    st = serve_until_ended(&run, common, metrics);
out:
    moe_worker_stop(run.worker);
    moe_guard_destroy(config.guard);
    moe_metrics_destroy(metrics);
    close_loop(&run);
    moe_progress_destroy(run.progress);
    return st;
}

/* ----------------------------------------------------------------------- options */

/* Defaults. */
static struct settings settings = {
    .listen = "127.0.0.1:0",
    .backend = "auto",
    .weights = "resident",
    .fp8_compute = "auto",
    .slot = ANY_SLOT,
    .max_message_bytes = UINT64_C(128) << 20,
    .max_bytes_in_flight = UINT64_C(1) << 30,
    .max_tokens_per_request = 65536,
    .max_tokens_per_step = 4096,
    .max_queued_tokens = 1 << 20,
    .rebalance_share = 5,
    .wait_budget_ms = 2000,
    .drain_ms = 10000,
    .spin_us = MOE_OPTION_UNSET,
    .trace_sample = 0.01,
    .training = "off",
    .freeze = "",
    .lora_targets = "gate,up,down",
    .lora_alpha = 16,
    .training_share = 0.5,
    .retained_bytes = UINT64_C(1) << 30,
    .retained_device_bytes = UINT64_C(1) << 30,
    .retained_seconds = 600,
};

static const struct moe_option first_options[] = {
    {"model", 'm', MOE_OPTION_STRING, &settings.model, 0, 0, "DIR",
     "Model directory: config.json and safetensors"},
    {"coordinator", 'C', MOE_OPTION_STRING, &settings.coordinator, 0, 0, "HOST:PORT,...",
     "The group's coordinator, or several of which one leads"},
    {"listen", 'l', MOE_OPTION_STRING, &settings.listen, 0, 0, "HOST:PORT",
     "Address for clients; port 0 = any free port"},
    {"control-listen", 0, MOE_OPTION_STRING, &settings.control_listen, 0, 0, "HOST:PORT",
     "Address for peers; default: the host of --listen and any free port"},
    {"admin-listen", 0, MOE_OPTION_STRING, &settings.admin_listen, 0, 0, "HOST:PORT",
     "Address for trainers and operators: all services; --listen then refuses training"},
    {"advertise", 0, MOE_OPTION_STRING, &settings.advertise, 0, 0, "HOST:PORT",
     "Address to give to clients; default: the address of --listen"},
    {"backend", 'b', MOE_OPTION_CHOICE, &settings.backend, 0, 0, "cpu|cuda|auto",
     "Device type; auto = cuda if a GPU is there, else cpu"},
    {"weights", 0, MOE_OPTION_CHOICE, &settings.weights, 0, 0, "resident|bf16",
     "Quantised experts: resident = as the checkpoint has them, where the backend computes with "
     "them; bf16 = decoded while they are loaded. The same on all workers"},
    {"fp8-compute", 0, MOE_OPTION_CHOICE, &settings.fp8_compute, 0, 0, "auto|w8a8|w8a16",
     "Rows that experts in FP8 multiply: w8a8 = quantised to FP8 as the checkpoint says, on CPUs "
     "and Hopper GPUs with resident weights, without training; w8a16 = as they are; auto = w8a16. "
     "The same on all workers"},
};

static const struct moe_option device_options[] = {
    {"device", 'd', MOE_OPTION_UINT, &settings.device, 0, 255, "N",
     "GPU to use; the CPU backend ignores it"},
    {"threads", 't', MOE_OPTION_UINT, &settings.threads, 0, 1024, "N",
     "Compute threads of the CPU backend; 0 = all cores"},
};

static const struct moe_option other_options[] = {
    {"worker-id", 0, MOE_OPTION_STRING, &settings.worker_id, 0, 0, "NAME",
     "Identity that survives restarts; default: host name and port"},
    {"slot", 0, MOE_OPTION_UINT, &settings.slot, 0, ANY_SLOT, "N",
     "Slot to request, 0 to 63; 64 = any"},
    {"max-message-bytes", 0, MOE_OPTION_BYTES, &settings.max_message_bytes, 8192, INT32_MAX,
     "BYTES", "Largest message, in and out"},
    {"max-bytes-in-flight", 0, MOE_OPTION_BYTES, &settings.max_bytes_in_flight, 65536, 0, "BYTES",
     "Memory for requests and answers, and the same again for training; requests beyond it fail "
     "with RESOURCE_EXHAUSTED"},
    {"max-tokens-per-request", 0, MOE_OPTION_UINT, &settings.max_tokens_per_request, 1, INT32_MAX,
     "N", "Most tokens of one request"},
    {"max-tokens-per-step", 0, MOE_OPTION_UINT, &settings.max_tokens_per_step, 1, 65536, "N",
     "Most tokens of this worker in one step, a power of two; half as many in F32 in groups of "
     "several GPUs that do not train"},
    {"max-queued-tokens", 0, MOE_OPTION_UINT, &settings.max_queued_tokens, 1, 0, "N",
     "Most tokens that wait for a step"},
    {"max-hidden", 0, MOE_OPTION_UINT, &settings.max_hidden, 0, MOE_MAX_HIDDEN, "H",
     "Widest layer of added models (moectl load), the same on all workers; 0 = as --model"},
    {"max-experts", 0, MOE_OPTION_UINT, &settings.max_experts, 0, MOE_MAX_EXPERTS, "E",
     "Most experts of a layer of added models, the same on all workers; 0 = as --model"},
    {"max-top-k", 0, MOE_OPTION_UINT, &settings.max_top_k, 0, MOE_MAX_TOP_K, "K",
     "Most experts per token of added models, the same on all workers; 0 = as --model"},
    {"wait-budget-ms", 0, MOE_OPTION_UINT, &settings.wait_budget_ms, 10, 600000, "MS",
     "Milliseconds that a step waits for a peer before it fails"},
    {"drain-ms", 0, MOE_OPTION_UINT, &settings.drain_ms, 0, 3600000, "MS",
     "Milliseconds to finish requests after SIGTERM"},
    {"net-interface", 0, MOE_OPTION_STRING, &settings.net_interface, 0, 0, "NAME|ADDRESS",
     "Network interface for rows between hosts; default: that of the address of --advertise, else "
     "of --listen; all, if this host has no such address"},
    {"rebalance-share", 0, MOE_OPTION_UINT, &settings.rebalance_share, 1, 100, "PERCENT",
     "Share of one processor's time, and of the disk's, for reading experts that move here"},
    {"domain-size", 0, MOE_OPTION_UINT, &settings.domain_size, 0, MOE_MAX_SLOTS, "N",
     "For tests: slots s and t count as hosts apart unless s / N = t / N; 0 = as they are"},
    {"spin-us", 0, MOE_OPTION_UINT, &settings.spin_us, 0, 1000000, "US",
     "Microseconds that the threads of steps, requests and connections poll for more before they "
     "sleep; default 1000 on a GPU with 8 or more usable cores (shared ones count), else 0"},
    {"allow-client-memory", 0, MOE_OPTION_BYTES, &settings.client_memory, 0, 0, "BYTES",
     "Memory that clients of this host may share with the worker, all together; 0 = none"},
    {"client-memory-per-identity", 0, MOE_OPTION_BYTES, &settings.client_memory_each, 0, 0, "BYTES",
     "Most of that memory that one user or token may share; 0 = all of it"},
    {"client-memory-socket", 0, MOE_OPTION_STRING, &settings.client_memory_socket, 0, 0, "PATH",
     "Unix socket for clients that share memory; default: a new one in the directory of this "
     "user's "
     "sockets"},
    {"otlp", 0, MOE_OPTION_STRING, &settings.otlp, 0, 0, "HOST:PORT",
     "Collector for traces of requests, by OTLP/gRPC; https://HOST:PORT = by TLS, with --tls-ca"},
    {"trace-sample", 0, MOE_OPTION_DOUBLE, &settings.trace_sample, 0, 1, "SHARE",
     "Share of requests to trace, of those without a traceparent header"},
    {"training", 0, MOE_OPTION_CHOICE, &settings.training, 0, 0, "off|adamw|sgd",
     "Offer TrainingService, with the state of this optimizer"},
    {"freeze", 0, MOE_OPTION_STRING, &settings.freeze, 0, 0, "LIST",
     "Parts that never learn and take no training memory: router,experts,shared"},
    {"lora-rank", 0, MOE_OPTION_UINT, &settings.lora_rank, 0, 512, "R",
     "Train adapters of this rank instead of the experts; 0 = train the experts"},
    {"lora-alpha", 0, MOE_OPTION_DOUBLE, &settings.lora_alpha, 0, 0, "A",
     "Scale of the adapters times their rank"},
    {"lora-targets", 0, MOE_OPTION_STRING, &settings.lora_targets, 0, 0, "LIST",
     "Matrices with an adapter: gate,up,down"},
    {"training-share", 0, MOE_OPTION_DOUBLE, &settings.training_share, 0, 1, "SHARE",
     "Share of steps for training while forward requests wait, 0.01 to 0.99"},
    {"training-dir", 0, MOE_OPTION_STRING, &settings.training_dir, 0, 0, "DIR",
     "Directory for checkpoints, shared by all workers; DIR/NAME is a model folder with optimizer "
     "state"},
    {"retained-bytes", 0, MOE_OPTION_BYTES, &settings.retained_bytes, 65536, 0, "BYTES",
     "Host memory for retained forward passes, and the same again for answers of Backward"},
    {"retained-device-bytes", 0, MOE_OPTION_BYTES, &settings.retained_device_bytes, 0, 0, "BYTES",
     "Device memory for activations of retained passes, so that Backward does not compute them "
     "again; 0 = none"},
    {"retained-seconds", 0, MOE_OPTION_UINT, &settings.retained_seconds, 1, 86400, "S",
     "Seconds that retained passes, their activations and answers of Backward stay"},
    {"saved-bytes", 0, MOE_OPTION_RENAMED, NULL, 0, 0, NULL, "retained-bytes"},
    {"saved-device-bytes", 0, MOE_OPTION_RENAMED, NULL, 0, 0, NULL, "retained-device-bytes"},
    {"saved-seconds", 0, MOE_OPTION_RENAMED, NULL, 0, 0, NULL, "retained-seconds"},
};

/* All options; make_table fills it. */
static struct moe_option table[MOE_OPTIONS_MAX];
static size_t table_count;

static void add_options(const struct moe_option *options, size_t count)
{
    MOE_INVARIANT(table_count + count <= MOE_OPTIONS_MAX);
    memcpy(table + table_count, options, count * sizeof *options);
    table_count += count;
}

static void add_backend_options(enum moe_backend_scope scope)
{
    for (size_t t = 0; moe_backend_option_tables[t] != NULL; t++)
        for (const struct moe_backend_option *o = moe_backend_option_tables[t]; o->name != NULL;
             o++) {
            struct moe_backend_setting *to = find_setting(o->name);
            if (o->scope != scope || to->name != NULL)
                continue;
            to->name = o->name;
            add_options(&(struct moe_option){o->name, 0, MOE_OPTION_CHOICE, &to->value, 0, 0,
                                             o->values, o->help},
                        1);
        }
}

#define ADD_OPTIONS(options) add_options(options, sizeof options / sizeof *options)

static void make_table(void)
{
    ADD_OPTIONS(first_options);
    add_backend_options(MOE_SCOPE_SESSION);
    ADD_OPTIONS(device_options);
    add_backend_options(MOE_SCOPE_DEVICE);
    ADD_OPTIONS(other_options);
}

/* ---------------------------------------------------------------------- all together */

/* Settings that have no effect without another one. Without it they are refused, as a mistake. */
static const char *const needs[][2] = {
    {"freeze", "training"},           {"lora-rank", "training"},
    {"training-share", "training"},   {"training-dir", "training"},
    {"retained-bytes", "training"},   {"retained-device-bytes", "training"},
    {"retained-seconds", "training"}, {"lora-alpha", "lora-rank"},
    {"lora-targets", "lora-rank"},    {"client-memory-socket", "allow-client-memory"},
};

static bool is_on(const struct settings *s, const char *name)
{
    if (strcmp(name, "otlp") == 0)
        return s->otlp != NULL;
    if (strcmp(name, "allow-client-memory") == 0)
        return s->client_memory != 0;
    return strcmp(name, "training") == 0 ? strcmp(s->training, "off") != 0 : s->lora_rank > 0;
}

static bool is_given(const bool *given, const char *name)
{
    size_t i = 0;
    while (strcmp(table[i].name, name) != 0)
        i++;
    return given[i];
}

static const char *check_needs(const struct settings *s, const bool *given)
{
    static char text[80]; /* outlives the answer */
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        if (!is_given(given, needs[i][0]) || is_on(s, needs[i][1]))
            continue;
        (void)snprintf(text, sizeof text, "--%s needs --%s", needs[i][0], needs[i][1]);
        return text;
    }
    return NULL;
}

/* NULL, or the error. */
static const char *check_settings(const struct moe_daemon_settings *common, const void *ctx,
                                  const bool *given)
{
    const struct settings *s = ctx;
    if (s->model == NULL)
        return "--model is required";
    if (s->coordinator == NULL)
        return "--coordinator is required";
    if (moe_pow2_ceil((uint32_t)s->max_tokens_per_step) != s->max_tokens_per_step)
        return "--max-tokens-per-step must be a power of two";
    if (is_w8a8(s) && strcmp(s->weights, "bf16") == 0)
        return "--fp8-compute w8a8 needs experts that stay in FP8, not --weights bf16";
    const char *training = check_needs(s, given);
    if (training == NULL)
        training = check_training(s);
    if (training != NULL)
        return training;
    static struct moe_status wrong; /* outlives the answer */
    struct moe_endpoints coordinators;
    wrong = moe_endpoints_parse("--coordinator", s->coordinator, &coordinators);
    if (!moe_failed(&wrong))
        wrong = moe_daemon_check_listen(common, "--listen", s->listen);
    if (!moe_failed(&wrong))
        wrong = moe_daemon_check_listen(common, "--control-listen", s->control_listen);
    if (!moe_failed(&wrong))
        wrong = moe_daemon_check_listen(common, "--admin-listen", s->admin_listen);
    if (!moe_failed(&wrong) && s->advertise != NULL)
        wrong = moe_endpoint_check("--advertise", s->advertise);
    if (!moe_failed(&wrong))
        wrong = moe_worker_check_names(s->listen, s->control_listen, s->advertise);
    if (!moe_failed(&wrong) && s->worker_id != NULL)
        wrong = moe_worker_check_id(s->worker_id);
    if (!moe_failed(&wrong) && s->otlp != NULL) /* the CA is checked when the tracer starts */
        wrong = moe_tracer_check("--otlp", s->otlp, true);
    return moe_failed(&wrong) ? wrong.text : NULL;
}

/* Of --check-config. */
static struct moe_status check_files(const struct moe_daemon_settings *common)
{
    if (settings.training_dir != NULL && !can_keep_checkpoints(settings.training_dir))
        return no_training_directory(&settings);
    return moe_guard_check(common);
}

int main(int argc, char **argv)
{
    make_table();
    const struct moe_daemon daemon = {
        .name = "moe-worker",
        .component = "worker",
        .synopsis = "--model DIR --coordinator HOST:PORT [options]",
        .purpose = "One device's share of a model's experts, served over gRPC.",
        .options = table,
        .option_count = table_count,
        .check = check_settings,
        .run = run_worker,
        .check_files = check_files,
        .ctx = &settings,
    };
    return moe_daemon_main(&daemon, argc, argv);
}
