/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator_workers.h"

#include "base/clock.h"
#include "coordinator/placement.h"
#include "model/digest_table.h"
#include "support/check.h"

#include <stdio.h>
#include <string.h>

char the_end;

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

void open_stream(struct worker *w)
{
    static const struct moe_rpc_stream_events events = {.message = on_message, .closed = on_closed};
    w->inbox = queue_create(1024);
    struct moe_rpc_call_options options = {.deadline_ns = MOE_NEVER, .wait_for_ready = true};
    assert_ok(moe_rpc_stream_open(channel, "/moe.v1.CoordinatorService/Session", &options, &events,
                                  w, &w->stream));
}

void free_stream(struct worker *w)
{
    moe_rpc_stream_free(w->stream);
    void *item;
    while ((item = queue_pop(w->inbox, 0)) != NULL)
        if (item != &the_end)
            moe__v1__session_response__free_unpacked(item, NULL);
    queue_destroy(w->inbox);
}

/* Ends the worker's stream, as the end of its process does; returns when the coordinator knows. */
void disconnect(struct worker *w)
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

void send_bytes(struct worker *w, const uint8_t *bytes, size_t length)
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
void *next_item(struct worker *w)
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
Moe__V1__SessionResponse *expect(struct worker *w, Moe__V1__SessionResponse__BodyCase want)
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

void expect_and_free(struct worker *w, Moe__V1__SessionResponse__BodyCase want)
{
    moe__v1__session_response__free_unpacked(expect(w, want), NULL);
}

void expect_end(struct worker *w, enum moe_code code, enum moe_reason reason)
{
    void *item = next_item(w);
    if (item == NULL || item != &the_end)
        fail_msg("worker %u: the stream goes on", w->id);
    print_message("  worker %u: %s %s\n", w->id, moe_code_name(w->end.code), w->end.text);
    assert_int_equal(w->end.code, code);
    assert_int_equal(w->end.reason, reason);
    free_stream(w);
}

const struct identity honest = {"f00d", "0.2.0", "cpu", LAYERS, 0};

size_t pack_register(const struct worker *w, const struct identity *as, uint8_t *bytes)
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

void send_register(struct worker *w, const struct identity *as)
{
    uint8_t bytes[16384];
    open_stream(w);
    send_bytes(w, bytes, pack_register(w, as, bytes));
}

void join(struct worker *w, uint32_t id, uint64_t incarnation)
{
    *w = (struct worker){.id = id, .incarnation = incarnation};
    send_register(w, &honest);
    Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_REGISTERED);
    w->slot = r->registered->slot;
    moe__v1__session_response__free_unpacked(r, NULL);
}

void send_heartbeat(struct worker *w, uint64_t epoch)
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

void send_try_again(struct worker *w)
{
    Moe__V1__TryAgain again = MOE__V1__TRY_AGAIN__INIT;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_TRY_AGAIN;
    m.try_again = &again;
    send_request(w, &m);
}

void send_leaving(struct worker *w)
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

void send_digests(struct worker *w, uint32_t model, const uint8_t *part, size_t length)
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
void report_digests(struct worker *w, uint32_t model)
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

void send_loaded(struct worker *w, uint32_t version, uint64_t order)
{
    Moe__V1__Loaded loaded = MOE__V1__LOADED__INIT;
    loaded.placement_version = version;
    loaded.order = order;
    Moe__V1__SessionRequest m = MOE__V1__SESSION_REQUEST__INIT;
    m.body_case = MOE__V1__SESSION_REQUEST__BODY_LOADED;
    m.loaded = &loaded;
    send_request(w, &m);
}

void load(struct worker *w)
{
    Moe__V1__SessionResponse *r = expect(w, MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    check_assign(r->assign);
    if (!w->silent)
        report_digests(w, 0);
    send_loaded(w, r->assign->placement_version, r->assign->order);
    moe__v1__session_response__free_unpacked(r, NULL);
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
uint64_t form(struct worker *workers)
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

uint64_t bring_up(struct worker *workers)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&workers[i], i, 100 + i);
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&workers[i]);
    return form(workers);
}

void shut_down(struct worker *workers)
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

void check_serving(uint64_t epoch)
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
