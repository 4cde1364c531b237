/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics.h"

#include "base/mutex.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const double moe_metrics_seconds_bounds[MOE_METRIC_SECONDS_BOUNDS] = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1,    0.25,    0.5,    1,     2.5,    5,     10,   30,    60};

/* A set counter is stored as a gauge. */
enum kind { KIND_COUNTER, KIND_GAUGE, KIND_HISTOGRAM, KIND_SET_COUNTER };

/* A double in an atomic word: the bits, because atomic arithmetic on doubles needs a loop anyway.
 */
typedef _Atomic uint64_t atomic_double;

struct moe_counter {
    _Atomic uint64_t value;
};
struct moe_gauge {
    atomic_double value;
};
struct moe_histogram {
    atomic_double sum;
    size_t bound_count;
    double bounds[MOE_METRIC_BUCKETS_MAX];
    _Atomic uint64_t buckets[MOE_METRIC_BUCKETS_MAX + 1]; /* not cumulative; the last one is +Inf */
};

struct series {
    struct series *next; /* of the same name */
    char *labels;        /* `a="x",b="y"`, escaped; "" without labels */
    union {
        struct moe_counter counter;
        struct moe_gauge gauge;
        struct moe_histogram histogram;
    };
};

struct family {
    struct family *next;
    char *name, *help;
    enum kind kind;
    struct series *first, *last;
};

struct collector {
    struct collector *next;
    void (*fn)(void *ctx);
    void *ctx;
};

struct moe_metrics {
    struct moe_mutex collecting; /* held while collectors run */
    MOE_GUARDED_BY(collecting) struct collector *collectors;
    struct moe_mutex lock; /* guards the lists, never the values */
    MOE_GUARDED_BY(lock) struct {
        struct family *first, *last;
    };
};

/* ------------------------------------------------------------------ updates */

static double load_double(const atomic_double *a)
{
    uint64_t bits = atomic_load_explicit(a, memory_order_relaxed);
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static uint64_t bits_of(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static void add_double(atomic_double *a, double delta)
{
    uint64_t old = atomic_load_explicit(a, memory_order_relaxed);
    uint64_t new;
    do {
        double v;
        memcpy(&v, &old, sizeof v);
        new = bits_of(v + delta);
    } while (!atomic_compare_exchange_weak_explicit(a, &old, new, memory_order_relaxed,
                                                    memory_order_relaxed));
}

void moe_counter_add(struct moe_counter *c, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value, n, memory_order_relaxed);
}

uint64_t moe_counter_value(const struct moe_counter *c)
{
    return atomic_load_explicit(&c->value, memory_order_relaxed);
}

void moe_gauge_set(struct moe_gauge *g, double value)
{
    atomic_store_explicit(&g->value, bits_of(value), memory_order_relaxed);
}

void moe_gauge_add(struct moe_gauge *g, double delta)
{
    add_double(&g->value, delta);
}

double moe_gauge_value(const struct moe_gauge *g)
{
    return load_double(&g->value);
}

void moe_histogram_observe(struct moe_histogram *h, double value)
{
    if (isnan(value))
        return;
    size_t i = 0;
    while (i < h->bound_count && value > h->bounds[i])
        i++;
    atomic_fetch_add_explicit(&h->buckets[i], 1, memory_order_relaxed);
    add_double(&h->sum, value);
}

/* ------------------------------------------------------------------ registration */

static bool is_name(const char *s, bool colon)
{
    if (s == NULL || s[0] == '\0' || (s[0] >= '0' && s[0] <= '9'))
        return false;
    for (; *s; s++) {
        bool letter = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || *s == '_';
        bool digit = *s >= '0' && *s <= '9';
        if (!letter && !digit && !(colon && *s == ':'))
            return false;
    }
    return true;
}

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "metrics");
}

/* Backslash and newline are escaped everywhere, the quote only inside label values. */
static void put_escaped(FILE *to, const char *text, bool quote)
{
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\\\", to);
        else if (*text == '\n')
            fputs("\\n", to);
        else if (*text == '"' && quote)
            fputs("\\\"", to);
        else
            fputc(*text, to);
    }
}

