/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/name.h"

bool moe_training_name_ok(const char *name)
{
    size_t n = 0;
    for (; name[n] != '\0'; n++) {
        char c = name[n];
        bool good = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                    c == '.' || c == '_' || c == '-';
        if (!good || n == MOE_TRAINING_NAME_MAX)
            return false;
    }
    return n > 0 && name[0] != '.';
}

bool moe_word_ok(const char *text, size_t max)
{
    size_t n = 0;
    for (; text[n] != '\0'; n++)
        if (n == max || text[n] <= ' ' || text[n] > '~' || text[n] == '"' || text[n] == '\\')
            return false;
    return n > 0;
}
