/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/base and daemon/base: statuses, sizes, log lines. */
#include "base/clock.h"
#include "base/secret.h"
#include "base/size.h"
#include "daemon/log.h"
#include "daemon/name.h"

#include <jansson.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ------------------------------------------------------------------ status */

static struct moe_status fails_at(int step, int *reached)
{
    *reached = step;
    return step < 2 ? moe_ok()
                    : moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "layer %d", step);
}

static struct moe_status climb(int *reached)
{
    MOE_TRY(fails_at(1, reached));
    MOE_TRY(fails_at(2, reached));
    MOE_TRY(fails_at(3, reached));
    return moe_ok();
}

static struct moe_status climb_and_clean(int *reached, bool *cleaned)
{
    struct moe_status st;
    MOE_TRY_GOTO(st, fails_at(1, reached), out);
    MOE_TRY_GOTO(st, fails_at(2, reached), out);
    MOE_TRY_GOTO(st, fails_at(3, reached), out);
out:
    *cleaned = true;
    return st;
}

static void a_failure_stops_the_function_and_reaches_the_caller(void **unused)
{
    (void)unused;
    int reached = 0;
    bool cleaned = false;
    struct moe_status st = climb(&reached);
    assert_int_equal(reached, 2);
    assert_int_equal(st.code, MOE_NOT_FOUND);
    assert_int_equal(st.reason, MOE_REASON_LAYER_NOT_FOUND);
    assert_string_equal(st.text, "layer 2");
    assert_true(moe_failed(&st));
    st = climb_and_clean(&reached, &cleaned);
    assert_int_equal(reached, 2);
    assert_true(cleaned);
    assert_int_equal(st.code, MOE_NOT_FOUND);
}

static void context_is_put_before_the_text(void **unused)
{
    (void)unused;
    struct moe_status st = moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 250, "wait");
    st = moe_error_context(st, "layer %d", 3);
    assert_string_equal(st.text, "layer 3: wait");
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_int_equal(st.reason, MOE_REASON_REFORMING);
    assert_int_equal(st.retry_after_ms, 250);
    st = moe_error_context(moe_ok(), "layer %d", 3);
    assert_int_equal(st.code, MOE_OK);
}

static void long_texts_are_cut_not_spilled(void **unused)
{
    (void)unused;
    char text[2 * MOE_STATUS_TEXT];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    struct moe_status st = moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s", text);
    assert_int_equal(strlen(st.text), MOE_STATUS_TEXT - 1);
    for (int i = 0; i < 3; i++)
        st = moe_error_context(st, "%s", text);
    assert_int_equal(strlen(st.text), MOE_STATUS_TEXT - 1);
}

static void names_go_to_the_wire_and_back(void **unused)
{
    (void)unused;
    for (int r = 0; r < MOE_REASON_COUNT; r++)
        assert_int_equal(moe_reason_from_name(moe_reason_name((enum moe_reason)r)), r);
    assert_int_equal(moe_reason_from_name("OF_A_NEWER_SERVER"), MOE_REASON_NONE);
    assert_string_equal(moe_reason_name((enum moe_reason)999), "?");
    assert_string_equal(moe_code_name(MOE_UNAUTHENTICATED), "UNAUTHENTICATED");
    assert_string_equal(moe_code_name((enum moe_code)17), "?");
    assert_string_equal(moe_code_name((enum moe_code) - 1), "?");
}

/* ------------------------------------------------------------------ size */

static void overflow_is_reported_and_leaves_the_result_alone(void **unused)
{
    (void)unused;
    size_t out = 42;
    assert_false(moe_size_add(SIZE_MAX, 1, &out));
    assert_false(moe_size_mul(SIZE_MAX / 2, 3, &out));
    assert_false(moe_size_mul3(SIZE_MAX / 4, 2, 3, &out));
    assert_false(moe_size_mul3(SIZE_MAX / 4, 8, 0, &out));
    assert_false(moe_size_round_up(SIZE_MAX - 3, 8, &out));
    assert_int_equal(out, 42);
    assert_true(moe_size_mul3(3, 5, 7, &out));
    assert_int_equal(out, 105);
    assert_true(moe_size_round_up(65, 64, &out));
    assert_int_equal(out, 128);
    assert_true(moe_size_round_up(128, 64, &out));
    assert_int_equal(out, 128);
}

