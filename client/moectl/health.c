/* SPDX-License-Identifier: Apache-2.0 */
/* moectl health: checks with codes, for operators and monitoring. A check looks at one thing of one
 * daemon, or of the group, and never changes anything. */
#include "commands.h"
#include "daemon/endpoint.h"
#include "moectl/group/events.h"
#include "moectl/group/models.h"
#include "moectl/group/train_state.h"
#include "moectl/io/proto_json.h"
#include "moectl/io/samples.h"
#include "workers.h"

#include "base/build.h"
#include "base/clock.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CHECKS_MAX = 32 + 11 * MOE_MAX_SLOTS,
    WORKER_LIMIT_MS = 5000,
    STANDBY_LIMIT_MS = 2000,
    RECENT_MS = 10 * 60 * 1000,
    CLOCK_MS = 5000, /* leases do not depend on this clock; logs and certificates do */
    EXPIRY_SOON_DAYS = 30,
    EXPIRY_CRITICAL_DAYS = 3,
    DAY_S = 24 * 3600,
};

enum result { RESULT_OK, RESULT_WARNING, RESULT_CRITICAL };
static const char *const result_names[] = {"OK", "WARNING", "CRITICAL"};

struct check {
    const char *code;
    char subject[64]; /* "group", "coordinator", "slot 3", the name of an added model */
    enum result result;
    char text[320];
};

struct health {
    struct moectl_common common;
    bool detail;
    uint64_t deadline_ns;
    struct moectl_link *link; /* to the coordinator that leads */
    Moe__V1__GetStatusResponse *status;
    Moe__V1__ListEventsResponse *events; /* NULL: not allowed to see them */
    struct check *checks;
    size_t count;
};

static void add(struct health *h, const char *code, const char *subject, enum result result,
                const char *fmt, ...) MOECTL_FORMAT(5, 6);

static void add(struct health *h, const char *code, const char *subject, enum result result,
                const char *fmt, ...)
{
    if (h->count == CHECKS_MAX)
        return;
    struct check *c = &h->checks[h->count++];
    va_list args;
    *c = (struct check){.code = code, .result = result};
    (void)snprintf(c->subject, sizeof c->subject, "%s", subject);
    va_start(args, fmt);
    if (vsnprintf(c->text, sizeof c->text, fmt, args) < 0)
        c->text[0] = '\0';
    va_end(args);
}

static int64_t unix_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ------------------------------------------------------------------ the group */

static void check_group(struct health *h)
{
    const Moe__V1__GetStatusResponse *s = h->status;
    const char *state = moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state);
    bool serves = s->state == MOE__V1__GROUP_STATE__GROUP_STATE_SERVING;
    size_t live = moectl_workers_live(s);
    uint32_t size = moectl_workers_size(s);
    add(h, "GROUP_SERVING", "group", serves ? RESULT_OK : RESULT_CRITICAL, "%s%s%s", state,
        s->reason[0] != '\0' ? ": " : "", s->reason);
    bool masked = serves && s->n_live_slots < moectl_workers_size(s);
    char fill[96] = "";
    if (moectl_workers_can_fill(s))
        (void)snprintf(fill, sizeof fill,
                       "; spare workers: %zu, `moectl scale %" PRIu32 "` gives the place to one",
                       s->n_spare_slots, size);
    add(h, "SLOTS_TAKEN", "group",
        live == size ? RESULT_OK
        : masked     ? RESULT_WARNING
                     : RESULT_CRITICAL,
        "%zu of %" PRIu32 " slots have a live worker%s", live, size, fill);
    if ((s->replicas > 1 || masked) && s->epoch != 0) {
        char view[512];
        moectl_workers_describe_view(s, view, sizeof view);
        add(h, "VIEW_COMPLETE", "group", masked ? RESULT_WARNING : RESULT_OK, "%s", view);
    }
    bool recorded = s->model_digest[0] != '\0';
    add(h, "WEIGHTS_AGREE", "group", recorded || !serves ? RESULT_OK : RESULT_WARNING, "%s%s",
        !recorded ? "no digest is recorded"
        : serves  ? "all slots agree on digest "
                  : "not compared while the group does not serve; on record is digest ",
        s->model_digest);
}

static void check_cordons(struct health *h)
{
    char subject[16];
    for (size_t i = 0; i < h->status->n_cordons; i++) {
        (void)snprintf(subject, sizeof subject, "slot %" PRIu32, h->status->cordons[i]->slot);
        add(h, "SLOT_CORDONED", subject, RESULT_WARNING, "%s", h->status->cordons[i]->reason);
    }
}

