/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator over real gRPC, with workers that this file plays: a group's whole life,
 * refusals, a restart in the middle, and streams that send rubbish. */
#include "base/clock.h"
#include "coordinator/placement.h"
#include "coordinator/service.h"
#include "model/digest_table.h"
#include "moe/v1/admin.pb-c.h"
#include "moe/v1/coordinator.pb-c.h"
#include "rpc/client.h"
#include "support/check.h"
#include "support/queue.h"
#include "support/random.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 3, LIMIT_S = 20 };

static char directory[] = "/tmp/moe-coordinator-XXXXXX";
static struct moe_coordinator *coordinator;
static pthread_t coordinator_thread;
static struct moe_status coordinator_end;
static struct moe_rpc_client *client;
static struct moe_rpc_channel *channel;

static uint64_t time_limit(void)
{
    return moe_clock_ns() + LIMIT_S * MOE_NS_PER_S;
}

/* ------------------------------------------------------------------ the coordinator */

static void *run_coordinator(void *unused)
{
    (void)unused;
    coordinator_end = moe_coordinator_run(coordinator);
    return NULL;
}

static void start_coordinator(uint32_t slots, uint32_t lease_ms)
{
    struct moe_coordinator_config config = {.listen = "127.0.0.1:0",
                                            .slots = slots,
                                            .replicas = 1,
                                            .lease_ms = lease_ms,
                                            .form_timeout_ms = 10000,
                                            .state_dir = directory,
                                            .metrics_listen = "127.0.0.1:0"};
    assert_ok(moe_coordinator_create(&config, &coordinator));
    assert_int_equal(pthread_create(&coordinator_thread, NULL, run_coordinator, NULL), 0);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_coordinator_port(coordinator));
    struct moe_rpc_channel_config to = {.target = target};
    assert_ok(moe_rpc_channel_open(client, &to, &channel));
}

static void join_coordinator(enum moe_code want)
{
    pthread_join(coordinator_thread, NULL);
    assert_int_equal(coordinator_end.code, want);
    moe_coordinator_destroy(coordinator);
    coordinator = NULL;
    moe_rpc_channel_close(channel);
    channel = NULL;
}

static void quit_coordinator(void)
{
    moe_coordinator_request_stop(coordinator);
    moe_coordinator_request_stop(coordinator);
    pthread_join(coordinator_thread, NULL);
    moe_coordinator_destroy(coordinator);
    coordinator = NULL;
    moe_rpc_channel_close(channel);
    channel = NULL;
}

/* Leaves the log as a crash at this moment would: a coordinator that stops shuts its group down,
 * and writes that too. */
static void crash_coordinator(void)
{
    char path[80];
    uint8_t image[65536];
    snprintf(path, sizeof path, "%s/group.log", directory);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t length = fread(image, 1, sizeof image, f);
    fclose(f);
    quit_coordinator();
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(image, 1, length, f), length);
    assert_int_equal(fclose(f), 0);
}

static int make_directory(void **unused)
{
    (void)unused;
    strcpy(directory + strlen(directory) - 6, "XXXXXX");
    if (mkdtemp(directory) == NULL)
        return -1;
    struct moe_status st = moe_rpc_client_create(&client);
    return st.code == MOE_OK ? 0 : -1;
}

static int remove_directory(void **unused)
{
    (void)unused;
    moe_rpc_client_destroy(client);
    char path[80];
    snprintf(path, sizeof path, "%s/group.log", directory);
    (void)unlink(path);
    snprintf(path, sizeof path, "%s/model.digests", directory);
    (void)unlink(path);
    snprintf(path, sizeof path, "%s/lock", directory);
    (void)unlink(path);
    return rmdir(directory);
}

/* ------------------------------------------------------------------ admin calls */

/* The answer's bytes; the call's end in `*st`. */
static size_t call_admin(const char *path, const ProtobufCMessage *request, uint8_t *bytes,
                         size_t capacity, struct moe_status *st)
{
    uint8_t out[512];
    size_t length = protobuf_c_message_pack(request, out);
    struct moe_rpc_call_options options = {.deadline_ns = time_limit(), .wait_for_ready = true};
    struct moe_rpc_msg *reply = NULL;
    *st = moe_rpc_call_wait(channel, path, &options,
                            &(struct moe_rpc_out){.head = out, .head_length = length}, &reply);
    if (st->code != MOE_OK)
        return 0;
    assert_ok(moe_rpc_msg_flatten(reply, bytes, capacity, &length));
    moe_rpc_msg_free(reply);
    return length;
}

static Moe__V1__GetStatusResponse *get_status(void)
{
    static uint8_t bytes[65536];
    struct moe_status st;
    Moe__V1__GetStatusRequest request = MOE__V1__GET_STATUS_REQUEST__INIT;
    size_t length =
        call_admin("/moe.v1.AdminService/GetStatus", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetStatusResponse *r = moe__v1__get_status_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    return r;
}

static void wait_for_state(Moe__V1__GroupState want)
{
    uint64_t until = time_limit();
    for (;;) {
        Moe__V1__GetStatusResponse *r = get_status();
        bool there = r->state == want;
        if (there || moe_clock_ns() > until)
            print_message("  state %d: epoch %" PRIu64 ", %s\n", r->state, r->epoch, r->reason);
        moe__v1__get_status_response__free_unpacked(r, NULL);
        if (there)
            return;
        assert_true(moe_clock_ns() < until);
        usleep(10000);
    }
}

static struct moe_status drain(uint32_t slot, const char *reason)
{
    uint8_t bytes[64];
    struct moe_status st;
    Moe__V1__DrainWorkerRequest request = MOE__V1__DRAIN_WORKER_REQUEST__INIT;
    request.slot = slot;
    request.reason = (char *)(uintptr_t)reason;
    call_admin("/moe.v1.AdminService/DrainWorker", &request.base, bytes, sizeof bytes, &st);
    return st;
}

/* ------------------------------------------------------------------ workers */

struct worker {
    struct moe_rpc_stream *stream;
    struct queue *inbox;   /* Moe__V1__SessionResponse, then one `the_end` */
    struct moe_status end; /* read after the_end */
    uint32_t id, slot;
    uint64_t incarnation, hash;
    uint64_t heartbeats, answered; /* sequences */
    bool spoilt, silent;           /* has other weights; reports no digests */
    bool other_common;             /* has other routers than the others */
};

static char the_end; /* its address marks the end of a stream in an inbox */

static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct worker *w = ctx;
    uint8_t bytes[8192];
    size_t length;
    struct moe_status st = moe_rpc_msg_flatten(m, bytes, sizeof bytes, &length);
    moe_rpc_msg_free(m);
    Moe__V1__SessionResponse *r =
        st.code == MOE_OK ? moe__v1__session_response__unpack(NULL, length, bytes) : NULL;
    if (r != NULL && !queue_push(w->inbox, r))
        moe__v1__session_response__free_unpacked(r, NULL);
}

