/* SPDX-License-Identifier: Apache-2.0 */
/* A backend module of another build, for test_backend_module.py. */
#include "moe/backend_module.h"

const struct moe_backend_module *moe_backend_module(void)
{
    static const struct moe_backend_module module = {.version = "9.8.7", .commit = "feedfacefeed"};
    return &module;
}
