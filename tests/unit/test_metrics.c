/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics: what is counted is what is rendered, in the text format, from any number of threads, and
 * over HTTP. */
#include "base/clock.h"
#include "base/wait.h"
#include "daemon/metrics.h"
#include "daemon/metrics_http.h"
#include "daemon/process_metrics.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static struct moe_metrics *m;

static int create(void **unused)
{
    (void)unused;
    struct moe_status st = moe_metrics_create(&m);
    return st.code == MOE_OK ? 0 : -1;
}

static int destroy(void **unused)
{
    (void)unused;
    moe_metrics_destroy(m);
    return 0;
}

static void ok(struct moe_status st)
{
    if (st.code != MOE_OK)
        fail_msg("%s", st.text);
}

static char *render(void)
{
    char *text;
    size_t length;
    ok(moe_metrics_render(m, &text, &length));
    assert_int_equal(strlen(text), length);
    return text;
}

static void expect_text(const char *want)
{
    char *text = render();
    assert_string_equal(text, want);
    free(text);
}

static void the_text_is_the_exposition_format(void **unused)
{
    (void)unused;
    struct moe_counter *good, *bad;
    struct moe_gauge *g;
    struct moe_histogram *h;
    static const double bounds[] = {0.001, 0.25, 2};
    ok(moe_metrics_add_counter(
        m,
        &(struct moe_metric_desc){.name = "moe_requests_total",
                                  .help = "Calls.",
                                  .labels = {{"rpc", "Forward"}, {"code", "OK"}}},
        &good));
    ok(moe_metrics_add_gauge(
        m, &(struct moe_metric_desc){.name = "moe_epoch", .help = "Line\nand \\."}, &g));
    ok(moe_metrics_add_counter(
        m,
        &(struct moe_metric_desc){.name = "moe_requests_total",
                                  .labels = {{"rpc", "a\"b\\c\nd"}, {"code", "OK"}}},
        &bad));
    ok(moe_metrics_add_histogram(m, &(struct moe_metric_desc){.name = "moe_seconds", .help = "T."},
                                 bounds, 3, &h));
    moe_counter_add(good, 3);
    moe_counter_add(good, UINT64_C(1) << 60);
    moe_gauge_set(g, 1.5);
    moe_gauge_add(g, -3);
    static const double seen[] = {0.0005, 0.001, 0.0011, 2, 2.5, 100};
    for (size_t i = 0; i < 6; i++)
        moe_histogram_observe(h, seen[i]);
    moe_histogram_observe(h, NAN);
    expect_text("# HELP moe_requests_total Calls.\n"
                "# TYPE moe_requests_total counter\n"
                "moe_requests_total{rpc=\"Forward\",code=\"OK\"} 1152921504606846979\n"
                "moe_requests_total{rpc=\"a\\\"b\\\\c\\nd\",code=\"OK\"} 0\n"
                "# HELP moe_epoch Line\\nand \\\\.\n"
                "# TYPE moe_epoch gauge\n"
                "moe_epoch -1.5\n"
                "# HELP moe_seconds T.\n"
                "# TYPE moe_seconds histogram\n"
                "moe_seconds_bucket{le=\"0.001\"} 2\n"
                "moe_seconds_bucket{le=\"0.25\"} 3\n"
                "moe_seconds_bucket{le=\"2\"} 4\n"
                "moe_seconds_bucket{le=\"+Inf\"} 6\n"
                "moe_seconds_sum 104.5026\n"
                "moe_seconds_count 6\n");
}

