/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the worker's session with the coordinator: a scripted coordinator on a real server,
 * and hooks that only record their calls. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "daemon/lease.h"
#include "group/group.h"
#include "rpc/client.h"
#include "scripted_coordinator.h"
#include "support/check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------------ a worker */

struct fake_worker {
    struct journal did;
    struct moe_rpc_client *client;
    struct moe_group *group;
    bool joins;      /* `form` does an all-gather of one round */
    bool busy;       /* under did.lock: `drained` returns false */
    bool lease_held; /* the group's thread only */
    struct moe_lease_gate lease;
    struct moe_status load_result;
    atomic_bool reads_for_long; /* read_checkpoint waits until it may not run */
    atomic_bool no_read;
};

/* The clock of leases; it may jump, as after the suspension of a host. */
static _Atomic uint64_t clock_jump_ns;

static uint64_t scene_clock(void)
{
    return moe_lease_clock_ns() + atomic_load(&clock_jump_ns);
}

static struct moe_status hook_load(void *ctx, const struct moe_group_assignment *a)
{
    struct fake_worker *w = ctx;
    note(&w->did, "load slot %u of %u version %u: layer %u, %zu experts, last on %u", a->slot,
         a->slots, a->placement_version, a->layers[0].layer, a->layers[0].experts,
         a->layers[0].slots[a->layers[0].slot_count - 1]);
    return w->load_result;
}

static struct moe_status hook_digests(void *ctx, moe_group_part_fn add, void *add_ctx)
{
    (void)ctx;
    MOE_TRY(add(add_ctx, (const uint8_t *)"one", 3));
    return add(add_ctx, (const uint8_t *)"three", 5);
}

static struct moe_status hook_read(void *ctx, const struct moe_saved_training *t, uint32_t slot,
                                   uint32_t slots)
{
    struct fake_worker *w = ctx;
    note(&w->did, "read %s as slot %u of %u: calls %llu, record %llu, lineage %llu, version %llu",
         t->checkpoint, slot, slots, (unsigned long long)t->calls, (unsigned long long)t->record,
         (unsigned long long)t->lineage, (unsigned long long)t->weights_version);
    while (w->reads_for_long && !atomic_load(&w->no_read))
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return atomic_load(&w->no_read) ? moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "cancelled")
                                    : moe_ok();
}

static void hook_allow_read(void *ctx, bool allowed)
{
    struct fake_worker *w = ctx;
    atomic_store(&w->no_read, !allowed);
}

static struct moe_status hook_form(void *ctx, const struct moe_group_view *v,
                                   moe_allgather_fn allgather, void *allgather_ctx,
                                   uint64_t *together)
{
    struct fake_worker *w = ctx;
    note(&w->did, "form %llu live %llx of %llu", (unsigned long long)v->epoch,
         (unsigned long long)v->live, (unsigned long long)v->session_epoch);
    *together = v->session_epoch != 0 ? v->live : 0;
    if (!w->joins || v->session_epoch != 0)
        return moe_ok();
    char all[2][4];
    struct moe_status st = allgather(allgather_ctx, "mine", all, sizeof all[0]);
    if (moe_failed(&st))
        note(&w->did, "gather %s", moe_code_name(st.code));
    else
        note(&w->did, "gather %.4s %.4s", all[0], all[1]);
    return st;
}

static struct moe_status hook_serve(void *ctx)
{
    struct fake_worker *w = ctx;
    note(&w->did, "serve");
    return moe_ok();
}

static void hook_leave(void *ctx)
{
    struct fake_worker *w = ctx;
    note(&w->did, "leave");
}

static void hook_drop_session(void *ctx)
{
    struct fake_worker *w = ctx;
    note(&w->did, "drop session");
}

static void hook_slot_assigned(void *ctx, uint32_t slot, uint32_t slots, const char *coordinator,
                               uint32_t admin_port)
{
    (void)coordinator;
    (void)admin_port;
    struct fake_worker *w = ctx;
    note(&w->did, "slot %u of %u", slot, slots);
}

static void hook_numbers(void *ctx, struct moe_group_numbers *out)
{
    (void)ctx;
    out->tokens = 1;
}