/* Of the added models. A model that failed is tried again; the group serves all others. */
static void check_models(struct health *h)
{
    Moe__V1__ListModelsResponse *list = moectl_models_try(h->link, h->deadline_ns);
    for (size_t i = 0; list != NULL && i < list->n_models; i++) {
        const Moe__V1__ModelStatus *m = list->models[i];
        bool failed = m->state == MOE__V1__MODEL_STATE__MODEL_STATE_FAILED;
        if (!m->is_default)
            add(h, "MODEL_SERVING", m->name, failed ? RESULT_WARNING : RESULT_OK, "%s%s%s",
                moectl_model_state(m), m->reason[0] != '\0' ? ": " : "", m->reason);
    }
    if (list != NULL)
        moe__v1__list_models_response__free_unpacked(list, NULL);
}

/* The coordinator's clock at its answer. 0: not known. */
static int64_t coordinators_clock(const struct health *h)
{
    return h->events != NULL ? h->events->started_unix_ms + (int64_t)h->status->uptime_ms : 0;
}

static size_t count_recent(const struct health *h, Moe__V1__EventKind kind)
{
    size_t found = 0;
    for (size_t i = 0; h->events != NULL && i < h->events->n_events; i++)
        found += h->events->events[i]->kind == kind &&
                 h->events->events[i]->unix_ms > coordinators_clock(h) - RECENT_MS;
    return found;
}

/* Views that served and failed. An attempt that did not form ends with the same kind of event, and
 * so does a view that somebody wanted to end: of a group that was scaled or has grown, or of a
 * worker that was drained. Such an end is no warning. */
static size_t count_failed_views(const struct health *h)
{
    size_t ended = 0;
    /* The event of its commit may be forgotten. */
    bool serves = h->events->n_events > 0 && h->events->events[0]->sequence > 1;
    for (size_t i = 0; i < h->events->n_events; i++) {
        const Moe__V1__Event *e = h->events->events[i];
        if (e->kind == MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_ENDED)
            ended += serves && e->severity >= MOE__V1__EVENT_SEVERITY__EVENT_SEVERITY_WARNING &&
                     e->unix_ms > coordinators_clock(h) - RECENT_MS;
        if (e->kind == MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_SERVING ||
            e->kind == MOE__V1__EVENT_KIND__EVENT_KIND_GROUP_RESTORING)
            serves = true;
        if (e->kind == MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_ENDED ||
            e->kind == MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_PREPARING)
            serves = false;
    }
    return ended;
}

/* `samples`: the coordinator's; without them, the events of failed writes decide. */
static void check_saved(struct health *h, const struct moectl_samples *samples)
{
    static const char name[] = "moe_state_saved";
    size_t failed = count_recent(h, MOE__V1__EVENT_KIND__EVENT_KIND_STATE_NOT_SAVED);
    bool known = moectl_samples_have(samples, name);
    bool saved = known ? moectl_samples_sum(samples, name, NULL) > 0 : failed == 0;
    add(h, "STATE_SAVED", "coordinator",
        !saved        ? RESULT_CRITICAL
        : failed == 0 ? RESULT_OK
                      : RESULT_WARNING,
        "failed writes of the group's state in the last 10 minutes: %zu%s", failed,
        !known   ? ""
        : !saved ? "; the last write failed, the next change of the group writes again"
                 : "; the last write succeeded");
}

static void check_store(struct health *h)
{
    const Moe__V1__GetStatusResponse *s = h->status;
    if (strcmp(s->store, "etcd") != 0)
        return;
    bool answers = s->leader_lease_remaining_ms > 0;
    add(h, "ETCD_ANSWERS", "coordinator", answers ? RESULT_OK : RESULT_CRITICAL,
        "the leader's lease has %.1f s; failed calls of etcd since the start: %" PRIu64,
        (double)s->leader_lease_remaining_ms / 1000.0, s->etcd_errors);
}

static void check_events(struct health *h)
{
    size_t failed = count_failed_views(h);
    size_t refused = count_recent(h, MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_REFUSED);
    int64_t off = coordinators_clock(h) - unix_ms();
    add(h, "GROUP_STABLE", "group", failed == 0 ? RESULT_OK : RESULT_WARNING,
        "views that served and failed in the last 10 minutes: %zu", failed);
    add(h, "WORKER_REFUSED", "group", refused == 0 ? RESULT_OK : RESULT_WARNING,
        "refusals of workers in the last 10 minutes: %zu; see moectl get events", refused);
    add(h, "CLOCK", "coordinator", llabs(off) <= CLOCK_MS ? RESULT_OK : RESULT_WARNING,
        "its clock is %.1f s %s this host's", (double)llabs(off) / 1000.0,
        off < 0 ? "behind" : "ahead of");
}