static void odd_numbers_are_written_as_prometheus_reads_them(void **unused)
{
    (void)unused;
    struct moe_gauge *g;
    ok(moe_metrics_add_gauge(m, &(struct moe_metric_desc){.name = "g"}, &g));
    static const struct {
        double value;
        const char *text;
    } cases[] = {{INFINITY, "\ng +Inf\n"},
                 {-INFINITY, "\ng -Inf\n"},
                 {NAN, "\ng NaN\n"},
                 {0, "\ng 0\n"},
                 {123456789, "\ng 123456789\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_gauge_set(g, cases[i].value);
        char *text = render();
        if (strstr(text, cases[i].text) == NULL)
            fail_msg("%g became %s", cases[i].value, text);
        free(text);
    }
    for (int i = 0; i < 1000; i++) { /* and comes back as it was */
        double want = ldexp(1 + (double)i / 777, i % 200 - 100);
        moe_gauge_set(g, want);
        char *text = render();
        assert_true(strtod(strstr(text, "\ng ") + 3, NULL) == want);
        free(text);
    }
}

static void bad_series_are_refused(void **unused)
{
    (void)unused;
    struct moe_counter *c;
    struct moe_gauge *g;
    struct moe_histogram *h;
    static const double falling[] = {2, 1}, infinite[] = {1, INFINITY};
    static const struct moe_metric_desc good = {.name = "good", .labels = {{"a", "1"}}},
                                        other = {.name = "good", .labels = {{"a", "2"}}},
                                        digit = {.name = "1bad"}, empty = {.name = ""},
                                        space = {.name = "b d"},
                                        label = {.name = "x", .labels = {{"a-b", "1"}}},
                                        value = {.name = "x", .labels = {{"a", NULL}}};
    ok(moe_metrics_add_counter(m, &good, &c));
    ok(moe_metrics_add_counter(m, &other, &c));
    struct moe_status st = moe_metrics_add_counter(m, &good, &c);
    assert_int_equal(st.code, MOE_ALREADY_EXISTS);
    st = moe_metrics_add_gauge(m, &good, &g);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    const struct moe_metric_desc *bad[] = {&digit, &empty, &space, &label, &value};
    for (size_t i = 0; i < 5; i++) {
        st = moe_metrics_add_counter(m, bad[i], &c);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    }
    st = moe_metrics_add_histogram(m, &digit, falling, 1, &h);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_metrics_add_histogram(m, &(struct moe_metric_desc){.name = "h"}, falling, 2, &h);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_metrics_add_histogram(m, &(struct moe_metric_desc){.name = "h"}, infinite, 2, &h);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = moe_metrics_add_histogram(m, &(struct moe_metric_desc){.name = "h"}, falling,
                                   MOE_METRIC_BUCKETS_MAX + 1, &h);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
}

static struct moe_gauge *collected, *late;

/* Registers a series at its second call. */
static void count_call(void *ctx)
{
    int *calls = ctx;
    if (++*calls == 2)
        ok(moe_metrics_add_gauge(m, &(struct moe_metric_desc){.name = "late"}, &late));
    moe_gauge_set(collected, *calls / 4.0);
}

static void collectors_run_before_each_rendering_until_they_are_removed(void **unused)
{
    (void)unused;
    int calls = 0, others = 0;
    ok(moe_metrics_add_set_counter(m, &(struct moe_metric_desc){.name = "c_total"}, &collected));
    ok(moe_metrics_add_collector(m, count_call, &calls));
    expect_text("# HELP c_total \n# TYPE c_total counter\nc_total 0.25\n");
    expect_text("# HELP c_total \n# TYPE c_total counter\nc_total 0.5\n"
                "# HELP late \n# TYPE late gauge\nlate 0\n");
    moe_metrics_remove_collector(m, count_call, &others); /* no such one */
    free(render());
    assert_int_equal(calls, 3);
    moe_metrics_remove_collector(m, count_call, &calls);
    free(render());
    assert_int_equal(calls, 3);
}

static double value_of(const char *text, const char *name)
{
    char line[96];
    snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(text, line);
    if (at == NULL)
        fail_msg("no series %s in\n%s", name, text);
    return strtod(at + strlen(line), NULL);
}

static void the_figures_of_the_process_are_its_own(void **unused)
{
    (void)unused;
    enum { DESCRIPTORS = 5 };
    struct moe_process_metrics process;
    struct rlimit files;
    ok(moe_process_metrics_add(m, &process));
    char *before = render();
    double began = value_of(before, "process_cpu_seconds_total");
    int fds[DESCRIPTORS];
    for (int i = 0; i < DESCRIPTORS; i++)
        assert_true((fds[i] = dup(STDOUT_FILENO)) >= 0);
    struct timespec used;
    do { /* the kernel counts in ticks of some milliseconds */
        assert_int_equal(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used), 0);
    } while ((double)used.tv_sec + (double)used.tv_nsec * 1e-9 < began + 0.05);
    char *after = render();
    for (int i = 0; i < DESCRIPTORS; i++)
        close(fds[i]);
    assert_true(value_of(after, "process_open_fds") ==
                value_of(before, "process_open_fds") + (double)DESCRIPTORS);
    assert_true(value_of(after, "process_cpu_seconds_total") > began);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
    assert_true(value_of(after, "process_max_fds") == (double)files.rlim_cur);
    assert_true(value_of(after, "process_threads") >= 1); /* sanitizers have threads */
    assert_true(value_of(after, "process_resident_memory_bytes") > 100e3);
    assert_true(value_of(after, "process_virtual_memory_bytes") >
                value_of(after, "process_resident_memory_bytes"));
    double start = value_of(after, "process_start_time_seconds"), now = (double)time(NULL);
    assert_true(start > now - 86400 && start < now + 86400);
    assert_true(start == value_of(before, "process_start_time_seconds"));
    assert_non_null(strstr(after, "# TYPE process_cpu_seconds_total counter\n"));
    free(before);
    free(after);
}

