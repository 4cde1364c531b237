/* SPDX-License-Identifier: Apache-2.0 */
/* A new directory for the files of a test. */
#ifndef MOE_SUPPORT_DIRECTORY_H
#define MOE_SUPPORT_DIRECTORY_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOE_TEST_DIRECTORY_BYTES = 64 };

/* Makes the directory, in memory (/dev/shm) if possible, so that fsync is free. False on failure.
 * The caller removes it. */
static inline bool moe_test_directory(const char *name, char path[MOE_TEST_DIRECTORY_BYTES])
{
    const char *root = access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(path, MOE_TEST_DIRECTORY_BYTES, "%s/moe-%s-XXXXXX", root, name);
    return mkdtemp(path) != NULL;
}

#endif
