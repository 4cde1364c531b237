/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table. */
#include "cuda/step/backend.h"

#include "cuda/core/foreign.h"
#include "cuda/exchange/ep.h"
#include "cuda/layer/ffn.h"
#include "cuda/plan/options.h"
#include "cuda/router/router.h"
#include "cuda/step/join.h"
#include "cuda/step/open.h"
#include "cuda/step/step.h"
#include "cuda/step/training.h"

/* CUDA's own text does not tell a missing driver from an old one. */
static struct moe_status available(void)
{
    int driver = 0, runtime = 0, count = 0;
    MOE_TRY(MOE_CUDA(cudaDriverGetVersion(&driver)));
    MOE_TRY(MOE_CUDA(cudaRuntimeGetVersion(&runtime)));
    if (driver == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the NVIDIA driver (libcuda.so.1) is not installed");
    if (driver / 1000 < runtime / 1000)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the NVIDIA driver supports CUDA %d.%d, and this release needs %d.%d",
                         driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    MOE_TRY(MOE_CUDA(cudaGetDeviceCount(&count)));
    return count > 0 ? moe_ok()
                     : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                                 "the NVIDIA driver finds no GPU");
}

/* Parts of a pass that a caller makes alone do not overlap steps. */
static struct moe_status dispatch(struct moe_session *s, struct moe_layer *layer,
                                  enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                  const void *x, const int32_t *ids, const float *weights,
                                  struct moe_rows *out)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    return moe_cuda_ep_dispatch_alone(s, layer, dtype, bucket, tokens, x, ids, weights, out);
}

static struct moe_status combine(struct moe_session *s, struct moe_layer *layer,
                                 enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                 const void *x, const int32_t *ids, const float *weights,
                                 const struct moe_rows *rows, const float *expert_out, void *y)
{
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_steps_idle(s->steps));
    return moe_cuda_ep_combine_alone(s, layer, dtype, bucket, tokens, x, ids, weights, rows,
                                     expert_out, y);
}

const struct moe_backend moe_backend_cuda = {
    .name = "cuda",
    .options = moe_cuda_options,
    .training = &moe_cuda_training,
    .eager_windows = true,
    .stores_completions = true,
    .available = available,
    .device_open = moe_cuda_device_open,
    .device_close = moe_cuda_device_close,
    .device_info = moe_cuda_device_info,
    .device_progress = moe_cuda_device_progress,
    .mem_alloc = moe_cuda_mem_alloc,
    .mem_free = moe_cuda_mem_free,
    .mem_copy = moe_cuda_mem_copy,
    .mem_register = moe_cuda_mem_register,
    .mem_unregister = moe_cuda_mem_unregister,
    .mem_import = moe_cuda_mem_import,
    .mem_release = moe_cuda_mem_release,
    .layer_create = moe_cuda_layer_create,
    .layer_upload = moe_cuda_layer_upload,
    .layer_fetch = moe_cuda_layer_fetch,
    .computes = moe_cuda_layer_computes,
    .layer_upload_packed = moe_cuda_layer_upload_packed,
    .layer_fetch_packed = moe_cuda_layer_fetch_packed,
    .layer_finish = moe_cuda_layer_finish,
    .layer_destroy = moe_cuda_layer_destroy,
    .session_join = moe_cuda_session_join,
    .session_together = moe_cuda_session_together,
    .session_mask = moe_cuda_session_mask,
    .session_exchange = moe_cuda_session_exchange,
    .session_abort = moe_cuda_session_abort,
    .session_lost = moe_cuda_session_lost,
    .session_transport = moe_cuda_session_transport,
    .session_leave = moe_cuda_session_leave,
    .step_enqueue = moe_cuda_step_enqueue,
    .step_wait = moe_cuda_step_wait,
    .router_forward = moe_cuda_router_forward,
    .dispatch = dispatch,
    .gemm_gate_up = moe_cuda_gemm_gate_up,
    .gemm_down = moe_cuda_gemm_down,
    .combine = combine,
    .shared_forward = moe_cuda_shared_forward,
};
