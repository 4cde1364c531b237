/* What the files of the training service share; nobody else includes this. */
#ifndef MOE_WORKER_TRAINING_SERVICE_STATE_H
#define MOE_WORKER_TRAINING_SERVICE_STATE_H

#include "moe/v1/training.pb-c.h"
#include "worker/service_metrics.h"
#include "worker/training_service.h"

#include <pthread.h>

struct moe_training_service {
    struct moe_training_service_config config;
    pthread_mutex_t lock;
    pthread_cond_t idle; /* `listings` has become 0 */
    unsigned listings;   /* under `lock`: threads that read the training root */
};

struct moe_status moe_training_service__out_of_memory(void) MOE_CHECKED;
/* Counts a request that arrived at `received_ns` and is answered with `st`. */
void moe_training_service__count(struct moe_training_service *s, enum moe_service_rpc rpc,
                                 const struct moe_status *st, uint64_t received_ns);
/* Packs and sends the answer of a call without tensors. */
void moe_training_service__reply(struct moe_rpc_call *call, const ProtobufCMessage *answer);

/* Methods that change something and carry no tensors (training_changes.c); their `ctx` is the
 * service. */
enum { MOE_TRAINING_CHANGES = 6 };
void moe_training_service__changes(struct moe_training_service *s,
                                   struct moe_rpc_method out[MOE_TRAINING_CHANGES]);

/* ListCheckpoints (training_listing.c). */
struct moe_rpc_method moe_training_service__listing(struct moe_training_service *s);
/* Waits until no thread of one is left. */
void moe_training_service__end_listings(struct moe_training_service *s);

#endif
