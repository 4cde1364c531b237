/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a backend by name. Only this file lists all backends. That of CPUs is part of the program,
 * that of GPUs a module in a folder next to it (moe/backend_module.h). */
#include "moe/backend_module.h"

#include "base/build.h"
#include "base/library.h"
#include "cpu/compute/options.h"
#include "cpu/network/network.h"
#include "cuda/plan/options.h"
#include "cuda/plan/process.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct moe_status moe_backends_prepare(const char *interface, const char *suggested)
{
    MOE_TRY(moe_cpu_network_prepare(interface, suggested));
    return moe_cuda_process_prepare(interface);
}

const struct moe_backend_option *const moe_backend_option_tables[] = {moe_cuda_options,
                                                                      moe_cpu_options, NULL};

/* ----------------------------------------------------------------------- modules */

/* MOE_MODULE_FOLDER is the way from a program's folder to that of modules, in an installation and
 * in a build alike. Neither a setting nor the environment changes it. */
static struct moe_status find_file(const char *name, char *out, size_t size)
{
    char program[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program);
    char *end = n > 0 ? memrchr(program, '/', (size_t)n) : NULL;
    if (end == NULL || (size_t)n == sizeof program)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "cannot find the program's own folder");
    n = snprintf(out, size, "%.*s/" MOE_MODULE_FOLDER "/%s", (int)(end - program), program, name);
    if (n < 0 || (size_t)n >= size || access(out, F_OK) != 0)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_UNSUPPORTED, "the module %s is not installed",
                         name);
    return moe_ok();
}

static struct moe_status check_build(const char *name, const struct moe_backend_module *m)
{
    if (strcmp(m->version, moe_build_version()) == 0 && strcmp(m->commit, moe_build_commit()) == 0)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "%s is of release %.20s (commit %.20s), this program of %s (commit %s)", name,
                     m->version, m->commit, moe_build_version(), moe_build_commit());
}

static struct moe_status open_module(const char *name, const struct moe_backend **out)
{
    char path[PATH_MAX];
    void *library;
    const struct moe_backend_module *(*entry)(void);
    MOE_TRY(find_file(name, path, sizeof path));
    MOE_TRY(moe_library_open(path, &library));
    MOE_TRY(moe_library_find(library, "moe_backend_module", (void *)&entry));
    const struct moe_backend_module *module = entry();
    MOE_TRY(check_build(name, module));
    *out = module->backend;
    return moe_ok();
}

static const struct moe_backend *cuda;
static struct moe_status cuda_outcome;

static void open_cuda(void)
{
    cuda_outcome = open_module("backend_cuda.so", &cuda);
}

/* ----------------------------------------------------------------------- by name */

struct moe_status moe_backend_find(const char *name, const struct moe_backend **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (strcmp(name, "cpu") == 0) {
        *out = &moe_backend_cpu;
        return moe_ok();
    }
    if (strcmp(name, "cuda") != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "there is no backend '%.40s'", name);
    (void)pthread_once(&once, open_cuda);
    *out = cuda;
    return cuda_outcome;
}

const struct moe_backend *moe_backend_auto(struct moe_status *why_not_cuda)
{
    const struct moe_backend *found;
    *why_not_cuda = moe_backend_find("cuda", &found);
    if (!moe_failed(why_not_cuda))
        *why_not_cuda = found->available();
    return moe_failed(why_not_cuda) ? &moe_backend_cpu : found;
}