/* ------------------------------------------------------------------ one daemon */

static void check_certificate(struct health *h, const char *subject,
                              const struct moectl_samples *samples)
{
    static const char name[] = "moe_tls_certificate_expiry_seconds";
    static const char *const files[] = {"tls-certificate", "tls-client-ca", "tls-ca"};
    char when[MOECTL_TIME_BYTES], label[48];
    const char *first = NULL;
    double ends_s = 0;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        (void)snprintf(label, sizeof label, "file=\"%s\"", files[i]);
        double s = moectl_samples_sum(samples, name, label);
        if (s <= 0 || (first != NULL && s >= ends_s))
            continue; /* not given, or later */
        first = files[i];
        ends_s = s;
    }
    if (first == NULL)
        return; /* no TLS */
    double left_s = ends_s - (double)unix_ms() / 1000.0;
    add(h, "CERTIFICATE_EXPIRY", subject,
        left_s < (double)(EXPIRY_CRITICAL_DAYS * DAY_S) ? RESULT_CRITICAL
        : left_s < (double)(EXPIRY_SOON_DAYS * DAY_S)   ? RESULT_WARNING
                                                        : RESULT_OK,
        "its --%s %s %s", first, left_s > 0 ? "expires" : "expired",
        moectl_time_text((int64_t)ends_s * 1000, when));
}

/* What the daemon read before is in use, so it serves until that expires, or until it restarts. */
static void check_trust(struct health *h, const char *subject, const struct moectl_samples *samples)
{
    static const char name[] = "moe_trust_file_refused";
    static const char *const files[] = {"tls-certificate", "tls-ca", "access-file", "token-file"};
    char label[48], list[128] = "";
    if (!moectl_samples_have(samples, name))
        return;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        (void)snprintf(label, sizeof label, "file=\"%s\"", files[i]);
        if (moectl_samples_sum(samples, name, label) > 0)
            (void)snprintf(list + strlen(list), sizeof list - strlen(list), "%s--%s",
                           list[0] != '\0' ? ", " : "", files[i]);
    }
    if (list[0] == '\0')
        add(h, "TRUST_FILES", subject, RESULT_OK, "its files of trust are those in use");
    else
        add(h, "TRUST_FILES", subject, RESULT_WARNING,
            "not valid as it is on the disk: %s; what was read before is in use, its log says more",
            list);
}

static void check_numerics(struct health *h, const char *subject,
                           const struct moectl_samples *samples)
{
    double count = moectl_samples_sum(samples, "moe_nonfinite_total", NULL);
    add(h, "FINITE_LOGITS", subject, count > 0 ? RESULT_WARNING : RESULT_OK,
        "requests with NaN or infinite router logits since its start: %.0f", count);
}

static void check_release(struct health *h, const char *subject, const char *version)
{
    bool same = strcmp(version, h->status->version) == 0;
    add(h, "RELEASES_AGREE", subject, same ? RESULT_OK : RESULT_WARNING,
        same ? "release %s" : "release %s, and the coordinator has %s", version,
        h->status->version);
}

/* --backend cuda ends a worker that cannot have it; --backend auto takes the CPU. */
static void check_backend(struct health *h, const char *subject,
                          const Moe__V1__GetServerInfoResponse *info)
{
    bool failed = strcmp(info->cuda_module, "failed") == 0;
    add(h, "BACKEND", subject, failed ? RESULT_WARNING : RESULT_OK, "%s%s%s%s%s", info->backend,
        info->backend_asked[0] != '\0' ? ", by --backend " : "", info->backend_asked,
        failed ? ": the installed CUDA module cannot be used: " : "",
        failed ? info->cuda_problem : "");
}

static void check_training(struct health *h, const char *subject, const char *endpoint)
{
    Moe__V1__GetTrainStateResponse *state = NULL;
    struct moe_status st = moectl_train_probe(endpoint, h->deadline_ns, &state);
    if (st.code == MOE_INVALID_ARGUMENT) /* the worker names no usable endpoint for training */
        add(h, "TRAINING", subject, RESULT_WARNING, "%s", st.text);
    if (moe_failed(&st))
        return; /* else it does not train */
    add(h, "TRAINING", subject, state->problem[0] != '\0' ? RESULT_CRITICAL : RESULT_OK, "%s",
        state->problem[0] != '\0' ? state->problem : "no operator needs to decide");
    moe__v1__get_train_state_response__free_unpacked(state, NULL);
}

