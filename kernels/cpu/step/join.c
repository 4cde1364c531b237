/* SPDX-License-Identifier: Apache-2.0 */
/* Builds a session and takes it apart; see join.h. */
#include "cpu/step/join.h"

#include "base/clock.h"
#include "common/backend_options.h"
#include "common/reach.h"
#include "common/session_rules.h"
#include "cpu/compute/options.h"
#include "cpu/exchange/ep.h"
#include "cpu/step/step.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SPINS_WITH_A_CORE = 4000,
    SPINS_OF_NETWORK = 400,
    SPINS_SHARING = 40,
    YIELDS = 100,
};

/* Travels from every slot to every other through the caller's all-gather. */
struct join_record {
    uint64_t magic, epoch, live, window_bytes;
    uint32_t version, slot, slots, max_tokens, max_tokens_f32, max_hidden, max_top_k, max_experts;
    uint32_t training, domain_size, network_only;
    uint64_t host, machine;
    uint32_t user, has_network, loopback;
    struct moe_cpu_endpoint endpoint;
};

/* The second record, if a pair needs the network. */
struct network_record {
    struct moe_cpu_network_endpoint endpoint;
    uint64_t mapped; /* bit p: this slot has mapped p's window */
};

static const char *address_of(const struct moe_session_config *c)
{
    bool known = c->hosts != NULL && c->hosts[c->slot].address[0] != '\0';
    return known ? c->hosts[c->slot].address : "127.0.0.1";
}

static void describe_place(const struct moe_session_config *c, bool network_only,
                           struct join_record *r)
{
    const char *address = address_of(c), *id = c->hosts != NULL ? c->hosts[c->slot].id : "";
    r->domain_size = c->domain_size;
    r->network_only = network_only;
    r->host = moe_reach_host(id);
    r->machine = moe_reach_machine(id);
    r->user = geteuid();
    r->has_network = moe_cpu_network_built();
    r->loopback = strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

/* The part that is the same on all slots of a view. */
static struct join_record make_join_record(const struct moe_session *s)
{
    const struct moe_session_config *c = &s->config;
    return (struct join_record){.magic = MOE_WINDOW_MAGIC,
                                .epoch = c->epoch,
                                .live = c->live,
                                .window_bytes = s->layout.bytes,
                                .version = MOE_WINDOW_VERSION,
                                .slot = c->slot,
                                .slots = c->slots,
                                .max_tokens = c->max_tokens,
                                .max_tokens_f32 = c->max_tokens_f32,
                                .max_hidden = c->max_hidden,
                                .max_top_k = c->max_top_k,
                                .max_experts = c->max_experts,
                                .training = c->training};
}

/* The error for a record that differs from the expected one: names the first difference. */
static struct moe_status describe_mismatch(uint32_t slot, const struct join_record *want,
                                           const struct join_record *theirs)
{
    if (theirs->version != want->version || theirs->magic != want->magic)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "slot %u runs another release", slot);
    if (theirs->epoch != want->epoch || theirs->live != want->live ||
        theirs->slots != want->slots || theirs->slot != want->slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "slot %u joins another view", slot);
    if (theirs->training != want->training)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "slot %u was started %s --training, this slot %s", slot,
                         theirs->training ? "with" : "without",
                         want->training ? "with" : "without");
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "slot %u joins with other sizes: %u tokens (%u in F32), width %u, top-k %u, "
                     "%u experts; this slot %u (%u), %u, %u, %u",
                     slot, theirs->max_tokens, theirs->max_tokens_f32, theirs->max_hidden,
                     theirs->max_top_k, theirs->max_experts, want->max_tokens, want->max_tokens_f32,
                     want->max_hidden, want->max_top_k, want->max_experts);
}