enum { THREADS = 4, UPDATES = 20000 };
static struct moe_counter *shared_counter;
static struct moe_gauge *shared_gauge;
static struct moe_histogram *shared_histogram;

static void *update(void *unused)
{
    (void)unused;
    for (int i = 0; i < UPDATES; i++) {
        moe_counter_add(shared_counter, 2);
        moe_gauge_add(shared_gauge, i % 2 == 0 ? 3 : -1);
        moe_histogram_observe(shared_histogram, i % 2 == 0 ? 0.25 : 4);
    }
    return NULL;
}

static void no_update_is_lost_among_threads(void **unused)
{
    (void)unused;
    static const double bounds[] = {1};
    ok(moe_metrics_add_counter(m, &(struct moe_metric_desc){.name = "c"}, &shared_counter));
    ok(moe_metrics_add_gauge(m, &(struct moe_metric_desc){.name = "g"}, &shared_gauge));
    ok(moe_metrics_add_histogram(m, &(struct moe_metric_desc){.name = "h"}, bounds, 1,
                                 &shared_histogram));
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, update, NULL), 0);
    for (int i = 0; i < 50; i++)
        free(render()); /* a scrape in the midst of it */
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(moe_counter_value(shared_counter), 2 * THREADS * UPDATES);
    assert_true(moe_gauge_value(shared_gauge) == THREADS * UPDATES);
    char *text = render();
    assert_non_null(strstr(text, "h_bucket{le=\"1\"} 40000\nh_bucket{le=\"+Inf\"} 80000\n"
                                 "h_sum 170000\nh_count 80000\n"));
    free(text);
}

/* ------------------------------------------------------------------ HTTP */

static atomic_bool well;

/* Conditions of a daemon that is alive, and ready once it is well. */
static void add_conditions(void *ctx, struct moe_health *v)
{
    bool is_well = atomic_load((atomic_bool *)ctx);
    moe_health_add(v, "view", is_well ? NULL : "NO_VIEW", false, "a condition");
}

/* A connection on which `text` has been sent. */
static int say(uint16_t port, const char *text)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
    return fd;
}

/* Sends `request` and returns the whole answer in a static buffer. */
static const char *ask(uint16_t port, const char *request)
{
    static char answer[65536];
    size_t length = 0;
    ssize_t n;
    int fd = say(port, request);
    while ((n = read(fd, answer + length, sizeof answer - 1 - length)) > 0)
        length += (size_t)n;
    close(fd);
    answer[length] = '\0';
    return answer;
}