static void hook_cancel_load(void *ctx)
{
    hook_allow_read(ctx, false);
}

static void hook_give_up(void *ctx, struct moe_status why)
{
    struct fake_worker *w = ctx;
    note(&w->did, "give up %s", moe_reason_name(why.reason));
}

static void hook_allow_next_load(void *ctx, bool allowed)
{
    (void)ctx;
    (void)allowed;
}

static void hook_lease(void *ctx, bool held)
{
    struct fake_worker *w = ctx;
    if (held != w->lease_held)
        note(&w->did, held ? "lease" : "no lease");
    w->lease_held = held;
}

static void hook_drain(void *ctx)
{
    struct fake_worker *w = ctx;
    note(&w->did, "drain");
}

static bool hook_drained(void *ctx)
{
    struct fake_worker *w = ctx;
    moe_mutex_lock(&w->did.lock);
    bool busy = w->busy;
    moe_mutex_unlock(&w->did.lock);
    return !busy;
}

static void set_busy(struct fake_worker *w, bool busy)
{
    moe_mutex_lock(&w->did.lock);
    w->busy = busy;
    moe_mutex_unlock(&w->did.lock);
}

static void hook_models_listed(void *ctx, const uint32_t *models, const char *const *names,
                               size_t count)
{
    (void)ctx, (void)models, (void)names;
    assert_int_equal(count, 0); /* the coordinator of these tests has no models */
}

/* LOAD succeeds, another step does not. */
static void hook_model_order(void *ctx, const struct moe_group_model_order *o)
{
    static const struct moe_layer_spec spec = {.layer = 0, .experts = EXPERTS};
    static const struct moe_group_layer_memory memory = {.spec = &spec, .expert_file_bytes = 7};
    struct fake_worker *w = ctx;
    note(&w->did, "model %u step %d order %llu epoch %llu %s %s %s%s: slot %u of %u, %zu layers",
         o->model, (int)o->step, (unsigned long long)o->order, (unsigned long long)o->epoch,
         o->name, o->directory, o->digest, o->if_idle ? " if idle" : "", o->assignment.slot,
         o->assignment.slots, o->assignment.layer_count);
    struct moe_group_model_report r = {
        .model = o->model, .step = o->step, .order = o->order, .epoch = o->epoch};
    if (o->step == MOE_MODEL_LOAD) {
        r.family = "mixtral";
        r.layers = &memory;
        r.layer_count = 1;
        r.digests = hook_digests;
    } else {
        r.status = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE, "in use");
    }
    moe_group_report_model_progress(w->group, o->model, 3, 9);
    moe_group_report_model(w->group, &r);
}

static void hook_places(void *ctx, const char *const *endpoints, size_t count)
{
    struct fake_worker *w = ctx;
    if (count == 1 && !has_line(&w->did, "places: 10.0.0.1:7600")) /* with each answer */
        note(&w->did, "places: %s", endpoints[0]);
}

static void hook_ended(void *ctx, struct moe_status why)
{
    struct fake_worker *w = ctx;
    note(&w->did, "ended %s", moe_code_name(why.code));
}

struct scene {
    struct coordinator c;
    struct fake_worker w;
};

