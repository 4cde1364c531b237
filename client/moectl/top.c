/* SPDX-License-Identifier: Apache-2.0 */
/* moectl top: what a group does right now. A frame is made of two looks at the state of the group
 * and at the metrics of its workers; rates are their differences. */
#include "commands.h"
#include "moectl/group/models.h"
#include "moectl/io/proto_json.h"
#include "moectl/io/samples.h"
#include "moectl/io/screen.h"
#include "workers.h"

#include "base/clock.h"
#include "base/wait.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INTERVAL_MIN_S 0.1

enum { WORKER_LIMIT_MS = 1000, STAGES_MAX = 16, NAME_BYTES = 24 };

/* One look. */
struct look {
    uint64_t at_ns;
    Moe__V1__GetStatusResponse *status;
    Moe__V1__ListModelsResponse *models;          /* NULL: no answer */
    struct moectl_samples samples[MOE_MAX_SLOTS]; /* by slot; empty without an answer */
};

struct top {
    struct moectl_common common;
    bool once;
    double interval_s;
    struct look looks[2];
    unsigned current; /* the later one */
};

/* Of one worker, in the time between two looks. NAN: not known. */
struct figures {
    double steps, tokens, requests, failures; /* a second */
    double queue;                             /* tokens, now */
    double step_s;                            /* mean */
    double busy;                              /* share of the time in steps */
    double balance;                           /* of its worst layer, now: mean / maximum of rows */
    double memory;                            /* bytes of the process, now */
};

struct stage {
    char name[NAME_BYTES];
    double seconds;
};

/* ------------------------------------------------------------------ looking */

static void forget(struct look *l)
{
    for (size_t s = 0; s < MOE_MAX_SLOTS; s++)
        moectl_samples_free(&l->samples[s]);
    if (l->status != NULL)
        moe__v1__get_status_response__free_unpacked(l->status, NULL);
    if (l->models != NULL)
        moe__v1__list_models_response__free_unpacked(l->models, NULL);
    *l = (struct look){0};
}

