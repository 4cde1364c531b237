/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the training service share; nobody else includes this. */
#ifndef MOE_SERVICE_TRAINING_SERVICE_STATE_H
#define MOE_SERVICE_TRAINING_SERVICE_STATE_H

#include "base/mutex.h"
#include "moe/v1/training.pb-c.h"
#include "service/service_metrics.h"
#include "service/training_service.h"

#include <pthread.h>

/* Methods that change something and carry no tensors (mutations.c). */
enum { MOE_TRAINING_MUTATIONS = 6, MOE_TRAINING_PATH = 64 };
struct moe_training_method {
    struct moe_training_service *service;
    const struct mutation_row *row;
    char path[MOE_TRAINING_PATH];
};

struct moe_training_service {
    struct moe_training_service_config config;
    struct moe_training_method mutations[MOE_TRAINING_MUTATIONS];
    struct moe_mutex lock;
    pthread_cond_t idle;                    /* `listings` has become 0 */
    MOE_GUARDED_BY(lock) unsigned listings; /* threads that read the training root */
};

/* From training_reply.c. */
struct moe_status moe_training_service__out_of_memory(void) MOE_CHECKED;
/* Counts a request that arrived at `received_ns` and is answered with `st`. */
void moe_training_service__count(struct moe_training_service *s, enum moe_service_rpc rpc,
                                 const struct moe_status *st, uint64_t received_ns);
/* Packs and sends the answer of a call without tensors. */
void moe_training_service__reply(struct moe_rpc_call *call, const ProtobufCMessage *answer);

void moe_training_service__mutations(struct moe_training_service *s,
                                     struct moe_rpc_method out[MOE_TRAINING_MUTATIONS]);

/* ListCheckpoints (training_listing.c). */
struct moe_rpc_method moe_training_service__listing(struct moe_training_service *s);
/* Waits until no thread of one is left. */
void moe_training_service__end_listings(struct moe_training_service *s);

#endif