static void on_closed(void *ctx, struct moe_status status)
{
    struct worker *w = ctx;
    w->end = status;
    (void)queue_push(w->inbox, &the_end);
}

static void open_stream(struct worker *w)
{
    static const struct moe_rpc_stream_events events = {.message = on_message, .closed = on_closed};
    w->inbox = queue_create(1024);
    struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER, .wait_for_ready = true};
    assert_ok(moe_rpc_stream_open(channel, "/moe.v1.CoordinatorService/Session", &options, &events,
                                  w, &w->stream));
}

static void free_stream(struct worker *w)
{
    moe_rpc_stream_free(w->stream);
    void *item;
    while ((item = queue_pop(w->inbox, 0)) != NULL)
        if (item != &the_end)
            moe__v1__session_response__free_unpacked(item, NULL);
    queue_destroy(w->inbox);
}

/* Ends the worker's stream, as the end of its process does; returns when the coordinator knows. */
static void disconnect(struct worker *w)
{
    uint64_t until = time_limit();
    free_stream(w);
    for (bool connected = true; connected;) {
        assert_true(moe_clock_ns() < until);
        Moe__V1__GetStatusResponse *r = get_status();
        connected = r->workers[w->slot]->connected;
        moe__v1__get_status_response__free_unpacked(r, NULL);
    }
}

static void send_bytes(struct worker *w, const uint8_t *bytes, size_t length)
{
    struct moe_status st =
        moe_rpc_stream_send(w->stream, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    (void)st.code; /* the stream may be over: the thread that waits for `closed` sees why */
}

static void send_request(struct worker *w, const Moe__V1__SessionRequest *m)
{
    uint8_t bytes[MOE_DIGEST_PART_MIN_BYTES + 64];
    send_bytes(w, bytes, moe__v1__session_request__pack(m, bytes));
}

/* The next message that is no answer of a heartbeat, or the end; NULL = none in time. */
static void *next_item(struct worker *w)
{
    for (;;) {
        void *item = queue_pop(w->inbox, time_limit());
        if (item == NULL || item == &the_end)
            return item;
        Moe__V1__SessionResponse *r = item;
        if (r->body_case != MOE__V1__SESSION_RESPONSE__BODY_HEARTBEAT_ANSWER)
            return item;
        w->answered = r->heartbeat_answer->sequence;
        moe__v1__session_response__free_unpacked(r, NULL);
    }
}

/* The next message, which must be of this kind; the caller frees it. Passes over orders about
 * models where another message is awaited: the coordinator repeats them. */
static Moe__V1__SessionResponse *expect(struct worker *w, Moe__V1__SessionResponse__BodyCase want)
{
    void *item = next_item(w);
    while (want != MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER && item != NULL &&
           item != &the_end &&
           ((Moe__V1__SessionResponse *)item)->body_case ==
               MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER) {
        moe__v1__session_response__free_unpacked(item, NULL);
        item = next_item(w);
    }
    if (item == NULL)
        fail_msg("worker %u: no message %d in time", w->id, want);
    if (item == &the_end)
        fail_msg("worker %u: the stream ended: %s", w->id, w->end.text);
    Moe__V1__SessionResponse *r = item;
    if (r->body_case != want)
        fail_msg("worker %u: message %d instead of %d", w->id, r->body_case, want);
    return r;
}

static void expect_and_free(struct worker *w, Moe__V1__SessionResponse__BodyCase want)
{
    moe__v1__session_response__free_unpacked(expect(w, want), NULL);
}

static void expect_end(struct worker *w, enum moe_code code, enum moe_reason reason)
{
    void *item = next_item(w);
    if (item == NULL || item != &the_end)
        fail_msg("worker %u: the stream goes on", w->id);
    print_message("  worker %u: %s %s\n", w->id, moe_code_name(w->end.code), w->end.text);
    assert_int_equal(w->end.code, code);
    assert_int_equal(w->end.reason, reason);
    free_stream(w);
}

/* Settings that a test may spoil. */
struct identity {
    const char *fingerprint, *version, *backend;
    uint32_t layers;
    Moe__V1__ActivationEncoding activations; /* of the first layer's experts */
};
enum { LAYERS = 2 };
static const struct identity honest = {"f00d", "0.2.0", "cpu", LAYERS, 0};

static size_t pack_register(const struct worker *w, const struct identity *as, uint8_t *bytes)
{
    char id[32];
    snprintf(id, sizeof id, "worker-%u", w->id);
    Moe__V1__LayerInfo layers[MOE_PLACEMENT_LAYERS_MAX], *list[MOE_PLACEMENT_LAYERS_MAX];
    for (uint32_t i = 0; i < as->layers; i++) {
        moe__v1__layer_info__init(&layers[i]);
        list[i] = &layers[i];
        layers[i].layer = 1 + i;
        layers[i].routed_activations = i == 0 ? as->activations : 0;
        layers[i].hidden = 64;
        layers[i].experts = 8;
        layers[i].top_k = 2;
        layers[i].intermediate = 32;
    }
    Moe__V1__Register r = MOE__V1__REGISTER__INIT;
    r.worker_id = id;
    uint8_t slot_token[16];
    memset(slot_token, (int)w->incarnation, sizeof slot_token);
    r.incarnation = w->incarnation;
    r.slot_token.data = slot_token;
    r.slot_token.len = sizeof slot_token;
    char endpoint[32];
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 7001 + w->id);
    r.endpoint = endpoint;
    r.control_endpoint = (char *)(uintptr_t) "127.0.0.1:7101";
    r.backend = (char *)(uintptr_t)as->backend;
    r.model = (char *)(uintptr_t) "tiny";
    r.model_fingerprint = (char *)(uintptr_t)as->fingerprint;
    r.family = (char *)(uintptr_t) "mixtral";
    r.version = (char *)(uintptr_t)as->version;
    r.n_layers = as->layers;
    r.layers = list;
    r.max_tokens_per_step = UINT32_C(128) << w->id % 3;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_REGISTER;
    m.register_ = &r;
    return moe__v1__session_request__pack(&m, bytes);
}

static void send_register(struct worker *w, const struct identity *as)
{
    uint8_t bytes[16384];
    open_stream(w);
    send_bytes(w, bytes, pack_register(w, as, bytes));
}

static void join(struct worker *w, uint32_t id, uint64_t incarnation)
{
    *w = (struct worker){.id = id, .incarnation = incarnation};
    send_register(w, &honest);
    Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_REGISTERED);
    w->slot = r->registered->slot;
    moe__v1__session_response__free_unpacked(r, NULL);
}

static void send_heartbeat(struct worker *w, uint64_t epoch)
{
    Moe__V1__Heartbeat h = MOE__V1__HEARTBEAT__INIT;
    h.epoch = epoch;
    h.tokens = 1234;
    h.sequence = ++w->heartbeats;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_HEARTBEAT;
    m.heartbeat = &h;
    send_request(w, &m);
}

