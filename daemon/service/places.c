/* SPDX-License-Identifier: Apache-2.0 */
#include "service/places.h"

#include <stdio.h>
#include <string.h>

void moe_places_init(struct moe_places *p)
{
    moe_mutex_init(&p->lock);
}

void moe_places_destroy(struct moe_places *p)
{
    moe_mutex_destroy(&p->lock);
}

void moe_places_set(struct moe_places *p, const char *const *endpoints, size_t count)
{
    char text[MOE_PLACES_BYTES] = "";
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        int n = snprintf(text + at, sizeof text - at, "%s%s", i > 0 ? ", " : "", endpoints[i]);
        if (n < 0 || (size_t)n >= sizeof text - at) {
            text[at] = '\0'; /* it does not fit */
            break;
        }
        at += (size_t)n;
    }
    moe_mutex_lock(&p->lock);
    memcpy(p->text, text, sizeof text);
    moe_mutex_unlock(&p->lock);
}

void moe_places_read(struct moe_places *p, char out[MOE_PLACES_BYTES])
{
    moe_mutex_lock(&p->lock);
    memcpy(out, p->text, sizeof p->text);
    moe_mutex_unlock(&p->lock);
}
