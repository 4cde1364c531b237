/* SPDX-License-Identifier: Apache-2.0 */
#include "scripted_coordinator.h"

#include "base/clock.h"
#include "base/wait.h"
#include "rpc/control.h"
#include "support/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ORDER_OF_ASSIGN = 40 }; /* and the version */

void note(struct journal *j, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    moe_mutex_lock(&j->lock);
    if (j->count < LINES)
        (void)vsnprintf(j->lines[j->count++], LINE, fmt, args);
    pthread_cond_broadcast(&j->changed);
    moe_mutex_unlock(&j->lock);
    va_end(args);
}

void await_line(struct journal *j, const char *want)
{
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    moe_mutex_lock(&j->lock);
    for (bool in_time = true;;) {
        if (j->read < j->count) {
            const char *line = j->lines[j->read++];
            bool found = strncmp(line, want, strlen(want)) == 0;
            if (found)
                break;
            continue;
        }
        if (!in_time) {
            for (size_t i = 0; i < j->count; i++)
                print_message("  %s\n", j->lines[i]);
            fail_msg("\"%s\" never came", want);
        }
        in_time = moe_wait_until(&j->changed, &j->lock, deadline);
    }
    moe_mutex_unlock(&j->lock);
}

void assert_next(struct journal *j, const char *want)
{
    moe_mutex_lock(&j->lock);
    size_t at = j->read;
    moe_mutex_unlock(&j->lock);
    await_line(j, want);
    assert_int_equal(j->read, at + 1);
}

unsigned count_lines(struct journal *j, const char *want)
{
    unsigned found = 0;
    moe_mutex_lock(&j->lock);
    for (size_t i = 0; i < j->count; i++)
        found += strncmp(j->lines[i], want, strlen(want)) == 0;
    moe_mutex_unlock(&j->lock);
    return found;
}

bool has_line(struct journal *j, const char *want)
{
    return count_lines(j, want) > 0;
}

void init_journal(struct journal *j)
{
    *j = (struct journal){.count = 0};
    moe_wait_init(&j->changed);
    moe_mutex_init(&j->lock);
}

void free_journal(struct journal *j)
{
    pthread_cond_destroy(&j->changed);
    moe_mutex_destroy(&j->lock);
}

static void say(struct coordinator *c, Moe__V1__SessionResponse *r);

static void say_trying_again(struct coordinator *c)
{
    Moe__V1__TryingAgain again = MOE__V1__TRYING_AGAIN__INIT;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_TRYING_AGAIN;
    r.trying_again = &again;
    say(c, &r);
}

static void answer_heartbeat(struct coordinator *c, uint64_t sequence)
{
    Moe__V1__HeartbeatAnswer answer = MOE__V1__HEARTBEAT_ANSWER__INIT;
    answer.sequence = sequence;
    char *place = (char *)(uintptr_t) "10.0.0.1:7600";
    answer.places = &place;
    answer.n_places = 1;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_HEARTBEAT_ANSWER;
    r.heartbeat_answer = &answer;
    say(c, &r);
}