/* A worker that does not answer has no figures. */
static void look_at_worker(struct look *l, const char *by, const Moe__V1__WorkerStatus *w,
                           uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    uint64_t limit = moe_clock_ns() + WORKER_LIMIT_MS * MOE_NS_PER_MS;
    if (!w->connected || w->slot >= MOE_MAX_SLOTS)
        return;
    struct moe_status st = moectl_link_open_worker(by, w->endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_samples(link, moe_earlier(limit, deadline_ns), &l->samples[w->slot]);
    if (moe_failed(&st))
        moectl_samples_free(&l->samples[w->slot]);
    moectl_link_close(link);
}

static struct moe_status look(struct top *t)
{
    struct moectl_link *link = NULL;
    uint64_t deadline = moectl_deadline(&t->common);
    struct look *l = &t->looks[t->current ^= 1];
    forget(l);
    struct moe_status st = moectl_admin_find(&t->common, deadline, &link, &l->status);
    if (!moe_failed(&st))
        l->models = moectl_models_try(link, deadline);
    for (size_t i = 0; !moe_failed(&st) && i < l->status->n_workers; i++)
        look_at_worker(l, moectl_link_endpoint(link), l->status->workers[i], deadline);
    moectl_link_close(link);
    if (moe_failed(&st))
        return st;
    l->at_ns = moe_clock_ns();
    return st;
}

/* ------------------------------------------------------------------ figures */

static const struct look *now_of(const struct top *t)
{
    return &t->looks[t->current];
}

static const struct look *before_of(const struct top *t)
{
    return &t->looks[t->current ^ 1];
}

static double seconds_between(const struct top *t)
{
    return (double)(now_of(t)->at_ns - before_of(t)->at_ns) / (double)MOE_NS_PER_S;
}

/* How much a counter of the worker grew; NAN if one of the looks lacks it, or it started again. */
static double growth(const struct top *t, uint32_t slot, const char *name, const char *label)
{
    const struct moectl_samples *now = &now_of(t)->samples[slot],
                                *before = &before_of(t)->samples[slot];
    if (before_of(t)->status == NULL || now->count == 0 || before->count == 0)
        return NAN;
    double grown = moectl_samples_sum(now, name, label) - moectl_samples_sum(before, name, label);
    return grown >= 0 ? grown : NAN;
}

static double least(const struct moectl_samples *s, const char *name)
{
    double value = NAN;
    for (size_t i = 0; i < s->count; i++)
        if (strcmp(s->all[i].name, name) == 0)
            value = fmin(value, s->all[i].value);
    return value;
}

static struct figures figures_of(const struct top *t, uint32_t slot)
{
    const struct moectl_samples *now = &now_of(t)->samples[slot];
    double seconds = seconds_between(t);
    double steps = growth(t, slot, "moe_step_seconds_count", NULL);
    double in_steps = growth(t, slot, "moe_step_seconds_sum", NULL);
    double requests = growth(t, slot, "moe_requests_total", NULL);
    return (struct figures){
        .steps = steps / seconds,
        .tokens = growth(t, slot, "moe_tokens_total", NULL) / seconds,
        .requests = requests / seconds,
        .failures = (requests - growth(t, slot, "moe_requests_total", "code=\"OK\"")) / seconds,
        .queue = least(now, "moe_queue_tokens"),
        .step_s = steps > 0 ? in_steps / steps : NAN,
        .busy = in_steps / seconds,
        .balance = least(now, "moe_expert_balancedness"),
        .memory = least(now, "process_resident_memory_bytes"),
    };
}

static double add_known(double sum, double value)
{
    return isnan(value) ? sum : isnan(sum) ? value : sum + value;
}

/* Every worker counts the steps of the group; requests and tokens are its own. */
static struct figures group_figures(const struct top *t)
{
    struct figures g = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    for (size_t i = 0; i < now_of(t)->status->n_workers; i++) {
        uint32_t slot = now_of(t)->status->workers[i]->slot;
        if (slot >= MOE_MAX_SLOTS)
            continue;
        struct figures f = figures_of(t, slot);
        g.steps = fmax(g.steps, f.steps);
        g.step_s = fmax(g.step_s, f.step_s);
        g.balance = fmin(g.balance, f.balance);
        g.tokens = add_known(g.tokens, f.tokens);
        g.requests = add_known(g.requests, f.requests);
        g.failures = add_known(g.failures, f.failures);
        g.queue = add_known(g.queue, f.queue);
        g.memory = add_known(g.memory, f.memory);
    }
    return g;
}

/* Time of all workers in each stage of steps of `kind`; returns the number of stages. `*whole`: in
 * these steps. */
static size_t stages_of(const struct top *t, const char *kind, struct stage *out, double *whole)
{
    static const char name[] = "moe_step_stage_seconds_sum";
    char label[64], of_kind[NAME_BYTES];
    size_t count = 0;
    *whole = 0;
    (void)snprintf(of_kind, sizeof of_kind, "kind=\"%s\"", kind);
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        const struct moectl_samples *s = &now_of(t)->samples[slot];
        *whole = add_known(*whole, growth(t, slot, "moe_step_seconds_sum", of_kind));
        size_t n = 0;
        for (size_t i = 0; i < s->count && n < STAGES_MAX; i++) {
            if (strcmp(s->all[i].name, name) != 0 || strstr(s->all[i].labels, of_kind) == NULL ||
                !moectl_sample_label(&s->all[i], "stage", out[n].name, NAME_BYTES))
                continue;
            (void)snprintf(label, sizeof label, "%s,stage=\"%s\"", of_kind, out[n].name);
            out[n].seconds = n < count ? out[n].seconds : 0;
            out[n].seconds = add_known(out[n].seconds, growth(t, slot, name, label));
            n++;
        }
        count = n > count ? n : count;
    }
    return count;
}

/* ------------------------------------------------------------------ table */

static void put_figure(struct moectl_table *table, const char *unit, double value, double scale)
{
    if (isnan(value))
        moectl_table_cell(table, "-");
    else
        moectl_table_cell(table, value * scale >= 100 ? "%.0f%s" : "%.1f%s", value * scale, unit);
}

static struct moectl_table *workers_table(const struct top *t)
{
    static const struct moectl_column columns[] = {
        {.title = "SLOT", .right = true},    {.title = "STATE"},
        {.title = "STEPS/S", .right = true}, {.title = "TOKENS/S", .right = true},
        {.title = "REQS/S", .right = true},  {.title = "FAILED/S", .right = true},
        {.title = "QUEUE", .right = true},   {.title = "STEP", .right = true},
        {.title = "BUSY", .right = true},    {.title = "BALANCE", .right = true},
        {.title = "WEIGHTS", .right = true}, {.title = "MEMORY", .right = true},
        {.title = "LEASE", .right = true},   {.title = "WORKER"},
    };
    const double mib = 1.0 / (1024.0 * 1024.0);
    struct moectl_table *table =
        moectl_table_create(columns, sizeof columns / sizeof *columns, true);
    for (size_t i = 0; i < now_of(t)->status->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = now_of(t)->status->workers[i];
        if (w->slot >= MOE_MAX_SLOTS)
            continue;
        struct figures f = figures_of(t, w->slot);
        moectl_table_cell(table, "%" PRIu32, w->slot);
        moectl_table_cell(table, "%s",
                          moectl_enum_name(&moe__v1__worker_state__descriptor, (int)w->state));
        put_figure(table, "", f.steps, 1);
        put_figure(table, "", f.tokens, 1);
        put_figure(table, "", f.requests, 1);
        put_figure(table, "", f.failures, 1);
        put_figure(table, "", f.queue, 1);
        put_figure(table, " ms", f.step_s, 1000);
        put_figure(table, "%", f.busy, 100);
        put_figure(table, "%", f.balance, 100);
        put_figure(table, " MiB", (double)w->loaded_bytes, mib);
        put_figure(table, " MiB", f.memory, mib);
        put_figure(table, " s", (double)w->lease_remaining_ms, 1e-3);
        moectl_table_cell(table, "%s", w->worker_id);
    }
    return table;
}

