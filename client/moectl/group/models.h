/* SPDX-License-Identifier: Apache-2.0 */
/* The models of a group, from its coordinator. */
#ifndef MOECTL_MODELS_H
#define MOECTL_MODELS_H

#include "moectl/group/link.h"

#include <jansson.h>

/* Asks over `link`, the coordinator's; free `*out` with
 * moe__v1__list_models_response__free_unpacked. */
struct moe_status moectl_models_ask(struct moectl_link *link, uint64_t deadline_ns,
                                    Moe__V1__ListModelsResponse **out) MOE_CHECKED;
/* The same for a report that is complete without it: NULL after any failure, for example of a
 * coordinator of an older release. */
Moe__V1__ListModelsResponse *moectl_models_try(struct moectl_link *link, uint64_t deadline_ns);

/* Errors: MOE_NOT_FOUND/MODEL_NOT_FOUND. */
struct moe_status moectl_models_find(const Moe__V1__ListModelsResponse *list, const char *name,
                                     const Moe__V1__ModelStatus **out) MOE_CHECKED;

/* "SERVING". */
const char *moectl_model_state(const Moe__V1__ModelStatus *m);

enum { MOECTL_MODEL_BYTES = 48 };
/* "40.0 MiB", or "12.0 of 40.0 MiB" while it loads; "-" if it is not known. */
const char *moectl_model_memory(const Moe__V1__ModelStatus *m, char text[MOECTL_MODEL_BYTES]);

/* A list with the added models; empty for NULL. */
json_t *moectl_models_added_json(const Moe__V1__ListModelsResponse *list);

/* Checks a name: 1 to 63 letters, digits, '.', '_', '-', beginning with neither '.' nor '-'.
 * MOECTL_OK, or MOECTL_USAGE after a message. */
int moectl_check_model_name(const char *name);

#endif
