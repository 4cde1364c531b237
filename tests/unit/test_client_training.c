/* SPDX-License-Identifier: Apache-2.0 */
/* libmoeclient's training calls against fake workers: what is sent, what is tried again and where,
 * what is made of answers. */
#include "client_fixture.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "moe/client_training.h"
#include "moe/v1/training.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 5, PAIRS = T * FAKE_TOP_K, ROWS = T * FAKE_HIDDEN, CALLS_MAX = 256, WISHES = 4 };

/* What a fake worker does with a training call; the first ones by script, then `good`. */
enum wish {
    GOOD,
    UNAVAILABLE, /* with a pause of 1 ms asked for */
    ELSEWHERE,   /* the answer is on the last worker */
    GONE,        /* RETAINED_PASS_GONE where there is no x */
    LOST,        /* STATE_LOST */
    SHORT_DX,    /* broken answers from here on */
    NO_DX,
    OTHER_TOKENS,
    OTHER_DTYPE,
    NOT_PROTOBUF,
};

/* One worker's side. */
struct side {
    enum wish script[WISHES], then;
    uint32_t calls;
    uint32_t wholes;                   /* Backward calls with x */
    Moe__V1__BackwardRequest backward; /* numbers of the last one */
    bool added;                        /* and whether it was for FAKE_ADDED */
    Moe__V1__OptimizerStepRequest step;
    char name[80];    /* of the last checkpoint */
    char session[80]; /* of the last step */
};

static struct moe_mutex lock = MOE_MUTEX_INITIALIZER;
MOE_GUARDED_BY(lock) static struct side sides[3];

/* What worker `i` has seen. */
static struct side side(int i)
{
    moe_mutex_lock(&lock);
    const struct side seen = sides[i];
    moe_mutex_unlock(&lock);
    return seen;
}

static void set_wish(int i, int call, enum wish w)
{
    moe_mutex_lock(&lock);
    sides[i].script[call] = w;
    moe_mutex_unlock(&lock);
}

/* For calls after those of the script. */
static void set_last_wish(int i, enum wish w)
{
    moe_mutex_lock(&lock);
    sides[i].then = w;
    moe_mutex_unlock(&lock);
}

static enum wish next_wish(struct fake *f) MOE_REQUIRES(lock)
{
    struct side *s = &sides[f->slot];
    enum wish w = s->calls < WISHES ? s->script[s->calls] : s->then;
    s->calls++;
    assert_true(s->calls < CALLS_MAX);
    return w;
}

/* True when the call has been refused. */
static bool refuse(struct moe_rpc_call *call, enum wish w, bool whole)
{
    struct moe_status st;
    switch (w) {
    case UNAVAILABLE:
        st = moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1, "on demand");
        break;
    case ELSEWHERE:
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RECORDED_ELSEWHERE,
                       "the answer is recorded on another worker; ask %s", fakes[2].endpoint);
        break;
    case LOST: st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST, "on demand"); break;
    case GONE:
        if (whole)
            return false;
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RETAINED_PASS_GONE, "on demand");
        break;
    default: return false;
    }
    moe_rpc_fail(call, st);
    return true;
}

/* -------------------------------------------------------------------------- Backward */

/* The parts of a BackwardRequest by field number. */
struct parts {
    void *data[16];
    size_t length[16];
};

static struct moe_status take_part(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct parts *p = ctx;
    *dst = p->data[field] = malloc(length + 1);
    p->length[field] = length;
    return moe_ok();
}

static void reply_backward(struct moe_rpc_call *call, enum wish w, const struct parts *p,
                           const Moe__V1__BackwardRequest *q)
{
    uint8_t head[256];
    Moe__V1__BackwardResponse a = MOE__V1__BACKWARD_RESPONSE__INIT;
    a.epoch = 7;
    a.weights_version = 3;
    a.lineage = 2;
    a.tokens = q->tokens + (w == OTHER_TOKENS);
    a.hidden = q->hidden;
    a.dtype = w == OTHER_DTYPE ? MOE__V1__DATA_TYPE__DATA_TYPE_U8 : q->dtype;
    a.aux_loss = 0.25;
    a.used_retained = p->data[15] == NULL;
    float *dx = calloc(1, p->length[14]), weights[PAIRS];
    for (size_t i = 0; i < p->length[14] / sizeof *dx; i++)
        dx[i] = 3 * ((float *)p->data[14])[i];
    for (size_t i = 0; i < PAIRS; i++)
        weights[i] = (float)i;
    struct moe_rpc_out out = {.head = head,
                              .head_length = moe__v1__backward_response__pack(&a, head)};
    if (w == NOT_PROTOBUF) {
        memcpy(head, "\x08\x05\x0b", 3);
        out.head_length = 3;
    }
    if (q->return_weight_gradients) {
        void *copy = malloc(sizeof weights);
        memcpy(copy, weights, sizeof weights);
        out.parts[out.part_count++] = (struct moe_rpc_part){13, copy, sizeof weights, free, copy};
    }
    if (w == NO_DX)
        free(dx);
    else
        out.parts[out.part_count++] =
            (struct moe_rpc_part){15, dx, p->length[14] - (w == SHORT_DX), free, dx};
    moe_rpc_reply(call, &out);
}

