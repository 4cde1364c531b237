/* SPDX-License-Identifier: Apache-2.0 */
/* A window's memory on the CPU: a memfd that is sealed before anyone else sees it, so that a
 * mapping of it can never fault because a peer shrank it. Pages are taken when first written. */
#ifndef MOE_CPU_WINDOW_H
#define MOE_CPU_WINDOW_H

#include "base/status.h"
#include "moe/window.h"

struct moe_cpu_window {
    uint8_t *base; /* NULL: not mapped */
    size_t bytes;
};

/* Makes and maps a window of `layout`; `*fd` is the caller's to pass on and to close. */
struct moe_status moe_cpu_window_create(const struct moe_window_layout *layout, uint32_t slot,
                                        uint64_t epoch, struct moe_cpu_window *out,
                                        int *fd) MOE_CHECKED;
/* Maps slot `slot`'s window after checking its size, its seals and its header. `fd` stays the
 * caller's. Errors: MOE_FAILED_PRECONDITION when it is not what it should be. */
struct moe_status moe_cpu_window_map(const struct moe_window_layout *layout, uint32_t slot,
                                     uint64_t epoch, int fd,
                                     struct moe_cpu_window *out) MOE_CHECKED;
void moe_cpu_window_unmap(struct moe_cpu_window *window); /* idempotent */

#endif
