/* SPDX-License-Identifier: Apache-2.0 */
/* moe.v1.TrainingService: checks requests, makes training calls of them, and sends the answers. It
 * never computes, and never waits (ListCheckpoints reads a disk on separate threads). Only workers
 * that train offer it. */
#ifndef MOE_SERVICE_TRAINING_SERVICE_H
#define MOE_SERVICE_TRAINING_SERVICE_H

#include "service/service.h"
#include "training/training.h"

struct moe_training_service;

enum { MOE_TRAINING_SERVICE_METHODS = 10 };

/* All borrowed. */
struct moe_training_service_config {
    struct moe_service_info info;
    struct moe_service *service; /* knows the view */
    struct moe_engine *engine;
    struct moe_staging *staging;
    struct moe_train *training;
    struct moe_tracer *tracer; /* of the calls with an id; NULL = none */
    /* An operator has chosen the recovery target (RecoverTraining). Any thread; must not block. */
    void (*on_recovery_choice)(void *ctx);
    void *ctx;
};

struct moe_status moe_training_service_create(const struct moe_training_service_config *config,
                                              struct moe_training_service **out) MOE_CHECKED;
/* As moe_service_destroy; waits for listings that still read their disk. */
void moe_training_service_destroy(struct moe_training_service *s);
/* The methods to start the server with; their `ctx` is the service. */
void moe_training_service_methods(struct moe_training_service *s,
                                  struct moe_rpc_method out[MOE_TRAINING_SERVICE_METHODS]);

#endif
