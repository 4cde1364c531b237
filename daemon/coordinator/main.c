/* SPDX-License-Identifier: Apache-2.0 */
/* moe-coordinator: settings, then moe_coordinator_run. */
#include "access/guard.h"
#include "base/build.h"
#include "base/clock.h"
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
    const char *store, *etcd, *etcd_prefix, *rebalance;
    uint64_t rebalance_every_s, min_gain;
    uint64_t workers, max_workers, replicas, spare, lease_ms, form_timeout_ms, leader_lease_s,
        join_wait_s;
    bool partial;
};

static uint64_t max_workers_of(const struct settings *s)
{
    return s->max_workers != 0 ? s->max_workers : s->workers;
}

static bool uses_etcd(const struct settings *s)
{
    return strcmp(s->store, "etcd") == 0;
}

static bool rebalances(const struct settings *s)
{
    return strcmp(s->rebalance, "auto") == 0;
}

static struct moe_status check_store(const struct moe_daemon_settings *common,
                                     const struct settings *s)
{
    if (!uses_etcd(s) && strcmp(s->store, "file") != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--store: file or etcd, not '%.40s'", s->store);
    if (!uses_etcd(s) && (s->etcd != NULL || s->etcd_prefix != NULL))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--etcd and --etcd-prefix need --store etcd");
    if (!uses_etcd(s))
        return moe_ok();
    if (s->etcd == NULL || s->etcd_prefix == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--store etcd needs --etcd and --etcd-prefix");
    return moe_etcd_check_settings(s->etcd, s->etcd_prefix, common->tls_ca != NULL,
                                   common->insecure);
}

/* NULL, or the error. */
static const char *check_settings(const struct moe_daemon_settings *common, const void *ctx,
                                  const bool *given)
{
    (void)given;
    const struct settings *s = ctx;
    static struct moe_status wrong; /* outlives the answer */
    if (s->max_workers != 0 && s->max_workers < s->workers)
        return "--max-workers is below --workers";
    if (s->max_workers != 0 && s->spare != 0)
        return "a group that can be scaled (--max-workers) has no places for moves "
               "(--spare-experts)";
    if (!rebalances(s) && strcmp(s->rebalance, "off") != 0)
        return "--rebalance: off or auto";
    if (rebalances(s) && s->spare == 0)
        return "--rebalance auto needs places for copies that move: --spare-experts";
    if (s->replicas > s->workers)
        return "--replicas is above --workers: a slot has one copy of an expert";
    wrong = moe_daemon_check_listen(common, "--listen", s->listen);
    if (!moe_failed(&wrong))
        wrong = moe_daemon_check_listen(common, "--control-listen", s->control_listen);
    if (!moe_failed(&wrong))
        wrong = check_store(common, s);
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
    const struct moe_etcd_config etcd = {
        .endpoints = s->etcd,
        .prefix = s->etcd_prefix,
        .trust = {.tls = {common->tls_certificate, common->tls_key, common->tls_ca}},
        .lease_s = (uint32_t)s->leader_lease_s};
    struct moe_coordinator_config config = {
        .listen = s->listen,
        .control_listen = s->control_listen,
        .insecure = common->insecure,
        .slots = (uint32_t)max_workers_of(s),
        .size = s->max_workers != 0 ? (uint32_t)s->workers : 0,
        .replicas = (uint32_t)s->replicas,
        .partial = s->partial,
        .spare = (uint32_t)s->spare,
        .rebalance = {.every_ns = rebalances(s) ? s->rebalance_every_s * MOE_NS_PER_S : 0,
                      .least_gain = (uint32_t)s->min_gain},
        .lease_ms = (uint32_t)s->lease_ms,
        .form_timeout_ms = (uint32_t)s->form_timeout_ms,
        .join_wait_s = (uint32_t)s->join_wait_s,
        .state_dir = s->state_dir,
        .etcd = uses_etcd(s) ? &etcd : NULL,
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
    moe_log_info("release %s (commit %s), listening on port %u for %u worker%s",
                 moe_build_version(), moe_build_commit(), moe_coordinator_port(c),
                 (unsigned)s->workers, s->workers == 1 ? "" : "s");
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
    struct settings s = {.listen = "127.0.0.1:7700",
                         .store = "file",
                         .rebalance = "off",
                         .rebalance_every_s = 60,
                         .min_gain = 10,
                         .workers = 1,
                         .replicas = 1,
                         .lease_ms = 5000,
                         .form_timeout_ms = 60000,
                         .join_wait_s = 300,
                         .leader_lease_s = 5};
    const struct moe_option table[] = {
        {"listen", 'l', MOE_OPTION_STRING, &s.listen, 0, 0, "HOST:PORT",
         "Address for moectl, and for workers without --control-listen"},
        {"control-listen", 0, MOE_OPTION_STRING, &s.control_listen, 0, 0, "HOST:PORT",
         "Address for workers alone, so that clients of --listen delay no heartbeat; --listen then "
         "has "
         "AdminService alone"},
        {"workers", 'n', MOE_OPTION_UINT, &s.workers, 1, MOE_PLACEMENT_SLOTS_MAX, "N",
         "Number of slots: workers that the group needs"},
        {"max-workers", 0, MOE_OPTION_UINT, &s.max_workers, 0, MOE_PLACEMENT_SLOTS_MAX, "N",
         "Workers that the group can have: it can be scaled up to this (`moectl scale`), and "
         "further "
         "workers wait as spares. --workers is the size of a new group then; its state keeps the "
         "size. 0: the group has --workers, always"},
        {"replicas", 'r', MOE_OPTION_UINT, &s.replicas, 1, MOE_PLACEMENT_SLOTS_MAX, "N",
         "Slots with a copy of each expert; above 1, the group serves on without workers that it "
         "loses while every expert has a copy"},
        {"partial-views", 0, MOE_OPTION_BOOL, &s.partial, 0, 0, NULL,
         "Serve on also without the experts of lost workers: requests that need them wait, fail, "
         "or "
         "get the other tokens, as their on_unavailable says. CPU workers only; no training"},
        {"spare-experts", 0, MOE_OPTION_UINT, &s.spare, 0, MOE_PLACEMENT_EXPERTS_MAX, "N",
         "Places of each layer on each slot for copies that `moectl rebalance` moves; workers "
         "refuse to load if their memory lacks room. CPU workers only; no training; not with "
         "--max-workers"},
        {"rebalance", 0, MOE_OPTION_STRING, &s.rebalance, 0, 0, "MODE",
         "off, or auto: experts move without `moectl rebalance` where the rows of the last "
         "minutes show a gain"},
        {"rebalance-every-s", 0, MOE_OPTION_UINT, &s.rebalance_every_s, 1, 86400, "S",
         "Seconds between two looks at the rows of experts"},
        {"min-gain", 0, MOE_OPTION_UINT, &s.min_gain, 1, 100, "PERCENT",
         "With --rebalance auto: experts move once, in three looks in a row, the busiest slot "
         "would get at least this many percent fewer rows"},
        {"state-dir", 's', MOE_OPTION_STRING, &s.state_dir, 0, 0, "DIR",
         "Directory that keeps epochs across restarts, not writable for others; without it a "
         "restart "
         "begins a new group. With --store etcd: remembers the group of the prefix"},
        {"store", 0, MOE_OPTION_STRING, &s.store, 0, 0, "KIND",
         "Where the group's state is: file (--state-dir) or etcd, for several coordinators of "
         "which "
         "one leads"},
        {"etcd", 0, MOE_OPTION_STRING, &s.etcd, 0, 0, "HOST:PORT,...",
         "Members of the etcd cluster, with --store etcd; TLS with --tls-ca"},
        {"etcd-prefix", 0, MOE_OPTION_STRING, &s.etcd_prefix, 0, 0, "PATH",
         "Prefix of the group's keys (/moed/GROUP): the same for all coordinators of the group"},
        {"leader-lease-s", 0, MOE_OPTION_UINT, &s.leader_lease_s, MOE_ETCD_LEASE_MIN_S,
         MOE_ETCD_LEASE_MAX_S, "S",
         "Seconds without a sign of the leader after which another coordinator leads"},
        {"lease-ms", 0, MOE_OPTION_UINT, &s.lease_ms, 100, 600000, "MS",
         "Milliseconds without a message after which a worker loses its slot"},
        {"form-timeout-ms", 0, MOE_OPTION_UINT, &s.form_timeout_ms, 100, 3600000, "MS",
         "Milliseconds to form the group once all workers have loaded"},
        {"join-wait-s", 0, MOE_OPTION_UINT, &s.join_wait_s, 1, 86400, "S",
         "In a group that trains with --replicas: seconds that training waits, after one Save, for "
         "a worker that returns and reads the checkpoint. The time of the Save itself comes on "
         "top. "
         "Forward does not wait"},
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
