/* SPDX-License-Identifier: Apache-2.0 */
#include "common/backend_options.h"

#include <string.h>

/* The place of `word` in "a|b|c". */
static bool find_word(const char *words, const char *word, uint32_t *place)
{
    size_t length = strlen(word);
    *place = 0;
    for (const char *at = words; *at != '\0'; ++*place) {
        size_t n = strcspn(at, "|");
        if (n == length && memcmp(at, word, n) == 0)
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
        if (s->value != NULL && !find_word(options[i].values, s->value, &chosen[i]))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "%s: '%.64s' is none of %s", s->name, s->value, options[i].values);
    }
    return moe_ok();
}