static void start_scene(struct scene *s)
{
    static const struct moe_layer_spec spec = {
        .layer = 3, .hidden = 8, .experts = EXPERTS, .intermediate = 8, .router = {.top_k = 2}};
    static const struct moe_layer_spec *const specs[] = {&spec};
    *s = (struct scene){.w = {.joins = true, .load_result = moe_ok()}};
    init_journal(&s->c.received);
    init_journal(&s->w.did);
    moe_mutex_init(&s->c.lock);
    moe_lease_gate_init(&s->w.lease, scene_clock);
    start_server(&s->c, "127.0.0.1:0");
    assert_ok(moe_rpc_client_create(&s->w.client));
    const struct moe_group_config config = {
        .client = s->w.client,
        .coordinator = s->c.endpoint,
        .identity = {.worker_id = "me",
                     .incarnation = INCARNATION,
                     .endpoint = "127.0.0.1:9",
                     .control_endpoint = "127.0.0.1:9",
                     .backend = "cpu",
                     .model = "m",
                     .fingerprint = "f",
                     .family = "mixtral",
                     .version = "0.2.0",
                     .layers = specs,
                     .layer_count = 1,
                     .max_tokens_per_step = 64},
        .drain_ms = 300,
        .gather_ms = WAIT_MS,
        .reform_ms = 50,
        .lease = &s->w.lease,
        .hooks = {.load = hook_load,
                  .digests = hook_digests,
                  .read_checkpoint = hook_read,
                  .form = hook_form,
                  .serve = hook_serve,
                  .leave = hook_leave,
                  .drop_session = hook_drop_session,
                  .slot_assigned = hook_slot_assigned,
                  .numbers = hook_numbers,
                  .cancel_load = hook_cancel_load,
                  .allow_next_load = hook_allow_next_load,
                  .allow_read = hook_allow_read,
                  .lease_changed = hook_lease,
                  .places_listed = hook_places,
                  .give_up = hook_give_up,
                  .drain = hook_drain,
                  .drained = hook_drained,
                  .model_order = hook_model_order,
                  .models_listed = hook_models_listed,
                  .ended = hook_ended,
                  .ctx = &s->w},
    };
    assert_ok(moe_group_start(&config, &s->w.group));
}

static void end_scene(struct scene *s)
{
    moe_group_destroy(s->w.group);
    moe_rpc_client_destroy(s->w.client);
    stop_server(&s->c);
    free_journal(&s->c.received);
    free_journal(&s->w.did);
    moe_mutex_destroy(&s->c.lock);
}

/* Everything up to COMMIT of `epoch`. */
static void lead_to_serving(struct scene *s, uint64_t epoch)
{
    await_line(&s->c.received, "register me 4711 127.0.0.1:9 wants 0");
    say_registered(&s->c);
    say_assign(&s->c, 1);
    await_line(&s->c.received, "digests one");
    assert_next(&s->c.received, "digests three");
    assert_next(&s->c.received, "loaded 1 ok");
    say_prepare(&s->c, epoch, INCARNATION);
    await_line(&s->c.received, "blob");
    say_blobs(&s->c, epoch, 0);
    await_line(&s->c.received, "ready");
    say_commit(&s->c, epoch);
    char want[32];
    (void)snprintf(want, sizeof want, "heartbeat %llu", (unsigned long long)epoch);
    await_line(&s->c.received, want);
}

/* -------------------------------------------------------------------------- tests */

static void a_worker_registers_loads_joins_and_serves(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    assert_next(&s.w.did, "slot 1 of 2");
    assert_next(&s.w.did, "load slot 1 of 2 version 1: layer 3, 4 experts, last on 1");
    assert_next(&s.w.did, "form 4 live 3");
    assert_next(&s.w.did, "gather zero mine");
    assert_next(&s.w.did, "serve");
    assert_true(has_line(&s.c.received, "blob 4 0 mine"));
    assert_true(has_line(&s.w.did, "serve"));
    end_scene(&s);
}

static void an_abort_ends_a_join_at_once_and_the_next_epoch_starts_anew(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    await_line(&s.c.received, "register");
    say_registered(&s.c);
    say_prepare(&s.c, 7, INCARNATION);
    await_line(&s.c.received, "blob 7 0");
    uint64_t begin = moe_clock_ns();
    say_abort(&s.c, 7);
    say_prepare(&s.c, 8, INCARNATION); /* before the worker can have noticed */
    await_line(&s.w.did, "gather ABORTED");
    print_message("aborted after %.1f ms\n", (double)(moe_clock_ns() - begin) / 1e6);
    await_line(&s.c.received, "blob 8 0");
    say_blobs(&s.c, 7, 0); /* of the past: ignored */
    say_blobs(&s.c, 8, 0);
    await_line(&s.c.received, "ready 8 ok");
    assert_false(has_line(&s.c.received, "ready 7"));
    await_line(&s.w.did, "leave");
    await_line(&s.w.did, "form 8");
    await_line(&s.w.did, "gather zero mine");
    say_commit(&s.c, 7); /* nothing to commit */
    say_commit(&s.c, 8);
    await_line(&s.w.did, "serve");
    end_scene(&s);
}