static void send_blob(struct worker *w, uint64_t epoch, uint32_t round)
{
    uint32_t data[2] = {w->slot, round};
    Moe__V1__Blob b = MOE__V1__BLOB__INIT;
    b.epoch = epoch;
    b.round = round;
    b.data = (ProtobufCBinaryData){.len = sizeof data, .data = (uint8_t *)data};
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_BLOB;
    m.blob = &b;
    send_request(w, &m);
}

static void send_ready(struct worker *w, uint64_t epoch)
{
    Moe__V1__Ready ready = MOE__V1__READY__INIT;
    ready.epoch = epoch;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_READY;
    m.ready = &ready;
    send_request(w, &m);
}

static void send_try_again(struct worker *w)
{
    Moe__V1__TryAgain again = MOE__V1__TRY_AGAIN__INIT;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_TRY_AGAIN;
    m.try_again = &again;
    send_request(w, &m);
}

static void send_leaving(struct worker *w)
{
    Moe__V1__Leaving leaving = MOE__V1__LEAVING__INIT;
    leaving.reason = (char *)(uintptr_t) "test";
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_LEAVING;
    m.leaving = &leaving;
    send_request(w, &m);
}

/* 8 experts on 3 slots: 3, 3 and 2. */
static void check_assign(const Moe__V1__Assign *a)
{
    assert_int_equal(a->n_layers, 2);
    for (size_t l = 0; l < 2; l++) {
        static const uint32_t want[8] = {0, 0, 0, 1, 1, 1, 2, 2};
        assert_int_equal(a->layers[l]->layer, l + 1);
        assert_int_equal(a->layers[l]->n_copies, 8);
        assert_int_equal(a->layers[l]->n_slots, 8);
        for (size_t e = 0; e < 8; e++) {
            assert_int_equal(a->layers[l]->copies[e], 1);
            assert_int_equal(a->layers[l]->slots[e], want[e]);
        }
    }
}

static void send_digests(struct worker *w, uint32_t model, const uint8_t *part, size_t length)
{
    Moe__V1__Digests digests = MOE__V1__DIGESTS__INIT;
    digests.model = model;
    digests.part = (ProtobufCBinaryData){.len = length, .data = (uint8_t *)(uintptr_t)part};
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_DIGESTS;
    m.digests = &digests;
    send_request(w, &m);
}

/* Bytes that make every unit of the model different; a spoilt worker has others for expert 7. */
static struct moe_digest_unit unit_of(const struct worker *w, uint32_t layer, uint32_t expert)
{
    struct moe_digest_unit unit = {.digest.bytes = {(uint8_t)layer, (uint8_t)expert}};
    unit.digest.bytes[2] = w->spoilt && expert == 7;
    unit.digest.bytes[3] = w->other_common && expert == 200;
    return unit;
}

/* Digests of the common units and of the experts that check_assign wants. */
static void report_digests(struct worker *w, uint32_t model)
{
    static const struct moe_digest_names common = {1, {"gate"}}, expert = {1, {"experts.*.up"}};
    struct moe_digest_table *t;
    assert_ok(moe_digest_table_create(&t));
    for (uint32_t layer = 1; layer <= LAYERS; layer++) {
        assert_ok(moe_digest_table_add_layer(t, layer, 8, &common, &expert));
        struct moe_digest_unit unit = unit_of(w, layer, 200);
        moe_digest_table_set(t, layer, MOE_DIGEST_COMMON, &unit);
        for (uint32_t e = 3 * w->slot; e < 8 && e < 3 * (w->slot + 1); e++) {
            unit = unit_of(w, layer, e);
            moe_digest_table_set(t, layer, e, &unit);
        }
    }
    uint8_t part[MOE_DIGEST_PART_MIN_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length;
    while ((length = moe_digest_table_pack(t, &at, part, sizeof part)) > 0)
        send_digests(w, model, part, length);
    moe_digest_table_destroy(t);
}

static void load(struct worker *w)
{
    Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    check_assign(r->assign);
    if (!w->silent)
        report_digests(w, 0);
    Moe__V1__Loaded loaded = MOE__V1__LOADED__INIT;
    loaded.placement_version = r->assign->placement_version;
    moe__v1__session_response__free_unpacked(r, NULL);
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_LOADED;
    m.loaded = &loaded;
    send_request(w, &m);
}

static void check_prepare(struct worker *w, const Moe__V1__Prepare *p)
{
    assert_int_equal(p->slots, SLOTS);
    assert_int_equal(p->n_members, SLOTS);
    assert_int_equal(p->max_tokens_per_step, 128); /* the smallest of 128, 256, 512 */
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_int_equal(p->members[s]->slot, s);
    assert_true(p->members[w->slot]->incarnation == w->incarnation);
    w->hash = p->placement_hash;
}

/* From PREPARE to COMMIT, with two all-gather rounds; returns the epoch. */
static uint64_t form(struct worker *workers)
{
    uint64_t epoch = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        Moe__V1__SessionResponse *r = expect(&workers[i], MOE__V1__SESSION_RESPONSE__BODY_PREPARE);
        check_prepare(&workers[i], r->prepare);
        assert_true(i == 0 || r->prepare->epoch == epoch);
        assert_true(workers[i].hash == workers[0].hash);
        epoch = r->prepare->epoch;
        moe__v1__session_response__free_unpacked(r, NULL);
    }
    for (uint32_t round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < SLOTS; i++)
            send_blob(&workers[i], epoch, round);
        for (uint32_t i = 0; i < SLOTS; i++) {
            Moe__V1__SessionResponse *r =
                expect(&workers[i], MOE__V1__SESSION_RESPONSE__BODY_BLOBS);
            assert_int_equal(r->blobs->round, round);
            assert_int_equal(r->blobs->n_blobs, SLOTS);
            for (uint32_t s = 0; s < SLOTS; s++) {
                uint32_t want[2] = {s, round};
                assert_int_equal(r->blobs->blobs[s]->slot, s);
                assert_int_equal(r->blobs->blobs[s]->data.len, sizeof want);
                assert_memory_equal(r->blobs->blobs[s]->data.data, want, sizeof want);
            }
            moe__v1__session_response__free_unpacked(r, NULL);
        }
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        send_ready(&workers[i], epoch);
    for (uint32_t i = 0; i < SLOTS; i++) {
        Moe__V1__SessionResponse *r = expect(&workers[i], MOE__V1__SESSION_RESPONSE__BODY_COMMIT);
        assert_true(r->commit->epoch == epoch);
        moe__v1__session_response__free_unpacked(r, NULL);
    }
    return epoch;
}

static uint64_t bring_up(struct worker *workers)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&workers[i], i, 100 + i);
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&workers[i]);
    return form(workers);
}

