/* SPDX-License-Identifier: Apache-2.0 */
/* Which state this process works on: that of the group while it leads, else none. With the file
 * store it always leads.
 *
 * A new leader does what a restarted coordinator does: it reads the state, and the members of the
 * view in force have one lease to come back. It was the leader's key that made the old leader stop
 * before, so no worker holds a lease that was answered later than now. */
#include "base/random.h"
#include "coordinator/service_state.h"

#include "store/remembered.h"

#include <stdlib.h>
#include <string.h>

enum {
    ORDER_BITS = 16, /* orders about models in each millisecond, on average at most 2^16 */
    RETRY_MS = 250,  /* of callers: an election takes about a lease */
    UNFIT_PAUSE_MS = 5000,
};

/* ------------------------------------------------------------------ machines */

/* `moved`: slots of the view in force may not have taken the saved placement yet. */
static struct moe_status make_moves(struct moe_coordinator *c, uint64_t first_order, bool moved)
{
    struct moe_membership_group g;
    moe_membership_group(c->machine, &g);
    const struct moe_moves_config config = {.slots = c->machine_config.slots,
                                            .replicas = c->machine_config.replicas,
                                            .spare = c->machine_config.spare,
                                            .first_order = first_order,
                                            .automatic = c->rebalance};
    return moe_moves_create(&config, moved ? g.epoch : 0, &c->moves);
}

static struct moe_status make_machines(struct moe_coordinator *c,
                                       const struct moe_membership_saved *saved,
                                       const struct moe_added_saved *models)
{
    struct moe_membership_config machine = c->machine_config;
    struct moe_placement *placement = NULL;
    MOE_TRY(moe_random_id(&machine.group_id));
    if (c->store != NULL)
        MOE_TRY(moe_saved_read_placement(c->store, saved, &placement));
    machine.placement = placement;
    struct moe_status st = moe_membership_create(&machine, saved, moe_clock_ns(), &c->machine);
    bool moved = placement != NULL;
    moe_placement_destroy(placement);
    MOE_TRY(st);
    /* Workers may still answer orders of an earlier coordinator: numbers of orders rise. */
    struct moe_added_config added = {.slots = machine.slots,
                                     .replicas = machine.replicas,
                                     .first_order = (uint64_t)moe_coordinator__unix_ms()
                                                    << ORDER_BITS};
    MOE_TRY(moe_added_create(&added, models, saved->epoch, &c->models));
    MOE_TRY(make_moves(c, added.first_order, moved));
    return moe_coordinator__restore_weights(c);
}

static void destroy_machines(struct moe_coordinator *c)
{
    moe_membership_destroy(c->machine);
    moe_added_destroy(c->models);
    moe_moves_destroy(c->moves);
    moe_coordinator__destroy_weights(c);
    c->machine = NULL;
    c->models = NULL;
    c->moves = NULL;
    c->weights = NULL;
    c->weights_unsaved = false;
    c->secret_epoch = 0;
    memset(c->added, 0, sizeof c->added);
    memset(c->seen.seen_causes, 0, sizeof c->seen.seen_causes);
    memset(c->seen.seen_moves, 0, sizeof c->seen.seen_moves);
}

/* Machines without a group: they get no input, and their actions at the start are of no interest.
 */
static struct moe_status make_idle(struct moe_coordinator *c)
{
    const struct moe_membership_saved none = {0};
    const struct moe_added_saved no_models = {0};
    struct moe_membership_action ignored;
    MOE_TRY(make_machines(c, &none, &no_models));
    while (moe_membership_next_action(c->machine, &ignored))
        ;
    return moe_ok();
}

static void put_idle_away(struct moe_coordinator *c)
{
    c->idle.machine = c->machine;
    c->idle.models = c->models;
    c->idle.moves = c->moves;
    c->idle.weights = c->weights;
    c->machine = NULL;
    c->models = NULL;
    c->moves = NULL;
    c->weights = NULL;
}

static void take_idle_back(struct moe_coordinator *c)
{
    destroy_machines(c);
    c->machine = c->idle.machine;
    c->models = c->idle.models;
    c->moves = c->idle.moves;
    c->weights = c->idle.weights;
    c->idle.machine = NULL;
    c->idle.models = NULL;
    c->idle.moves = NULL;
    c->idle.weights = NULL;
}

/* ------------------------------------------------------------------ the state in etcd */