/* The hook gets the epoch of the session, and its word on masks reaches the coordinator, also one
 * that has restarted. */
static void a_mask_names_the_session_that_it_keeps(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    say_abort(&s.c, 4);
    await_line(&s.w.did, "leave");
    say_prepare_of(&s.c, 9, INCARNATION, 4);
    await_line(&s.w.did, "form 9 live 3 of 4");
    await_line(&s.c.received, "ready 9 ok, can mask");
    say_commit(&s.c, 9);
    await_line(&s.w.did, "serve");
    close_session(&s.c, moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the coordinator restarts"));
    await_line(&s.c.received, "register");
    await_line(&s.c.received, "session 4 with 3 of ");
    end_scene(&s);
}

/* It keeps memory of windows, so not for ever. A coordinator that comes back gets none. */
static void a_session_without_a_view_is_left_after_some_leases(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    say_abort(&s.c, 4);
    say_prepare_of(&s.c, 9, INCARNATION, 4);
    await_line(&s.c.received, "ready 9 ok, can mask");
    say_abort(&s.c, 9);
    await_line(&s.w.did, "drop session");
    assert_true(has_line(&s.w.did, "form 9 live 3 of 4"));
    close_session(&s.c, moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the coordinator restarts"));
    await_line(&s.c.received, "register");
    assert_false(has_line(&s.c.received, "session 4 with 3 of "));
    end_scene(&s);
}

static void an_epoch_that_falls_is_refused(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    say_prepare(&s.c, 4, INCARNATION);
    await_line(&s.c.received, "ready 4 STALE_EPOCH");
    say_prepare(&s.c, 3, INCARNATION);
    await_line(&s.c.received, "ready 3 STALE_EPOCH");
    say_prepare(&s.c, 9, INCARNATION + 1); /* means another process */
    await_line(&s.c.received, "ready 9 MALFORMED");
    assert_false(has_line(&s.w.did, "leave")); /* the view in force stays */
    end_scene(&s);
}

static void a_view_outlives_its_coordinator(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    char endpoint[32];
    (void)snprintf(endpoint, sizeof endpoint, "%s", s.c.endpoint);
    stop_server(&s.c);
    nanosleep(&(struct timespec){0, 300000000}, NULL);
    s.c.last_epoch = 0;
    start_server(&s.c, endpoint);
    await_line(&s.c.received, "register me 4711 127.0.0.1:9 wants 2");
    say_registered(&s.c);
    await_line(&s.c.received, "heartbeat 4");
    say_assign(&s.c, 1);
    await_line(&s.c.received, "loaded 1 ok");
    assert_false(has_line(&s.w.did, "leave"));
    say_abort(&s.c, 4); /* but the new coordinator can end it */
    await_line(&s.w.did, "leave");
    end_scene(&s);
}

/* The operator has requested another try: an absent coordinator gets the request later, once. */
static void an_operators_decision_reaches_a_restarted_coordinator(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    await_line(&s.c.received, "register me 4711 127.0.0.1:9 wants 0");
    moe_group_try_again(s.w.group); /* Register has not been answered yet */
    say_registered(&s.c);
    await_line(&s.c.received, "try again");
    char endpoint[32];
    (void)snprintf(endpoint, sizeof endpoint, "%s", s.c.endpoint);
    for (int i = 0; i < 2; i++) {
        stop_server(&s.c);
        nanosleep(&(struct timespec){0, 300000000}, NULL);
        if (i == 0)
            moe_group_try_again(s.w.group);
        s.c.last_epoch = UINT64_MAX;
        start_server(&s.c, endpoint);
        await_line(&s.c.received, "register me 4711 127.0.0.1:9 wants 2");
        say_registered(&s.c);
        await_line(&s.c.received, "heartbeat 0");
        if (i == 0)
            await_line(&s.c.received, "try again");
    }
    say_assign(&s.c, 1); /* earlier messages came before the answer to this */
    await_line(&s.c.received, "loaded 1 ok");
    assert_int_equal(count_lines(&s.c.received, "try again"), 2);
    end_scene(&s);
}

/* Sent on a stream that then ends: only the answer shows that it arrived. */
static void an_operators_decision_is_repeated_until_it_is_answered(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    await_line(&s.c.received, "register me 4711 127.0.0.1:9 wants 0");
    say_registered(&s.c);
    await_line(&s.w.did, "slot 1 of 2");
    s.c.silent = true;
    moe_group_try_again(s.w.group);
    moe_group_try_again(s.w.group);
    await_line(&s.c.received, "try again");
    await_line(&s.c.received, "try again");
    for (int i = 0; i < 3; i++) {
        close_session(&s.c, moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "as if it had crashed"));
        await_line(&s.c.received, "disconnected");
        await_line(&s.c.received, "register me 4711 127.0.0.1:9 wants 2");
        s.c.silent = i == 0;
        say_registered(&s.c);
        if (i < 2) /* both are one request, and it is answered */
            await_line(&s.c.received, "try again");
    }
    say_assign(&s.c, 1); /* earlier messages came before the answer to this */
    await_line(&s.c.received, "loaded 1 ok");
    assert_int_equal(count_lines(&s.c.received, "try again"), 4);
    end_scene(&s);
}

static void a_lost_peer_ends_the_view_here_and_is_reported(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    moe_group_report_lost(s.w.group, 3, 1, moe_ok()); /* of an older epoch */
    moe_group_report_lost(s.w.group, 4, 1,
                          moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot 0"));
    await_line(&s.c.received, "peer lost 4 1");
    await_line(&s.w.did, "leave");
    await_line(&s.w.did, "give up REFORMING");
    await_line(&s.c.received, "heartbeat 0");
    assert_false(has_line(&s.c.received, "peer lost 3"));
    end_scene(&s);
}

static void a_failed_load_is_reported(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    s.w.load_result = moe_error(MOE_NOT_FOUND, MOE_REASON_TENSOR_MISSING, "no tensor gate");
    await_line(&s.c.received, "register");
    say_registered(&s.c);
    say_assign(&s.c, 1);
    await_line(&s.c.received, "loaded 1 no tensor gate");
    assert_false(has_line(&s.c.received, "digests"));
    end_scene(&s);
}

static void a_checkpoint_is_read_until_a_view_forms(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    s.w.reads_for_long = false;
    await_line(&s.c.received, "register");
    say_registered(&s.c);
    say_assign(&s.c, 1);
    await_line(&s.c.received, "loaded 1 ok");
    say_read_checkpoint(&s.c, 20, "../a");
    await_line(&s.c.received, "read 20 no checkpoint is named");
    say_read_checkpoint(&s.c, 21, "a");
    await_line(&s.c.received, "read 21 ok");
    await_line(&s.w.did, "read a as slot 1 of 2: calls 7, record 8, lineage 9, version 10");
    s.w.reads_for_long = true; /* the next one; nothing reads now */
    say_read_checkpoint(&s.c, 22, "b");
    await_line(&s.w.did, "read b");
    say_prepare(&s.c, 4, INCARNATION);
    await_line(&s.c.received, "read 22 cancelled");
    await_line(&s.w.did, "form 4");
    say_blobs(&s.c, 4, 0);
    await_line(&s.c.received, "ready 4");
    s.w.reads_for_long = false;
    say_read_checkpoint(&s.c, 23, "c"); /* a later order runs again */
    await_line(&s.c.received, "read 23 ok");
    s.w.reads_for_long = true;
    say_read_checkpoint(&s.c, 24, "d");
    await_line(&s.w.did, "read d");
    end_scene(&s); /* does not wait for it */
}

static void a_drained_worker_stays_until_the_coordinator_lets_it_go(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    set_busy(&s.w, true);
    moe_group_drain(s.w.group, "because");
    moe_group_drain(s.w.group, "because"); /* once is enough */
    await_line(&s.c.received, "drain notice");
    say_drain(&s.c, WAIT_MS, false);
    await_line(&s.w.did, "drain");
    nanosleep(&(struct timespec){0, 30000000}, NULL);
    assert_false(has_line(&s.c.received, "leaving")); /* requests are still at work */
    set_busy(&s.w, false);
    await_line(&s.c.received, "leaving");
    nanosleep(&(struct timespec){0, 30000000}, NULL);
    assert_false(has_line(&s.w.did, "leave")); /* others may still need it */
    close_session(&s.c, moe_ok());
    await_line(&s.w.did, "leave");
    await_line(&s.w.did, "ended OK");
    end_scene(&s);
}

/* It takes requests until its experts are elsewhere, and for half of its time at most. */
static void a_worker_whose_experts_move_drains_after_that(void **state)
{
    for (int in_time = 0; in_time < 2; in_time++) {
        static struct scene s;
        start_scene(&s);
        lead_to_serving(&s, 4);
        moe_group_drain(s.w.group, "because");
        await_line(&s.c.received, "drain notice");
        say_drain(&s.c, 0, true);
        if (in_time)
            say_drain(&s.c, 0, false);
        await_line(&s.w.did, "drain");
        await_line(&s.c.received, "leaving");
        close_session(&s.c, moe_ok());
        await_line(&s.w.did, "ended OK");
        end_scene(&s);
    }
    (void)state;
}

static void a_drain_that_takes_too_long_is_cut_short(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    set_busy(&s.w, true);
    say_drain(&s.c, 50, false);
    await_line(&s.w.did, "drain");
    await_line(&s.w.did, "leave");
    await_line(&s.w.did, "ended DEADLINE_EXCEEDED");
    end_scene(&s);
}

static void a_worker_without_a_coordinator_can_leave(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    stop_server(&s.c);
    await_line(&s.c.received, "disconnected");
    moe_group_drain(s.w.group, "because");
    await_line(&s.w.did, "drain");
    await_line(&s.w.did, "ended OK");
    start_server(&s.c, "127.0.0.1:0"); /* for end_scene */
    end_scene(&s);
}

static void a_process_that_was_replaced_ends(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    close_session(&s.c, moe_error(MOE_ABORTED, MOE_REASON_STALE_EPOCH, "a newer process"));
    await_line(&s.w.did, "leave");
    await_line(&s.w.did, "ended ABORTED");
    end_scene(&s);
}

static void after_nonsense_from_the_coordinator_the_worker_reconnects(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    await_line(&s.c.received, "register");
    say_commit(&s.c, 1); /* before Registered */
    await_line(&s.c.received, "disconnected");
    await_line(&s.c.received, "register");
    moe_mutex_lock(&s.c.lock);
    static const uint8_t garbage[] = {0xff, 0xff, 0xff};
    const struct moe_rpc_out out = {.head = garbage, .head_length = sizeof garbage};
    moe_rpc_send(s.c.call, &out);
    moe_mutex_unlock(&s.c.lock);
    await_line(&s.c.received, "disconnected");
    lead_to_serving(&s, 4);
    end_scene(&s);
}

/* Serving under epoch 7, with heartbeats answered. */
static void start_with_a_lease(struct scene *s)
{
    start_scene(s);
    atomic_store(&s->c.answers, true);
    lead_to_serving(s, 7);
    await_line(&s->w.did, "places: 10.0.0.1:7600");
    await_line(&s->w.did, "lease");
}

/* The lease runs from the heartbeat that was answered; a view goes on without one. */
static void a_lease_lasts_as_long_as_heartbeats_are_answered(void **state)
{
    (void)state;
    static struct scene s;
    start_with_a_lease(&s);
    assert_true(moe_lease_gate_held(&s.w.lease));
    moe_sleep_until(moe_clock_ns() + 600 * MOE_NS_PER_MS); /* two of its leases */
    assert_true(moe_lease_gate_held(&s.w.lease));
    uint64_t cut_ns = moe_clock_ns();
    atomic_store(&s.c.answers, false);
    await_line(&s.w.did, "no lease");
    uint64_t after_ms = (moe_clock_ns() - cut_ns) / MOE_NS_PER_MS;
    print_message("no lease %u ms after the last answer\n", (unsigned)after_ms);
    assert_false(moe_lease_gate_held(&s.w.lease));
    assert_int_equal(count_lines(&s.w.did, "leave"), 0);
    atomic_store(&s.c.answers, true);
    await_line(&s.w.did, "lease");
    end_scene(&s);
}

/* Heartbeats do not run while a host is suspended, and its lease does. */
static void a_host_that_slept_has_no_lease(void **state)
{
    (void)state;
    static struct scene s;
    start_with_a_lease(&s);
    atomic_store(&s.c.answers, false);
    atomic_fetch_add(&clock_jump_ns, 10 * MOE_NS_PER_S);
    assert_false(moe_lease_gate_held(&s.w.lease));
    assert_false(moe_lease_gate_covers_change(&s.w.lease));
    end_scene(&s);
}

static void a_worker_without_a_free_slot_leaves_its_view(void **state)
{
    (void)state;
    static struct scene s;
    start_with_a_lease(&s);
    close_session(&s.c, moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN, 100,
                                        "all 2 slots are taken"));
    await_line(&s.w.did, "no lease");
    await_line(&s.c.received, "register"); /* a slot may become free */
    assert_int_equal(count_lines(&s.w.did, "leave"), 1);
    end_scene(&s);
}

static void orders_about_models_are_carried_and_reported(void **state)
{
    (void)state;
    static struct scene s;
    start_scene(&s);
    lead_to_serving(&s, 4);
    say_model_order(&s.c, MOE__V1__MODEL_STEP__MODEL_STEP_LOAD, 11);
    await_line(&s.w.did, "model 5 step 2 order 11 epoch 4 second /models/second ab if idle: "
                         "slot 1 of 2, 1 layers");
    await_line(&s.c.received, "model 5 has 3 of 9");
    assert_next(&s.c.received, "digests one");
    assert_next(&s.c.received, "of model 5");
    assert_next(&s.c.received, "digests three");
    assert_next(&s.c.received, "of model 5");
    assert_next(&s.c.received, "model 5 step 2 order 11 epoch 4: 1 layers, mixtral");
    say_model_order(&s.c, MOE__V1__MODEL_STEP__MODEL_STEP_QUIESCE, 12);
    await_line(&s.c.received, "model 5 step 4 order 12 epoch 4: 0 layers, MODEL_IN_USE");
    end_scene(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_registers_loads_joins_and_serves),
        cmocka_unit_test(an_abort_ends_a_join_at_once_and_the_next_epoch_starts_anew),
        cmocka_unit_test(a_mask_names_the_session_that_it_keeps),
        cmocka_unit_test(a_session_without_a_view_is_left_after_some_leases),
        cmocka_unit_test(an_epoch_that_falls_is_refused),
        cmocka_unit_test(a_view_outlives_its_coordinator),
        cmocka_unit_test(an_operators_decision_reaches_a_restarted_coordinator),
        cmocka_unit_test(an_operators_decision_is_repeated_until_it_is_answered),
        cmocka_unit_test(a_lost_peer_ends_the_view_here_and_is_reported),
        cmocka_unit_test(a_failed_load_is_reported),
        cmocka_unit_test(a_checkpoint_is_read_until_a_view_forms),
        cmocka_unit_test(a_drained_worker_stays_until_the_coordinator_lets_it_go),
        cmocka_unit_test(a_worker_whose_experts_move_drains_after_that),
        cmocka_unit_test(a_drain_that_takes_too_long_is_cut_short),
        cmocka_unit_test(a_worker_without_a_coordinator_can_leave),
        cmocka_unit_test(a_process_that_was_replaced_ends),
        cmocka_unit_test(after_nonsense_from_the_coordinator_the_worker_reconnects),
        cmocka_unit_test(a_lease_lasts_as_long_as_heartbeats_are_answered),
        cmocka_unit_test(a_host_that_slept_has_no_lease),
        cmocka_unit_test(a_worker_without_a_free_slot_leaves_its_view),
        cmocka_unit_test(orders_about_models_are_carried_and_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
