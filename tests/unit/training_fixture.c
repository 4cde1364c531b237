/* SPDX-License-Identifier: Apache-2.0 */
/* See training_fixture.h. */
#include "training_fixture.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "moe/v1/training.pb-c.h"
#include "support/check.h"
#include "training/requests.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static char device_memory, session_memory[8], layer_memory;

struct training_fixture test;

static void on_announce_training(void *ctx, const struct moe_ticket *call, uint32_t tokens)
{
    (void)ctx;
    (void)tokens;
    moe_mutex_lock(&test.lock);
    test.announced[test.announced_count++] = *call;
    moe_mutex_unlock(&test.lock);
}

static void on_block_weight_updates(void *ctx, bool block)
{
    (void)ctx;
    moe_mutex_lock(&test.lock);
    test.blocked = block;
    test.block_count++;
    moe_mutex_unlock(&test.lock);
}

static void on_finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                        uint64_t lost)
{
    (void)ctx;
    (void)ticket;
    (void)lost;
    moe_mutex_lock(&test.lock);
    test.last = status;
    test.finished_count++;
    moe_mutex_unlock(&test.lock);
}

static void on_done(struct moe_train_work *w, struct moe_status status)
{
    struct client *c = w->user;
    moe_mutex_lock(&test.lock);
    c->status = status;
    c->done++;
    moe_mutex_unlock(&test.lock);
}

void on_forward_done(struct moe_work *w, struct moe_status status)
{
    (void)w;
    moe_mutex_lock(&test.lock);
    test.forward_status = status;
    test.forward_done++;
    moe_mutex_unlock(&test.lock);
}

static const struct moe_layer_spec spec = {
    .layer = 7, .hidden = HIDDEN, .experts = 2, .intermediate = 4, .router = {.top_k = 1}};
static const struct moe_layer_spec *const specs[] = {&spec};

static void agree(uint32_t slot, uint64_t live)
{
    struct moe_train_digest digests[MOE_MAX_SLOTS] = {0};
    struct moe_train_recovery decision;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) /* the others have the same state */
        if ((live >> s & 1) != 0)
            moe_train_read_digest(test.train, &digests[s]);
    assert_ok(moe_train_choose_recovery(digests, live, &decision));
    assert_ok(moe_train_adopt(test.train, &decision, slot, 2, live));
}

void begin_view_of(uint32_t bucket)
{
    agree(0, 3);
    moe_mutex_lock(&script.lock);
    script.aborted = script.hold = false;
    moe_mutex_unlock(&script.lock);
    test.epoch++;
    test.seq = 0;
    moe_engine_start_view(test.engine,
                          (struct moe_session *)(void *)&session_memory[test.epoch % 8], test.epoch,
                          1, bucket);
}

void begin_view(void)
{
    begin_view_of(BUCKET);
}

static int open_engine_with(const struct moe_backend *backend, uint64_t retained_ns,
                            uint32_t lora_rank)
{
    static struct moe_layer *layers[1];
    static const uint32_t offset[] = {0, 1, 2};
    static const uint16_t slot[] = {0, 1};
    static const struct moe_placement placement = {
        .version = 1, .experts = 2, .slots = 2, .offset = offset, .slot = slot};
    memset(&script, 0, sizeof script);
    memset(&test, 0, sizeof test);
    announced_tokens = 0;
    moe_wait_init(&script.changed);
    moe_mutex_init(&script.lock);
    moe_mutex_init(&test.lock);
    layers[0] = (struct moe_layer *)(void *)&layer_memory;
    const struct moe_train_config train = {
        .backend = backend,
        .device = (struct moe_device *)(void *)&device_memory,
        .specs = specs,
        .layer_count = 1,
        .trainer = {.optimizer = MOE_OPTIMIZER_ADAMW,
                    .lora_rank = lora_rank,
                    .lora_alpha = 1,
                    .lora_targets = lora_rank > 0 ? 7 : 0},
        .retained_bytes = 1 << 20,
        .retained_ns = retained_ns,
        .retained_device_bytes = 1 << 20,
        .directory = "/nonexistent/checkpoints",
    };
    assert_ok(moe_train_create(&train, &test.train));
    assert_ok(moe_train_attach(test.train, layers, &placement));
    const struct moe_engine_config config = {
        .backend = backend,
        .device = (struct moe_device *)(void *)&device_memory,
        .layers = layers,
        .specs = specs,
        .layer_count = 1,
        .max_tokens_per_step = BUCKET,
        .max_queued_tokens = 1000,
        .calls = &moe_train_call_ops,
        .calls_ctx = test.train,
        .announce = count_announced,
        .announce_training = on_announce_training,
        .block_weight_updates = on_block_weight_updates,
        .finished = on_finished,
        .spin_ns = spin_of_test(),
    };
    assert_ok(moe_engine_create(&config, &test.engine));
    begin_view();
    return 0;
}

int open_engine(void **state)
{
    (void)state;
    return open_engine_with(&script_backend, KEPT_NS, 0);
}

int open_adapters(void **state)
{
    (void)state;
    return open_engine_with(&script_backend, KEPT_NS, 2);
}