static struct moe_status format_labels(const struct moe_metric_desc *d, char **out)
{
    size_t length;
    FILE *to = open_memstream(out, &length);
    if (to == NULL)
        return out_of_memory();
    bool good = true;
    for (size_t i = 0; i < MOE_METRIC_LABELS_MAX && d->labels[i].name != NULL; i++) {
        good = good && is_name(d->labels[i].name, false) && d->labels[i].value != NULL;
        if (!good)
            break;
        fprintf(to, "%s%s=\"", i > 0 ? "," : "", d->labels[i].name);
        put_escaped(to, d->labels[i].value, true);
        fputc('"', to);
    }
    bool written = fclose(to) == 0;
    if (good && written)
        return moe_ok();
    free(*out);
    *out = NULL;
    return good ? out_of_memory()
                : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "metric %s: bad label",
                            d->name);
}

static void free_series(struct series *s)
{
    free(s->labels);
    free(s);
}

static void free_family(struct family *f)
{
    while (f->first != NULL) {
        struct series *s = f->first;
        f->first = s->next;
        free_series(s);
    }
    free(f->name);
    free(f->help);
    free(f);
}

static struct family *find_family(struct moe_metrics *m, const char *name) MOE_REQUIRES(m->lock)
{
    struct family *f = m->first;
    while (f != NULL && strcmp(f->name, name) != 0)
        f = f->next;
    return f;
}

static struct family *add_family(struct moe_metrics *m, const struct moe_metric_desc *d,
                                 enum kind kind) MOE_REQUIRES(m->lock)
{
    struct family *f = calloc(1, sizeof *f);
    if (f == NULL)
        return NULL;
    f->kind = kind;
    f->name = strdup(d->name);
    f->help = strdup(d->help != NULL ? d->help : "");
    if (f->name == NULL || f->help == NULL) {
        free_family(f);
        return NULL;
    }
    if (m->last != NULL)
        m->last->next = f;
    else
        m->first = f;
    m->last = f;
    return f;
}

/* Takes `s` over on success. */
static struct moe_status link_series(struct moe_metrics *m, const struct moe_metric_desc *d,
                                     enum kind kind, struct series *s) MOE_REQUIRES(m->lock)
{
    struct family *f = find_family(m, d->name);
    if (f != NULL && f->kind != kind)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "metric %s already has another kind", d->name);
    for (struct series *o = f != NULL ? f->first : NULL; o != NULL; o = o->next)
        if (strcmp(o->labels, s->labels) == 0)
            return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_CONFIG_INVALID,
                             "metric %s{%s} exists already", d->name, s->labels);
    if (f == NULL)
        f = add_family(m, d, kind);
    if (f == NULL)
        return out_of_memory();
    if (f->last != NULL)
        f->last->next = s;
    else
        f->first = s;
    f->last = s;
    return moe_ok();
}

static struct moe_status add_series(struct moe_metrics *m, const struct moe_metric_desc *d,
                                    enum kind kind, const double *bounds, size_t bound_count,
                                    struct series **out)
{
    if (!is_name(d->name, true))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "bad metric name");
    struct series *s = calloc(1, sizeof *s);
    if (s == NULL)
        return out_of_memory();
    if (kind == KIND_HISTOGRAM) {
        s->histogram.bound_count = bound_count;
        memcpy(s->histogram.bounds, bounds, bound_count * sizeof *bounds);
    }
    struct moe_status st = format_labels(d, &s->labels);
    if (st.code == MOE_OK) {
        moe_mutex_lock(&m->lock);
        st = link_series(m, d, kind, s);
        moe_mutex_unlock(&m->lock);
    }
    if (st.code != MOE_OK) {
        free(s->labels);
        free(s);
        return st;
    }
    *out = s;
    return moe_ok();
}

struct moe_status moe_metrics_add_counter(struct moe_metrics *m, const struct moe_metric_desc *desc,
                                          struct moe_counter **out)
{
    struct series *s;
    MOE_TRY(add_series(m, desc, KIND_COUNTER, NULL, 0, &s));
    *out = &s->counter;
    return moe_ok();
}

