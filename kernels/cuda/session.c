/* Forming and leaving a session, its verdicts, and the small exchange; see session.h. Knows nothing
 * of layers or rows. */
#include "cuda/session.h"

#include "base/clock.h"
#include "cuda/ep.h"
#include "cuda/ep_net.h"
#include "cuda/pass.h"
#include "cuda/step.h"
#include "kept.h"
#include "session_rules.h"

#include <stdlib.h>

enum {
    SETUP_MS = 20000, /* what NCCL may need to connect a group, on top of two wait budgets */
};

/* ------------------------------------------------------------------ verdicts */

struct moe_status moe_cuda_session_usable(const struct moe_session *s)
{
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    if (!__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE))
        return moe_ok();
    if (s->missing >= 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "the session broke earlier, without slot %d", s->missing);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "the session broke earlier");
}

void moe_cuda_session_fail(struct moe_session *s)
{
    __atomic_store_n(&s->failed, true, __ATOMIC_RELEASE);
}

bool moe_cuda_session_refused(const struct moe_session *s, const struct moe_status *st)
{
    return st->code == MOE_FAILED_PRECONDITION && st->reason == MOE_REASON_SHAPE_MISMATCH &&
           !__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE);
}

struct moe_status moe_cuda_session_judge(struct moe_session *s,
                                         const struct moe_cuda_verdict *verdict)
{
    struct moe_cuda_verdict why = *verdict;
    if (why.code == MOE_CUDA_PASS_BROKEN && s->net != NULL)
        (void)moe_cuda_net_verdict(s->net, &why);
    switch (why.code) {
    case MOE_CUDA_PASS_GOOD: return moe_ok();
    case MOE_CUDA_PASS_REFUSED:
        if (why.slot < MOE_CUDA_MEANS_OTHER)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "slot %u has no memory for this pass", why.slot);
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "slot %u runs another layer, dtype or bucket",
                         why.slot - MOE_CUDA_MEANS_OTHER);
    case MOE_CUDA_PASS_LOST:
        s->missing = (int)why.slot;
        moe_cuda_session_fail(s);
        __atomic_fetch_or(&s->lost, UINT64_C(1) << why.slot, __ATOMIC_ACQ_REL);
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "slot %u did not answer within %u ms", why.slot, s->config.wait_budget_ms);
    case MOE_CUDA_PASS_ABORTED:
        moe_cuda_session_fail(s);
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    default:
        moe_cuda_session_fail(s);
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "slot %u sends something else than it announced", why.slot);
    }
}

struct moe_status moe_cuda_session_finish(struct moe_session *s)
{
    struct moe_cuda_verdict *copy = &s->mailbox->verdict;
    struct moe_status st = MOE_CUDA(cudaMemcpyAsync(copy, &s->control->verdict, sizeof *copy,
                                                    cudaMemcpyDeviceToHost, s->device->compute));
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(s->device);
    if (!moe_failed(&st))
        return moe_cuda_session_judge(s, copy);
    moe_cuda_session_fail(s);
    return st;
}

void moe_cuda_session_abort(struct moe_session *s)
{
    __atomic_store_n(&s->aborted, true, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->mailbox->abort, 1, __ATOMIC_SEQ_CST);
}

uint64_t moe_cuda_session_lost(struct moe_session *s)
{
    return __atomic_load_n(&s->lost, __ATOMIC_ACQUIRE);
}

/* The step number has run through its bits: words of the first steps would look new again. All
 * slots come here at the same step, clear their own windows between two barriers, and start over.
 * All of it in stream order, like a step. */
static struct moe_status wipe_words(struct moe_session *s)
{
    cudaStream_t stream = s->device->compute;
    const struct moe_window_layout *l = &s->layout;
    uint8_t *own = s->window.base[s->config.slot];
    MOE_TRY(moe_cuda_launch_exchange(s, 0, stream));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(own + l->head, 0, l->rows - l->head, stream)));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(&s->control->step, 0, sizeof s->control->step, stream)));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(&s->control->refused, 0, sizeof s->control->refused, stream)));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(&s->control->told, 0, sizeof s->control->told, stream)));
    MOE_TRY(moe_cuda_ep_forget_steps(s->ep, stream));
    s->step = 0;
    return moe_cuda_launch_exchange(s, 0, stream);
}

struct moe_status moe_cuda_session_count_step(struct moe_session *s)
{
    /* A network has no words that stay. */
    if (s->net == NULL && s->step == (UINT32_C(1) << MOE_WINDOW_STEP_BITS) - 1)
        MOE_TRY(wipe_words(s));
    s->step++;
    return moe_ok();
}

/* ------------------------------------------------------------------ courier */

struct errand {
    struct moe_session *session;
    struct moe_status (*fn)(void *ctx);
    void *ctx;
};

static struct moe_status run_errand(void *ctx)
{
    const struct errand *e = ctx;
    MOE_TRY(e->fn(e->ctx));
    return moe_cuda_net_settle(e->session->net);
}