static void receive(struct coordinator *c, const Moe__V1__SessionRequest *q)
{
    struct journal *j = &c->received;
    switch (q->body_case) {
    case MOE__V1__SESSION_REQUEST__BODY_REGISTER:
        note(j, "register %s %llu %s wants %u", q->register_->worker_id,
             (unsigned long long)q->register_->incarnation, q->register_->endpoint,
             q->register_->wanted_slot_plus_one);
        if (q->register_->session != NULL)
            note(j, "session %llu with %llx of %u",
                 (unsigned long long)q->register_->session->epoch,
                 (unsigned long long)q->register_->session->together,
                 q->register_->session->max_tokens_per_step);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_HEARTBEAT:
        if (q->heartbeat->epoch != c->last_epoch)
            note(j, "heartbeat %llu", (unsigned long long)q->heartbeat->epoch);
        c->last_epoch = q->heartbeat->epoch;
        if (atomic_load(&c->answers))
            answer_heartbeat(c, q->heartbeat->sequence);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_DIGESTS:
        note(j, "digests %.*s", (int)q->digests->part.len, (const char *)q->digests->part.data);
        if (q->digests->model != 0)
            note(j, "of model %u", q->digests->model);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_MODEL_REPORT: {
        const Moe__V1__ModelReport *m = q->model_report;
        note(j, "model %u step %d order %llu epoch %llu: %zu layers, %s", m->model, (int)m->step,
             (unsigned long long)m->order, (unsigned long long)m->epoch, m->n_layers,
             m->error != NULL ? m->error->reason : m->family);
        break;
    }
    case MOE__V1__SESSION_REQUEST__BODY_MODEL_PROGRESS:
        note(j, "model %u has %llu of %llu", q->model_progress->model,
             (unsigned long long)q->model_progress->loaded_bytes,
             (unsigned long long)q->model_progress->total_bytes);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_LOADED:
        note(j, "loaded %u %s%s", q->loaded->placement_version,
             q->loaded->error != NULL ? q->loaded->error->message : "ok",
             q->loaded->order == ORDER_OF_ASSIGN + q->loaded->placement_version
                 ? ""
                 : " for another order");
        break;
    case MOE__V1__SESSION_REQUEST__BODY_CHECKPOINT_READ:
        note(j, "read %llu %s", (unsigned long long)q->checkpoint_read->order,
             q->checkpoint_read->error != NULL ? q->checkpoint_read->error->message : "ok");
        break;
    case MOE__V1__SESSION_REQUEST__BODY_BLOB:
        note(j, "blob %llu %u %.*s", (unsigned long long)q->blob->epoch, q->blob->round,
             (int)q->blob->data.len, (const char *)q->blob->data.data);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_READY:
        note(j, "ready %llu %s%s", (unsigned long long)q->ready->epoch,
             q->ready->error != NULL ? q->ready->error->reason : "ok",
             q->ready->together != 0 ? ", can mask" : "");
        break;
    case MOE__V1__SESSION_REQUEST__BODY_PEER_LOST:
        note(j, "peer lost %llu %llx", (unsigned long long)q->peer_lost->epoch,
             (unsigned long long)q->peer_lost->slots);
        break;
    case MOE__V1__SESSION_REQUEST__BODY_DRAIN_NOTICE: note(j, "drain notice"); break;
    case MOE__V1__SESSION_REQUEST__BODY_LEAVING: note(j, "leaving"); break;
    case MOE__V1__SESSION_REQUEST__BODY_TRY_AGAIN:
        if (!c->silent)
            say_trying_again(c);
        note(j, "try again");
        break;
    default: note(j, "nonsense"); break;
    }
}

static void session_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct coordinator *c = ctx;
    uint8_t bytes[4096];
    size_t length = 0;
    if (m == NULL)
        return;
    struct moe_status st = moe_rpc_msg_flatten(m, bytes, sizeof bytes, &length);
    moe_rpc_msg_free(m);
    Moe__V1__SessionRequest *q =
        moe_failed(&st) ? NULL : moe__v1__session_request__unpack(NULL, length, bytes);
    if (q == NULL) {
        note(&c->received, "malformed");
    } else {
        receive(c, q);
        moe__v1__session_request__free_unpacked(q, NULL);
    }
    moe_rpc_read_next(call);
}

static void session_started(struct moe_rpc_call *call, void *ctx)
{
    struct coordinator *c = ctx;
    moe_rpc_call_ref(call);
    moe_mutex_lock(&c->lock);
    struct moe_rpc_call *old = c->call;
    c->call = call;
    moe_mutex_unlock(&c->lock);
    if (old != NULL)
        moe_rpc_call_unref(old);
    note(&c->received, "connected");
}

static void session_done(struct moe_rpc_call *call, void *ctx)
{
    struct coordinator *c = ctx;
    moe_mutex_lock(&c->lock);
    bool ours = c->call == call;
    if (ours)
        c->call = NULL;
    moe_mutex_unlock(&c->lock);
    if (ours)
        moe_rpc_call_unref(call);
    note(&c->received, "disconnected");
}

