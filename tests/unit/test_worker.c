/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of whole workers: a real coordinator and real workers of the CPU backend in one process,
 * called over gRPC, compared with a checkpoint's recorded output. */
#include "base/clock.h"
#include "coordinator/service.h"
#include "model/safetensors.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/client.h"
#include "support/check.h"
#include "worker/worker.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORKERS_MAX = 3, WAIT_MS = 30000, LAYER = 0, TOKENS = 37 };

/* ------------------------------------------------------------------------ golden */

static float *golden_x, *golden_y;
static uint32_t hidden;

static float *read_tensor(const struct moe_st_file *f, const char *name)
{
    const struct moe_tensor *t = moe_st_find(f, name);
    assert_non_null(t);
    assert_int_equal(t->dtype, MOE_ST_F32);
    assert_int_equal(t->shape[0], TOKENS);
    hidden = (uint32_t)t->shape[1];
    float *data = malloc(t->bytes);
    assert_non_null(data);
    assert_ok(moe_st_read(f, t, 0, t->bytes, data));
    return data;
}

static int load_golden(void **state)
{
    (void)state;
    struct moe_st_file *f;
    assert_ok(moe_st_open(MOE_GOLDEN_MODEL "/golden.safetensors", &f));
    golden_x = read_tensor(f, "layer0.T37.x");
    golden_y = read_tensor(f, "layer0.T37.y");
    moe_st_close(f);
    return 0;
}

static int free_golden(void **state)
{
    (void)state;
    free(golden_x);
    free(golden_y);
    return 0;
}

/* ------------------------------------------------------------------------- group */

struct member {
    struct moe_worker *worker;
    atomic_int ended; /* 1 + the worker's last status code */
    char id[16];
};

struct scene {
    struct moe_coordinator *coordinator;
    pthread_t thread;
    char endpoint[32];
    uint32_t count;
    struct member members[WORKERS_MAX];
    struct moe_rpc_client *client;
};

static void *run_coordinator(void *arg)
{
    struct moe_status st = moe_coordinator_run(arg);
    (void)st; /* MOE_CANCELLED if the group's shutdown was cut short */
    return NULL;
}

static void on_slot_assigned(void *ctx, uint32_t slot)
{
    (void)ctx;
    (void)slot;
}

static void on_ended(void *ctx, struct moe_status why)
{
    struct member *member = ctx;
    atomic_store(&member->ended, 1 + (int)why.code);
}

static void start_worker(struct scene *s, uint32_t slot)
{
    struct member *member = &s->members[slot];
    atomic_store(&member->ended, 0);
    (void)snprintf(member->id, sizeof member->id, "worker-%u", slot);
    const struct moe_worker_config config = {
        .backend = &moe_backend_cpu,
        .device = {.threads = 1},
        .model = MOE_GOLDEN_MODEL,
        .coordinator = s->endpoint,
        .listen = "127.0.0.1:0",
        .worker_id = member->id,
        .wanted_slot_plus_one = slot + 1,
        .max_message_bytes = 4 << 20,
        .max_bytes_in_flight = 64 << 20,
        .max_tokens_per_request = 1024,
        .max_tokens_per_step = 16, /* 37 tokens take three steps */
        .max_queued_tokens = 4096,
        .wait_budget_ms = 2000,
        .drain_ms = 5000,
        .slot_assigned = on_slot_assigned,
        .ended = on_ended,
        .ctx = member,
    };
    assert_ok(moe_worker_start(&config, &member->worker));
}

static void start_scene(struct scene *s, uint32_t count)
{
    memset(s, 0, sizeof *s);
    s->count = count;
    const struct moe_coordinator_config config = {.listen = "127.0.0.1:0",
                                                  .slots = count,
                                                  .replicas = 1,
                                                  .lease_ms = 5000,
                                                  .form_timeout_ms = 20000};
    assert_ok(moe_coordinator_create(&config, &s->coordinator));
    (void)snprintf(s->endpoint, sizeof s->endpoint, "127.0.0.1:%u",
                   moe_coordinator_port(s->coordinator));
    assert_int_equal(pthread_create(&s->thread, NULL, run_coordinator, s->coordinator), 0);
    assert_ok(moe_rpc_client_create(&s->client));
    for (uint32_t i = 0; i < count; i++)
        start_worker(s, i);
}

