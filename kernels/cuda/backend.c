/* The CUDA backend's table. */
#include "cuda/backend.h"

#include "cuda/ep.h"
#include "cuda/ffn.h"
#include "cuda/router.h"
#include "cuda/step.h"
#include "cuda/training.h"

const struct moe_backend moe_backend_cuda = {
    .name = "cuda",
    .training = &moe_cuda_training,
    .device_open = moe_cuda_device_open,
    .device_close = moe_cuda_device_close,
    .device_info = moe_cuda_device_info,
    .mem_alloc = moe_cuda_mem_alloc,
    .mem_free = moe_cuda_mem_free,
    .mem_copy = moe_cuda_mem_copy,
    .layer_create = moe_cuda_layer_create,
    .layer_upload = moe_cuda_layer_upload,
    .layer_fetch = moe_cuda_layer_fetch,
    .layer_finish = moe_cuda_layer_finish,
    .layer_destroy = moe_cuda_layer_destroy,
    .session_join = moe_cuda_session_join,
    .session_exchange = moe_cuda_session_exchange,
    .session_abort = moe_cuda_session_abort,
    .session_lost = moe_cuda_session_lost,
    .session_transport = moe_cuda_session_transport,
    .session_leave = moe_cuda_session_leave,
    .step_enqueue = moe_cuda_step_enqueue,
    .step_wait = moe_cuda_step_wait,
    .router_forward = moe_cuda_router_forward,
    .dispatch = moe_cuda_dispatch,
    .gemm_gate_up = moe_cuda_gemm_gate_up,
    .gemm_down = moe_cuda_gemm_down,
    .combine = moe_cuda_combine,
    .shared_forward = moe_cuda_shared_forward,
};
