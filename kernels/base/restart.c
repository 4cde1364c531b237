/* SPDX-License-Identifier: Apache-2.0 */
/* See restart.h. */
#include "base/restart.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FIRST_NS   (100 * MOE_NS_PER_MS)
#define LONGEST_NS (10 * MOE_NS_PER_S)
#define GOOD_NS    (60 * MOE_NS_PER_S)

enum { DOUBLINGS_MAX = 16, RECORD_BYTES = 64 };

uint64_t moe_restart_wait_ns(uint32_t *ends, uint64_t lived_ns)
{
    uint32_t before = lived_ns >= GOOD_NS ? 0 : *ends;
    uint64_t wait = FIRST_NS << (before < DOUBLINGS_MAX ? before : DOUBLINGS_MAX);
    *ends = before < UINT32_MAX ? before + 1 : before;
    return wait < LONGEST_NS ? wait : LONGEST_NS;
}

/* "ENDS STARTED": ends in a row before the last start, and its time by moe_clock_ns, which begins
 * again with each boot. False for no record, and for none of this boot. */
static bool read_record(const char *path, uint64_t now_ns, uint32_t *ends, uint64_t *started_ns)
{
    char text[RECORD_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = '\0';
    return sscanf(text, "%" SCNu32 " %" SCNu64, ends, started_ns) == 2 && *started_ns <= now_ns;
}

static struct moe_status write_record(const char *path, uint32_t ends, uint64_t started_ns)
{
    char text[RECORD_BYTES];
    int n = snprintf(text, sizeof text, "%" PRIu32 " %" PRIu64 "\n", ends, started_ns);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    bool written = fd >= 0 && write(fd, text, (size_t)n) == n;
    int error = errno;
    if (fd >= 0)
        close(fd);
    return written ? moe_ok()
                   : moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the record of starts: %.120s: %s",
                               path, strerror(error));
}

struct moe_status moe_restart_note(const char *path, uint64_t *wait_ns, uint32_t *ends)
{
    uint64_t now = moe_clock_ns(), started;
    *wait_ns = 0;
    *ends = 0;
    if (read_record(path, now, ends, &started))
        *wait_ns = moe_restart_wait_ns(ends, now - started) - FIRST_NS;
    struct moe_status st = write_record(path, *ends, now + *wait_ns);
    if (moe_failed(&st))
        *wait_ns = 0;
    return st;
}

void moe_restart_forget(const char *path)
{
    (void)unlink(path);
}
