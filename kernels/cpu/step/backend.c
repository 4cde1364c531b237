/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's table. Parts that are callable alone are built here from the functions of a
 * step. */
#include "cpu/compute/options.h"
#include "cpu/compute/packed.h"
#include "cpu/exchange/ep.h"
#include "cpu/exchange/session.h"
#include "cpu/step/join.h"
#include "cpu/step/step.h"
#include "cpu/step/training.h"

static struct moe_status dispatch(struct moe_session *s, struct moe_layer *layer,
                                  enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                  const void *x, const int32_t *ids, const float *weights,
                                  struct moe_rows *out)
{
    struct moe_cpu_batch batch = {.layer = layer,
                                  .dtype = dtype,
                                  .bucket = bucket,
                                  .tokens = tokens,
                                  .x = x,
                                  .ids = ids,
                                  .weights = weights};
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    MOE_TRY(moe_cpu_ep_check(s, layer, dtype, bucket, tokens));
    void *quantised;
    MOE_TRY(moe_cpu_quantise_rows(layer, dtype, tokens, x, &quantised, &batch.row_bytes));
    batch.rows = quantised;
    struct moe_status st = moe_cpu_ep_prepare(s->ep, &batch);
    if (!moe_failed(&st)) {
        moe_cpu_ep_send(s->ep);
        st = moe_cpu_ep_receive(s->ep, out);
    }
    moe_cpu_scratch_give(s->device, quantised);
    return st;
}

static struct moe_status combine(struct moe_session *s, struct moe_layer *layer,
                                 enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                 const void *x, const int32_t *ids, const float *weights,
                                 const struct moe_rows *rows, const float *expert_out, void *y)
{
    struct moe_cpu_batch batch = {.layer = layer,
                                  .dtype = dtype,
                                  .bucket = bucket,
                                  .tokens = tokens,
                                  .x = x,
                                  .ids = ids,
                                  .weights = weights};
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    MOE_TRY(moe_cpu_ep_same_pass(s->ep, &batch, rows));
    return moe_cpu_ep_combine(s->ep, expert_out, NULL, y);
}

static struct moe_status available(void)
{
    return moe_ok();
}

const struct moe_backend moe_backend_cpu = {
    .name = "cpu",
    .options = moe_cpu_options,
    .training = &moe_cpu_training,
    .available = available,
    .device_open = moe_cpu_device_open,
    .device_close = moe_cpu_device_close,
    .device_info = moe_cpu_device_info,
    .device_progress = moe_cpu_device_progress,
    .mem_alloc = moe_cpu_mem_alloc,
    .mem_free = moe_cpu_mem_free,
    .mem_copy = moe_cpu_mem_copy,
    .mem_register = moe_cpu_mem_register,
    .mem_unregister = moe_cpu_mem_unregister,
    .mem_import = moe_cpu_mem_import,
    .mem_release = moe_cpu_mem_release,
    .layer_create = moe_cpu_layer_create,
    .layer_upload = moe_cpu_layer_upload,
    .partial = true,
    .computes = moe_cpu_computes,
    .layer_upload_packed = moe_cpu_layer_upload_packed,
    .layer_finish = moe_cpu_layer_finish,
    .layer_succeed = moe_cpu_layer_succeed,
    .layer_destroy = moe_cpu_layer_destroy,
    .session_join = moe_cpu_session_join,
    .session_together = moe_cpu_session_together,
    .session_mask = moe_cpu_session_mask,
    .session_exchange = moe_cpu_session_exchange,
    .session_abort = moe_cpu_session_abort,
    .session_lost = moe_cpu_session_lost,
    .session_transport = moe_cpu_session_transport,
    .session_leave = moe_cpu_session_leave,
    .step_enqueue = moe_cpu_step_enqueue,
    .step_wait = moe_cpu_step_wait,
    .router_forward = moe_cpu_router_forward,
    .dispatch = dispatch,
    .gemm_gate_up = moe_cpu_gemm_gate_up,
    .gemm_down = moe_cpu_gemm_down,
    .combine = combine,
    .shared_forward = moe_cpu_shared_forward,
};
