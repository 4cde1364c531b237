/* SPDX-License-Identifier: Apache-2.0 */
/* A backend as a module: a shared object that the program opens at run time, so that a host without
 * the libraries of a device runs the same program.
 *
 * The module contains all of the project's code that it uses, exports one symbol, and takes none of
 * the program. Program and module share only what passes through struct moe_backend. The
 * rooms that a backend uses keep no state, so two copies of their code do no harm.
 *
 * The interface is that of one build: the layout of structs may differ between any two commits. The
 * program refuses a module of another build. */
#ifndef MOE_BACKEND_MODULE_H
#define MOE_BACKEND_MODULE_H

#include "moe/backend.h"

struct moe_backend_module {
    const char *version, *commit; /* of the module's build (base/build.h); first in all releases */
    const struct moe_backend *backend;
};

/* The symbol that a module exports. The answer is static. */
const struct moe_backend_module *moe_backend_module(void);

#endif