static struct moe_status check_group(struct moe_coordinator *c,
                                     const struct moe_membership_saved *saved)
{
    bool fits = c->machine_config.size != 0 ? saved->slots <= c->machine_config.slots
                                            : saved->slots == c->machine_config.slots;
    if (saved->view_epoch != 0 && !fits)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "the group can have %u workers, and --max-workers (--workers) says %u",
                         saved->slots, c->machine_config.slots);
    if (c->group_id != 0 && saved->group_id != c->group_id)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "the keys are of another group than before");
    if (saved->group_id != 0)
        return moe_coordinator__remember_group(c, saved->group_id);
    /* An empty prefix may be a wrong one, if this coordinator has a group. */
    return c->remember_dir != NULL ? moe_store_remember(c->remember_dir, 0) : moe_ok();
}

struct moe_status moe_coordinator__remember_group(struct moe_coordinator *c, uint64_t group_id)
{
    if (c->etcd == NULL || c->group_id == group_id)
        return moe_ok();
    if (c->remember_dir != NULL)
        MOE_TRY(moe_store_remember(c->remember_dir, group_id));
    c->group_id = group_id;
    return moe_ok();
}

static struct moe_status read_group(struct moe_coordinator *c, struct moe_membership_saved *saved,
                                    struct moe_added_saved *models, bool *stale)
{
    struct moe_store *store = moe_etcd_store(c->etcd);
    struct moe_store_found found;
    MOE_TRY(moe_etcd_read(c->etcd, &found));
    MOE_TRY(moe_saved_read(store, &found, saved, models, stale));
    return moe_error_context(check_group(c, saved), "%s", store->name);
}

static struct moe_status load_group(struct moe_coordinator *c)
{
    struct moe_membership_saved saved;
    struct moe_added_saved models;
    bool stale;
    MOE_TRY(read_group(c, &saved, &models, &stale));
    if (stale)
        MOE_TRY(moe_saved_append(moe_etcd_store(c->etcd), &saved, &models));
    c->store = moe_etcd_store(c->etcd);
    return make_machines(c, &saved, &models);
}

/* The failure is for want of an answer. */
static bool is_away(const struct moe_coordinator *c, const struct moe_status *st)
{
    struct moe_etcd_report r;
    moe_etcd_report(c->etcd, &r);
    return st->code == MOE_UNAVAILABLE && r.error[0] != '\0';
}

/* Wrong settings end the start, as soon as etcd answers. Before that, this process takes no part in
 * the election: its prefix may be that of another group. */
static struct moe_status check_settings(struct moe_coordinator *c)
{
    struct moe_membership_saved saved;
    struct moe_added_saved models;
    bool stale;
    struct moe_status st = read_group(c, &saved, &models, &stale);
    c->unchecked = moe_failed(&st) && is_away(c, &st);
    return c->unchecked ? moe_ok() : st;
}

static const struct moe_loop_place reading = {
    .what = "reading the group's state from etcd", .code = "DISK_SLOW", .outside = true};

/* etcd was away at the start. */
static void check_late(struct moe_coordinator *c)
{
    struct moe_etcd_report r;
    moe_etcd_report(c->etcd, &r);
    if (r.away || r.error[0] != '\0')
        return;
    moe_loop_enter(c->turn.data, &reading);
    c->refused = check_settings(c);
    moe_loop_leave(c->turn.data);
    if (c->unchecked)
        return;
    if (moe_failed(&c->refused)) {
        c->exited = true;
        return;
    }
    moe_log_info("etcd answers: this coordinator takes part in the election");
    moe_etcd_hold(c->etcd, false);
}

/* ------------------------------------------------------------------ leading */

static void begin_leading(struct moe_coordinator *c)
{
    put_idle_away(c);
    moe_loop_enter(c->turn.data, &reading);
    struct moe_status st = load_group(c);
    moe_loop_leave(c->turn.data);
    if (moe_failed(&st)) {
        moe_log_error("this coordinator cannot lead: %s", st.text);
        c->store = NULL;
        take_idle_back(c);
        c->unfit = st.code != MOE_UNAVAILABLE && st.reason != MOE_REASON_NOT_LEADER;
        moe_etcd_resign(c->etcd, c->unfit ? UNFIT_PAUSE_MS : 0);
        return;
    }
    moe_log_info("this coordinator leads the group");
    c->unfit = false;
    c->leads = true;
    moe_coordinator__act(c);
}

static void end_leading(struct moe_coordinator *c, const struct moe_status *why)
{
    moe_coordinator__end_sessions(c, why);
    moe_coordinator__end_model_calls(c, why);
    c->leads = false;
    c->store = NULL;
    take_idle_back(c);
}

