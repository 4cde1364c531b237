/* SPDX-License-Identifier: Apache-2.0 */
/* Distributions of times in fixed memory: 128 buckets per power of two, so that a percentile is
 * off by less than 0.4 %. Exact below 256. */
#ifndef MOECTL_HISTOGRAM_H
#define MOECTL_HISTOGRAM_H

#include <stdint.h>

enum { MOECTL_HISTOGRAM_BUCKETS = 57 * 128 + 128 };

struct moectl_histogram {
    uint64_t count, max;
    double sum;
    uint64_t buckets[MOECTL_HISTOGRAM_BUCKETS];
};

void moectl_histogram_add(struct moectl_histogram *h, uint64_t value);
/* The smallest value that at least `percent` % of all values do not exceed; 0 without values. */
uint64_t moectl_histogram_percentile(const struct moectl_histogram *h, double percent);
double moectl_histogram_mean(const struct moectl_histogram *h);

#endif