static void shut_down(struct worker *workers)
{
    uint8_t bytes[64];
    struct moe_status st;
    Moe__V1__ShutdownRequest request = MOE__V1__SHUTDOWN_REQUEST__INIT;
    request.reason = (char *)(uintptr_t) "test over";
    request.limit_ms = 10000;
    call_admin("/moe.v1.AdminService/Shutdown", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    for (uint32_t i = 0; i < SLOTS; i++) {
        Moe__V1__SessionResponse *r = expect(&workers[i], MOE__V1__SESSION_RESPONSE__BODY_DRAIN);
        assert_string_equal(r->drain->reason, "test over");
        assert_int_equal(r->drain->limit_ms, 10000);
        moe__v1__session_response__free_unpacked(r, NULL);
    }
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_DRAINING);
    for (uint32_t i = 0; i < SLOTS; i++)
        send_leaving(&workers[i]);
    for (uint32_t i = 0; i < SLOTS; i++) /* not before the last one has reported that it leaves */
        expect_end(&workers[i], MOE_OK, MOE_REASON_NONE);
    join_coordinator(MOE_OK);
}

/* ------------------------------------------------------------------ tests */

static void check_serving(uint64_t epoch)
{
    Moe__V1__GetStatusResponse *r = get_status();
    assert_int_equal(r->state, MOE__V1__GROUP_STATE__GROUP_STATE_SERVING);
    assert_true(r->epoch == epoch);
    assert_int_equal(r->slots, SLOTS);
    assert_int_equal(r->n_workers, SLOTS);
    assert_string_equal(r->model, "tiny");
    assert_string_equal(r->family, "mixtral");
    assert_string_equal(r->backend, "cpu");
    assert_string_equal(r->version, "0.2.0");
    assert_int_equal(r->n_layers, 2);
    assert_int_equal(r->layers[1]->experts, 8);
    for (uint32_t s = 0; s < SLOTS; s++) {
        assert_int_equal(r->workers[s]->slot, s);
        assert_int_equal(r->workers[s]->state, MOE__V1__WORKER_STATE__WORKER_STATE_SERVING);
        assert_true(r->workers[s]->lease_remaining_ms > 0);
    }
    moe__v1__get_status_response__free_unpacked(r, NULL);
}

static void check_placement(void)
{
    uint8_t bytes[1024];
    struct moe_status st;
    Moe__V1__GetPlacementRequest request = MOE__V1__GET_PLACEMENT_REQUEST__INIT;
    request.layer = 2;
    size_t length =
        call_admin("/moe.v1.AdminService/GetPlacement", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetPlacementResponse *r = moe__v1__get_placement_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_int_equal(r->n_experts, 8);
    assert_int_equal(r->experts[7]->n_slots, 1);
    assert_int_equal(r->experts[7]->slots[0], 2);
    moe__v1__get_placement_response__free_unpacked(r, NULL);
    request.layer = 3;
    call_admin("/moe.v1.AdminService/GetPlacement", &request.base, bytes, sizeof bytes, &st);
    assert_int_equal(st.code, MOE_NOT_FOUND);
    assert_int_equal(st.reason, MOE_REASON_LAYER_NOT_FOUND);
}

/* The events after `after` are of these kinds, the last one about `slot`. */
static void check_events(uint64_t after, const Moe__V1__EventKind *kinds, size_t count,
                         int32_t slot)
{
    uint8_t bytes[8192];
    struct moe_status st;
    Moe__V1__ListEventsRequest request = MOE__V1__LIST_EVENTS_REQUEST__INIT;
    request.after = after;
    size_t length =
        call_admin("/moe.v1.AdminService/ListEvents", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__ListEventsResponse *r = moe__v1__list_events_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_int_equal(r->n_events, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(r->events[i]->kind, kinds[i]);
        assert_int_equal(r->events[i]->sequence, after + i + 1);
        assert_true(r->events[i]->unix_ms >= r->started_unix_ms);
    }
    assert_int_equal(r->events[count - 1]->slot, slot);
    moe__v1__list_events_response__free_unpacked(r, NULL);
}

/* GetMetrics has the page of the HTTP endpoint. */
static void check_answered_metrics(const char *want)
{
    static uint8_t bytes[65536];
    struct moe_status st;
    Moe__V1__GetMetricsRequest request = MOE__V1__GET_METRICS_REQUEST__INIT;
    size_t length =
        call_admin("/moe.v1.AdminService/GetMetrics", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetMetricsResponse *r = moe__v1__get_metrics_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_non_null(strstr(r->text, want));
    moe__v1__get_metrics_response__free_unpacked(r, NULL);
}

static void check_metrics(const char *want)
{
    char text[16384] = "";
    size_t length = 0;
    ssize_t n;
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(moe_coordinator_metrics_port(coordinator)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    static const char request[] = "GET /metrics HTTP/1.0\r\n\r\n";
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(write(fd, request, sizeof request - 1), sizeof request - 1);
    while ((n = read(fd, text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)n;
    close(fd);
    text[length] = '\0';
    if (strstr(text, want) == NULL)
        fail_msg("no '%s' in the metrics:\n%s", want, text);
}

static void a_group_lives_from_register_to_shutdown(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_WAITING);
    assert_int_equal(bring_up(w), 1);
    check_serving(1);
    check_placement();
    const Moe__V1__EventKind formed[] = {MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_PREPARING,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_SERVING};
    check_events(0, formed, 5, -1);
    check_metrics("\nmoe_group_epoch 1\n");
    check_answered_metrics("\nmoe_group_epoch 1\n");
    check_metrics("\nmoe_group_state{state=\"serving\"} 1\n");
    check_metrics("\nmoe_group_slots 3\n");
    check_metrics("\nmoe_group_recovery_seconds_count 0\n"); /* there was nothing to recover */
    send_try_again(&w[1]); /* no attempt is possible, and the request is answered */
    expect_and_free(&w[1], MOE__V1__SESSION_RESPONSE__BODY_TRYING_AGAIN);

    assert_int_equal(drain(1, "").code, MOE_INVALID_ARGUMENT);
    assert_int_equal(drain(9, "because").code, MOE_NOT_FOUND);
    assert_ok(drain(1, "because"));
    assert_ok(drain(1, "because")); /* repeating it changes nothing */
    expect_and_free(&w[1], MOE__V1__SESSION_RESPONSE__BODY_DRAIN);
    send_leaving(&w[1]);
    expect_end(&w[1], MOE_OK, MOE_REASON_NONE);
    expect_and_free(&w[0], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
    expect_and_free(&w[2], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_DEGRADED);
    const Moe__V1__EventKind left[] = {MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_DRAINING,
                                       MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_LEFT,
                                       MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_ENDED};
    check_events(5, left, 3, -1);

    join(&w[1], 1, 555); /* another process takes the slot */
    assert_int_equal(w[1].slot, 1);
    load(&w[1]);
    assert_int_equal(form(w), 2);
    check_serving(2);
    check_metrics("\nmoe_group_reforms_total{reason=\"left\"} 1\n");
    check_metrics("\nmoe_group_recovery_seconds_count 1\n");
    shut_down(w);
}

static void workers_that_do_not_fit_are_refused(void **unused)
{
    (void)unused;
    static const struct identity other_model = {"beef", "0.2.0", "cpu", LAYERS, 0},
                                 other_backend = {"f00d", "0.2.0", "cuda", LAYERS, 0},
                                 other_release = {"f00d", "99.0.0", "cpu", LAYERS, 0},
                                 other_arithmetic = {
                                     "f00d", "0.2.0", "cpu", LAYERS,
                                     MOE__V1__ACTIVATION_ENCODING__ACTIVATION_ENCODING_F8E4M3};
    struct worker w[SLOTS], x = {.id = 7, .incarnation = 1};
    start_coordinator(SLOTS, 60000);
    for (uint32_t i = 0; i < 2; i++)
        join(&w[i], i, 100 + i);
    send_register(&x, &other_model);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_backend);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_release);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_arithmetic);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    open_stream(&x);
    send_heartbeat(&x, 0);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_NONE);
    x.incarnation = 0;
    send_register(&x, &honest);
    expect_end(&x, MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    x.incarnation = 1;

    join(&w[2], 2, 102);
    send_register(&x, &honest);
    expect_end(&x, MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN);
    /* A new process of worker 2 replaces the old one when that is gone, and a late message of the
     * old one has no effect. */
    struct worker successor = {.id = 2, .incarnation = 202};
    send_register(&successor, &honest);
    expect_end(&successor, MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN);
    disconnect(&w[2]);
    join(&successor, 2, 202);
    assert_int_equal(successor.slot, w[2].slot);
    send_register(&w[2], &honest);
    expect_end(&w[2], MOE_ABORTED, MOE_REASON_STALE_EPOCH);
    w[2] = successor;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    form(w);
    shut_down(w);
}

static void a_model_may_have_as_many_layers_as_the_limit_says(void **unused)
{
    (void)unused;
    static const struct identity deep = {"deep", "0.2.0", "cpu", MOE_PLACEMENT_LAYERS_MAX, 0};
    struct worker w = {.id = 1, .incarnation = 1};
    start_coordinator(1, 60000);
    send_register(&w, &deep);
    expect_and_free(&w, MOE__V1__SESSION_RESPONSE__BODY_REGISTERED);
    Moe__V1__SessionResponse *r = expect(&w, MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    print_message("  %zu layers assigned\n", r->assign->n_layers);
    assert_int_equal(r->assign->n_layers, MOE_PLACEMENT_LAYERS_MAX);
    moe__v1__session_response__free_unpacked(r, NULL);
    quit_coordinator();
    expect_and_free(&w, MOE__V1__SESSION_RESPONSE__BODY_DRAIN);
    expect_end(&w, MOE_UNAVAILABLE, MOE_REASON_DRAINING);
}

static void a_lost_lease_ends_the_view(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 1000);
    bring_up(w);
    crash_coordinator();
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    uint64_t restarted_ns = moe_clock_ns();
    start_coordinator(SLOTS, 300); /* no worker comes back within the lease */
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_DEGRADED);
    /* They may still count on the longer lease that they got before the restart. */
    assert_true(moe_clock_ns() - restarted_ns >= 1000 * MOE_NS_PER_MS);
    quit_coordinator();
}

static void a_restarted_coordinator_goes_on_under_the_same_epoch(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    uint64_t epoch = bring_up(w);
    crash_coordinator();
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    start_coordinator(SLOTS, 60000);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_WAITING);
    for (uint32_t i = SLOTS; i-- > 0;) { /* in another order, and each in its slot again */
        join(&w[i], i, 100 + i);
        assert_int_equal(w[i].slot, i);
        send_heartbeat(&w[i], epoch);
    }
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_SERVING);
    check_serving(epoch);
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]); /* ASSIGN, and no PREPARE after it */
    shut_down(w);
}

