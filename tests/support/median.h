/* SPDX-License-Identifier: Apache-2.0 */
/* The median of measured values. */
#ifndef MOE_TEST_MEDIAN_H
#define MOE_TEST_MEDIAN_H

#include <stddef.h>

/* n > 0. Sorts `values`. For an even n, the mean of the two middle values. */
double median(double *values, size_t n);

#endif
