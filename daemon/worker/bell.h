/* A bell wakes one thread, from any thread of any process that has it: a counter in shared memory
 * with a futex on it. The owner sleeps on it or, while it expects news at any moment, just watches
 * the counter; whoever brings news changes what the owner looks at first, and rings then.
 *
 * A ring is never lost: the owner reads the counter, looks at everything that could be new, and
 * waits for the counter to be another one. */
#ifndef MOE_WORKER_BELL_H
#define MOE_WORKER_BELL_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

struct moe_bell;

struct moe_status moe_bell_create(struct moe_bell **out) MOE_CHECKED;
/* The bell that process `process` has as descriptor `fd`, to be rung. Errors:
 * MOE_FAILED_PRECONDITION (it is not to be seen from here, or no bell), MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_bell_open(uint32_t process, uint32_t fd, struct moe_bell **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_bell_destroy(struct moe_bell *b);

/* Descriptor of its memory, for moe_bell_open in another process; stays the bell's. */
int moe_bell_fd(const struct moe_bell *b);

/* Any thread. Everything written before is seen by the owner when it has read the new count. */
void moe_bell_ring(struct moe_bell *b);

/* Owner. How often it was rung, modulo 2^32. */
uint32_t moe_bell_count(const struct moe_bell *b);
/* Owner. Sleeps while the count is `heard`, at most until `deadline_ns` (MOE_NEVER: no limit); may
 * return earlier without a reason. */
void moe_bell_wait(struct moe_bell *b, uint32_t heard, uint64_t deadline_ns);
/* Owner. The same without sleeping: a ring is noticed at once, at the price of a processor. */
void moe_bell_watch(const struct moe_bell *b, uint32_t heard, uint64_t deadline_ns);

#endif