static void on_backward(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    static const uint32_t fields[] = {12, 13, 14, 15};
    struct fake *f = ctx;
    struct side *s = &sides[f->slot];
    struct parts p = {0};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    assert_ok(moe_rpc_msg_split(m, fields, 4, head, &length, take_part, &p));
    moe_rpc_msg_free(m);
    Moe__V1__BackwardRequest *q = moe__v1__backward_request__unpack(NULL, length, head);
    assert_non_null(q);
    moe_mutex_lock(&lock);
    enum wish w = next_wish(f);
    s->backward = *q;
    s->added = strcmp(q->model, FAKE_ADDED) == 0;
    s->wholes += p.data[15] != NULL;
    moe_mutex_unlock(&lock);
    assert_int_equal(p.length[14], (size_t)q->tokens * q->hidden * sizeof(float));
    assert_true(p.data[15] == NULL || p.length[15] == p.length[14]);
    assert_true((p.data[15] != NULL) == (p.data[12] != NULL));
    if (!refuse(call, w, p.data[15] != NULL))
        reply_backward(call, w, &p, q);
    for (int i = 12; i < 16; i++)
        free(p.data[i]);
    moe__v1__backward_request__free_unpacked(q, NULL);
}

/* ----------------------------------------------------------------------- the other calls */

static ProtobufCMessage *read_request(struct moe_rpc_msg *m, const ProtobufCMessageDescriptor *type)
{
    uint8_t bytes[MOE_RPC_HEAD_MAX];
    size_t length;
    assert_ok(moe_rpc_msg_flatten(m, bytes, sizeof bytes, &length));
    moe_rpc_msg_free(m);
    ProtobufCMessage *q = protobuf_c_message_unpack(type, NULL, length, bytes);
    assert_non_null(q);
    return q;
}

static void reply(struct moe_rpc_call *call, const ProtobufCMessage *answer)
{
    uint8_t *bytes = malloc(protobuf_c_message_get_packed_size(answer) + 1);
    assert_non_null(bytes);
    struct moe_rpc_out out = {.head = bytes, .head_length = protobuf_c_message_pack(answer, bytes)};
    moe_rpc_reply(call, &out);
    free(bytes);
}

static enum wish wish_of(struct fake *f)
{
    moe_mutex_lock(&lock);
    enum wish w = next_wish(f);
    moe_mutex_unlock(&lock);
    return w;
}

static void on_step(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct fake *f = ctx;
    Moe__V1__OptimizerStepRequest *q =
        (void *)read_request(m, &moe__v1__optimizer_step_request__descriptor);
    moe_mutex_lock(&lock);
    sides[f->slot].step = *q;
    snprintf(sides[f->slot].session, sizeof sides[f->slot].session, "%s", q->session);
    moe_mutex_unlock(&lock);
    Moe__V1__OptimizerStepResponse a = MOE__V1__OPTIMIZER_STEP_RESPONSE__INIT;
    a.weights_version = q->step_id + 1;
    a.grad_norm = 1.5;
    a.backwards = 4;
    a.steps = 6;
    a.lineage = 2;
    a.repeated = true;
    if (!refuse(call, wish_of(f), true))
        reply(call, &a.base);
    moe__v1__optimizer_step_request__free_unpacked(q, NULL);
}

static void on_save(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct fake *f = ctx;
    Moe__V1__SaveCheckpointRequest *q =
        (void *)read_request(m, &moe__v1__save_checkpoint_request__descriptor);
    moe_mutex_lock(&lock);
    snprintf(sides[f->slot].name, sizeof sides[f->slot].name, "%s %u", q->name, q->keep);
    moe_mutex_unlock(&lock);
    Moe__V1__SaveCheckpointResponse a = MOE__V1__SAVE_CHECKPOINT_RESPONSE__INIT;
    a.weights_version = 9;
    a.lineage = 2;
    a.bytes = 12345;
    char *removed[40]; /* more than a client can name */
    for (a.n_removed = 0; a.n_removed < 40; a.n_removed++)
        removed[a.n_removed] = (char *)(uintptr_t) "old";
    a.removed = removed;
    a.removed_count = 41;
    if (!refuse(call, wish_of(f), true))
        reply(call, &a.base);
    moe__v1__save_checkpoint_request__free_unpacked(q, NULL);
}

