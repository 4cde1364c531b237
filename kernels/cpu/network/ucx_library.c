/* SPDX-License-Identifier: Apache-2.0 */
/* Opens UCX; see ucx_library.h. */
#include "cpu/network/ucx_library.h"

#include "base/library.h"

#include <pthread.h>

static const char library[] = "libucp.so.0";

static struct moe_ucx_library functions;
static struct moe_status outcome;

static struct moe_status open_library(void)
{
    void *handle;
    MOE_TRY(moe_library_open(library, &handle));
#define X(name) MOE_TRY(moe_library_find(handle, #name, (void *)&functions.name));
    MOE_UCX_FUNCTIONS(X)
#undef X
    return moe_ok();
}

static void open_once(void)
{
    outcome =
        moe_error_context(open_library(), "the network transport needs UCX (package libucx0)");
}

struct moe_status moe_ucx_library_open(const struct moe_ucx_library **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, open_once);
    *out = &functions;
    return outcome;
}
