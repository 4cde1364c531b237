/* SPDX-License-Identifier: Apache-2.0 */
/* See library.h. */
#include "base/library.h"

#include <dlfcn.h>
#include <string.h>

static struct moe_status failed(const char *name)
{
    const char *why = dlerror();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED, "%.160s",
                     why != NULL ? why : name);
}

struct moe_status moe_library_open(const char *name, void **out)
{
    *out = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    return *out != NULL ? moe_ok() : failed(name);
}

struct moe_status moe_library_find(void *library, const char *symbol, void *pointer)
{
    void *found = dlsym(library, symbol);
    if (found == NULL)
        return failed(symbol);
    /* A pointer to a function and one to data have one size here, but no cast between them. */
    memcpy(pointer, &found, sizeof found);
    return moe_ok();
}
