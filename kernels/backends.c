/* Finds a backend by name: the one place that knows which backends this build has. */
#include "moe/backend.h"

const struct moe_backend *moe_backend_find(const char *name)
{
    if (strcmp(name, "cpu") == 0 || strcmp(name, "auto") == 0)
        return &moe_backend_cpu;
    return NULL;
}
