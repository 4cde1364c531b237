/* SPDX-License-Identifier: Apache-2.0 */
#include "support/golden.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

void golden_models_list(const char *directory, struct golden_models *out)
{
    DIR *d = opendir(directory);
    out->count = 0;
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char config[sizeof e->d_name + sizeof "/config.json"];
        (void)snprintf(config, sizeof config, "%s/config.json", e->d_name);
        if (faccessat(dirfd(d), config, F_OK, 0) != 0)
            continue;
        size_t length = strlen(e->d_name);
        if (out->count == GOLDEN_MODELS_MAX || length >= GOLDEN_NAME_BYTES) {
            fprintf(stderr, "%s: too many golden models, or a name that is too long\n", directory);
            exit(1);
        }
        memcpy(out->names[out->count++], e->d_name, length + 1);
    }
    if (d != NULL)
        (void)closedir(d);
    if (out->count == 0) {
        fprintf(stderr, "%s: no golden models\n", directory);
        exit(1);
    }
    qsort(out->names, out->count, sizeof out->names[0], by_name);
}