static void check_answers(struct health *h, const char *subject, const Moe__V1__WorkerStatus *w)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    struct moectl_samples samples = {0};
    uint64_t begun = moe_clock_ns(), limit = begun + WORKER_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st =
        moectl_link_open_worker(moectl_link_endpoint(h->link), w->endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_server_info(link, moe_earlier(limit, h->deadline_ns), &info);
    add(h, "WORKER_ANSWERS", subject, moe_failed(&st) ? RESULT_CRITICAL : RESULT_OK, "at %s%s%s",
        w->endpoint, moe_failed(&st) ? ": " : "", moe_failed(&st) ? st.text : "");
    if (!moe_failed(&st)) {
        check_release(h, subject, info->version);
        check_backend(h, subject, info);
        st = moectl_link_samples(link, moe_earlier(limit, h->deadline_ns), &samples);
    }
    if (!moe_failed(&st)) {
        check_certificate(h, subject, &samples);
        check_trust(h, subject, &samples);
        check_numerics(h, subject, &samples);
        check_training(h, subject, w->endpoint);
    }
    moectl_samples_free(&samples);
    if (info != NULL)
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    moectl_link_close(link);
}

static void check_worker(struct health *h, const Moe__V1__WorkerStatus *w)
{
    char subject[16];
    (void)snprintf(subject, sizeof subject, "slot %" PRIu32, w->slot);
    if (w->error != NULL)
        add(h, "WORKER_ERROR", subject,
            strcmp(w->error->reason, "MODEL_MISMATCH") == 0 ? RESULT_CRITICAL : RESULT_WARNING,
            "%s: %s", w->error->reason, w->error->message);
    if (w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE) {
        add(h, "WORKER_LEASE", subject, RESULT_CRITICAL, "%s is gone", w->worker_id);
        return;
    }
    add(h, "WORKER_LEASE", subject, w->connected ? RESULT_OK : RESULT_WARNING,
        w->connected ? "its lease is renewed; %.1f s are left"
                     : "it is not connected; its lease ends in %.1f s",
        (double)w->lease_remaining_ms / 1000.0);
    if (w->endpoint[0] != '\0')
        check_answers(h, subject, w);
}

static void check_coordinator(struct health *h)
{
    struct moectl_samples samples = {0};
    bool same = strcmp(moe_build_version(), h->status->version) == 0;
    add(h, "COORDINATOR_ANSWERS", "coordinator", RESULT_OK, "up %.0f s",
        (double)h->status->uptime_ms / 1000.0);
    add(h, "RELEASES_AGREE", "moectl", same ? RESULT_OK : RESULT_WARNING,
        same ? "release %s" : "release %s, and the coordinator has %s", moe_build_version(),
        h->status->version);
    struct moe_status st = moectl_link_samples(h->link, h->deadline_ns, &samples);
    if (!moe_failed(&st)) {
        check_certificate(h, "coordinator", &samples);
        check_trust(h, "coordinator", &samples);
    }
    if (!moe_failed(&st) || h->events != NULL)
        check_saved(h, &samples);
    check_store(h);
    moectl_samples_free(&samples);
}

/* One that does not lead answers with NOT_LEADER and the leader's endpoint. If it names none, it
 * could not lead now: it does not reach etcd. Also workers may be named: those only have to answer.
 */
static void check_standby(struct health *h, const char *endpoint, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    uint64_t limit = moe_clock_ns() + STANDBY_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_link_open(endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_status(link, moe_earlier(limit, deadline_ns), &status);
    const char *leader = moe_endpoint_of_leader(&st);
    bool silent = st.code == MOE_UNAVAILABLE || st.code == MOE_DEADLINE_EXCEEDED;
    if (leader[0] != '\0')
        add(h, "STANDBY_ANSWERS", "coordinator", RESULT_OK, "at %s: it waits, and the leader is %s",
            endpoint, leader);
    else if (silent)
        add(h, "STANDBY_ANSWERS", "coordinator", RESULT_WARNING, "at %s: %s", endpoint,
            st.code == MOE_DEADLINE_EXCEEDED ? "no answer" : st.text);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
}

/* The coordinators that the command names, besides the one that has answered for the group. */
static struct moe_status check_standbys(struct health *h)
{
    char named[MOECTL_ENDPOINT_MAX];
    struct moe_endpoints list;
    MOE_TRY(moectl_state_endpoint(&h->common, named));
    MOE_TRY(moe_endpoints_parse("--endpoint", named, &list));
    for (size_t i = 0; list.count > 1 && i < list.count; i++)
        if (strcmp(list.all[i], moectl_link_endpoint(h->link)) != 0)
            check_standby(h, list.all[i], moectl_share(h->deadline_ns, list.count - i + 1));
    return moe_ok();
}

/* ------------------------------------------------------------------ the command */

static enum result worst(const struct health *h)
{
    enum result result = RESULT_OK;
    for (size_t i = 0; i < h->count; i++)
        result = h->checks[i].result > result ? h->checks[i].result : result;
    return result;
}

static int show_document(const struct health *h)
{
    json_t *document = moectl_document("Health"), *list = json_array();
    for (size_t i = 0; i < h->count; i++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "code", h->checks[i].code,
                                              "subject", h->checks[i].subject, "result",
                                              result_names[h->checks[i].result], "text",
                                              h->checks[i].text));
    json_object_set_new(document, "result", json_string(result_names[worst(h)]));
    json_object_set_new(document, "checks", list);
    return moectl_print(document);
}