static void powers_of_two_are_the_next_ones_up(void **unused)
{
    (void)unused;
    assert_int_equal(moe_pow2_ceil(0), 1);
    for (uint32_t n = 1; n <= 70000; n++) {
        uint32_t p = moe_pow2_ceil(n);
        if (p < n || p / 2 >= n || (p & (p - 1)) != 0)
            fail_msg("%u -> %u", n, p);
    }
    assert_true(moe_pow2_ceil(UINT32_C(0x80000000)) == UINT32_C(0x80000000));
}

static void secrets_are_equal_in_all_bytes_or_not(void **unused)
{
    (void)unused;
    uint8_t a[16], b[16];
    for (size_t i = 0; i < sizeof a; i++)
        a[i] = b[i] = (uint8_t)(i * 37);
    assert_true(moe_secret_equal(a, b, sizeof a));
    for (size_t bit = 0; bit < 8 * sizeof a; bit++) {
        b[bit / 8] ^= (uint8_t)(1U << bit % 8);
        assert_false(moe_secret_equal(a, b, sizeof a));
        b[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    b[15] ^= 1;
    assert_true(moe_secret_equal(a, b, 15));
    assert_true(moe_secret_equal(a, b, 0));
}

/* ------------------------------------------------------------------ log */

/* Runs `speak` with stderr in a pipe; what it wrote goes to `text`. */
static void capture(void (*speak)(void), char *text, size_t capacity)
{
    int ends[2], old = dup(STDERR_FILENO);
    assert_true(old >= 0);
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    speak();
    assert_true(dup2(old, STDERR_FILENO) >= 0); /* closes the pipe's last writer */
    close(old);
    size_t length = 0;
    ssize_t n;
    while ((n = read(ends[0], text + length, capacity - 1 - length)) > 0)
        length += (size_t)n;
    text[length] = '\0';
    close(ends[0]);
}

static void speak_at_all_levels(void)
{
    moe_log_error("one %d", 1);
    moe_log_warn("two");
    moe_log_info("three");
    moe_log_debug("four");
}

static void lines_below_the_level_are_not_written(void **unused)
{
    (void)unused;
    char text[4096];
    enum moe_log_level level;
    assert_true(moe_log_level_from_name("warn", &level));
    assert_false(moe_log_level_from_name("loud", &level));
    moe_log_set_component("test 7");
    moe_log_set_level(level);
    capture(speak_at_all_levels, text, sizeof text);
    print_message("%s", text);
    assert_non_null(strstr(text, "Z ERROR test 7: one 1\n"));
    assert_non_null(strstr(text, "Z WARN  test 7: two\n"));
    assert_null(strstr(text, "three"));
    moe_log_set_level(MOE_LOG_DEBUG);
    capture(speak_at_all_levels, text, sizeof text);
    assert_non_null(strstr(text, "Z DEBUG test 7: four\n"));
    moe_log_set_level(MOE_LOG_INFO);
}

static struct moe_log_fields about;

static void speak_about(void)
{
    moe_log_write_about(MOE_LOG_INFO, &about, "done");
    moe_log_info("more");
}

/* Both lines of speak_about as JSON. */
static void capture_lines(json_t *lines[2])
{
    char text[4096];
    capture(speak_about, text, sizeof text);
    char *second = strchr(text, '\n');
    assert_non_null(second);
    *second++ = '\0';
    lines[0] = json_loads(text, 0, NULL);
    lines[1] = json_loads(second, 0, NULL);
    if (lines[0] == NULL || lines[1] == NULL)
        fail_msg("no JSON: %s / %s", text, second);
}

static void json_lines_have_the_fields_that_are_known(void **unused)
{
    (void)unused;
    json_t *lines[2];
    char long_name[3000];
    memset(long_name, '"', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    moe_log_set_format(MOE_LOG_JSON);
    about = (struct moe_log_fields){0};
    capture_lines(lines);
    for (int i = 0; i < 2; i++) {
        assert_null(json_object_get(lines[i], "epoch"));
        assert_null(json_object_get(lines[i], "slot"));
        assert_null(json_object_get(lines[i], "layer"));
        assert_null(json_object_get(lines[i], "request"));
        json_decref(lines[i]);
    }
    moe_log_set_slot(0);
    moe_log_set_epoch(UINT64_C(1) << 60);
    about = (struct moe_log_fields){
        .request = "a\"b\nc\x9b", .trace = "4bf92f", .layer_plus_one = UINT32_MAX};
    capture_lines(lines);
    assert_string_equal(json_string_value(json_object_get(lines[0], "message")), "done");
    assert_string_equal(json_string_value(json_object_get(lines[0], "request")),
                        "a\"b\nc\xef\xbf\xbd");
    assert_string_equal(json_string_value(json_object_get(lines[0], "trace")), "4bf92f");
    assert_true(json_integer_value(json_object_get(lines[0], "layer")) == UINT32_MAX - 1);
    for (int i = 0; i < 2; i++) {
        assert_true(json_integer_value(json_object_get(lines[i], "epoch")) == INT64_C(1) << 60);
        assert_true(json_is_integer(json_object_get(lines[i], "slot")));
        assert_true(json_integer_value(json_object_get(lines[i], "slot")) == 0);
        json_decref(lines[i]);
    }
    about = (struct moe_log_fields){.request = long_name, .trace = long_name, .layer_plus_one = 1};
    capture_lines(lines); /* also lines that are cut are JSON, and keep their last field */
    assert_true(json_is_integer(json_object_get(lines[0], "layer")));
    json_decref(lines[0]);
    json_decref(lines[1]);
    moe_log_set_format(MOE_LOG_TEXT);
    char text[4096];
    about = (struct moe_log_fields){.request = "a\nb", .layer_plus_one = 4};
    capture(speak_about, text, sizeof text);
    assert_non_null(strstr(text, ": done request=a\\nb layer=3\n"));
    moe_log_set_epoch(0);
}

static char nasty[3000];

static void speak_nastily(void)
{
    moe_log_info("%s", nasty);
}

static void json_lines_parse_whatever_the_text(void **unused)
{
    (void)unused;
    char text[8192];
    moe_log_set_format(MOE_LOG_JSON);
    for (int kind = 0; kind < 5; kind++) {
        for (size_t i = 0; i + 1 < sizeof nasty; i++)
            nasty[i] = kind == 0   ? '"'
                       : kind == 1 ? '\\'
                       : kind == 2 ? '\n'
                       : kind == 3 ? (char)(1 + i % 127)
                                   : 'x';
        capture(speak_nastily, text, sizeof text);
        json_error_t error;
        json_t *line = json_loads(text, 0, &error);
        if (line == NULL)
            fail_msg("kind %d: %s in %s", kind, error.text, text);
        assert_string_equal(json_string_value(json_object_get(line, "level")), "info");
        assert_string_equal(json_string_value(json_object_get(line, "component")), "test 7");
        size_t length = strlen(text);
        assert_true(length < 1100 && text[length - 1] == '\n');
        assert_ptr_equal(strchr(text, '\n'), text + length - 1); /* one event, one line */
        json_decref(line);
    }
    moe_log_set_format(MOE_LOG_TEXT);
    capture(speak_nastily, text, sizeof text);
    assert_true(text[strlen(text) - 1] == '\n');
}

/* The text that a line of `format` shows for `said`: what follows "test 7: ", or the JSON value. */
static void check_shown(enum moe_log_format format, const char *said, const char *shown)
{
    char text[4096];
    strcpy(nasty, said);
    moe_log_set_format(format);
    capture(speak_nastily, text, sizeof text);
    moe_log_set_format(MOE_LOG_TEXT);
    size_t length = strlen(text);
    assert_true(length > 0);
    assert_ptr_equal(strchr(text, '\n'), text + length - 1);
    text[length - 1] = '\0';
    if (format == MOE_LOG_TEXT) {
        assert_non_null(strstr(text, "test 7: "));
        assert_string_equal(strstr(text, "test 7: ") + strlen("test 7: "), shown);
        return;
    }
    json_error_t error;
    json_t *line = json_loads(text, 0, &error);
    if (line == NULL)
        fail_msg("%s in %s", error.text, text);
    assert_string_equal(json_string_value(json_object_get(line, "message")), shown);
    json_decref(line);
}

static void a_stranger_s_string_forges_no_line_and_moves_no_cursor(void **unused)
{
    (void)unused;
    static const struct {
        const char *said, *text, *json;
    } cases[] = {
        {"model x\n2026-01-01T00:00:00.000Z INFO  test 7: all is well",
         "model x\\n2026-01-01T00:00:00.000Z INFO  test 7: all is well",
         "model x\n2026-01-01T00:00:00.000Z INFO  test 7: all is well"},
        {"\x1b[31mred\x7f", "\\x1b[31mred\\x7f", "\x1b[31mred\x7f"},
        {"\r\t\x01", "\\x0d\\t\\x01", "\r\t\x01"},
        {"\xc2\x9b"
         "31m",
         "\\u009b31m",
         "\xc2\x9b"
         "31m"}, /* C1: CSI in one character */
        {"\x9b"
         "31m",
         "\\x9b31m",
         "\xef\xbf\xbd"
         "31m"},
        {"\xc0\x8a", "\\xc0\\x8a", "\xef\xbf\xbd\xef\xbf\xbd"}, /* newline, too long */
        {"\xed\xa0\x80", "\\xed\\xa0\\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80",
         "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"cut \xe2\x82", "cut \\xe2\\x82", "cut \xef\xbf\xbd\xef\xbf\xbd"},
        {"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80",
         "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80",
         "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"a\xe2\x80\xae"
         "b\xef\xbb\xbf",
         "a\\u202eb\\ufeff",
         "a\xe2\x80\xae"
         "b\xef\xbb\xbf"}, /* reordered, hidden */
        {"\xf3\xa0\x80\x81", "\\U000e0001", "\xf3\xa0\x80\x81"},
        {"C:\\new \"x\"", "C:\\\\new \"x\"", "C:\\new \"x\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_shown(MOE_LOG_TEXT, cases[i].said, cases[i].text);
        check_shown(MOE_LOG_JSON, cases[i].said, cases[i].json);
    }
}

static void an_escaped_text_fits_its_memory(void **unused)
{
    (void)unused;
    char text[64];
    moe_log_escape(text, sizeof text, "\x1b[31m\xc2\x9b \\ \n");
    assert_string_equal(text, "\\x1b[31m\\u009b \\\\ \\n");
    for (size_t cap = MOE_LOG_ESCAPE_BYTES; cap <= sizeof text; cap++) {
        memset(text, '#', sizeof text);
        moe_log_escape(text, cap, "\xc2\x9b\xc2\x9b\xc2\x9b\xc2\x9b\xc2\x9b\xc2\x9b\xc2\x9b");
        assert_true(strlen(text) < cap);
        assert_int_equal(strlen(text) % strlen("\\u009b"), 0);
    }
}

/* Bytes of the file, which must be shorter than `capacity`. */
static void read_text(const char *path, char *text, size_t capacity)
{
    FILE *from = fopen(path, "r");
    assert_non_null(from);
    text[fread(text, 1, capacity - 1, from)] = '\0';
    fclose(from);
}

static void a_log_file_that_was_renamed_is_opened_anew(void **unused)
{
    (void)unused;
    char directory[] = "/tmp/moe-log-XXXXXX", path[64], old_path[64], text[4096];
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/log", directory);
    snprintf(old_path, sizeof old_path, "%s/log.1", directory);
    int stderr_of_test = dup(STDERR_FILENO);
    assert_true(stderr_of_test >= 0);
    struct moe_status absent = moe_log_open("/no/such/directory/log"), st[3];
    assert_null(moe_log_path());
    st[0] = moe_log_reopen(); /* without a file: nothing */
    st[1] = moe_log_open(path);
    moe_log_error("before");
    int renamed = rename(path, old_path);
    moe_log_error("between");
    st[2] = moe_log_reopen();
    moe_log_error("after");
    assert_true(dup2(stderr_of_test, STDERR_FILENO) >= 0);
    close(stderr_of_test);

    assert_int_equal(absent.code, MOE_FAILED_PRECONDITION);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(st[i].code, MOE_OK);
    assert_int_equal(renamed, 0);
    assert_string_equal(moe_log_path(), path);
    read_text(old_path, text, sizeof text);
    assert_non_null(strstr(text, "before\n"));
    assert_non_null(strstr(text, "between\n"));
    assert_null(strstr(text, "after\n"));
    read_text(path, text, sizeof text);
    assert_non_null(strstr(text, "after\n"));
    assert_null(strstr(text, "between\n"));
    assert_int_equal(unlink(path) | unlink(old_path) | rmdir(directory), 0);
}

static void set_file_limit(rlim_t bytes)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* A full disk, as a file size limit. */
static void lines_that_could_not_be_written_are_counted(void **unused)
{
    (void)unused;
    char path[] = "/tmp/moe-log-XXXXXX", text[4096];
    struct stat file;
    int made = mkstemp(path), stderr_of_test = dup(STDERR_FILENO);
    assert_true(made >= 0 && stderr_of_test >= 0);
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    struct moe_status st = moe_log_open(path);
    moe_log_error("one");
    assert_int_equal(fstat(made, &file), 0);
    set_file_limit((rlim_t)file.st_size + 10);
    moe_log_error("two"); /* a part of it fits */
    moe_log_error("three");
    set_file_limit(RLIM_INFINITY);
    moe_log_error("four");
    moe_log_error("five");
    assert_true(dup2(stderr_of_test, STDERR_FILENO) >= 0);
    signal(SIGXFSZ, before);
    close(stderr_of_test);
    close(made);

    assert_int_equal(st.code, MOE_OK);
    read_text(path, text, sizeof text);
    print_message("%s", text);
    static const char *const ends[] = {
        ": one", "", ": the log could not be written: 2 lines are lost", ": four", ": five"};
    char *line = text, *rest;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++, line = rest + 1) {
        rest = strchr(line, '\n');
        assert_non_null(rest);
        *rest = '\0';
        assert_memory_equal(line, "20", 2); /* of the year: each one begins a line */
        assert_true(strlen(line) >= strlen(ends[i]));
        assert_string_equal(rest - strlen(ends[i]), ends[i]);
    }
    assert_int_equal(*line, '\0');
    assert_int_equal(unlink(path), 0);
}

/* ------------------------------------------------------------------ words */

static void a_word_has_no_blank_quote_or_backslash(void **state)
{
    (void)state;
    static const char *const bad[] = {"", "a b", "a\t", "\"a", "a\\", "a\x7f", "\xc3\xa8", "12345"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(moe_word_ok(bad[i], 4));
    assert_true(moe_word_ok("!~:1", 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_word_has_no_blank_quote_or_backslash),
        cmocka_unit_test(a_failure_stops_the_function_and_reaches_the_caller),
        cmocka_unit_test(context_is_put_before_the_text),
        cmocka_unit_test(long_texts_are_cut_not_spilled),
        cmocka_unit_test(names_go_to_the_wire_and_back),
        cmocka_unit_test(overflow_is_reported_and_leaves_the_result_alone),
        cmocka_unit_test(powers_of_two_are_the_next_ones_up),
        cmocka_unit_test(secrets_are_equal_in_all_bytes_or_not),
        cmocka_unit_test(lines_below_the_level_are_not_written),
        cmocka_unit_test(json_lines_have_the_fields_that_are_known),
        cmocka_unit_test(json_lines_parse_whatever_the_text),
        cmocka_unit_test(a_stranger_s_string_forges_no_line_and_moves_no_cursor),
        cmocka_unit_test(an_escaped_text_fits_its_memory),
        cmocka_unit_test(a_log_file_that_was_renamed_is_opened_anew),
        cmocka_unit_test(lines_that_could_not_be_written_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
