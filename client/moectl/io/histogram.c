/* SPDX-License-Identifier: Apache-2.0 */
/* See histogram.h. */
#include "moectl/io/histogram.h"

enum { SUB_BITS = 7, SUB = 1 << SUB_BITS };

/* Each value below 2 * SUB has a bucket. Above, the leading SUB_BITS + 1 bits give the bucket. */
static unsigned bucket_of(uint64_t value)
{
    unsigned bits = value == 0 ? 0 : 64 - (unsigned)__builtin_clzll(value);
    unsigned shift = bits > SUB_BITS + 1 ? bits - SUB_BITS - 1 : 0;
    return shift * SUB + (unsigned)(value >> shift);
}

/* The value in the middle of a bucket. */
static uint64_t value_of(unsigned bucket)
{
    unsigned shift = bucket < 2 * SUB ? 0 : bucket / SUB - 1;
    uint64_t low = (uint64_t)(bucket - shift * SUB) << shift;
    return low + ((UINT64_C(1) << shift) - 1) / 2;
}

void moectl_histogram_add(struct moectl_histogram *h, uint64_t value)
{
    h->count++;
    h->sum += (double)value;
    if (value > h->max)
        h->max = value;
    h->buckets[bucket_of(value)]++;
}

uint64_t moectl_histogram_percentile(const struct moectl_histogram *h, double percent)
{
    double wanted = (double)h->count * percent / 100.0;
    uint64_t seen = 0;
    for (unsigned i = 0; i < MOECTL_HISTOGRAM_BUCKETS; i++) {
        seen += h->buckets[i];
        if (h->buckets[i] > 0 && (double)seen >= wanted)
            return value_of(i) < h->max ? value_of(i) : h->max;
    }
    return h->max;
}

double moectl_histogram_mean(const struct moectl_histogram *h)
{
    return h->count > 0 ? h->sum / (double)h->count : 0;
}
