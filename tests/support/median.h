/* SPDX-License-Identifier: Apache-2.0 */
/* The middle of what a benchmark measured. */
#ifndef MOE_TEST_MEDIAN_H
#define MOE_TEST_MEDIAN_H

#include <stddef.h>

/* Of n > 0 values, which it sorts; of an even number, the mean of the two in the middle. */
double median(double *values, size_t n);

#endif
