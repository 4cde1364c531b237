/* SPDX-License-Identifier: Apache-2.0 */
/* Forms a session out of its parts and takes it apart; see join.h. */
#include "cuda/step/join.h"

#include "base/clock.h"
#include "common/activation_cache.h"
#include "common/backend_options.h"
#include "common/domains.h"
#include "common/session_rules.h"
#include "cuda/exchange/ep.h"
#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/exchange.h"
#include "cuda/plan/limits.h"
#include "cuda/plan/options.h"
#include "cuda/step/step.h"

#include <stdlib.h>
#include <string.h>

enum {
    SETUP_MS = 20000, /* time for NCCL to connect a group, on top of two wait budgets */
};

/* The slots exchange this through the caller's all-gather. It is equal on all slots except for
 * `slot` and everything from `group` on. */
struct introduction {
    uint64_t magic, epoch, live, window_bytes;
    uint32_t version, slot, slots, max_tokens, max_tokens_f32, max_hidden, max_top_k, max_experts,
        transport, domain_size;
    int32_t nccl_version;
    struct moe_cuda_group_id group; /* made by the lowest live slot, zeros from the others */
    struct moe_gpu_uuid gpu;
};

static struct moe_status introduce(const struct moe_session *s, struct introduction *out)
{
    const struct moe_session_config *c = &s->config;
    *out = (struct introduction){.magic = MOE_WINDOW_MAGIC,
                                 .epoch = c->epoch,
                                 .live = c->live,
                                 .window_bytes = s->layout.quick_bytes,
                                 .version = MOE_WINDOW_VERSION,
                                 .slot = c->slot,
                                 .slots = c->slots,
                                 .max_tokens = c->max_tokens,
                                 .max_tokens_f32 = c->max_tokens_f32,
                                 .max_hidden = c->max_hidden,
                                 .max_top_k = c->max_top_k,
                                 .max_experts = c->max_experts,
                                 .transport = s->transport,
                                 .domain_size = c->domain_size,
                                 .gpu = s->device->uuid};
    return MOE_NCCL(ncclGetVersion(&out->nccl_version));
}