int open_copies(void **state)
{
    static struct moe_training training;
    static struct moe_backend backend;
    (void)state;
    training = *script_backend.training;
    training.live_copies = true;
    backend = script_backend;
    backend.training = &training;
    return open_engine_with(&backend, KEPT_NS, 2);
}

int close_engine(void **state)
{
    (void)state;
    moe_engine_destroy(test.engine);
    moe_train_destroy(test.train);
    assert_int_equal(script.unfinished, 0);
    assert_int_equal(script.trainers, 0);
    assert_false(script.optimizer_overlaps_step);
    pthread_cond_destroy(&script.changed);
    moe_mutex_destroy(&script.lock);
    moe_mutex_destroy(&test.lock);
    return 0;
}

/* The call as a client's message says it. */
static void write_request(struct moe_train_call *call, enum moe_step_kind kind, uint64_t id)
{
    static char name[] = "nosuch";
    Moe__V1__OptimizerStepRequest step = MOE__V1__OPTIMIZER_STEP_REQUEST__INIT;
    Moe__V1__ZeroGradRequest zero = MOE__V1__ZERO_GRAD_REQUEST__INIT;
    Moe__V1__SetFrozenRequest frozen = MOE__V1__SET_FROZEN_REQUEST__INIT;
    Moe__V1__SaveCheckpointRequest save = MOE__V1__SAVE_CHECKPOINT_REQUEST__INIT;
    Moe__V1__LoadCheckpointRequest load = MOE__V1__LOAD_CHECKPOINT_REQUEST__INIT;
    step.learning_rate = 1;
    save.name = load.name = name;
    step.step_id = zero.step_id = frozen.step_id = save.step_id = load.step_id = id;
    const ProtobufCMessage *const messages[MOE_STEP_KINDS] = {
        [MOE_STEP_OPTIMIZER] = &step.base,    [MOE_STEP_ZERO_GRAD] = &zero.base,
        [MOE_STEP_SET_FROZEN] = &frozen.base, [MOE_STEP_SAVE] = &save.base,
        [MOE_STEP_LOAD] = &load.base,
    };
    *call = (struct moe_train_call){.kind = kind};
    if (messages[kind] != NULL)
        assert_ok(moe_train_read_request(kind, messages[kind], call));
    call->id = id;
}

void ask(int i, enum moe_step_kind kind, uint64_t id, float value)
{
    struct client *c = &test.clients[i];
    *c = (struct client){0};
    write_request(&c->call, kind, id);
    c->call.content = (struct moe_content){.header_hash = {(uint64_t)value, 1}};
    if (kind == MOE_STEP_BACKWARD)
        strcpy(c->call.session, "s");
    for (int e = 0; e < BUCKET * HIDDEN; e++)
        c->dy[e] = value;
    c->work = (struct moe_train_work){
        .kind = kind,
        .layer = 7,
        .dtype = MOE_DTYPE_F32,
        .tokens = kind == MOE_STEP_BACKWARD ? 3 : 0,
        .mode = MOE_ROUTE_IDS,
        .x = c->x,
        .dy = c->dy,
        .ids = c->ids,
        .dx = c->dx,
        .deadline_ns = MOE_NEVER,
        .answer = &c->answer,
        .done = on_done,
        .user = c,
    };
    moe_train_call_pack(&c->call, c->work.body, &c->work.body_length);
    assert_ok(moe_engine_submit_training(test.engine, &c->work));
}

void order(int n, uint32_t origin)
{
    struct moe_ticket t = test.announced[n];
    t.epoch = test.epoch;
    t.seq = ++test.seq;
    t.descriptor.origin = origin;
    t.bucket = t.kind == MOE_STEP_BACKWARD ? 4 : 0;
    moe_engine_run(test.engine, &t);
}

void order_forward(uint32_t bucket)
{
    const struct moe_ticket t = {.epoch = test.epoch,
                                 .seq = ++test.seq,
                                 .layer = 7,
                                 .kind = MOE_STEP_FORWARD,
                                 .dtype = MOE_DTYPE_F32,
                                 .bucket = bucket};
    moe_engine_run(test.engine, &t);
}

void forward(uint32_t tokens, uint64_t version)
{
    test.forward = (struct moe_work){
        .layer = 7,
        .dtype = MOE_DTYPE_F32,
        .tokens = tokens,
        .x = test.x,
        .y = test.y,
        .weights_version = version,
        .deadline_ns = MOE_NEVER,
        .done = on_forward_done,
    };
    assert_ok(moe_engine_submit(test.engine, &test.forward));
}

void wait_until(const int *value, int wanted, struct moe_mutex *lock)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    for (;;) {
        moe_mutex_lock(lock);
        int now = *value;
        moe_mutex_unlock(lock);
        if (now >= wanted)
            return;
        if (moe_clock_ns() > limit)
            fail_msg("%d of %d after half a minute", now, wanted);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

void wait_done(int i)
{
    wait_until(&test.clients[i].done, 1, &test.lock);
    assert_int_equal(test.clients[i].done, 1);
}

void hold_steps(bool hold)
{
    moe_mutex_lock(&script.lock);
    script.hold = hold;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
}

struct moe_train_state state_now(void)
{
    struct moe_train_state s;
    moe_train_read_state(test.train, &s);
    return s;
}
