/* What tests of sessions share, whatever their backend: a small layer, and ways to say what was
 * expected. */
#ifndef MOE_TEST_SMALL_LAYER_H
#define MOE_TEST_SMALL_LAYER_H

#include "group.h"

#include <stdio.h>

/* In a member: ends it with a message when `cond` does not hold. */
#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", m->slot, __LINE__, #cond);          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

/* Whether a call ended like this; prints what it said otherwise. */
bool is(struct moe_status st, enum moe_code code, enum moe_reason reason);
bool good(struct moe_status st);

/* The most that `hidden` may be. */
enum { SMALL_LAYER_COLUMNS = 64 };

/* Layer 3 with two experts on each slot of `holders` and at most 2 * MOE_MAX_SLOTS inner columns, two
 * experts a token; weights depend on the expert alone. The caller destroys it, also after a failure
 * if *out was set. */
struct moe_status small_layer_make(const struct moe_backend *backend, struct moe_device *device,
                                   const struct member *m, uint32_t hidden, uint32_t inner,
                                   uint64_t holders, struct moe_layer **out) MOE_CHECKED;

#endif