/* As many Backward calls as a worker names, with the longest name. */
static void name_lost(Moe__V1__GetTrainStateResponse *a)
{
    static Moe__V1__MicroBatch calls[MOE_CLIENT_LOST_MAX];
    static Moe__V1__MicroBatch *pointers[MOE_CLIENT_LOST_MAX];
    static char longest[MOE_CLIENT_NAME_BYTES], longer[MOE_CLIENT_NAME_BYTES + 1];
    memset(longest, 's', MOE_CLIENT_NAME_MAX);
    memset(longer, 'l', MOE_CLIENT_NAME_BYTES);
    for (uint64_t i = 0; i < MOE_CLIENT_LOST_MAX; i++) {
        moe__v1__micro_batch__init(&calls[i]);
        calls[i].session = i == 1 ? longer : longest;
        calls[i].micro_batch_id = 100 + i;
        pointers[i] = &calls[i];
    }
    a->lost_micro_batches = pointers;
    a->n_lost_micro_batches = MOE_CLIENT_LOST_MAX;
    a->lost_backwards = 2000;
}

static void on_state(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    char *targets[] = {(char *)(uintptr_t) "gate", (char *)(uintptr_t) "a longer word"};
    moe_rpc_msg_free(m);
    Moe__V1__GetTrainStateResponse a = MOE__V1__GET_TRAIN_STATE_RESPONSE__INIT;
    a.lineage = 2;
    a.weights_version = 11;
    a.last_step_id = 40;
    a.optimizer = MOE__V1__OPTIMIZER__OPTIMIZER_SGD;
    a.shared_frozen = true;
    a.lora_targets = targets;
    a.n_lora_targets = 2;
    a.checkpoint = (char *)(uintptr_t) "epoch-1";
    a.unsaved_steps = 3;
    a.saving = (char *)(uintptr_t) "epoch-2";
    a.progress_bytes = 5;
    a.progress_bytes_total = 6;
    a.problem = (char *)(uintptr_t) "epoch-1: damaged";
    name_lost(&a);
    if (!refuse(call, wish_of(ctx), true))
        reply(call, &a.base);
}

static void on_list(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    static char name[] = "epoch-2", parent[] = "epoch-1", other[] = "notes", target[] = "down";
    static char problem[300];
    char *targets[] = {target};
    moe_rpc_msg_free(m);
    memset(problem, 'x', sizeof problem - 1);
    Moe__V1__CheckpointInfo first = MOE__V1__CHECKPOINT_INFO__INIT, second = first;
    Moe__V1__CheckpointInfo *both[] = {&first, &second};
    Moe__V1__ListCheckpointsResponse a = MOE__V1__LIST_CHECKPOINTS_RESPONSE__INIT;
    first.name = name;
    first.parent = parent;
    first.readable = first.experts_frozen = true;
    first.steps = 3;
    first.weights_version = 4;
    first.lineage = 2;
    first.made_s = 1000;
    first.bytes = 12345;
    first.optimizer = MOE__V1__OPTIMIZER__OPTIMIZER_SGD;
    first.lora_rank = 8;
    first.lora_alpha = 16;
    first.lora_targets = targets;
    first.n_lora_targets = 1;
    second.name = other;
    second.problem = problem;
    a.checkpoints = both;
    a.n_checkpoints = 2;
    a.count = 41;
    a.checkpoint = parent;
    if (!refuse(call, wish_of(ctx), true))
        reply(call, &a.base);
}

#define METHOD(name, handler)                                                                      \
    {                                                                                              \
        .path = "/moe.v1.TrainingService/" name, .kind = MOE_RPC_UNARY, .message = handler         \
    }

static int start(void **state)
{
    static const struct moe_rpc_method methods[] = {
        METHOD("Backward", on_backward),    METHOD("OptimizerStep", on_step),
        METHOD("SaveCheckpoint", on_save),  METHOD("GetTrainState", on_state),
        METHOD("ListCheckpoints", on_list),
    };
    (void)state;
    fake_start_with(fakes, FAKES, methods, sizeof methods / sizeof *methods);
    return 0;
}

static int forget(void **state)
{
    (void)state;
    moe_mutex_lock(&lock);
    memset(sides, 0, sizeof sides);
    moe_mutex_unlock(&lock);
    for (int i = 0; i < 3; i++)
        fake_script(&fakes[i], FAKE_GOOD, 0, NULL);
    return 0;
}

/* ----------------------------------------------------------------------------- tests */

static float x[ROWS], dy[ROWS], dx[ROWS], weight_gradients[PAIRS];
static int32_t ids[PAIRS];

static struct moe_client_backward request(void)
{
    for (int i = 0; i < ROWS; i++) {
        x[i] = random_normal();
        dy[i] = random_normal();
        dx[i] = -1;
    }
    return (struct moe_client_backward){.size = sizeof(struct moe_client_backward),
                                        .layer = FAKE_LAYER,
                                        .tokens = T,
                                        .hidden = FAKE_HIDDEN,
                                        .dtype = MOE_DTYPE_F32,
                                        .session = "s",
                                        .micro_batch_id = 1,
                                        .weights_version = 3,
                                        .dy = dy,
                                        .x = x,
                                        .topk_ids = ids,
                                        .dx = dx};
}

