/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine shows of itself (daemon/progress.h): three loops. Its thread turns, also while a
 * step runs; the device works while steps are in flight; a view runs a step at least now and then.
 *
 * A long step is no stuck one: the judge also looks at the device's own count, and at the bytes
 * that a Load moves. After an exclusive step the other slots may take longer than this one, so no
 * next step is expected until it begins. */
#include "engine/state.h"

#include "base/clock.h"

static const struct moe_loop_place in_device = {.what = "a call of the device",
                                                .code = "DEVICE_STUCK"};
/* Of a device that does not count: the call may be a long one. */
static const struct moe_loop_place in_uncounted = {
    .what = "a training call of the device", .code = "DEVICE_STUCK", .outside = true};
static const struct moe_loop_place in_job = {
    .what = "a ticket of a Save, Load or Export", .code = "DISK_SLOW", .outside = true};
static const struct moe_loop_place at_step = {.what = "a step"};
static const struct moe_loop_place in_view = {.what = "a view"};

/* On any thread. */
static uint64_t count_progress(const void *ctx)
{
    const struct moe_engine *e = ctx;
    const struct moe_engine_config *c = &e->config;
    uint64_t count =
        c->backend->device_progress != NULL ? c->backend->device_progress(c->device) : 0;
    return c->calls != NULL && c->calls->moved != NULL ? count + c->calls->moved(c->calls_ctx)
                                                       : count;
}

void moe_engine__add_loops(struct moe_engine *e)
{
    struct moe_loop_config loop = {
        .name = "engine", .code = "ENGINE_STUCK", .always = true, .more = count_progress, .ctx = e};
    e->turns = moe_progress_add(e->config.progress, &loop);
    loop.name = "device";
    loop.code = "DEVICE_STUCK";
    loop.always = false;
    loop.mover = e->turns;
    e->device = moe_progress_add(e->config.progress, &loop);
    loop.name = "steps";
    loop.code = "NO_STEPS";
    loop.readies_only = true;
    loop.mover = e->device;
    e->steps = moe_progress_add(e->config.progress, &loop);
    e->beat_ns = e->config.heartbeat != NULL ? moe_progress_step_ns(e->config.progress) : 0;
}

void moe_engine__show_call(struct moe_engine *e, enum moe_step_kind kind)
{
    const struct moe_step_traits *traits = moe_step_traits(kind);
    bool counted = e->config.backend->device_progress != NULL || !traits->is_exclusive;
    moe_loop_enter(e->turns, traits->is_job ? &in_job : counted ? &in_device : &in_uncounted);
}

void moe_engine__show_return(struct moe_engine *e)
{
    moe_loop_leave(e->turns);
}

void moe_engine__show_steps(struct moe_engine *e, bool view, enum moe_step_kind ended)
{
    bool expected = view && !moe_step_traits(ended)->is_exclusive;
    moe_loop_enter(e->device, e->in_flight > 0 ? &at_step : NULL);
    moe_loop_enter(e->steps, expected ? &in_view : NULL);
    e->next_beat = e->beat_ns > 0 ? moe_clock_ns() + e->beat_ns : MOE_NEVER;
}

uint64_t moe_engine__next_beat(const struct moe_engine *e, bool view)
{
    if (e->beat_ns == 0)
        return MOE_NEVER;
    return view ? e->next_beat : moe_clock_ns() + e->beat_ns;
}

void moe_engine__beat(struct moe_engine *e, uint64_t epoch)
{
    uint64_t now = moe_clock_ns();
    if (e->shown_epoch != epoch)
        moe_engine__show_steps(e, true, 0);
    e->shown_epoch = epoch;
    if (e->beat_ns == 0 || now < e->next_beat)
        return;
    e->next_beat = now + e->beat_ns;
    e->config.heartbeat(e->config.ctx, e->config.specs[0]->layer);
}
