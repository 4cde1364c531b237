/* SPDX-License-Identifier: Apache-2.0 */
/* A window's memory on the CPU: a memfd, sealed before any peer has it. So a peer cannot shrink it,
 * and a mapping never faults. The kernel allocates a page at its first write. */
#ifndef MOE_CPU_WINDOW_H
#define MOE_CPU_WINDOW_H

#include "base/status.h"
#include "moe/window.h"

struct moe_cpu_window {
    uint8_t *base; /* NULL: not mapped */
    size_t bytes;
};

/* Makes and maps a window of `layout`. The caller closes `*fd`. */
struct moe_status moe_cpu_window_create(const struct moe_window_layout *layout, uint32_t slot,
                                        uint64_t epoch, struct moe_cpu_window *out,
                                        int *fd) MOE_CHECKED;
/* Maps slot `slot`'s window after checking its size, its seals and its header. The caller closes
 * `fd`. Errors: MOE_FAILED_PRECONDITION if a check fails. */
struct moe_status moe_cpu_window_map(const struct moe_window_layout *layout, uint32_t slot,
                                     uint64_t epoch, int fd,
                                     struct moe_cpu_window *out) MOE_CHECKED;
/* Its owner has another mask, and no thread waits. */
void moe_cpu_window_renew(const struct moe_cpu_window *own, uint64_t epoch);
void moe_cpu_window_unmap(struct moe_cpu_window *window); /* idempotent */

#endif