/* All slots see the same introductions, so all refuse or none. */
static struct moe_status check_introductions(const struct moe_session *s,
                                             const struct introduction *mine,
                                             const struct introduction *all)
{
    const struct moe_session_config *c = &s->config;
    struct moe_gpu_uuid gpus[MOE_CUDA_MAX_SLOTS] = {0};
    for (uint32_t p = 0; p < c->slots; p++) {
        gpus[p] = all[p].gpu;
        if (!(c->live >> p & 1))
            continue;
        if (all[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
        struct introduction want = *mine;
        want.slot = p;
        if (memcmp(&want, &all[p], offsetof(struct introduction, group)) != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "slot %u joins with another view, transport, domain size, version or "
                             "size (which depends on --training too)",
                             p);
    }
    return moe_session_check_gpus(c->live, c->slots, gpus); /* NCCL would not name the slots */
}

/* Second round: which slots' memory each slot reaches. */
struct reach {
    uint64_t magic; /* zero from a slot that gave up */
    struct moe_cuda_team team;
};

/* of [slots]: what all slots reach. */
static struct moe_status agree_on_reach(const struct moe_session *s,
                                        const struct moe_cuda_team *mine, struct reach *of)
{
    const struct moe_session_config *c = &s->config;
    struct reach reach = {.magic = MOE_WINDOW_MAGIC, .team = *mine};
    MOE_TRY(c->allgather(c->allgather_ctx, &reach, of, sizeof reach));
    for (uint32_t p = 0; p < c->slots; p++)
        if ((c->live >> p & 1) && of[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
    return moe_ok();
}

static struct moe_status open_network(struct moe_session *s, ncclComm_t group, uint64_t deadline)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cuda_net_config net = {.device = s->device,
                                      .control = s->control,
                                      .abort = &s->host_control->abort,
                                      .live = c->live,
                                      .epoch = c->epoch,
                                      .slot = c->slot,
                                      .slots = c->slots,
                                      .budget_ns = c->wait_budget_ms * MOE_NS_PER_MS,
                                      .keeps_group = group == s->window.comm};
    MOE_TRY(moe_cuda_ep_net_create(s, &s->ep_net));
    return moe_cuda_net_open(&net, group, deadline, &s->net);
}

static struct moe_status open_flat_network(struct moe_session *s, uint64_t deadline)
{
    return open_network(s, moe_cuda_window_give_group(&s->window, deadline), deadline);
}

/* ---------------------------------------------------------------- several domains */

/* Slots of a domain share memory; those of equal index exchange messages over the network. */
static void adopt_map(struct moe_session *s, const struct moe_domains *map)
{
    struct moe_cuda_relay *r = &s->relay;
    *r = (struct moe_cuda_relay){.domains = map->domains,
                                 .size = map->size,
                                 .slots = s->config.slots,
                                 .own = map->domain_of[s->config.slot],
                                 .index = map->index_of[s->config.slot]};
    for (uint32_t p = 0; p < s->config.slots; p++) {
        r->domain_of[p] = (uint8_t)map->domain_of[p];
        r->index_of[p] = (uint8_t)map->index_of[p];
        if (s->config.live >> p & 1)
            r->slot_at[map->domain_of[p] * map->size + map->index_of[p]] = (uint8_t)p;
    }
}

/* Whether each slot reaches all slots of its domain. */
static bool domains_reach(const struct moe_session *s, const struct reach *of)
{
    const struct moe_session_config *c = &s->config;
    const struct moe_cuda_relay *r = &s->relay;
    for (uint32_t p = 0; p < c->slots; p++)
        for (uint32_t i = 0; i < r->size && (c->live >> p & 1); i++) {
            uint32_t q = r->slot_at[r->domain_of[p] * r->size + i];
            if (!moe_cuda_team_has(&of[p].team, moe_cuda_rank_of(c->live, q)))
                return false;
        }
    return true;
}

/* Falls back to the network for all pairs if a domain's slots do not reach each other. */
static struct moe_status open_domains(struct moe_session *s, const struct moe_domains *map,
                                      uint64_t deadline)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cuda_team team = {0};
    struct reach of[MOE_CUDA_MAX_SLOTS] = {0};
    adopt_map(s, map);
    MOE_TRY(moe_cuda_window_share_memory(&s->window, moe_cuda_ep_net_shared_bytes(s),
                                         MOE_CUDA_SHARED_REGIONS, &team, deadline));
    MOE_TRY(agree_on_reach(s, &team, of));
    if (!domains_reach(s, of)) {
        s->relay = (struct moe_cuda_relay){0};
        return open_flat_network(s, deadline);
    }
    MOE_TRY(moe_cuda_window_read_bases(&s->window, c->live, &team));
    for (uint32_t p = 0; p < c->slots; p++)
        if ((c->live >> p & 1) && s->relay.domain_of[p] == s->relay.own)
            s->relay.shared[p] = s->window.base[p];
        else
            s->window.base[p] = NULL;
    return open_network(s, s->window.comm, deadline);
}

/* As domain_size says; else as NCCL found: slots that reach each other. */
static struct moe_status make_map(const struct moe_session *s, const struct reach *of,
                                  struct moe_domains *map)
{
    const struct moe_session_config *c = &s->config;
    uint32_t domain[MOE_CUDA_MAX_SLOTS];
    for (uint32_t p = 0; p < c->slots; p++) {
        domain[p] = c->domain_size != 0 ? p / c->domain_size : of[p].team.first;
        if (!(c->live >> p & 1))
            domain[p] = MOE_DOMAIN_NONE;
    }
    return moe_domains_make(domain, c->slots, map);
}

/* Windows, network, or both: all slots choose the same. */
static struct moe_status choose_transport(struct moe_session *s, uint64_t deadline)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cuda_team team = {0};
    struct reach of[MOE_CUDA_MAX_SLOTS] = {0};
    struct moe_domains map;
    if (s->transport == MOE_CUDA_TRANSPORT_NETWORK)
        return open_flat_network(s, deadline);
    MOE_TRY(make_map(s, of, &map)); /* of domain_size */
    if (map.domains == 1) {
        bool all = true;
        MOE_TRY(moe_cuda_window_share(&s->window, &s->layout, &team, deadline));
        MOE_TRY(agree_on_reach(s, &team, of));
        for (uint32_t p = 0; p < c->slots; p++)
            all = all && (!(c->live >> p & 1) ||
                          of[p].team.count == (uint32_t)__builtin_popcountll(c->live));
        if (all)
            return moe_cuda_window_read_bases(&s->window, c->live, &team);
        moe_cuda_window_unshare(&s->window, deadline);
        MOE_TRY(make_map(s, of, &map));
    }
    if (s->transport == MOE_CUDA_TRANSPORT_NVLINK)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the GPUs of the group cannot all reach each other's memory");
    return moe_domains_flat(&map) ? open_flat_network(s, deadline)
                                  : open_domains(s, &map, deadline);
}

static struct moe_status open_window(struct moe_session *s)
{
    const struct moe_session_config *c = &s->config;
    struct introduction mine, all[MOE_CUDA_MAX_SLOTS] = {0};
    uint32_t lowest = (uint32_t)__builtin_ctzll(c->live);
    bool alone = c->live == UINT64_C(1) << lowest;
    MOE_TRY(introduce(s, &mine));
    if (c->slot == lowest && !alone)
        MOE_TRY(moe_cuda_window_name_group(&mine.group));
    MOE_TRY(c->allgather(c->allgather_ctx, &mine, all, sizeof mine));
    MOE_TRY(check_introductions(s, &mine, all));
    uint64_t deadline =
        moe_clock_ns() + (2 * (uint64_t)c->wait_budget_ms + SETUP_MS) * MOE_NS_PER_MS;
    if (alone)
        return moe_cuda_window_open_alone(&s->window, s->device, &s->layout, c->slot);
    MOE_TRY(moe_cuda_window_form_group(&s->window, s->device, c->live, c->slot, &all[lowest].group,
                                       deadline));
    return choose_transport(s, deadline);
}

static struct moe_status write_control(struct moe_session *s)
{
    struct moe_cuda_control control = {.slot = s->config.slot,
                                       .live = s->config.live,
                                       .epoch = s->config.epoch,
                                       .budget_ns = s->config.wait_budget_ms * MOE_NS_PER_MS};
    memcpy(control.window, s->window.base, sizeof control.window);
    return moe_cuda_mem_copy(s->device, s->control, &control, sizeof control);
}

static struct moe_status take_host_control(struct moe_session *s)
{
    MOE_TRY(moe_cuda_mem_alloc(s->device, MOE_MEM_HOST, sizeof *s->host_control,
                               (void **)&s->host_control));
    return MOE_CUDA(
        cudaHostGetDevicePointer((void **)&s->host_control_on_device, s->host_control, 0));
}

struct moe_status moe_cuda_session_join(struct moe_device *device,
                                        const struct moe_session_config *config,
                                        struct moe_session **out)
{
    struct moe_window_layout layout;
    uint32_t chosen[MOE_CUDA_OPTION_COUNT];
    MOE_TRY(moe_backend_choose(moe_cuda_options, config->settings, chosen));
    MOE_TRY(moe_session_check(config, &layout));
    MOE_TRY(moe_cuda_device_use(device));
    struct moe_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    s->device = device;
    s->config = *config;
    s->joined_slots = (uint32_t)__builtin_popcountll(config->live);
    moe_masks_begin(&s->masks, config->slot, config->epoch, config->live);
    s->transport = (enum moe_cuda_transport)chosen[MOE_CUDA_OPTION_TRANSPORT];
    s->layout = layout;
    s->missing = -1;
    struct moe_status st;
    MOE_TRY_GOTO(st, take_host_control(s), failed);
    MOE_TRY_GOTO(
        st, moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, sizeof *s->control, (void **)&s->control),
        failed);
    MOE_TRY_GOTO(st, MOE_CUDA(cudaEventCreateWithFlags(&s->outcome_ready, cudaEventDisableTiming)),
                 failed);
    MOE_TRY_GOTO(st, moe_cuda_ep_create(s, &s->ep), failed);
    MOE_TRY_GOTO(st, open_window(s), failed);
    MOE_TRY_GOTO(st, write_control(s), failed);
    MOE_TRY_GOTO(st, moe_cuda_steps_create(s, &s->steps), failed);
    *out = s;
    return st;
failed:
    moe_cuda_session_fail(s);
    moe_cuda_session_leave(s);
    return st;
}

