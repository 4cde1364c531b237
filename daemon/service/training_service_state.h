/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the training service share; private to them. */
#ifndef MOE_SERVICE_TRAINING_SERVICE_STATE_H
#define MOE_SERVICE_TRAINING_SERVICE_STATE_H

#include "base/mutex.h"
#include "moe/v1/training.pb-c.h"
#include "service/service_metrics.h"
#include "service/training_request.h"
#include "service/training_service.h"

#include <pthread.h>

/* Methods with an id (training_calls.c). */
enum { MOE_TRAINING_CALLS = 7 };
struct moe_training_method {
    struct moe_training_service *service;
    const struct training_kind *kind;
};

struct moe_training_service {
    struct moe_training_service_config config;
    struct moe_training_method methods[MOE_TRAINING_CALLS];
    struct moe_mutex lock;
    pthread_cond_t idle;                    /* `listings` has become 0 */
    MOE_GUARDED_BY(lock) unsigned listings; /* threads that read the training root */
};

/* From training_service.c. */
/* Names of the matrices in the set `targets`; returns their number. */
enum { MOE_TRAINING_TARGETS = 3 };
size_t moe_training_service__name_targets(uint32_t targets, char *names[MOE_TRAINING_TARGETS]);

void moe_training_service__calls(struct moe_training_service *s,
                                 struct moe_rpc_method out[MOE_TRAINING_CALLS]);

/* Calls without tensors (mutations.c): checks the message of a call of this kind. */
struct moe_status moe_training_service__read_mutation(const struct moe_training_service *s,
                                                      enum moe_step_kind kind,
                                                      struct moe_rpc_msg *m,
                                                      struct moe_train_call *out) MOE_CHECKED;
/* Sends the answer of a call of this kind. */
void moe_training_service__reply_mutation(struct moe_rpc_call *rpc, enum moe_step_kind kind,
                                          const struct moe_train_answer *answer);

/* ListCheckpoints (training_listing.c). */
struct moe_rpc_method moe_training_service__listing(struct moe_training_service *s);
/* Waits until no listing has a thread. */
void moe_training_service__end_listings(struct moe_training_service *s);

#endif
