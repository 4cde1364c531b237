/* SPDX-License-Identifier: Apache-2.0 */
/* See session_fixture.h. */
#include "session_fixture.h"

#include "base/clock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

const struct moe_backend *backend = &moe_backend_cpu;
bool with_shared_expert, device_is_full;

bool is(struct moe_status st, enum moe_code code, enum moe_reason reason)
{
    if (st.code == code && st.reason == reason)
        return true;
    fprintf(stderr, "got %s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason),
            st.code == MOE_OK ? "" : st.text);
    return false;
}

bool good(struct moe_status st)
{
    return is(st, MOE_OK, MOE_REASON_NONE);
}

/* --------------------------------------------------------------------- fixtures */

static struct moe_status upload(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                enum moe_weight w, uint32_t expert)
{
    float data[2 * MOE_MAX_SLOTS * HIDDEN]; /* the router; INNER is smaller */
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 1000 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = rng_float(&r);
    return backend->layer_upload(layer, w, expert, MOE_DTYPE_F32, data,
                                 rows * columns * sizeof *data);
}

static struct moe_status upload_all(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                    const struct moe_placement *placement, uint32_t own)
{
    static const enum moe_weight each[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN};
    static const enum moe_weight shared[] = {MOE_WEIGHT_SHARED_GATE, MOE_WEIGHT_SHARED_UP,
                                             MOE_WEIGHT_SHARED_DOWN, MOE_WEIGHT_SHARED_GATE_VECTOR};
    MOE_TRY(upload(layer, spec, MOE_WEIGHT_ROUTER, 0));
    for (uint32_t i = 0; i < 4 && with_shared_expert; i++)
        MOE_TRY(upload(layer, spec, shared[i], 0));
    for (uint32_t e = 0; e < placement->experts; e++)
        for (uint32_t c = placement->offset[e]; c < placement->offset[e + 1]; c++)
            for (uint32_t i = 0; i < 3 && placement->slot[c] == own; i++)
                MOE_TRY(upload(layer, spec, each[i], e));
    return backend->layer_finish(layer);
}

static struct moe_status create_layer(struct moe_device *device, uint32_t own,
                                      const struct moe_placement *placement, struct moe_layer **out)
{
    struct moe_layer_spec spec = {
        .layer = 3,
        .hidden = HIDDEN,
        .experts = placement->experts,
        .intermediate = INNER,
        .router = {.score = MOE_SCORE_SIGMOID,
                   .top_k = TOP_K,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 1},
        .shared_intermediate = with_shared_expert ? INNER : 0,
        .shared_gated = with_shared_expert,
    };
    MOE_TRY(backend->layer_create(device, &spec, placement, own, out));
    return upload_all(*out, &spec, placement, own);
}

struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out)
{
    uint32_t offset[2 * MOE_MAX_SLOTS + 1] = {0}, n = 0;
    uint16_t slot[2 * MOE_MAX_SLOTS];
    for (uint32_t s = 0; s < m->slots; s++)
        for (uint32_t i = 0; i < 2 && (holders >> s & 1); i++) {
            slot[n++] = (uint16_t)s;
            offset[n] = n;
        }
    const struct moe_placement placement = {
        .version = 1, .experts = n, .slots = m->slots, .offset = offset, .slot = slot};
    return create_layer(device, m->slot, &placement, out);
}

struct moe_status copied_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                               struct moe_layer **out)
{
    uint32_t offset[2 * MOE_MAX_SLOTS + 1] = {0}, n = 0;
    uint16_t slot[4 * MOE_MAX_SLOTS];
    for (uint32_t e = 0; e < 2 * m->slots; e++) {
        uint32_t home = e / 2, next = (home + group_slots_of_host(m)) % m->slots;
        for (uint32_t s = 0; s < m->slots; s++)
            if ((s == home || s == next) && (holders >> s & 1))
                slot[n++] = (uint16_t)s;
        offset[e + 1] = n;
    }
    const struct moe_placement placement = {
        .version = 1,
        .experts = 2 * m->slots,
        .slots = m->slots,
        .offset = offset,
        .slot = slot,
        /* As a layer with a lost copy chooses copies, on backends where that makes a difference. */
        .by_content = holders != UINT64_MAX};
    return create_layer(device, m->slot, &placement, out);
}

/* One block of host memory for all tensors of a step. */
static struct moe_status allocate_tensors(struct session_fixture *s, const struct member *m)
{
    size_t rows = TOKENS * HIDDEN * sizeof(float), pairs = TOKENS * TOP_K * sizeof(float);
    s->bytes = 4 * rows + 2 * pairs + TOKENS;
    MOE_TRY(backend->mem_alloc(s->device, MOE_MEM_HOST, s->bytes, &s->tensors));
    char *at = s->tensors;
    struct rng r = {.state = m->slot};
    for (uint32_t i = 0; i < 2 * TOKENS * HIDDEN; i++)
        ((float *)s->tensors)[i] = rng_float(&r);
    s->dy = (void *)(at + rows);
    s->dx = (void *)(at + 2 * rows);
    s->args = (struct moe_step_args){.layer = s->layer,
                                     .dtype = MOE_DTYPE_F32,
                                     .bucket = BUCKET,
                                     .tokens = TOKENS,
                                     .x = at,
                                     .y = at + 3 * rows,
                                     .ids_out = (void *)(at + 4 * rows),
                                     .weights_out = (void *)(at + 4 * rows + pairs),
                                     .token_state = (void *)(at + 4 * rows + 2 * pairs)};
    return moe_ok();
}

