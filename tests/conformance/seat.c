/* Seats for tests; see seat.h. */
#include "seat.h"

#include "base/clock.h"

#include <unistd.h>

struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out)
{
    return small_layer_make(&moe_backend_cpu, device, m, HIDDEN, INNER, holders, out);
}

static struct moe_step_args small_step(struct moe_layer *layer, const struct member *m,
                                       struct tensors *t)
{
    struct rng r = {.state = m->slot};
    for (size_t i = 0; i < TOKENS * HIDDEN; i++)
        t->x[i] = rng_float(&r);
    return (struct moe_step_args){.layer = layer,
                                  .dtype = MOE_DTYPE_F32,
                                  .bucket = BUCKET,
                                  .tokens = TOKENS,
                                  .x = t->x,
                                  .y = t->y,
                                  .ids_out = t->ids,
                                  .weights_out = t->weights,
                                  .token_state = t->state};
}

struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(moe_backend_cpu.step_enqueue(s, a, &step));
    return moe_backend_cpu.step_wait(step, MOE_NEVER, result);
}

bool sit_down(struct member *m, struct seat *s, uint32_t budget_ms)
{
    struct moe_device_config device = {.threads = 1};
    struct moe_session_config config = member_session(m, 7, budget_ms);
    *s = (struct seat){0};
    if (!good(moe_backend_cpu.device_open(&device, &s->device)) ||
        !good(small_layer(s->device, m, m->live, &s->layer)) ||
        !good(moe_backend_cpu.session_join(s->device, &config, &s->session)))
        return false;
    s->args = small_step(s->layer, m, &s->tensors);
    return true;
}

int get_up(struct seat *s)
{
    moe_backend_cpu.session_leave(s->session);
    moe_backend_cpu.layer_destroy(s->layer);
    moe_backend_cpu.device_close(s->device);
    return 0;
}

void raise_flag(struct member *m, uint32_t value)
{
    __atomic_store_n(&m->board->flag[m->slot], value, __ATOMIC_RELEASE);
}

bool await_flag(struct board *b, uint32_t slot, uint32_t at_least)
{
    for (uint32_t turn = 0; turn < 60000; turn++) {
        if (__atomic_load_n(&b->flag[slot], __ATOMIC_ACQUIRE) >= at_least)
            return true;
        if (__atomic_load_n(&b->failed, __ATOMIC_ACQUIRE))
            return false;
        usleep(1000);
    }
    return false;
}

bool run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, ctx);
    return group_finish(&g, PATIENCE_S, status);
}

bool run_group(uint32_t slots, int (*fn)(struct member *))
{
    return run_group_with(slots, fn, NULL);
}