static void assert_gradient(void)
{
    for (int i = 0; i < ROWS; i++)
        assert_true(dx[i] == 3 * dy[i]);
}

static struct moe_client *connect_spread(bool spread)
{
    const struct moe_client_config config = {
        .size = sizeof config, .spread = spread, .timeout_ms = 20000};
    return connect_client(fakes, &config);
}

static void gradients_come_back_where_they_belong(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_backward b = request();
    b.weight_gradients = weight_gradients;
    b.aux_coeff = 0.5;
    b.aux_convention = MOE_CLIENT_AUX_TRANSFORMERS;
    b.lineage = 2;
    assert_ok(moe_client_backward(c, &b));
    assert_gradient();
    for (int i = 0; i < PAIRS; i++)
        assert_true(weight_gradients[i] == (float)i);
    assert_true(b.aux_loss == 0.25 && b.answered_lineage == 2 && b.answered_weights_version == 3);
    assert_false(b.used_retained);
    const struct side seen = side(0);
    const Moe__V1__BackwardRequest *q = &seen.backward;
    assert_int_equal(q->micro_batch_id, 1);
    assert_int_equal(q->weights_version, 3);
    assert_int_equal(q->lineage, 2);
    assert_true(q->aux_coeff == 0.5);
    assert_int_equal(q->aux_convention, MOE__V1__AUX_CONVENTION__AUX_CONVENTION_TRANSFORMERS);
    assert_int_equal(q->routing_mode, MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS);
    moe_client_close(c);
}

/* Else its gradients would go to a layer of the default model. */
static void a_backward_names_the_model_of_its_client(void **state)
{
    (void)state;
    const struct moe_client_config with = {.size = sizeof with, .model = FAKE_ADDED};
    struct moe_client *c = connect_client(fakes, &with);
    struct moe_client_backward b = request();
    assert_ok(moe_client_backward(c, &b));
    assert_true(side(0).added);
    moe_client_close(c);
}

static void a_program_of_the_first_release_has_the_first_convention(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_backward b = request();
    b.size = offsetof(struct moe_client_backward, aux_convention);
    b.aux_convention = (enum moe_client_aux_convention)7; /* bytes behind its struct */
    assert_ok(moe_client_backward(c, &b));
    assert_int_equal(side(0).backward.aux_convention,
                     MOE__V1__AUX_CONVENTION__AUX_CONVENTION_UNSPECIFIED);
    moe_client_close(c);
}

static void what_is_unavailable_is_asked_again_until_it_answers(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_backward b = request();
    for (int i = 0; i < WISHES; i++)
        set_wish(0, i, UNAVAILABLE);
    assert_ok(moe_client_backward(c, &b)); /* more tries than a forward gets */
    assert_gradient();
    assert_int_equal(side(0).calls, WISHES + 1);
    moe_client_close(c);
}

static void trying_again_ends_with_the_time(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(true);
    struct moe_client_optimizer_step s = {.size = sizeof s,
                                          .change = {.step_id = 1, .timeout_ms = 1000}};
    for (int i = 0; i < 3; i++) {
        set_last_wish(i, UNAVAILABLE);
        for (int k = 0; k < WISHES; k++)
            set_wish(i, k, UNAVAILABLE);
    }
    struct moe_status st = moe_client_optimizer_step(c, &s);
    if (st.code != MOE_DEADLINE_EXCEEDED) /* the time may end the last attempt itself */
        assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    for (int i = 0; i < 3; i++)
        assert_true(side(i).calls > 0); /* the others were tried, too */
    moe_client_close(c);
}

/* Without a limit, a call goes on while a worker runs it; here none does. */
static void a_call_without_a_limit_gives_up_who_is_not_there(void **state)
{
    (void)state;
    const struct moe_client_config config = {.size = sizeof config, .timeout_ms = 300};
    struct moe_client *c = connect_client(fakes, &config);
    struct moe_client_checkpoint save = {
        .size = sizeof save, .change = {.step_id = 1, .timeout_ms = UINT64_MAX}, .name = "a"};
    set_last_wish(0, UNAVAILABLE);
    for (int k = 0; k < WISHES; k++)
        set_wish(0, k, UNAVAILABLE);
    struct moe_status st = moe_client_save_checkpoint(c, &save);
    assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_true(side(0).calls > 2);
    assert_memory_equal(st.text, fakes[0].endpoint, strlen(fakes[0].endpoint)); /* who it is */
    moe_client_close(c);
}

static void nothing_else_is_tried_again(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(true);
    struct moe_client_backward b = request();
    set_wish(0, 0, LOST);
    assert_refused(moe_client_backward(c, &b), MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST);
    assert_int_equal(side(0).calls + side(1).calls + side(2).calls, 1);
    moe_client_close(c);
}

