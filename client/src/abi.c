/* SPDX-License-Identifier: Apache-2.0 */
#include "abi.h"

#include "base/status.h"

enum {
    GROWTH_MAX = 4096
}; /* bytes after the known fields; more means that `size` is uninitialised */

static bool is_zero(const void *bytes, size_t length)
{
    const unsigned char *b = bytes;
    while (length > 0 && b[length - 1] == 0)
        length--;
    return length == 0;
}

struct moe_status moe_client_check_size(const char *name, const void *object, size_t first,
                                        size_t known)
{
    size_t size;
    memcpy(&size, object, sizeof size);
    if (size < first)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "%s: size is %zu, at least %zu is needed: set size = sizeof, or use "
                         "MOE_CLIENT_INIT",
                         name, size, first);
    if (size > known + GROWTH_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "%s: size is %zu, the library knows %zu: set size = sizeof, or use "
                         "MOE_CLIENT_INIT",
                         name, size, known);
    if (size > known && !is_zero((const char *)object + known, size - known))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "%s: a field is set that this release of libmoeclient does not know",
                         name);
    return moe_ok();
}

struct moe_status moe_client_check_reserved(const char *name, const void *bytes, size_t length)
{
    return is_zero(bytes, length) ? moe_ok()
                                  : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                                              "%s: reserved fields must be 0", name);
}