/* All slots see the same records, so all of them refuse, or none. */
static struct moe_status check_join_records(const struct moe_session *s,
                                            const struct join_record *all)
{
    const struct moe_session_config *c = &s->config;
    for (uint32_t p = 0; p < c->slots; p++) {
        if (!(c->live >> p & 1))
            continue;
        if (all[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
        struct join_record want = make_join_record(s);
        want.slot = p;
        if (memcmp(&want, &all[p], offsetof(struct join_record, domain_size)) != 0)
            return describe_mismatch(p, &want, &all[p]);
        const struct join_record *own = &all[c->slot];
        if (all[p].domain_size != own->domain_size || all[p].network_only != own->network_only)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                             "slot %u has another --transport or --domain-size than slot %u", p,
                             c->slot);
    }
    return moe_ok();
}

/* Spinning pays only if every slot of the host has a core for itself. With a network, each spin
 * also looks at the sockets, and takes longer. */
static void choose_spinning(struct moe_session *s)
{
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    int slots = 0;
    for (uint32_t p = 0; p < s->config.slots; p++)
        slots += s->window[p].base != NULL;
    uint32_t with_a_core = s->network != NULL ? SPINS_OF_NETWORK : SPINS_WITH_A_CORE;
    s->spins = n >= slots ? with_a_core : SPINS_SHARING;
    s->yields = YIELDS;
}

/* Who shares memory; the same on all slots. */
static struct moe_status plan_reach(const struct moe_session_config *c,
                                    const struct join_record *all, struct moe_reach *out)
{
    struct moe_reach_slot slot[MOE_MAX_SLOTS] = {0};
    for (uint32_t p = 0; p < c->slots; p++)
        slot[p] = (struct moe_reach_slot){.host = all[p].host,
                                          .machine = all[p].machine,
                                          .domain = c->domain_size ? p / c->domain_size : 0,
                                          .user = all[p].user,
                                          .network = all[p].has_network,
                                          .loopback = all[p].loopback};
    return moe_reach_plan(c->live, c->slots, slot, all[c->slot].network_only, out);
}

static struct moe_status share_windows(struct moe_session *s, const struct moe_reach *reach,
                                       const struct join_record *all, int window_fd)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cpu_endpoint endpoints[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS];
    for (uint32_t p = 0; p < c->slots; p++)
        endpoints[p] = all[p].endpoint;
    uint64_t deadline = moe_clock_ns() + 2 * MOE_NS_PER_MS * c->wait_budget_ms;
    MOE_TRY(moe_cpu_peers_connect(s->peers, reach->sharing[c->slot], reach->network, endpoints,
                                  window_fd, deadline, fds));
    struct moe_status st = moe_ok();
    for (uint32_t p = 0; p < c->slots; p++) {
        if (fds[p] < 0)
            continue;
        if (!moe_failed(&st))
            st = moe_cpu_window_map(&s->layout, p, c->epoch, fds[p], &s->window[p]);
        close(fds[p]);
    }
    return st;
}

/* Callbacks of the network. */

static void wake_own(void *session)
{
    struct moe_session *s = session;
    moe_cpu_session_wake(s, s->config.slot);
}

static void note_closed(void *session, uint32_t slot)
{
    struct moe_session *s = session;
    moe_cpu_peers_note_closed(s->peers, slot);
    wake_own(s);
}

static void note_left(void *session, uint32_t slot)
{
    struct moe_session *s = session;
    moe_cpu_peers_note_left(s->peers, slot);
    wake_own(s);
}

static void note_notice(void *session, uint32_t slot, uint64_t epoch, uint64_t lost)
{
    struct moe_session *s = session;
    moe_cpu_peers_note_notice(s->peers, slot, epoch, lost);
    wake_own(s);
}

static void note_late(void *session, uint64_t slots)
{
    struct moe_session *s = session;
    moe_cpu_peers_note_lost(s->peers, slots);
    wake_own(s);
}

static bool has_ended(void *session)
{
    const struct moe_session *s = session;
    return __atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE) || moe_cpu_peers_lost(s->peers) != 0;
}