static void prometheus_and_probes_are_answered(void **unused)
{
    (void)unused;
    struct moe_counter *c;
    ok(moe_metrics_add_counter(m, &(struct moe_metric_desc){.name = "moe_c_total"}, &c));
    moe_counter_add(c, 5);
    struct moe_progress *p;
    ok(moe_progress_create(&(struct moe_progress_config){.step_ns = 1, .limit_ns = 1}, &p));
    moe_progress_set_conditions(p, add_conditions, &well);
    struct moe_metrics_http_config config = {.listen = "127.0.0.1:0", .metrics = m, .progress = p};
    struct moe_metrics_http *h;
    ok(moe_metrics_http_start(&config, &h));
    uint16_t port = moe_metrics_http_port(h);
    assert_true(port != 0);
    const char *a = ask(port, "GET /metrics HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(a, " 200 OK"));
    assert_non_null(strstr(a, "text/plain; version=0.0.4"));
    assert_non_null(strstr(a, "\nmoe_c_total 5\n"));
    for (size_t i = 0; i < 2; i++) {
        static const char *const ready[] = {"GET /healthz HTTP/1.0\r\n\r\n",
                                            "GET /readyz?verbose HTTP/1.0\r\n\r\n"};
        atomic_store(&well, false);
        a = ask(port, ready[i]);
        assert_non_null(strstr(a, " 503 "));
        assert_non_null(strstr(a, "\r\n\r\n[-] view NO_VIEW: a condition\nnot ready\n"));
        assert_non_null(strstr(ask(port, "GET /livez HTTP/1.0\r\n\r\n"), "\r\n\r\nok\n"));
        atomic_store(&well, true);
        assert_non_null(strstr(ask(port, ready[i]), " 200 OK"));
    }
    assert_non_null(strstr(ask(port, "GET /readyz?verbose=1 HTTP/1.0\r\n\r\n"),
                           "\r\n\r\n[+] view: a condition\nok\n"));
    assert_non_null(strstr(ask(port, "GET /etc/passwd HTTP/1.0\r\n\r\n"), " 404 "));
    assert_non_null(
        strstr(ask(port, "POST /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc"), " 405 "));
    (void)ask(port, "\r\n\r\n\x01\x02nonsense\r\n\r\n");
    assert_non_null(strstr(ask(port, "GET /healthz HTTP/1.0\r\n\r\n"), " 200 OK"));

    struct moe_metrics_http *second;
    char taken[32];
    snprintf(taken, sizeof taken, "127.0.0.1:%u", port);
    config.listen = taken;
    struct moe_status st = moe_metrics_http_start(&config, &second);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    moe_metrics_http_stop(h);
    moe_progress_destroy(p);
}

static void bad_addresses_are_refused(void **unused)
{
    (void)unused;
    static const char *const cases[] = {"",           ":9090",       "9090",  "127.0.0.1",
                                        "nowhere:80", "127.0.0.1:x", "[::1]", "127.0.0.1:99999999"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_metrics_http_config config = {.listen = cases[i], .metrics = m};
        struct moe_metrics_http *h = NULL;
        struct moe_status st = moe_metrics_http_start(&config, &h);
        print_message("  '%s': %s\n", cases[i], st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_null(h);
    }
    moe_metrics_http_stop(NULL);
}

/* With a limit of connections alone, the scraper would wait until the library has timed out 1500
 * silent ones, some at a time: longer than this test may take. */
static void a_flood_of_half_requests_shuts_nobody_out(void **unused)
{
    (void)unused;
    enum { HALF = 1500, SPARE = 400 };
    static int half[HALF];
    struct rlimit files;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = files.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    assert_true(files.rlim_cur >= HALF + SPARE);
    struct moe_metrics_http_config config = {.listen = "127.0.0.1:0", .metrics = m};
    struct moe_metrics_http *h;
    ok(moe_metrics_http_start(&config, &h));
    uint16_t port = moe_metrics_http_port(h);
    for (size_t i = 0; i < HALF; i++) {
        half[i] = say(port, "GET /met");
        if (i % 500 == 499) {
            assert_non_null(strstr(ask(port, "GET /metrics HTTP/1.0\r\n\r\n"), " 200 OK"));
            assert_non_null(strstr(ask(port, "GET /healthz HTTP/1.0\r\n\r\n"), " 200 OK"));
        }
    }
    char byte;
    assert_true(read(half[0], &byte, 1) <= 0); /* the oldest made room */
    moe_metrics_http_stop(h);
    for (size_t i = 0; i < HALF; i++) {
        assert_true(read(half[i], &byte, 1) <= 0); /* none is forgotten */
        close(half[i]);
    }
}

static bool is_open(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

static void a_byte_now_and_then_keeps_no_connection(void **unused)
{
    (void)unused;
    struct moe_metrics_http_config config = {
        .listen = "127.0.0.1:0", .metrics = m, .limit_ms = 1000};
    struct moe_metrics_http *h;
    ok(moe_metrics_http_start(&config, &h));
    uint16_t port = moe_metrics_http_port(h);
    int slow = say(port, "GET /met");
    uint64_t until = moe_clock_ns() + 10 * MOE_NS_PER_S;
    unsigned answered = 0;
    while (is_open(slow) && moe_clock_ns() < until) {
        (void)send(slow, "r", 1, MSG_NOSIGNAL);
        assert_non_null(strstr(ask(port, "GET /healthz HTTP/1.0\r\n\r\n"), " 200 OK"));
        answered++;
        moe_sleep_until(moe_clock_ns() + 50 * MOE_NS_PER_MS);
    }
    print_message("  closed after %u probes\n", answered);
    assert_false(is_open(slow));
    assert_true(answered >= 10);
    close(slow);
    moe_metrics_http_stop(h);
}

static void long_lines_are_refused(void **unused)
{
    (void)unused;
    static char line[100000];
    struct moe_metrics_http_config config = {.listen = "127.0.0.1:0", .metrics = m};
    struct moe_metrics_http *h;
    ok(moe_metrics_http_start(&config, &h));
    uint16_t port = moe_metrics_http_port(h);
    memset(line, 'a', sizeof line - 1);
    memcpy(line, "GET /", 5);
    int fd = say(port, "");
    /* It may close before all is sent. */
    (void)send(fd, line, sizeof line - 1, MSG_NOSIGNAL);
    char answer[64] = "";
    ssize_t n = recv(fd, answer, sizeof answer - 1, 0);
    print_message("  %.30s\n", answer);
    assert_true(n <= 0 || strstr(answer, " 414 ") != NULL || strstr(answer, " 431 ") != NULL);
    close(fd);
    assert_non_null(strstr(ask(port, "GET /healthz HTTP/1.0\r\n\r\n"), " 200 OK"));
    moe_metrics_http_stop(h);
}

static void requests_without_a_pause_lock_nobody_out(void **unused)
{
    (void)unused;
    enum { REQUESTS = 500 };
    static const char get[] = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n";
    struct moe_metrics_http_config config = {.listen = "127.0.0.1:0", .metrics = m};
    struct moe_metrics_http *h;
    ok(moe_metrics_http_start(&config, &h));
    uint16_t port = moe_metrics_http_port(h);
    int fd = say(port, "");
    for (int i = 0; i < REQUESTS; i++)
        (void)send(fd, get, sizeof get - 1, MSG_NOSIGNAL); /* the library may close it early */
    /* None of its answers is read yet. */
    assert_non_null(strstr(ask(port, "GET /healthz HTTP/1.0\r\n\r\n"), " 200 OK"));
    size_t oks = 0;
    FILE *from = fdopen(fd, "r");
    assert_non_null(from);
    char text[512];
    while (oks < REQUESTS && fgets(text, sizeof text, from) != NULL)
        oks += strcmp(text, "ok\n") == 0;
    print_message("  %zu of %d were answered\n", oks, REQUESTS);
    assert_true(oks >= 1);
    fclose(from);
    moe_metrics_http_stop(h);
}

int main(void)
{
#define METRICS_TEST(f) cmocka_unit_test_setup_teardown(f, create, destroy)
    const struct CMUnitTest tests[] = {
        METRICS_TEST(the_text_is_the_exposition_format),
        METRICS_TEST(odd_numbers_are_written_as_prometheus_reads_them),
        METRICS_TEST(bad_series_are_refused),
        METRICS_TEST(no_update_is_lost_among_threads),
        METRICS_TEST(collectors_run_before_each_rendering_until_they_are_removed),
        METRICS_TEST(the_figures_of_the_process_are_its_own),
        METRICS_TEST(prometheus_and_probes_are_answered),
        METRICS_TEST(a_flood_of_half_requests_shuts_nobody_out),
        METRICS_TEST(a_byte_now_and_then_keeps_no_connection),
        METRICS_TEST(long_lines_are_refused),
        METRICS_TEST(requests_without_a_pause_lock_nobody_out),
        METRICS_TEST(bad_addresses_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