static size_t digest_length(void)
{
    Moe__V1__GetStatusResponse *r = get_status();
    size_t length = strlen(r->model_digest);
    moe__v1__get_status_response__free_unpacked(r, NULL);
    return length;
}

static struct moe_status accept_model(const char *reason, size_t *forgotten)
{
    uint8_t bytes[128];
    struct moe_status st;
    Moe__V1__AcceptModelRequest request = MOE__V1__ACCEPT_MODEL_REQUEST__INIT;
    request.reason = (char *)(uintptr_t)reason;
    size_t length =
        call_admin("/moe.v1.AdminService/AcceptModel", &request.base, bytes, sizeof bytes, &st);
    if (st.code != MOE_OK)
        return st;
    Moe__V1__AcceptModelResponse *r = moe__v1__accept_model_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    *forgotten = strlen(r->forgotten);
    moe__v1__accept_model_response__free_unpacked(r, NULL);
    return st;
}

/* Worker 2 leaves, and one with other bytes comes in its place. */
static void refuse_successor(struct worker *w, bool spoilt, bool silent)
{
    struct worker other;
    join(&other, 2, w->incarnation + 1);
    other.spoilt = spoilt;
    other.silent = silent;
    load(&other);
    expect_end(&other, MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);
    if (spoilt)
        assert_non_null(strstr(other.end.text, "experts.7.up"));
    *w = other;
}

