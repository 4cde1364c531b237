/* SPDX-License-Identifier: Apache-2.0 */
/* ListCheckpoints. Its answer grows with the number of checkpoints. */
#include "training.h"

#include "abi.h"
#include "moe/v1/training.pb-c.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

static void take_entry(const Moe__V1__CheckpointInfo *from, struct moe_client_checkpoint_info *to)
{
    *to = (struct moe_client_checkpoint_info){
        .readable = from->readable,
        .steps = from->steps,
        .weights_version = from->weights_version,
        .lineage = from->lineage,
        .made_s = from->made_s,
        .bytes = from->bytes,
        .optimizer = (enum moe_client_optimizer)from->optimizer,
        .frozen = {.router = from->router_frozen,
                   .experts = from->experts_frozen,
                   .shared = from->shared_frozen},
        .lora_rank = from->lora_rank,
        .lora_alpha = from->lora_alpha,
    };
    moe_client_copy_text(to->name, sizeof to->name, from->name);
    moe_client_copy_text(to->parent, sizeof to->parent, from->parent);
    moe_client_copy_text(to->problem, sizeof to->problem, from->problem);
    for (size_t i = 0; i < from->n_lora_targets && i < MOE_CLIENT_LORA_TARGETS_MAX; i++)
        moe_client_copy_text(to->lora_targets[i], sizeof to->lora_targets[i],
                             from->lora_targets[i]);
}

static void write_entry(const Moe__V1__CheckpointInfo *from,
                        struct moe_client_checkpoint_list *list)
{
    struct moe_client_checkpoint_info entry;
    take_entry(from, &entry);
    size_t bytes = list->entry_size < sizeof entry ? list->entry_size : sizeof entry;
    memcpy((char *)list->entries + list->entry_size * list->filled++, &entry, bytes);
}

static struct moe_status check_entry_size(const struct moe_client_checkpoint_list *list)
{
    if (list->capacity == 0 || list->entry_size >= MOE_CLIENT_FIRST_CHECKPOINT_INFO)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                     "moe_client_checkpoint_list: entry_size is %zu, at least %d is needed: set "
                     "entry_size = sizeof entries[0]",
                     list->entry_size, MOE_CLIENT_FIRST_CHECKPOINT_INFO);
}

struct moe_status moe_client_list_checkpoints(struct moe_client *c, uint64_t timeout_ms,
                                              struct moe_client_checkpoint_list *list)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(list, checkpoint_list, CHECKPOINT_LIST));
    MOE_TRY(check_entry_size(list));
    uint8_t head[MOE_CLIENT_TRAINING_HEAD_MAX];
    Moe__V1__ListCheckpointsRequest q = MOE__V1__LIST_CHECKPOINTS_REQUEST__INIT;
    struct moe_client_large_answer large = {.type =
                                                &moe__v1__list_checkpoints_response__descriptor};
    q.limit = list->capacity > 0 ? list->capacity : 1;
    const struct moe_rpc_out out = {
        .head = head, .head_length = moe__v1__list_checkpoints_request__pack(&q, head)};
    const struct moe_client_training_call call = {
        .path = "/moe.v1.TrainingService/ListCheckpoints",
        .request = &out,
        .deadline_ns = moe_client_deadline(c, timeout_ms),
        .read = moe_client_large_answer_read,
        .ctx = &large,
    };
    MOE_TRY(moe_client_training_run(c, &call));
    Moe__V1__ListCheckpointsResponse *a = large.message;
    list->filled = 0;
    list->count = a->count;
    moe_client_copy_text(list->checkpoint, sizeof list->checkpoint, a->checkpoint);
    for (size_t i = 0; i < a->n_checkpoints && i < list->capacity; i++)
        write_entry(a->checkpoints[i], list);
    moe__v1__list_checkpoints_response__free_unpacked(a, NULL);
    return moe_ok();
}