struct moe_status moe_cuda_session_run(struct moe_session *s, struct moe_status (*fn)(void *ctx),
                                       void *ctx)
{
    if (s->net == NULL)
        return fn(ctx);
    struct errand errand = {.session = s, .fn = fn, .ctx = ctx};
    struct moe_cuda_task task = {.run = run_errand, .ctx = &errand};
    moe_cuda_net_post(s->net, &task);
    (void)moe_cuda_net_await(s->net, &task, MOE_NEVER);
    return moe_cuda_session_explain(s, task.status);
}

static struct moe_status do_nothing(void *ctx)
{
    (void)ctx;
    return moe_ok();
}

struct moe_status moe_cuda_session_catch_up(struct moe_session *s)
{
    return moe_cuda_session_run(s, do_nothing, NULL);
}

struct moe_status moe_cuda_session_explain(struct moe_session *s, struct moe_status st)
{
    struct moe_cuda_verdict why;
    if (moe_failed(&st) && s->net != NULL && moe_cuda_net_verdict(s->net, &why))
        return moe_cuda_session_judge(s, &why);
    return st;
}

/* ----------------------------------------------------------------- exchange */

/* Through the windows. */
static struct moe_status exchange_words(struct moe_session *s, const void *mine, size_t bytes)
{
    if (bytes > 0)
        memcpy(s->mailbox->mine, mine, bytes);
    MOE_TRY(moe_cuda_launch_exchange(s, (uint32_t)bytes, s->device->compute));
    return moe_cuda_session_finish(s);
}

struct letter_exchange {
    struct moe_session *session;
    const void *mine;
    size_t bytes;
};

/* Over the network, into the same places. */
static struct moe_status exchange_letters(void *ctx)
{
    const struct letter_exchange *x = ctx;
    return moe_cuda_ep_net_exchange(x->session->ep_net, x->mine, x->bytes, x->session->mailbox);
}

static struct moe_status exchange(struct moe_session *s, const void *mine, void *all, size_t bytes)
{
    struct moe_cuda_mailbox *m = s->mailbox;
    struct letter_exchange letters = {.session = s, .mine = mine, .bytes = bytes};
    if (s->net != NULL)
        MOE_TRY(moe_cuda_session_run(s, exchange_letters, &letters));
    else
        MOE_TRY(exchange_words(s, mine, bytes));
    for (uint32_t p = 0; p < s->config.slots; p++) {
        if (p == s->config.slot || !(s->config.live >> p & 1))
            continue;
        if (m->bytes_came[p] != bytes)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                             "slot %u exchanges %u bytes, this slot %zu", p, m->bytes_came[p],
                             bytes);
        if (bytes > 0)
            memcpy((uint8_t *)all + p * bytes, m->all[p], bytes);
    }
    return moe_ok();
}

struct moe_status moe_cuda_session_exchange(struct moe_session *s, const void *mine, void *all,
                                            size_t bytes)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    return moe_cuda_session_exchange_inside(s, mine, all, bytes);
}

struct moe_status moe_cuda_session_exchange_inside(struct moe_session *s, const void *mine,
                                                   void *all, size_t bytes)
{
    if (bytes > MOE_WINDOW_EXCHANGE_BYTES || (bytes > 0 && (mine == NULL || all == NULL)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "an exchange carries at most %d bytes", MOE_WINDOW_EXCHANGE_BYTES);
    MOE_TRY(moe_cuda_session_usable(s));
    if (bytes > 0) {
        memset(all, 0, bytes * s->config.slots);
        memcpy((uint8_t *)all + s->config.slot * bytes, mine, bytes);
    }
    struct moe_status st = exchange(s, mine, all, bytes);
    if (moe_failed(&st))
        moe_cuda_session_fail(s);
    return st;
}

/* ------------------------------------------------------------ join and leave */

/* What the slots tell each other through the caller's all-gather. */
struct introduction {
    uint64_t magic, epoch, live, window_bytes;
    uint32_t version, slot, slots, max_tokens, max_hidden, max_top_k, max_experts, transport;
    int32_t nccl_version;
    struct moe_cuda_group_id group; /* made by the lowest live slot, zeros from the others */
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
                                 .max_hidden = c->max_hidden,
                                 .max_top_k = c->max_top_k,
                                 .max_experts = c->max_experts,
                                 .transport = c->transport};
    return MOE_NCCL(ncclGetVersion(&out->nccl_version));
}

