/* Seats for tests; see seat.h. */
#include "seat.h"

#include "base/clock.h"

#include <unistd.h>

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

static struct moe_status upload(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                enum moe_weight w, uint32_t expert)
{
    float data[32 * HIDDEN];
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 1000 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = rng_float(&r);
    return moe_backend_cpu.layer_upload(layer, w, expert, MOE_DTYPE_F32, data,
                                        rows * columns * sizeof *data);
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
    struct moe_layer_spec spec = {
        .layer = 3,
        .hidden = HIDDEN,
        .experts = n,
        .intermediate = INNER,
        .router = {.score = MOE_SCORE_SIGMOID,
                   .top_k = TOP_K,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 1},
    };
    struct moe_placement placement = {
        .version = 1, .experts = n, .slots = m->slots, .offset = offset, .slot = slot};
    MOE_TRY(moe_backend_cpu.layer_create(device, &spec, &placement, m->slot, out));
    struct moe_status st = upload(*out, &spec, MOE_WEIGHT_ROUTER, 0);
    for (uint32_t e = 0; e < n && !moe_failed(&st); e++) {
        if (slot[e] != m->slot)
            continue;
        st = upload(*out, &spec, MOE_WEIGHT_GATE, e);
        if (!moe_failed(&st))
            st = upload(*out, &spec, MOE_WEIGHT_UP, e);
        if (!moe_failed(&st))
            st = upload(*out, &spec, MOE_WEIGHT_DOWN, e);
    }
    return moe_failed(&st) ? st : moe_backend_cpu.layer_finish(*out);
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
