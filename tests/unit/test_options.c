/* SPDX-License-Identifier: Apache-2.0 */
/* Settings: flags beat the file, the file beats the default, and nothing unknown slips through. */
#include "daemon/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static struct values {
    bool verbose;
    uint64_t workers, memory, layer;
    double rate;
    const char *name, *optimizer, *config;
} v;

static const struct moe_option table[] = {
    {"verbose", 'v', MOE_OPTION_BOOL, &v.verbose, 0, 0, NULL, "Say more"},
    {"workers", 'n', MOE_OPTION_UINT, &v.workers, 1, 16, "N", "Slots"},
    {"memory", 0, MOE_OPTION_BYTES, &v.memory, 4096, 0, "SIZE", "Budget"},
    {"rate", 0, MOE_OPTION_DOUBLE, &v.rate, 0, 10, "X", "Rate"},
    {"name", 0, MOE_OPTION_STRING, &v.name, 0, 0, "NAME", "Name"},
    {"optimizer", 0, MOE_OPTION_CHOICE, &v.optimizer, 0, 0, "off|adamw|sgd", "Optimizer"},
    {"layer", 0, MOE_OPTION_UINT, &v.layer, 0, 99, "L", "Layer (required)"},
    {"slots", 0, MOE_OPTION_RENAMED, NULL, 0, 0, NULL, "workers"},
    {"config", 'c', MOE_OPTION_STRING, &v.config, 0, 0, "FILE", "Settings"},
};
enum { COUNT = sizeof table / sizeof *table };

static int first;
static struct moe_options owned;
static char file_path[] = "/tmp/moe-options-XXXXXX";

/* Parses "prog" and the words after it, up to NULL. */
static struct moe_status parse(char *word, ...)
{
    static char prog[] = "prog";
    char *argv[16] = {prog};
    int argc = 1;
    va_list args;
    va_start(args, word);
    for (char *w = word; w != NULL && argc < 15; w = va_arg(args, char *))
        argv[argc++] = w;
    va_end(args);
    v = (struct values){.workers = 2, .memory = 1 << 20, .rate = 0.5, .name = "default"};
    return moe_options_parse(table, COUNT, "config", argc, argv, &first, &owned);
}