/* If descriptors did not pass both ways, the pair uses the network. All slots call this alike. */
static struct moe_status connect_network(struct moe_session *s)
{
    const struct moe_session_config *c = &s->config;
    const struct moe_cpu_network_config config = {.slot = c->slot,
                                                  .epoch = c->epoch,
                                                  .address = address_of(c),
                                                  .window = moe_cpu_session_own(s),
                                                  .layout = &s->layout,
                                                  .budget_ms = c->wait_budget_ms,
                                                  .stored = wake_own,
                                                  .closed = note_closed,
                                                  .left = note_left,
                                                  .noticed = note_notice,
                                                  .late = note_late,
                                                  .ended = has_ended,
                                                  .ctx = s};
    struct network_record mine = {0}, all[MOE_MAX_SLOTS] = {0};
    struct moe_cpu_network_endpoint endpoints[MOE_MAX_SLOTS];
    MOE_TRY(moe_cpu_network_open(&config, &s->network, &mine.endpoint));
    for (uint32_t p = 0; p < c->slots; p++)
        if (s->window[p].base != NULL)
            mine.mapped |= UINT64_C(1) << p;
    MOE_TRY(c->allgather(c->allgather_ctx, &mine, all, sizeof mine));
    uint64_t peers = 0;
    for (uint32_t p = 0; p < c->slots; p++) {
        endpoints[p] = all[p].endpoint;
        if (!moe_cpu_session_has_peer(s, p))
            continue;
        if ((mine.mapped >> p & 1) && (all[p].mapped >> c->slot & 1))
            continue;
        moe_cpu_window_unmap(&s->window[p]);
        moe_cpu_peers_part(s->peers, p);
        peers |= UINT64_C(1) << p;
    }
    uint64_t deadline = moe_clock_ns() + 2 * MOE_NS_PER_MS * c->wait_budget_ms;
    return moe_cpu_network_connect(s->network, peers, endpoints, deadline);
}

/* Slots that share memory are a domain: rows cross from one to another once. By the plan, so that
 * all slots divide alike; a pair that could not share after all uses the network inside, too. */
static struct moe_status use_domains(struct moe_session *s, const struct moe_reach *reach)
{
    uint32_t domain[MOE_MAX_SLOTS];
    struct moe_domains map;
    for (uint32_t p = 0; p < s->config.slots; p++)
        domain[p] = (s->config.live >> p & 1) ? (uint32_t)__builtin_ctzll(reach->sharing[p])
                                              : MOE_DOMAIN_NONE;
    MOE_TRY(moe_domains_make(domain, s->config.slots, &map));
    return moe_cpu_ep_use_domains(s->ep, &map);
}

/* The part of a join that involves other slots: the all-gathers, the sockets, the windows. */
static struct moe_status connect_peers(struct moe_session *s, bool network_only, int window_fd)
{
    const struct moe_session_config *c = &s->config;
    struct join_record all[MOE_MAX_SLOTS] = {0}, mine = make_join_record(s);
    struct moe_reach reach;
    MOE_TRY(moe_cpu_peers_listen(c->slot, c->epoch, c->live, &s->peers, &mine.endpoint));
    describe_place(c, network_only, &mine);
    MOE_TRY(c->allgather(c->allgather_ctx, &mine, all, sizeof mine));
    MOE_TRY(check_join_records(s, all));
    MOE_TRY(plan_reach(c, all, &reach));
    MOE_TRY(share_windows(s, &reach, all, window_fd));
    if (reach.network)
        MOE_TRY(connect_network(s));
    MOE_TRY(use_domains(s, &reach));
    return moe_cpu_peers_watch(s->peers, wake_own, s);
}