static void pause_briefly(uint64_t deadline_ns, const char *what)
{
    if (moe_clock_ns() > deadline_ns)
        fail_msg("%s never came", what);
    nanosleep(&(struct timespec){0, 2000000}, NULL);
}

/* Waits until all workers serve an epoch above `floor`; returns it. */
static uint64_t await_view(struct scene *s, uint64_t floor)
{
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    for (;;) {
        uint64_t least = UINT64_MAX;
        for (uint32_t i = 0; i < s->count; i++) {
            uint64_t epoch = moe_worker_epoch(s->members[i].worker);
            least = epoch < least ? epoch : least;
        }
        if (least > floor)
            return least;
        pause_briefly(deadline, "a view");
    }
}

static void end_scene(struct scene *s)
{
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    moe_coordinator_request_stop(s->coordinator);
    for (uint32_t i = 0; i < s->count; i++) {
        while (atomic_load(&s->members[i].ended) == 0)
            pause_briefly(deadline, "the end of a worker");
        assert_int_equal(atomic_load(&s->members[i].ended), 1 + MOE_OK);
        moe_worker_stop(s->members[i].worker);
    }
    pthread_join(s->thread, NULL);
    moe_coordinator_destroy(s->coordinator);
    moe_rpc_client_destroy(s->client);
}

/* ----------------------------------------------------------------------- requests */

static struct moe_status forward(struct scene *s, uint32_t slot, uint64_t *epoch, double *error)
{
    struct moe_rpc_channel *channel;
    const struct moe_rpc_channel_config config = {.target =
                                                      moe_worker_endpoint(s->members[slot].worker)};
    assert_ok(moe_rpc_channel_open(s->client, &config, &channel));
    Moe__V1__ForwardRequest q = MOE__V1__FORWARD_REQUEST__INIT;
    q.layer = LAYER;
    q.tokens = TOKENS;
    q.hidden = hidden;
    q.dtype = MOE__V1__DATA_TYPE__DATA_TYPE_F32;
    q.x_data = (ProtobufCBinaryData){TOKENS * hidden * sizeof(float), (uint8_t *)golden_x};
    size_t length = moe__v1__forward_request__get_packed_size(&q);
    uint8_t *bytes = malloc(length);
    assert_non_null(bytes);
    const struct moe_rpc_out out = {.head = bytes,
                                    .head_length = moe__v1__forward_request__pack(&q, bytes)};
    const struct moe_rpc_call_options options = {
        .deadline_ns = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS, .wait_for_ready = true};
    struct moe_rpc_msg *reply = NULL;
    struct moe_status st =
        moe_rpc_call_wait(channel, "/moe.v1.ExpertService/Forward", &options, &out, &reply);
    moe_rpc_channel_close(channel);
    free(bytes);
    if (moe_failed(&st))
        return st;

    length = moe_rpc_msg_length(reply);
    bytes = malloc(length);
    assert_non_null(bytes);
    assert_ok(moe_rpc_msg_flatten(reply, bytes, length, &length));
    moe_rpc_msg_free(reply);
    Moe__V1__ForwardResponse *r = moe__v1__forward_response__unpack(NULL, length, bytes);
    free(bytes);
    assert_non_null(r);
    assert_int_equal(r->y_data.len, TOKENS * hidden * sizeof(float));
    double difference = 0, norm = 0;
    for (size_t i = 0; i < (size_t)TOKENS * hidden; i++) {
        float y;
        memcpy(&y, r->y_data.data + i * sizeof y, sizeof y);
        difference += ((double)y - golden_y[i]) * ((double)y - golden_y[i]);
        norm += (double)golden_y[i] * golden_y[i];
    }
    *error = sqrt(difference / norm);
    *epoch = r->epoch;
    moe__v1__forward_response__free_unpacked(r, NULL);
    return moe_ok();
}

static void assert_right(struct scene *s, uint32_t slot, uint64_t want_epoch)
{
    uint64_t epoch = 0;
    double error = 1;
    assert_ok(forward(s, slot, &epoch, &error));
    print_message("slot %u of %u, epoch %llu: error %.1e\n", slot, s->count,
                  (unsigned long long)epoch, error);
    assert_true(error <= 1e-5);
    assert_int_equal(epoch, want_epoch);
}