void start_server(struct coordinator *c, const char *listen)
{
    const struct moe_rpc_method method = {
        .path = "/moe.v1.CoordinatorService/Session",
        .kind = MOE_RPC_STREAM,
        .started = session_started,
        .message = session_message,
        .done = session_done,
        .ctx = c,
    };
    const struct moe_rpc_server_config config = {
        .listen = listen,
        .shards = 1,
        .max_message_bytes = 1 << 20,
        .max_reading_bytes = 1 << 20,
        .max_waiting_reads = 4,
        .max_concurrent_streams = 16,
        .methods = &method,
        .method_count = 1,
    };
    assert_ok(moe_rpc_server_start(&config, &c->server));
    (void)snprintf(c->endpoint, sizeof c->endpoint, "127.0.0.1:%u", moe_rpc_server_port(c->server));
}

void stop_server(struct coordinator *c)
{
    moe_rpc_server_drain(c->server, moe_clock_ns());
    moe_rpc_server_stop(c->server);
    c->server = NULL;
}

static void say(struct coordinator *c, Moe__V1__SessionResponse *r)
{
    struct moe_control_out packed;
    assert_ok(moe_control_pack(&r->base, &packed));
    moe_mutex_lock(&c->lock);
    if (c->call != NULL)
        moe_rpc_send(c->call, &packed.out);
    moe_mutex_unlock(&c->lock);
    moe_control_free(&packed);
}

void close_session(struct coordinator *c, struct moe_status why)
{
    moe_mutex_lock(&c->lock);
    if (c->call != NULL && moe_failed(&why))
        moe_rpc_fail(c->call, why);
    else if (c->call != NULL)
        moe_rpc_finish(c->call);
    moe_mutex_unlock(&c->lock);
}

void say_registered(struct coordinator *c)
{
    Moe__V1__Registered registered = MOE__V1__REGISTERED__INIT;
    registered.slot = 1;
    registered.slots = 2;
    registered.lease_ms = 300;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_REGISTERED;
    r.registered = &registered;
    say(c, &r);
}

void say_assign(struct coordinator *c, uint32_t version)
{
    uint32_t copies[EXPERTS] = {1, 1, 1, 1}, slots[EXPERTS] = {0, 0, 1, 1};
    Moe__V1__LayerPlacement layer = MOE__V1__LAYER_PLACEMENT__INIT, *layers[] = {&layer};
    layer.layer = 3;
    layer.copies = copies;
    layer.n_copies = EXPERTS;
    layer.slots = slots;
    layer.n_slots = EXPERTS;
    Moe__V1__Assign assign = MOE__V1__ASSIGN__INIT;
    assign.placement_version = version;
    assign.order = ORDER_OF_ASSIGN + version;
    assign.layers = layers;
    assign.n_layers = 1;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_ASSIGN;
    r.assign = &assign;
    say(c, &r);
}

void say_read_checkpoint(struct coordinator *c, uint64_t order, const char *checkpoint)
{
    Moe__V1__SavedTraining state = MOE__V1__SAVED_TRAINING__INIT;
    state.checkpoint = (char *)(uintptr_t)checkpoint;
    state.calls = 7;
    state.record = 8;
    state.lineage = 9;
    state.weights_version = 10;
    Moe__V1__ReadCheckpoint read = MOE__V1__READ_CHECKPOINT__INIT;
    read.order = order;
    read.state = &state;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_READ_CHECKPOINT;
    r.read_checkpoint = &read;
    say(c, &r);
}

