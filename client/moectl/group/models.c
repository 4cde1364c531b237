/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/group/models.h"

#include "daemon/name.h"
#include "moectl/io/proto_json.h"

#include <string.h>

enum { NAME_MAX_BYTES = 63 };

struct moe_status moectl_models_ask(struct moectl_link *link, uint64_t deadline_ns,
                                    Moe__V1__ListModelsResponse **out)
{
    Moe__V1__ListModelsRequest request = MOE__V1__LIST_MODELS_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.AdminService/ListModels", &request.base, deadline_ns,
                         &moe__v1__list_models_response__descriptor, &answer);
    *out = (Moe__V1__ListModelsResponse *)answer;
    return st;
}

Moe__V1__ListModelsResponse *moectl_models_try(struct moectl_link *link, uint64_t deadline_ns)
{
    Moe__V1__ListModelsResponse *list = NULL;
    struct moe_status st = moectl_models_ask(link, deadline_ns, &list);
    return moe_failed(&st) ? NULL : list;
}

struct moe_status moectl_models_find(const Moe__V1__ListModelsResponse *list, const char *name,
                                     const Moe__V1__ModelStatus **out)
{
    for (size_t i = 0; i < list->n_models; i++)
        if (strcmp(list->models[i]->name, name) == 0) {
            *out = list->models[i];
            return moe_ok();
        }
    return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "the group has no model %.200s",
                     name);
}

const char *moectl_model_state(const Moe__V1__ModelStatus *m)
{
    return moectl_enum_name(&moe__v1__model_state__descriptor, (int)m->state);
}

const char *moectl_model_memory(const Moe__V1__ModelStatus *m, char text[MOECTL_MODEL_BYTES])
{
    const double mib = 1.0 / (1024.0 * 1024.0);
    if (m->total_bytes == 0)
        (void)snprintf(text, MOECTL_MODEL_BYTES, "-");
    else if (m->loaded_bytes < m->total_bytes)
        (void)snprintf(text, MOECTL_MODEL_BYTES, "%.1f of %.1f MiB", (double)m->loaded_bytes * mib,
                       (double)m->total_bytes * mib);
    else
        (void)snprintf(text, MOECTL_MODEL_BYTES, "%.1f MiB", (double)m->total_bytes * mib);
    return text;
}

json_t *moectl_models_added_json(const Moe__V1__ListModelsResponse *list)
{
    json_t *added = json_array();
    for (size_t i = 0; list != NULL && i < list->n_models; i++)
        if (!list->models[i]->is_default)
            json_array_append_new(added, moectl_proto_json(&list->models[i]->base));
    return added;
}

int moectl_check_model_name(const char *name)
{
    if (name[0] != '-' && moe_training_name_ok(name) && strlen(name) <= NAME_MAX_BYTES)
        return MOECTL_OK;
    return moectl_usage_error(
        "'%s' is not a model's name: 1 to %d letters, digits, '.', '_', '-', none of "
        "'.' and '-' first",
        name, NAME_MAX_BYTES);
}
