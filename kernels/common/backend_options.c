/* SPDX-License-Identifier: Apache-2.0 */
/* See backend_options.h. */
#include "common/backend_options.h"

#include <string.h>

/* Finds `value` in "a|b|c"; *index counts from 0. */
static bool find_value(const char *values, const char *value, uint32_t *index)
{
    size_t length = strlen(value);
    *index = 0;
    for (const char *at = values; *at != '\0'; ++*index) {
        size_t n = strcspn(at, "|");
        if (n == length && memcmp(at, value, n) == 0)
            return true;
        at += n + (at[n] == '|');
    }
    return false;
}

struct moe_status moe_backend_choose(const struct moe_backend_option *options,
                                     const struct moe_backend_setting *settings, uint32_t *chosen)
{
    static const struct moe_backend_option none[1];
    static const struct moe_backend_setting nothing[1];
    options = options != NULL ? options : none;
    for (size_t i = 0; options[i].name != NULL; i++)
        chosen[i] = 0;
    for (const struct moe_backend_setting *s = settings != NULL ? settings : nothing;
         s->name != NULL; s++) {
        size_t i = 0;
        while (options[i].name != NULL && strcmp(options[i].name, s->name) != 0)
            i++;
        if (options[i].name == NULL)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                             "the backend has no option '%.64s'", s->name);
        if (s->value != NULL && !find_value(options[i].values, s->value, &chosen[i]))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "%s: '%.64s' is none of %s", s->name, s->value, options[i].values);
    }
    return moe_ok();
}