void say_model_order(struct coordinator *c, Moe__V1__ModelStep step, uint64_t order)
{
    uint32_t copies[EXPERTS] = {1, 1, 1, 1}, slots[EXPERTS] = {0, 0, 1, 1};
    Moe__V1__LayerPlacement layer = MOE__V1__LAYER_PLACEMENT__INIT, *layers[] = {&layer};
    layer.copies = copies;
    layer.slots = slots;
    layer.n_copies = layer.n_slots = EXPERTS;
    Moe__V1__ModelOrder o = MOE__V1__MODEL_ORDER__INIT;
    o.model = 5;
    o.step = step;
    o.order = order;
    o.epoch = 4;
    o.name = (char *)(uintptr_t) "second";
    o.directory = (char *)(uintptr_t) "/models/second";
    o.digest = (char *)(uintptr_t) "ab";
    o.if_idle = true;
    o.layers = layers;
    o.n_layers = 1;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_MODEL_ORDER;
    r.model_order = &o;
    say(c, &r);
}

void say_prepare_of(struct coordinator *c, uint64_t epoch, uint64_t incarnation,
                    uint64_t session_epoch)
{
    Moe__V1__Member members[2] = {MOE__V1__MEMBER__INIT, MOE__V1__MEMBER__INIT};
    Moe__V1__Member *pointers[] = {&members[0], &members[1]};
    members[1].slot = 1;
    members[1].incarnation = incarnation;
    members[0].worker_id = members[1].worker_id = (char *)"some worker";
    members[0].endpoint = members[1].endpoint = (char *)"127.0.0.1:9";
    members[0].control_endpoint = members[1].control_endpoint = (char *)"127.0.0.1:9";
    Moe__V1__Prepare prepare = MOE__V1__PREPARE__INIT;
    prepare.epoch = epoch;
    prepare.session_epoch = session_epoch;
    prepare.slots = 2;
    prepare.members = pointers;
    prepare.n_members = 2;
    prepare.placement_version = 1;
    prepare.max_tokens_per_step = 32;
    uint8_t secret[16] = {1, 2, 3};
    prepare.secret.data = secret;
    prepare.secret.len = sizeof secret;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_PREPARE;
    r.prepare = &prepare;
    say(c, &r);
}

void say_prepare(struct coordinator *c, uint64_t epoch, uint64_t incarnation)
{
    say_prepare_of(c, epoch, incarnation, 0);
}

void say_blobs(struct coordinator *c, uint64_t epoch, uint32_t round)
{
    Moe__V1__SlotBlob blob[2] = {MOE__V1__SLOT_BLOB__INIT, MOE__V1__SLOT_BLOB__INIT};
    Moe__V1__SlotBlob *pointers[] = {&blob[0], &blob[1]};
    blob[0].data = (ProtobufCBinaryData){4, (uint8_t *)"zero"};
    blob[1].slot = 1;
    blob[1].data = (ProtobufCBinaryData){4, (uint8_t *)"mine"};
    Moe__V1__Blobs blobs = MOE__V1__BLOBS__INIT;
    blobs.epoch = epoch;
    blobs.round = round;
    blobs.blobs = pointers;
    blobs.n_blobs = 2;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_BLOBS;
    r.blobs = &blobs;
    say(c, &r);
}

void say_commit(struct coordinator *c, uint64_t epoch)
{
    Moe__V1__Commit commit = MOE__V1__COMMIT__INIT;
    commit.epoch = epoch;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_COMMIT;
    r.commit = &commit;
    say(c, &r);
}

void say_abort(struct coordinator *c, uint64_t epoch)
{
    Moe__V1__Abort gone = MOE__V1__ABORT__INIT;
    gone.epoch = epoch;
    gone.reason = (char *)"the script says so";
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_ABORT;
    r.abort = &gone;
    say(c, &r);
}

void say_drain(struct coordinator *c, uint32_t limit_ms, bool experts_move)
{
    Moe__V1__Drain drain = MOE__V1__DRAIN__INIT;
    drain.experts_move = experts_move;
    drain.reason = (char *)"the script says so";
    drain.limit_ms = limit_ms;
    Moe__V1__SessionResponse r = MOE__V1__SESSION_RESPONSE__INIT;
    r.body_case = MOE__V1__SESSION_RESPONSE__BODY_DRAIN;
    r.drain = &drain;
    say(c, &r);
}