static void lose_worker(struct worker *w, uint32_t which)
{
    send_leaving(&w[which]);
    expect_end(&w[which], MOE_OK, MOE_REASON_NONE);
    for (uint32_t i = 0; i < SLOTS; i++)
        if (i != which)
            expect_and_free(&w[i], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
}

static void a_worker_with_other_weights_is_refused_and_the_rest_goes_on(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    assert_int_equal(digest_length(), 0);
    bring_up(w);
    assert_int_equal(digest_length(), 64);
    lose_worker(w, 2);
    refuse_successor(&w[2], true, false);
    refuse_successor(&w[2], false, true);
    /* No view was harmed. */
    check_metrics("\nmoe_group_reforms_total{reason=\"wrong_weights\"} 0\n");
    join(&w[2], 2, 990);
    send_digests(&w[2], 0, (const uint8_t *)"rubbish", 7);
    expect_and_free(&w[2], MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    expect_end(&w[2], MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    join(&w[2], 2, 991);
    load(&w[2]);
    form(w);
    shut_down(w);
}

static void the_record_survives_a_restart_until_an_operator_accepts_another_model(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    size_t forgotten = 0;
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    assert_int_equal(accept_model("new", &forgotten).code, MOE_FAILED_PRECONDITION);
    shut_down(w);

    start_coordinator(SLOTS, 60000);
    assert_int_equal(digest_length(), 64);
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&w[i], i, 300 + i);
    w[2].spoilt = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    expect_end(&w[2], MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);
    for (uint32_t i = 0; i < 2; i++) {
        send_leaving(&w[i]);
        expect_end(&w[i], MOE_OK, MOE_REASON_NONE);
    }
    assert_int_equal(accept_model("", &forgotten).code, MOE_INVALID_ARGUMENT);
    assert_ok(accept_model("fine-tuned", &forgotten));
    assert_int_equal(forgotten, 64);
    assert_ok(accept_model("fine-tuned", &forgotten));
    assert_int_equal(forgotten, 0);
    assert_int_equal(digest_length(), 0);
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&w[i], i, 400 + i);
    w[2].spoilt = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    form(w);
    shut_down(w);
}

static void a_damaged_record_of_digests_is_a_clear_error(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    char path[80];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    shut_down(w);
    snprintf(path, sizeof path, "%s/model.digests", directory);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, 40, SEEK_SET), 0);
    assert_int_equal(fputc('#', f), '#');
    assert_int_equal(fclose(f), 0);
    struct moe_coordinator_config config = {.listen = "127.0.0.1:0",
                                            .slots = SLOTS,
                                            .replicas = 1,
                                            .lease_ms = 1000,
                                            .form_timeout_ms = 1000,
                                            .state_dir = directory};
    struct moe_status st = moe_coordinator_create(&config, &coordinator);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_DATA_LOSS);
    assert_non_null(strstr(st.text, "model.digests"));
}

/* A packed request of a random kind with random small numbers, and a few bytes changed. */
static size_t rubbish(const struct worker *w, uint8_t *bytes)
{
    size_t length = 0;
    if (random_below(3) == 0) {
        length = pack_register(w, &honest, bytes);
    } else {
        uint32_t parts = random_below(4);
        bytes[0] = (uint8_t)(random_below(12) << 3 | 2);
        length = 2;
        for (uint32_t i = 0; i < parts; i++) {
            bytes[length++] = (uint8_t)(random_below(5) << 3 | (random_below(4) == 0 ? 2 : 0));
            bytes[length++] = (uint8_t)random_below(random_below(2) == 0 ? 4 : 256);
        }
        bytes[1] = (uint8_t)(length - 2);
    }
    for (uint32_t i = random_below(4); i > 0; i--)
        bytes[random_below((uint32_t)length)] ^= (uint8_t)(1 + random_below(255));
    return random_below(8) == 0 ? random_below((uint32_t)length) : length;
}

static void a_silent_stream_ends_soon(void **unused)
{
    (void)unused;
    start_coordinator(SLOTS, 2000);
    struct worker w = {.id = 1, .incarnation = 1};
    uint64_t began = moe_clock_ns();
    open_stream(&w);
    assert_ptr_equal(queue_pop(w.inbox, time_limit()), &the_end);
    print_message("  after %.1f s\n", (double)(moe_clock_ns() - began) / (double)MOE_NS_PER_S);
    assert_int_equal(w.end.code, MOE_DEADLINE_EXCEEDED);
    assert_true(moe_clock_ns() - began < 5 * MOE_NS_PER_S);
    free_stream(&w);
    quit_coordinator();
}

/* Takes `channel` and gives a new one with its own connection. */
static struct moe_rpc_channel *swap_channel(struct moe_rpc_channel *with)
{
    struct moe_rpc_channel *before = channel;
    channel = with;
    return before;
}

static void silent_streams_keep_no_worker_out(void **unused)
{
    (void)unused;
    enum { CONNECTIONS = 45, EACH = 7 }; /* more than there are places */
    static struct worker silent[CONNECTIONS][EACH];
    struct moe_rpc_channel *own = NULL, *channels[CONNECTIONS];
    start_coordinator(SLOTS, 5000);
    struct worker first, second;
    join(&first, 1, 1);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_coordinator_port(coordinator));
    struct moe_rpc_channel_config to = {.target = target, .own_connection = true};
    for (int i = 0; i < CONNECTIONS; i++) {
        assert_ok(moe_rpc_channel_open(client, &to, &channels[i]));
        own = swap_channel(channels[i]);
        for (int k = 0; k < EACH; k++) {
            silent[i][k] = (struct worker){.id = 5};
            open_stream(&silent[i][k]);
        }
        (void)swap_channel(own);
    }
    uint64_t began = moe_clock_ns();
    join(&second, 2, 1);
    print_message("  joined after %.0f ms\n", (double)(moe_clock_ns() - began) / 1e6);
    unsigned replaced = 0, too_late = 0;
    for (int i = 0; i < CONNECTIONS; i++) {
        for (int k = 0; k < EACH; k++) {
            assert_ptr_equal(queue_pop(silent[i][k].inbox, time_limit()), &the_end);
            replaced += silent[i][k].end.code == MOE_RESOURCE_EXHAUSTED;
            too_late += silent[i][k].end.code == MOE_DEADLINE_EXCEEDED;
            free_stream(&silent[i][k]);
        }
        moe_rpc_channel_close(channels[i]);
    }
    print_message("  %u made room, %u were silent for too long\n", replaced, too_late);
    assert_int_equal(replaced + too_late, CONNECTIONS * EACH);
    Moe__V1__GetStatusResponse *r = get_status();
    assert_true(r->workers[first.slot]->connected && r->workers[second.slot]->connected);
    moe__v1__get_status_response__free_unpacked(r, NULL);
    free_stream(&first);
    free_stream(&second);
    quit_coordinator();
}

static void a_connection_has_eight_sessions(void **unused)
{
    (void)unused;
    enum { STREAMS = 12, MOST = 8 };
    struct worker w[STREAMS];
    unsigned refused = 0;
    start_coordinator(SLOTS, 2000);
    for (int i = 0; i < STREAMS; i++) {
        w[i] = (struct worker){.id = 1, .incarnation = 1};
        open_stream(&w[i]);
    }
    for (int i = 0; i < STREAMS; i++) {
        assert_ptr_equal(queue_pop(w[i].inbox, time_limit()), &the_end);
        refused += w[i].end.code == MOE_RESOURCE_EXHAUSTED;
        free_stream(&w[i]);
    }
    assert_int_equal(refused, STREAMS - MOST);
    quit_coordinator();
}