void moe_coordinator__look(struct moe_coordinator *c, bool run)
{
    if (c->etcd == NULL)
        return;
    if (run)
        moe_etcd_run(c->etcd);
    if (run && c->unchecked)
        check_late(c);
    bool leads = moe_etcd_leads(c->etcd);
    if (leads && !c->leads && run) {
        begin_leading(c);
    } else if (!leads && c->leads) {
        moe_log_warn("this coordinator does not lead any more");
        struct moe_status why = moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, RETRY_MS,
                                                "this coordinator does not lead any more");
        end_leading(c, &why);
    }
}

struct moe_status moe_coordinator__refusal(const struct moe_coordinator *c, bool sessions)
{
    if (c->leads)
        return moe_ok();
    if (c->etcd == NULL)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, 1000,
                               "the coordinator is leaving");
    struct moe_etcd_report r;
    moe_etcd_report(c->etcd, &r);
    const char *leader = sessions ? r.leader_control : r.leader;
    if (leader[0] != '\0' && !c->unchecked)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, RETRY_MS,
                               "this coordinator does not lead; the leader is %.160s", leader);
    if (!c->unfit && r.error[0] != '\0')
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, RETRY_MS,
                               "no coordinator leads (etcd %.160s)", r.error);
    return moe_error_retry(
        MOE_UNAVAILABLE, MOE_REASON_NOT_LEADER, RETRY_MS, "no coordinator leads%s",
        c->unfit ? ": the state in etcd cannot be used; see the log" : " at the moment");
}

/* ------------------------------------------------------------------ life */

static void wake(void *ctx)
{
    struct moe_coordinator *c = ctx;
    (void)uv_async_send(&c->wake);
}

static struct moe_status open_etcd(struct moe_coordinator *c,
                                   const struct moe_coordinator_config *config)
{
    struct moe_etcd_config etcd = *config->etcd;
    etcd.format = &moe_saved_format;
    etcd.wake = wake;
    etcd.ctx = c;
    if (config->state_dir != NULL) {
        c->remember_dir = strdup(config->state_dir);
        if (c->remember_dir == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "coordinator");
    }
    MOE_TRY(moe_etcd_open(&etcd, &c->etcd));
    MOE_TRY(check_settings(c));
    if (c->unchecked)
        moe_log_warn("etcd does not answer: this coordinator waits for it, and asks again");
    atomic_store(&c->health.store_away, c->unchecked);
    return make_idle(c);
}

struct moe_status moe_coordinator__open_state(struct moe_coordinator *c,
                                              const struct moe_coordinator_config *config)
{
    struct moe_membership_saved saved = {0};
    struct moe_added_saved models = {0};
    if (config->etcd != NULL)
        return open_etcd(c, config);
    if (config->state_dir != NULL)
        MOE_TRY(moe_saved_open(config->state_dir, &c->store, &saved, &models));
    else
        moe_log_warn("no state directory: epochs start at 1 and a restart is a new group");
    c->leads = true;
    return make_machines(c, &saved, &models);
}

/* "HOST:PORT" with the real port. */
static void put_endpoint(char *to, size_t size, const char *listen, uint16_t port)
{
    int host = (int)(strrchr(listen, ':') - listen);
    (void)snprintf(to, size, "%.*s:%u", host, listen, port);
}

void moe_coordinator__join_election(struct moe_coordinator *c,
                                    const struct moe_coordinator_config *config)
{
    char name[2 * MOE_ENDPOINT_BYTES];
    if (c->etcd == NULL)
        return;
    bool separate = c->control_server != NULL;
    put_endpoint(name, MOE_ENDPOINT_BYTES, config->listen, moe_rpc_server_port(c->server));
    size_t used = strlen(name);
    name[used++] = ' ';
    put_endpoint(name + used, MOE_ENDPOINT_BYTES,
                 separate ? config->control_listen : config->listen,
                 moe_rpc_server_port(separate ? c->control_server : c->server));
    moe_etcd_join(c->etcd, name);
    moe_etcd_hold(c->etcd, c->unchecked);
}

void moe_coordinator__leave_election(struct moe_coordinator *c)
{
    struct moe_status why =
        moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, 1000, "the coordinator is leaving");
    if (c->etcd == NULL)
        return;
    if (c->leads)
        end_leading(c, &why);
    moe_etcd_close(c->etcd);
    c->etcd = NULL;
}

void moe_coordinator__close_state(struct moe_coordinator *c)
{
    destroy_machines(c);
    moe_store_close(c->store);
    free(c->remember_dir);
}
