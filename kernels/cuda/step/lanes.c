/* SPDX-License-Identifier: Apache-2.0 */
/* Taking, giving, making and freeing lanes; see lanes.h. */
#include "cuda/step/lanes.h"

#include <stdlib.h>

/* ------------------------------------------------------------- create, destroy */

static size_t most_answer_bytes(const struct moe_session_config *c)
{
    size_t pairs = (size_t)c->max_tokens * c->max_top_k;
    return pairs * (sizeof(int32_t) + sizeof(float)) + c->max_tokens +
           (size_t)3 * MOE_CUDA_LANE_LINE;
}

static struct moe_status create_lane(struct moe_cuda_steps *steps, struct moe_step *lane)
{
    struct moe_device *device = steps->session->device;
    void *p;
    lane->owner = steps;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, sizeof *lane->mail, &p));
    lane->mail = p;
    MOE_TRY(MOE_CUDA(cudaHostGetDevicePointer((void **)&lane->mail_on_device, p, 0)));
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, sizeof *lane->facts, &p));
    lane->facts = p;
    lane->answer_bytes = most_answer_bytes(&steps->session->config);
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, lane->answer_bytes, &p));
    lane->answer = p;
    MOE_TRY(MOE_CUDA(cudaEventCreate(&lane->begun)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&lane->came_in, cudaEventDisableTiming)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&lane->computed, cudaEventDisableTiming)));
    MOE_TRY(MOE_CUDA(cudaEventCreate(&lane->left)));
    return moe_ok();
}

static struct moe_status create_beside(struct moe_cuda_steps *steps)
{
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&steps->beside, cudaStreamNonBlocking)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&steps->parting, cudaEventDisableTiming)));
    return MOE_CUDA(cudaEventCreateWithFlags(&steps->meeting, cudaEventDisableTiming));
}

struct moe_status moe_cuda_steps_create(struct moe_session *session, struct moe_cuda_steps **out)
{
    struct moe_cuda_steps *steps = calloc(1, sizeof *steps);
    if (steps == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    steps->session = session;
    moe_mutex_init(&steps->lock);
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cuda_device_use(session->device), fail);
    MOE_TRY_GOTO(st, moe_cuda_graphs_open(&steps->graphs), fail);
    MOE_TRY_GOTO(st, create_beside(steps), fail);
    for (uint32_t i = 0; i < MOE_CUDA_LANES; i++)
        MOE_TRY_GOTO(st, create_lane(steps, &steps->lane[i]), fail);
    MOE_TRY_GOTO(st, moe_cuda_executor_start(session->device, &steps->executor), fail);
    *out = steps;
    return st;
fail:
    moe_cuda_steps_destroy(steps);
    return st;
}

static void destroy_event(cudaEvent_t event)
{
    if (event != NULL)
        (void)cudaEventDestroy(event);
}

static void destroy_lane(struct moe_device *device, struct moe_step *lane)
{
    destroy_event(lane->begun);
    destroy_event(lane->came_in);
    destroy_event(lane->computed);
    destroy_event(lane->left);
    moe_cuda_mem_free(device, MOE_MEM_HOST, lane->answer, lane->answer_bytes);
    moe_cuda_mem_free(device, MOE_MEM_HOST, lane->mail, sizeof *lane->mail);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, lane->facts, sizeof *lane->facts);
    moe_cuda_buffer_free(device, &lane->tensors);
}

void moe_cuda_lanes_wait(struct moe_device *device)
{
    (void)cudaStreamSynchronize(device->copy_in);
    (void)cudaStreamSynchronize(device->compute);
    (void)cudaStreamSynchronize(device->copy_out);
}

void moe_cuda_steps_stop(struct moe_cuda_steps *steps)
{
    if (steps == NULL)
        return;
    moe_cuda_executor_stop(steps->executor);
    steps->executor = NULL;
}

void moe_cuda_steps_destroy(struct moe_cuda_steps *steps)
{
    if (steps == NULL)
        return;
    moe_cuda_steps_stop(steps);
    struct moe_device *device = steps->session->device;
    (void)cudaSetDevice(device->ordinal);
    moe_cuda_lanes_wait(device);
    moe_cuda_graphs_close(&steps->graphs);
    destroy_event(steps->parting);
    destroy_event(steps->meeting);
    if (steps->beside != NULL)
        (void)cudaStreamDestroy(steps->beside);
    for (uint32_t i = 0; i < MOE_CUDA_LANES; i++)
        destroy_lane(device, &steps->lane[i]);
    moe_cuda_buffer_free(device, &steps->scratch);
    moe_mutex_destroy(&steps->lock);
    free(steps);
}

struct moe_status moe_cuda_steps_idle(struct moe_cuda_steps *steps)
{
    moe_mutex_lock(&steps->lock);
    bool idle = !steps->lane[0].taken && !steps->lane[1].taken;
    moe_mutex_unlock(&steps->lock);
    return idle ? moe_ok()
                : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                            "the session has unfinished steps");
}

struct moe_status moe_cuda_lane_take(struct moe_cuda_steps *steps, struct moe_step **out)
{
    struct moe_step *lane = NULL;
    moe_mutex_lock(&steps->lock);
    for (uint32_t i = 0; i < MOE_CUDA_LANES && lane == NULL; i++)
        if (!steps->lane[i].taken)
            lane = &steps->lane[i];
    if (lane != NULL)
        lane->taken = true;
    moe_mutex_unlock(&steps->lock);
    if (lane == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "a session runs at most %d steps at once", MOE_CUDA_LANES);
    *out = lane;
    return moe_ok();
}

void moe_cuda_lane_give(struct moe_step *lane)
{
    moe_mutex_lock(&lane->owner->lock);
    lane->taken = false;
    moe_mutex_unlock(&lane->owner->lock);
}
