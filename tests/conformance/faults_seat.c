/* Seats and groups of the scenarios; see faults.h. */
#include "faults.h"

#include "base/clock.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* -------------------------------------------------------------------- seats */

struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out)
{
    return small_layer_make(backend, device, m, HIDDEN, INNER, holders, out);
}

/* One block of host memory for all tensors of a step. */
static struct moe_status lay_table(struct seat *s, const struct member *m)
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

struct moe_status join(struct member *m, struct seat *s, uint64_t epoch, uint32_t budget_ms,
                       bool training)
{
    struct moe_session_config session = member_session(m, epoch, budget_ms);
    session.training = training;
    return backend->session_join(s->device, &session, &s->session);
}

struct moe_status sit_down(struct member *m, struct seat *s, uint32_t budget_ms, bool training)
{
    *s = (struct seat){0};
    struct moe_device_config device = {.ordinal = (int)m->slot, .threads = 1};
    MOE_TRY(backend->device_open(&device, &s->device));
    MOE_TRY(small_layer(s->device, m, m->live, &s->layer));
    MOE_TRY(lay_table(s, m));
    return join(m, s, 7, budget_ms, training);
}

int get_up(struct seat *s)
{
    backend->session_leave(s->session);
    backend->mem_free(s->device, MOE_MEM_HOST, s->tensors, s->bytes);
    backend->layer_destroy(s->layer);
    backend->device_close(s->device);
    return 0;
}

struct moe_status run_step(struct seat *s, struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(backend->step_enqueue(s->session, &s->args, &step));
    return backend->step_wait(step, MOE_NEVER, result);
}

/* -------------------------------------------------------------------- groups */

bool all_return_zero(uint32_t slots, int (*fn)(struct member *))
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, NULL);
    return group_finish(&g, PATIENCE_S, status);
}

bool survive_a_kill(uint32_t slots, int (*fn)(struct member *), uint32_t after)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, NULL);
    uint64_t deadline = moe_clock_ns() + PATIENCE_S * MOE_NS_PER_S;
    while (__atomic_load_n(&g.board->flag[VICTIM], __ATOMIC_ACQUIRE) < after &&
           __atomic_load_n(&g.board->failed, __ATOMIC_ACQUIRE) == 0 && moe_clock_ns() < deadline)
        usleep(1000);
    kill(g.pid[VICTIM], SIGKILL);
    (void)group_finish(&g, PATIENCE_S, status);
    bool right = true;
    for (uint32_t s = 0; s < slots; s++)
        right = right && (s == VICTIM ? WIFSIGNALED(status[s])
                                      : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
    return right;
}