static void put_known(FILE *to, const char *title, double value, double scale, const char *unit)
{
    if (!isnan(value))
        moectl_put_to(to, value * scale >= 100 ? "  %s %.0f%s" : "  %s %.1f%s", title,
                      value * scale, unit);
}

static void put_stages(FILE *to, const struct top *t, const char *kind)
{
    struct stage stages[STAGES_MAX];
    double whole, rest = 1;
    size_t count = stages_of(t, kind, stages, &whole);
    if (!(whole > 0))
        return;
    moectl_put_to(to, "%-9s", kind);
    for (size_t i = 0; i < count; i++) {
        moectl_put_to(to, "  %s %.0f%%", stages[i].name, 100 * stages[i].seconds / whole);
        rest -= stages[i].seconds / whole;
    }
    moectl_put_to(to, "  other %.0f%%\n", fmax(0, 100 * rest));
}

/* The default model stands in the first line. */
static void put_added_models(FILE *to, const struct top *t)
{
    const Moe__V1__ListModelsResponse *list = now_of(t)->models;
    for (size_t i = 0; list != NULL && i < list->n_models; i++) {
        const Moe__V1__ModelStatus *m = list->models[i];
        char memory[MOECTL_MODEL_BYTES];
        if (!m->is_default)
            moectl_put_to(to, "model      %s (%s)  %s  %s\n", m->name, m->family,
                          moectl_model_state(m), moectl_model_memory(m, memory));
    }
}

static void put_group(FILE *to, const struct top *t)
{
    const Moe__V1__GetStatusResponse *s = now_of(t)->status;
    struct figures g = group_figures(t);
    char epoch[24] = "none";
    if (s->epoch != 0)
        (void)snprintf(epoch, sizeof epoch, "%" PRIu64, s->epoch);
    moectl_put_to(to, "moed  %s  epoch %s  %s on %s  %zu of %" PRIu32 " workers  up %.0f s\n",
                  moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state), epoch,
                  s->model, s->backend, moectl_workers_live(s), moectl_workers_size(s),
                  (double)s->uptime_ms / 1000.0);
    if (s->reason[0] != '\0')
        moectl_put_to(to, "reason     %s\n", s->reason);
    moectl_put_to(to, "group    ");
    put_known(to, "steps/s", g.steps, 1, "");
    put_known(to, "tokens/s", g.tokens, 1, "");
    put_known(to, "requests/s", g.requests, 1, "");
    put_known(to, "failed/s", g.failures, 1, "");
    put_known(to, "queue", g.queue, 1, " tokens");
    put_known(to, "step", g.step_s, 1000, " ms");
    moectl_put_to(to, "\n");
    put_stages(to, t, "forward");
    put_stages(to, t, "backward");
    put_added_models(to, t);
    moectl_put_to(to, "\n");
}

/* The frame as text; NULL when out of memory. */
static char *frame_text(const struct top *t)
{
    char *text = NULL;
    size_t length;
    FILE *to = open_memstream(&text, &length);
    if (to == NULL)
        return NULL;
    put_group(to, t);
    struct moectl_table *table = workers_table(t);
    bool good = moectl_table_write(to, table, NULL);
    moectl_table_free(table);
    if (fclose(to) == 0 && good)
        return text;
    free(text);
    return NULL;
}

/* ------------------------------------------------------------------ document */

static json_t *number(double value)
{
    return isnan(value) ? json_null() : json_real(value);
}

static json_t *figures_json(const struct figures *f)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "stepsPerS", number(f->steps),
                     "tokensPerS", number(f->tokens), "requestsPerS", number(f->requests),
                     "failedPerS", number(f->failures), "queueTokens", number(f->queue), "stepS",
                     number(f->step_s), "busy", number(f->busy), "balance", number(f->balance),
                     "memoryBytes", number(f->memory));
}

static json_t *stages_json(const struct top *t, const char *kind)
{
    struct stage stages[STAGES_MAX];
    double whole;
    size_t count = stages_of(t, kind, stages, &whole);
    json_t *shares = json_object();
    for (size_t i = 0; i < count && whole > 0; i++)
        json_object_set_new(shares, stages[i].name, json_real(stages[i].seconds / whole));
    return shares;
}