static void rubbish_costs_the_stream_and_nothing_else(void **unused)
{
    (void)unused;
    enum { ROUNDS = 200, STREAMS = 8, MESSAGES = 4 };
    start_coordinator(SLOTS, 2000);
    size_t ends[MOE_UNAUTHENTICATED + 1] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        struct worker w[STREAMS];
        for (uint32_t i = 0; i < STREAMS; i++) {
            w[i] =
                (struct worker){.id = 10 + random_below(20), .incarnation = 1 + random_below(1000)};
            if (random_below(2) == 0)
                send_register(&w[i], &honest);
            else
                open_stream(&w[i]);
            for (int k = 0; k < MESSAGES; k++) {
                uint8_t bytes[1024];
                send_bytes(&w[i], bytes, rubbish(&w[i], bytes));
            }
            moe_rpc_stream_close_send(w[i].stream);
        }
        for (uint32_t i = 0; i < STREAMS; i++) {
            void *item;
            while ((item = queue_pop(w[i].inbox, time_limit())) != NULL && item != &the_end)
                moe__v1__session_response__free_unpacked(item, NULL);
            assert_ptr_equal(item, &the_end);
            ends[w[i].end.code]++;
            free_stream(&w[i]);
        }
    }
    print_message("  %d messages; streams ended", ROUNDS * STREAMS * MESSAGES);
    for (size_t code = 0; code <= MOE_UNAUTHENTICATED; code++)
        if (ends[code] > 0)
            print_message(" %s %zu", moe_code_name((enum moe_code)code), ends[code]);
    print_message("\n");
    assert_true(ends[MOE_INVALID_ARGUMENT] > 0 && ends[MOE_UNAVAILABLE] == 0);
    moe__v1__get_status_response__free_unpacked(get_status(), NULL);
    check_metrics("moe_session_malformed_total");
    quit_coordinator();

    start_coordinator(SLOTS, 60000); /* the log is intact after the rubbish, too */
    struct worker w[SLOTS];
    bring_up(w);
    shut_down(w);
}

/* ------------------------------------------------------------------ added models */

/* A call of an operator that waits, on a separate thread. */
struct waiting {
    pthread_t thread;
    const char *path, *from, *name;
    bool dry_run;
    uint64_t limit_ns;
    struct moe_status st;
    uint8_t bytes[16384];
    size_t length;
};

static void *call_and_wait(void *arg)
{
    struct waiting *c = arg;
    uint8_t out[512];
    Moe__V1__LoadModelRequest load_it = MOE__V1__LOAD_MODEL_REQUEST__INIT;
    Moe__V1__UnloadModelRequest unload = MOE__V1__UNLOAD_MODEL_REQUEST__INIT;
    load_it.directory = (char *)(uintptr_t)c->from;
    load_it.name = unload.name = (char *)(uintptr_t)c->name;
    load_it.dry_run = c->dry_run;
    size_t length = protobuf_c_message_pack(c->from[0] != '\0' ? &load_it.base : &unload.base, out);
    struct moe_rpc_call_options options = {.deadline_ns = c->limit_ns, .wait_for_ready = true};
    struct moe_rpc_msg *reply = NULL;
    c->st = moe_rpc_call_wait(channel, c->path, &options,
                              &(struct moe_rpc_out){.head = out, .head_length = length}, &reply);
    if (!moe_failed(&c->st)) {
        c->st = moe_rpc_msg_flatten(reply, c->bytes, sizeof c->bytes, &c->length);
        moe_rpc_msg_free(reply);
    }
    return NULL;
}

static void begin_call(struct waiting *c, const char *path, const char *from, const char *name)
{
    c->path = path;
    c->from = from;
    c->name = name;
    if (c->limit_ns == 0)
        c->limit_ns = time_limit();
    assert_int_equal(pthread_create(&c->thread, NULL, call_and_wait, c), 0);
}

static void begin_load(struct waiting *c, const char *from, const char *name)
{
    begin_call(c, "/moe.v1.AdminService/LoadModel", from, name);
}

static void end_call(struct waiting *c, enum moe_code code, enum moe_reason reason)
{
    pthread_join(c->thread, NULL);
    print_message("  %s %s\n", moe_code_name(c->st.code),
                  moe_failed(&c->st) ? c->st.text : "answered");
    assert_int_equal(c->st.code, code);
    assert_true(code == MOE_OK || c->st.reason == reason);
}

static void fill_layers(Moe__V1__LayerInfo *info, Moe__V1__LayerMemory *memory,
                        Moe__V1__LayerMemory **list)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        moe__v1__layer_info__init(&info[i]);
        moe__v1__layer_memory__init(&memory[i]);
        info[i].layer = 1 + i;
        info[i].hidden = 64;
        info[i].experts = 8;
        info[i].top_k = 2;
        memory[i].info = &info[i];
        memory[i].common_resident_bytes = 10;
        memory[i].expert_resident_bytes = 100;
        list[i] = &memory[i];
    }
}

/* Answers the worker's next order, which must be `step`, and any repeated earlier one. */
static void obey(struct worker *w, Moe__V1__ModelStep step, uint64_t free_bytes)
{
    Moe__V1__LayerInfo info[LAYERS];
    Moe__V1__LayerMemory memory[LAYERS], *list[LAYERS];
    for (;;) {
        Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER);
        const Moe__V1__ModelOrder *order = r->model_order;
        bool wanted = order->step == step;
        if (!wanted && order->step > step)
            fail_msg("worker %u: order %d instead of %d", w->id, order->step, step);
        Moe__V1__ModelReport report = MOE__V1__MODEL_REPORT__INIT;
        report.model = order->model;
        report.step = order->step;
        report.order = order->order;
        report.epoch = order->epoch;
        report.fingerprint = (char *)(uintptr_t) "feed";
        report.family = (char *)(uintptr_t) "mixtral";
        report.free_bytes = free_bytes;
        fill_layers(info, memory, list);
        report.n_layers = LAYERS;
        report.layers = list;
        if (order->step == MOE__V1__MODEL_STEP__MODEL_STEP_LOAD) {
            assert_int_equal(order->n_layers, LAYERS);
            assert_int_equal(order->layers[1]->slots[7], 2);
            report_digests(w, order->model);
        }
        if (order->step == MOE__V1__MODEL_STEP__MODEL_STEP_ADD)
            assert_int_equal(strlen(order->digest), 64);
        Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
        m.body_case = MOE__V1__SESSION_REQUEST__BODY_MODEL_REPORT;
        m.model_report = &report;
        uint8_t bytes[1024];
        send_bytes(w, bytes, moe__v1__session_request__pack(&m, bytes));
        moe__v1__session_response__free_unpacked(r, NULL);
        if (wanted)
            return;
    }
}

static void obey_all(struct worker *w, Moe__V1__ModelStep step)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        obey(&w[i], step, 1000);
}

static const Moe__V1__ModelStep OPEN = MOE__V1__MODEL_STEP__MODEL_STEP_OPEN,
                                LOAD = MOE__V1__MODEL_STEP__MODEL_STEP_LOAD,
                                ADD = MOE__V1__MODEL_STEP__MODEL_STEP_ADD,
                                QUIESCE = MOE__V1__MODEL_STEP__MODEL_STEP_QUIESCE,
                                REMOVE = MOE__V1__MODEL_STEP__MODEL_STEP_REMOVE,
                                CLOSE = MOE__V1__MODEL_STEP__MODEL_STEP_CLOSE;