struct moe_status moe_metrics_add_gauge(struct moe_metrics *m, const struct moe_metric_desc *desc,
                                        struct moe_gauge **out)
{
    struct series *s;
    MOE_TRY(add_series(m, desc, KIND_GAUGE, NULL, 0, &s));
    *out = &s->gauge;
    return moe_ok();
}

struct moe_status moe_metrics_add_set_counter(struct moe_metrics *m,
                                              const struct moe_metric_desc *desc,
                                              struct moe_gauge **out)
{
    struct series *s;
    MOE_TRY(add_series(m, desc, KIND_SET_COUNTER, NULL, 0, &s));
    *out = &s->gauge;
    return moe_ok();
}

struct moe_status moe_metrics_add_histogram(struct moe_metrics *m,
                                            const struct moe_metric_desc *desc,
                                            const double *bounds, size_t bound_count,
                                            struct moe_histogram **out)
{
    bool good = bound_count <= MOE_METRIC_BUCKETS_MAX;
    for (size_t i = 0; good && i < bound_count; i++)
        good = isfinite(bounds[i]) && (i == 0 || bounds[i] > bounds[i - 1]);
    if (!good)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "histogram bounds must be few, finite and rising");
    struct series *s;
    MOE_TRY(add_series(m, desc, KIND_HISTOGRAM, bounds, bound_count, &s));
    *out = &s->histogram;
    return moe_ok();
}

struct moe_status moe_metrics_create(struct moe_metrics **out)
{
    struct moe_metrics *m = calloc(1, sizeof *m);
    if (m == NULL)
        return out_of_memory();
    moe_mutex_init(&m->lock);
    moe_mutex_init(&m->collecting);
    *out = m;
    return moe_ok();
}

void moe_metrics_destroy(struct moe_metrics *m)
{
    if (m == NULL)
        return;
    moe_mutex_not_shared(&m->lock);
    moe_mutex_not_shared(&m->collecting);
    while (m->collectors != NULL) {
        struct collector *c = m->collectors;
        m->collectors = c->next;
        free(c);
    }
    while (m->first != NULL) {
        struct family *f = m->first;
        m->first = f->next;
        free_family(f);
    }
    moe_mutex_destroy(&m->lock);
    moe_mutex_destroy(&m->collecting);
    free(m);
}

/* ------------------------------------------------------------------ removal */

/* `label`: `a="x"`, as in the labels of a series. A quote inside a value is escaped, so it does not
 * end one. */
static bool has_label(const struct series *s, const char *label)
{
    size_t length = strlen(label);
    for (const char *at = strstr(s->labels, label); at != NULL; at = strstr(at + 1, label))
        if ((at == s->labels || at[-1] == ',') && (at[length] == ',' || at[length] == '\0'))
            return true;
    return false;
}

static void remove_from(struct family *f, const char *label)
{
    struct series **at = &f->first;
    f->last = NULL;
    while (*at != NULL) {
        struct series *s = *at;
        if (has_label(s, label)) {
            *at = s->next;
            free_series(s);
        } else {
            f->last = s;
            at = &s->next;
        }
    }
}

void moe_metrics_remove_series(struct moe_metrics *m, struct moe_metric_label label)
{
    const struct moe_metric_desc desc = {.name = "", .labels = {label}};
    char *text;
    struct moe_status st = format_labels(&desc, &text);
    if (st.code != MOE_OK)
        return;
    moe_mutex_lock(&m->lock);
    for (struct family *f = m->first; f != NULL; f = f->next)
        remove_from(f, text);
    moe_mutex_unlock(&m->lock);
    free(text);
}

/* ------------------------------------------------------------------ collectors */

