/* SPDX-License-Identifier: Apache-2.0 */
/* Creates, takes, gives back and frees step slots; see step_slots.h. */
#include "cuda/step/step_slots.h"

#include <stdlib.h>

/* ------------------------------------------------------------- create, destroy */

static size_t max_answer_bytes(const struct moe_session_config *c)
{
    size_t pairs = (size_t)c->max_tokens * c->max_top_k;
    return pairs * (sizeof(int32_t) + sizeof(float)) + c->max_tokens +
           (size_t)3 * MOE_CUDA_STEP_LINE;
}

static struct moe_status create_step_slot(struct moe_cuda_steps *steps, struct moe_step *step)
{
    struct moe_device *device = steps->session->device;
    void *p;
    step->owner = steps;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, sizeof *step->message, &p));
    step->message = p;
    MOE_TRY(MOE_CUDA(cudaHostGetDevicePointer((void **)&step->message_on_device, p, 0)));
    step->upload_bytes = sizeof *step->upload + (size_t)steps->session->config.max_tokens *
                                                    sizeof step->upload->segments[0];
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, step->upload_bytes, &p));
    step->upload = p;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, step->upload_bytes, &p));
    step->on_device = p;
    step->answer_bytes = max_answer_bytes(&steps->session->config);
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, step->answer_bytes, &p));
    step->answer = p;
    MOE_TRY(MOE_CUDA(cudaEventCreate(&step->begun)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&step->came_in, cudaEventDisableTiming)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&step->computed, cudaEventDisableTiming)));
    MOE_TRY(MOE_CUDA(cudaEventCreate(&step->left)));
    return moe_ok();
}

static struct moe_status create_side_stream(struct moe_cuda_steps *steps)
{
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&steps->side_stream, cudaStreamNonBlocking)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&steps->fork_event, cudaEventDisableTiming)));
    MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&steps->rows_event, cudaEventDisableTiming)));
    return MOE_CUDA(cudaEventCreateWithFlags(&steps->join_event, cudaEventDisableTiming));
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
    MOE_TRY_GOTO(st, create_side_stream(steps), fail);
    for (uint32_t i = 0; i < MOE_CUDA_STEP_SLOTS; i++)
        MOE_TRY_GOTO(st, create_step_slot(steps, &steps->step_slot[i]), fail);
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

static void destroy_step_slot(struct moe_device *device, struct moe_step *step)
{
    destroy_event(step->begun);
    destroy_event(step->came_in);
    destroy_event(step->computed);
    destroy_event(step->left);
    moe_cuda_mem_free(device, MOE_MEM_HOST, step->answer, step->answer_bytes);
    moe_cuda_mem_free(device, MOE_MEM_HOST, step->message, sizeof *step->message);
    moe_cuda_mem_free(device, MOE_MEM_HOST, step->upload, step->upload_bytes);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, step->on_device, step->upload_bytes);
    moe_cuda_buffer_free(device, &step->tensors);
}

void moe_cuda_step_slots_wait(struct moe_device *device)
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
    moe_cuda_step_slots_wait(device);
    moe_cuda_graphs_close(&steps->graphs);
    destroy_event(steps->fork_event);
    destroy_event(steps->rows_event);
    destroy_event(steps->join_event);
    if (steps->side_stream != NULL)
        (void)cudaStreamDestroy(steps->side_stream);
    for (uint32_t i = 0; i < MOE_CUDA_STEP_SLOTS; i++)
        destroy_step_slot(device, &steps->step_slot[i]);
    moe_cuda_buffer_free(device, &steps->scratch);
    moe_mutex_destroy(&steps->lock);
    free(steps);
}

struct moe_status moe_cuda_steps_idle(struct moe_cuda_steps *steps)
{
    moe_mutex_lock(&steps->lock);
    bool idle = !steps->step_slot[0].taken && !steps->step_slot[1].taken;
    moe_mutex_unlock(&steps->lock);
    return idle ? moe_ok()
                : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                            "the session has unfinished steps");
}

struct moe_status moe_cuda_step_slot_take(struct moe_cuda_steps *steps, struct moe_step **out)
{
    struct moe_step *step = NULL;
    bool is_alone = true;
    moe_mutex_lock(&steps->lock);
    for (uint32_t i = 0; i < MOE_CUDA_STEP_SLOTS; i++) {
        is_alone = is_alone && !steps->step_slot[i].taken;
        if (step == NULL && !steps->step_slot[i].taken)
            step = &steps->step_slot[i];
    }
    if (step != NULL) {
        step->taken = true;
        step->is_alone = is_alone;
    }
    moe_mutex_unlock(&steps->lock);
    if (step == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "a session runs at most %d steps at once", MOE_CUDA_STEP_SLOTS);
    *out = step;
    return moe_ok();
}

void moe_cuda_step_slot_give(struct moe_step *step)
{
    moe_mutex_lock(&step->owner->lock);
    step->taken = false;
    moe_mutex_unlock(&step->owner->lock);
}
