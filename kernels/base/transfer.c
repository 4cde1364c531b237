/* SPDX-License-Identifier: Apache-2.0 */
#include "base/transfer.h"

#include <stdio.h>

void moe_bytes_text(uint64_t bytes, char out[MOE_BYTES_TEXT])
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes / 1024;
    size_t u = 0;
    for (; value >= 1024 && u + 1 < sizeof units / sizeof *units; u++)
        value /= 1024;
    (void)snprintf(out, MOE_BYTES_TEXT, "%.1f %s", value, units[u]);
}

unsigned moe_transfer_percent(uint64_t done, uint64_t total)
{
    if (total == 0)
        return 0;
    if (done >= total)
        return 100;
    unsigned percent = (unsigned)(100.0 * ((double)done / (double)total));
    return percent < 100 ? percent : 99;
}

/* "4 s", "3 min 20 s", "2 h 5 min". */
static void print_time(double s, char *out, size_t size)
{
    enum { MINUTE = 60, HOUR = 3600 };
    unsigned long long n = s < 1e9 ? (unsigned long long)(s + 0.5) : 1000000000ULL;
    if (n < MINUTE)
        (void)snprintf(out, size, "%llu s", n);
    else if (n < HOUR)
        (void)snprintf(out, size, "%llu min %llu s", n / MINUTE, n % MINUTE);
    else
        (void)snprintf(out, size, "%llu h %llu min", n / HOUR, n % HOUR / MINUTE);
}

void moe_transfer_text(uint64_t done, uint64_t total, double bytes_per_s,
                       char out[MOE_TRANSFER_TEXT])
{
    char part[MOE_BYTES_TEXT], whole[MOE_BYTES_TEXT], rate[MOE_BYTES_TEXT], left[32];
    moe_bytes_text(done, part);
    moe_bytes_text(total, whole);
    int n = snprintf(out, MOE_TRANSFER_TEXT, "%u %%, %s of %s", moe_transfer_percent(done, total),
                     part, whole);
    if (!(bytes_per_s > 0))
        return;
    moe_bytes_text((uint64_t)bytes_per_s, rate);
    n += snprintf(out + n, MOE_TRANSFER_TEXT - (size_t)n, ", %s/s", rate);
    if (done >= total)
        return;
    print_time((double)(total - done) / bytes_per_s, left, sizeof left);
    (void)snprintf(out + n, MOE_TRANSFER_TEXT - (size_t)n, ", %s left", left);
}
