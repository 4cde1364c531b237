/* SPDX-License-Identifier: Apache-2.0 */
/* Documents as YAML 1.2. The values are those of the JSON, so 64-bit integers are strings. */
#ifndef MOECTL_YAML_H
#define MOECTL_YAML_H

#include <jansson.h>

/* The text of `document`, without a line break at its end; the caller frees it. NULL when out of
 * memory. */
char *moectl_yaml(const json_t *document);

#endif