/* All slots see the same introductions, so all of them refuse, or none. */
static struct moe_status check_introductions(const struct moe_session *s,
                                             const struct introduction *mine,
                                             const struct introduction *all)
{
    const struct moe_session_config *c = &s->config;
    for (uint32_t p = 0; p < c->slots; p++) {
        if (!(c->live >> p & 1))
            continue;
        if (all[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
        struct introduction want = *mine;
        want.slot = p;
        if (memcmp(&want, &all[p], offsetof(struct introduction, group)) != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "slot %u joins with another view, transport, version or size (which "
                             "depends on --training too)",
                             p);
    }
    return moe_ok();
}

/* Whether every slot reaches every other's memory: what they tell each other in a second round. */
struct reach {
    uint64_t magic; /* none from a slot that gave up */
    uint32_t all;
};

static struct moe_status agree_on_reach(const struct moe_session *s, bool mine, bool *all_reach)
{
    const struct moe_session_config *c = &s->config;
    struct reach reach = {.magic = MOE_WINDOW_MAGIC, .all = mine}, all[MOE_MAX_SLOTS] = {0};
    MOE_TRY(c->allgather(c->allgather_ctx, &reach, all, sizeof reach));
    *all_reach = true;
    for (uint32_t p = 0; p < c->slots; p++) {
        if (!(c->live >> p & 1))
            continue;
        if (all[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
        *all_reach = *all_reach && all[p].all != 0;
    }
    return moe_ok();
}

static struct moe_status open_network(struct moe_session *s, uint64_t deadline)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cuda_net_config net = {.device = s->device,
                                      .control = s->control,
                                      .abort = &s->mailbox->abort,
                                      .live = c->live,
                                      .epoch = c->epoch,
                                      .slot = c->slot,
                                      .slots = c->slots,
                                      .budget_ns = c->wait_budget_ms * MOE_NS_PER_MS};
    MOE_TRY(moe_cuda_ep_net_create(s, &s->ep_net));
    ncclComm_t group = moe_cuda_window_give_group(&s->window, deadline);
    return moe_cuda_net_open(&net, group, deadline, &s->net);
}

/* Windows or network: decided alike by all slots. */
static struct moe_status choose_transport(struct moe_session *s, uint64_t deadline)
{
    const struct moe_session_config *c = &s->config;
    bool reach = false;
    if (c->transport == MOE_TRANSPORT_NETWORK)
        return open_network(s, deadline);
    MOE_TRY(moe_cuda_window_share(&s->window, &s->layout, &reach, deadline));
    MOE_TRY(agree_on_reach(s, reach, &reach));
    if (reach)
        return moe_cuda_window_read_bases(&s->window, c->live);
    if (c->transport == MOE_TRANSPORT_NVLINK)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the GPUs of the group cannot all reach each other's memory");
    return open_network(s, deadline);
}

static struct moe_status open_window(struct moe_session *s)
{
    const struct moe_session_config *c = &s->config;
    struct introduction mine, all[MOE_MAX_SLOTS] = {0};
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

const char *moe_cuda_session_transport(const struct moe_session *s)
{
    return s->net != NULL ? "network" : s->window.comm != NULL ? "nvlink" : "none";
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

static struct moe_status take_mailbox(struct moe_session *s)
{
    MOE_TRY(moe_cuda_mem_alloc(s->device, MOE_MEM_HOST, sizeof *s->mailbox, (void **)&s->mailbox));
    return MOE_CUDA(cudaHostGetDevicePointer((void **)&s->mailbox_on_device, s->mailbox, 0));
}

struct moe_status moe_cuda_session_join(struct moe_device *device,
                                        const struct moe_session_config *config,
                                        struct moe_session **out)
{
    struct moe_window_layout layout;
    MOE_TRY(moe_session_check(config, &layout));
    MOE_TRY(moe_cuda_device_use(device));
    struct moe_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    s->device = device;
    s->config = *config;
    s->layout = layout;
    s->missing = -1;
    struct moe_status st;
    MOE_TRY_GOTO(st, take_mailbox(s), failed);
    MOE_TRY_GOTO(
        st, moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, sizeof *s->control, (void **)&s->control),
        failed);
    MOE_TRY_GOTO(st, MOE_CUDA(cudaEventCreateWithFlags(&s->told, cudaEventDisableTiming)), failed);
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

void moe_cuda_session_leave(struct moe_session *s)
{
    if (s == NULL)
        return;
    bool together = !__atomic_load_n(&s->failed, __ATOMIC_ACQUIRE) &&
                    !__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE);
    if (s->mailbox != NULL)
        moe_cuda_session_abort(s); /* nothing may wait any longer */
    struct moe_status st = moe_cuda_device_use(s->device);
    moe_cuda_net_close(s->net, together); /* or it would go on enqueuing steps */
    s->net = NULL;
    moe_cuda_steps_destroy(s->steps);
    moe_kept_drop_session(s->device->kept, s);
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(s->device);
    /* Whatever the device says, it has no work left that could use the windows. */
    uint64_t patience = s->config.wait_budget_ms * MOE_NS_PER_MS;
    moe_cuda_window_close(&s->window, together && !moe_failed(&st), moe_clock_ns() + patience);
    moe_cuda_ep_destroy(s->ep);
    moe_cuda_ep_net_destroy(s->ep_net);
    if (s->told != NULL)
        (void)cudaEventDestroy(s->told);
    moe_cuda_mem_free(s->device, MOE_MEM_DEVICE, s->control, sizeof *s->control);
    moe_cuda_mem_free(s->device, MOE_MEM_HOST, s->mailbox, sizeof *s->mailbox);
    free(s);
}
