/* SPDX-License-Identifier: Apache-2.0 */
/* ListCheckpoints: reads the training root on a separate thread. The disk may be slow or hang, and
 * neither the thread of a connection nor the engine waits for it. */
#include "service/training_service_state.h"

#include "base/thread.h"
#include "base/wait.h"

#include <stdlib.h>
#include <string.h>

enum { LISTINGS_MAX = 4, ENTRIES_MAX = 1000, RETRY_MS = 100 };

struct listing {
    struct moe_training_service *service;
    struct moe_rpc_call *call; /* referenced */
    uint32_t limit;
};

/* Memory of one entry of the answer, except the list itself. */
struct entry {
    Moe__V1__CheckpointInfo message;
    char *targets[MOE_TRAINING_TARGETS];
};

static void fill(struct entry *e, struct moe_checkpoint_listed *from)
{
    Moe__V1__CheckpointInfo *m = &e->message;
    moe__v1__checkpoint_info__init(m);
    m->name = from->name;
    m->problem = from->problem;
    m->parent = from->parent;
    m->readable = from->readable;
    m->steps = from->steps;
    m->weights_version = from->weights_version;
    m->lineage = from->lineage;
    m->made_s = from->made_s;
    m->bytes = from->bytes;
    m->optimizer = (Moe__V1__Optimizer)from->optimizer;
    uint32_t frozen = from->frozen | from->never_trained;
    m->router_frozen = (frozen >> MOE_PARAMS_ROUTER & 1) != 0;
    m->experts_frozen = (frozen >> MOE_PARAMS_EXPERTS & 1) != 0;
    m->shared_frozen = (frozen >> MOE_PARAMS_SHARED & 1) != 0;
    m->lora_rank = from->lora_rank;
    m->lora_alpha = from->lora_alpha;
    m->lora_targets = e->targets;
    m->n_lora_targets = moe_training_service__name_targets(from->lora_targets, e->targets);
}

static struct moe_status answer(const struct listing *l, struct moe_checkpoint_listed *list,
                                size_t count)
{
    struct moe_train_state state;
    Moe__V1__ListCheckpointsResponse a;
    size_t shown = count < l->limit ? count : l->limit;
    struct entry *entries = calloc(shown + 1, sizeof *entries);
    Moe__V1__CheckpointInfo **messages = calloc(shown + 1, sizeof(Moe__V1__CheckpointInfo *));
    struct moe_status st = moe_service_out_of_memory();
    if (entries != NULL && messages != NULL) {
        moe_train_read_state(l->service->config.training, &state);
        moe__v1__list_checkpoints_response__init(&a);
        for (size_t i = 0; i < shown; i++) {
            fill(&entries[i], &list[i]);
            messages[i] = &entries[i].message;
        }
        a.checkpoints = messages;
        a.n_checkpoints = shown;
        a.count = (uint32_t)count;
        a.checkpoint = state.checkpoint;
        moe_service_reply(l->call, &a.base);
        st = moe_ok();
    }
    free(entries);
    free(messages);
    return st;
}

static struct moe_status read_and_answer(const struct listing *l)
{
    const struct moe_train_config *config = moe_train_configured(l->service->config.training);
    const struct moe_checkpoint_context context = {
        .root = config->directory, .model = config->model, .config = &config->trainer};
    struct moe_checkpoint_listed *list;
    size_t count;
    MOE_TRY(moe_checkpoint_list(&context, &list, &count));
    struct moe_status st = answer(l, list, count);
    free(list);
    return st;
}

/* ----------------------------------------------------------------------------- threads */

static struct moe_status enter(struct moe_training_service *s)
{
    moe_mutex_lock(&s->lock);
    bool room = s->listings < LISTINGS_MAX;
    s->listings += room;
    moe_mutex_unlock(&s->lock);
    return room ? moe_ok()
                : moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, RETRY_MS,
                                  "%d calls list checkpoints already", LISTINGS_MAX);
}

static void leave(struct moe_training_service *s)
{
    moe_mutex_lock(&s->lock);
    if (--s->listings == 0)
        pthread_cond_signal(&s->idle);
    moe_mutex_unlock(&s->lock);
}

void moe_training_service__end_listings(struct moe_training_service *s)
{
    moe_mutex_lock(&s->lock);
    while (s->listings > 0)
        moe_wait(&s->idle, &s->lock);
    moe_mutex_unlock(&s->lock);
}

static void *run_listing(void *arg)
{
    struct listing *l = arg;
    struct moe_training_service *s = l->service;
    struct moe_status st = read_and_answer(l);
    if (moe_failed(&st))
        moe_rpc_fail(l->call, st);
    moe_rpc_call_unref(l->call);
    free(l);
    leave(s);
    return NULL;
}

static struct moe_status start(struct moe_training_service *s, struct moe_rpc_call *call,
                               uint32_t limit)
{
    pthread_t thread;
    struct listing *l = malloc(sizeof *l);
    if (l == NULL)
        return moe_service_out_of_memory();
    *l = (struct listing){s, call, limit};
    moe_rpc_call_ref(call);
    int rc = moe_thread_create(&thread, "moe-ckpt-list", run_listing, l);
    if (rc == 0) {
        (void)pthread_detach(thread);
        return moe_ok();
    }
    moe_rpc_call_unref(call);
    free(l);
    return moe_thread_failure("moe-ckpt-list", rc);
}

static struct moe_status begin(struct moe_training_service *s, struct moe_rpc_call *call,
                               struct moe_rpc_msg *m)
{
    struct moe_rpc_arena arena;
    void *message;
    MOE_TRY(
        moe_rpc_msg_unpack(m, &moe__v1__list_checkpoints_request__descriptor, &arena, &message));
    const Moe__V1__ListCheckpointsRequest *q = message;
    uint32_t limit = q->limit == 0 || q->limit > ENTRIES_MAX ? ENTRIES_MAX : q->limit;
    if (moe_train_configured(s->config.training)->directory == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the workers were started without --training-dir");
    MOE_TRY(enter(s));
    struct moe_status st = start(s, call, limit);
    if (moe_failed(&st))
        leave(s);
    return st;
}

static void list_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_status st = begin(ctx, call, m);
    moe_rpc_msg_free(m);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
}

struct moe_rpc_method moe_training_service__listing(struct moe_training_service *s)
{
    return (struct moe_rpc_method){.path = "/moe.v1.TrainingService/ListCheckpoints",
                                   .kind = MOE_RPC_UNARY,
                                   .message = list_message,
                                   .ctx = s};
}