struct moe_status moe_cpu_session_join(struct moe_device *device,
                                       const struct moe_session_config *config,
                                       struct moe_session **out)
{
    struct moe_window_layout layout;
    uint32_t chosen[MOE_CPU_OPTION_COUNT];
    MOE_TRY(moe_backend_choose(moe_cpu_options, config->settings, chosen));
    if (chosen[MOE_CPU_OPTION_TRANSPORT] == MOE_CPU_TRANSPORT_NVLINK)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "transport: groups on CPUs have no NVLink; use auto or network");
    MOE_TRY(moe_session_check(config, &layout));
    struct moe_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    s->device = device;
    s->config = *config;
    s->layout = layout;
    s->missing = -1;
    int window_fd = -1;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cpu_device_charge(device, layout.bytes), failed);
    s->charged = layout.bytes;
    MOE_TRY_GOTO(st,
                 moe_cpu_window_create(&layout, config->slot, config->epoch,
                                       &s->window[config->slot], &window_fd),
                 failed);
    MOE_TRY_GOTO(st, moe_cpu_ep_create(s, &s->ep), failed);
    bool network_only = chosen[MOE_CPU_OPTION_TRANSPORT] == MOE_CPU_TRANSPORT_NETWORK;
    MOE_TRY_GOTO(st, connect_peers(s, network_only, window_fd), failed);
    s->config.hosts = NULL;
    choose_spinning(s);
    MOE_TRY_GOTO(st, moe_cpu_steps_create(s, &s->steps), failed);
    close(window_fd);
    *out = s;
    return st;
failed:
    if (window_fd >= 0)
        close(window_fd);
    moe_cpu_session_leave(s);
    return st;
}

uint64_t moe_cpu_session_together(const struct moe_session *s)
{
    return moe_cpu_ep_together(s->ep);
}

/* As after a join, but for windows, sockets and links, which stay. Stamps have the new epoch, so
 * step and exchange numbers begin again. */
struct moe_status moe_cpu_session_mask(struct moe_session *s, uint64_t epoch, uint64_t live)
{
    struct moe_status busy = moe_cpu_steps_idle(s->steps);
    if (!moe_failed(&busy) && !moe_cpu_ep_prepare_mask(s->ep, live))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                         "regions of windows would have other writers under this mask");
    MOE_TRY(moe_cpu_peers_mask(s->peers, epoch, live, !moe_failed(&busy)));
    if (s->network != NULL) {
        moe_cpu_network_notify(s->network, epoch, 0);
        moe_cpu_network_keep(s->network, live);
    }
    s->config.epoch = epoch;
    s->config.live = live;
    s->step = s->exchanges = 0;
    s->missing = -1;
    s->failed = false;
    __atomic_store_n(&s->aborted, false, __ATOMIC_SEQ_CST);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (!(live >> p & 1))
            moe_cpu_window_unmap(&s->window[p]);
    moe_cpu_window_renew(&s->window[s->config.slot], epoch);
    moe_activation_cache_drop_session(moe_cpu_device_activation_cache(s->device), s);
    moe_cpu_ep_mask(s->ep);
    choose_spinning(s);
    return moe_ok();
}

void moe_cpu_session_leave(struct moe_session *s)
{
    if (s == NULL)
        return;
    if (moe_cpu_session_own(s) != NULL)
        moe_cpu_session_abort(s); /* ends all waits */
    moe_cpu_steps_destroy(s->steps);
    /* So that no slot takes this one, which leaves, for the cause. */
    if (s->peers != NULL && moe_cpu_peers_lost(s->peers) != 0)
        moe_cpu_session_report_lost(s, moe_cpu_peers_lost(s->peers));
    moe_cpu_network_close(s->network);
    moe_activation_cache_drop_session(moe_cpu_device_activation_cache(s->device), s);
    moe_cpu_peers_close(s->peers);
    moe_cpu_ep_destroy(s->ep);
    for (uint32_t p = 0; p < MOE_MAX_SLOTS; p++)
        moe_cpu_window_unmap(&s->window[p]);
    moe_cpu_device_discharge(s->device, s->charged);
    free(s);
}

struct moe_status moe_cpu_session_exchange(struct moe_session *s, const void *mine, void *all,
                                           size_t bytes)
{
    if (bytes > MOE_WINDOW_EXCHANGE_BYTES || (bytes > 0 && (mine == NULL || all == NULL)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "an exchange carries at most %d bytes", MOE_WINDOW_EXCHANGE_BYTES);
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    MOE_TRY(moe_cpu_session_usable(s));
    struct moe_status st = moe_cpu_session_gather(s, mine, all, bytes);
    if (moe_failed(&st))
        moe_cpu_session_fail(s, &st);
    return st;
}