/* Windows take masks. Messages of a network's communicator need all its ranks. */
uint64_t moe_cuda_session_together(const struct moe_session *s)
{
    const bool masks = s->window.comm != NULL && s->net == NULL;
    return masks ? UINT64_C(1) << s->config.slot : 0;
}

/* Nothing of earlier steps, losses and aborts counts any more. */
static struct moe_status begin_anew(struct moe_session *s)
{
    __atomic_store_n(&s->missing, -1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->lost, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->failed, false, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->host_control->abort, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->aborted, false, __ATOMIC_SEQ_CST);
    moe_cuda_ep_start_over(s);
    struct moe_status st = write_control(s);
    if (moe_failed(&st))
        moe_cuda_session_fail(s);
    return st;
}

/* As after a join, but for windows, memory and graphs, which stay. Peers may still run the step
 * that has failed: what they store is cleared at the next step, when all have taken the mask. */
struct moe_status moe_cuda_session_mask(struct moe_session *s, uint64_t epoch, uint64_t live)
{
    struct moe_status busy = moe_cuda_steps_idle(s->steps);
    if (moe_cuda_session_together(s) == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                         "a session over a network takes no mask on GPUs");
    MOE_TRY(moe_masks_check(&s->masks, epoch, live, !moe_failed(&busy)));
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_device_finish(s->device));
    moe_masks_take(&s->masks, epoch, live);
    s->config.epoch = epoch;
    s->config.live = live;
    moe_activation_cache_drop_session(s->device->activation_cache, s);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (!(live >> p & 1))
            s->window.base[p] = NULL;
    return begin_anew(s);
}