static void the_worker_that_has_the_answer_is_asked(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false); /* knows the first worker only */
    struct moe_client_backward b = request();
    set_wish(0, 0, ELSEWHERE);
    assert_ok(moe_client_backward(c, &b));
    assert_gradient();
    assert_int_equal(side(0).calls, 1);
    assert_int_equal(side(2).calls, 1);
    moe_client_close(c);
}

/* Worker 0 names worker 2, which is not available. */
static void the_error_names_the_worker_that_was_asked_last(void **state)
{
    struct moe_status st = moe_ok();
    /* A call ends with its time. A busy machine needs more of it to reach worker 2. */
    for (uint64_t limit_ms = 500; limit_ms < 64000; limit_ms *= 2) {
        (void)forget(state);
        struct moe_client *c = connect_spread(false);
        struct moe_client_backward b = request();
        b.timeout_ms = limit_ms;
        for (int i = 0; i < WISHES; i++) {
            set_wish(0, i, ELSEWHERE);
            set_wish(2, i, UNAVAILABLE);
        }
        set_last_wish(0, ELSEWHERE);
        set_last_wish(2, UNAVAILABLE);
        st = moe_client_backward(c, &b);
        moe_client_close(c);
        if (st.code == MOE_UNAVAILABLE && side(2).calls > 0)
            break;
    }
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_true(side(2).calls > 0);
    assert_non_null(strstr(st.text, fakes[2].endpoint));
    assert_null(strstr(st.text, fakes[0].endpoint));
}

static void a_saved_pass_spares_x(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(true);
    struct moe_client_backward b = request();
    b.retained = true;
    assert_ok(moe_client_backward(c, &b));
    assert_gradient();
    assert_true(b.used_retained);
    assert_int_equal(side(0).wholes, 0);

    set_last_wish(0, GONE);
    for (int i = 0; i < WISHES; i++)
        set_wish(0, i, GONE);
    assert_ok(moe_client_backward(c, &b));
    assert_false(b.used_retained);
    assert_int_equal(side(0).wholes, 1);
    b.x = NULL;
    b.topk_ids = NULL;
    assert_refused(moe_client_backward(c, &b), MOE_FAILED_PRECONDITION,
                   MOE_REASON_RETAINED_PASS_GONE);
    assert_int_equal(side(1).calls + side(2).calls, 0);
    moe_client_close(c);
}

