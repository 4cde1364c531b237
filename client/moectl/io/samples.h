/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon's metrics page (AdminService.GetMetrics), parsed. Lines that are not samples are
 * skipped. */
#ifndef MOECTL_SAMPLES_H
#define MOECTL_SAMPLES_H

#include <stdbool.h>
#include <stddef.h>

struct moectl_sample {
    const char *name;
    const char *labels; /* `kind="forward",stage="gemm1"`; "" without labels */
    double value;
};

struct moectl_samples {
    char *text; /* owned; samples point into it */
    struct moectl_sample *all;
    size_t count;
};

/* Free with moectl_samples_free, also after a failure: false when out of memory. */
bool moectl_samples_parse(const char *page, struct moectl_samples *out);
void moectl_samples_free(struct moectl_samples *s);
/* The sum of all samples of `name` with `label` among their labels (`kind="forward"`; NULL: any);
 * 0 when there are none. NULL `s` has none. */
double moectl_samples_sum(const struct moectl_samples *s, const char *name, const char *label);
bool moectl_samples_have(const struct moectl_samples *s, const char *name);
/* The value of label `key`; false when the sample lacks it, or it does not fit. */
bool moectl_sample_label(const struct moectl_sample *sample, const char *key, char *out,
                         size_t size);

#endif
