/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that workers of one host share: sealed memfds. Another process of the same user opens one
 * as descriptor `fd` of process `pid`, below /proc. Workers on other hosts, of other users or in
 * other containers do not see the process and share no memory. */
#ifndef MOE_LINKS_SHARED_H
#define MOE_LINKS_SHARED_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

struct moe_shared {
    void *base; /* [bytes], aligned to a page */
    size_t bytes;
    int fd;
};

/* New memory, zeroed. `name` appears in /proc. */
struct moe_status moe_shared_create(const char *name, size_t bytes,
                                    struct moe_shared *out) MOE_CHECKED;
/* Maps descriptor `fd` of process `pid` if it is memory of exactly `bytes` bytes that can neither
 * shrink nor grow. Does not open any other kind of file. Errors: MOE_FAILED_PRECONDITION,
 * MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_shared_open(uint32_t pid, uint32_t fd, size_t bytes,
                                  struct moe_shared *out) MOE_CHECKED;
/* A zeroed `m` is ignored. */
void moe_shared_close(struct moe_shared *m);

#endif