/* Waits until the group has the default model and, if `name` is not NULL, this one in this state.
 */
static void await_models(const char *name, Moe__V1__ModelState state)
{
    uint8_t bytes[8192];
    struct moe_status st;
    Moe__V1__ListModelsRequest request = MOE__V1__LIST_MODELS_REQUEST__INIT;
    uint64_t until = time_limit();
    for (bool there = false; !there;) {
        assert_true(moe_clock_ns() < until);
        size_t length =
            call_admin("/moe.v1.AdminService/ListModels", &request.base, bytes, sizeof bytes, &st);
        assert_ok(st);
        Moe__V1__ListModelsResponse *r = moe__v1__list_models_response__unpack(NULL, length, bytes);
        assert_non_null(r);
        assert_true(r->models[0]->is_default);
        assert_string_equal(r->models[0]->name, "tiny");
        there = r->n_models == (name != NULL ? 2 : 1);
        if (there && name != NULL) {
            assert_string_equal(r->models[1]->name, name);
            assert_int_equal(r->models[1]->state, state);
            assert_int_equal(r->models[1]->n_layers, LAYERS);
            assert_int_equal(strlen(r->models[1]->digest), 64);
        }
        moe__v1__list_models_response__free_unpacked(r, NULL);
    }
}

static void check_load_answer(const struct waiting *c, Moe__V1__ModelState state)
{
    static const uint64_t resident[SLOTS] = {2 * 310, 2 * 310, 2 * 210};
    Moe__V1__LoadModelResponse *r = moe__v1__load_model_response__unpack(NULL, c->length, c->bytes);
    assert_non_null(r);
    assert_string_equal(r->model->name, c->name);
    assert_int_equal(r->model->state, state);
    assert_int_equal(r->n_slots, SLOTS);
    for (uint32_t s = 0; s < SLOTS; s++) {
        assert_int_equal(r->slots[s]->slot, s);
        assert_int_equal(r->slots[s]->resident_bytes, resident[s]);
        assert_int_equal(r->slots[s]->free_bytes, 1000);
    }
    moe__v1__load_model_response__free_unpacked(r, NULL);
}

static void a_model_comes_and_goes_in_the_running_view(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    struct waiting dry = {.dry_run = true}, loads = {0}, again = {0}, unload = {0};
    begin_load(&dry, "/models/b", "b");
    obey_all(w, OPEN);
    obey_all(w, CLOSE);
    end_call(&dry, MOE_OK, MOE_REASON_NONE);
    check_load_answer(&dry, MOE__V1__MODEL_STATE__MODEL_STATE_PLANNING);
    await_models(NULL, 0);

    begin_load(&loads, "/models/b", "b");
    obey_all(w, OPEN);
    obey_all(w, LOAD);
    obey_all(w, ADD);
    end_call(&loads, MOE_OK, MOE_REASON_NONE);
    check_load_answer(&loads, MOE__V1__MODEL_STATE__MODEL_STATE_SERVING);
    await_models("b", MOE__V1__MODEL_STATE__MODEL_STATE_SERVING);
    check_metrics("\nmoe_group_models{state=\"serving\"} 1\n");
    check_serving(1); /* the same view */
    begin_load(&again, "/models/b", "b");
    end_call(&again, MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID);

    crash_coordinator(); /* the view and the model are in the log */
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    start_coordinator(SLOTS, 60000);
    for (uint32_t i = 0; i < SLOTS; i++) {
        join(&w[i], i, 100 + i);
        send_heartbeat(&w[i], 1);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    obey_all(w, QUIESCE); /* requests are let in again, if they were not */
    obey_all(w, OPEN);
    obey_all(w, LOAD);
    obey_all(w, ADD);
    begin_call(&unload, "/moe.v1.AdminService/UnloadModel", "", "b");
    obey_all(w, QUIESCE);
    obey_all(w, REMOVE);
    obey_all(w, CLOSE);
    end_call(&unload, MOE_OK, MOE_REASON_NONE);
    await_models(NULL, 0);
    shut_down(w);
}

static void a_load_that_fails_anywhere_is_undone_everywhere(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    static const char *const names[][2] = {
        {"models/b", ""}, {"/models/b\n", "b"}, {"/models/..", ""}, {"/", ""}, {"/b", "a b"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct waiting bad = {0};
        begin_load(&bad, names[i][0], names[i][1]);
        pthread_join(bad.thread, NULL);
        assert_int_equal(bad.st.code, MOE_INVALID_ARGUMENT);
    }
    struct waiting small = {0}, spoilt = {0}, left = {0};
    begin_load(&small, "/models/b", "b");
    obey(&w[0], OPEN, 1000);
    obey(&w[1], OPEN, 1000);
    obey(&w[2], OPEN, 419);
    obey_all(w, CLOSE);
    end_call(&small, MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY);
    assert_non_null(strstr(small.st.text, "slot 2: it needs 420 bytes"));

    begin_load(&spoilt, "/models/b", "b");
    obey_all(w, OPEN);
    obey(&w[0], LOAD, 0);
    obey(&w[1], LOAD, 0);
    w[2].other_common = true;
    obey(&w[2], LOAD, 0);
    w[2].other_common = false;
    obey_all(w, CLOSE);
    end_call(&spoilt, MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);

    left.limit_ns = moe_clock_ns() + 3 * MOE_NS_PER_S;
    begin_load(&left, "/models/b", "b");
    obey_all(w, OPEN);
    end_call(&left, MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    obey_all(w, CLOSE); /* LOAD comes before it */
    await_models(NULL, 0);
    check_serving(1);
    shut_down(w);
}

int main(void)
{
    seed_random();
#define SERVICE_TEST(f) cmocka_unit_test_setup_teardown(f, make_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        SERVICE_TEST(a_group_lives_from_register_to_shutdown),
        SERVICE_TEST(workers_that_do_not_fit_are_refused),
        SERVICE_TEST(a_model_may_have_as_many_layers_as_the_limit_says),
        SERVICE_TEST(a_lost_lease_ends_the_view),
        SERVICE_TEST(a_restarted_coordinator_goes_on_under_the_same_epoch),
        SERVICE_TEST(a_worker_with_other_weights_is_refused_and_the_rest_goes_on),
        SERVICE_TEST(the_record_survives_a_restart_until_an_operator_accepts_another_model),
        SERVICE_TEST(a_model_comes_and_goes_in_the_running_view),
        SERVICE_TEST(a_load_that_fails_anywhere_is_undone_everywhere),
        SERVICE_TEST(a_damaged_record_of_digests_is_a_clear_error),
        SERVICE_TEST(a_silent_stream_ends_soon),
        SERVICE_TEST(silent_streams_keep_no_worker_out),
        SERVICE_TEST(a_connection_has_eight_sessions),
        SERVICE_TEST(rubbish_costs_the_stream_and_nothing_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