struct moe_status join_session(struct member *m, struct session_fixture *s, uint64_t epoch,
                               uint32_t budget_ms, bool training)
{
    struct moe_session_config config = member_session(m, epoch, budget_ms);
    config.training = training;
    config.partial = s->partial;
    return backend->session_join(s->device, &config, &s->session);
}

void leave_session(struct session_fixture *s)
{
    backend->session_leave(s->session);
    s->session = NULL;
}

bool open_fixture(struct member *m, struct session_fixture *s, uint32_t budget_ms, bool training)
{
    struct moe_device_config device = {.ordinal = (int)m->slot, .threads = 1};
    *s = (struct session_fixture){0};
    return good(backend->device_open(&device, &s->device)) &&
           good(small_layer(s->device, m, m->live, &s->layer)) && good(allocate_tensors(s, m)) &&
           good(join_session(m, s, 7, budget_ms, training));
}

int close_fixture(struct session_fixture *s)
{
    leave_session(s);
    backend->mem_free(s->device, MOE_MEM_HOST, s->tensors, s->bytes);
    backend->layer_destroy(s->layer);
    backend->device_close(s->device);
    return 0;
}

struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(backend->step_enqueue(s, a, &step));
    return backend->step_wait(step, MOE_NEVER, result);
}

/* ----------------------------------------------------------------------- memory */

static void take_memory(struct moe_device *device, size_t least, struct memory_hog *h)
{
    struct moe_device_info info;
    backend->device_info(device, &info);
    for (size_t bytes = (size_t)info.free_bytes; bytes >= least && h->count < 4096;) {
        void **piece = &h->piece[h->count];
        struct moe_status st = backend->mem_alloc(device, MOE_MEM_DEVICE, bytes, piece);
        if (moe_failed(&st))
            bytes /= 2;
        else
            h->bytes[h->count++] = bytes;
    }
}

void exhaust_memory(struct moe_device *device, size_t left, size_t least, struct memory_hog *h)
{
    void *spared = NULL;
    struct moe_status st = backend->mem_alloc(device, MOE_MEM_DEVICE, left, &spared);
    take_memory(device, least, h);
    if (!moe_failed(&st))
        backend->mem_free(device, MOE_MEM_DEVICE, spared, left);
}

void release_memory(struct moe_device *device, struct memory_hog *h)
{
    device_is_full = false;
    for (; h->count > 0; h->count--)
        backend->mem_free(device, MOE_MEM_DEVICE, h->piece[h->count - 1], h->bytes[h->count - 1]);
}

void deny_memory(struct moe_device *device, struct memory_hog *h)
{
    if (strcmp(backend->name, "cuda") == 0)
        device_is_full = true;
    else
        exhaust_memory(device, 0, 1, h);
}

enum { CANARY = 2 << 20, CANARIES = sizeof((struct canaries *)0)->piece / sizeof(void *) };

bool lay_canaries(struct moe_device *device, struct canaries *c)
{
    *c = (struct canaries){0};
    for (uint32_t i = 0; i < CANARIES; i++)
        if (!good(backend->mem_alloc(device, MOE_MEM_DEVICE, CANARY, &c->piece[i])))
            return false;
    return true; /* all zeros, like new memory */
}

bool check_canaries(struct moe_device *device, struct canaries *c)
{
    static uint8_t copy[CANARY];
    bool whole = true;
    for (uint32_t i = 0; i < CANARIES; i++) {
        struct moe_status st = backend->mem_copy(device, copy, c->piece[i], CANARY);
        whole = good(st) && whole;
        for (size_t b = 0; b < CANARY && whole; b++)
            whole = copy[b] == 0;
        backend->mem_free(device, MOE_MEM_DEVICE, c->piece[i], CANARY);
    }
    return whole;
}

/* ----------------------------------------------------------------------- groups */

void raise_flag(struct member *m, uint32_t value)
{
    __atomic_store_n(&m->board->flag[m->slot], value, __ATOMIC_RELEASE);
}

bool await_flag(struct board *b, uint32_t slot, uint32_t at_least)
{
    uint64_t deadline = moe_clock_ns() + WATCHDOG_S * MOE_NS_PER_S;
    while (moe_clock_ns() < deadline && __atomic_load_n(&b->failed, __ATOMIC_ACQUIRE) == 0) {
        if (__atomic_load_n(&b->flag[slot], __ATOMIC_ACQUIRE) >= at_least)
            return true;
        usleep(1000);
    }
    return false;
}

bool run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, ctx);
    return group_finish(&g, WATCHDOG_S, status);
}

bool run_group(uint32_t slots, int (*fn)(struct member *))
{
    return run_group_with(slots, fn, NULL);
}

bool survive_a_kill(uint32_t slots, int (*fn)(struct member *), uint32_t after)
{
    return survive_a_kill_with(slots, fn, NULL, after, 0);
}

bool survive_a_kill_with(uint32_t slots, int (*fn)(struct member *), void *ctx, uint32_t after,
                         uint32_t later_us)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, ctx);
    bool right = await_flag(g.board, VICTIM, after);
    usleep(later_us);
    kill(g.pid[VICTIM], SIGKILL);
    (void)group_finish(&g, WATCHDOG_S, status);
    for (uint32_t s = 0; s < slots; s++)
        right = right && (s == VICTIM ? WIFSIGNALED(status[s])
                                      : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
    return right;
}