static void passes_that_are_kept_go_to_one_worker_whole(void **state)
{
    (void)state;
    struct moe_client_config config = {.size = sizeof config, .spread = true, .spread_tokens = 8};
    struct moe_client *c = connect_client(fakes, &config);
    struct request *r = make_request(200, MOE_DTYPE_F32, false);
    r->f.retain_session = "s";
    r->f.retain_micro_batch_id = 1;
    /* More tries than another pass gets: the Backward after it would wait as long. */
    enum fake_mood first[] = {FAKE_FAIL, FAKE_FAIL, FAKE_FAIL, FAKE_FAIL, FAKE_FAIL};
    fake_script(&fakes[0], FAKE_GOOD, 5, first);
    for (int i = 0; i < 5; i++) {
        assert_ok(moe_client_forward(c, &r->f));
        assert_answer(r);
    }
    assert_int_equal(fake_calls(&fakes[0]), 10);
    assert_int_equal(fake_calls(&fakes[1]) + fake_calls(&fakes[2]), 0);
    r->f.retain_micro_batch_id = 0;
    assert_refused(moe_client_forward(c, &r->f), MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
    r->f.retain_micro_batch_id = 1;
    r->f.retain_session = ".s";
    assert_refused(moe_client_forward(c, &r->f), MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID);
    free_request(r);
    r = make_request(257, MOE_DTYPE_F32, false); /* a step takes 256 */
    r->f.retain_session = "s";
    r->f.retain_micro_batch_id = 1;
    assert_refused(moe_client_forward(c, &r->f), MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT);
    end_call(c, r);
}

static void broken_answers_are_refused(void **state)
{
    (void)state;
    static const struct {
        enum wish wish;
        enum moe_reason reason;
    } cases[] = {{SHORT_DX, MOE_REASON_SHAPE_MISMATCH},
                 {NO_DX, MOE_REASON_MALFORMED},
                 {OTHER_TOKENS, MOE_REASON_SHAPE_MISMATCH},
                 {OTHER_DTYPE, MOE_REASON_SHAPE_MISMATCH},
                 {NOT_PROTOBUF, MOE_REASON_MALFORMED}};
    struct moe_client *c = connect_spread(false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_client_backward b = request();
        forget(NULL);
        set_wish(0, 0, cases[i].wish);
        assert_refused(moe_client_backward(c, &b), MOE_INTERNAL, cases[i].reason);
    }
    moe_client_close(c);
}

static void wrong_arguments_are_not_sent(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
#define WRONG(field, value, want)                                                                  \
    do {                                                                                           \
        struct moe_client_backward b = request();                                                  \
        b.field = value;                                                                           \
        struct moe_status st = moe_client_backward(c, &b);                                         \
        assert_string_equal(moe_reason_name(st.reason), want);                                     \
    } while (0)
    WRONG(layer, 99, "LAYER_NOT_FOUND");
    WRONG(hidden, 3, "SHAPE_MISMATCH");
    WRONG(tokens, 0, "SHAPE_MISMATCH");
    WRONG(tokens, 257, "TOKEN_LIMIT");
    WRONG(dtype, MOE_DTYPE_NONE, "DTYPE_UNSUPPORTED");
    WRONG(session, NULL, "NAME_INVALID");
    WRONG(session, "", "NAME_INVALID");
    WRONG(session, "a b", "NAME_INVALID");
    WRONG(session, "0123456789012345678901234567890123456789012345678901234567890123x",
          "NAME_INVALID");
    WRONG(micro_batch_id, 0, "VALUE_INVALID");
    WRONG(aux_coeff, -1, "VALUE_INVALID");
    WRONG(aux_convention, (enum moe_client_aux_convention)7, "VALUE_INVALID");
    WRONG(dy, NULL, "SHAPE_MISMATCH");
    WRONG(dx, NULL, "SHAPE_MISMATCH");
    WRONG(x, NULL, "ROUTING_INVALID");
    WRONG(topk_ids, NULL, "ROUTING_INVALID");
    ids[3] = FAKE_EXPERTS;
    WRONG(layer, FAKE_LAYER, "EXPERT_INDEX_RANGE");
    ids[3] = 0;
    struct moe_client_optimizer_step s = {.size = sizeof s, .learning_rate = 1};
    assert_refused(moe_client_optimizer_step(c, &s), MOE_INVALID_ARGUMENT,
                   MOE_REASON_VALUE_INVALID);
    struct moe_client_checkpoint p = {.size = sizeof p, .change = {.step_id = 1}, .name = "../x"};
    assert_refused(moe_client_save_checkpoint(c, &p), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NAME_INVALID);
    assert_int_equal(side(0).calls, 0);
    moe_client_close(c);
}

static void changes_carry_their_arguments(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_optimizer_step s = {.size = sizeof s,
                                          .change = {.step_id = 5, .lineage = 2},
                                          .optimizer = MOE_CLIENT_OPTIMIZER_ADAMW,
                                          .learning_rate = 0.125,
                                          .weight_decay = 0.5,
                                          .beta1 = 0.25,
                                          .beta2 = 0.75,
                                          .epsilon = 2,
                                          .momentum = 0.375,
                                          .max_grad_norm = 3,
                                          .grad_scale = 4,
                                          .balance_rate = 6,
                                          .expected_backwards = 7};
    assert_ok(moe_client_optimizer_step(c, &s));
    assert_int_equal(s.weights_version, 6);
    assert_true(s.change.repeated && s.grad_norm == 1.5 && s.backwards == 4 && s.steps == 6);
    struct side seen = side(0);
    const Moe__V1__OptimizerStepRequest *q = &seen.step;
    assert_true(q->learning_rate == 0.125 && q->weight_decay == 0.5 && q->beta1 == 0.25 &&
                q->beta2 == 0.75 && q->epsilon == 2 && q->momentum == 0.375 &&
                q->max_grad_norm == 3 && q->grad_scale == 4 && q->balance_rate == 6);
    assert_int_equal(q->expected_backwards, 7);
    assert_int_equal(q->optimizer, MOE__V1__OPTIMIZER__OPTIMIZER_ADAMW);
    assert_int_equal(q->lineage, 2);
    char own[80];
    strcpy(own, side(0).session); /* not another client's */
    assert_int_equal(strlen(own), strlen("client-0123456789abcdef"));

    s = (struct moe_client_optimizer_step){
        .size = sizeof s, .change = {.step_id = 6}, .learning_rate = 1};
    assert_ok(moe_client_optimizer_step(c, &s)); /* the same session; defaults are the server's */
    seen = side(0);
    assert_string_equal(seen.session, own);
    assert_true(q->beta1_given_case == 0 && q->beta2_given_case == 0 &&
                q->epsilon_given_case == 0 && q->grad_scale_given_case == 0);
    s.zeros = true;
    s.change.session = "mine";
    assert_ok(moe_client_optimizer_step(c, &s));
    seen = side(0);
    assert_string_equal(seen.session, "mine");
    assert_true(q->beta1_given_case != 0 && q->beta1 == 0 && q->beta2_given_case != 0 &&
                q->epsilon_given_case == 0 && q->grad_scale_given_case == 0);
    s.change.session = "not/mine";
    assert_refused(moe_client_optimizer_step(c, &s), MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID);

    struct moe_client_checkpoint p = {
        .size = sizeof p, .change = {.step_id = 6}, .name = "epoch-1", .keep = 3};
    assert_ok(moe_client_save_checkpoint(c, &p));
    assert_string_equal(side(0).name, "epoch-1 3");
    assert_true(p.bytes == 12345 && p.weights_version == 9 && p.answered_lineage == 2);
    assert_int_equal(p.removed_count, 41);
    for (int i = 0; i < MOE_CLIENT_REMOVED_MAX; i++)
        assert_string_equal(p.removed[i], "old");

    struct moe_client_train_state t = {.size = sizeof t};
    assert_ok(moe_client_get_train_state(c, 0, &t));
    assert_true(t.lineage == 2 && t.weights_version == 11 && t.last_step_id == 40);
    assert_int_equal(t.optimizer, MOE_CLIENT_OPTIMIZER_SGD);
    assert_true(t.frozen.shared && !t.frozen.router);
    assert_string_equal(t.checkpoint, "epoch-1");
    assert_string_equal(t.saving, "epoch-2");
    assert_string_equal(t.loading, "");
    assert_true(t.unsaved_steps == 3 && t.progress_bytes == 5 && t.progress_bytes_total == 6);
    assert_string_equal(t.problem, "epoch-1: damaged");
    assert_string_equal(t.lora_targets[0], "gate");
    assert_string_equal(t.lora_targets[1], "a longe"); /* cut, within its place */

    struct moe_client_change zero = {.step_id = 7};
    assert_refused(moe_client_zero_grad(c, &zero, NULL), MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    moe_client_close(c);
}

static void lost_calls_are_named_as_far_as_there_is_room(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    static struct moe_client_micro_batch lost[MOE_CLIENT_LOST_MAX];
    struct moe_client_train_state t = {
        .size = sizeof t, .lost_micro_batches = lost, .lost_capacity = MOE_CLIENT_LOST_MAX};
    set_wish(0, 0, UNAVAILABLE); /* asked again, as the others are */
    assert_ok(moe_client_get_train_state(c, 0, &t));
    assert_true(t.lost_count == MOE_CLIENT_LOST_MAX && t.lost_backwards == 2000);
    assert_true(t.lost_micro_batches == lost && t.lost_capacity == MOE_CLIENT_LOST_MAX);
    for (uint64_t i = 0; i < MOE_CLIENT_LOST_MAX; i++) {
        assert_int_equal(lost[i].micro_batch_id, 100 + i);
        assert_int_equal(strlen(lost[i].session), MOE_CLIENT_NAME_MAX); /* cut, within its place */
    }
    assert_int_equal(lost[0].session[0], 's');
    assert_int_equal(lost[1].session[0], 'l');

    memset(lost, 0xff, sizeof lost);
    t.lost_capacity = 2;
    assert_ok(moe_client_get_train_state(c, 0, &t));
    assert_true(t.lost_count == 2 && t.lost_backwards == 2000 && lost[1].micro_batch_id == 101);
    assert_int_equal((unsigned char)lost[2].session[0], 0xff);

    t.lost_micro_batches = NULL;
    assert_ok(moe_client_get_train_state(c, 0, &t));
    assert_true(t.lost_count == 0 && t.lost_backwards == 2000 && t.lost_capacity == 2);
    moe_client_close(c);
}

/* A program of the first release has no room for the calls, and other memory behind its
 * struct. */
static void a_program_of_the_first_release_gets_what_it_knows(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    const size_t first = offsetof(struct moe_client_train_state, lost_micro_batches);
    struct moe_client_train_state t;
    memset(&t, 0xff, sizeof t);
    t.size = first;
    assert_ok(moe_client_get_train_state(c, 0, &t));
    assert_true(t.size == first && t.lineage == 2);
    assert_string_equal(t.problem, "epoch-1: damaged");
    const unsigned char *behind = (const unsigned char *)&t + first;
    for (size_t i = 0; i < sizeof t - first; i++)
        assert_int_equal(behind[i], 0xff);
    moe_client_close(c);
}

static void checkpoints_are_listed_as_far_as_there_is_room(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_checkpoint_info entries[2];
    memset(entries, 0xff, sizeof entries);
    struct moe_client_checkpoint_list list = {
        .size = sizeof list, .entries = entries, .entry_size = sizeof entries[0], .capacity = 2};
    set_wish(0, 0, UNAVAILABLE); /* asked again, as the others are */
    assert_ok(moe_client_list_checkpoints(c, 0, &list));
    assert_true(list.filled == 2 && list.count == 41);
    assert_string_equal(list.checkpoint, "epoch-1");
    const struct moe_client_checkpoint_info *e = &entries[0];
    assert_string_equal(e->name, "epoch-2");
    assert_string_equal(e->parent, "epoch-1");
    assert_string_equal(e->problem, "");
    assert_true(e->readable && e->steps == 3 && e->weights_version == 4 && e->lineage == 2);
    assert_true(e->made_s == 1000 && e->bytes == 12345 && e->lora_rank == 8 && e->lora_alpha == 16);
    assert_int_equal(e->optimizer, MOE_CLIENT_OPTIMIZER_SGD);
    assert_true(e->frozen.experts && !e->frozen.router && !e->frozen.shared);
    assert_string_equal(e->lora_targets[0], "down");
    assert_string_equal(e->lora_targets[1], "");
    assert_string_equal(entries[1].name, "notes");
    assert_true(!entries[1].readable);
    assert_int_equal(strlen(entries[1].problem), MOE_STATUS_TEXT - 1); /* cut, within its place */

    memset(entries, 0xff, sizeof entries);
    list = (struct moe_client_checkpoint_list){
        .size = sizeof list, .entries = entries, .entry_size = sizeof entries[0], .capacity = 1};
    assert_ok(moe_client_list_checkpoints(c, 0, &list));
    assert_true(list.filled == 1 && list.count == 41);
    assert_int_equal((unsigned char)entries[1].name[0], 0xff);
    moe_client_close(c);
}

/* Structs with a size of 0, with too small entries, and with reserved fields that are set. */
static void structs_without_their_size_are_refused(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct moe_client_backward b = request();
    struct moe_client_optimizer_step s = {.change = {.step_id = 1}};
    struct moe_client_train_state t = {0};
    struct moe_client_checkpoint p = {.change = {.step_id = 1}, .name = "a"};
    struct moe_client_checkpoint_info entry;
    struct moe_client_checkpoint_list list = {.entries = &entry, .capacity = 1};
    struct moe_client_change change = {.step_id = 1, .reserved = {0, 0, 0, 1}};
    b.size = 0;
#define REFUSED(call) assert_refused(call, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID)
    REFUSED(moe_client_backward(c, &b));
    REFUSED(moe_client_optimizer_step(c, &s));
    REFUSED(moe_client_get_train_state(c, 0, &t));
    REFUSED(moe_client_save_checkpoint(c, &p));
    REFUSED(moe_client_load_checkpoint(c, &p));
    REFUSED(moe_client_export_adapter(c, &p));
    REFUSED(moe_client_list_checkpoints(c, 0, &list));
    list.size = sizeof list;
    REFUSED(moe_client_list_checkpoints(c, 0, &list));
    REFUSED(moe_client_zero_grad(c, &change, NULL));
    change.reserved[3] = 0;
    REFUSED(moe_client_set_frozen(c, &change, (struct moe_client_frozen){.reserved = {true}}));
#undef REFUSED
    moe_client_close(c);
}

/* An answer reaches the bytes that the caller has, and entries lie entry_size apart. */
static void larger_structs_of_a_later_program_are_filled(void **state)
{
    (void)state;
    struct moe_client *c = connect_spread(false);
    struct {
        struct moe_client_train_state now;
        uint64_t later[2];
    } t = {.now = {.size = sizeof t}};
    assert_ok(moe_client_get_train_state(c, 0, &t.now));
    assert_true(t.now.size == sizeof t && t.now.lineage != 0 && t.later[0] + t.later[1] == 0);
    struct {
        struct moe_client_checkpoint_info now;
        uint64_t later;
    } entries[2] = {{.later = 7}, {.later = 8}};
    struct moe_client_checkpoint_list list = {.size = sizeof list,
                                              .entries = &entries[0].now,
                                              .entry_size = sizeof entries[0],
                                              .capacity = 2};
    assert_ok(moe_client_list_checkpoints(c, 0, &list));
    assert_int_equal(list.filled, 2);
    assert_string_equal(entries[0].now.name, "epoch-2");
    assert_string_equal(entries[1].now.name, "notes");
    assert_true(entries[0].later == 7 && entries[1].later == 8);
    moe_client_close(c);
}

int main(void)
{
    seed_random();
#define TEST(name) cmocka_unit_test_setup(name, forget)
    const struct CMUnitTest tests[] = {
        TEST(gradients_come_back_where_they_belong),
        TEST(a_backward_names_the_model_of_its_client),
        TEST(a_program_of_the_first_release_has_the_first_convention),
        TEST(what_is_unavailable_is_asked_again_until_it_answers),
        TEST(trying_again_ends_with_the_time),
        TEST(a_call_without_a_limit_gives_up_who_is_not_there),
        TEST(nothing_else_is_tried_again),
        TEST(the_worker_that_has_the_answer_is_asked),
        TEST(the_error_names_the_worker_that_was_asked_last),
        TEST(a_saved_pass_spares_x),
        TEST(passes_that_are_kept_go_to_one_worker_whole),
        TEST(broken_answers_are_refused),
        TEST(wrong_arguments_are_not_sent),
        TEST(structs_without_their_size_are_refused),
        TEST(larger_structs_of_a_later_program_are_filled),
        TEST(changes_carry_their_arguments),
        TEST(lost_calls_are_named_as_far_as_there_is_room),
        TEST(a_program_of_the_first_release_gets_what_it_knows),
        TEST(checkpoints_are_listed_as_far_as_there_is_room),
    };
    return cmocka_run_group_tests(tests, start, stop_fakes);
}
