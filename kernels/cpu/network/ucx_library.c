/* SPDX-License-Identifier: Apache-2.0 */
/* Opens UCX; see ucx_library.h. */
#include "cpu/network/ucx_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static const char library[] = "libucp.so.0";

static struct moe_ucx_library functions;
static struct moe_status outcome;

static void *find(void *handle, const char *name)
{
    void *found = dlsym(handle, name);
    if (found == NULL && !moe_failed(&outcome))
        outcome = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED, "%s has no %s",
                            library, name);
    return found;
}

static void open_once(void)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    outcome = moe_ok();
    if (handle == NULL) {
        const char *why = dlerror();
        outcome = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                            "the network transport needs UCX (package libucx0): %.120s",
                            why != NULL ? why : library);
        return;
    }
    /* A pointer to a function and one to data have one size here, but no cast between them. */
#define X(name)                                                                                    \
    {                                                                                              \
        void *found = find(handle, #name);                                                         \
        memcpy(&functions.name, &found, sizeof found);                                             \
    }
    MOE_UCX_FUNCTIONS(X)
#undef X
}

struct moe_status moe_ucx_library_open(const struct moe_ucx_library **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, open_once);
    *out = &functions;
    return outcome;
}