struct moe_status moe_metrics_add_collector(struct moe_metrics *m, void (*fn)(void *ctx), void *ctx)
{
    struct collector *c = malloc(sizeof *c);
    if (c == NULL)
        return out_of_memory();
    *c = (struct collector){.fn = fn, .ctx = ctx};
    moe_mutex_lock(&m->collecting);
    c->next = m->collectors;
    m->collectors = c;
    moe_mutex_unlock(&m->collecting);
    return moe_ok();
}

void moe_metrics_remove_collector(struct moe_metrics *m, void (*fn)(void *ctx), const void *ctx)
{
    moe_mutex_lock(&m->collecting);
    struct collector **at = &m->collectors;
    while (*at != NULL && ((*at)->fn != fn || (*at)->ctx != ctx))
        at = &(*at)->next;
    struct collector *c = *at;
    if (c != NULL)
        *at = c->next;
    moe_mutex_unlock(&m->collecting);
    free(c);
}

static void collect(struct moe_metrics *m)
{
    moe_mutex_lock(&m->collecting);
    for (const struct collector *c = m->collectors; c != NULL; c = c->next)
        c->fn(c->ctx);
    moe_mutex_unlock(&m->collecting);
}

/* ------------------------------------------------------------------ rendering */

static void put_number(FILE *to, double v)
{
    if (isnan(v))
        fputs("NaN", to);
    else if (isinf(v))
        fputs(v > 0 ? "+Inf" : "-Inf", to);
    else if (v == floor(v) && fabs(v) < 1e15)
        fprintf(to, "%.0f", v);
    else
        fprintf(to, "%.17g", v);
}

/* `name{labels} value`, for counters and gauges. */
static void put_sample(FILE *to, const struct family *f, const struct series *s)
{
    bool labels = s->labels[0] != '\0';
    fprintf(to, "%s%s%s%s ", f->name, labels ? "{" : "", s->labels, labels ? "}" : "");
    if (f->kind == KIND_COUNTER)
        fprintf(to, "%" PRIu64, moe_counter_value(&s->counter));
    else
        put_number(to, moe_gauge_value(&s->gauge));
    fputc('\n', to);
}

/* The count is the sum of the buckets as read here, so that a scrape is consistent in itself while
 * observations go on. */
static void put_histogram(FILE *to, const struct family *f, const struct series *s)
{
    const struct moe_histogram *h = &s->histogram;
    bool labels = s->labels[0] != '\0';
    uint64_t count = 0;
    for (size_t i = 0; i <= h->bound_count; i++) {
        count += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
        fprintf(to, "%s_bucket{%s%sle=\"", f->name, s->labels, labels ? "," : "");
        if (i < h->bound_count)
            fprintf(to, "%g", h->bounds[i]);
        else
            fputs("+Inf", to);
        fprintf(to, "\"} %" PRIu64 "\n", count);
    }
    const char *open = labels ? "{" : "", *close = labels ? "}" : "";
    fprintf(to, "%s_sum%s%s%s ", f->name, open, s->labels, close);
    put_number(to, load_double(&h->sum));
    fprintf(to, "\n%s_count%s%s%s %" PRIu64 "\n", f->name, open, s->labels, close, count);
}

struct moe_status moe_metrics_render(struct moe_metrics *m, char **text, size_t *length)
{
    static const char *const kinds[] = {"counter", "gauge", "histogram", "counter"};
    collect(m);
    FILE *to = open_memstream(text, length);
    if (to == NULL)
        return out_of_memory();
    moe_mutex_lock(&m->lock);
    for (const struct family *f = m->first; f != NULL; f = f->next) {
        fprintf(to, "# HELP %s ", f->name);
        put_escaped(to, f->help, false);
        fprintf(to, "\n# TYPE %s %s\n", f->name, kinds[f->kind]);
        for (const struct series *s = f->first; s != NULL; s = s->next) {
            if (f->kind == KIND_HISTOGRAM)
                put_histogram(to, f, s);
            else
                put_sample(to, f, s);
        }
    }
    moe_mutex_unlock(&m->lock);
    bool failed = ferror(to) != 0;
    if (fclose(to) == 0 && !failed)
        return moe_ok();
    free(*text);
    *text = NULL;
    return out_of_memory();
}
