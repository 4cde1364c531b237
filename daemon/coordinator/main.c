/* SPDX-License-Identifier: Apache-2.0 */
/* moe-coordinator: settings, then moe_coordinator_run. */
#include "access/guard.h"
#include "base/build.h"
#include "coordinator/placement.h"
#include "coordinator/service.h"
#include "daemon/daemon.h"
#include "daemon/endpoint.h"
#include "daemon/log.h"
#include "rpc/msg.h"

#include <stdio.h>
#include <string.h>

struct settings {
    const char *listen, *control_listen, *state_dir;
    uint64_t workers, lease_ms, form_timeout_ms;
};

/* NULL, or the error. */
static const char *check_settings(const void *ctx, const bool *given)
{
    (void)given;
    const struct settings *s = ctx;
    static struct moe_status wrong; /* outlives the answer */
    wrong = moe_endpoint_check_listen("--listen", s->listen);
    if (!moe_failed(&wrong) && s->control_listen != NULL)
        wrong = moe_endpoint_check_listen("--control-listen", s->control_listen);
    return moe_failed(&wrong) ? wrong.text : NULL;
}

static int join(const char *listen, uint16_t port, char *out, size_t size)
{
    int host = (int)(strrchr(listen, ':') - listen);
    return snprintf(out, size, "%.*s:%u", host, listen, port);
}

/* "host:port", or "host:port host:port" with the address for workers. */
static struct moe_status announce(const struct moe_daemon_settings *common,
                                  const struct settings *s, const struct moe_coordinator *c)
{
    char endpoints[640];
    int n = join(s->listen, moe_coordinator_port(c), endpoints, sizeof endpoints / 2);
    if (s->control_listen != NULL && n > 0 && (size_t)n < sizeof endpoints / 2) {
        endpoints[n] = ' ';
        (void)join(s->control_listen, moe_coordinator_control_port(c), endpoints + n + 1,
                   sizeof endpoints / 2);
    }
    return moe_daemon_announce(common, endpoints);
}

static struct moe_status serve(const struct moe_daemon_settings *common, void *ctx)
{
    const struct settings *s = ctx;
    struct moe_coordinator_config config = {.listen = s->listen,
                                            .control_listen = s->control_listen,
                                            .insecure = common->insecure,
                                            .slots = (uint32_t)s->workers,
                                            .lease_ms = (uint32_t)s->lease_ms,
                                            .form_timeout_ms = (uint32_t)s->form_timeout_ms,
                                            .state_dir = s->state_dir,
                                            .metrics_listen = common->metrics_listen,
                                            .health_step_ms = common->health_step_ms,
                                            .handle_signals = true};
    struct moe_coordinator *c;
    MOE_TRY(moe_rpc_force_polling());
    MOE_TRY(moe_guard_create(common, &config.guard));
    struct moe_status st = moe_coordinator_create(&config, &c);
    if (moe_failed(&st)) {
        moe_guard_destroy(config.guard);
        return st;
    }
    moe_log_info("release %s (commit %s), listening on port %u for %u workers", moe_build_version(),
                 moe_build_commit(), moe_coordinator_port(c), config.slots);
    if (common->metrics_listen != NULL)
        moe_log_info("metrics on port %u", moe_coordinator_metrics_port(c));
    st = announce(common, s, c);
    if (!moe_failed(&st))
        st = moe_coordinator_run(c);
    moe_coordinator_destroy(c);
    moe_guard_destroy(config.guard);
    return st;
}

int main(int argc, char **argv)
{
    struct settings s = {
        .listen = "127.0.0.1:7700", .workers = 1, .lease_ms = 5000, .form_timeout_ms = 60000};
    const struct moe_option table[] = {
        {"listen", 'l', MOE_OPTION_STRING, &s.listen, 0, 0, "HOST:PORT",
         "Address for moectl, and for workers without --control-listen"},
        {"control-listen", 0, MOE_OPTION_STRING, &s.control_listen, 0, 0, "HOST:PORT",
         "Address for workers alone, so that clients of --listen delay no heartbeat; --listen then "
         "has "
         "AdminService alone"},
        {"workers", 'n', MOE_OPTION_UINT, &s.workers, 1, MOE_PLACEMENT_SLOTS_MAX, "N",
         "Number of slots: workers that the group needs"},
        {"state-dir", 's', MOE_OPTION_STRING, &s.state_dir, 0, 0, "DIR",
         "Directory that keeps epochs across restarts, not writable for others; without it a "
         "restart "
         "begins a new group"},
        {"lease-ms", 0, MOE_OPTION_UINT, &s.lease_ms, 100, 600000, "MS",
         "Milliseconds without a message after which a worker loses its slot"},
        {"form-timeout-ms", 0, MOE_OPTION_UINT, &s.form_timeout_ms, 100, 3600000, "MS",
         "Milliseconds to form the group once all workers have loaded"},
    };
    const struct moe_daemon daemon = {
        .name = "moe-coordinator",
        .component = "coordinator",
        .synopsis = "[options]",
        .purpose = "Slots, leases, epochs and expert placement of one group of moe-workers.",
        .options = table,
        .option_count = sizeof table / sizeof *table,
        .metrics_letter = 'm',
        .check = check_settings,
        .run = serve,
        .check_files = moe_guard_check,
        .ctx = &s,
    };
    return moe_daemon_main(&daemon, argc, argv);
}