/* Whether NCCL can still end the group in good order: every slot that has joined leaves now. */
static bool leave_together(const struct moe_session *s)
{
    return !__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE) &&
           !__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE) && s->masks.epoch == s->masks.joined;
}

void moe_cuda_session_leave(struct moe_session *s)
{
    if (s == NULL)
        return;
    bool together = leave_together(s);
    if (s->host_control != NULL)
        moe_cuda_session_abort(s); /* ends all waits */
    struct moe_status st = moe_cuda_device_use(s->device);
    moe_cuda_steps_stop(s->steps);        /* before the network: its passes use it */
    moe_cuda_net_close(s->net, together); /* else it would go on enqueuing steps */
    s->net = NULL;
    moe_cuda_steps_destroy(s->steps);
    moe_activation_cache_drop_session(s->device->activation_cache, s);
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(s->device);
    /* Even if the device reports an error, it has no work left that could use the windows. */
    uint64_t timeout_ns = s->config.wait_budget_ms * MOE_NS_PER_MS;
    moe_cuda_window_close(&s->window, together && !moe_failed(&st), moe_clock_ns() + timeout_ns);
    moe_cuda_ep_destroy(s->ep);
    moe_cuda_ep_net_destroy(s->ep_net);
    if (s->outcome_ready != NULL)
        (void)cudaEventDestroy(s->outcome_ready);
    moe_cuda_mem_free(s->device, MOE_MEM_DEVICE, s->control, sizeof *s->control);
    moe_cuda_mem_free(s->device, MOE_MEM_HOST, s->host_control, sizeof *s->host_control);
    free(s);
}

struct moe_status moe_cuda_session_exchange(struct moe_session *s, const void *mine, void *all,
                                            size_t bytes)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    return moe_cuda_session_exchange_inside(s, mine, all, bytes);
}
