/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a backend by name. Only this file lists all backends and those of this build. */
#include "moe/backend.h"

#include "cuda/plan/options.h"

#include "cpu/compute/options.h"
#include "cpu/network/network.h"

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

static struct moe_status prepare_cuda(const char *interface)
{
    return moe_cuda_process_prepare(interface);
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

static struct moe_status prepare_cuda(const char *interface)
{
    (void)interface;
    return moe_ok();
}
#endif

struct moe_status moe_backends_prepare(const char *interface)
{
    MOE_TRY(moe_cpu_network_prepare(interface));
    return prepare_cuda(interface);
}

const struct moe_backend_option *const moe_backend_option_tables[] = {moe_cuda_options,
                                                                      moe_cpu_options, NULL};

const struct moe_backend *moe_backend_find(const char *name)
{
    if (strcmp(name, "auto") == 0)
        return cuda_answers() ? find_cuda() : &moe_backend_cpu;
    if (strcmp(name, "cuda") == 0)
        return find_cuda();
    return strcmp(name, "cpu") == 0 ? &moe_backend_cpu : NULL;
}
