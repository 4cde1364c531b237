/* Memory that workers of one host share: sealed memfds, and the way by which another process of the
 * same user finds one: as descriptor `fd` of process `pid`, below /proc. Where workers do not see
 * each other's processes (other hosts, users, or containers), nothing is found, and nothing is
 * shared. */
#ifndef MOE_WORKER_SHARED_H
#define MOE_WORKER_SHARED_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

struct moe_shared {
    void *base; /* [bytes], aligned to a page */
    size_t bytes;
    int fd;
};

/* New memory, zeroed. `name` is for people who look at /proc. */
struct moe_status moe_shared_create(const char *name, size_t bytes,
                                    struct moe_shared *out) MOE_CHECKED;
/* Maps what process `pid` has as `fd`, if it is memory of exactly `bytes` bytes that can neither
 * shrink nor grow; any other kind of file is not even opened. Errors: MOE_FAILED_PRECONDITION,
 * MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_shared_open(uint32_t pid, uint32_t fd, size_t bytes,
                                  struct moe_shared *out) MOE_CHECKED;
/* Memory that was never made (zeros) is ignored. */
void moe_shared_close(struct moe_shared *m);

#endif