static char *write_config(const char *text)
{
    strcpy(file_path + strlen(file_path) - 6, "XXXXXX");
    int fd = mkstemp(file_path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    return file_path;
}

static void ok(struct moe_status st)
{
    if (st.code != MOE_OK)
        fail_msg("%s", st.text);
}

static char f_workers[] = "--workers", f_workers_3[] = "--workers=3", f_v[] = "-v", f_n[] = "-n",
            f_memory[] = "--memory", f_rate[] = "--rate", f_name[] = "--name", f_c[] = "-c",
            two[] = "2", four[] = "4", rest[] = "rest";

static void flags_are_read_in_every_spelling(void **unused)
{
    (void)unused;
    ok(parse(NULL));
    assert_int_equal(v.workers, 2);
    assert_int_equal(first, 1);
    ok(parse(f_workers, four, f_v, NULL));
    assert_int_equal(v.workers, 4);
    assert_true(v.verbose);
    ok(parse(f_workers_3, rest, NULL));
    assert_int_equal(v.workers, 3);
    assert_int_equal(first, 2);
    ok(parse(f_n, four, NULL));
    assert_int_equal(v.workers, 4);
    char f_optimizer[] = "--optimizer", sgd[] = "sgd";
    ok(parse(f_optimizer, sgd, NULL));
    assert_string_equal(v.optimizer, "sgd");
    char size[] = "64M", rate[] = "2.5", name[] = "x y";
    ok(parse(f_memory, size, f_rate, rate, f_name, name, NULL));
    assert_int_equal(v.memory, 64 << 20);
    assert_true(v.rate > 2.4 && v.rate < 2.6);
    assert_string_equal(v.name, "x y");
}

static void bad_flags_are_refused_with_their_name(void **unused)
{
    (void)unused;
    static const char *const cases[][3] = {
        {"--worker-count", "4", "unknown"},
        {"--workers", "0", "--workers: 0 is outside"},
        {"--workers", "17", "workers"},
        {"--workers", "-1", "workers"},
        {"--workers", "4x", "workers"},
        {"--workers", " 4", "workers"},
        {"--workers", "", "workers"},
        {"--workers", "99999999999999999999", "workers"},
        {"--memory", "64Q", "memory"},
        {"--memory", "64MM", "memory"},
        {"--memory", "99999999999T", "memory"},
        {"--memory", "1K", "memory"},
        {"--rate", "nan", "rate"},
        {"--rate", "11", "outside [0, 10]"},
        {"--rate", "-1", "rate"},
        {"--rate", "1,5", "rate"},
        {"--optimizer", "adam", "--optimizer: 'adam' is none of off|adamw|sgd"},
        {"--optimizer", "adamw2", "optimizer"},
        {"--optimizer", "off|adamw", "optimizer"},
        {"--optimizer", "", "optimizer"},
        {"-x", "1", "unknown"},
        {"--slots", "4", "--slots is now --workers"},
        {"--slots=4", "rest", "--slots is now --workers"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char flag[32], value[32];
        strcpy(flag, cases[i][0]);
        strcpy(value, cases[i][1]);
        struct moe_status st = parse(flag, value, NULL);
        print_message("  %s %s: %s\n", flag, value, st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_non_null(strstr(st.text, cases[i][2]));
    }
    struct moe_status st = parse(f_workers, NULL);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
}

static void a_flag_beats_the_file_and_the_file_the_default(void **unused)
{
    (void)unused;
    char *path = write_config("; comment\nworkers = 7\nname = from file\n"
                              "verbose = true\nmemory = 2G\n");
    ok(parse(f_c, path, f_workers_3, NULL));
    assert_int_equal(v.workers, 3);
    assert_string_equal(v.name, "from file");
    assert_true(v.verbose);
    assert_true(v.memory == UINT64_C(2) << 30);
    assert_true(v.rate > 0.4 && v.rate < 0.6);
    moe_options_free(&owned);
    unlink(path);
}

/* A value that equals its default is one that somebody wanted all the same. */
static void what_was_given_is_known_from_a_default(void **unused)
{
    (void)unused;
    char *path = write_config("name = default\n");
    ok(parse(f_c, path, f_n, two, NULL));
    assert_string_equal(v.name, "default");
    assert_int_equal(v.workers, 2);
    for (size_t i = 0; i < COUNT; i++) {
        const char *option = table[i].name;
        bool want = strcmp(option, "workers") == 0 || strcmp(option, "name") == 0 ||
                    strcmp(option, "config") == 0;
        assert_int_equal(owned.given[i], want);
    }
    moe_options_free(&owned);
    ok(parse(NULL));
    for (size_t i = 0; i < COUNT; i++)
        assert_false(owned.given[i]);
    unlink(path);
}

static void bad_files_are_refused_with_the_line(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        {"workers = 7\ncolour = red\n", "colour"},
        {"workers = 77\n", ":1"},
        {"colour = red\nworkers = 7\n", "unknown setting 'colour'"},
        {"[group]\nworkers = 7\n", "'workers' is in section [group]"},
        {"workers = 7\nname = ok\nnonsense\n", ":3"},
        {"verbose = perhaps\n", "verbose"},
        {"name = x\noptimizer = adamw # comment\n", ":2: optimizer: 'adamw # comment' is none of"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *path = write_config(cases[i][0]);
        struct moe_status st = parse(f_c, path, NULL);
        print_message("  %s\n", st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_non_null(strstr(st.text, cases[i][1]));
        moe_options_free(&owned); /* nothing is left to free after a failure */
        unlink(path);
    }
    char nowhere[] = "/nonexistent/settings";
    struct moe_status st = parse(f_c, nowhere, NULL);
    assert_int_equal(st.code, MOE_NOT_FOUND);
}

/* Bytes 200 and on of a comment were a line to inih, and an indented line was more of the value
 * before it. */
static void a_comment_of_any_length_is_one(void **unused)
{
    (void)unused;
    char text[512];
    for (int blanks = 150; blanks < 250; blanks++) {
        (void)snprintf(text, sizeof text, "# %*s workers = 9\nname = x\n\tmemory = 8K\n", blanks,
                       "");
        char *path = write_config(text);
        ok(parse(f_c, path, NULL));
        assert_int_equal(v.workers, 2);
        assert_string_equal(v.name, "x");
        assert_int_equal(v.memory, 8192);
        moe_options_free(&owned);
        unlink(path);
    }
}

static void a_long_setting_is_refused(void **unused)
{
    (void)unused;
    char text[512];
    for (int length = 1; length < 400; length++) {
        (void)snprintf(text, sizeof text, "workers = 3\nname = %0*d", length, 0);
        char *path = write_config(text);
        struct moe_status st = parse(f_c, path, NULL);
        if (length <= 190)
            assert_int_equal(st.code, MOE_OK);
        if (length >= 200)
            assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        if (moe_failed(&st))
            assert_non_null(strstr(st.text, ":2: not 'name = value', or too long"));
        else
            assert_int_equal(strlen(v.name), length);
        moe_options_free(&owned);
        unlink(path);
    }
}

static void a_file_with_a_zero_byte_is_refused(void **unused)
{
    (void)unused;
    static const char text[] = "name = x\nworkers = 3\0verbose = true\n";
    char *path = write_config("");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, sizeof text - 1, file), sizeof text - 1);
    assert_int_equal(fclose(file), 0);
    struct moe_status st = parse(f_c, path, NULL);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    assert_non_null(strstr(st.text, ":2: not"));
    unlink(path);
}

/* A read of /dev/zero never ends, and an open of a FIFO waits for a writer. */
static void a_file_that_is_not_regular_is_refused(void **unused)
{
    (void)unused;
    char folder[] = "/", device[] = "/dev/zero";
    char *fifo = write_config(""), *const paths[] = {folder, device, fifo};
    unlink(fifo);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct moe_status st = parse(f_c, paths[i], NULL);
        print_message("  %s\n", st.text);
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_non_null(strstr(st.text, "is not a regular file"));
    }
    unlink(fifo);
}

static void a_file_above_the_limit_is_refused(void **unused)
{
    (void)unused;
    static char text[MOE_OPTIONS_FILE_MAX + 2];
    memset(text, '#', MOE_OPTIONS_FILE_MAX + 1);
    char *path = write_config(text);
    struct moe_status st = parse(f_c, path, NULL);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    assert_int_equal(st.reason, MOE_REASON_TOO_LARGE);
    unlink(path);
    text[MOE_OPTIONS_FILE_MAX] = '\0';
    path = write_config(text);
    ok(parse(f_c, path, NULL));
    moe_options_free(&owned);
    unlink(path);
}

static void the_help_lists_every_option_with_its_default(void **unused)
{
    (void)unused;
    char *text;
    size_t length;
    v = (struct values){
        .workers = 2, .memory = 1 << 20, .rate = 0.5, .name = "default", .layer = MOE_OPTION_UNSET};
    FILE *to = open_memstream(&text, &length);
    assert_non_null(to);
    moe_options_print(to, table, COUNT, SIZE_MAX);
    fclose(to);
    print_message("%s", text);
    for (size_t i = 0; i < COUNT; i++) {
        if (table[i].kind == MOE_OPTION_RENAMED) {
            assert_null(strstr(text, table[i].name));
            continue;
        }
        assert_non_null(strstr(text, table[i].name));
        assert_non_null(strstr(text, table[i].help));
    }
    assert_non_null(strstr(text, "-n, --workers N"));
    assert_non_null(strstr(text, "[2]"));
    assert_non_null(strstr(text, "[1M]"));
    assert_null(strstr(text, "[18446744073709551615]"));
    assert_non_null(strstr(text, "[default]"));
    assert_non_null(strstr(text, "[off]")); /* the first choice: none is preset */
    free(text);
}

static char *help_of(size_t columns)
{
    char *text;
    size_t length;
    FILE *to = open_memstream(&text, &length);
    assert_non_null(to);
    moe_options_print(to, table, COUNT, columns);
    fclose(to);
    return text;
}

/* The same words, and no line is longer unless one word is. */
static void the_help_breaks_lines_before_the_last_column(void **unused)
{
    (void)unused;
    char *plain = help_of(SIZE_MAX);
    for (size_t columns = 60; columns < 100; columns++) {
        char *text = help_of(columns);
        const char *p = plain, *t = text;
        for (; *p != '\0' || *t != '\0'; p++, t++) {
            p += strspn(p, " \n");
            t += strspn(t, " \n");
            assert_int_equal(*p, *t);
            if (*p == '\0')
                break;
        }
        for (t = text; *t != '\0'; t += strcspn(t, "\n") + 1)
            assert_in_range(strcspn(t, "\n"), 1, columns);
        free(text);
    }
    free(plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_are_read_in_every_spelling),
        cmocka_unit_test(bad_flags_are_refused_with_their_name),
        cmocka_unit_test(a_flag_beats_the_file_and_the_file_the_default),
        cmocka_unit_test(what_was_given_is_known_from_a_default),
        cmocka_unit_test(bad_files_are_refused_with_the_line),
        cmocka_unit_test(a_comment_of_any_length_is_one),
        cmocka_unit_test(a_long_setting_is_refused),
        cmocka_unit_test(a_file_with_a_zero_byte_is_refused),
        cmocka_unit_test(a_file_that_is_not_regular_is_refused),
        cmocka_unit_test(a_file_above_the_limit_is_refused),
        cmocka_unit_test(the_help_lists_every_option_with_its_default),
        cmocka_unit_test(the_help_breaks_lines_before_the_last_column),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
