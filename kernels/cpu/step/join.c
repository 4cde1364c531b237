/* SPDX-License-Identifier: Apache-2.0 */
/* Builds a session and takes it apart; see join.h. */
#include "cpu/step/join.h"

#include "base/clock.h"
#include "common/backend_options.h"
#include "common/session_rules.h"
#include "cpu/exchange/ep.h"
#include "cpu/step/step.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SPINS_WITH_A_CORE = 4000,
    SPINS_SHARING = 40,
    YIELDS = 100,
};

/* Travels from every slot to every other through the caller's all-gather. */
struct join_record {
    uint64_t magic, epoch, live, window_bytes;
    uint32_t version, slot, slots, max_tokens, max_hidden, max_top_k, max_experts, training;
    struct moe_cpu_endpoint endpoint;
};

static struct join_record make_join_record(const struct moe_session *s,
                                           const struct moe_cpu_endpoint *endpoint)
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
                                .max_hidden = c->max_hidden,
                                .max_top_k = c->max_top_k,
                                .max_experts = c->max_experts,
                                .training = c->training,
                                .endpoint = *endpoint};
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
                     "slot %u joins with other sizes: %u tokens, width %u, top-k %u, %u experts; "
                     "this slot %u, %u, %u, %u",
                     slot, theirs->max_tokens, theirs->max_hidden, theirs->max_top_k,
                     theirs->max_experts, want->max_tokens, want->max_hidden, want->max_top_k,
                     want->max_experts);
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
        struct join_record want = make_join_record(s, &all[p].endpoint);
        want.slot = p;
        if (memcmp(&want, &all[p], sizeof want) != 0)
            return describe_mismatch(p, &want, &all[p]);
    }
    return moe_ok();
}

static void wake_own(void *session)
{
    struct moe_session *s = session;
    moe_cpu_session_wake(s, s->config.slot);
}

/* Spinning pays only if every slot of the host has a core for itself. */
static void choose_spinning(struct moe_session *s)
{
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    bool enough = n >= __builtin_popcountll(s->config.live);
    s->spins = enough ? SPINS_WITH_A_CORE : SPINS_SHARING;
    s->yields = YIELDS;
}

/* The part of a join that involves other slots: the all-gather, the sockets, the windows. */
static struct moe_status connect_peers(struct moe_session *s, int window_fd)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cpu_endpoint endpoint, endpoints[MOE_MAX_SLOTS];
    struct join_record all[MOE_MAX_SLOTS] = {0};
    int fds[MOE_MAX_SLOTS];
    MOE_TRY(moe_cpu_peers_listen(c->slot, c->live, &s->peers, &endpoint));
    struct join_record mine = make_join_record(s, &endpoint);
    MOE_TRY(c->allgather(c->allgather_ctx, &mine, all, sizeof mine));
    MOE_TRY(check_join_records(s, all));
    for (uint32_t p = 0; p < c->slots; p++)
        endpoints[p] = all[p].endpoint;
    uint64_t deadline = moe_clock_ns() + 2 * MOE_NS_PER_MS * c->wait_budget_ms;
    MOE_TRY(moe_cpu_peers_connect(s->peers, endpoints, window_fd, deadline, fds));
    struct moe_status st = moe_ok();
    for (uint32_t p = 0; p < c->slots; p++) {
        if (fds[p] < 0)
            continue;
        if (!moe_failed(&st))
            st = moe_cpu_window_map(&s->layout, p, c->epoch, fds[p], &s->window[p]);
        close(fds[p]);
    }
    return moe_failed(&st) ? st : moe_cpu_peers_watch(s->peers, wake_own, s);
}

struct moe_status moe_cpu_session_join(struct moe_device *device,
                                       const struct moe_session_config *config,
                                       struct moe_session **out)
{
    struct moe_window_layout layout;
    MOE_TRY(moe_backend_choose(NULL, config->settings, NULL));
    MOE_TRY(moe_session_check(config, &layout));
    struct moe_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    s->device = device;
    s->config = *config;
    s->layout = layout;
    s->missing = -1;
    choose_spinning(s);
    int window_fd = -1;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cpu_device_charge(device, layout.bytes), failed);
    s->charged = layout.bytes;
    MOE_TRY_GOTO(st,
                 moe_cpu_window_create(&layout, config->slot, config->epoch,
                                       &s->window[config->slot], &window_fd),
                 failed);
    MOE_TRY_GOTO(st, moe_cpu_ep_create(s, &s->ep), failed);
    MOE_TRY_GOTO(st, connect_peers(s, window_fd), failed);
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

void moe_cpu_session_leave(struct moe_session *s)
{
    if (s == NULL)
        return;
    if (moe_cpu_session_own(s) != NULL)
        moe_cpu_session_abort(s); /* ends all waits */
    moe_cpu_steps_destroy(s->steps);
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