static int show_table(const struct health *h)
{
    static const struct moectl_column columns[] = {
        {.title = "CHECK"}, {.title = "OF"}, {.title = "RESULT"}, {.title = "MESSAGE"}};
    size_t shown = 0, fine = 0;
    struct moectl_table *t =
        moectl_table_create(columns, sizeof columns / sizeof *columns, h->common.wide);
    for (size_t i = 0; i < h->count; i++) {
        const struct check *c = &h->checks[i];
        fine += c->result == RESULT_OK;
        if (!h->detail && c->result == RESULT_OK)
            continue;
        shown++;
        moectl_table_cell(t, "%s", c->code);
        moectl_table_cell(t, "%s", c->subject);
        moectl_table_cell(t, "%s", result_names[c->result]);
        moectl_table_cell(t, "%s", c->text);
    }
    moectl_put("%s: %zu of %zu checks are OK\n", result_names[worst(h)], fine, h->count);
    int code = shown > 0 ? moectl_table_print(t, NULL) : MOECTL_OK;
    moectl_table_free(t);
    return code;
}

static struct moe_status ask(struct health *h)
{
    MOE_TRY(moectl_admin_find(&h->common, h->deadline_ns, &h->link, &h->status));
    struct moe_status st = moectl_events_ask(h->link, h->deadline_ns, 0, 0, &h->events);
    if (moe_failed(&st))
        moectl_say("events: %s", st.text);
    check_coordinator(h);
    MOE_TRY(check_standbys(h));
    check_group(h);
    check_cordons(h);
    check_models(h);
    if (h->events != NULL)
        check_events(h);
    for (size_t i = 0; i < h->status->n_workers; i++)
        check_worker(h, h->status->workers[i]);
    return moe_ok();
}

static int work(struct health *h)
{
    int code = MOECTL_OK;
    struct moe_status st = ask(h);
    if (st.code == MOE_UNAUTHENTICATED || st.code == MOE_PERMISSION_DENIED)
        return moectl_fail(&st); /* it answers: nothing is known of the group's health */
    if (moe_failed(&st)) {
        code = moectl_exit_code(st.code);
        add(h, "COORDINATOR_ANSWERS", "coordinator", RESULT_CRITICAL, "%s", st.text);
    }
    int shown = h->common.document ? show_document(h) : show_table(h);
    if (shown != MOECTL_OK)
        return shown;
    return code != MOECTL_OK            ? code
           : worst(h) == RESULT_OK      ? MOECTL_OK
           : worst(h) == RESULT_WARNING ? MOECTL_WARNING
                                        : MOECTL_UNHEALTHY;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct health h = {.common = {.format = "table", .timeout_s = 10}};
    const struct moe_option options[] = {
        {"detail", 0, MOE_OPTION_BOOL, &h.detail, 0, 0, NULL, "also list the checks that are OK"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &h.common, argc, argv,
                      &code))
        return code;
    h.deadline_ns = moectl_deadline(&h.common);
    h.checks = calloc(CHECKS_MAX, sizeof *h.checks);
    if (h.checks == NULL) {
        moectl_say("out of memory");
        return MOECTL_FAILED;
    }
    code = work(&h);
    free(h.checks);
    if (h.events != NULL)
        moe__v1__list_events_response__free_unpacked(h.events, NULL);
    if (h.status != NULL)
        moe__v1__get_status_response__free_unpacked(h.status, NULL);
    moectl_link_close(h.link);
    return code;
}

const struct moectl_command moectl_health = {
    .name = "health",
    .summary = "Checks a group. Exit code 0: all is well, 8: warnings, 3: it needs an operator.",
    .usage = "[--endpoint H:P] [--detail] [-o FORMAT]",
    .examples = "  moectl health --detail\n"
                "  moectl health -o json | jq -r '.checks[] | select(.result != \"OK\") | .code'\n",
    .run = run,
};