/* -------------------------------------------------------------------------- tests */

static void one_worker_serves_alone(void **state)
{
    (void)state;
    struct scene s;
    start_scene(&s, 1);
    uint64_t epoch = await_view(&s, 0);
    assert_right(&s, 0, epoch);
    end_scene(&s);
}

static void every_worker_of_a_group_serves_the_whole_layer(void **state)
{
    (void)state;
    struct scene s;
    start_scene(&s, 3);
    uint64_t epoch = await_view(&s, 0);
    for (uint32_t slot = 0; slot < 3; slot++)
        assert_right(&s, slot, epoch);
    end_scene(&s);
}

struct asker {
    struct scene *s;
    uint32_t slot;
    uint64_t epoch;
    unsigned right, wrong;
    pthread_t thread;
};

static void *ask_repeatedly(void *arg)
{
    struct asker *a = arg;
    for (int i = 0; i < 25; i++) {
        uint64_t epoch = 0;
        double error = 1;
        struct moe_status st = forward(a->s, a->slot, &epoch, &error);
        if (!moe_failed(&st) && error <= 1e-5 && epoch == a->epoch)
            a->right++;
        else
            a->wrong++;
    }
    return NULL;
}

static void concurrent_requests_to_all_workers_get_right_answers(void **state)
{
    (void)state;
    struct scene s;
    struct asker askers[6];
    start_scene(&s, 2);
    uint64_t epoch = await_view(&s, 0);
    for (uint32_t i = 0; i < 6; i++) {
        askers[i] = (struct asker){.s = &s, .slot = i % 2, .epoch = epoch};
        assert_int_equal(pthread_create(&askers[i].thread, NULL, ask_repeatedly, &askers[i]), 0);
    }
    unsigned right = 0, wrong = 0;
    for (uint32_t i = 0; i < 6; i++) {
        pthread_join(askers[i].thread, NULL);
        right += askers[i].right;
        wrong += askers[i].wrong;
    }
    print_message("%u right, %u wrong\n", right, wrong);
    assert_int_equal(right, 150);
    assert_int_equal(wrong, 0);
    end_scene(&s);
}

static void a_worker_that_leaves_can_be_replaced(void **state)
{
    (void)state;
    struct scene s;
    start_scene(&s, 2);
    uint64_t epoch = await_view(&s, 0);
    moe_worker_drain(s.members[1].worker, "replaced by the test");
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    while (atomic_load(&s.members[1].ended) == 0)
        pause_briefly(deadline, "the end of the worker");
    assert_int_equal(atomic_load(&s.members[1].ended), 1 + MOE_OK);
    moe_worker_stop(s.members[1].worker);
    while (moe_worker_epoch(s.members[0].worker) != 0)
        pause_briefly(deadline, "the end of the view");
    uint64_t answered = 0;
    double error = 1;
    struct moe_status st = forward(&s, 0, &answered, &error);
    print_message("without slot 1: %s: %s\n", moe_reason_name(st.reason), st.text);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_int_equal(st.reason, MOE_REASON_REFORMING);
    start_worker(&s, 1);
    uint64_t next = await_view(&s, epoch);
    assert_true(next > epoch);
    assert_right(&s, 0, next);
    assert_right(&s, 1, next);
    end_scene(&s);
}

static void a_model_that_cannot_be_opened_starts_no_worker(void **state)
{
    (void)state;
    struct moe_worker_config config = {
        .backend = &moe_backend_cpu,
        .model = "/nonexistent",
        .coordinator = "127.0.0.1:9",
        .listen = "127.0.0.1:0",
        .max_tokens_per_step = 16,
    };
    struct moe_worker *w = NULL;
    struct moe_status st = moe_worker_start(&config, &w);
    print_message("%s: %s\n", moe_code_name(st.code), st.text);
    assert_int_equal(st.code, MOE_NOT_FOUND);
    assert_null(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_worker_serves_alone),
        cmocka_unit_test(every_worker_of_a_group_serves_the_whole_layer),
        cmocka_unit_test(concurrent_requests_to_all_workers_get_right_answers),
        cmocka_unit_test(a_worker_that_leaves_can_be_replaced),
        cmocka_unit_test(a_model_that_cannot_be_opened_starts_no_worker),
    };
    return cmocka_run_group_tests(tests, load_golden, free_golden);
}
