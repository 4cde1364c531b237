/* SPDX-License-Identifier: Apache-2.0 */
/* A device and what belongs to it: kernels, upload threads, a way to multiply, scratch for
 * training; see open.h. */
#include "cuda/step/open.h"

#include "common/backend_options.h"
#include "cuda/core/device.h"
#include "cuda/core/load.h"
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/layer/weights.h"
#include "cuda/plan/options.h"
#include "cuda/training/train_stages.h"

static struct moe_status choose_gemm(struct moe_device *device, enum moe_cuda_gemm gemm)
{
    const bool hopper = device->arch / 10 == 9;
    if (gemm == MOE_CUDA_GEMM_HOPPER && !hopper)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "gemm hopper: %s is no Hopper GPU", device->gpu_name);
    if (gemm == MOE_CUDA_GEMM_HOPPER || (gemm == MOE_CUDA_GEMM_AUTO && hopper))
        return moe_ok();
    return moe_cuda_cublas_open(&device->cublas);
}

struct moe_status moe_cuda_device_open(const struct moe_device_config *config,
                                       struct moe_device **out)
{
    uint32_t chosen[MOE_CUDA_OPTION_COUNT];
    MOE_TRY(moe_backend_choose(moe_cuda_options, config->settings, chosen));
    struct moe_device *device;
    MOE_TRY(moe_cuda_device_create(config->ordinal, &device));
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cuda_load_all(device->arch), fail);
    MOE_TRY_GOTO(st, moe_cuda_uploads_open(device), fail);
    MOE_TRY_GOTO(st, choose_gemm(device, (enum moe_cuda_gemm)chosen[MOE_CUDA_OPTION_GEMM]), fail);
    *out = device;
    return st;
fail:
    moe_cuda_device_close(device);
    return st;
}

/* Errors here were reported by an earlier call or no longer matter, so they are ignored. */
void moe_cuda_device_close(struct moe_device *device)
{
    if (device == NULL)
        return;
    struct moe_cuda_cublas *cublas = device->cublas;
    (void)cudaSetDevice(device->ordinal);
    moe_cuda_train_scratch_free(device);
    moe_cuda_uploads_close(device);
    moe_cuda_device_destroy(device);
    moe_cuda_cublas_close(cublas); /* after all work of the streams */
}
