/* SPDX-License-Identifier: Apache-2.0 */
/* The entry of the module backend_cuda.so. */
#include "moe/backend_module.h"

#include "base/build.h"
#include "cuda/step/backend.h"

const struct moe_backend_module *moe_backend_module(void)
{
    static struct moe_backend_module module;
    module = (struct moe_backend_module){
        .version = moe_build_version(), .commit = moe_build_commit(), .backend = &moe_backend_cuda};
    return &module;
}
