/* SPDX-License-Identifier: Apache-2.0 */
/* How far a transfer of bytes is, as a text for people: loading, Save and Load look the same in
 * logs, in `systemctl status` and in moectl. Pure. */
#ifndef MOE_BASE_TRANSFER_H
#define MOE_BASE_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

enum { MOE_BYTES_TEXT = 24, MOE_TRANSFER_TEXT = 128 };

/* "12.5 MiB". */
void moe_bytes_text(uint64_t bytes, char out[MOE_BYTES_TEXT]);

/* Percent of `total` that is done, rounded down: 100 only when all is. 0 if `total` is. */
unsigned moe_transfer_percent(uint64_t done, uint64_t total);

/* "45 %, 1.2 GiB of 2.6 GiB, 350.1 MiB/s, 4 s left"; without rate and time if `bytes_per_s` is 0 or
 * less, and without time once all is done. */
void moe_transfer_text(uint64_t done, uint64_t total, double bytes_per_s,
                       char out[MOE_TRANSFER_TEXT]);

#endif
