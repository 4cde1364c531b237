/* SPDX-License-Identifier: Apache-2.0 */
#include "access/policy.h"

#include <stdio.h>
#include <string.h>

#define EXPERT   "/moe.v1.ExpertService/"
#define TRAINING "/moe.v1.TrainingService/"
#define ADMIN    "/moe.v1.AdminService/"
#define HEALTH   "/grpc.health.v1.Health/"

enum {
    CALLS = MOE_ROLE_CLIENT | MOE_ROLE_TRAINER | MOE_ROLE_ADMIN,
    READS = CALLS | MOE_ROLE_WORKER | MOE_ROLE_METRICS,
    TRAINS = MOE_ROLE_TRAINER,
    KEEPS = MOE_ROLE_TRAINER | MOE_ROLE_ADMIN, /* checkpoints */
};

static const struct moe_access_policy table[] = {
    {EXPERT "Forward", CALLS, false, false},
    {EXPERT "ForwardStream", CALLS, false, false},
    {EXPERT "GetServerInfo", READS, false, false},
    {EXPERT "GetModel", READS, false, false},
    {EXPERT "OpenRegions", CALLS, false, false},
    {EXPERT "ListRegions", MOE_ROLE_ADMIN, false, false},
    {TRAINING "Backward", TRAINS, false, false},
    {TRAINING "OptimizerStep", TRAINS, false, true},
    {TRAINING "ZeroGrad", TRAINS, false, true},
    {TRAINING "SetFrozen", TRAINS, false, true},
    {TRAINING "GetTrainState", KEEPS, false, false},
    {TRAINING "SaveCheckpoint", KEEPS, false, true},
    {TRAINING "LoadCheckpoint", KEEPS, false, true},
    {TRAINING "ListCheckpoints", KEEPS, false, false},
    {TRAINING "RecoverTraining", KEEPS, false, true},
    {TRAINING "ExportAdapter", KEEPS, false, true},
    {ADMIN "GetStatus", MOE_ROLE_TRAINER | MOE_ROLE_WORKER | MOE_ROLE_ADMIN | MOE_ROLE_METRICS,
     false, false},
    {ADMIN "GetPlacement", MOE_ROLE_ADMIN | MOE_ROLE_METRICS, false, false},
    {ADMIN "DrainWorker", MOE_ROLE_ADMIN, false, true},
    {ADMIN "Scale", MOE_ROLE_ADMIN, false, true},
    {ADMIN "CordonSlot", MOE_ROLE_ADMIN, false, true},
    {ADMIN "Shutdown", MOE_ROLE_ADMIN, false, true},
    {ADMIN "AcceptModel", MOE_ROLE_ADMIN, false, true},
    {ADMIN "LoadModel", MOE_ROLE_ADMIN, false, true},
    {ADMIN "UnloadModel", MOE_ROLE_ADMIN, false, true},
    {ADMIN "Rebalance", MOE_ROLE_ADMIN, false, true},
    {ADMIN "ListModels", MOE_ROLE_TRAINER | MOE_ROLE_WORKER | MOE_ROLE_ADMIN | MOE_ROLE_METRICS,
     false, false},
    {ADMIN "ListEvents", MOE_ROLE_ADMIN | MOE_ROLE_METRICS, false, false},
    {ADMIN "SetLogLevel", MOE_ROLE_ADMIN, false, true},
    {ADMIN "GetMetrics", MOE_ROLE_ADMIN | MOE_ROLE_METRICS, false, false},
    {"/moe.v1.CoordinatorService/Session", MOE_ROLE_WORKER, false, false},
    {"/moe.v1.WorkerService/Sequence", MOE_ROLE_WORKER, false, false},
    /* Probes of a cluster have neither certificate nor token. */
    {HEALTH "Check", READS, true, false},
    {HEALTH "List", READS, true, false},
    {HEALTH "Watch", READS, true, false},
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", READS, false, false},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", READS, false, false},
};

static const char *const names[] = {"client", "trainer", "worker", "admin", "metrics"};
enum { ROLES = sizeof names / sizeof *names };

const struct moe_access_policy *moe_access_policy_at(size_t index)
{
    return index < sizeof table / sizeof *table ? &table[index] : NULL;
}

const struct moe_access_policy *moe_access_policy_find(const char *path)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].path, path) == 0)
            return &table[i];
    return NULL;
}

uint32_t moe_access_role_of(const char *name)
{
    for (size_t i = 0; i < ROLES; i++)
        if (strcmp(names[i], name) == 0)
            return UINT32_C(1) << i;
    return 0;
}

void moe_access_role_names(uint32_t roles, char to[MOE_ROLES_TEXT])
{
    size_t at = 0;
    (void)snprintf(to, MOE_ROLES_TEXT, "no role");
    for (size_t i = 0; i < ROLES; i++) {
        if ((roles >> i & 1) == 0)
            continue;
        int n = snprintf(to + at, MOE_ROLES_TEXT - at, "%s%s", at > 0 ? ", " : "", names[i]);
        at += n > 0 ? (size_t)n : 0;
    }
}
