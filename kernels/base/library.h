/* SPDX-License-Identifier: Apache-2.0 */
/* Libraries and modules that a process opens at run time, so that a host without them can run the
 * program. A library stays open until the process ends. */
#ifndef MOE_BASE_LIBRARY_H
#define MOE_BASE_LIBRARY_H

#include "base/status.h"

/* Opens `name`: the name of a library, which the loader looks up, or the path of a file. All its
 * symbols must resolve; no other library sees them. Threads: any.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED, with the loader's text: it names the library that is
 * missing, which may be one that `name` needs. */
struct moe_status moe_library_open(const char *name, void **out) MOE_CHECKED;

/* Stores the address of `symbol` in `*pointer`, which is a pointer to data or to a function: pass
 * the address of that pointer. Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED. */
struct moe_status moe_library_find(void *library, const char *symbol, void *pointer) MOE_CHECKED;

#endif
