/* SPDX-License-Identifier: Apache-2.0 */
#include "access/expiry.h"

#include "daemon/log.h"

#include <stdio.h>
#include <time.h>

enum { CERTIFICATE, CLIENT_CA, CA }; /* indices of `files` */

void moe_expiry_init(struct moe_expiry *e, const struct moe_daemon_settings *settings)
{
    *e = (struct moe_expiry){
        .files = {
            [CERTIFICATE] = {.option = "tls-certificate", .path = settings->tls_certificate},
            [CLIENT_CA] = {.option = "tls-client-ca", .path = settings->tls_client_ca},
            [CA] = {.option = "tls-ca", .path = settings->tls_ca},
        }};
}

bool moe_expiry_due(int64_t ends, int64_t now, int64_t *warned)
{
    bool soon = ends != 0 && ends - now < MOE_EXPIRY_SOON_S;
    bool recently = *warned != 0 && now >= *warned && now - *warned < MOE_EXPIRY_REPEAT_S;
    if (!soon || recently)
        return false;
    *warned = now;
    return true;
}

static void warn(const struct moe_expiry_file *f, int64_t now)
{
    char when[32];
    const time_t ends = (time_t)f->ends;
    const int64_t left = f->ends - now;
    struct tm date;
    if (gmtime_r(&ends, &date) == NULL ||
        strftime(when, sizeof when, "%Y-%m-%d %H:%M UTC", &date) == 0)
        (void)snprintf(when, sizeof when, "an unknown time");
    if (left <= 0)
        moe_log_error("TLS: --%s %s has ended on %s: connections fail until the file is replaced",
                      f->option, f->path, when);
    else
        moe_log_warn("TLS: --%s %s ends on %s, in %lld h: replace the file", f->option, f->path,
                     when, (long long)(left / 3600));
}

/* The file of roots that this daemon's own calls use. Damaged new ones leave those before in use.
 */
static void look_at_ca(struct moe_expiry *e)
{
    struct moe_expiry_file *f = &e->files[CA];
    struct moe_tls_dates dates;
    if (f->path == NULL)
        return;
    bool changed = moe_trusted_file_changed(f->path, &e->ca_mark);
    if (!changed && !e->ca_refused) /* a refused file may be valid: descriptors were lacking */
        return;
    struct moe_status st = moe_tls_dates_read(&(struct moe_rpc_tls_files){.ca = f->path}, &dates);
    e->ca_refused = moe_failed(&st);
    if (!e->ca_refused)
        f->ends = dates.ca;
}

void moe_expiry_look(struct moe_expiry *e, struct moe_tls *tls, int64_t now)
{
    if (tls != NULL) {
        const struct moe_tls_dates dates = moe_tls_dates(tls);
        e->files[CERTIFICATE].ends = dates.certificate;
        e->files[CLIENT_CA].ends = dates.ca;
    }
    look_at_ca(e);
    for (size_t i = 0; i < MOE_EXPIRY_FILES; i++) {
        struct moe_expiry_file *f = &e->files[i];
        if (moe_expiry_due(f->ends, now, &f->warned))
            warn(f, now);
    }
}

static void set(const struct moe_expiry_metrics *m, size_t i)
{
    if (m->gauges[i] != NULL)
        moe_gauge_set(m->gauges[i], (double)m->ends[i]);
}

void moe_expiry_show(const struct moe_expiry *e, struct moe_expiry_metrics *m)
{
    for (size_t i = 0; i < MOE_EXPIRY_FILES; i++) {
        m->ends[i] = e->files[i].ends;
        set(m, i);
    }
}

struct moe_status moe_expiry_add_metrics(struct moe_expiry_metrics *m,
                                         const struct moe_daemon_settings *settings,
                                         struct moe_metrics *registry)
{
    struct moe_expiry e;
    moe_expiry_init(&e, settings);
    for (size_t i = 0; i < MOE_EXPIRY_FILES; i++) {
        const struct moe_metric_desc d = {.name = "moe_tls_certificate_expiry_seconds",
                                          .help =
                                              "Unix time at which the certificates of a file end.",
                                          .labels = {{"file", e.files[i].option}}};
        if (e.files[i].path == NULL)
            continue;
        MOE_TRY(moe_metrics_add_gauge(registry, &d, &m->gauges[i]));
        set(m, i);
    }
    return moe_ok();
}
