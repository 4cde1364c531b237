/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a backend by name: the one place that knows which backends this build has. */
#include "moe/backend.h"

#ifdef MOE_HAVE_CUDA
#include "cuda/plan/process.h"
#include "cuda/step/backend.h"

static const struct moe_backend *find_cuda(void)
{
    return &moe_backend_cuda;
}

static bool cuda_answers(void)
{
    return moe_cuda_available();
}

struct moe_status moe_backends_prepare(void)
{
    return moe_cuda_process_prepare();
}
#else
static const struct moe_backend *find_cuda(void)
{
    return NULL;
}

static bool cuda_answers(void)
{
    return false;
}

struct moe_status moe_backends_prepare(void)
{
    return moe_ok();
}
#endif

bool moe_gemm_parse(const char *name, enum moe_gemm *out)
{
    static const char *const names[] = {
        [MOE_GEMM_AUTO] = "auto", [MOE_GEMM_HOPPER] = "hopper", [MOE_GEMM_CUBLAS] = "cublas"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (enum moe_gemm)i;
            return true;
        }
    return false;
}

const struct moe_backend *moe_backend_find(const char *name)
{
    if (strcmp(name, "auto") == 0)
        return cuda_answers() ? find_cuda() : &moe_backend_cpu;
    if (strcmp(name, "cuda") == 0)
        return find_cuda();
    return strcmp(name, "cpu") == 0 ? &moe_backend_cpu : NULL;
}

bool moe_transport_find(const char *name, enum moe_transport *out)
{
    static const char *const names[] = {[MOE_TRANSPORT_AUTO] = "auto",
                                        [MOE_TRANSPORT_NVLINK] = "nvlink",
                                        [MOE_TRANSPORT_NETWORK] = "network"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (enum moe_transport)i;
            return true;
        }
    return false;
}
