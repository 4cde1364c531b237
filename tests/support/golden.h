/* SPDX-License-Identifier: Apache-2.0 */
/* The golden models of tests/golden/models: a new folder there is in every test of all of them. */
#ifndef MOE_SUPPORT_GOLDEN_H
#define MOE_SUPPORT_GOLDEN_H

#include <stddef.h>

enum { GOLDEN_MODELS_MAX = 64, GOLDEN_NAME_BYTES = 64 };

struct golden_models {
    size_t count;                                     /* at least 1 */
    char names[GOLDEN_MODELS_MAX][GOLDEN_NAME_BYTES]; /* of the folders, sorted */
};

/* Lists the folders of `directory` that hold a config.json. Ends the program with a message if
 * there is none. */
void golden_models_list(const char *directory, struct golden_models *out);

#endif