static int show_document(const struct top *t)
{
    const Moe__V1__GetStatusResponse *s = now_of(t)->status;
    struct figures g = group_figures(t);
    json_t *document = moectl_document("Top"), *workers = json_array();
    for (size_t i = 0; i < s->n_workers; i++) {
        if (s->workers[i]->slot >= MOE_MAX_SLOTS)
            continue;
        struct figures f = figures_of(t, s->workers[i]->slot);
        json_t *worker = figures_json(&f);
        json_object_set_new(worker, "worker", moectl_proto_json(&s->workers[i]->base));
        json_array_append_new(workers, worker);
    }
    json_object_set_new(document, "seconds", number(seconds_between(t)));
    json_object_set_new(
        document, "state",
        json_string(moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state)));
    json_object_set_new(document, "group", figures_json(&g));
    json_object_set_new(document, "forwardStages", stages_json(t, "forward"));
    json_object_set_new(document, "backwardStages", stages_json(t, "backward"));
    json_object_set_new(document, "workers", workers);
    json_object_set_new(document, "addedModels", moectl_models_added_json(now_of(t)->models));
    return moectl_print(document);
}

/* ------------------------------------------------------------------ the command */

static uint64_t next_look(const struct top *t)
{
    return now_of(t)->at_ns + (uint64_t)(t->interval_s * (double)MOE_NS_PER_S);
}

static int print_frame(const struct top *t)
{
    if (t->common.document)
        return show_document(t);
    char *text = frame_text(t);
    if (text == NULL) {
        moectl_say("out of memory");
        return MOECTL_FAILED;
    }
    fputs(text, stdout);
    free(text);
    return MOECTL_OK;
}

/* Lines, for pipes and files. */
static int print_frames(struct top *t)
{
    for (int code = MOECTL_OK; code == MOECTL_OK;) {
        moe_sleep_until(next_look(t));
        struct moe_status st = look(t);
        if (moe_failed(&st))
            return moectl_fail(&st);
        code = print_frame(t);
        if (code == MOECTL_OK)
            code = moectl_flush();
        if (t->once)
            return code;
        moectl_put("\n");
    }
    return MOECTL_FAILED;
}

/* `st`: of the last look; without an answer, only its text can be shown. */
static bool show_frame(const struct top *t, const struct moe_status *st)
{
    char *text = moe_failed(st) ? moectl_escaped(st->text) : frame_text(t);
    if (text != NULL)
        moectl_screen_show(text);
    free(text);
    return text != NULL;
}

static int run_screen(struct top *t)
{
    struct moe_status st = moe_ok();
    uint64_t next = moe_clock_ns();
    enum moectl_screen_key key = MOECTL_SCREEN_RESIZED;
    bool shown = true;
    while (key != MOECTL_SCREEN_QUIT && shown) {
        shown = show_frame(t, &st);
        key = moectl_screen_wait(next);
        if (key != MOECTL_SCREEN_TIME)
            continue;
        st = look(t);
        next = moe_clock_ns() + (uint64_t)(t->interval_s * (double)MOE_NS_PER_S);
    }
    moectl_screen_close();
    return shown ? MOECTL_OK : MOECTL_FAILED;
}

static int work(struct top *t)
{
    if (!(t->interval_s >= INTERVAL_MIN_S))
        return moectl_usage_error("--interval must be at least %g", INTERVAL_MIN_S);
    struct moe_status st = look(t);
    if (moe_failed(&st))
        return moectl_fail(&st);
    bool lines = t->once || t->common.document || !moectl_screen_open();
    return lines ? print_frames(t) : run_screen(t);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct top *t = calloc(1, sizeof *t);
    if (t == NULL) {
        moectl_say("out of memory");
        return MOECTL_FAILED;
    }
    t->common = (struct moectl_common){.format = "table", .timeout_s = 10};
    t->interval_s = 1;
    const struct moe_option options[] = {
        {"once", 0, MOE_OPTION_BOOL, &t->once, 0, 0, NULL, "print one frame, and end"},
        {"interval", 0, MOE_OPTION_DOUBLE, &t->interval_s, 0, 3600, "SECONDS",
         "time between two looks, 0.1 or more"},
    };
    int code;
    if (moectl_parse(self, options, sizeof options / sizeof *options, &t->common, argc, argv,
                     &code))
        code = work(t);
    forget(&t->looks[0]);
    forget(&t->looks[1]);
    free(t);
    return code;
}

const struct moectl_command moectl_top = {
    .name = "top",
    .summary = "Shows what a group does right now, until q is typed.",
    .usage = "[--endpoint H:P] [--once] [--interval SECONDS] [-o FORMAT]",
    .examples = "  moectl top\n"
                "  moectl top --once -o json | jq .group.tokensPerS\n",
    .run = run,
};
